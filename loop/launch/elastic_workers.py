"""The workers of an elastic job: which ones run, and how missing ones are started."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loop.launch.environment import LOCAL_SIZE, WORKER
from loop.launch.job import JobWorker
from loop.launch.output import Output
from loop.launch.process import start_worker, worker_command

if TYPE_CHECKING:
    from loop.launch.hosts import Cluster, Host

MOST_RESTARTS = 10
"""Workers are replaced at most this often within `RESTART_SECONDS`. If more are lost, no restart will help."""
RESTART_SECONDS = 600.0
_PAUSE = 1.0  # seconds between the loss of a worker and the start of another one


@dataclasses.dataclass
class ElasticWorker(JobWorker):
    """A worker that runs. Its name is never used again in the job."""

    host: Host | None = None  # the host that it runs on; None: this machine
    place: int = -1  # the last generation in which it was given a place; -1: none
    before: int = -1  # the generation before that, in which it had a place; -1: none

    @property
    def address(self) -> str:
        """The host name or address at which Horovod reaches it."""
        return self.host.address if self.host is not None else "localhost"

    def __str__(self) -> str:
        return f"worker {self.name}{self.process.where}"


class ElasticWorkers:
    """Starts the workers of an elastic job, and workers that replace lost ones.

    Args:
        wanted: how many workers are to run.
        directory: the job's directory.
        environment: the environment variables of all workers.
        arguments: the command line after `tfloop`.
        cluster: the hosts that they are to run on; None: this machine.
        output: shows what they print.

    Attributes:
        wanted: how many workers are to run.
        running: the workers that run, oldest first.
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
        self._hosts: list[Host] = []  # the hosts that aren't lost
        self._started = 0
        self._lost = 0  # workers that were lost, and have not been replaced
        self._restarts: list[float] = []  # when workers were replaced, within the last `RESTART_SECONDS`
        self._not_before = 0.0  # no worker is started before this time

    def remove_ended(self) -> list[ElasticWorker]:
        """Removes the workers that have ended, and returns them."""
        if self._cluster is not None:
            # Before the workers: those of a lost host have ended, and no other one may be started on that host.
            self._hosts = [host for host in self._cluster.hosts if not host.lost]
            self.wanted = sum(host.slots for host in self._hosts)
        ended = []
        for worker in list(self.running):
            if worker.process.poll() is not None:
                self.running.remove(worker)
                ended.append(worker)
        return ended

    def pause(self) -> None:
        """Delays the next start a little, after a worker was lost."""
        self._lost += 1
        self._not_before = time.monotonic() + _PAUSE

    def start_missing(self) -> None:
        """Starts the missing workers, unless too many were replaced lately."""
        now = time.monotonic()
        self._restarts = [restart for restart in self._restarts if now - restart < RESTART_SECONDS]
        while len(self.running) < self.wanted and now >= self._not_before:
            is_replacement = self._lost > 0  # not one that discovery has found room for
            if is_replacement and now not in self._restarts:  # workers that were lost together count once
                if len(self._restarts) >= MOST_RESTARTS:
                    return
                self._restarts.append(now)
            self._lost -= is_replacement
            self._start()

    def _start(self) -> None:
        name = str(self._started)
        self._started += 1
        # A worker gets its rank with its place in a plan. Until then its name stands in: a Horovod process has a rank.
        place = {WORKER: name, "HOROVOD_RANK": name}
        if self._cluster is None:
            place[LOCAL_SIZE] = str(self.wanted)
            process = start_worker(worker_command(self._arguments), self._environment | place)
            self.running.append(ElasticWorker(name, process))
            self._output.follow(process, name)
            return
        host = self._free_host()
        place[LOCAL_SIZE] = str(self._cluster.shares()[host.address])
        [remote] = host.start(
            {int(name): place}, self._arguments, self._environment, self._directory, self._output.take
        )
        self.running.append(ElasticWorker(name, remote, host))

    def _free_host(self) -> Host:
        """The first host with a free slot. There is one, since fewer workers run than there are slots."""
        taken = [worker.host for worker in self.running]
        for host in self._hosts:
            if taken.count(host) < host.slots:
                return host
        raise AssertionError("no host has a free slot")
