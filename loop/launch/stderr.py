"""Filters what TensorFlow prints to stderr while it is loaded; keeps the descriptor of the real stderr."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import sys
import tempfile
from collections.abc import Iterator

from callbacks.run_record.redaction import tell
from loop.errors import UsageError
from loop.launch import lazy_keras
from loop.launch.environment import JOB, job_rank, job_size

CHATTER = (
    r"[IWE]\d{4} \d\d:|[IWE]0000 00:00:|WARNING: All log messages before absl|To enable the following instructions"
    r"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] |WARNING:tensorflow:\d+ out of the last "
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [IWE] \d+ \d+\] "
    r"|Additional GRPC error information from remote target |:UNKNOWN:Error received from peer "
    r"|This could happen if the remote target has been disconnected from the client"
)
"""Lines that TensorFlow and Ray print to stderr while they start, at any log level, and that help no user.

The last three are the rest of an error about a peer that is gone.
"""

_ALLOCATIONS = 500_000  # after which the garbage collector looks at what is new, while modules are loaded

_descriptor = 2
_frozen = False  # whether `gc.freeze` was called


def descriptor() -> int:
    """The file descriptor of the real stderr, also while `quiet_start` has replaced stderr by a file."""
    return _descriptor


def takes_text() -> bool:
    """Whether writing to the real stderr would not block, as a full pipe or a paused terminal does."""
    poll = select.poll()
    poll.register(_descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def _in_job() -> bool:
    """Whether this process has peers."""
    try:
        return (job_size() or 1) > 1
    except UsageError:  # of a wrong environment: what starts the backend raises it, and `doctor` reports it
        return False


@contextlib.contextmanager
def quiet_start(says: bool = True) -> Iterator[None]:
    """Within it, stderr is collected; at the end it is printed without TensorFlow's start-up messages.

    Args:
        says: whether "loading TensorFlow" is printed; in a job, rank 0 or the launcher prints it.
    """
    global _descriptor, _frozen
    if says and "tensorflow" not in sys.modules and JOB not in os.environ and job_rank() == 0:
        tell("loading TensorFlow ...")
    # In a job, TensorFlow's errors are raw lines of gRPC about a peer that is gone, and tfloop's own error says that.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if _in_job() else "2")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as collected:
        _descriptor = os.dup(2)
        os.dup2(collected.fileno(), 2)
        # Nearly all objects that are made here stay. Looking at them as often as Python does takes a second.
        thresholds = gc.get_threshold()
        gc.set_threshold(_ALLOCATIONS)
        try:
            with lazy_keras.parts():
                yield
        finally:
            gc.set_threshold(*thresholds)
            sys.stderr.flush()
            real = _descriptor
            os.dup2(real, 2)
            _descriptor = 2
            os.close(real)
            collected.seek(0)
            for line in collected.read().decode(errors="replace").splitlines():
                if not re.match(CHATTER, line):
                    tell(line)
            if "tensorflow" in sys.modules and not _frozen:
                # Modules stay in memory until the process ends. The garbage collector needn't look at their 400,000
                # objects again: that takes seconds, most of them at the end of the process.
                gc.freeze()
                _frozen = True
