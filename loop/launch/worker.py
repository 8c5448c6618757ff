"""A worker's side of a job: it reports to its launcher, waits for its peers, and ends when its launcher is gone."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypedDict

from callbacks.files import FileError, write_text
from callbacks.run_record.redaction import mask
from loop.errors import BAD_INPUT, FAILED, PREEMPTED, PeerError, PeerUsageError, TrainingError, UsageError, no_exit
from loop.launch import explain, signals, stderr
from loop.launch.environment import JOB, LAUNCHER, job_size, not_started, own_job, start_timeout, worker_name

# Names of TensorFlow's errors, and Horovod's. The classes aren't compared: this module imports neither library.
_PEER_LOSS = ("UnavailableError", "AbortedError", "HorovodInternalError")
ORPHAN_GRACE = 600.0
"""Seconds that a worker has to save and end when its launcher is gone."""
has_unsaved = threading.Event()
"""Set once steps of this worker may be in its memory alone, between two attempts of an elastic job."""
stop_deferred = threading.Event()
"""Set by a signal that came while `has_unsaved` was set: the next attempt saves and ends."""


Result = dict[str, Any] | None
"""What a command returns, as a JSON object; None: it returns nothing."""


class Report(TypedDict):
    """What a worker reports to the launcher when it ends."""

    code: int  # its exit code
    result: Result  # what the command has returned
    error: str  # the message of its error; "": none
    echo: bool  # whether the error only repeats that another worker has failed
    time: float  # when it ended


class Reporter(Protocol):
    """A function that reports how this worker ends; see `Report`."""

    def __call__(self, code: int, error: BaseException | None = None, result: Result = None) -> None:
        """Reports exit code, error and result."""


def await_peers(peers: Mapping[str, Callable[[], bool]]) -> None:
    """Waits until all other workers are there. A backend would also wait for them, but can't be interrupted then.

    Args:
        peers: for each worker's name, a function that returns whether it is there.

    Raises:
        TrainingError: some are not there in time; their names.
    """
    timeout = start_timeout()
    deadline = time.monotonic() + timeout
    missing = dict(peers)
    while True:
        for name, is_there in list(missing.items()):
            if is_there():
                del missing[name]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise TrainingError(not_started(list(missing), timeout))
        time.sleep(0.1)


def mark_state(state: str, text: str = "") -> None:
    """Reports to the launcher, if it is tfloop's, how far this worker has come.

    Args:
        state: "arrived": it waits for the other workers; "started": all workers have started; "trains": from now on,
            a signal has the run save.
        text: with "trains", the run directory.
    """
    if JOB in os.environ:
        write_text(Path(os.environ[JOB]) / f"rank-{worker_name()}.{state}", text)


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Within it, the signals of `signals.stops` end this process at once, and SIGUSR1 is ignored: nothing can be saved.

    Between two attempts of an elastic job, the signals are left to the next attempt; see `has_unsaved`.
    A function that is called within it may set other handlers for a while, as `fit` does.
    """
    ending = threading.Lock()

    def end() -> None:
        if has_unsaved.is_set():
            stop_deferred.set()
            return
        if not ending.acquire(blocking=False):  # the other thread is ending this process
            return
        # In a job, the launcher prints it, once for all workers. Writing to a full pipe would block.
        if JOB not in os.environ and stderr.takes_text():
            with contextlib.suppress(OSError):  # the terminal is closed
                os.write(stderr.descriptor(), f"{signals.STOPPED}\n".encode())
        signals.leave(PREEMPTED)

    def stop(number: int, frame: FrameType | None) -> None:
        """Python calls it only when a wait in native code is over; `heard` acts at once, once its thread listens."""
        end()

    def heard(number: int) -> None:
        if signal.getsignal(number) is stop:  # else `fit` runs, and has put its own handler in place
            end()

    actions: dict[int, signals.Handler] = {**dict.fromkeys(signals.stops(), stop), signal.SIGUSR1: signal.SIG_IGN}
    with signals.handled(actions), signals.watched(heard):
        yield


@contextlib.contextmanager
def reporting() -> Iterator[Reporter]:
    """Yields a function that reports this worker's exit code, error and result to the launcher, if it is tfloop's.

    An error within it is translated by `as_peer_error`, reported, and raised. A `PeerError` or `PeerUsageError` only
    repeats what another worker reports: marked as an echo, so that the launcher shows the failure that came first.
    """
    job = os.environ.get(JOB)

    def report(code: int, error: BaseException | None = None, result: Result = None) -> None:
        if job is None:
            return
        text = ""
        if isinstance(error, UsageError | TrainingError | FileError):
            text = str(error)
        elif error is not None:
            text = explain.in_a_line(error)
        message: Report = {
            "code": code,
            "result": result,
            "error": mask(text),
            "echo": isinstance(error, PeerError | PeerUsageError),
            "time": time.time(),
        }
        write_text(Path(job) / f"rank-{worker_name()}.json", json.dumps(message))

    own_job()
    if job is not None:
        # By default, SIGUSR1 kills a process. It is ignored until the run has its own handler.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        die_with_parent()
        # Last: the launcher sends SIGUSR1 only once this file exists. Whole: a host's agent may read it at any moment.
        write_text(Path(job) / f"rank-{worker_name()}.pid", str(os.getpid()))
    try:
        # A worker whose launcher was killed still reports into the directory.
        with no_exit(), contextlib.nullcontext() if job is None else signals.in_use(job):
            yield report
    except BaseException as error:
        translated = as_peer_error(error)
        report(BAD_INPUT if isinstance(translated, UsageError) else FAILED, translated)
        if translated is error:
            raise
        raise translated from error


def has_reported() -> bool:
    """Whether this worker's launcher has its report, and says the error; or is gone, with its directory."""
    job = Path(os.environ[JOB])
    return not job.is_dir() or (job / f"rank-{worker_name()}.json").exists()


def as_peer_error(error: BaseException) -> BaseException:
    """A `PeerError` for a backend's error that means the loss of another worker; any other error as it is."""
    if not is_peer_loss(error) or (job_size() or 1) == 1:
        return error
    return PeerError(f"another worker is gone: what it printed last says why ({type(error).__name__} here)")


@contextlib.contextmanager
def peer_errors() -> Iterator[None]:
    """Raises what `as_peer_error` makes of an error within it."""
    try:
        yield
    except Exception as error:
        translated = as_peer_error(error)
        if translated is error:
            raise
        raise translated from error


def is_peer_loss(error: BaseException) -> bool:
    """Whether a backend raises this error when it has lost another worker."""
    name = type(error).__name__
    return name in _PEER_LOSS or (name == "UnknownError" and re.search(r"Horovod|/gloo/", str(error)) is not None)


def die_with_parent() -> None:
    """Sends this process SIGTERM when its launcher is gone, so that it saves and ends: a killed launcher can't send it.

    All processes that it has started are killed at its end, as the launcher does. If it has not ended after
    `ORPHAN_GRACE`, it is killed with them.
    """
    # From the environment, not by `getppid`: the launcher may have ended before this line.
    parent = int(os.environ.get(LAUNCHER, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(FAILED)  # `killpg` has failed, because this process leads no group

    def end_group() -> None:
        if os.getppid() != parent:
            with contextlib.suppress(ProcessLookupError):  # this process leads no group
                os.killpg(os.getpid(), signal.SIGKILL)

    # Now, before libraries register theirs: what is registered first is called last.
    atexit.register(end_group)
    threading.Thread(target=watch, name="parent", daemon=True).start()
