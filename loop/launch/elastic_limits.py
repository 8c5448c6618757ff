"""How many workers an elastic job may have: `--elastic MIN:MAX` and `--discovery SCRIPT`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from callbacks.run_record.redaction import mask
from loop.errors import UsageError
from loop.launch import signals
from loop.launch.backend_choice import MOST_WORKERS
from loop.launch.environment import WORKER, job_size

_PATIENCE = 30.0  # seconds that a discovery script has
_END_GRACE = 10.0  # seconds that its thread has at the end: it may wait for stderr


@dataclasses.dataclass
class Limits:
    """How many workers a job may have."""

    low: int  # the fewest workers with which the job goes on
    high: int  # the most workers that run at once
    # A script that prints how many workers this machine has room for; None: their number is fixed.
    discovery: Path | None = None


def read_limits(
    text: str | None, discovery: Path | None, backend: str, workers: int | None, hosts: str | None = None
) -> Limits | None:
    """The limits that `--elastic MIN:MAX` and `--discovery SCRIPT` give; None without these options.

    Raises:
        UsageError: numbers that are out of range, or a backend that isn't elastic.
    """
    if text is None:
        if discovery is not None:
            raise UsageError(f"--discovery {discovery} without --elastic: say how many workers there may be: MIN:MAX")
        return None
    low, high = _numbers(text)
    if workers is not None and not low <= workers <= high:
        given = f"--hosts {hosts} has {workers} workers," if hosts else f"--workers {workers}"
        raise UsageError(f"{given} with --elastic {text}: give a number from {low} to {high}")
    if backend not in ("auto", "horovod"):
        raise UsageError(f"--elastic {text} with --backend {backend}: only horovod can go on without a worker")
    # A worker of an elastic job has the launcher's command line, with --elastic in it.
    if job_size() is not None and WORKER not in os.environ:
        raise UsageError(f"--elastic {text}: this job has a launcher of its own: leave one of them out")
    if discovery is not None:
        _check_discovery(discovery, hosts)
    return Limits(low, high, discovery)


def _check_discovery(script: Path, hosts: str | None) -> None:
    if hosts is not None:
        raise UsageError(f"--discovery {script} with --hosts {hosts}: the script is for this machine: leave one out")
    if not os.access(script, os.X_OK):
        raise UsageError(f"--discovery {script}: there is no such script, or it can't be run (chmod +x)")


def _numbers(text: str) -> tuple[int, int]:
    # At most 9 digits: Python itself refuses to read a number of thousands.
    if not re.fullmatch(r"\d{1,9}:\d{1,9}", text, re.ASCII):
        raise UsageError(f"--elastic {text}: give the least and the greatest number of workers, such as 1:4")
    low, high = map(int, text.split(":"))
    if high > MOST_WORKERS:
        raise UsageError(f"--elastic {text}: give at most {MOST_WORKERS} workers")
    if low < 1:
        raise UsageError(f"--elastic {text}: a job needs at least 1 worker")
    if low > high:
        raise UsageError(f"--elastic {text}: MIN is greater than MAX: give {high}:{low}")
    return low, high


@contextlib.contextmanager
def discovering(script: Path, take: Callable[[int], None], say: Callable[[str], None]) -> Iterator[None]:
    """Within it, a thread runs the script every second. A script that runs at the end is killed.

    Args:
        script: the script.
        take: takes how many workers this machine has room for.
        say: prints a line; it takes the script's errors.
    """
    over = threading.Event()
    thread = threading.Thread(target=_discover, args=(script, take, say, over), name="discovery", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        end_by = time.monotonic() + _END_GRACE
        while thread.is_alive() and time.monotonic() < end_by:
            signals.end_groups()  # again: the thread may have been about to start the script
            thread.join(0.1)


def _discover(script: Path, take: Callable[[int], None], say: Callable[[str], None], over: threading.Event) -> None:
    """See `discovering`."""
    printed = ""  # the newest error, which is printed once
    while not over.wait(1.0):
        try:
            take(discovered_slots(script))
        except UsageError as error:
            if str(error) != printed and not over.is_set():
                printed = str(error)
                say(f"warning: {printed}")


def discovered_slots(script: Path) -> int:
    """How many workers the script's lines `host:slots` allow on this machine.

    Raises:
        UsageError: the script fails, or prints something else.
    """
    slots = 0
    for line in _printed(script).split():
        host, _, count = line.partition(":")  # the form of Horovod's --host-discovery-script
        is_count = re.fullmatch(r"\d{1,9}", count or "1", re.ASCII)
        if host not in ("localhost", "127.0.0.1", socket.gethostname()) or not is_count:
            raise UsageError(
                f"--discovery {script} printed {line!r}: give localhost:SLOTS; elastic workers run on this machine"
            )
        slots += int(count or 1)
    return slots


def _printed(script: Path) -> str:
    """What the script prints. One that hangs is killed, with all that it has started.

    Raises:
        UsageError: it can't be run, fails, or hangs.
    """
    try:
        # By its whole path: a name without a slash would be looked for on PATH. In a session of its own: Ctrl-C
        # reaches the launcher alone, and the script's own processes can be killed with it.
        process = subprocess.Popen(
            [script.absolute()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(
            f"--discovery {script} can't be run ({error.strerror}): is its first line such as #!/bin/sh?"
        ) from None
    with process, signals.ended_with_us(process):
        try:
            out, errors = process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"--discovery {script} has not ended within {_PATIENCE:g} s: it must print localhost:SLOTS, and end"
            ) from None
    if process.returncode:
        said = mask(" ".join(errors.decode(errors="replace").split())[-200:])
        raise UsageError(
            f"--discovery {script} has failed with exit status {process.returncode} ({said or 'it printed no error'}): "
            "it must print localhost:SLOTS, and end with 0"
        )
    return out.decode(errors="replace")
