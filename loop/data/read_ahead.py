"""Reading ahead: threads of the host fill the batches that the next steps will ask for, unless that takes longer."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_ALIGNMENT = 64
"""Bytes; see `array_of_own`."""

_AT_ONCE = 2e-4
"""Seconds. What is read within this time is read by the one that asks for it: to hand it over from another thread takes
as long, and both wait for Python's lock."""

_SLOWER = 1.2
"""By how much a slow batch makes the estimate of the seconds that a batch takes grow at most."""


class Position(NamedTuple):
    """Which global batch: the one at `step` of `epoch`, both from 0."""

    epoch: int
    step: int

    def after(self, steps: int, steps_per_epoch: int) -> Position:
        """The position this many steps later."""
        epochs, step = divmod(self.step + steps, steps_per_epoch)
        return Position(self.epoch + epochs, step)


class PendingBatch:
    """A batch that several threads fill, each a stretch of its rows.

    Args:
        index: the examples of the batch: int64 [n].
        epoch: the epoch, from 0.
        leaves: the arrays to fill, each of shape [n, ...]; or tensors that are.
    """

    def __init__(self, index: np.ndarray, epoch: int, leaves: list[Any]) -> None:
        self.index = index
        self.epoch = epoch
        self.leaves = leaves
        self.error: BaseException | None = None
        self.cancelled = False
        self.requested = False
        self._left = 0
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether it is filled, or can't be."""
        return self._done.is_set()

    def cut(self, parts: int) -> list[slice]:
        """The stretches of rows that are filled by themselves, at most `parts` of them."""
        rows = len(self.index)
        stretches = [slice(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]
        filled = [stretch for stretch in stretches if stretch.start < stretch.stop]
        self._left = len(filled)
        if not filled:
            self._done.set()
        return filled

    def finish(self, error: BaseException | None = None) -> None:
        """One stretch is filled, or can't be."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            if error is not None or not self._left:
                self._done.set()

    def wait(self) -> None:
        """Waits until all rows are filled.

        Raises:
            BaseException: what reading a row has raised.
        """
        if not self._done.is_set():
            self._done.wait()
        if self.error is not None:
            raise self.error


Fill = Callable[[PendingBatch, slice, int], None]
"""Reads a stretch of the rows of a batch, by the thread of this number."""


class ReadAhead:
    """Batches, in order, that threads read before they are asked for.

    A batch is known by its position alone, so that any can be asked for at any time: one that isn't under way begins
    the reading anew from there. Where batches are read faster than a thread hands them over, the one that asks reads
    them: the graph asks for a batch while it computes on the one before.

    Args:
        plan: the batch at a position, to be filled.
        fill: reads some of its rows; it must not hold what holds this object.
        following: the position after another one; None: nothing is to be read after it.
        depth: how many batches are read before they are asked for.
        threads: how many read.
        at_once: whether the one that asks may read a batch by itself, if that is faster than to have it handed over.
    """

    def __init__(
        self,
        plan: Callable[[Position], PendingBatch],
        fill: Fill,
        following: Callable[[Position], Position | None],
        depth: int,
        threads: int,
        at_once: bool = False,
    ) -> None:
        self._plan = plan
        self._fill = fill
        self._at_once = at_once
        self._following = following
        self._depth = depth
        self._threads = threads
        self._lock = threading.Lock()
        self._batches: dict[Position, PendingBatch] = {}
        self._pace = _Pace()
        self._tasks: queue.SimpleQueue[tuple[PendingBatch, slice] | None] = queue.SimpleQueue()
        for number in range(threads):
            arguments = (self._tasks, fill, self._pace, number)
            threading.Thread(target=_serve, args=arguments, name=f"tfloop-reader-{number}", daemon=True).start()
        # The threads hold the queue and `fill`, and neither this object nor `plan`: so this one can be collected, which
        # ends them.
        self._finalizer = weakref.finalize(self, _end, self._tasks, threads)

    def get(self, position: Position) -> PendingBatch:
        """The batch at a position, filled.

        Several threads may ask at once, and for a batch before the one that precedes it: the operations of a graph run
        in any order.

        Raises:
            BaseException: what reading a row of it has raised.
        """
        with self._lock:
            batch = self._batches.get(position)
            if batch is None or not self._is_fast():
                batch = self._read_from(position)
            batch.requested = True
        batch.wait()
        return batch

    def get_if_ready(self, position: Position) -> PendingBatch | None:
        """See `get`; None: it isn't filled yet. Waits for nothing but the reading of one batch, where that is fast."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            batch = self._batches.get(position)
            if batch is None or not self._is_fast():
                batch = self._read_from(position)
            if not batch.ready:
                return None
            batch.requested = True
        finally:
            self._lock.release()
        batch.wait()
        return batch

    def close(self) -> None:
        """Ends the threads, as soon as each has read what it is reading."""
        with self._lock:
            for known in list(self._batches):
                self._drop(known)
        self._finalizer()

    def _is_fast(self) -> bool:
        """Whether batches are read faster than handed over."""
        return self._at_once and self._pace.seconds < _AT_ONCE

    def _read_from(self, position: Position) -> PendingBatch:
        """The batch at a position, and those that follow it: being read, or read here, where that is faster."""
        fast = self._is_fast()
        *wanted, next_one = self._followed(position, 0 if fast else self._depth)
        # A neighbor may be asked for before or after this one, and the one before once more in the next call.
        before = max((known for known in self._batches if known < position), default=position)
        for known in self._batches.keys() - {*wanted, before, next_one}:
            self._drop(known)
        for known in wanted:
            if known not in self._batches:
                self._begin(known, here=fast)
        return self._batches[position]

    def _followed(self, position: Position, ahead: int) -> list[Position]:
        """A position, those that are read ahead of it, and the one behind these; fewer at the end of the data."""
        positions = [position]
        for _ in range(ahead + 1):
            following = self._following(positions[-1])
            positions.append(positions[-1] if following is None else following)
        return positions

    def _drop(self, position: Position) -> None:
        batch = self._batches.pop(position)
        batch.cancelled = not batch.requested  # a batch that was asked for is waited for

    def _begin(self, position: Position, here: bool) -> None:
        batch = self._plan(position)
        self._batches[position] = batch
        parts = 1 if here else self._threads
        for rows in batch.cut(parts):
            if here:
                _read(batch, rows, self._fill, self._pace, 0)
            else:
                self._tasks.put((batch, rows))


class _Pace:
    """How long it takes to read a batch.

    Attributes:
        seconds: by one thread that isn't interrupted.
    """

    def __init__(self) -> None:
        self.seconds = 1.0  # until it is known
        self._last = 1.0

    def note(self, seconds: float) -> None:
        """Another batch was read.

        A slow one may be an accident, since others have the core, too; so may a fast one, whose examples were in a
        cache. Two fast ones, or several slow ones, are none.
        """
        self.seconds = min(max(seconds, self._last), _SLOWER * self.seconds)
        self._last = seconds


def _serve(tasks: queue.SimpleQueue[tuple[PendingBatch, slice] | None], fill: Fill, pace: _Pace, number: int) -> None:
    """A thread: fills stretches of batches until the queue ends."""
    while (task := tasks.get()) is not None:
        batch, rows = task
        del task
        if not batch.cancelled:
            _read(batch, rows, fill, pace, number)
        del batch


def _read(batch: PendingBatch, rows: slice, fill: Fill, pace: _Pace, thread: int) -> None:
    """Fills a stretch of a batch."""
    begun = time.perf_counter()
    try:
        fill(batch, rows, thread)
    except BaseException as error:  # handed to the one that waits for the batch
        batch.finish(error)
    else:
        pace.note((time.perf_counter() - begun) * len(batch.index) / (rows.stop - rows.start))
        batch.finish()


def _end(tasks: queue.SimpleQueue[Any], threads: int) -> None:
    for _ in range(threads):
        tasks.put(None)


def array_of_own(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """An array that TensorFlow copies when it is handed over; its contents are undefined.

    An array at a multiple of 64 bytes becomes a tensor as it is, and an operation may write its result there, while the
    same batch may be asked for once more.
    """
    if dtype.hasobject:
        return np.empty(shape, object)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 2 * _ALIGNMENT, np.uint8)
    offset = _ALIGNMENT // 2 - memory.ctypes.data % _ALIGNMENT
    return memory[offset % _ALIGNMENT :][:size].view(dtype).reshape(shape)


def array_of_own_of(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An array as `array_of_own` makes them: itself, if it is one and of this dtype, else a copy."""
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.owndata and array.ctypes.data % _ALIGNMENT:
        return array
    copy = array_of_own(list(array.shape), dtype)
    copy[...] = array
    return copy
