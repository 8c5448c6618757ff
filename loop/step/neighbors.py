"""Warns where what is computed of an example depends on its neighbors in the batch: each replica has other ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from loop.model.variables import variable_names
from loop.step.batch_norm import batch_norm_variables, state
from loop.step.example_trace import Compute, Trial, put_back
from loop.step.metric_sums import MetricSums
from loop.step.replica import all_gathers, probing
from loop.task import Batch, Model, Values

_REMEDY = (
    "the numbers depend on the number of replicas. Take the rows of all replicas from loop.all_gather(...); "
    "`tfloop verify` shows the difference"
)


def warn_of_loss(compute: Compute, trial: Trial, model: Model, names: Sequence[str]) -> None:
    """Warns if the sums over a batch aren't those of its parts, which replicas add up.

    Args:
        compute: the function that `trial` has tried.
        trial: what it has returned.
        model: the model.
        names: the names of its values.
    """
    if trial.replicas == 1 or trial.seen is None:
        return
    together, alone = trial.seen
    # Most losses end here, without another call.
    if _same(together["loss"][:1], alone["loss"]):
        return
    # Random numbers differ from call to call: they say nothing of the neighbors.
    shared = batch_norm_variables(model)
    before = [variable.numpy() for variable in shared]
    if not _same(_values(compute, trial.example, slice(1))["loss"], alone["loss"]):
        return
    # Where BatchNormalization has taken statistics of the batch, these are those of all replicas in a step.
    if any(not np.array_equal(old, variable.numpy()) for old, variable in zip(before, shared, strict=True)):
        return
    others = _values(compute, trial.example, slice(1, None))
    # Not example by example: a mean that is repeated for each row has the right sum.
    sums = MetricSums(names, trial.metrics)
    of_all, of_first, of_others = (tf.stack(sums.sums(values, tf.float64)[1]) for values in (together, alone, others))
    if not _same(of_all, of_first + of_others):
        warnings.warn(
            "the loss of an example depends on the other examples of its batch, of which each of "
            f"{trial.replicas} replicas has only its own: {_REMEDY}",
            stacklevel=2,
        )


def warn_of_state(compute: Compute, trial: Trial, model: Model) -> None:
    """Warns if a variable that isn't trained gets another value from more rows, such as a running mean.

    Args:
        compute: does with a batch what training does, but for the gradient.
        trial: has the examples.
        model: the model.
    """
    # BatchNormalization's statistics are those of all replicas.
    shared = set(map(id, batch_norm_variables(model)))
    variables = [variable for variable in state(model) if id(variable) not in shared]
    if trial.replicas == 1 or trial.fixed is not None or not variables:
        return
    gathers = all_gathers()
    after = []
    with contextlib.suppress(Exception):  # a mistake in it shows when the step is traced
        for rows in (slice(None), slice(1)):
            with put_back(variables):
                _values(compute, trial.example, rows)
                after.append([variable.numpy() for variable in variables])
    if len(after) < 2 or all_gathers() != gathers:  # with `all_gather`, to look at all rows is the purpose
        return
    for name, of_few, of_one in zip(variable_names(variables), *after, strict=True):
        if not _same(of_few, of_one):
            warnings.warn(
                f"compute() changes {name} by its rows, of which each of {trial.replicas} replicas has only its own: "
                f"{_REMEDY}",
                stacklevel=2,
            )


def _values(compute: Compute, example: Batch, rows: slice) -> Values:
    """What `compute` returns for some rows of a batch."""
    batch = tf.nest.map_structure(lambda tensor: tensor[rows], example)
    with probing(int(tf.shape(tf.nest.flatten(batch)[0])[0])):
        return compute(batch)


def _same(one: np.ndarray | tf.Tensor, other: np.ndarray | tf.Tensor) -> bool:
    """Whether numbers are the same, to what rounding in 16 bits makes of another size of a batch."""
    return np.allclose(tf.cast(one, tf.float64), tf.cast(other, tf.float64), 0.02, 1e-6, equal_nan=True)
