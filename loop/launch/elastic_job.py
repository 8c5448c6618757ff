"""Elastic jobs: workers may be lost and join, and the others go on. Imports no TensorFlow.

The workers that train together are a *generation*. When one of them is lost, or another one has started, the launcher
plans the next generation. It writes the plan to `plan.json` in the job's directory: the members, and where they meet. A
worker that has lost the others, or reads at a boundary between calls that there is a newer plan, leaves its generation
and takes its place in the newest one (`loop.launch.member`). The oldest worker is the chief: all others continue from
its state. The job's directory belongs to the user alone; host agents keep copies of it on other hosts
(`loop.launch.hosts`). The rendezvous is bound to loopback, or to the address where the hosts meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.files import read_json, write_text
from loop.errors import UsageError
from loop.launch import machine, signals
from loop.launch.elastic_limits import Limits, discovered_slots
from loop.launch.environment import WORKER, start_timeout
from loop.launch.fixed_job import heard_by, job_directory
from loop.launch.member import PLAN
from loop.launch.output import Output
from loop.launch.process import WorkerProcess, start_worker

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster, Host, Remote

MOST_STARTS, WITHIN = 10, 600.0
"""So often workers are started again at most within so many seconds: something else is wrong then."""
_PAUSE = 1.0  # seconds before a worker is started again
_GRACE = 10.0  # seconds that workers have to end by themselves when another one has failed, has finished, or is gone


def run_elastic_job(
    given: Limits, workers: int | None, arguments: Sequence[str], cluster: Cluster | None = None
) -> tuple[int, str, Any]:
    """Runs `tfloop` with these arguments in an elastic job, on this machine or on hosts; see `launch.run`."""
    if cluster is not None:
        cluster.interfaces()  # what Horovod can't do there is said before anything starts
    else:
        machine.check_gpus(given.high)
    slots = given.high if given.discovery is None else discovered_slots(given.discovery)
    wanted = workers or max(given.low, min(given.high, slots))
    with job_directory() as (directory, environment):
        job = ElasticJob(given, wanted, directory, environment | {"HOROVOD_SIZE": str(wanted)}, arguments, cluster)
        try:
            with heard_by(job.hear):
                job.run()
            return job.outcome()
        finally:
            job.kill()


@dataclasses.dataclass
class _ElasticWorker:
    """A worker that lives.

    Attributes:
        name: which no other one has had.
        process: its process.
        host: where it is; None: on this machine.
        place: the last generation in which it was given a place; -1: none.
        before: the one before that.
    """

    name: str
    process: WorkerProcess | Remote
    host: Host | None = None
    place: int = -1
    before: int = -1

    @property
    def address(self) -> str:
        """Where Horovod finds it."""
        return self.host.address if self.host is not None else "localhost"

    def __str__(self) -> str:
        return f"worker {self.name}{self.process.where}"


class ElasticJob:
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
        self._output = Output()
        self._timeout = start_timeout()
        self._servers = contextlib.ExitStack()
        self._hosts: list[Host] = []  # that aren't lost
        self._workers: list[_ElasticWorker] = []  # that live, oldest first
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

    def _ended(self, worker: _ElasticWorker) -> None:
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
            place = {WORKER: name, "HOROVOD_RANK": name}
            if self._cluster is None:
                command = [sys.executable, "-P", "-m", "cli", *self._arguments]
                process = start_worker(command, self._environment | place)
                self._workers.append(_ElasticWorker(name, process))
                self._output.follow(process, name)
                continue
            taken = [worker.host for worker in self._workers]
            host = next(host for host in self._hosts if taken.count(host) < host.slots)
            [remote] = host.start(
                {int(name): place}, self._arguments, self._environment, self._directory, self._output.take
            )
            self._workers.append(_ElasticWorker(name, remote, host))

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

    def _end_stuck(self, members: list[_ElasticWorker]) -> None:
        """Ends those that still connect in a generation of which somebody died: Horovod would, after minutes."""
        for worker in members:
            if max(self._number(worker, "waits"), self._number(worker, "joined")) < worker.before:
                self._tell(f"{worker} still waits in Horovod for one that is gone, and can't be called back: ended")
                worker.before = -1
                worker.process.kill()

    def _form(self, chosen: list[_ElasticWorker], dropped: list[_ElasticWorker]) -> None:
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

    def _event(self, event: str, worker: _ElasticWorker, **more: Any) -> None:
        generation = max(self._generation, 0) + (event == "worker_gone")
        self._events.append({"generation": generation, "event": event, "worker": worker.name, **more})

    def _tell(self, text: str) -> None:
        self._output.line(f"elastic: {text}")

    def _hand_on(self) -> None:
        if self._stops and not self._announced and any(self._directory.glob("rank-*.trains")):
            self._announced = True
            self._output.line(signals.STOPPING)
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
                self._wanted = max(self._limits.low, min(self._limits.high, discovered_slots(script)))
            except UsageError as error:
                if str(error) != said:
                    said = str(error)
                    self._tell(f"warning: {said}")

    def _path(self, worker: _ElasticWorker, what: str) -> Path:
        return self._directory / f"rank-{worker.name}.{what}"

    def _number(self, worker: _ElasticWorker, what: str) -> int:
        """The generation that a worker has noted; -1: none."""
        try:
            return int(self._path(worker, what).read_text())
        except FileNotFoundError:
            return -1
