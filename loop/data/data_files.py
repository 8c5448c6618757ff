"""Files of data: whether one has changed, and the cache of what is derived from them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from callbacks.files import cache_directory
from loop.errors import UsageError


class ChangedFileError(UsageError):
    """A file of data has changed, or is gone. No example of it can be read, so this ends the run in any case."""


class DataFile:
    """A file that must stay as it is while a run reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = _state(path)

    def check(self) -> None:
        """Checks size and time of the file.

        Raises:
            ChangedFileError: they have changed.
        """
        try:
            changed = _state(self.path) != self._state
        except OSError as error:
            raise ChangedFileError(
                f"{self.path} can't be read any more ({error.strerror}): leave it as it is"
            ) from None
        if changed:
            raise ChangedFileError(
                f"{self.path} has changed since the run began: leave data files as they are while it runs"
            )


def cached(kind: str, path: Path) -> Path:
    """The file in the cache that is derived from a data file as it is now: by its path, size and time."""
    # A file that changes gets another name in the cache, so that nothing there has to be checked or replaced.
    status = path.stat()
    known = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    return cache_directory() / kind / hashlib.blake2b(known, digest_size=16).hexdigest()


def _state(path: Path) -> tuple[int, int]:
    # Not a hash of the content, for which the whole file would have to be read.
    status = path.stat()
    return status.st_size, status.st_mtime_ns
