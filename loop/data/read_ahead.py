"""Reading ahead: threads fill the batches of the next steps, unless it is faster to read each when it is asked for."""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

from loop.data.pending_batches import PendingBatches, Position

_FAST = 2e-4
"""Seconds. Batches that are read within this time are handed over several at once: to hand one over takes as long."""

_AT_ONCE = 2e-3
"""Seconds. As many fast batches are read at once as take about this time."""

_PATIENCE = 2 * _AT_ONCE
"""Seconds. `ReadAhead.get_if_ready` waits at most this long for fast batches, which are nearly there."""

_BLOCKS_AHEAD = 2
"""How many blocks of fast batches are read before they are asked for: a call of the graph may end within a block."""

_SLOWER = 1.2
"""The greatest factor by which one slow batch makes the estimate of the seconds for a batch grow."""


Plan = Callable[[Position, int], PendingBatches]
"""Returns the batches from a position on, to be filled: at most so many."""
Fill = Callable[[PendingBatches, slice, int], None]
"""Reads a stretch of the rows of some batches, by the thread of this number."""
_Tasks: TypeAlias = "queue.SimpleQueue[Callable[[int], None] | None]"
"""What the threads are to do, each with its number; None ends one of them."""


class _BlockAhead:
    """Several batches, read fast, that a thread plans and reads before they are asked for.

    Attributes:
        batches: the batches, filled; None at the end of the data.
        error: what planning them raised.
    """

    def __init__(self) -> None:
        self.batches: PendingBatches | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def position_after(self, following: Callable[[Position], Position | None]) -> Position | None:
        """Waits until it is read, and returns where the next one begins; None: nowhere, or it can't be read."""
        self.done.wait()
        return None if self.batches is None or self.batches.error else following(self.batches.last)


class ReadAhead:
    """Batches, in order, that threads read before they are asked for.

    A batch is known by its position alone, so that any can be asked for at any time: one that isn't under way begins
    the reading anew from there. Where batches are read faster than a thread hands them over, several are read at once:
    the first of them by the one that asks, and those that follow by a thread, while the graph computes on the others.

    Args:
        plan: the batches from a position on.
        fill: reads some of their rows; it must hold nothing that holds this object.
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
        self._lock = threading.Lock()  # for what follows here; the batches have locks of their own
        self._pending: list[PendingBatches] = []
        self._blocks_ahead: list[_BlockAhead] = []
        self._next: Position | None = None  # where the first of these blocks begins
        self._pace = _Pace()
        self._tasks: _Tasks = queue.SimpleQueue()
        for number in range(threads):
            arguments = (self._tasks, number)
            threading.Thread(target=_serve, args=arguments, name=f"tfloop-reader-{number}", daemon=True).start()
        # The threads hold only the queue while they wait, so that this object can be collected, which ends them.
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
        batches.wait()  # without the lock: other threads may ask for other batches meanwhile
        return batches

    def get_if_ready(self, position: Position) -> PendingBatches | None:
        """See `get`; None: it isn't filled yet. Waits for nothing but reading, where that is fast."""
        # The caller holds one of TensorFlow's threads. Another thread that has the lock may be reading, so no waiting.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            batches = self._begun(position, _PATIENCE)
            if batches is None or not batches.ready:
                return None
            batches.requested = True
        finally:
            self._lock.release()
        batches.wait()  # is over at once; raises what reading has raised
        return batches

    def close(self) -> None:
        """Ends the threads, as soon as each has read what it is reading."""
        with self._lock:
            self._keep([])
            self._blocks_ahead = []
        self._finalizer()  # calls `_end` now, and not once more when this object is collected

    def _is_fast(self) -> bool:
        """Whether batches are read faster than handed over."""
        return self._at_once > 0 and self._pace.seconds < _FAST

    def _known(self, position: Position) -> PendingBatches | None:
        return next((batches for batches in self._pending if batches.covers(position)), None)

    def _begun(self, position: Position, patience: float | None) -> PendingBatches | None:
        """The batch at a position, being read; or filled, and others after it, where reading is fast.

        None: it is nearly there, and didn't come within `patience` seconds.
        """
        if self._is_fast():
            return self._known(position) or self._block_at(position, patience)
        self._blocks_ahead = []

        # The batch before these positions is kept, and the one at the last of them, which isn't begun here, if it has
        # been begun already: the operations of a graph ask for neighbors in any order.
        positions = self._followed(position)
        self._keep([self._before(position), *map(self._known, positions)])
        for wanted_position in positions[:-1]:
            if self._known(wanted_position) is None:
                batches = self._plan(wanted_position, 1)
                self._pending.append(batches)
                for rows in batches.cut(self._threads):
                    self._tasks.put(functools.partial(_read, batches, rows, self._fill, self._pace))
        return self._known(position)

    def _block_at(self, position: Position, patience: float | None) -> PendingBatches | None:
        """Several batches from a position on, filled: read by a thread meanwhile, or here. See `_begun` for None."""
        if position != self._next:
            self._blocks_ahead = []  # they are read for another position, such as that before a resume
        batches = None
        if self._blocks_ahead:
            ahead = self._blocks_ahead[0]
            if not ahead.done.wait(patience):
                return None
            self._blocks_ahead.pop(0)
            if ahead.error is not None:
                raise ahead.error
            batches = ahead.batches
        if batches is None:
            # Read by the thread that asks: another thread would take as long to hand it over.
            batches = _read_block(position, self._plan, self._steps_at_once(), self._fill, self._pace, 0)
        self._keep([self._before(position)])
        self._pending.append(batches)
        self._next = None if batches.error else self._following(batches.last)
        # How many batches a block has is known only when it is planned. So each block starts after the one before.
        while self._next is not None and len(self._blocks_ahead) < _BLOCKS_AHEAD:
            start = self._blocks_ahead[-1] if self._blocks_ahead else self._next
            self._read_block_ahead(start)
        return batches

    def _read_block_ahead(self, start: Position | _BlockAhead) -> None:
        """Has a thread read a block, from a position on or after another block."""
        block = _BlockAhead()
        steps = self._steps_at_once()
        read = functools.partial(_read_block, plan=self._plan, steps=steps, fill=self._fill, pace=self._pace)
        self._tasks.put(functools.partial(_read_ahead, block, start, self._following, read))
        self._blocks_ahead.append(block)

    def _steps_at_once(self) -> int:
        """How many batches are read at once, where that is fast."""
        return min(self._at_once, max(1, int(_AT_ONCE / self._pace.seconds)))

    def _before(self, position: Position) -> PendingBatches | None:
        """The last batches that begin before a position: they may be asked for once more, or after those at it."""
        last = None
        for batches in self._pending:
            if batches.first < position and (last is None or batches.first > last.first):
                last = batches
        return last

    def _followed(self, position: Position) -> list[Position]:
        """A position, those that are read ahead of it, and the one after these; fewer at the end of the data."""
        positions = [position]
        for _ in range(self._depth + 1):
            following = self._following(positions[-1])
            if following is None:  # the end of the data: repeated, so that there is always one after the others
                following = positions[-1]
            positions.append(following)
        return positions

    def _keep(self, kept: Sequence[PendingBatches | None]) -> None:
        """Drops all batches but these."""
        for batches in self._pending:
            if batches not in kept:
                batches.cancelled = not batches.requested  # a batch that was asked for is waited for
        self._pending = [batches for batches in self._pending if batches in kept]


class _Pace:
    """How long it takes to read a batch.

    Attributes:
        seconds: how long a batch takes one thread that isn't interrupted.
    """

    def __init__(self) -> None:
        self.seconds = 1.0  # until it is known
        self._last = 1.0

    def note(self, seconds: float) -> None:
        """Another batch was read.

        A single slow batch may be an accident, such as another process on the core; a single fast one, too, such as
        examples in a cache. So the estimate follows two fast batches, or several slow ones.
        """
        # Several threads may do this at once. No lock: an estimate that misses one batch is as good.
        self.seconds = min(max(seconds, self._last), _SLOWER * self.seconds)
        self._last = seconds


def _serve(tasks: _Tasks, number: int) -> None:
    """A thread: does the tasks in the queue, up to the None that ends it."""
    while (task := tasks.get()) is not None:
        task(number)
        del task  # it may hold `plan`, which keeps the reader alive while the next `get` waits


def _read_ahead(
    block: _BlockAhead,
    start: Position | _BlockAhead,
    following: Callable[[Position], Position | None],
    read: Callable[..., PendingBatches],
    thread: int,
) -> None:
    """Reads a block before it is asked for."""
    try:
        first = start if isinstance(start, Position) else start.position_after(following)
        if first is not None:
            block.batches = read(first, thread=thread)
    except BaseException as error:  # raised to the one that asks for the block
        block.error = error
    block.done.set()  # in any case, since the asking thread and the thread of the next block wait for it


def _read_block(first: Position, plan: Plan, steps: int, fill: Fill, pace: _Pace, thread: int) -> PendingBatches:
    """At most so many batches from a position on, filled."""
    batches = plan(first, steps)
    for rows in batches.cut(1):
        _read(batches, rows, fill, pace, thread)
    return batches


def _read(batches: PendingBatches, rows: slice, fill: Fill, pace: _Pace, thread: int) -> None:
    """Fills a stretch of the rows of some batches, if they weren't cancelled."""
    if batches.cancelled:
        return
    begun = time.perf_counter()
    try:
        fill(batches, rows, thread)
    except BaseException as error:  # handed to the one that waits for the batches
        batches.finish(error)
    else:
        # A stretch may be a part of a batch, or several batches: the seconds are those of one whole batch.
        share = (rows.stop - rows.start) / len(batches.index) * batches.count
        pace.note((time.perf_counter() - begun) / share)
        batches.finish()


def _end(tasks: _Tasks, threads: int) -> None:
    """Ends the threads: each takes one None out of the queue."""
    for _ in range(threads):
        tasks.put(None)
