"""Reading ahead: threads of the host fill the batches that the next steps will ask for."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_ALIGNMENT = 64
"""Bytes; see `array_of_own`."""


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
        self._done.wait()
        if self.error is not None:
            raise self.error


Fill = Callable[[PendingBatch, slice, int], None]
"""Reads a stretch of the rows of a batch, by the thread of this number."""


class ReadAhead:
    """Batches, in order, that threads read before they are asked for.

    A batch is known by its position alone, so that any can be asked for at any time: one that isn't under way begins
    the reading anew from there.

    Args:
        plan: the batch at a position, to be filled.
        fill: reads some of its rows; it must not hold what holds this object.
        following: the position after another one; None: nothing is to be read after it.
        depth: how many batches are read before they are asked for.
        threads: how many read.
    """

    def __init__(
        self,
        plan: Callable[[Position], PendingBatch],
        fill: Fill,
        following: Callable[[Position], Position | None],
        depth: int,
        threads: int,
    ) -> None:
        self._plan = plan
        self._following = following
        self._depth = depth
        self._threads = threads
        self._lock = threading.Lock()
        self._batches: dict[Position, PendingBatch] = {}
        self._tasks: queue.SimpleQueue[tuple[PendingBatch, slice] | None] = queue.SimpleQueue()
        for number in range(threads):
            thread = threading.Thread(
                target=_serve, args=(self._tasks, fill, number), name=f"tfloop-reader-{number}", daemon=True
            )
            thread.start()
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
            *wanted, next_one = self._followed(position)
            # A neighbor may be asked for before or after this one, and the one before once more in the next call.
            before = max((known for known in self._batches if known < position), default=position)
            for known in self._batches.keys() - {*wanted, before, next_one}:
                self._drop(known)
            for known in wanted:
                if known not in self._batches:
                    self._begin(known)
            batch = self._batches[position]
            batch.requested = True
        batch.wait()
        return batch

    def close(self) -> None:
        """Ends the threads, as soon as each has read what it is reading."""
        with self._lock:
            for known in list(self._batches):
                self._drop(known)
        self._finalizer()

    def _followed(self, position: Position) -> list[Position]:
        """A position, those that are read ahead of it, and the one behind these; fewer at the end of the data."""
        positions = [position]
        for _ in range(self._depth + 1):
            following = self._following(positions[-1])
            positions.append(positions[-1] if following is None else following)
        return positions

    def _drop(self, position: Position) -> None:
        batch = self._batches.pop(position)
        batch.cancelled = not batch.requested  # a batch that was asked for is waited for

    def _begin(self, position: Position) -> None:
        batch = self._plan(position)
        self._batches[position] = batch
        for rows in batch.cut(self._threads):
            self._tasks.put((batch, rows))


def _serve(tasks: queue.SimpleQueue[tuple[PendingBatch, slice] | None], fill: Fill, number: int) -> None:
    """A thread: fills stretches of batches until the queue ends."""
    while (task := tasks.get()) is not None:
        batch, rows = task
        del task
        if not batch.cancelled:
            try:
                fill(batch, rows, number)
            except BaseException as error:  # handed to the one that waits for the batch
                batch.finish(error)
            else:
                batch.finish()
        del batch


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
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + 2 * _ALIGNMENT, np.uint8)
    offset = _ALIGNMENT // 2 - memory.ctypes.data % _ALIGNMENT
    return memory[offset % _ALIGNMENT :][:size].view(dtype).reshape(shape)
