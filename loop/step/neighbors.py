"""Warns where what is computed of an example depends on its neighbors in the batch: each replica has other ones."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence

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


def warn_of_loss(compute: Callable[..., Values], trial: Trial, model: Model, names: Sequence[str]) -> None:
    """Warns if the sums over a batch aren't those of its parts, which replicas add up.

    Args:
        compute: the function that `trial` has tried; it takes `training`, too.
        trial: what it has returned.
        model: the model.
        names: the names of its values.
    """
    if trial.replicas == 1 or trial.seen is None:
        return
    depends = _depends(compute, trial, model, names, *trial.seen)
    if not depends:
        # Examples may be mixed in training alone, where `all_gather` may be, too.
        in_training = functools.partial(compute, training=True)
        gathers = all_gathers()
        with contextlib.suppress(Exception):  # a mistake in it shows when the step is traced
            seen = _values(in_training, trial.example, slice(None)), _values(in_training, trial.example, slice(1))
            depends = _depends(in_training, trial, model, names, *seen) and all_gathers() == gathers
    if depends:
        warnings.warn(
            "the loss of an example depends on the other examples of its batch, of which each of "
            f"{trial.replicas} replicas has only its own: {_REMEDY}",
            stacklevel=2,
        )


def _depends(
    compute: Compute, trial: Trial, model: Model, names: Sequence[str], together: Values, alone: Values
) -> bool:
    """Whether the sums over the examples aren't those over the first one and over the others.

    Args:
        compute: a function of a batch.
        trial: has the examples.
        model: the model.
        names: the names of the values.
        together: what `compute` has returned for the examples.
        alone: what it has returned for the first one.
    """
    # Most losses end here, without another call.
    if _same(together["loss"][:1], alone["loss"]):
        return False
    # Random numbers differ from call to call: they say nothing of the neighbors. Where BatchNormalization has taken
    # statistics of the batch, these are those of all replicas in a step.
    changing = state(model)
    before = [variable.numpy() for variable in changing]
    for values, rows in ((alone, slice(1)), (together, slice(None))):
        if not _same(_values(compute, trial.example, rows)["loss"], values["loss"]):
            return False
    if _changed(changing, before):
        return False
    others = _values(compute, trial.example, slice(1, None))
    # Not example by example: a mean that is repeated for each row has the right sum.
    sums = MetricSums(names, trial.metrics)
    of_all, of_first, of_others = (tf.stack(sums.sums(values, tf.float64)[1]) for values in (together, alone, others))
    return not _same(of_all, of_first + of_others)


def warn_of_penalties(compute: Callable[..., Values], penalties: list[list[float]], trial: Trial, model: Model) -> None:
    """Warns if a loss that the model adds isn't the mean of those of its rows, as a product of two means isn't.

    Args:
        compute: the function that `trial` has tried; it takes `training`, too. It adds the penalties of each of its
            calls to `penalties`.
        penalties: those of its calls.
        trial: has the examples.
        model: the model.
    """
    if trial.replicas == 1 or trial.fixed is not None:
        return
    # First without dropout, whose numbers would say nothing. A penalty may be added in training alone.
    for training in (False, True):
        if not _are_means(functools.partial(compute, training=training), penalties, trial, model):
            warnings.warn(
                "a loss that the model adds (add_loss, model.losses) isn't a mean over the examples of a batch, of "
                f"which each of {trial.replicas} replicas has only its own: {_REMEDY}",
                stacklevel=2,
            )
            return


def _are_means(compute: Compute, penalties: list[list[float]], trial: Trial, model: Model) -> bool:
    """Whether the penalties of a call are means over its rows; True if that can't be told."""
    changing = state(model)
    before = [variable.numpy() for variable in changing]
    gathers = all_gathers()
    rows = int(tf.shape(tf.nest.flatten(trial.example)[0])[0])
    penalties.clear()
    with contextlib.suppress(Exception):  # a mistake in it shows when the step is traced
        # Twice: random numbers differ from call to call.
        for part in (slice(None), slice(1), slice(1, None)) * 2:
            _values(compute, trial.example, part)
    # A layer may add another number of penalties from call to call. With `all_gather`, it looks at all rows.
    if rows == 1 or len(penalties) < 6 or len(set(map(len, penalties))) > 1 or all_gathers() != gathers:
        return True
    together, alone, others = map(np.array, penalties[:3])
    if _changed(changing, before) or not _same(np.array(penalties[:3]), np.array(penalties[3:])):
        return True
    return _same(together, (alone + (rows - 1) * others) / rows)


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


def _changed(variables: Sequence[tf.Variable], before: Sequence[np.ndarray]) -> bool:
    """Whether a variable hasn't the value that it had before."""
    return any(not np.array_equal(old, variable.numpy()) for old, variable in zip(before, variables, strict=True))


def _values(compute: Compute, example: Batch, rows: slice) -> Values:
    """What `compute` returns for some rows of a batch."""
    batch = tf.nest.map_structure(lambda tensor: tensor[rows], example)
    with probing(int(tf.shape(tf.nest.flatten(batch)[0])[0])):
        return compute(batch)


def _same(one: np.ndarray | tf.Tensor, other: np.ndarray | tf.Tensor) -> bool:
    """Whether numbers are the same, to what rounding in 16 bits makes of another size of a batch."""
    return np.allclose(tf.cast(one, tf.float64), tf.cast(other, tf.float64), 0.02, 1e-6, equal_nan=True)
