"""Elastic jobs: workers may die and come back, and those that are there go on. Imports no TensorFlow.

Those that train together are a *generation*. When one of them dies, or another one has started, the launcher plans the
next: a file in the job's directory, `plan.json`, says who is in it, and where they meet. Who has lost the others, or is
told so at a boundary between calls, leaves his generation and takes his place in the newest one; the oldest worker is
its chief, and has what all go on from. All of it lies in a directory of the user's own, of which agents keep copies on
other hosts (`loop.launch.hosts`); the rendezvous is bound to loopback, or to the address where the hosts meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.files import read_json, write_text
from loop.errors import PeerError, UsageError
from loop.launch import launcher, signals

if TYPE_CHECKING:
    from loop.checkpoint.kept import Kept
    from loop.launch.hosts import Cluster, Host, Remote

PLAN = "plan.json"
MOST_STARTS, WITHIN = 10, 600.0
"""So often workers are started again at most within so many seconds: something else is wrong then."""
_PAUSE = 1.0  # seconds before a worker is started again
_GRACE = 10.0  # seconds that workers have to end by themselves when another one has failed, has finished, or is gone


@dataclasses.dataclass
class Limits:
    """How many workers a job may have.

    Attributes:
        low: it can't go on with fewer.
        high: no more are started.
        discovery: a script that prints how many this machine has room for; None: as many as at the start.
    """

    low: int
    high: int
    discovery: Path | None = None


def limits(
    text: str | None, discovery: Path | None, backend: str, workers: int | None, hosts: str | None = None
) -> Limits | None:
    """What `--elastic MIN:MAX` and `--discovery SCRIPT` say; None where they aren't given.

    Raises:
        UsageError: numbers that make no sense, or an engine that isn't elastic.
    """
    if text is None:
        if discovery is not None:
            raise UsageError(f"--discovery {discovery} without --elastic: say how many workers there may be: MIN:MAX")
        return None
    if not re.fullmatch(r"\d+:\d+", text, re.ASCII):
        raise UsageError(f"--elastic {text}: give the least and the greatest number of workers, such as 1:4")
    low, high = map(int, text.split(":"))
    if low < 1:
        raise UsageError(f"--elastic {text}: a job needs at least 1 worker")
    if low > high:
        raise UsageError(f"--elastic {text}: MIN is greater than MAX: give {high}:{low}")
    if workers is not None and not low <= workers <= high:
        given = f"--hosts {hosts} has {workers} workers," if hosts else f"--workers {workers}"
        raise UsageError(f"{given} with --elastic {text}: give a number from {low} to {high}")
    if discovery is not None and hosts is not None:
        raise UsageError(f"--discovery {discovery} with --hosts {hosts}: it is asked for this machine: leave one out")
    if backend not in ("auto", "horovod"):
        raise UsageError(f"--elastic {text} with --backend {backend}: only horovod can go on without a worker")
    if launcher.job_size() is not None and launcher.WORKER not in os.environ:
        raise UsageError(f"--elastic {text}: this job has a launcher of its own: leave one of them out")
    if discovery is not None and not os.access(discovery, os.X_OK):
        raise UsageError(f"--discovery {discovery}: there is no such script, or it can't be run (chmod +x)")
    return Limits(low, high, discovery)


def discovered(script: Path) -> int:
    """How many workers the script's lines `host:slots` allow on this machine.

    Raises:
        UsageError: it failed, or prints something else.
    """
    try:
        done = subprocess.run([script.absolute()], capture_output=True, text=True, timeout=30, check=True)
    except OSError as error:
        raise UsageError(
            f"--discovery {script} can't be run ({error.strerror}): is its first line such as #!/bin/sh?"
        ) from None
    except subprocess.SubprocessError as error:
        raise UsageError(f"--discovery {script}: {error}") from None
    slots = 0
    for line in done.stdout.split():
        host, _, count = line.partition(":")
        if host not in ("localhost", "127.0.0.1", socket.gethostname()) or not (count or "1").isdecimal():
            raise UsageError(
                f"--discovery {script} printed {line!r}: give localhost:SLOTS; elastic workers run on this machine"
            )
        slots += int(count or 1)
    return slots


# In a worker


class SupersededError(Exception):
    """A newer generation has been planned while this one met."""


class Member:
    """A worker of an elastic job: which generation it is in, and what has been planned since.

    Attributes:
        generation: the one it is in; -1 at first.
        events: what to tell of workers that came and went since the one before.
        kept: what this worker keeps in memory of the run, for the next generation to go on from.
    """

    def __init__(self) -> None:
        self._job, self._worker = Path(os.environ[launcher.JOB]), os.environ[launcher.WORKER]
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
        """The job's run directory, once it has one: this worker was told, or others were, before they died."""
        path = self._run or self._plan["run"]
        return Path(path) if path else None

    @run_directory.setter
    def run_directory(self, path: Path | None) -> None:
        self._run = str(path)
        self._note("run", self._run)

    def join(self, start: Callable[[Callable[[], None]], None]) -> None:
        """Takes this worker's place in the newest generation, as soon as there is one.

        Args:
            start: starts the engine; is given a function that raises `SupersededError`, to be called while it waits.

        Raises:
            PeerError: the job has ended: why.
        """
        while True:
            self._note("waits", self.generation)
            while not self.changed:
                time.sleep(0.02)
            plan = self._plan
            if plan["end"]:
                if plan["keeper"] == self._worker and self.kept:
                    self.kept.save()
                raise PeerError(plan["end"])
            place = plan["places"].get(self._worker)
            last, self.generation = self.generation, plan["generation"]
            if place is None:
                if self._worker in plan["dropped"]:
                    os._exit(0)  # it has nothing that the others haven't
                continue
            os.environ.update(place)
            before = _sockets()
            try:
                start(self._check)
            except SupersededError:
                continue
            self._sockets = _sockets() - before
            self._note("joined", self.generation)
            self.events = [event for event in plan["events"] if event["generation"] > last]
            return

    def cut(self) -> None:
        """Ends the connections to the other workers: whoever waits for this one hears of it, and this one of itself.

        Horovod leaves some open when it has been shut down by an error, and a worker that is blocked in a collective
        may wait for one that waits for nobody.
        """
        wanted, self._sockets = self._sockets, set()
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()) in wanted:
                    with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                        connection.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self.changed:
            raise SupersededError

    def _note(self, what: str, value: object) -> None:
        write_text(self._job / f"rank-{self._worker}.{what}", str(value))

    def _watch(self) -> None:
        seen = (0, 0)
        while True:
            with contextlib.suppress(OSError):
                about = (self._job / PLAN).stat()
                if (about.st_ino, about.st_mtime_ns) != seen:
                    seen, self._plan = (about.st_ino, about.st_mtime_ns), read_json(self._job / PLAN)
            if self._sockets and self._plan.get("broken", -1) >= self.generation:
                self.cut()
            time.sleep(0.1)


def _sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := str(descriptor.readlink())).startswith("socket:"):
                found.add(target)
    return found


# In the launcher


def run(
    given: Limits, workers: int | None, arguments: Sequence[str], cluster: Cluster | None = None
) -> tuple[int, str, Any]:
    """Runs `tfloop` with these arguments in an elastic job, on this machine or on hosts; see `launch.run`."""
    if cluster is not None:
        cluster.interfaces()  # what Horovod can't do there is said before anything starts
    else:
        launcher.check_gpus(given.high)
    slots = given.high if given.discovery is None else discovered(given.discovery)
    wanted = workers or max(given.low, min(given.high, slots))
    with launcher.place_of_job() as (directory, environment):
        job = _Job(given, wanted, directory, environment | {"HOROVOD_SIZE": str(wanted)}, arguments, cluster)
        try:
            with launcher.heard_by(job.hear):
                job.run()
            return job.outcome()
        finally:
            job.kill()


@dataclasses.dataclass
class _Worker:
    """A worker that lives.

    Attributes:
        name: which no other one has had.
        process: its process.
        host: where it is; None: on this machine.
        place: the last generation in which it was given a place; -1: none.
        before: the one before that.
    """

    name: str
    process: launcher.Worker | Remote
    host: Host | None = None
    place: int = -1
    before: int = -1

    @property
    def address(self) -> str:
        """Where Horovod finds it."""
        return self.host.address if self.host is not None else "localhost"

    def __str__(self) -> str:
        return f"worker {self.name}{self.process.where}"


class _Job:
    """An elastic job: what the launcher knows of its workers, and plans for them."""

    def __init__(
        self,
        given: Limits,
        wanted: int,
        directory: Path,
        environment: dict[str, str],
        arguments: Sequence[str],
        cluster: Cluster | None,
    ) -> None:
        self._limits, self._wanted, self._directory, self._environment = given, wanted, directory, environment
        self._arguments, self._cluster = arguments, cluster
        self._output = launcher._Output()
        self._timeout = launcher.start_timeout()
        self._servers = contextlib.ExitStack()
        self._hosts: list[Host] = []  # that aren't lost
        self._workers: list[_Worker] = []  # that live, oldest first
        self._started = 0
        self._restarts: list[float] = []
        self._generation = self._broken = -1
        self._events: list[dict[str, Any]] = []
        self._not_before = 0.0  # when a worker may be started again
        self._short_since = time.monotonic()  # since when there are too few, or as long as none has trained
        self._formed = 0.0  # when the generation was planned
        self._over_by = float("inf")  # when all must have ended
        self._reports: list[dict[str, Any]] = []
        self._problem = ""
        self._wishes = signals.Wishes()
        self._saves = 0  # how often SIGUSR1 was heard, and not handed on
        self._announced = False  # whether it was told that the job stops
        self._told: set[tuple[str, int]] = set()

    def hear(self, number: int, frame: Any) -> None:
        """Takes a signal; `run` hands it on."""
        if number == signal.SIGUSR1:
            self._saves += 1
        else:
            self._wishes.hear(number)

    def run(self) -> None:
        """Runs it to its end."""
        if self._limits.discovery is not None:
            threading.Thread(target=self._discover, args=(self._limits.discovery,), daemon=True).start()
        with self._servers:
            while True:
                if self._cluster is not None:  # before its workers are looked at, which end with it
                    self._hosts = [host for host in self._cluster.hosts if not host.lost]
                    self._wanted = sum(host.slots for host in self._hosts)
                for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
                    self._workers.remove(worker)
                    self._ended(worker)
                self._hand_on()
                if self._over_by == float("inf"):
                    if not self._stops:
                        self._start_missing()
                    self._plan_next()
                elif time.monotonic() > self._over_by:
                    self.kill()
                if not self._workers and (self._over_by < float("inf") or self._stops):
                    break
                time.sleep(0.05)
        if self._cluster is not None:
            for host in self._cluster.hosts:
                host.over()
            self._output.threads += self._cluster.threads
        for thread in self._output.threads:
            thread.join()

    def kill(self) -> None:
        """Kills all that is left of the job, at once: each worker is a group of processes."""
        for worker in self._workers:
            worker.process.kill()

    def outcome(self) -> tuple[int, str, Any]:
        """What `run` returns."""
        result = next((report["result"] for report in self._reports if report["result"] is not None), None)
        if self._problem:
            return 1, self._problem, result
        failures = [
            (each["echo"], each["time"], each["code"], each["error"])
            for each in self._reports
            if each["code"] not in (0, 75)
        ]
        if failures:
            _, _, code, said = min(failures)
            return code, said, result
        return (0 if any(report["code"] == 0 for report in self._reports) else 75), "", result

    @property
    def _stops(self) -> int:
        return self._wishes.count

    def _ended(self, worker: _Worker) -> None:
        """Takes in that a worker has ended: it has finished or failed, and says so; or it is lost."""
        report = read_json(self._path(worker, "json"))
        process = worker.process
        process.kill()  # what it may have left behind
        if report:
            if report["error"]:
                report["error"] = f"{worker}: {report['error']}"
            self._reports.append(report)
            if report["code"] not in (0, 75):
                self._end("another worker has failed")
            self._over_by = min(self._over_by, time.monotonic() + _GRACE)
            for other in self._workers:
                if other.place < 0:
                    other.process.kill()  # it still waits for a place
            return
        if self._over_by < float("inf") or self._stops or not process.returncode:
            return
        code = process.returncode
        how = f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        if worker.host is not None and worker.host.lost:
            how = f"host {worker.host.name} is gone: {worker.host.lost}"
        self._tell(f"{worker} is gone: {how}")
        if worker.place == self._generation:
            self._broken = self._generation
        if worker.place >= 0:
            self._event("worker_gone", worker, how=how)
        self._not_before = time.monotonic() + _PAUSE

    def _start_missing(self) -> None:
        now = time.monotonic()
        self._restarts = [each for each in self._restarts if now - each < WITHIN]
        while len(self._workers) < self._wanted and now >= self._not_before:
            if self._started >= self._wanted and now not in self._restarts:  # those that died together count once
                if len(self._restarts) >= MOST_STARTS:
                    return
                self._restarts.append(now)
            name = str(self._started)
            self._started += 1
            place = {launcher.WORKER: name, "HOROVOD_RANK": name}
            if self._cluster is None:
                command = [sys.executable, "-P", "-m", "cli", *self._arguments]
                process = launcher.start_worker(command, self._environment | place)
                self._workers.append(_Worker(name, process))
                self._output.follow(process, name)
                continue
            taken = [worker.host for worker in self._workers]
            host = next(host for host in self._hosts if taken.count(host) < host.slots)
            [remote] = host.start(
                {int(name): place}, self._arguments, self._environment, self._directory, self._output.take
            )
            self._workers.append(_Worker(name, remote, host))

    def _plan_next(self) -> None:
        """Plans the next generation, if there must be one, or may be."""
        members = [worker for worker in self._workers if worker.place == self._generation >= 0]
        if any(self._number(worker, "waits") == self._generation for worker in members):
            self._broken = self._generation  # a connection was lost, but nobody died
        intact = self._broken < self._generation
        if intact and any(self._number(worker, "joined") < self._generation for worker in members):
            if time.monotonic() - self._formed > _GRACE:
                self._end_stuck(members)
            return  # it hasn't met yet, and can't be called back
        ready = [
            worker
            for worker in self._workers
            if worker not in members and self._number(worker, "waits") >= worker.place
        ]
        ready = [worker for worker in ready if self._path(worker, "waits").exists()]
        chosen = (members + ready)[: self._wanted]
        if chosen == members and intact and members:
            self._short_since = time.monotonic()
            return
        waited = time.monotonic() - self._short_since > self._timeout
        fewest = 1 if self._stops else self._limits.low
        if len(chosen) < fewest or (not members and len(chosen) < self._wanted and not waited):
            if waited:
                self._problem = (
                    f"{len(chosen)} of at least {fewest} workers (--elastic) are there, and no other one has started "
                    f"within {self._timeout:g} s: look at what is printed above; start again to go on"
                )
                self._end(self._problem, chosen[0].name if chosen else "")
            return
        self._form(chosen, [worker for worker in members if worker not in chosen])

    def _end_stuck(self, members: list[_Worker]) -> None:
        """Ends those that still connect in a generation of which somebody died: Horovod would, after minutes."""
        for worker in members:
            if max(self._number(worker, "waits"), self._number(worker, "joined")) < worker.before:
                self._tell(f"{worker} still waits in Horovod for one that is gone, and can't be called back: ended")
                worker.before = -1
                worker.process.kill()

    def _form(self, chosen: list[_Worker], dropped: list[_Worker]) -> None:
        from loop.launch.horovodrun import rendezvous

        self._generation += 1
        shares = Counter(worker.address for worker in chosen)
        chosen.sort(key=lambda worker: list(shares).index(worker.address))  # as ranks are dealt out, host by host
        places = self._servers.enter_context(rendezvous(len(chosen), self._cluster, shares))
        for worker in chosen:
            if worker.place < 0 and self._generation:
                self._tell(f"{worker} joins: {len(chosen)} workers from the next boundary on")
            if worker.place < 0:
                self._event("worker_joined", worker)
            worker.before, worker.place = worker.place, self._generation
        for worker in dropped:
            self._tell(f"{worker} is sent away")
            self._event("worker_gone", worker, how="sent away")
        if self._broken == self._generation - 1 >= 0:
            self._tell(f"going on with {len(chosen)} worker{'s' * (len(chosen) > 1)}")
        self._write(
            places={worker.name: place for worker, place in zip(chosen, places, strict=True)},
            dropped=[worker.name for worker in dropped],
        )
        self._short_since = self._formed = time.monotonic()

    def _end(self, reason: str, keeper: str = "") -> None:
        """Tells all workers that wait for a place that there will be none."""
        self._broken = self._generation
        self._generation += 1
        self._write(end=reason, keeper=keeper)
        self._over_by = time.monotonic() + (60 if keeper else _GRACE)

    def _write(self, **more: Any) -> None:
        plan = {
            "generation": self._generation, "broken": self._broken, "events": self._events, "places": {}, "dropped": [],
            "end": "", "keeper": "", **more,
            "run": next((path.read_text() for path in self._directory.glob("rank-*.run")), ""),
        }  # fmt: skip
        if self._cluster is not None:
            for host in self._cluster.hosts:
                host.send(file=PLAN, text=json.dumps(plan))
        write_text(self._directory / PLAN, json.dumps(plan))

    def _event(self, event: str, worker: _Worker, **more: Any) -> None:
        generation = max(self._generation, 0) + (event == "worker_gone")
        self._events.append({"generation": generation, "event": event, "worker": worker.name, **more})

    def _tell(self, text: str) -> None:
        self._output.line(f"elastic: {text}")

    def _hand_on(self) -> None:
        if self._stops and not self._announced and any(self._directory.glob("rank-*.trains")):
            self._announced = True
            self._output.line(launcher.STOPPING)
        if self._stops > 1 and not self._problem:
            self._problem = "ended at once by a second signal; checkpoints that were there are as they were"
            self._over_by = 0.0
        for worker in self._workers if self._stops else ():
            # TensorFlow swallows a SIGTERM while an engine starts, and a generation doesn't know what the one before
            # has heard: until it has met it is sent again.
            heard = worker.name, worker.place
            if heard not in self._told:
                if 0 <= worker.place <= self._number(worker, "joined"):
                    self._told.add(heard)
                worker.process.send_signal(signal.SIGTERM)
        while self._saves:
            self._saves -= 1
            for worker in self._workers:
                if self._path(worker, "pid").exists():  # it would kill one that is younger
                    worker.process.send_signal(signal.SIGUSR1)

    def _discover(self, script: Path) -> None:
        said = ""
        while True:
            time.sleep(1.0)
            try:
                self._wanted = max(self._limits.low, min(self._limits.high, discovered(script)))
            except UsageError as error:
                if str(error) != said:
                    said = str(error)
                    self._tell(f"warning: {said}")

    def _path(self, worker: _Worker, what: str) -> Path:
        return self._directory / f"rank-{worker.name}.{what}"

    def _number(self, worker: _Worker, what: str) -> int:
        """The generation that a worker has noted; -1: none."""
        try:
            return int(self._path(worker, what).read_text())
        except FileNotFoundError:
            return -1
