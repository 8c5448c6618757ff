"""Tries a function of a batch as replicas compute it: each has a share of the rows, and draws their random numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data import Rows, count
from loop.step.batch_norm import as_in_evaluation, seeds
from loop.step.example_trace import Compute, put_back
from loop.step.metric_sums import MetricSums
from loop.step.replica import TriedReplica, all_gathers, within
from loop.step.row_random import by_row, reseed
from loop.step.tracing import as_written, compiled
from loop.task import Batch, Model

_ROWS = (0, 1, 2, 2, 0, 1, 1, 0)
"""Which of a few examples are tried: so many that experts that take a few rows each are full; and in no regular order,
in which the last row of a share might have the same neighbor as in the whole batch."""
_OF_FIRST = 3
"""How many of them the first share has."""
_DRAWS = 4
"""How often a model that draws random numbers is tried: a layer may mix examples by some of its draws alone."""


class ShareTrial:
    """Computes shares of a few rows, as replicas do in a step.

    The number of rows isn't known while tracing, as in a step. BatchNormalization takes its moving statistics: in a
    step, those of a batch are the same on all replicas.

    Args:
        compute: a function of a batch.
        example: a few examples as a batch.
        model: the model.
        sums: adds up its values.
        changing: the variables that a call may change, and that are put back after it.
        most: the greatest number of rows to try.
    """

    def __init__(
        self,
        compute: Compute,
        example: Batch,
        model: Model,
        sums: MetricSums,
        changing: Sequence[tf.Variable],
        most: int,
    ) -> None:
        self._compute = compute
        places = tf.constant(_ROWS[: max(2, most)]) % tf.shape(tf.nest.flatten(example)[0])[0]
        self._rows = len(places)
        self._batch = tf.nest.map_structure(lambda tensor: tf.gather(tensor, places), example)
        self._model = model
        self._sums = sums
        self._changing = changing

    def adds_up(self, tolerance: float) -> bool:
        """Whether the sums over all rows are those over the shares; True if nothing can be said.

        Raises:
            Exception: `compute` fails.
        """
        by_row()
        reseed(self._model)
        specs = tf.nest.map_structure(_any_rows, self._batch)
        traced = compiled(self._traced, input_signature=[specs, tf.TensorSpec([], tf.int64)])
        gathers = all_gathers()
        with as_in_evaluation(self._model):
            for draw in range(_DRAWS if seeds(self._model) else 1):
                share = functools.partial(self._share, traced, draw)
                of_all, again = share(0, self._rows), share(0, self._rows)
                # With `all_gather`, to look at all rows is the purpose. Random numbers other than those of layers
                # differ from call to call: they say nothing of other rows.
                if all_gathers() != gathers or not _same(of_all, again, tolerance):
                    return True
                cut = min(_OF_FIRST, self._rows - 1)
                if not _same(of_all, share(0, cut) + share(cut, self._rows), tolerance):
                    return False
        return True

    def _share(self, traced: Callable[[Batch, tf.Tensor], tf.Tensor], draw: int, first: int, end: int) -> np.ndarray:
        """The sums of some rows.

        Args:
            traced: the traced function.
            draw: which random numbers are drawn.
            first: the first row.
            end: the row after the last one.
        """
        batch = tf.nest.map_structure(lambda tensor: tensor[first:end], self._batch)
        with put_back([*self._changing, *seeds(self._model)]):
            for seed in seeds(self._model):
                value = seed.numpy()
                seed.assign(value + np.array([0, 101 * draw], value.dtype))
            return traced(batch, tf.constant(first, tf.int64)).numpy()

    def _traced(self, batch: Batch, first: tf.Tensor) -> tf.Tensor:
        """The sums of a share whose first row is that of number `first`."""
        zero = tf.constant(0, tf.int64)
        rows = Rows(batch, first, zero, zero, first + tf.range(count(batch)))
        # A backend of one replica: the shares are computed one after the other, without a collective.
        with within(TriedReplica(Backend(), rows, seed=0, most=self._rows)):
            values = as_written(self._compute)(batch)
        return tf.stack(self._sums.sums(values, tf.float64)[1])


def _any_rows(tensor: tf.Tensor) -> tf.TensorSpec:
    """What a tensor is, with any number of rows."""
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def _same(one: np.ndarray, other: np.ndarray, tolerance: float) -> bool:
    """Whether numbers are the same, up to rounding."""
    return np.allclose(one, other, tolerance, 1e-6, equal_nan=True)
