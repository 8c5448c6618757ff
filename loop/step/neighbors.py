"""Warns where what is computed of an example depends on its neighbors in the batch: each replica has other ones."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.errors import ReplicaWarning
from loop.model.variables import variable_names
from loop.step import shares
from loop.step.batch_norm import seeds
from loop.step.example_trace import Compute, Trial, put_back
from loop.step.metric_sums import MetricSums
from loop.step.replica import all_gathers, as_in_replica, probing
from loop.task import Batch, Model, Values

_REMEDY = "Take the rows of all replicas from loop.all_gather(...); `tfloop verify` shows the difference"
_REMEDY_OF_DRAWS = (
    "Take the rows of all replicas from loop.all_gather(...); where Dropout or noise gets several batches as one, as "
    "by tf.concat([real, fake], 0), call the layers for each of them; `tfloop verify` shows the difference"
)


def warn_of_loss(
    compute: Callable[..., Values], trial: Trial, model: Model, backend: Backend, names: Sequence[str]
) -> None:
    """Warns if the sums over a batch aren't those of its parts, which replicas and micro-batches add up.

    Args:
        compute: the task's function of a batch and of `training`, which `trial` has tried.
        trial: what it has returned.
        model: the model.
        backend: the backend, in whose scope it is called.
        names: the names of its values.
    """
    sums = MetricSums(names, trial.metrics)
    if not trial.shares_batches or (trial.seen is None and trial.fixed_rows is None):
        return
    if trial.seen is None:  # `compute` doesn't take a single example, but several
        if not _adds_up(lambda batch: compute(batch, training=True), trial.example, trial, backend, model, sums):
            _warn_of_neighbors(trial, bool(seeds(model)))
        return
    changing = [*seeds(model), *shares.changing(model)]
    in_evaluation = functools.partial(as_in_replica(backend, compute), training=False)
    repeatable = _repeatable(in_evaluation, changing)
    together, alone = trial.seen
    if changing:  # the trial has drawn other numbers in each call, or has changed the state
        together, alone = _values(repeatable, trial.example, slice(None)), _values(repeatable, trial.example, slice(1))
    example, together = _with_neighbors(repeatable, trial.example, together, alone, shares.tolerance(model))
    # Examples may be mixed in training alone. What an evaluation computes is tried only if an example has another loss
    # alone: most losses end there.
    depends = not _adds_up(lambda batch: compute(batch, training=True), example, trial, backend, model, sums)
    if not depends and not _same(together["loss"][:1], alone["loss"], shares.tolerance(model)):
        depends = not _adds_up(lambda batch: compute(batch, training=False), example, trial, backend, model, sums)
    if depends:
        _warn_of_neighbors(trial, bool(seeds(model)))


def warn_of_minimized(trial: Trial, model: Model, backend: Backend, values: Compute, names: Sequence[str]) -> None:
    """Warns as `warn_of_loss` and `warn_of_state` do, of a function that is given to `step.minimize`.

    Args:
        trial: has the examples.
        model: the model.
        backend: the backend, in whose scope it is called.
        values: the task's function, which `trial` has tried.
        names: the names of the values.
    """
    if warn_of_state(as_in_replica(backend, values), trial, model) or not trial.shares_batches:
        return
    if trial.seen is None and trial.fixed_rows is None:  # with `all_gather`, to look at all rows is the purpose
        return
    if not _adds_up(values, trial.example, trial, backend, model, MetricSums(names, trial.metrics)):
        _warn_of_neighbors(trial, bool(seeds(model)))


def _adds_up(compute: Compute, example: Batch, trial: Trial, backend: Backend, model: Model, sums: MetricSums) -> bool:
    """Whether the sums of shares add up. True if `compute` fails: a mistake in it shows when the step is traced."""

    def numbers(values: Values, rows: tf.Tensor) -> Sequence[tf.Tensor]:
        weighted = sums.sums(values, tf.float64)[1]
        if not has_zeros or "weight" not in values:
            return weighted
        # Examples of weight 0 would show nothing, and all that are tried may be such.
        return weighted + sums.sums({**values, "weight": tf.ones_like(values["weight"])}, tf.float64)[1]

    assert trial.rows is not None  # replicas or micro-batches share a batch
    has_zeros = True  # unless it is known that all have a weight
    with contextlib.suppress(Exception):
        if trial.seen is not None:
            weight = trial.seen[0].get("weight")
            has_zeros = weight is not None and not bool(tf.reduce_all(tf.cast(weight, tf.bool)))
        tried = shares.ShareTrial(compute, example, model, numbers, trial.rows)
        return as_in_replica(backend, tried.first_wrong)() is None
    return True


def _warn_of_neighbors(trial: Trial, draws: bool) -> None:
    """Warns of a loss that depends on other examples.

    Args:
        trial: knows who shares a batch.
        draws: whether the model draws random numbers.
    """
    sharing = _sharing(trial, _REMEDY_OF_DRAWS if draws else _REMEDY)
    text = f"the loss of an example depends on the other examples of its batch, {sharing}"
    warnings.warn(text, ReplicaWarning, stacklevel=2)


def _repeatable(compute: Callable[..., Values], variables: Sequence[tf.Variable]) -> Callable[..., Values]:
    """`compute`, which finds the same seeds and the same state in each call.

    A row's random numbers don't depend on how many rows follow it.
    """

    def call(batch: Batch, **training: bool) -> Values:
        with put_back(variables):
            return compute(batch, **training)

    return call


def _with_neighbors(
    compute: Compute, example: Batch, together: Values, alone: Values, tolerance: float
) -> tuple[Batch, Values]:
    """Examples whose first one has another loss than alone, and their values; if there are none, the given ones."""
    labelled = _in_two_classes(example)
    if labelled is None or not _same(together["loss"][:1], alone["loss"], tolerance):
        return example, together
    # Losses of pairs look at other rows of the same class, of which a few examples may have none.
    with contextlib.suppress(Exception):  # made-up examples may not fit together
        return labelled, _values(compute, labelled, slice(None))
    return example, together


def _in_two_classes(example: Batch) -> Batch | None:
    """The examples with other labels: the third has that of the first, the second another; None: they have no labels.

    Labels are integers, one for each example.
    """
    tensors = tf.nest.flatten(example)
    if not any(map(_are_labels, tensors)) or len(tensors[0]) < 3:
        return None

    def relabelled(tensor: tf.Tensor) -> tf.Tensor:
        if not _are_labels(tensor):
            return tensor
        first = tensor[:1]
        # 0 and 1 are labels wherever there are two.
        other = tf.where(tensor[1:2] == first, tf.cast(first == 0, tensor.dtype), tensor[1:2])
        return tf.concat([first, other, first, tensor[3:]], 0)

    return tf.nest.map_structure(relabelled, example)


def _are_labels(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_integer and tensor.shape[1:].num_elements() == 1


def _sharing(trial: Trial, remedy: str = _REMEDY) -> str:
    """Who has which rows of a batch, and what to do; on several replicas, `remedy`."""
    if trial.replicas > 1:
        return (
            f"of which each of {trial.replicas} replicas has only its own: the numbers depend on the number of "
            f"replicas. {remedy}"
        )
    return (
        f"of which each of {trial.parts} micro-batches has only its own: the numbers depend on accumulate. Leave it "
        "out, or call loop.all_gather(...) to say that the rows of a micro-batch are meant"
    )


def warn_of_state(compute: Compute, trial: Trial, model: Model) -> bool:
    """Warns if a variable that isn't trained gets another value from more rows, such as a running mean.

    Returns whether there is such a variable, on several replicas: then the loss depends on the rows by it, too.

    Args:
        compute: does with a batch what training does, but for the gradient.
        trial: has the examples.
        model: the model.
    """
    variables = shares.changing(model)
    if not trial.shares_batches or trial.fixed_rows is not None or not variables:
        return False
    gathers = all_gathers()
    before = [variable.numpy() for variable in variables]
    after = []
    with contextlib.suppress(Exception):  # a mistake in it shows when the step is traced
        # The others, too: the greatest of a few rows may be the first one.
        for rows in (slice(None), slice(1), slice(1, None)):
            with put_back([*variables, *seeds(model)]):
                _values(compute, trial.example, rows)
                after.append([variable.numpy() for variable in variables])
    if len(after) < 2:
        return False
    # With `all_gather`, to look at all rows is the purpose.
    by_rows = trial.replicas > 1 and all_gathers() == gathers
    changed_by_rows = False
    for name, old, *values in zip(variable_names(variables), before, *after, strict=True):
        changed_by_rows |= _warn_of_change(trial, name, old, values, by_rows)
    return changed_by_rows


def _warn_of_change(trial: Trial, name: str, before: np.ndarray, after: Sequence[np.ndarray], by_rows: bool) -> bool:
    """Warns of a variable, from its values before and after calls with a few rows, and with parts of them.

    Returns whether it is changed by the rows.
    """
    of_few, *of_parts = after
    if by_rows and not all(_same_change(before, of_few, of_part) for of_part in of_parts):
        warnings.warn(f"compute() changes {name} by its rows, {_sharing(trial)}", ReplicaWarning, stacklevel=2)
        return True
    if trial.parts > 1 and not np.array_equal(before, of_parts[0]):
        warnings.warn(
            f"compute() changes {name} in each call, which is made for each micro-batch: with accumulate="
            f"{trial.parts} a step changes it {trial.parts} times, so that the numbers depend on accumulate. Leave "
            "accumulate out; remat and shard_optimizer save memory, too",
            stacklevel=2,
        )
    return False


def _values(compute: Compute, example: Batch, rows: slice) -> Values:
    """What `compute` returns for some rows of a batch."""
    batch = tf.nest.map_structure(lambda tensor: tensor[rows], example)
    with probing(batch):
        return compute(batch)


def _same(one: np.ndarray | tf.Tensor, other: np.ndarray | tf.Tensor, tolerance: float) -> bool:
    """Whether numbers are the same, up to rounding."""
    return np.allclose(tf.cast(one, tf.float64), tf.cast(other, tf.float64), tolerance, 1e-6, equal_nan=True)


def _same_change(before: np.ndarray, one: np.ndarray, other: np.ndarray) -> bool:
    """Whether a variable has changed by the same, up to rounding.

    Its values may be almost the same in any case: a slow moving average changes little in one step.
    """
    old = before.astype(np.float64)
    with np.errstate(invalid="ignore"):  # an infinite value minus itself is nan: it hasn't changed
        rounding = 1e-6 * (1 + np.abs(old))
        changes = np.abs(one - old)
        difference = np.abs(one.astype(np.float64) - other)
        return bool(np.all((difference <= 0.02 * changes + rounding) | np.isnan(difference)))
