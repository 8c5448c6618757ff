"""Elastic jobs: workers may be lost and join, and the others go on. Imports no TensorFlow.

The workers that train together are a *generation*. When one of them is lost, or another one has started, the launcher
plans the next generation. It writes the plan to `plan.json` in the job's directory: the members, and where they meet. A
worker that has lost the others, or finds a newer plan at a boundary between calls, leaves its generation and takes its
place in the newest one (`loop.launch.member`). The oldest worker is the chief: all others continue from its state. The
job's directory belongs to the user alone; host agents keep copies of it on other hosts (`loop.launch.hosts`). The
rendezvous is bound to loopback, or to the address where the hosts meet.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from callbacks.files import read_json
from callbacks.formats import plural
from loop.errors import PREEMPTED
from loop.launch import machine
from loop.launch.elastic_limits import Limits, discovered_slots, discovering
from loop.launch.elastic_plan import Plan
from loop.launch.elastic_workers import ElasticWorker, ElasticWorkers
from loop.launch.environment import start_timeout
from loop.launch.job import ENDED_AT_ONCE, Failure, Job, JobWorker, Outcome, exit_text, job_directory

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster
    from loop.launch.worker import Report

_GRACE = 10.0  # seconds that workers have to end by themselves when another one has failed, has finished, or is lost
_SAVE_GRACE = 60.0  # seconds that a worker has to save and end when the job ends for lack of workers
_GOES_ON = float("inf")  # the end of a job that isn't to end


def run_elastic_job(
    limits: Limits, workers: int | None, arguments: Sequence[str], cluster: Cluster | None = None
) -> Outcome:
    """Runs `tfloop` with these arguments in an elastic job, on this machine or on hosts; see `fixed_job.run_job`."""
    if cluster is not None:
        cluster.interfaces()  # raises an error before anything starts, if Horovod can't use a host's network
    else:
        machine.check_gpus(limits.high)
    slots = limits.high if limits.discovery is None else discovered_slots(limits.discovery)
    wanted = workers or max(limits.low, min(limits.high, slots))
    with job_directory() as (directory, environment):
        job = ElasticJob(limits, wanted, directory, environment | {"HOROVOD_SIZE": str(wanted)}, arguments, cluster)
        try:
            with job.hears_signals():
                job.run()
            return job.outcome()
        finally:
            job.kill()


class ElasticJob(Job):
    """An elastic job, as its launcher sees it: it watches the workers, and plans their generations."""

    def __init__(
        self,
        limits: Limits,
        wanted: int,
        directory: Path,
        environment: dict[str, str],
        arguments: Sequence[str],
        cluster: Cluster | None,
    ) -> None:
        super().__init__(directory)
        self._limits = limits
        self._cluster = cluster
        self._workers = ElasticWorkers(wanted, directory, environment, arguments, cluster, self.output)
        self._plan = Plan(directory, cluster)
        self._timeout = start_timeout()
        self._rendezvous = contextlib.ExitStack()  # a server for each generation: late workers may still ask an old one
        self._short_since = time.monotonic()  # when there began to be too few workers, or the job began
        self._formed = 0.0  # when the newest generation was planned
        self._over_by = _GOES_ON  # when all workers must have ended
        self._reports: list[Report] = []

    def run(self) -> None:
        """Starts and watches the workers until the job is over."""

        def take(slots: int) -> None:
            self._workers.wanted = max(self._limits.low, min(self._limits.high, slots))

        script = self._limits.discovery
        discovery = contextlib.nullcontext() if script is None else discovering(script, take, self._print)
        with discovery, self._rendezvous:  # closed only at the end, with the servers of all generations
            while self._advance():
                time.sleep(0.05)
        if self._cluster is not None:
            for host in self._cluster.hosts:
                host.over()
            self.output.threads += self._cluster.threads
        self.output.join()

    def running(self) -> list[ElasticWorker]:
        return self._workers.running

    def can_hear_stop(self, worker: JobWorker) -> bool:
        assert isinstance(worker, ElasticWorker)
        return 0 <= worker.place <= self._noted(worker, "joined")

    def stop_key(self, worker: JobWorker) -> Hashable:
        # A worker forgets a signal when its generation ends: each generation has to hear it.
        assert isinstance(worker, ElasticWorker)
        return worker.name, worker.place

    def kill(self) -> None:
        for worker in self._workers.running:
            worker.process.kill()

    def outcome(self) -> Outcome:
        result = None
        has_succeeded = False
        failures = []
        for report in self._reports:
            if result is None:
                result = report["result"]
            if report["code"] == 0:
                has_succeeded = True
            elif report["code"] != PREEMPTED:
                failures.append(Failure(report["echo"], report["time"], report["code"], report["error"]))
        if self.problem:
            return Outcome(1, self.problem, result)
        if failures:
            first = min(failures)
            return Outcome(first.code, first.error, result)
        return Outcome(0 if has_succeeded else PREEMPTED, "", result)

    def _advance(self) -> bool:
        """Acts on what has happened since the last call; returns whether the job goes on."""
        # Ends first: a plan must not have a place for a worker that has ended.
        for worker in self._workers.remove_ended():
            self._take_in_end(worker)
        self.pass_signals_on()
        if self.problem == ENDED_AT_ONCE:
            self._over_by = 0.0

        if self._over_by == _GOES_ON:
            if not self.stops:
                self._workers.start_missing()
            self._plan_next()
        elif time.monotonic() > self._over_by:
            self.kill()
        return bool(self._workers.running) or (self._over_by == _GOES_ON and not self.stops)

    def _take_in_end(self, worker: ElasticWorker) -> None:
        """Records the end of a worker. Without a report of how it has ended, the worker is lost."""
        report = read_json(self.path(worker.name, "json"))
        worker.process.kill()  # processes that it may have left behind
        if report:
            self._take_report(worker, cast("Report", report))
            return
        code = worker.process.returncode or 0
        # By its place, too: a worker that ends with 0 by itself is lost like any other.
        was_sent_away = not code and 0 <= worker.place < self._plan.generation
        if was_sent_away:
            return
        how = exit_text(code)
        if self.stops:
            self._note_unsaved(worker, code, how)
        if self._over_by < _GOES_ON:
            return
        # Also after a signal: the others may still connect to it, and couldn't save.
        if worker.place == self._plan.generation:
            self._plan.note_break()
        if self.stops:
            return
        if worker.host is not None and worker.host.lost:
            how = f"host {worker.host.name} is gone: {worker.host.lost}"
        self._print(f"{worker} is gone: {how}")
        if worker.place >= 0:
            self._plan.note_event("worker_gone", worker, how=how)
        self._workers.pause()

    def _note_unsaved(self, worker: ElasticWorker, code: int, how: str) -> None:
        """Notes the loss of a worker after a signal, if none is left that could save the run."""
        is_last = not self._workers.running and not self._reports
        # Workers that the signal itself has ended had nothing to save yet.
        if is_last and code not in (PREEMPTED, -signal.SIGTERM) and not self.problem:
            self.problem = f"{worker} is gone: {how}: the run isn't saved; its last checkpoint is as it was"

    def _take_report(self, worker: ElasticWorker, report: Report) -> None:
        if report["error"]:
            report["error"] = f"{worker}: {report['error']}"
        self._reports.append(report)
        if report["code"] not in (0, PREEMPTED):
            self._end("another worker has failed")
        self._over_by = min(self._over_by, time.monotonic() + _GRACE)
        for other in self._workers.running:
            if other.place < 0:
                other.process.kill()  # it still waits for a place

    def _plan_next(self) -> None:
        """Plans the next generation, if the newest one is broken, or other workers have come or are to go."""
        generation = self._plan.generation
        members = [worker for worker in self._workers.running if worker.place == generation >= 0]
        for worker in members:
            if self._noted(worker, "waits") == generation:
                self._plan.note_break()  # a connection was lost, but no worker died
        is_intact = self._plan.is_intact
        if is_intact and any(self._noted(worker, "joined") < generation for worker in members):
            # A worker that has begun to connect can't be called back: no other plan may be made until it is done.
            if time.monotonic() - self._formed > _GRACE:
                self._end_stuck(members)
            return

        # Members come first, so that a newcomer never takes the place of a worker that trains.
        chosen = (members + self._ready(members))[: self._workers.wanted]
        # After a signal, they save and end: another size would only keep them from it.
        if members and is_intact and (self.stops or chosen == members):
            self._short_since = time.monotonic()
        else:
            self._form_or_end(chosen, members)

    def _form_or_end(self, chosen: list[ElasticWorker], members: list[ElasticWorker]) -> None:
        """Forms a generation of the chosen workers if they are enough; ends the job if they were too few for long."""
        waited = time.monotonic() - self._short_since > self._timeout
        # A job that was asked to stop needs one worker to save the run.
        fewest = 1 if self.stops else self._limits.low
        # Only the first generation, or one after the loss of all, waits for every worker: nothing trains meanwhile.
        is_waiting_for_all = not members and len(chosen) < self._workers.wanted and not waited
        if len(chosen) >= fewest and not is_waiting_for_all:
            self._form(chosen, [worker for worker in members if worker not in chosen])
        elif waited:
            self.problem = (
                f"{len(chosen)} of at least {fewest} workers (--elastic) are there, and no other one has started "
                f"within {self._timeout:g} s: look at what is printed above; start again to go on"
            )
            self._end(self.problem, chosen[0].name if chosen else "")

    def _ready(self, members: list[ElasticWorker]) -> list[ElasticWorker]:
        """The workers outside of the newest generation that wait for a place in the next one."""
        ready = []
        for worker in self._workers.running:
            # Not by the number alone: a worker without a place has -1, which also stands for a missing file.
            waits = self.path(worker.name, "waits").exists() and self._noted(worker, "waits") >= worker.place
            if waits and worker not in members:
                ready.append(worker)
        return ready

    def _end_stuck(self, members: list[ElasticWorker]) -> None:
        """Kills workers that still connect to a worker that has died: Horovod itself gives up only after minutes."""
        for worker in members:
            if max(self._noted(worker, "waits"), self._noted(worker, "joined")) < worker.before:
                self._print(f"{worker} still waits in Horovod for one that is gone, and can't be called back: ended")
                worker.before = -1  # so that it is reported once
                worker.process.kill()

    def _form(self, chosen: list[ElasticWorker], dropped: list[ElasticWorker]) -> None:
        """Forms the next generation of the chosen workers, and sends the dropped ones away."""
        from loop.launch.horovodrun import rendezvous  # imports Horovod, which may be missing

        plan = self._plan
        plan.generation += 1
        shares = Counter(worker.address for worker in chosen)
        # Horovod numbers ranks host by host. The oldest worker's host comes first, so that this worker is the chief.
        hosts = list(shares)
        chosen.sort(key=lambda worker: hosts.index(worker.address))
        places = self._rendezvous.enter_context(rendezvous(len(chosen), self._cluster, shares))

        for worker in chosen:
            if worker.place < 0 and plan.generation:
                self._print(f"{worker} joins: {len(chosen)} workers from the next boundary on")
            if worker.place < 0:
                plan.note_event("worker_joined", worker)
            worker.before = worker.place
            worker.place = plan.generation
        for worker in dropped:
            self._print(f"{worker} is sent away")
            plan.note_event("worker_gone", worker, how="sent away")
        if plan.broken == plan.generation - 1 >= 0:
            self._print(f"going on with {plural(len(chosen), 'worker')}")

        # Last: workers follow the plan as soon as it is written.
        names = [worker.name for worker in chosen]
        plan.write(dict(zip(names, places, strict=True)), [worker.name for worker in dropped])
        self._short_since = self._formed = time.monotonic()

    def _end(self, reason: str, keeper: str = "") -> None:
        """Ends the job. The worker named by `keeper`, if any, has time to save the run."""
        self._plan.end(reason, keeper)
        self._over_by = time.monotonic() + (_SAVE_GRACE if keeper else _GRACE)

    def _print(self, text: str) -> None:
        self.output.line(f"elastic: {text}")

    def _noted(self, worker: ElasticWorker, what: str) -> int:
        """The generation that a worker has written into its file of this kind; -1: there is no such file."""
        try:
            return int(self.path(worker.name, what).read_text())
        except FileNotFoundError:
            return -1
