"""The layout of totals: the vectors in which a compiled call returns its counts and sums. No other file knows it.

A vector of totals is

    examples | skipped steps, or workers with more data | sums of each `minimize` | states of each `minimize`'s metrics

where the sums are two numbers for each value: its weighted sum and its weight, the loss first. Vectors of totals can be
added up over replicas, steps and calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from loop.step.metric_sums import MetricSums

EXAMPLES = 0
"""The index of the number of examples in a vector of totals."""
SKIPPED = 1
"""In training: the index of the number of skipped steps."""
HAVE_MORE = 1
"""In the vector that one compiled call of an evaluation returns: the index of the number of workers with more data."""
SUMS = 2
"""The index of the first sum, the weighted sum of the loss."""
WEIGHT = SUMS + 1
"""The index of the weight of the loss."""

Parts: TypeAlias = list[tuple[int, np.ndarray]]
"""The first step of each part of a call, and the vector that this part has returned; see `Backend.call`."""

GOING = 0
"""A compiled call has made all of its steps."""
EPOCH_ENDED = 1
"""A compiled call has reached the end of the data."""
NOT_FINITE = 2
"""A loss or gradient is not finite, and the step was not made."""
LAST_SKIPPED = 3
"""The last step of the call was not finite, and was skipped, as the options ask."""


class TotalsLayout:
    """The layout of the totals of training.

    Args:
        minimized: the values of each `step.minimize` of a step, by the optimizer's name.
    """

    def __init__(self, minimized: Mapping[str, MetricSums]) -> None:
        self.minimized = dict(minimized)
        self.sums_width = SUMS + sum(values.width for values in self.minimized.values())
        self.states_width = sum(values.state_width for values in self.minimized.values())

    def of_replica(self, examples: tf.Tensor, sums: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """While tracing: the totals of one `minimize` in one replica, without states."""
        return tf.stack([tf.cast(examples, dtype), tf.zeros([], dtype), *sums])  # the 0: no skipped step

    def no_rows(self, optimizer: str, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """While tracing: the totals and the states of one `minimize` in a replica without rows."""
        values = self.minimized[optimizer]
        return tf.zeros([SUMS + values.width], dtype), tf.zeros([values.state_width], tf.float64)

    def joined(self, totals: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """While tracing: the totals of a step from those of each `minimize`, by the optimizer's name."""
        # In the order of the layout: the task may call `minimize` in another order.
        first, *others = [totals[name] for name in self.minimized]
        # All have seen the same examples, so only the first one's counts are taken.
        sums_of_others = [other[SUMS:] for other in others]
        return tf.cast(joined([first, *sums_of_others]), tf.float64)

    def unpacked(self, totals: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The sums and the states of each `minimize`, by the optimizer's name."""
        parts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        # First the sums of all, then the states of all: the loop over steps carries the two apart.
        sums_at = SUMS
        states_at = self.sums_width
        for name, values in self.minimized.items():
            parts[name] = (totals[sums_at:][: values.width], totals[states_at:][: values.state_width])
            sums_at += values.width
            states_at += values.state_width
        return parts

    def has_weight(self, totals: np.ndarray) -> bool:
        """Whether the loss of any `minimize` has a weight that isn't 0: others may have done nothing on purpose."""
        return any(sums[WEIGHT - SUMS] for sums, _ in self.unpacked(totals).values())

    def nothing(self) -> np.ndarray:
        """The totals of no steps."""
        return np.zeros(self.sums_width + self.states_width)


class CallResult(NamedTuple):
    """What one compiled call of training returns."""

    made: int  # the number of steps that were made
    ending: int  # how the call ended: `GOING`, `EPOCH_ENDED`, `NOT_FINITE` or `LAST_SKIPPED`
    totals: np.ndarray  # the totals of the steps, with the states of metrics; float64


class CallLayout:
    """The layout of the vector that a compiled call of training returns: finite | made | ending | totals | states.

    Args:
        checked: what is checked to be finite in each step, in words; see `StepContext.checked`.
    """

    def __init__(self, checked: Sequence[str]) -> None:
        self.checked = list(checked)
        self._made = len(self.checked)
        self._ending = self._made + 1
        self._totals = self._ending + 1

    def pack(self, finite: tf.Tensor, counts: tf.Tensor, *totals: tf.Tensor) -> tf.Tensor:
        """While tracing: the vector of a call.

        Args:
            finite: which of `checked` were finite in the last step; bool [n].
            counts: how many steps were made, and how the call ended; float64 [2].
            *totals: the totals; and the states of metrics, summed over all replicas, if there are any; float64.
        """
        return tf.concat([tf.cast(finite, tf.float64), counts, *totals], 0)

    def join(self, parts: Parts, step: int) -> np.ndarray:
        """The vector of a call, from those of its parts. A part with a bad step decides how the call has ended.

        Args:
            parts: the first step of each part, and its vector.
            step: the first step of the call.
        """

        def order(part: tuple[int, np.ndarray]) -> tuple[bool, int]:
            start, vector = part
            return bool(vector[self._ending] != NOT_FINITE), start

        # The first part with a bad step; without one, the first part.
        start, decisive = min(parts, key=order)
        vectors = [vector for _, vector in parts]
        packed: np.ndarray = np.sum(vectors, 0)
        # Flags and endings can't be added up, unlike counts and totals.
        packed[: self._made] = decisive[: self._made]
        packed[self._ending] = decisive[self._ending]
        if packed[self._ending] == NOT_FINITE:
            # Only the steps before the bad one count, although other parts may have made later ones.
            packed[self._made] = start - step + decisive[self._made]
        return packed

    def result(self, packed: np.ndarray) -> CallResult:
        """Reads the vector of a call."""
        return CallResult(int(packed[self._made]), int(packed[self._ending]), packed[self._totals :])

    def not_finite(self, packed: np.ndarray) -> list[str]:
        """The names of the numbers that were not finite in the last step."""
        flags = packed[: self._made]
        return [name for name, finite in zip(self.checked, flags, strict=True) if not finite]


def joined(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The concatenation of the vectors; without an operation, if there is one alone."""
    return vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)


def with_sums_added(totals: tf.Tensor, again: tf.Tensor) -> tf.Tensor:
    """The totals of a `minimize` that is called twice in a step. Both calls see the same examples: these count once."""
    return tf.concat([totals[:SUMS], totals[SUMS:] + again[SUMS:]], 0)


def as_skipped(totals: tf.Tensor) -> tf.Tensor:
    """The totals of a step that is skipped: its examples, 1 skipped step, and sums of 0."""
    return tf.concat([totals[:SKIPPED], [1], tf.zeros_like(totals[SUMS:])], 0)


def weighed_by_rows(totals: tf.Tensor) -> tf.Tensor:
    """The totals of a batch with a summed loss. The mean over batches weighs each batch by its rows, as in Keras."""
    rows = totals[EXAMPLES]
    # The sum becomes sum * rows, and its divisor the rows: their sums over batches give that mean.
    return tf.concat([totals[:SUMS], [totals[SUMS] * rows, rows], totals[SUMS + 2 :]], 0)


def batch_means(totals: tf.Tensor) -> tf.Tensor:
    """The mean of each value of a batch; 0 where its weight is 0."""
    return tf.math.divide_no_nan(totals[SUMS::2], totals[WEIGHT::2])


class EvaluationLayout:
    """The layout of the totals of an evaluation, and of what one compiled call of it returns.

    Args:
        values: how the values of `compute` become sums and states.
    """

    def __init__(self, values: MetricSums) -> None:
        self._values = values
        self.width = SUMS + values.width + values.state_width

    def of_replica(self, examples: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
        """While tracing: the totals of one batch in one replica, from its sums and states in one vector."""
        return tf.concat([tf.cast(tf.stack([examples, 0]), tf.float64), counted], 0)

    def with_more(self, totals: tf.Tensor, more: tf.Tensor) -> tf.Tensor:
        """While tracing: the totals of a worker, and whether it has more data. One collective adds up both."""
        # That slot is 0 so far: an evaluation skips no steps. `split_more` makes it 0 again.
        return totals + tf.one_hot(HAVE_MORE, self.width, tf.cast(more, tf.float64))

    def split_more(self, packed: np.ndarray) -> tuple[bool, np.ndarray]:
        """Whether any worker has more data; and the totals alone."""
        more = bool(packed[HAVE_MORE] > 0)
        totals = packed.copy()
        totals[HAVE_MORE] = 0
        return more, totals

    def unpacked(self, totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sums and the states."""
        sums, states = np.split(totals[SUMS:], [self._values.width])
        return sums, states

    def nothing(self) -> np.ndarray:
        """The totals of no examples."""
        return np.zeros(self.width)
