"""Lock: one run at a time in a run directory. A dead owner's lock is free: the kernel lets go of it."""

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
from loop.errors import UsageError

NAME = "lock"
A_LOOK = 0.5
"""Seconds that are more than enough for who only looks whether a lock is held (`tfloop runs`), by taking it."""


@contextlib.contextmanager
def locked(directory: Path, wait: float = A_LOOK) -> Iterator[None]:
    """Holds the lock of a run directory.

    Args:
        directory: which one.
        wait: so many seconds another process has to let go of it.

    Raises:
        UsageError: another process holds it; which one, since when.
    """
    path = directory / NAME
    with contextlib.closing(_taken(path, time.monotonic() + wait)) as file:
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "namespace": _namespace(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        try:
            with _writing(directory):
                file.truncate(0)
                file.write(json.dumps(owner).encode())
            yield
        finally:
            if files.is_same(path, file.fileno()):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except files.UnsafeFileError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(
            f"the run directory {directory} can't be written ({error.strerror}): make room in it, or give another one"
        ) from None


def _taken(path: Path, deadline: float) -> IO[bytes]:
    while True:
        with _writing(path.parent):
            file = files.appending(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            owner = read_json(path)
            here = owner.get("host") == socket.gethostname() and owner.get("namespace") == _namespace()
            if not here or _alive(owner.get("pid")):
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                raise UsageError(
                    f"the run directory {path.parent} is in use by process {owner.get('pid', '?')} on "
                    f"{owner.get('host', '?')} since {owner.get('time', '?')}: wait for it, or give another one"
                ) from None
            # A child of the dead owner has inherited the lock; or another process has just taken it, and is about to
            # write its own name.
            time.sleep(1.0)
            if read_json(path) == owner:
                path.unlink(missing_ok=True)
            continue
        except OSError:  # a file system without locks: nothing can be checked there
            return file
        # Between our opening and our locking it, its owner may have removed the file: then it is locked in vain.
        if files.is_same(path, file.fileno()):
            return file
        file.close()


def _namespace() -> str:
    """Of whose processes we see the ids: containers may share a host's name, but not these."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not on Linux
        return ""


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True
