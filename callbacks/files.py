"""Files of a run directory: opened where they are, read up to a bound, written whole under another name.

A run directory may come from a stranger. A link, a pipe or a device in the place of one of its files must neither hang
a command nor lead it to a file elsewhere. So only the functions here open files in a run directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import weakref
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
"""The directory that holds the packages `loop` and `callbacks`, and `cli.py`."""
SQLITE = "sqlite:///"
"""How the address of a store in a sqlite file begins."""
LONGEST = 1 << 26
"""Bytes of a JSON file, or of a line of a journal, that are read: a longer one is none."""


class FileError(OSError):
    """A file of a run directory isn't what it must be; the message is one line for the user."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class UnsafeFileError(FileError):
    """A link, a pipe, a device or a directory stands where a file of a run must be. Exit code 2."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(errno.EINVAL, problem, str(path))

    def __str__(self) -> str:
        return f"{super().__str__()}, not a file of a run: remove it, or give another directory"


class MovedError(FileError):
    """The run directory, or its journal, was moved or deleted while the run was using it. Exit code 1."""


class Anchor:
    """A directory as it was when this was made: tells when its path leads elsewhere."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # While it is open, no other directory can have its number.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def check(self) -> None:
        """Raises a `MovedError` if the directory was moved or deleted."""
        if not is_same(self._path, self._descriptor):
            raise MovedError(
                errno.ENOENT,
                "the run directory was moved or deleted while the run was using it; start again with its new path",
                str(self._path),
            )


def is_same(path: Path, descriptor: int) -> bool:
    """Whether what is open still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def opened(path: Path, flags: int = os.O_RDONLY, shared: bool = False) -> int:
    """Opens a regular file where it is: no link is followed, and no pipe waited for.

    Args:
        path: the file.
        flags: as for `os.open`; a file that is created can be read and written as the umask allows.
        shared: whether the file may have several names. What is written in place may not: the other name may be of a
            file that has nothing to do with the run.

    Returns:
        The file descriptor, which the caller closes.

    Raises:
        UnsafeFileError: it is a link, or no regular file.
        OSError: it can't be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError:
        check(path, shared)
        raise
    problem = _problem(os.fstat(descriptor), shared)
    if problem:
        os.close(descriptor)
        raise UnsafeFileError(path, problem)
    return descriptor


def reading(path: Path, shared: bool = False) -> BufferedReader:
    """Opens a file to be read: see `opened`."""
    return os.fdopen(opened(path, shared=shared), "rb")


def appending(path: Path) -> IO[bytes]:
    """Opens a file, which is made if it isn't there, to be added to without a buffer: see `opened`."""
    return os.fdopen(opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def check(path: Path, shared: bool = False) -> None:
    """Refuses what `opened` would refuse; that there is no file is in order.

    Raises:
        UnsafeFileError: it is a link, or no regular file.
    """
    try:
        problem = _problem(path.lstat(), shared)
    except OSError:
        return
    if problem:
        raise UnsafeFileError(path, problem)


def is_plain(path: Path, shared: bool = False) -> bool:
    """Whether there is a regular file that `opened` would open."""
    try:
        return not _problem(path.lstat(), shared)
    except OSError:
        return False


def _problem(about: os.stat_result, shared: bool) -> str:
    kinds = {stat.S_IFLNK: "it is a symbolic link", stat.S_IFDIR: "it is a directory", stat.S_IFIFO: "it is a pipe"}
    kind = stat.S_IFMT(about.st_mode)
    if kind != stat.S_IFREG:
        return kinds.get(kind, "it is a device or a socket")
    if about.st_nlink > 1 and not shared:
        return f"it has {about.st_nlink} names (hard links)"
    return ""


def read(path: Path, most: int = LONGEST, shared: bool = False) -> bytes:
    """The content of a file.

    Raises:
        OSError: it can't be read, or is longer than `most` bytes.
    """
    with reading(path, shared) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, at most {most:,} are read", str(path))
        return file.read(most)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an empty one where there is none that can be read."""
    try:
        value = json.loads(read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file from where it stands; it ends before one that is longer than any line of a journal."""
    while line := file.readline(LONGEST):
        if len(line) == LONGEST:
            return
        yield line


def created(path: Path) -> IO[bytes]:
    """Opens a new file to be written.

    Raises:
        FileExistsError: there is something of that name, be it a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within it, an error of a file that is open, such as a full disk, names the file: the system's own doesn't."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path, durable: bool = False, aside: Path | None = None) -> Iterator[IO[bytes]]:
    """Writes a file whole: who reads sees the old one, or the new one when the block has ended.

    Args:
        path: the file.
        durable: whether the file is on the disk when the block has ended, whatever happens then.
        aside: the other name under which it is written; `*.tmp` beside it, which is ours in a run directory.

    Yields:
        The file, to be written to. After an error nothing of it is left.
    """
    partial = aside or path.with_name(path.name + ".tmp")
    partial.unlink(missing_ok=True)  # what a kill has left; a link there isn't followed
    try:
        with naming(path), created(partial) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if durable:
        fsync_directory(path.parent)


def hidden_name(path: Path) -> Path:
    """Another name beside a file outside of run directories, where `*.tmp` may be a user's own file."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes a text whole: see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes JSON whole and durably: see `replacing`."""
    with replacing(path, durable=True) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False).encode())


def fsync_directory(path: Path) -> None:
    """Makes renames within a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> Path:
    """Makes a directory within one that is there, unless it is there.

    Raises:
        UnsafeFileError: a link or a file stands there.
    """
    try:
        path.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise UnsafeFileError(path, "it is a symbolic link" if path.is_symlink() else "it is a file") from None
    return path


def sqlite_uri(path: Path) -> str:
    """The address of a sqlite file, with what has a meaning in an address escaped."""
    return SQLITE + re.sub(r"[?#%]", lambda found: f"%{ord(found[0]):02X}", str(path.absolute()))


def sqlite_path(uri: str) -> Path | None:
    """The sqlite file that an address means; None if it means something else."""
    return _parts(uri)[0] if uri.startswith(SQLITE) else None


def absolute_sqlite(uri: str) -> str:
    """The same address, whatever the working directory and the characters of the path; its options stay."""
    path, query = _parts(uri)
    return sqlite_uri(path) + query if uri.startswith(SQLITE) else uri


def _parts(uri: str) -> tuple[Path, str]:
    """Path and query of an address. A ? that no options follow is one of the path."""
    text = uri.removeprefix(SQLITE)
    query = re.search(r"\?\w+=[^/?]*$", text)
    return Path(unquote(text[: query.start()] if query else text)), query[0] if query else ""
