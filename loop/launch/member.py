"""A worker's side of an elastic job: it leaves a generation that is broken, and takes its place in the next one.

The workers that train together are a *generation*; `loop.launch.elastic_job` plans them. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.files import read_json, write_text
from loop.errors import PeerError
from loop.launch.environment import JOB, WORKER

if TYPE_CHECKING:
    from loop.checkpoint.kept import Kept

PLAN = "plan.json"
"""The file in the job's directory in which the launcher writes the newest plan."""


class SupersededError(Exception):
    """A newer generation was planned while the workers of this one were still connecting."""


class Member:
    """A worker of an elastic job: which generation it is in, and what has been planned since.

    Attributes:
        generation: the one it is in; -1 at first.
        events: which workers have joined or been lost since its last generation, for the journal.
        kept: a snapshot of the run in this worker's memory, from which the next generation goes on.
    """

    def __init__(self) -> None:
        self._job = Path(os.environ[JOB])
        self._worker = os.environ[WORKER]
        self.generation = -1
        self.events: list[dict[str, Any]] = []
        self.kept: Kept | None = None
        self._plan: dict[str, Any] = {"generation": -1}
        self._run = ""
        self._sockets: set[str] = set()
        threading.Thread(target=self._watch, name="elastic", daemon=True).start()

    @property
    def changed(self) -> bool:
        """Whether there is a newer generation."""
        return bool(self._plan["generation"] > self.generation)

    @property
    def run_directory(self) -> Path | None:
        """The job's run directory, once this worker or another one has made it; that one may have died since."""
        path = self._run or self._plan["run"]
        return Path(path) if path else None

    @run_directory.setter
    def run_directory(self, path: Path | None) -> None:
        self._run = str(path)
        self._note("run", self._run)

    def join(self, start: Callable[[Callable[[], None]], None]) -> None:
        """Takes this worker's place in the newest generation, as soon as there is one.

        Args:
            start: starts the backend. Its argument is a function that it calls while it waits for the other workers:
                if there is a newer plan, that raises `SupersededError`.

        Raises:
            PeerError: the job has ended; with the reason.
        """
        while True:
            # The launcher gives a place only to workers that have noted this.
            self._note("waits", self.generation)
            while not self.changed:
                time.sleep(0.02)
            plan = self._plan
            if plan["end"]:
                if plan["keeper"] == self._worker and self.kept:
                    self.kept.save()
                raise PeerError(plan["end"])
            place = plan["places"].get(self._worker)
            last = self.generation
            self.generation = plan["generation"]
            if place is None:
                if self._worker in plan["dropped"]:
                    os._exit(0)  # it needn't save anything: the other workers have the same state
                continue
            os.environ.update(place)
            before = _open_sockets()
            try:
                start(self._check)
            except SupersededError:
                continue
            self._sockets = _open_sockets() - before  # those of the backend, for `cut`
            self._note("joined", self.generation)
            self.events = [event for event in plan["events"] if event["generation"] > last]
            return

    def cut(self) -> None:
        """Closes this worker's sockets, so that blocked peers and its own collective fail at once.

        Horovod leaves some open when an error has shut it down. A worker that is blocked in a collective would then
        wait for a peer that has left the collective.
        """
        sockets = self._sockets
        self._sockets = set()
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in sockets:
                    # A copy of the descriptor: Horovod still closes its own.
                    with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                        connection.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self.changed:
            raise SupersededError

    def _note(self, what: str, value: object) -> None:
        write_text(self._job / f"rank-{self._worker}.{what}", str(value))

    def _watch(self) -> None:
        """Reads each new plan; cuts this worker's connections when its generation is broken."""
        seen = (0, 0)
        while True:
            with contextlib.suppress(OSError):
                status = (self._job / PLAN).stat()
                version = (status.st_ino, status.st_mtime_ns)
                if version != seen:
                    seen = version
                    self._plan = read_json(self._job / PLAN)
            if self._sockets and self._plan.get("broken", -1) >= self.generation:
                self.cut()
            time.sleep(0.1)


def _open_sockets() -> set[str]:
    """The sockets that this process has open."""
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            name = str(descriptor.readlink())
            if name.startswith("socket:"):
                sockets.add(name)
    return sockets
