"""Batches of indexed data that are being read: which examples they have, and how far they are."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np


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
        index: the examples of all batches, one batch after the other: int64 [rows].
        leaves: the arrays to fill, each of shape [rows, ...]; or tensors that have been filled. A padded array has a
            list instead, with the array of each row; one array of all rows, joined, may replace the list.
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

        # Set by the threads that fill the rows, and by those that ask for the batches.
        self.error: BaseException | None = None
        self.cancelled = False
        self.requested = False
        self._left = 0
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def count(self) -> int:
        """The number of batches."""
        return len(self.starts) - 1

    @property
    def last(self) -> Position:
        """The position of the last one."""
        return self.first._replace(step=self.first.step + self.count - 1)

    def covers(self, position: Position) -> bool:
        """Whether the batch at a position is among them."""
        return position.epoch == self.first.epoch and 0 <= position.step - self.first.step < self.count

    def rows_at(self, position: Position) -> slice:
        """The rows of the batch at a position."""
        number = position.step - self.first.step
        return slice(self.starts[number], self.starts[number + 1])

    def widths_of(self, rows: slice) -> np.ndarray:
        """The lengths that arrays are padded to, in each of these rows: int64 [n, padded arrays]."""
        # A stretch may cover rows of several batches, which are padded to different lengths.
        return np.repeat(self.widths, np.diff(self.starts), axis=0)[rows]

    @property
    def ready(self) -> bool:
        """Whether all rows are filled, or one can't be."""
        return self._done.is_set()

    def cut(self, parts: int) -> list[slice]:
        """The stretches of rows that are filled by themselves, at most `parts` of them."""
        rows = len(self.index)
        self._left = min(parts, rows)  # none is empty
        if not rows:  # there is nothing to fill, so no thread will call `finish`
            self._done.set()
        stretches = []
        for part in range(self._left):
            stretches.append(slice(rows * part // self._left, rows * (part + 1) // self._left))
        return stretches

    def finish(self, error: BaseException | None = None) -> None:
        """One stretch is filled, or can't be."""
        with self._lock:
            self._left -= 1
            self.error = self.error or error
            # An error ends the waiting at once: the other rows are of no use then.
            if error is not None or not self._left:
                self._done.set()

    def wait(self) -> None:
        """Waits until all rows are filled.

        Raises:
            BaseException: what reading a row has raised.
        """
        if not self._done.is_set():  # `wait` takes a lock even then
            self._done.wait()
        if self.error is not None:
            raise self.error
