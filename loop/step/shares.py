"""Tries a function of a batch as replicas compute it: each has a share of the rows, and draws their random numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data import RowCounts, Rows, count
from loop.model.variables import layers
from loop.step.batch_norm import as_in_evaluation, batch_norm_variables, normalized_kernels, seeds, state
from loop.step.example_trace import Compute, put_back
from loop.step.replica import TriedReplica, all_gathers, within
from loop.step.row_random import by_row, reseed
from loop.step.tracing import as_written, compiled
from loop.task import Batch, Model, Values

Numbers: TypeAlias = Callable[[Values, tf.Tensor], Sequence[tf.Tensor]]
"""Takes what `compute` has returned for some rows, and how many they are; returns scalars that must add up, float64."""

ORDERS = (0, 1, 2, 2, 0, 0, 1, 1), (0, 0, 0, 1, 2, 2, 1, 2)
"""Which of a few examples are tried, one order after the other.

There are enough to fill experts that take a few rows each. Neither order is regular: the last row of a share might have
the same neighbor as in the whole batch. The two shares differ in how often they have an example: else, the mean over a
share would be that over the whole batch. In the second order, no example is in both shares: one of them lacks the
greatest or the least, such as the hardest negative.
"""
_OF_FIRST = 3
"""How many of them the first share has."""
_DRAWS = 4
"""How often a model that draws random numbers is tried: a layer may mix examples by some of its draws alone."""
_HALF = ("float16", "bfloat16")


class ShareTrial:
    """Computes shares of a few rows, as replicas do in a step.

    The number of rows isn't known while tracing, as in a step. BatchNormalization takes its moving statistics: in a
    step, those of a batch are the same on all replicas.

    Args:
        compute: a function of a batch.
        example: a few examples as a batch.
        model: the model.
        numbers: what must add up over the shares.
        counts: the numbers of rows that batches have in the run.
        orders: which of the examples are tried.
    """

    def __init__(
        self,
        compute: Compute,
        example: Batch,
        model: Model,
        numbers: Numbers,
        counts: RowCounts,
        orders: Sequence[Sequence[int]] = ORDERS,
    ) -> None:
        self._compute = compute
        # No more than two replicas have: a model may be so large that a device holds few rows.
        most = min(counts.batch_size, 2 * max(counts.whole))
        self._rows = min(len(orders[0]), max(2, most))
        self._batches: list[Batch] = []
        for order in orders:
            places = tf.constant(order[: self._rows]) % tf.shape(tf.nest.flatten(example)[0])[0]
            self._batches.append(tf.nest.map_structure(functools.partial(tf.gather, indices=places), example))
        self._model = model
        self._numbers = numbers

    def first_wrong(self) -> int | None:
        """Which of the numbers is the first that doesn't add up; None: all do, or nothing can be said.

        Raises:
            Exception: `compute` fails.
        """
        by_row()
        reseed(self._model)
        specs = tf.nest.map_structure(_any_rows, self._batches[0])
        traced = compiled(self._traced, input_signature=[specs, tf.TensorSpec([], tf.int64)])
        gathers = all_gathers()
        within_rounding = functools.partial(_are_same, tolerance=tolerance(self._model))
        with as_in_evaluation(self._model):
            for draw in range(_DRAWS if seeds(self._model) else 1):
                for batch in self._batches:
                    share = functools.partial(self._share, traced, batch, draw)
                    of_all, again = share(0, self._rows), share(0, self._rows)
                    # With `all_gather`, to look at all rows is the purpose. Random numbers other than those of layers
                    # differ from call to call: they say nothing of other rows.
                    if all_gathers() != gathers or not within_rounding(of_all, again).all():
                        return None
                    cut = min(_OF_FIRST, self._rows - 1)
                    same = within_rounding(of_all, share(0, cut) + share(cut, self._rows))
                    if not same.all():
                        return int(np.argmin(same))
        return None

    def _share(
        self, traced: Callable[[Batch, tf.Tensor], tf.Tensor], batch: Batch, draw: int, first: int, end: int
    ) -> np.ndarray:
        """The numbers of some rows.

        Args:
            traced: the traced function.
            batch: all rows.
            draw: which random numbers are drawn.
            first: the first row.
            end: the row after the last one.
        """
        batch = tf.nest.map_structure(lambda tensor: tensor[first:end], batch)
        with put_back([*changing(self._model), *seeds(self._model)]):
            for seed in seeds(self._model):
                # A seed generator has two numbers, of which the second one counts its draws.
                value = seed.numpy()
                seed.assign(value + np.array([0, 101 * draw], value.dtype))
            return traced(batch, tf.constant(first, tf.int64)).numpy()

    def _traced(self, batch: Batch, first: tf.Tensor) -> tf.Tensor:
        """The numbers of a share whose first row is that of number `first`."""
        zero = tf.constant(0, tf.int64)
        n = count(batch)
        rows = Rows(batch, first, zero, zero, first + tf.range(n))
        # A backend of one replica: the shares are computed one after the other, without a collective.
        with within(TriedReplica(Backend(), rows, seed=0, most=self._rows)):
            values = as_written(self._compute)(batch)
        return tf.stack(self._numbers(values, n))


def changing(model: Model) -> list[tf.Variable]:
    """The variables that a call of the model may change, without those whose changes are known to be right."""
    # BatchNormalization's statistics are those of all replicas. Seeds count calls.
    known = set(map(id, batch_norm_variables(model))) | set(map(id, seeds(model)))
    variables = []
    for variable in state(model) + normalized_kernels(model):
        if id(variable) not in known:
            variables.append(variable)
    return variables


def tolerance(model: Model) -> float:
    """The relative difference that rounding makes at most, if a batch has another size.

    A greater one would hide neighbors that matter little to a model that isn't trained yet.
    """
    for layer in layers(model):
        if getattr(layer, "compute_dtype", None) in _HALF:
            return 0.02
    return 1e-3


def _any_rows(tensor: tf.Tensor) -> tf.TensorSpec:
    """What a tensor is, with any number of rows."""
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def _are_same(one: np.ndarray, other: np.ndarray, tolerance: float) -> np.ndarray:
    """Which numbers are the same, up to rounding."""
    return np.isclose(one, other, tolerance, 1e-6, equal_nan=True)
