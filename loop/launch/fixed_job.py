"""Jobs with a fixed number of workers, on this machine or on hosts."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loop.errors import FAILED, PREEMPTED
from loop.launch import machine
from loop.launch.environment import LOCAL_SIZE, not_started, start_timeout, tf_cluster
from loop.launch.job import Failure, Job, JobWorker, Outcome, exit_text, job_directory
from loop.launch.process import WorkerProcess, start_worker, worker_command

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster, Remote
    from loop.launch.worker import Report

MOST_RESTARTS = 10
"""The launcher starts each worker of a `parameter_server` job again at most this often."""
_GRACE = 10.0  # seconds that workers have to end by themselves when another one has failed
_EARLY_GRACE = 3.0  # the same before all have started: the others only wait, and have nothing to save


def run_job(
    backend: str, workers: int, arguments: Sequence[str], servers: int = 1, cluster: Cluster | None = None
) -> Outcome:
    """Runs `tfloop` with these arguments in N processes, and streams what they print to stderr.

    When one worker fails, or some have not started in time, the others are ended. A worker of a `parameter_server` job
    that is killed is started again instead. SIGTERM and SIGINT ask all workers to save and end; a second one kills
    them. SIGUSR1 is passed on to them.

    Args:
        backend: `horovod`, `multiworker` or `parameter_server`; or `single`, for a single worker on a cluster.
        workers: N.
        arguments: the command line after `tfloop`.
        servers: with `parameter_server`, the number of parameter servers, beside the chief and the N workers.
        cluster: the hosts that they run on; None: this machine.

    Raises:
        UsageError: there are fewer GPUs here than workers.
    """
    if cluster is None:
        machine.check_gpus(workers)
    timeout = start_timeout()  # before any worker starts: the value may be refused
    with job_directory() as (directory, environment):
        job = FixedJob(directory, environment, arguments, has_servers=backend == "parameter_server")
        try:
            with job.hears_signals(), _worker_environments(backend, workers, servers, cluster) as places:
                job.start(places, cluster)
                job.wait(timeout)
                job.kill()  # processes that workers may have left behind
                job.output.join()
            return job.outcome()
        finally:
            job.kill()


@contextlib.contextmanager
def _worker_environments(
    backend: str, workers: int, servers: int, cluster: Cluster | None
) -> Iterator[list[dict[str, str]]]:
    """The environment variables that tell each worker its place."""
    if backend == "single":
        yield [{}]  # one worker on a cluster, without peers to meet
        return
    if backend == "horovod":
        from loop.launch.horovodrun import rendezvous

        with rendezvous(workers, cluster) as places:
            for place in places:
                place[LOCAL_SIZE] = place["HOROVOD_LOCAL_SIZE"]
            yield places
        return
    jobs = {"chief": 1, "worker": workers, "ps": servers} if backend == "parameter_server" else {"worker": workers}
    yield _tf_config_environments(jobs, cluster)


def _tf_config_environments(jobs: Mapping[str, int], cluster: Cluster | None) -> list[dict[str, str]]:
    """`TF_CONFIG`, the local rank and the local size of each task; `jobs` has the number of tasks of each job."""
    places: Sequence[tuple[str, int | None]]
    if cluster is None:
        # Another process may still take a port before its worker listens there: the worker then reports that.
        places = [(f"127.0.0.1:{port}", None) for port in machine.free_ports(sum(jobs.values()))]
    else:
        places = cluster.addresses()
    addresses = iter(places)
    members: dict[str, list[str]] = {job: [] for job in jobs}
    tasks = []
    hosts = []
    local_ranks = []
    for job, size in jobs.items():
        for index in range(size):
            address, local_rank = next(addresses)
            members[job].append(address)
            hosts.append(address.rpartition(":")[0])
            tasks.append({"type": job, "index": index})
            # On this machine, the index in its own job is enough: of several jobs, only the workers use GPUs.
            local_ranks.append(index if local_rank is None else local_rank)
    # In a second loop: the variables of each worker name all members.
    environments = []
    for task, host, local_rank in zip(tasks, hosts, local_ranks, strict=True):
        config = json.dumps({"cluster": members, "task": task})
        here = {"TFLOOP_LOCAL_RANK": str(local_rank), LOCAL_SIZE: str(hosts.count(host))}
        environments.append({"TF_CONFIG": config, **here})
    return environments


class FixedJob(Job):
    """A job whose workers have ranks, which don't change.

    With parameter servers, rank 0 alone runs the training, and the job ends with it. Its workers are started again when
    they are killed; its parameter servers aren't, because the variables are lost with them.

    Args:
        directory: see `Job`.
        environment: the environment variables of all workers.
        arguments: the command line after `tfloop`.
        has_servers: whether it has parameter servers.
    """

    def __init__(
        self, directory: Path, environment: dict[str, str], arguments: Sequence[str], has_servers: bool
    ) -> None:
        super().__init__(directory)
        self._environment = environment
        self._arguments = arguments
        self._has_servers = has_servers
        self._places: list[dict[str, str]] = []
        self._titles: list[str] = []  # the name of each rank in messages
        self._processes: list[WorkerProcess | Remote] = []
        self._restarts: dict[int, int] = {}
        self._ended: dict[int, float] = {}  # when each rank was found to have ended
        self._killed = float("inf")  # when the launcher first killed the workers

    def start(self, places: list[dict[str, str]], cluster: Cluster | None) -> None:
        """Starts all workers, here or on hosts, each with the variables of its place."""
        self._places = places
        self._titles = [f"rank {rank}" for rank in range(len(places))]
        if self._has_servers:
            self._titles = list(tf_cluster(places[0]["TF_CONFIG"])[1])
        if cluster is None:
            for rank in range(len(places)):
                self._processes.append(self._start_rank(rank))
            return
        self._processes += cluster.start(places, self._arguments, self._environment, self.directory, self.output.take)
        self.output.threads += cluster.threads

    def wait(self, timeout: float) -> None:
        """Waits for all workers; ends them when one has failed, or has not started in time; passes signals on."""
        start_by = time.monotonic() + timeout
        end_by = float("inf")  # when all are killed; set once a worker has failed
        while not self._is_over():
            now = time.monotonic()
            if self._find_ended():
                grace = _EARLY_GRACE if self._without("started") else _GRACE
                # The first failure decides: those that follow from it must not prolong the wait.
                end_by = min(end_by, now + grace)
            self.pass_signals_on()

            # Those that have not arrived are the cause, if there are any: all others only wait for them.
            is_late = now > start_by and end_by == float("inf")
            if is_late and (missing := self._without("arrived", "started")):
                self.problem = not_started([self._title(rank) for rank in missing], timeout)
            if now > end_by or self.problem:
                self.kill()
            time.sleep(0.05)

    def running(self) -> list[JobWorker]:
        workers = []
        for rank, process in enumerate(self._processes):
            if rank not in self._ended:
                workers.append(JobWorker(str(rank), process))
        return workers

    def can_hear_stop(self, worker: JobWorker) -> bool:
        return self.path(worker.name, "started").exists()

    def kill(self) -> None:
        # By the clock of the workers' reports: `outcome` compares these times.
        self._killed = min(self._killed, time.time())
        for process in self._processes:  # also one that has ended: it may have left processes behind
            process.kill()

    def outcome(self) -> Outcome:
        reports = self._reports()
        chief = reports.get(0)
        result = chief["result"] if chief else None
        # The launcher has ended the job: what the workers report follows from that.
        if self.problem:
            return Outcome(1, self.problem, result)
        # The chief has finished the training: the others were killed, or ended in their own way.
        if self._has_servers and chief and chief["code"] == 0:
            return Outcome(0, "", result)

        failures = self._failures(reports)
        if not failures:
            return Outcome(0, "", result)
        # Stopped by a signal: workers have saved, or only noticed that others had ended.
        if self.stops and all(failure.echo or failure.code == PREEMPTED for failure in failures):
            return Outcome(PREEMPTED, "", result)
        first = min(failures)
        return Outcome(first.code, first.error, result, self._lost_run())

    def _failures(self, reports: dict[int, Report]) -> list[Failure]:
        """The failures of the workers that have ended."""
        failures = []
        for rank in self._ended:
            failure = self._failure(rank, reports.get(rank))
            if failure is not None:
                failures.append(failure)
        return failures

    def _lost_run(self) -> str | None:
        """See `Outcome.lost_run`."""
        if self.stops or not any(process.lost for process in self._processes):
            return None
        trains = self.path("0", "trains")
        return trains.read_text() if trains.exists() else ""

    def _start_rank(self, rank: int) -> WorkerProcess:
        process = start_worker(worker_command(self._arguments), {**self._environment, **self._places[rank]})
        self.output.follow(process, self._titles[rank].removeprefix("rank "))
        return process

    def _is_over(self) -> bool:
        return len(self._ended) == len(self._processes) or (self._has_servers and 0 in self._ended)

    def _find_ended(self) -> bool:
        """Notes which workers have ended since the last call; returns whether one of them has failed."""
        failed = False
        ended = []
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                ended.append(rank)
        # The first one counts as the cause. A worker aborts when its peer is gone, so aborted ones come last.
        for rank in sorted(ended, key=lambda rank: self._processes[rank].returncode == -signal.SIGABRT):
            if rank in self._ended or self._started_again(rank):
                continue
            self._ended[rank] = time.time()
            # A worker that ends without a report has failed, whatever its exit code is.
            is_silent = not (self._has_servers or self._has_file(rank, "json"))
            failed = failed or is_silent or bool(self._processes[rank].returncode)
        return failed

    def _started_again(self, rank: int) -> bool:
        """Starts a killed worker again if the chief goes on without it; returns whether it did."""
        is_replaceable = self._has_servers and self._titles[rank].startswith("worker")
        is_ending = self.stops or self._killed < float("inf")
        # One that ends before it has started would fail again: its failure is reported instead.
        has_started = self._has_file(rank, "started")
        if not is_replaceable or is_ending or self._has_file(rank, "json") or not has_started:
            return False
        count = self._restarts[rank] = self._restarts.get(rank, 0) + 1
        if count > MOST_RESTARTS:
            return False
        self.output.line(f"{self._died(rank)}; its steps are made again, and it is started again")
        self._processes[rank] = self._start_rank(rank)
        return True

    def _reports(self) -> dict[int, Report]:
        """The reports of the workers that have written one, by rank."""
        reports = {}
        for rank in range(len(self._processes)):
            with contextlib.suppress(FileNotFoundError):
                reports[rank] = json.loads(self.path(str(rank), "json").read_text())
        return reports

    def _failure(self, rank: int, report: Report | None) -> Failure | None:
        """The failure of a worker that has ended; None: it succeeded."""
        process = self._processes[rank]
        if process.lost and (report is None or report["code"]):
            # A lost host is the cause, whatever other workers report: at time 0 it comes before all other failures.
            return Failure(False, 0.0, FAILED, process.lost)
        if report is None:
            return self._unreported_failure(rank)
        if report["code"]:
            message = report["error"] and f"{self._title(rank)}: {report['error']}"
            return Failure(report["echo"], report["time"], report["code"], message)
        return None

    def _unreported_failure(self, rank: int) -> Failure:
        """The failure of a worker that was killed or has crashed, so that it could not report it."""
        returncode = self._processes[rank].returncode
        # After the launcher's own kill, an end is its consequence. With parameter servers, the chief reports the loss
        # of one, with what was in it.
        echo = self._ended[rank] > self._killed or (self._has_servers and rank > 0)
        # A worker that has no handler yet dies of the SIGTERM that asks it to stop.
        if returncode == PREEMPTED or (self.stops and returncode == -signal.SIGTERM):
            return Failure(echo, self._ended[rank], PREEMPTED, "")
        return Failure(echo, self._ended[rank], FAILED, self._died(rank))

    def _without(self, *states: str) -> list[int]:
        """The ranks that have not reached the first of these states which any rank has not reached."""
        for state in states:
            missing = [rank for rank in range(len(self._processes)) if not self._has_file(rank, state)]
            if missing:
                return missing
        return []

    def _has_file(self, rank: int, what: str) -> bool:
        """Whether a worker has written this file; "json": its report."""
        return self.path(str(rank), what).exists()

    def _title(self, rank: int) -> str:
        return f"{self._titles[rank]}{self._processes[rank].where}"

    def _died(self, rank: int) -> str:
        code = self._processes[rank].returncode or 0
        memory = ", or out of memory" if code == -signal.SIGKILL else ""
        return f"{self._title(rank)} ended without a word: {exit_text(code)}{memory}"
