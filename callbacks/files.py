"""Files of a run directory: opened without following links, read up to a limit, and replaced as a whole.

A run directory may have been prepared by an attacker. A link, a pipe or a device in the place of one of its files must
neither hang a command nor lead it to a file elsewhere. So only the functions here open files in a run directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import weakref
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from callbacks.types import Json, JsonObject

ROOT = Path(__file__).resolve().parent.parent
"""The directory that holds the packages `loop` and `callbacks`, and `cli.py`."""
SQLITE = "sqlite:///"
"""The start of the URI of a store in a sqlite file."""
LAUNCH_DIRECTORY = "TFLOOP_DIRECTORY"
"""Environment variable: the directory in which the command was typed. This process has only a copy of its files."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk, a quota or a file that takes no more."""
LONGEST = 1 << 26
"""The most bytes of a JSON file, or of a line of a journal: a longer one is not read."""


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
    """Remembers a directory, and notices when its path leads to another one, or to none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # While it is open, the system gives its inode number to no other directory.
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
    """Whether the open file or directory still has this path."""
    try:
        # `lstat`, so that a link in its place counts as another file.
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def opened(path: Path, flags: int = os.O_RDONLY, shared: bool = False) -> int:
    """Opens a regular file. Follows no link, and waits for no pipe.

    Args:
        path: the file.
        flags: as for `os.open`; a new file has the permissions that the umask allows.
        shared: whether the file may have several hard links. A file that is written in place must not have them:
            another link may be that of a file that has nothing to do with the run.

    Returns:
        The file descriptor, which the caller closes.

    Raises:
        UnsafeFileError: it is a link, or no regular file.
        OSError: it can't be opened.
    """
    try:
        # O_NONBLOCK: without it, opening a pipe waits for a process at its other end.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError:
        check(path, shared)  # says that it is a link, where the system's error doesn't
        raise
    # That of the open file, not of the path, which may have been replaced in the meantime.
    problem = _problem(os.fstat(descriptor), shared)
    if problem:
        os.close(descriptor)
        raise UnsafeFileError(path, problem)
    return descriptor


def reading(path: Path, shared: bool = False) -> BufferedReader:
    """Opens a file for reading: see `opened`."""
    return os.fdopen(opened(path, shared=shared), "rb")


def appending(path: Path) -> IO[bytes]:
    """Opens a file for appending without a buffer; creates it if it doesn't exist: see `opened`."""
    return os.fdopen(opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def check(path: Path, shared: bool = False) -> None:
    """Refuses what `opened` would refuse. A missing file is accepted.

    Raises:
        UnsafeFileError: it is a link, or no regular file.
    """
    if problem := _problem_at(path, shared):
        raise UnsafeFileError(path, problem)


def is_plain(path: Path, shared: bool = False) -> bool:
    """Whether there is a file that `opened` accepts."""
    return _problem_at(path, shared) == ""


def _problem_at(path: Path, shared: bool) -> str | None:
    """Why `opened` refuses the file there; "" if it doesn't, None if there is none."""
    try:
        return _problem(path.lstat(), shared)
    except OSError:
        return None


def _problem(status: os.stat_result, shared: bool) -> str:
    """Why `opened` refuses a file; "" if it doesn't."""
    kinds = {stat.S_IFLNK: "it is a symbolic link", stat.S_IFDIR: "it is a directory", stat.S_IFIFO: "it is a pipe"}
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        return kinds.get(kind, "it is a device or a socket")
    if status.st_nlink > 1 and not shared:
        return f"it has {status.st_nlink} names (hard links)"
    return ""


def read(path: Path, most: int = LONGEST, shared: bool = False) -> bytes:
    """The content of a file.

    Raises:
        OSError: it can't be read, or is longer than `most` bytes.
    """
    with reading(path, shared) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:  # a sparse file of any size costs an attacker nothing
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, at most {most:,} are read", str(path))
        return file.read(most)  # not more, even if the file has grown since


def read_json(path: Path) -> JsonObject:
    """A JSON object from a file; {} if there is none, or it can't be read."""
    try:
        value = json.loads(read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file from its position on; ends before a line that is longer than any of a journal."""
    while line := file.readline(LONGEST):
        if len(line) == LONGEST:
            return
        yield line


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to errors within it: the system's error for a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path, durable: bool = False, aside: Path | None = None) -> Iterator[IO[bytes]]:
    """Replaces a file as a whole: readers see the old content until the block has ended, and then the new one.

    Args:
        path: the file.
        durable: whether the content survives a power failure after the block.
        aside: the name under which it is written first; by default PATH.tmp, which is reserved in a run directory.

    Yields:
        The file to write to. After an error, nothing of it is left.
    """
    partial = aside or _partial_name(path)
    partial.unlink(missing_ok=True)  # left over by a kill; a link is removed, not followed
    try:
        # "x" refuses any name that exists, also a link that leads to nothing.
        with naming(path), partial.open("xb") as file:
            yield file
            file.flush()
            if durable:  # before the rename: after a power failure, the new name must not stand for an empty file
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:  # an interrupt, too
        with contextlib.suppress(OSError):  # best effort: must not hide the error
            partial.unlink()
        raise
    if durable:
        fsync_directory(path.parent)


def _partial_name(path: Path) -> Path:
    name = f"{path.name}.tmp"
    if len(os.fsencode(name)) > 255:  # the most that file systems take
        name = f"{hashlib.sha256(os.fsencode(path.name)).hexdigest()}.tmp"
    return path.with_name(name)


def place(made: Path, path: Path) -> None:
    """Gives a finished file its name. If another process has made a file of this name meanwhile, that one stays."""
    try:
        os.link(made, path)
    except OSError:  # it is there, or the file system has no links
        if not path.exists():
            made.replace(path)


def hidden_name(path: Path) -> Path:
    """A temporary name for a file outside of run directories, where PATH.tmp may be a file of the user."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes a text: see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Json) -> None:
    """Writes JSON durably: see `replacing`."""
    with replacing(path, durable=True) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False).encode())


def fsync_directory(path: Path) -> None:
    """Makes renames within a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def expanded(path: str) -> Path:
    """A path with the user's home directory in place of ~.

    Raises:
        FileError: the system knows no home directory, as in a container whose user has no name.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileError(errno.ENOENT, "this user has no home directory: set HOME", path) from None


def cache_directory() -> Path:
    """Where what can be made again is kept: `TFLOOP_CACHE`, or `tfloop` in the user's cache directory."""
    own = os.environ.get("TFLOOP_CACHE")
    return expanded(own) if own else expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "tfloop"


def make_directory(path: Path) -> Path:
    """Makes a directory, unless it exists; its parent must exist.

    Raises:
        UnsafeFileError: the path is a link or a file.
    """
    try:
        path.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(path.lstat().st_mode):
            kind = "a symbolic link" if path.is_symlink() else "a file"
            raise UnsafeFileError(path, f"it is {kind}") from None
    return path


def launch_path(path: str | Path) -> Path:
    """An absolute path. A relative one starts in the directory in which the command was typed, on any machine."""
    return Path(os.environ.get(LAUNCH_DIRECTORY, "."), path).absolute()


def original_path(path: Path) -> Path:
    """The original of a file that lies in a copy of the directory in which the command was typed."""
    if LAUNCH_DIRECTORY in os.environ and path.is_relative_to(here := Path.cwd().resolve()):
        return launch_path(path.relative_to(here))
    return path


def sqlite_uri(path: Path) -> str:
    """The URI of a sqlite file, with the characters escaped that have a meaning in URIs."""
    return SQLITE + re.sub(r"[?#%]", lambda character: f"%{ord(character[0]):02X}", str(launch_path(path)))


def sqlite_path(uri: str) -> Path | None:
    """The sqlite file of a URI; None if it is another kind of URI."""
    return _path_and_query(uri)[0] if uri.startswith(SQLITE) else None


def absolute_sqlite(uri: str) -> str:
    """The same URI with an absolute, escaped path and the same options, so that it is valid in any directory."""
    path, query = _path_and_query(uri)
    return sqlite_uri(path) + query if uri.startswith(SQLITE) else uri


def _path_and_query(uri: str) -> tuple[Path, str]:
    """The path and the query of a URI. A ? without options after it belongs to the path."""
    text = uri.removeprefix(SQLITE)
    query = re.search(r"\?\w+=[^/?]*$", text)
    if query is None:
        return Path(unquote(text)), ""
    return Path(unquote(text[: query.start()])), query[0]
