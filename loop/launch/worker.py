"""A worker's side of a job: it reports to its launcher, waits for its peers, and ends when its launcher is gone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from callbacks.files import FileError, write_text
from callbacks.run_record.redaction import mask
from loop.errors import PeerError, TrainingError, UsageError, no_exit
from loop.launch import explain, signals, stderr
from loop.launch.environment import JOB, LAUNCHER, job_size, not_started, start_timeout, worker_name

_PEER_LOSS = ("UnavailableError", "AbortedError", "HorovodInternalError")  # names of TensorFlow's errors, and Horovod's
ORPHAN_GRACE = 600.0
"""Seconds that a worker has to save and end when its launcher is gone."""


def await_peers(peers: Mapping[str, Callable[[], bool]]) -> None:
    """Waits until all other workers are there, before the backend does, whose wait can't be interrupted.

    Args:
        peers: by the name of each, a function that says whether it is there.

    Raises:
        TrainingError: some are not, in time; their names.
    """
    timeout = start_timeout()
    deadline = time.monotonic() + timeout
    missing = dict(peers)
    while missing := {name: is_there for name, is_there in missing.items() if not is_there()}:
        if time.monotonic() > deadline:
            raise TrainingError(not_started(list(missing), timeout))
        time.sleep(0.1)


def mark_state(state: str) -> None:
    """Tells the launcher, where it is ours, how far this worker has come.

    Args:
        state: "arrived"; "started" with all others; or "trains", from where on a signal has it save.
    """
    if JOB in os.environ:
        (Path(os.environ[JOB]) / f"rank-{worker_name()}.{state}").touch()


@contextlib.contextmanager
def before_training() -> Iterator[None]:
    """Within it, the signals of `signals.stops` end this process at once, and SIGUSR1 is ignored: nothing can be saved.

    What is called within it may have handlers of its own for a while, as `fit` has.
    """

    def stop(number: int, frame: Any) -> None:
        """`heard` acts: Python calls this only when a wait within native code is over."""

    def heard(number: int) -> None:
        if signal.getsignal(number) is stop:
            if JOB not in os.environ:  # else the launcher prints it, once for all workers
                with contextlib.suppress(OSError):  # a terminal that is gone
                    os.write(stderr.descriptor(), f"{signals.STOPPED}\n".encode())
            signals.leave(75)

    actions: dict[int, Any] = {**dict.fromkeys(signals.stops(), stop), signal.SIGUSR1: signal.SIG_IGN}
    with signals.handled(actions), signals.watched(heard):
        yield


@contextlib.contextmanager
def reporting() -> Iterator[Callable[..., None]]:
    """Gives a function that reports this worker's exit code, error and result to its launcher, where it is ours.

    An error within it is reported too, and raised as what it means: see `as_peer_error`. A `PeerError` only repeats
    what another worker reports. It is marked as an echo, so that the launcher shows the first failure.
    """
    job = os.environ.get(JOB)

    def report(code: int, error: BaseException | None = None, result: Any = None) -> None:
        if job is None:
            return
        text = ""
        if isinstance(error, UsageError | TrainingError | FileError):
            text = str(error)
        elif error is not None:
            text = explain.in_a_line(error)
        message = {
            "code": code,
            "result": result,
            "error": mask(text),
            "echo": isinstance(error, PeerError),
            "time": time.time(),
        }
        write_text(Path(job) / f"rank-{worker_name()}.json", json.dumps(message))

    if job is not None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a run has its handler
        die_with_parent()
        (Path(job) / f"rank-{worker_name()}.pid").write_text(str(os.getpid()))
    try:
        with no_exit():
            yield report
    except BaseException as error:
        meant = as_peer_error(error)
        report(2 if isinstance(meant, UsageError) else 1, meant)
        if meant is error:
            raise
        raise meant from error


def as_peer_error(error: BaseException) -> BaseException:
    """A `PeerError` for a backend's error that means the loss of another worker; any other error as it is."""
    if not is_peer_loss(error) or (job_size() or 1) == 1:
        return error
    return PeerError(f"another worker is gone: what it printed last says why ({type(error).__name__} here)")


def is_peer_loss(error: BaseException) -> bool:
    """Whether a backend means by this error that it has lost another worker."""
    name = type(error).__name__
    return name in _PEER_LOSS or (name == "UnknownError" and re.search(r"Horovod|/gloo/", str(error)) is not None)


def die_with_parent() -> None:
    """Ends this process politely, as SIGTERM does, when its parent is gone: a killed launcher can't do it.

    If this process hangs, and so doesn't end, it is killed with all that it has started.
    """
    # By its process id, where that is known: the parent may have ended before this line.
    parent = int(os.environ.get(LAUNCHER, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)  # it leads no group

    threading.Thread(target=watch, name="parent", daemon=True).start()
