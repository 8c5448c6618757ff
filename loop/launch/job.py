"""A job as its launcher sees it: it shows output, passes signals on, kills workers, and reports how they ended."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from callbacks.progress import RELAY
from loop.errors import FAILED
from loop.launch import signals
from loop.launch.environment import JOB, LAUNCHER, OWNER
from loop.launch.output import Output
from loop.launch.process import WorkerProcess

if TYPE_CHECKING:
    from loop.launch.hosts import Remote
    from loop.launch.worker import Result

ENDED_AT_ONCE = "ended at once by a second signal; checkpoints that were there are as they were"
"""The message for a job that was asked to stop twice."""
_END_GRACE = 10.0  # seconds that the launcher has to end by itself after a second signal


class Outcome(NamedTuple):
    """How a job has ended."""

    code: int  # the exit code of the first worker that failed; `PREEMPTED`: a signal stopped all; 0: success
    error: str  # its message; "": none
    result: Result  # the chief's result
    # If the job has lost a host: the run directory in which it can go on, or "" if it had none yet. None: it has lost
    # none, or was asked to stop.
    lost_run: str | None = None


class Failure(NamedTuple):
    """A worker's failure. The smallest one is the failure of the job.

    The order of the fields is the order of comparison: any echo comes after its cause, then the first in time counts.
    """

    echo: bool  # whether it only repeats that another worker has failed
    time: float  # when it failed
    code: int  # its exit code
    error: str  # its message


@dataclasses.dataclass
class JobWorker:
    """A worker of a job."""

    name: str  # its name in the job's directory: the files `rank-<name>.*` are its own
    process: WorkerProcess | Remote  # its process, on this machine or on a host


class Job(abc.ABC):
    """What all jobs have in common, on one machine or on several hosts.

    Attributes:
        directory: the job's directory, in which workers report to the launcher.
        output: shows what workers print.
        problem: why the launcher has ended the job; "": it hasn't.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.output = Output()
        self.problem = ""
        self._wishes = signals.Wishes()
        self._saves = 0  # SIGUSR1 signals that were received, and are not passed on yet
        self._announced = False  # whether STOPPING was printed
        self._stopped: set[Hashable] = set()  # the stop keys of workers that have certainly heard SIGTERM

    @abc.abstractmethod
    def running(self) -> Sequence[JobWorker]:
        """The workers that have not ended."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kills all processes of the job that still run."""

    @abc.abstractmethod
    def outcome(self) -> Outcome:
        """How the job has ended."""

    @abc.abstractmethod
    def can_hear_stop(self, worker: JobWorker) -> bool:
        """Whether a SIGTERM that is sent now certainly reaches the worker's own handler."""

    def stop_key(self, worker: JobWorker) -> Hashable:
        """Identifies what must receive SIGTERM once: here a worker."""
        return worker.name

    @property
    def stops(self) -> int:
        """How often the job was asked to stop."""
        return self._wishes.count

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal. It only counts: a handler may run between any two instructions; `pass_signals_on` acts."""
        if number == signal.SIGUSR1:
            self._saves += 1
        else:
            self._wishes.hear(number)

    @contextlib.contextmanager
    def hears_signals(self) -> Iterator[None]:
        """Within it, `hear` takes the signals that the job passes on to its workers.

        If stderr is a full pipe, the main thread blocks when it prints, and can't end the job. Then the thread that
        watches for signals ends this process, `_END_GRACE` seconds after the second signal.
        """
        wishes = signals.Wishes()

        def heard(number: int) -> None:
            if number in signals.STOPS and wishes.hear(number) > 1:
                time.sleep(_END_GRACE)  # a main thread that isn't blocked has ended the process by then
                self.kill()
                signals.leave(FAILED)

        with (
            signals.handled(dict.fromkeys([*signals.stops(), signal.SIGUSR1], self.hear)),
            signals.watched(heard),
        ):
            yield

    def pass_signals_on(self) -> None:
        """Sends the signals that were received to the workers."""
        if self.stops and not self._announced and any(self.directory.glob("rank-*.trains")):
            self._announced = True
            # In its own thread: writing to a full pipe blocks, and the workers must get the signal all the same.
            announcing = threading.Thread(target=self.output.line, args=(signals.STOPPING,), daemon=True)
            announcing.start()
            self.output.threads.append(announcing)
        # A problem that was found before stays the reason that is given.
        if self.stops > 1 and not self.problem:
            self.problem = ENDED_AT_ONCE
        if self.stops:
            self._send_stop()
        while self._saves:
            self._saves -= 1
            self._send_save()

    def path(self, worker: str, what: str) -> Path:
        """The file in which the worker of this name reports something."""
        return self.directory / f"rank-{worker}.{what}"

    def _send_stop(self) -> None:
        # TensorFlow discards a SIGTERM while a backend starts: it is sent again until it certainly reaches the worker.
        for worker in self.running():
            key = self.stop_key(worker)
            if key in self._stopped:
                continue
            if self.can_hear_stop(worker):
                self._stopped.add(key)
            worker.process.send_signal(signal.SIGTERM)

    def _send_save(self) -> None:
        for worker in self.running():
            # Before a worker has written its process id, it has no handler, and SIGUSR1 would kill it.
            if self.path(worker.name, "pid").exists():
                worker.process.send_signal(signal.SIGUSR1)


@contextlib.contextmanager
def job_directory() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields a directory in which workers report to the launcher, and the environment that names it to them."""
    with signals.temporary_directory("tfloop-") as directory:
        # Unbuffered: a worker writes into a pipe, and its last lines would be lost when it is killed.
        own = {JOB: directory, LAUNCHER: str(os.getpid()), OWNER: "", "PYTHONUNBUFFERED": "1"}
        environment = {**os.environ, **own}
        if sys.stderr.isatty():  # then workers send their progress, which the launcher draws as a bar
            environment[RELAY] = "relay"
        yield Path(directory), environment


def exit_text(code: int) -> str:
    """How a process has ended, by its return code."""
    return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
