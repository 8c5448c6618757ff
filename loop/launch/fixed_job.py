"""Jobs with a fixed number of workers, on this machine or on hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.progress import RELAY
from loop.launch import machine, signals
from loop.launch.environment import JOB, LAUNCHER, not_started, start_timeout, tf_cluster
from loop.launch.output import Output
from loop.launch.process import WorkerProcess, start_worker

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster, Remote

MOST_RESTARTS = 10
"""So often the launcher starts each worker of a `parameter_server` job again."""
_GRACE = 10.0  # seconds that workers have to end by themselves when another one has failed
_EARLY_GRACE = 3.0  # the same while some have not started: the others wait for them, and do nothing else


def run_job(
    backend: str, workers: int, arguments: Sequence[str], servers: int = 1, cluster: Cluster | None = None
) -> tuple[int, str, Any]:
    """Runs `tfloop` with these arguments in N processes, and streams what they print to stderr.

    When one worker fails, or some have not started in time, the others are ended; but a worker of a `parameter_server`
    job that is killed is started again. SIGTERM and SIGINT end all workers politely, a second one at once; SIGUSR1 is
    handed on to them.

    Args:
        backend: `horovod`, `multiworker` or `parameter_server`.
        workers: N.
        arguments: the command line behind `tfloop`.
        servers: with `parameter_server`, the number of parameter servers, beside the chief and the N workers.
        cluster: the hosts that they are to run on; None: this machine.

    Raises:
        UsageError: there are fewer GPUs here than workers.

    Returns:
        The exit code of the first worker that failed, or 0; its error, or ""; and the chief's result. Where all were
        stopped by a signal, 75.
    """
    if cluster is None:
        machine.check_gpus(workers)
    command = [sys.executable, "-P", "-m", "cli", *arguments]
    timeout = start_timeout()
    with job_directory() as (directory, environment):
        output, job = Output(), FixedJob(directory)
        try:
            with heard_by(job.hear), _worker_environments(backend, workers, servers, cluster) as places:
                job.has_servers = backend == "parameter_server"
                job.names = [f"rank {rank}" for rank in range(len(places))]
                if job.has_servers:
                    job.names = list(tf_cluster(places[0]["TF_CONFIG"])[1])

                def start(rank: int) -> WorkerProcess:
                    process = start_worker(command, {**environment, **places[rank]})
                    output.follow(process, job.names[rank].removeprefix("rank "))
                    return process

                job.start, job.tell = start, output.line
                if cluster is None:
                    job.processes += map(start, range(len(places)))
                else:
                    job.processes += cluster.start(places, arguments, environment, directory, output.take)
                    output.threads += cluster.threads
                job.wait(timeout)
                job.kill()  # what workers may have left behind
                for thread in output.threads:
                    thread.join()
            return job.outcome()
        finally:
            job.kill()


@contextlib.contextmanager
def job_directory() -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory in which workers leave word for the launcher, and the environment that tells them of it."""
    with signals.temporary_directory("tfloop-") as directory:
        environment = {**os.environ, JOB: directory, LAUNCHER: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        if sys.stderr.isatty():
            environment[RELAY] = "relay"
        yield Path(directory), environment


def heard_by(hear: Callable[[int, Any], None]) -> contextlib.AbstractContextManager[None]:
    """Within it, `hear` takes the signals that a job hands on to its workers."""
    return signals.handled(dict.fromkeys([*signals.stops(), signal.SIGUSR1], hear))


@contextlib.contextmanager
def _worker_environments(
    backend: str, workers: int, servers: int, cluster: Cluster | None
) -> Iterator[list[dict[str, str]]]:
    """The environment variables that tell each worker its place."""
    if backend == "horovod":
        from loop.launch.horovodrun import rendezvous

        with rendezvous(workers, cluster) as places:
            yield places
        return
    jobs = {"chief": 1, "worker": workers, "ps": servers} if backend == "parameter_server" else {"worker": workers}
    ports = machine.free_ports(sum(jobs.values()))
    addresses = iter(cluster.addresses() if cluster else [(f"127.0.0.1:{port}", None) for port in ports])
    tasks = [{"type": job, "index": index} for job, size in jobs.items() for index in range(size)]
    members: dict[str, list[str]] = {job: [] for job in jobs}
    ranks = []
    for task in tasks:
        address, local = next(addresses)
        members[str(task["type"])].append(address)
        ranks.append(task["index"] if local is None else local)
    yield [
        {"TF_CONFIG": json.dumps({"cluster": members, "task": task}), "TFLOOP_LOCAL_RANK": str(local)}
        for task, local in zip(tasks, ranks, strict=True)
    ]


class FixedJob:
    """The workers of a job, by rank, and what becomes of them.

    Attributes:
        processes: one for each rank.
        names: what each is called.
        has_servers: whether rank 0 alone trains, and the others serve it: they end with it, and its workers, unlike
            its parameter servers, are started again.
        start: starts a rank.
        tell: prints a line.
    """

    start: Callable[[int], WorkerProcess]
    tell: Callable[[str], None]

    def __init__(self, directory: Path) -> None:
        self.processes: list[WorkerProcess | Remote] = []
        self.names: list[str] = []
        self.has_servers = False
        self._restarts: dict[int, int] = {}
        self._directory = directory
        self._ended: dict[int, float] = {}  # when each rank was found to have ended
        self._killed = float("inf")  # when we killed what was left
        self._wishes = signals.Wishes()
        self._saves = 0  # how often SIGUSR1 was heard, and not handed on
        self._announced = False  # whether it was told that the job stops
        self._told: set[int] = set()  # ranks that have been told to stop, when they could hear it
        self._problem = ""

    def hear(self, number: int, frame: Any) -> None:
        """Takes a signal; `wait` hands it on."""
        if number == signal.SIGUSR1:
            self._saves += 1
        else:
            self._wishes.hear(number)

    def wait(self, timeout: float) -> None:
        """Waits for all workers; ends them when one has failed, or has not started in time; hands signals on."""
        start_by, end_by = time.monotonic() + timeout, float("inf")
        while len(self._ended) < len(self.processes) and not (self.has_servers and 0 in self._ended):
            now = time.monotonic()
            for rank, process in enumerate(self.processes):
                if rank not in self._ended and process.poll() is not None and not self._started_again(rank):
                    self._ended[rank] = time.time()
                    if process.returncode or not (self.has_servers or self._path(rank, "json").exists()):
                        end_by = min(end_by, now + (_EARLY_GRACE if self._without("started") else _GRACE))
            self._hand_on()
            if now > start_by and end_by == float("inf") and (missing := self._without("arrived", "started")):
                self._problem = not_started([self._name(rank) for rank in missing], timeout)
            if now > end_by or self._problem:
                self.kill()
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills all that is left of the job, at once."""
        self._killed = min(self._killed, time.time())
        for process in self.processes:
            process.kill()

    def outcome(self) -> tuple[int, str, Any]:
        """What `run` returns."""
        reports = {}
        for rank in range(len(self.processes)):
            with contextlib.suppress(FileNotFoundError):
                reports[rank] = json.loads(self._path(rank, "json").read_text())
        result = reports.get(0, {}).get("result")
        if self._problem:
            return 1, self._problem, result
        if self.has_servers and reports.get(0, {}).get("code") == 0:
            return 0, "", result
        failures = []  # an echo comes last, whenever it was
        for rank in self._ended:
            process, report = self.processes[rank], reports.get(rank)
            if process.lost and (report is None or report["code"]):  # whatever else is said, that is why
                failures.append((False, 0.0, 1, process.lost))
            elif report is None:  # killed, or crashed: it could not even report
                # What the loss of a server means, its chief knows better.
                echo = self._ended[rank] > self._killed or (self.has_servers and rank > 0)
                stopped = process.returncode == 75 or (self._stops and process.returncode == -signal.SIGTERM)
                failures.append((echo, self._ended[rank], 75 if stopped else 1, "" if stopped else self._died(rank)))
            elif report["code"]:
                said = report["error"] and f"{self._name(rank)}: {report['error']}"
                failures.append((report["echo"], report["time"], report["code"], said))
        if not failures:
            return 0, "", result
        if self._stops and all(echo or code == 75 for echo, _, code, _ in failures):
            return 75, "", result
        _, _, code, said = min(failures)
        return code, said, result

    def _started_again(self, rank: int) -> bool:
        """Starts a worker that was killed again, where a chief has others do its steps meanwhile."""
        serves = self.has_servers and self.names[rank].startswith("worker") and not self._stops
        serves = serves and self._killed == float("inf")
        if not serves or self._path(rank, "json").exists() or self._without("started", among=[rank]):
            return False
        count = self._restarts[rank] = self._restarts.get(rank, 0) + 1
        if count > MOST_RESTARTS:
            return False
        self.tell(f"{self._died(rank)}; its steps are made again, and it is started again")
        self.processes[rank] = self.start(rank)
        return True

    @property
    def _stops(self) -> int:
        return self._wishes.count

    def _hand_on(self) -> None:
        if self._stops and not self._announced and any(self._directory.glob("rank-*.trains")):
            self._announced = True
            self.tell(signals.STOPPING)
        if self._stops > 1 and not self._problem:
            self._problem = "ended at once by a second signal; checkpoints that were there are as they were"
        alive = [rank for rank in range(len(self.processes)) if rank not in self._ended]
        for rank in alive if self._stops else ():
            # TensorFlow swallows a SIGTERM while an engine starts: until then it is sent again.
            if rank not in self._told:
                if not self._without("started", among=[rank]):
                    self._told.add(rank)
                self.processes[rank].send_signal(signal.SIGTERM)
        while self._saves:
            self._saves -= 1
            for rank in set(alive) - set(self._without("pid")):  # it would kill one that is younger
                self.processes[rank].send_signal(signal.SIGUSR1)

    def _without(self, *states: str, among: Sequence[int] | None = None) -> list[int]:
        """The ranks that have not come to the first of these states that not all have come to."""
        ranks = range(len(self.processes)) if among is None else among
        lists = ([rank for rank in ranks if not self._path(rank, state).exists()] for state in states)
        return next(filter(None, lists), [])

    def _name(self, rank: int) -> str:
        return f"{self.names[rank]}{self.processes[rank].where}"

    def _path(self, rank: int, state: str) -> Path:
        return self._directory / f"rank-{rank}.{state}"

    def _died(self, rank: int) -> str:
        code = self.processes[rank].returncode or 0
        how = f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        return f"{self._name(rank)} ended without a word: {how}" + (
            ", or out of memory" if code == -signal.SIGKILL else ""
        )
