"""Signals: which ones stop a command, how often it was asked to stop, and handlers for a limited time."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
"""What Python calls for a signal; or SIG_IGN, SIG_DFL."""
_Previous = Callable[[int, FrameType | None], object] | int
"""What `signal.signal` returns for a handler that was there before."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a command to end; a second one ends it at once. A terminal that is closed sends SIGHUP."""
STOPPED = "stopped before training began; start again to go on"
"""The message for a stop by a signal before there was anything to save."""
STOPPING = "interrupted: the run saves and ends; a second Ctrl-C (or signal) ends it at once, without saving"
"""The message that is printed at once when a signal stops a run."""
_IN_USE = ".tfloop"
"""The end of the names of directories that the processes which use them hold a lock on."""
_START = 3600.0  # seconds after which a directory without a lock counts as abandoned
_SAME = 0.3  # seconds within which a signal that comes twice counts once: `timeout` sends it to a process and its group
_directories: set[str] = set()  # those of `temporary_directory` that exist
_groups: set[int] = set()  # the process groups of `ended_with_us`, by their leaders
_own: set[int] = set()  # the descriptors into which Python writes signals for `watched`
_masks = threading.local()  # the signals that a thread had blocked before it forked
_before: dict[int, _Previous] = {}  # the handlers that signals had before the outermost `handled`


def stops() -> list[signal.Signals]:
    """The signals of `STOPS` that this process handles: without SIGHUP if it is ignored, as under `nohup`."""
    handled_here = list(STOPS)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        handled_here.remove(signal.SIGHUP)
    return handled_here


class Wishes:
    """Counts how often a command was asked to stop.

    SIGHUP and another signal count once: at the end of a session, its processes receive both.

    Attributes:
        count: how often it was asked.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[int, float] = {}
        self._only_hangups = True

    def hear(self, number: int) -> int:
        """Takes a signal; returns how often the command was asked to stop."""
        now = time.monotonic()
        last = self._last.get(number)
        self._last[number] = now
        if number == signal.SIGHUP:
            self.count = max(self.count, 1)
        elif last is None or now - last > _SAME:
            # After SIGHUP alone, this is still the first wish.
            self.count = 1 if self._only_hangups else self.count + 1
            self._only_hangups = False
        return self.count


@contextlib.contextmanager
def handled(actions: Mapping[int, Handler]) -> Iterator[None]:
    """Within it, these functions handle the signals; afterwards the previous handlers are restored.

    Raises:
        ValueError: this isn't the main thread.
    """
    previous: dict[int, _Previous] = {}
    outermost = [number for number in actions if number not in _before]
    for number, action in actions.items():
        # None: a handler that native code has set, which Python can't restore.
        previous[number] = signal.signal(number, action) or signal.SIG_DFL
    for number in outermost:
        _before[number] = previous[number]
    try:
        yield
    finally:
        for number in outermost:
            _before.pop(number, None)  # a forked process has forgotten it
        for number, handler in previous.items():
            signal.signal(number, handler)


def _block_for_fork() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # no signal for the new process is lost meanwhile


def _unblock_after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _restore_in_fork() -> None:
    """Restores the handlers of signals in a forked process, such as one of a `multiprocessing.Pool` in a map.

    Otherwise the process couldn't be terminated, and a signal for it would stop the training, whose pipe it has.
    """
    if _own:
        signal.set_wakeup_fd(-1)
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()
    _unblock_after_fork()


os.register_at_fork(before=_block_for_fork, after_in_parent=_unblock_after_fork, after_in_child=_restore_in_fork)


@contextlib.contextmanager
def watched(heard: Callable[[int], None]) -> Iterator[None]:
    """Within it, a thread calls `heard` at once for each signal that has a handler.

    Python calls the handlers themselves only after a call into TensorFlow has ended, which may take minutes.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # Python writes from a signal handler, which must never wait
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _own.add(writer)

    def watch() -> None:
        while number := os.read(reader, 1):
            # The descriptor of another library, such as an event loop: it gets the signal, too.
            is_foreign = before not in (-1, *_own)
            if is_foreign:
                with contextlib.suppress(OSError):
                    os.write(before, number)
            heard(number[0])
        os.close(reader)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield
    finally:
        # In this order: Python must not write a signal into a closed descriptor, or into the next file of its number.
        signal.set_wakeup_fd(before)
        _own.discard(writer)
        os.close(writer)  # ends the thread, which reads the end of the pipe


@contextlib.contextmanager
def interrupting(always: Sequence[int] = ()) -> Iterator[list[int]]:
    """Within it, each of `stops` raises KeyboardInterrupt, so that a command cleans up; a second one ends it at once.

    Args:
        always: signals that are handled even if this process ignores them: a shell starts background jobs so that
            they ignore SIGINT.

    Yields:
        A list that gets the number of the first signal.
    """
    wishes = Wishes()
    first: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if wishes.hear(number) > 1:
            die(number)
        if not first:  # else it is the same wish, and the command already cleans up
            first.append(number)
            raise KeyboardInterrupt

    actions: dict[int, Handler] = {}
    for number in stops():
        if number in always or signal.getsignal(number) != signal.SIG_IGN:
            actions[number] = interrupt
    with handled(actions):
        yield first


def die(number: int) -> None:
    """Ends this process by a signal, from any thread, whatever the other threads are doing."""
    ctypes.pythonapi.PyOS_setsig(number, None)  # `signal.signal` is for the main thread alone
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[str]:
    """Within it, a new directory exists. It is removed at the end, also by `leave`.

    One that a killed process has left is removed by a later call.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    directory = tempfile.mkdtemp(prefix=prefix, suffix=_IN_USE)
    _directories.add(directory)
    try:
        with in_use(directory):
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        _directories.discard(directory)


@contextlib.contextmanager
def in_use(directory: str) -> Iterator[None]:
    """Within it, no other process takes this directory of `temporary_directory` for an abandoned one."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Removes directories of this user whose processes were killed: no process has a lock on them any more."""
    for path in folder.glob(f"tfloop-*{_IN_USE}"):
        # One that can't be opened is a link, of another user, or just being removed.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                status = os.fstat(descriptor)
                # Workers of a launcher that was killed take the lock only after their start, which takes a while.
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _START:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Within it, a process runs that leads a group. After an error, and by `end_groups`, the whole group is killed."""
    _groups.add(process.pid)
    try:
        yield
    except BaseException:
        end_groups([process.pid])
        raise
    finally:
        _groups.discard(process.pid)


def end_groups(leaders: Iterable[int] = ()) -> None:
    """Kills these process groups; by default, all of `ended_with_us`."""
    for leader in list(leaders or _groups):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def remove_generated_code() -> None:
    """Removes the files that AutoGraph has written for this process alone, and Python's bytecode of them.

    TensorFlow removes the files by itself, but not those of bytecode, and nothing where `leave` ends the process.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            path = Path(str(module.__file__))
            bytecode = Path(importlib.util.cache_from_source(str(path)))
            with contextlib.suppress(OSError):  # it isn't there, or other processes have theirs in its folder
                path.unlink(missing_ok=True)
                bytecode.unlink(missing_ok=True)
                bytecode.parent.rmdir()


def leave(code: int) -> NoReturn:
    """Ends this process at once, from any thread, without temporary directories and processes that it would leave."""
    end_groups()
    for directory in list(_directories):
        shutil.rmtree(directory, ignore_errors=True)
    remove_generated_code()
    os._exit(code)
