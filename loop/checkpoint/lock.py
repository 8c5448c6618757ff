"""Lock: one run at a time in a run directory. The kernel releases the lock of a process that has died."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from callbacks import files
from callbacks.files import read_json
from callbacks.types import JsonObject
from loop.errors import UsageError

NAME = "lock"
A_LOOK = 0.5
"""Seconds to wait for a process that holds the lock only to see whether it is free, such as `tfloop runs`."""


@contextlib.contextmanager
def locked(directory: Path, wait: float = A_LOOK) -> Iterator[None]:
    """Holds the lock of a run directory.

    Args:
        directory: the run directory.
        wait: seconds to wait for a process that holds the lock.

    Raises:
        UsageError: another process holds it; the message says which one, and since when.
    """
    path = directory / NAME
    # Closed last, which gives the lock back: the file is removed while this process still has it.
    with contextlib.closing(_taken(path, time.monotonic() + wait)) as file:
        try:
            with _writing(directory):
                file.truncate(0)
                file.write(json.dumps(about_this_process()).encode())
            yield
        finally:
            if files.is_same(path, file.fileno()):  # else the run directory was moved, and the file is of another run
                with contextlib.suppress(OSError):  # free in any case, and how the run ended must not be hidden
                    path.unlink()


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turns errors of writing within it into a `UsageError`."""
    try:
        yield
    except files.UnsafeFileError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        how = "make room in it" if error.errno in files.FULL else "make it writable"
        raise UsageError(
            f"the run directory {directory} can't be written ({error.strerror}): {how}, or give another one"
        ) from None


def _taken(path: Path, deadline: float) -> IO[bytes]:
    """The lock's file, open and locked; tries until `deadline`, on the monotonic clock."""
    while True:
        with _writing(path.parent):
            file = files.appending(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()  # the file may be another one at the next try
            _wait_for_owner(path, deadline)
            continue
        except OSError:  # a file system without locks: nothing can be checked there
            return file
        # The former owner may have removed the file after it was opened here: then no other process sees this lock.
        if files.is_same(path, file.fileno()):
            return file
        file.close()


def _wait_for_owner(path: Path, deadline: float) -> None:
    """Waits a moment for the process that holds the lock; removes the lock of a dead one.

    Raises:
        UsageError: the deadline is over, and the process is alive, as far as can be seen.
    """
    owner = read_json(path)
    may_be_alive = not is_dead(owner)
    if may_be_alive and time.monotonic() >= deadline:
        raise UsageError(
            f"the run directory {path.parent} is in use by process {owner.get('pid', '?')} on "
            f"{owner.get('host', '?')} since {owner.get('time', '?')}: wait for it, or give another one"
        ) from None
    if may_be_alive:
        time.sleep(0.1)
        return
    # The recorded owner is dead. Either a child of it has inherited the lock, and the file is removed. Or another
    # process has just taken the lock, and writes its name into the file during this pause.
    time.sleep(1.0)
    if read_json(path) == owner:
        path.unlink(missing_ok=True)


def about_this_process() -> JsonObject:
    """What identifies the process that holds a lock, or a lease, for others."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "namespace": _namespace(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def is_dead(owner: JsonObject) -> bool:
    """Whether an owner has ended, as far as can be seen: another host's processes can't be checked from here."""
    is_local = owner.get("host") == socket.gethostname() and owner.get("namespace") == _namespace()
    return is_local and not _is_alive(owner.get("pid"))


def _namespace() -> str:
    """The namespace of process ids. Containers and machines may share the name of a host, but not this."""
    try:
        # The first namespace of each machine has the same number; the id is drawn anew when a machine starts.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not on Linux
        return ""


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)  # signal 0 only asks whether there is such a process
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:  # of another user
        return True
    return True
