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

_FAST = 2e-4
"""Seconds. A batch that is read within this time is read by the one that asks for it: to hand it over from another
thread takes as long, and both wait for Python's lock."""

_AT_ONCE = 2e-3
"""Seconds. The one that asks reads so many fast batches at once as take about this time: asking takes some, too."""

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


class PendingBatches:
    """A worker's rows of one or several global batches, which threads fill, each a stretch of the rows.

    Args:
        first: the position of the first batch; the others follow it in the same epoch.
        index: the examples of all batches, those of one behind those of the other: int64 [rows].
        leaves: the arrays to fill, each of shape [rows, ...]; tensors that are; or, of an array that is padded, a list
            with the array of each row.
        starts: where the rows of each batch begin, and where the last one ends: int64 [batches + 1]; None: it is one.
        widths: the lengths that the arrays of each batch are padded to: int64 [batches, padded arrays]; None: none is.

    Attributes:
        lengths: the lengths of the arrays that are padded, in each row: int64 [rows, padded arrays].
    """

    def __init__(
        self,
        first: Position,
        index: np.ndarray,
        leaves: list[Any],
        starts: np.ndarray | None = None,
        widths: np.ndarray | None = None,
    ) -> None:
        self.first = first
        self.index = index
        self.leaves = leaves
        self.starts = np.array([0, len(index)]) if starts is None else starts
        self.widths = np.zeros([len(self.starts) - 1, 0], np.int64) if widths is None else widths
        self.lengths = np.zeros([len(index), self.widths.shape[1]], np.int64)
        self.error: BaseException | None = None
        self.cancelled = False
        self.requested = False
        self._left = 0
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def count(self) -> int:
        """How many batches they are."""
        return len(self.starts) - 1

    def covers(self, position: Position) -> bool:
        """Whether the batch at a position is among them."""
        return position.epoch == self.first.epoch and 0 <= position.step - self.first.step < self.count

    def rows_at(self, position: Position) -> slice:
        """The rows of the batch at a position."""
        number = position.step - self.first.step
        return slice(self.starts[number], self.starts[number + 1])

    def widths_of(self, rows: slice) -> np.ndarray:
        """The lengths that arrays are padded to, in each of these rows: int64 [n, padded arrays]."""
        return np.repeat(self.widths, np.diff(self.starts), axis=0)[rows]

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


Fill = Callable[[PendingBatches, slice, int], None]
"""Reads a stretch of the rows of some batches, by the thread of this number."""


class ReadAhead:
    """Batches, in order, that threads read before they are asked for.

    A batch is known by its position alone, so that any can be asked for at any time: one that isn't under way begins
    the reading anew from there. Where batches are read faster than a thread hands them over, the one that asks reads
    them, several at once: the graph asks for a batch while it computes on the one before.

    Args:
        plan: the batches from a position on, to be filled; the second argument is the greatest number of them.
        fill: reads some of their rows; it must not hold what holds this object.
        following: the position after another one; None: nothing is to be read after it.
        depth: how many batches are read before they are asked for.
        threads: how many read.
        at_once: how many batches the one that asks may read at most, if that is faster than to have them handed over.
    """

    def __init__(
        self,
        plan: Callable[[Position, int], PendingBatches],
        fill: Fill,
        following: Callable[[Position], Position | None],
        depth: int,
        threads: int,
        at_once: int = 0,
    ) -> None:
        self._plan = plan
        self._fill = fill
        self._at_once = at_once
        self._following = following
        self._depth = depth
        self._threads = threads
        self._lock = threading.Lock()
        self._pending: list[PendingBatches] = []
        self._pace = _Pace()
        self._tasks: queue.SimpleQueue[tuple[PendingBatches, slice] | None] = queue.SimpleQueue()
        for number in range(threads):
            arguments = (self._tasks, fill, self._pace, number)
            threading.Thread(target=_serve, args=arguments, name=f"tfloop-reader-{number}", daemon=True).start()
        # The threads hold the queue and `fill`, and neither this object nor `plan`: so this one can be collected, which
        # ends them.
        self._finalizer = weakref.finalize(self, _end, self._tasks, threads)

    def get(self, position: Position) -> PendingBatches:
        """The batch at a position, filled, and perhaps some that follow it.

        Several threads may ask at once, and for a batch before the one that precedes it: the operations of a graph run
        in any order.

        Raises:
            BaseException: what reading a row of it has raised.
        """
        with self._lock:
            batches = self._begun(position)
            batches.requested = True
        batches.wait()
        return batches

    def get_if_ready(self, position: Position) -> PendingBatches | None:
        """See `get`; None: it isn't filled yet. Waits for nothing but reading, where that is fast."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            batches = self._begun(position)
            if not batches.ready:
                return None
            batches.requested = True
        finally:
            self._lock.release()
        batches.wait()
        return batches

    def close(self) -> None:
        """Ends the threads, as soon as each has read what it is reading."""
        with self._lock:
            self._keep([])
        self._finalizer()

    def _is_fast(self) -> bool:
        """Whether batches are read faster than handed over."""
        return self._at_once > 0 and self._pace.seconds < _FAST

    def _known(self, position: Position) -> PendingBatches | None:
        return next((batches for batches in self._pending if batches.covers(position)), None)

    def _begun(self, position: Position) -> PendingBatches:
        """The batch at a position, and those that follow it: being read, or read here, where that is faster."""
        fast = self._is_fast()
        known = self._known(position)
        if known is not None and fast:
            return known
        *wanted, next_one = self._followed(position, 0 if fast else self._depth)
        # A neighbor may be asked for before or after this one, and the one before once more in the next call.
        kept = [max((known for known in self._pending if known.first < position), key=_first, default=None)]
        kept += [self._known(each) for each in (*wanted, next_one)]
        self._keep([batches for batches in self._pending if batches in kept])
        for each in wanted:
            if self._known(each) is None:
                self._begin(each, here=fast)
        begun = self._known(position)
        assert begun is not None
        return begun

    def _followed(self, position: Position, ahead: int) -> list[Position]:
        """A position, those that are read ahead of it, and the one behind these; fewer at the end of the data."""
        positions = [position]
        for _ in range(ahead + 1):
            following = self._following(positions[-1])
            positions.append(positions[-1] if following is None else following)
        return positions

    def _keep(self, kept: list[PendingBatches]) -> None:
        """Drops all batches but these."""
        for batches in self._pending:
            if batches not in kept:
                batches.cancelled = not batches.requested  # a batch that was asked for is waited for
        self._pending = kept

    def _begin(self, position: Position, here: bool) -> None:
        at_once = min(self._at_once, max(1, int(_AT_ONCE / self._pace.seconds))) if here else 1
        batches = self._plan(position, at_once)
        self._pending.append(batches)
        parts = 1 if here else self._threads
        for rows in batches.cut(parts):
            if here:
                _read(batches, rows, self._fill, self._pace, 0)
            else:
                self._tasks.put((batches, rows))


def _first(batches: PendingBatches) -> Position:
    return batches.first


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


def _serve(tasks: queue.SimpleQueue[tuple[PendingBatches, slice] | None], fill: Fill, pace: _Pace, number: int) -> None:
    """A thread: fills stretches of batches until the queue ends."""
    while (task := tasks.get()) is not None:
        batches, rows = task
        del task
        if not batches.cancelled:
            _read(batches, rows, fill, pace, number)
        del batches


def _read(batches: PendingBatches, rows: slice, fill: Fill, pace: _Pace, thread: int) -> None:
    """Fills a stretch of the rows of some batches."""
    begun = time.perf_counter()
    try:
        fill(batches, rows, thread)
    except BaseException as error:  # handed to the one that waits for the batches
        batches.finish(error)
    else:
        share = (rows.stop - rows.start) / len(batches.index) * batches.count
        pace.note((time.perf_counter() - begun) / share)
        batches.finish()


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
