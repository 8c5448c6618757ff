"""Processes that read and map examples beside the one that trains, and hand them over in shared memory."""

from __future__ import annotations

import contextlib
import functools
import mmap
import operator
import os
import pickle
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, Any

import numpy as np

from loop.data.examples import Arrays, ArraySpec, ExampleReader, MixedReader, arrays_of
from loop.errors import TrainingError, UsageError, named
from loop.launch.signals import STOPS

_READY = "ready"
"""The first answer of a process: it can read from now on."""

_GRACE = 1.0
"""Seconds that a process has to end by itself after the training: what a map has made may clean up at its exit."""

_shape_of = operator.attrgetter("shape")


class ReaderProcess:
    """Starts a process that reads examples, and asks it for them.

    The process is a new interpreter, not a fork: TensorFlow's threads and locks don't survive one. It imports what the
    source and its map need, which may take seconds, and is `ready` after that.

    Args:
        payload: the source and its map, as `pickled` returns them.
        number: the number of the process, for messages.
    """

    def __init__(self, payload: bytes, number: int) -> None:
        self._number = number

        # Requests and answers go through pipes; the arrays of an answer lie in shared memory, and aren't copied.
        self._memory = _shared_file()
        self._map = mmap.mmap(self._memory, 0)
        child_reads, requests = os.pipe()
        answers, child_writes = os.pipe()
        passed = (child_reads, child_writes, self._memory)
        start = f"from loop.data.reader_process import serve; serve{passed}"
        # The empty entry of a prompt or a notebook is the working directory, which PYTHONPATH needs by name.
        path = os.pathsep.join(entry or os.curdir for entry in sys.path)
        with contextlib.ExitStack() as opened:
            # The child's ends are closed here in any case: only then does a pipe end when the child has ended.
            opened.callback(os.close, child_reads)
            opened.callback(os.close, child_writes)
            # A terminal, `timeout` and others signal all processes of a group. Such a signal is for the training, which
            # saves and ends this process. The process inherits that they are blocked here: none can come before it
            # could ignore them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            opened.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            # TensorFlow in a map is to take the memory of a GPU that it needs, and not all of it, from the training.
            environment = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ, "PYTHONPATH": path}
            # What the map prints must not come between the results on stdout. "-P" puts no directory before our path.
            stdout = sys.__stderr__.fileno() if sys.__stderr__ else None
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", start], pass_fds=passed, stdin=subprocess.DEVNULL, stdout=stdout,
                env=environment,
            )  # fmt: skip
        self._requests = os.fdopen(requests, "wb")
        self._answers = os.fdopen(answers, "rb")
        self._ready = False
        with contextlib.suppress(BrokenPipeError):  # `read` says that it has ended
            self._requests.write(len(payload).to_bytes(8))
            self._requests.write(payload)  # by itself: it may have gigabytes, of which no copy is to be made
            self._requests.flush()

    @property
    def ready(self) -> bool:
        """Whether it has imported what it needs; it may also have ended."""
        if not self._ready:
            poll = select.poll()  # `select` takes no descriptor from 1024 on
            poll.register(self._answers, select.POLLIN)
            if poll.poll(0):
                self._ready = self._answer() == _READY
        return self._ready

    def read(self, ids: np.ndarray, seeds: np.ndarray) -> Arrays:
        """See `arrays_of`; what is returned is valid until the next call.

        Raises:
            TrainingError: the process has ended.
        """
        with contextlib.suppress(BrokenPipeError):  # `_answer` says that it has ended
            pickle.dump((ids, seeds), self._requests)
            self._requests.flush()
        data, sizes = self._answer()

        # The process makes the file larger where an answer needs it.
        if len(self._map) < sum(sizes):
            self._map = mmap.mmap(self._memory, 0)
        buffers = []
        start = 0
        for size in sizes:
            buffers.append(memoryview(self._map)[start : start + size])
            start += size
        return pickle.loads(data, buffers=buffers)  # noqa: S301 - from a process of our own

    def close(self) -> None:
        """Ends the process at once."""
        # Killed, since code of the user within it may take any time.
        self._process.kill()
        self._process.wait()
        for file in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                file.close()
        os.close(self._memory)

    def _answer(self) -> Any:
        try:
            return pickle.load(self._answers)  # noqa: S301 - from a process of our own
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self._process.wait()
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise TrainingError(
                f"reader process {self._number} has ended {how} while it read examples; what it printed stands above. "
                "If memory ran out, use fewer readers=..."
            ) from None


class ReaderProcesses:
    """A reader process for each of `count` threads, started when its thread first reads."""

    def __init__(self, payload: bytes, count: int) -> None:
        self._payload = payload
        self._processes: list[ReaderProcess | None] = [None] * count
        self._lock = threading.Lock()
        # The finalizer holds the list, and not this object, which could never be collected then.
        self._finalizer = weakref.finalize(self, _close, self._processes)

    def of_thread(self, thread: int) -> ReaderProcess | None:
        """The process of a thread; None while it starts, so that the thread reads by itself."""
        process = self._processes[thread]
        if process is None:
            process = ReaderProcess(self._payload, thread)
            with self._lock:
                closed = not self._finalizer.alive
                if not closed:
                    self._processes[thread] = process
            if closed:  # while this one was started
                process.close()
                return None
            if None not in self._processes:
                self._payload = b""  # it may have all examples of a source in memory
        return process if process.ready else None

    def close(self) -> None:
        """Ends all of them at once, also one that a thread is starting just now."""
        with self._lock:
            self._finalizer()


def _close(processes: list[ReaderProcess | None]) -> None:
    for process in processes:
        if process is not None:
            process.close()


def pickled(reader: ExampleReader | MixedReader, specs: list[ArraySpec]) -> bytes:
    """What a reader process needs.

    Raises:
        UsageError: the source or its map can't be sent to another process.
    """
    import cloudpickle

    try:
        with _by_value(cloudpickle):
            return bytes(cloudpickle.dumps((reader, specs)))
    except Exception as error:
        raise UsageError(
            f"IndexedData(readers=...): the source or its map can't be sent to a process ({named(error)}): open "
            "files and connections within __getitem__ or map, or leave readers out: threads read then"
        ) from None


@contextlib.contextmanager
def _by_value(cloudpickle: ModuleType) -> Iterator[None]:
    """Within it, functions and classes of the user's own modules are sent as they are.

    A task's module is loaded from its file, so that another process can't import it by its name; nor need it import
    what only the training uses.
    """
    own = list(filter(_is_users, list(sys.modules.values())))  # a copy: another thread may import something
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:  # the registry is that of the whole process, which the user's code may use, too
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not file:
        return False
    # What is defined in `__main__` is sent by value anyway.
    if module.__name__.split(".")[0] in ("__main__", "loop", "callbacks", "cli"):
        return False
    return not any(Path(file).is_relative_to(folder) for folder in _installed_in())


@functools.cache
def _installed_in() -> list[str]:
    """Where Python's own modules and installed ones lie: to ask for that takes 0.1 ms, and there are 6,000 modules."""
    paths = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return [*filter(None, dict.fromkeys(paths))]


def _shared_file() -> int:
    """A file that exists in memory alone, or has no name: nothing of it stays, whatever is killed."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("tfloop-reader")
    else:
        with tempfile.TemporaryFile() as file:  # the file has no name any more; the duplicate keeps it open
            memory = os.dup(file.fileno())
    os.ftruncate(memory, mmap.PAGESIZE)  # an empty file can't be mapped
    return memory


# In the reader process


def serve(requests: int, answers: int, memory: int) -> None:
    """Answers requests until their pipe ends, as it does when the training ends."""
    _ignore_stops()
    threading.Thread(target=_end_with, args=(requests,), daemon=True).start()
    with (
        contextlib.suppress(BrokenPipeError),  # first: closing the pipe writes what is left of an answer once more
        os.fdopen(requests, "rb") as asked,
        os.fdopen(answers, "wb") as answering,
    ):
        size = int.from_bytes(asked.read(8))
        payload = asked.read(size)
        if not payload or len(payload) < size:
            return  # the training has ended while it sent that
        reader, specs = pickle.loads(payload)  # noqa: S301 - from the process that started this one
        _send(answering, _READY)  # not before: to unpickle the reader imports what the source needs
        shared = _Shared(memory)
        while True:
            try:
                ids, seeds = pickle.load(asked)  # noqa: S301
            except EOFError:
                return
            read = arrays_of(reader, specs, ids, seeds)

            # Protocol 5 leaves the contents of arrays out of the pickle: they go to the shared memory.
            buffers: list[pickle.PickleBuffer] = []
            data = pickle.dumps(_stacked(read), protocol=5, buffer_callback=buffers.append)
            sizes = shared.put([buffer.raw() for buffer in buffers])
            _send(answering, (data, sizes))


def _end_with(requests: int) -> None:
    """A thread: ends this process when the pipe of the requests has ended, also while code of the user is waiting."""
    poll = select.poll()
    poll.register(requests, 0)  # no event but the end of the pipe, which can't be left out
    poll.poll()
    time.sleep(_GRACE)
    os._exit(0)


def _ignore_stops() -> None:
    """Lets the signals that stop a run pass, but not in processes that the map starts.

    They have been blocked since this process began. A process that the map starts would have them blocked, too, or
    would ignore them if this one did: then it doesn't end when the map terminates it, and the map waits forever.
    """
    before = {}
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores it, also in processes that the map starts
            before[number] = signal.signal(number, _pass)  # no handler of Python's comes into a started program
            signal.siginterrupt(number, False)  # libraries of C are to read on
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOPS)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        unblock()

    # A fork, such as a process of a pool, would have the handlers. Blocked meanwhile: no signal for it is lost.
    os.register_at_fork(
        before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOPS),
        after_in_parent=unblock,
        after_in_child=restore,
    )
    unblock()


def _pass(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing."""


def _send(answers: IO[bytes], answer: Any) -> None:
    pickle.dump(answer, answers)
    answers.flush()


def _stacked(read: Arrays) -> Arrays:
    """Each array of all examples stacked, if they have one shape. Prints the causes of errors, which aren't sent."""
    if isinstance(read, tuple):
        return read
    failed = [error for error in read if isinstance(error, Exception)]
    for error in failed:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
    if failed:
        return read
    columns = list(zip(*read, strict=True))
    for column in columns:
        if len(set(map(_shape_of, column))) > 1:  # an array that is to be padded
            return read
    return tuple(map(np.stack, columns))


class _Shared:
    """The shared memory, to which answers are written."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._map = mmap.mmap(memory, 0)

    def put(self, buffers: list[memoryview]) -> list[int]:
        """Writes buffers one after the other; returns their sizes in bytes."""
        sizes = [buffer.nbytes for buffer in buffers]
        needed = sum(sizes)
        if len(self._map) < needed:
            # It never gets smaller: the training may have mapped all of it, and reading past a file's end kills.
            os.ftruncate(self._memory, needed)
            self._map = mmap.mmap(self._memory, 0)
        start = 0
        for buffer, size in zip(buffers, sizes, strict=True):
            self._map[start : start + size] = buffer
            start += size
        return sizes
