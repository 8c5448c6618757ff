"""Warns where what is computed of an example depends on its neighbors in the batch: each replica has other ones."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from loop.model.variables import layers, variable_names
from loop.step.batch_norm import as_in_evaluation, batch_norm_variables, normalized_kernels, seeds, state
from loop.step.example_trace import Compute, Trial, put_back
from loop.step.metric_sums import MetricSums
from loop.step.replica import all_gathers, probing
from loop.step.variable_values import have_changed
from loop.task import Batch, Model, Values

_REMEDY = "Take the rows of all replicas from loop.all_gather(...); `tfloop verify` shows the difference"
_REMEDY_OF_DRAWS = (
    "Take the rows of all replicas from loop.all_gather(...); where Dropout or noise gets several batches as one, as "
    "by tf.concat([real, fake], 0), call the layers for each of them; `tfloop verify` shows the difference"
)
_HALF = ("float16", "bfloat16")


def warn_of_loss(compute: Callable[..., Values], trial: Trial, model: Model, names: Sequence[str]) -> None:
    """Warns if the sums over a batch aren't those of its parts, which replicas and micro-batches add up.

    Args:
        compute: the function that `trial` has tried; it takes `training`, too.
        trial: what it has returned.
        model: the model.
        names: the names of its values.
    """
    if not trial.shares_batches or trial.seen is None:
        return
    draws = seeds(model)
    changing = [*draws, *_changing(model)]
    compute = _repeatable(compute, changing)
    tolerance = _tolerance(model)
    together, alone = trial.seen
    if changing:  # the trial has drawn other numbers in each call, or has changed the state
        together, alone = _values(compute, trial.example, slice(None)), _values(compute, trial.example, slice(1))
    example, together = _with_neighbors(compute, trial.example, together, alone, tolerance)
    sums = MetricSums(names, trial.metrics)
    depends = _depends(compute, example, together, alone, model, sums)
    if not depends:
        # Examples may be mixed in training alone, where `all_gather` may be, too.
        depends = _depends_in_training(functools.partial(compute, training=True), example, model, sums)
    if depends:
        _warn_of_neighbors(trial, bool(draws))


def warn_of_minimized(trial: Trial, model: Model, values: Compute, names: Sequence[str]) -> None:
    """Warns as `warn_of_loss` and `warn_of_state` do, of a function that is given to `step.minimize`.

    Args:
        trial: has the examples.
        model: the model.
        values: the function, which `trial` has tried.
        names: the names of the values.
    """
    if warn_of_state(values, trial, model) or not trial.shares_batches or trial.seen is None:
        return
    draws = seeds(model)
    changing = [*draws, *_changing(model)]
    compute = _repeatable(values, changing)
    if _depends_in_training(compute, trial.example, model, MetricSums(names, trial.metrics)):
        _warn_of_neighbors(trial, bool(draws))


def _depends_in_training(compute: Compute, example: Batch, model: Model, sums: MetricSums) -> bool:
    """`_depends`, of a function that computes as training does."""
    gathers = all_gathers()
    # BatchNormalization has the statistics of all replicas in a step: what is beside it would not show.
    # A mistake in `compute` shows when the step is traced.
    with contextlib.suppress(Exception), as_in_evaluation(model):
        together = _values(compute, example, slice(None))
        alone = _values(compute, example, slice(1))
        return _depends(compute, example, together, alone, model, sums) and all_gathers() == gathers
    return False


def _warn_of_neighbors(trial: Trial, draws: bool) -> None:
    """Warns of a loss that depends on other examples.

    Args:
        trial: knows who shares a batch.
        draws: whether the model draws random numbers.
    """
    sharing = _sharing(trial, _REMEDY_OF_DRAWS if draws else _REMEDY)
    warnings.warn(f"the loss of an example depends on the other examples of its batch, {sharing}", stacklevel=2)


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


def _depends(compute: Compute, example: Batch, together: Values, alone: Values, model: Model, sums: MetricSums) -> bool:
    """Whether the sums over the examples aren't those over the first one and over the others.

    Args:
        compute: a function of a batch.
        example: the examples.
        together: what it has returned for them.
        alone: what it has returned for the first one.
        model: the model.
        sums: adds up its values.
    """
    # Most losses end here, without another call.
    tolerance = _tolerance(model)
    if _same(together["loss"][:1], alone["loss"], tolerance):
        return False
    # Other random numbers than those of layers differ from call to call: they say nothing of the neighbors.
    shared = batch_norm_variables(model)
    before = [variable.numpy() for variable in shared]
    for values, rows in ((alone, slice(1)), (together, slice(None))):
        if not _same(_values(compute, example, rows)["loss"], values["loss"], tolerance):
            return False
    # Where BatchNormalization has taken statistics of the batch, these are those of all replicas in a step.
    if have_changed(shared, before):
        return False
    # Not example by example: a mean that is repeated for each row has the right sum.
    of_all = _sums(sums, together)
    if seeds(model):
        return _depends_beside_draws(compute, example, together["loss"], of_all, sums, tolerance)
    others = _values(compute, example, slice(1, None))
    return not _same(of_all, _sums(sums, alone) + _sums(sums, others), tolerance)


def _depends_beside_draws(
    compute: Compute, example: Batch, loss: tf.Tensor, of_all: tf.Tensor, sums: MetricSums, tolerance: float
) -> bool:
    """`_depends`, of a model that draws random numbers, for which the first row has another loss than alone.

    Rows that are computed without the first one draw other numbers. So the batch keeps its size here, and its first
    and last row are replaced by the second one. If the sums are those of its parts, each of both changes them by the
    same, whether the other one is replaced or not.
    """
    count = int(tf.shape(tf.nest.flatten(example)[0])[0])
    if count < 2:
        return False
    places = np.arange(count)
    first = np.where(places == 0, 1, places)
    last = np.where(places == count - 1, 1, places)
    both = np.where(places == count - 1, 1, first)
    of_both, of_last, of_first = (_values(compute, _taken(example, rows), slice(None)) for rows in (both, last, first))
    # The first row doesn't see what the others are, but how many: it draws other numbers among them.
    if count > 2 and _same(of_last["loss"][:1], loss[:1], tolerance):
        return True
    one, other = of_all + _sums(sums, of_both), _sums(sums, of_first) + _sums(sums, of_last)
    return not _same(one, other, tolerance)


def _taken(example: Batch, rows: np.ndarray) -> Batch:
    """Some rows of a batch."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), example)


def _sums(sums: MetricSums, values: Values) -> tf.Tensor:
    """The sums of the values of a batch."""
    return tf.stack(sums.sums(values, tf.float64)[1])


def warn_of_state(compute: Compute, trial: Trial, model: Model) -> bool:
    """Warns if a variable that isn't trained gets another value from more rows, such as a running mean.

    Returns whether there is such a variable, on several replicas: then the loss depends on the rows by it, too.

    Args:
        compute: does with a batch what training does, but for the gradient.
        trial: has the examples.
        model: the model.
    """
    variables = _changing(model)
    if not trial.shares_batches or trial.fixed is not None or not variables:
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
        warnings.warn(f"compute() changes {name} by its rows, {_sharing(trial)}", stacklevel=2)
        return True
    if trial.parts > 1 and not np.array_equal(before, of_parts[0]):
        warnings.warn(
            f"compute() changes {name} in each call, which is made for each micro-batch: with accumulate="
            f"{trial.parts} a step changes it {trial.parts} times, so that the numbers depend on accumulate. Leave "
            "accumulate out; remat and shard_optimizer save memory, too",
            stacklevel=2,
        )
    return False


def _changing(model: Model) -> list[tf.Variable]:
    """The variables that a call of the model may change, without those whose changes are known to be right."""
    # BatchNormalization's statistics are those of all replicas. Seeds count calls.
    known = set(map(id, batch_norm_variables(model))) | set(map(id, seeds(model)))
    variables = []
    for variable in state(model) + normalized_kernels(model):
        if id(variable) not in known:
            variables.append(variable)
    return variables


def _values(compute: Compute, example: Batch, rows: slice) -> Values:
    """What `compute` returns for some rows of a batch."""
    batch = tf.nest.map_structure(lambda tensor: tensor[rows], example)
    with probing(int(tf.shape(tf.nest.flatten(batch)[0])[0])):
        return compute(batch)


def _tolerance(model: Model) -> float:
    """The relative difference that rounding makes at most, if a batch has another size.

    A greater one would hide neighbors that matter little to a model that isn't trained yet.
    """
    for layer in layers(model):
        if getattr(layer, "compute_dtype", None) in _HALF:
            return 0.02
    return 1e-3


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
