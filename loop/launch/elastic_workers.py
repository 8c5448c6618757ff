"""The workers of an elastic job: which ones are running, and how missing ones are started."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loop.launch.environment import WORKER
from loop.launch.job import JobWorker
from loop.launch.output import Output
from loop.launch.process import start_worker, worker_command

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster, Host

MOST_RESTARTS = 10
"""Workers are started again at most so often within `RESTART_SECONDS`: beyond that, something else is wrong."""
RESTART_SECONDS = 600.0
_PAUSE = 1.0  # seconds before a worker is started again


@dataclasses.dataclass
class ElasticWorker(JobWorker):
    """A worker that is running. No other worker of the job has had its name.

    Attributes:
        host: where it is; None: on this machine.
        place: the last generation in which it was given a place; -1: none.
        before: the generation before that, in which it had a place; -1: none.
    """

    host: Host | None = None
    place: int = -1
    before: int = -1

    @property
    def address(self) -> str:
        """The host name or address by which Horovod reaches it."""
        return self.host.address if self.host is not None else "localhost"

    def __str__(self) -> str:
        return f"worker {self.name}{self.process.where}"


class ElasticWorkers:
    """Starts the workers of an elastic job, and those that replace lost ones.

    Args:
        wanted: how many are to run.
        directory: the job's directory.
        environment: the environment variables of all workers.
        arguments: the command line after `tfloop`.
        cluster: the hosts that they are to run on; None: this machine.
        output: shows what they print.

    Attributes:
        wanted: how many are to run.
        running: those that run, oldest first.
    """

    def __init__(
        self,
        wanted: int,
        directory: Path,
        environment: dict[str, str],
        arguments: Sequence[str],
        cluster: Cluster | None,
        output: Output,
    ) -> None:
        self.wanted = wanted
        self.running: list[ElasticWorker] = []
        self._directory = directory
        self._environment = environment
        self._arguments = arguments
        self._cluster = cluster
        self._output = output
        self._hosts: list[Host] = []  # those that aren't lost
        self._started = 0
        self._restarts: list[float] = []
        self._not_before = 0.0  # when a worker may be started again

    def remove_ended(self) -> list[ElasticWorker]:
        """Removes the workers that have ended, and returns them."""
        if self._cluster is not None:
            # Before workers are looked at: those of a lost host have ended, and must not be started there again.
            self._hosts = [host for host in self._cluster.hosts if not host.lost]
            self.wanted = sum(host.slots for host in self._hosts)
        ended = [worker for worker in self.running if worker.process.poll() is not None]
        for worker in ended:
            self.running.remove(worker)
        return ended

    def pause(self) -> None:
        """Delays the next start a little, after a worker was lost."""
        self._not_before = time.monotonic() + _PAUSE

    def start_missing(self) -> None:
        """Starts as many as are missing, unless too many were started again lately."""
        now = time.monotonic()
        self._restarts = [restart for restart in self._restarts if now - restart < RESTART_SECONDS]
        while len(self.running) < self.wanted and now >= self._not_before:
            if self._started >= self.wanted and now not in self._restarts:  # workers that died together count once
                if len(self._restarts) >= MOST_RESTARTS:
                    return
                self._restarts.append(now)
            self._start()

    def _start(self) -> None:
        name = str(self._started)
        self._started += 1
        # Horovod needs a rank, but a worker has none before a plan gives it a place: until then it is its name.
        place = {WORKER: name, "HOROVOD_RANK": name}
        if self._cluster is None:
            process = start_worker(worker_command(self._arguments), self._environment | place)
            self.running.append(ElasticWorker(name, process))
            self._output.follow(process, name)
            return
        taken = [worker.host for worker in self.running]
        host = next(host for host in self._hosts if taken.count(host) < host.slots)
        [remote] = host.start(
            {int(name): place}, self._arguments, self._environment, self._directory, self._output.take
        )
        self.running.append(ElasticWorker(name, remote, host))
