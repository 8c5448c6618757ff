"""Reading ahead: threads of the host fill the batches that the next steps will ask for, unless that takes longer."""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

_FAST = 2e-4
"""Seconds. Batches that are read within this time are handed over several at once: to hand one over takes as long."""

_AT_ONCE = 2e-3
"""Seconds. So many fast batches are read at once as take about this time."""

_PATIENCE = 2 * _AT_ONCE
"""Seconds. So long `ReadAhead.get_if_ready` waits for fast batches, which are nearly there."""

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
            with the array of each row, which may be replaced by one array of all, one behind the other.
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


Plan = Callable[[Position, int], PendingBatches]
"""Returns the batches from a position on, to be filled: at most so many."""
Fill = Callable[[PendingBatches, slice, int], None]
"""Reads a stretch of the rows of some batches, by the thread of this number."""
_Tasks: TypeAlias = "queue.SimpleQueue[Callable[[int], None] | None]"
"""What the threads are to do, each with its number; None ends one of them."""


class _BlockAhead:
    """Several batches, read fast, that a thread plans and reads before they are asked for.

    Args:
        first: the position of the first one.

    Attributes:
        batches: the batches, filled.
        error: what planning them raised.
    """

    def __init__(self, first: Position) -> None:
        self.first = first
        self.batches: PendingBatches | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()


class ReadAhead:
    """Batches, in order, that threads read before they are asked for.

    A batch is known by its position alone, so that any can be asked for at any time: one that isn't under way begins
    the reading anew from there. Where batches are read faster than a thread hands them over, several are read at once:
    the first of them by the one that asks, and those that follow by a thread, while the graph computes on the others.

    Args:
        plan: the batches from a position on.
        fill: reads some of their rows; it must not hold what holds this object.
        following: the position after another one; None: nothing is to be read after it.
        depth: how many batches are read before they are asked for.
        threads: how many read.
        at_once: how many batches are read at once at most, where they are read fast; 0: each is read by itself.
    """

    def __init__(
        self,
        plan: Plan,
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
        self._block_ahead: _BlockAhead | None = None
        self._pace = _Pace()
        self._tasks: _Tasks = queue.SimpleQueue()
        for number in range(threads):
            arguments = (self._tasks, number)
            threading.Thread(target=_serve, args=arguments, name=f"tfloop-reader-{number}", daemon=True).start()
        # The threads hold the queue, and neither this object nor `plan` once they have read: so this one can be
        # collected, which ends them.
        self._finalizer = weakref.finalize(self, _end, self._tasks, threads)

    def get(self, position: Position) -> PendingBatches:
        """The batch at a position, filled, and perhaps some that follow it.

        Several threads may ask at once, and for a batch before the one that precedes it: the operations of a graph run
        in any order.

        Raises:
            BaseException: what reading a row of it has raised.
        """
        with self._lock:
            batches = self._begun(position, None)
            assert batches is not None
            batches.requested = True
        batches.wait()
        return batches

    def get_if_ready(self, position: Position) -> PendingBatches | None:
        """See `get`; None: it isn't filled yet. Waits for nothing but reading, where that is fast."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            batches = self._begun(position, _PATIENCE)
            if batches is None or not batches.ready:
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
            self._block_ahead = None
        self._finalizer()

    def _is_fast(self) -> bool:
        """Whether batches are read faster than handed over."""
        return self._at_once > 0 and self._pace.seconds < _FAST

    def _known(self, position: Position) -> PendingBatches | None:
        return next((batches for batches in self._pending if batches.covers(position)), None)

    def _begun(self, position: Position, patience: float | None) -> PendingBatches | None:
        """The batch at a position, being read; or filled, and others behind it, where reading is fast.

        None: it is nearly there, and didn't come within `patience` seconds.
        """
        if self._is_fast():
            return self._known(position) or self._block_at(position, patience)
        self._block_ahead = None
        *wanted, next_one = self._followed(position)
        self._keep([self._before(position), *(self._known(each) for each in (*wanted, next_one))])
        for each in wanted:
            if self._known(each) is None:
                batches = self._plan(each, 1)
                self._pending.append(batches)
                for rows in batches.cut(self._threads):
                    self._tasks.put(functools.partial(_read_if_wanted, batches, rows, self._fill, self._pace))
        return self._known(position)

    def _block_at(self, position: Position, patience: float | None) -> PendingBatches | None:
        """Several batches from a position on, filled: read by a thread meanwhile, or here. See `_begun` for None."""
        ahead = self._block_ahead
        batches = None
        if ahead is not None and ahead.first == position:
            if not ahead.done.wait(patience):
                return None
            self._block_ahead = None
            if ahead.error is not None:
                raise ahead.error
            batches = ahead.batches
        if batches is None:
            batches = _read_block(position, self._plan, self._steps_at_once(), self._fill, self._pace, 0)
        self._keep([self._before(position)])
        self._pending.append(batches)
        self._block_ahead = None
        last = position._replace(step=position.step + batches.count - 1)
        if batches.error is None and (following := self._following(last)) is not None:
            self._block_ahead = _BlockAhead(following)
            arguments = self._plan, self._steps_at_once(), self._fill, self._pace
            self._tasks.put(functools.partial(_read_ahead, self._block_ahead, *arguments))
        return batches

    def _steps_at_once(self) -> int:
        """How many batches are read at once, where that is fast."""
        return min(self._at_once, max(1, int(_AT_ONCE / self._pace.seconds)))

    def _before(self, position: Position) -> PendingBatches | None:
        """The last batches that begin before a position: they may be asked for once more, or after those behind it."""
        return max((known for known in self._pending if known.first < position), key=_first, default=None)

    def _followed(self, position: Position) -> list[Position]:
        """A position, those that are read ahead of it, and the one behind these; fewer at the end of the data."""
        positions = [position]
        for _ in range(self._depth + 1):
            following = self._following(positions[-1])
            positions.append(positions[-1] if following is None else following)
        return positions

    def _keep(self, kept: Sequence[PendingBatches | None]) -> None:
        """Drops all batches but these."""
        for batches in self._pending:
            if batches not in kept:
                batches.cancelled = not batches.requested  # a batch that was asked for is waited for
        self._pending = [batches for batches in self._pending if batches in kept]


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


def _serve(tasks: _Tasks, number: int) -> None:
    """A thread: does what is in the queue until that ends."""
    while (task := tasks.get()) is not None:
        task(number)
        del task


def _read_if_wanted(batches: PendingBatches, rows: slice, fill: Fill, pace: _Pace, thread: int) -> None:
    """Fills some rows of the batches, if they weren't cancelled."""
    if not batches.cancelled:
        _read(batches, rows, fill, pace, thread)


def _read_ahead(block: _BlockAhead, plan: Plan, steps: int, fill: Fill, pace: _Pace, thread: int) -> None:
    """Reads a block before it is asked for."""
    try:
        block.batches = _read_block(block.first, plan, steps, fill, pace, thread)
    except BaseException as error:  # raised to the one that asks for the block
        block.error = error
    block.done.set()


def _read_block(first: Position, plan: Plan, steps: int, fill: Fill, pace: _Pace, thread: int) -> PendingBatches:
    """At most so many batches from a position on, filled."""
    batches = plan(first, steps)
    for rows in batches.cut(1):
        _read(batches, rows, fill, pace, thread)
    return batches


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


def _end(tasks: _Tasks, threads: int) -> None:
    for _ in range(threads):
        tasks.put(None)
