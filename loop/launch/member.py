"""A worker's side of an elastic job: it leaves a broken generation, and takes its place in the next one.

The workers that train together are a *generation*; `loop.launch.elastic_job` plans them. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from callbacks.files import read_json, write_text
from loop.errors import PeerError
from loop.launch.environment import JOB, WORKER

if TYPE_CHECKING:
    from loop.checkpoint.kept import Kept

PLAN = "plan.json"
"""The file in the job's directory in which the launcher writes the newest plan."""

Event = dict[str, int | str]
"""That a worker has joined or is gone: the generation that records it, and what the journal has of it."""


class PlanFile(TypedDict):
    """The newest plan."""

    generation: int  # its number
    broken: int  # the newest generation that has lost a worker or a connection; -1: none
    events: Sequence[Event]  # all events of the job
    places: Mapping[str, dict[str, str]]  # the environment variables of each member's place, by the name of the worker
    dropped: Sequence[str]  # the names of workers that are to end
    end: str  # why the job has ended; "": it goes on
    keeper: str  # the worker that saves the run when the job ends; "": there is none
    run: str  # the run directory; "": there is none yet


_NO_PLAN = PlanFile(generation=-1, broken=-1, events=(), places={}, dropped=(), end="", keeper="", run="")


class SupersededError(Exception):
    """A newer generation was planned while the workers of this one were still connecting."""


class Member:
    """A worker of an elastic job: which generation it is in, and what has been planned since.

    Attributes:
        generation: its generation; -1: it has had no place yet.
        events: which workers have joined or been lost since its last generation, for the journal.
        kept: a snapshot of the run in this worker's memory, from which the next generation goes on.
    """

    def __init__(self) -> None:
        self._job = Path(os.environ[JOB])
        self._worker = os.environ[WORKER]
        self.generation = -1
        self.events: list[Event] = []
        self.kept: Kept | None = None
        self._plan = _NO_PLAN
        self._run = ""
        self._sockets: set[str] = set()  # those of the backend, while it is connected
        threading.Thread(target=self._watch, name="elastic", daemon=True).start()

    @property
    def changed(self) -> bool:
        """Whether a newer generation is planned."""
        return self._plan["generation"] > self.generation

    @property
    def run_directory(self) -> Path | None:
        """The job's run directory; None: no worker has made it yet. A worker that has made it may have died since."""
        path = self._run or self._plan["run"]
        return Path(path) if path else None

    @run_directory.setter
    def run_directory(self, path: Path | None) -> None:
        self._run = str(path)
        self._note("run", self._run)

    def join(self, start: Callable[[Callable[[], None]], None]) -> None:
        """Takes this worker's place in the newest generation, as soon as there is one.

        Args:
            start: starts the backend. Its argument is a function for it to call while it waits for the other workers,
                which raises `SupersededError` if there is a newer plan.

        Raises:
            PeerError: the job has ended; with the reason.
        """
        while True:
            # The launcher gives a place only to workers that have noted this.
            self._note("waits", self.generation)
            while not self.changed:
                time.sleep(0.02)
            plan = self._plan  # read once: the thread of `_watch` replaces it
            if plan["end"]:
                if plan["keeper"] == self._worker and self.kept:
                    self.kept.save()
                raise PeerError(plan["end"])
            last = self.generation
            # Before `_start`: from now on, `changed` means a plan that is newer than this one.
            self.generation = plan["generation"]
            if self._worker in plan["places"]:
                if self._start(start, plan["places"][self._worker]):
                    self.events = [event for event in plan["events"] if int(event["generation"]) > last]
                    return
            elif self._worker in plan["dropped"]:
                os._exit(0)  # it needn't save anything: the other workers have the same state

    def _start(self, start: Callable[[Callable[[], None]], None], place: Mapping[str, str]) -> bool:
        """Starts the backend in a place; returns False if a newer generation was planned meanwhile."""
        os.environ.update(place)
        # What is open after the start, and wasn't before, is the backend's. `cut` closes nothing else.
        before = _open_sockets()
        try:
            start(self._check)
        except SupersededError:
            return False
        self._sockets = _open_sockets() - before
        self._note("joined", self.generation)
        return True

    def cut(self) -> None:
        """Closes this worker's sockets, so that blocked peers and its own collective fail at once.

        Horovod leaves some open when an error has shut it down. A worker that is blocked in a collective would then
        wait for a peer that has left the collective.
        """
        sockets = self._sockets
        self._sockets = set()  # at once: `_watch`, in another thread, cuts as long as there are any
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
                # A new plan replaces the file, so that none is read half-written, and most often has a new inode.
                version = (status.st_ino, status.st_mtime_ns)
                if version != seen:
                    seen = version
                    # A plan that can't be read leaves the one before: the job's directory is being removed.
                    self._plan = cast("PlanFile", read_json(self._job / PLAN) or self._plan)
            if self._sockets and self._plan["broken"] >= self.generation:
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
