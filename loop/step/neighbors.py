"""Warns where what is computed of an example depends on its neighbors in the batch: each replica has other ones."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from loop.model.variables import variable_names
from loop.step.batch_norm import batch_norm_variables, normalized_kernels, seeds, state
from loop.step.example_trace import Compute, Trial, put_back
from loop.step.metric_sums import MetricSums
from loop.step.replica import all_gathers, probing
from loop.step.variable_values import have_changed
from loop.task import Batch, Model, Values

_REMEDY = "Take the rows of all replicas from loop.all_gather(...); `tfloop verify` shows the difference"


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
    compute = _drawing_again(compute, draws)
    example, together = _with_neighbors(compute, trial.example, *trial.seen)
    alone = trial.seen[1]
    sums = MetricSums(names, trial.metrics)
    depends = _depends(compute, example, together, alone, model, sums)
    # Rows that are computed without the first one draw other numbers. So of a model that draws, the sums say nothing,
    # and the first row has to: whether it is the same alone, with the same numbers.
    if not depends and (not draws or _same(together["loss"][:1], alone["loss"])):
        # Examples may be mixed in training alone, where `all_gather` may be, too.
        in_training = functools.partial(compute, training=True)
        gathers = all_gathers()
        with contextlib.suppress(Exception):  # a mistake in it shows when the step is traced
            together = _values(in_training, example, slice(None))
            alone = _values(in_training, example, slice(1))
            depends = _depends(in_training, example, together, alone, model, sums) and all_gathers() == gathers
    if depends:
        warnings.warn(
            f"the loss of an example depends on the other examples of its batch, {_sharing(trial)}", stacklevel=2
        )


def _drawing_again(compute: Callable[..., Values], draws: Sequence[tf.Variable]) -> Callable[..., Values]:
    """`compute`, which draws the same random numbers in each call: a row's numbers don't depend on how many follow."""

    def call(batch: Batch, training: bool = False) -> Values:
        with put_back(draws):
            return compute(batch, training=training)

    return call


def _with_neighbors(compute: Compute, example: Batch, together: Values, alone: Values) -> tuple[Batch, Values]:
    """Examples whose first one has another loss than alone, and their values; if there are none, the given ones."""
    labelled = _in_two_classes(example)
    if labelled is None or not _same(together["loss"][:1], alone["loss"]):
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


def _sharing(trial: Trial) -> str:
    """Who has which rows of a batch, and what to do."""
    if trial.replicas > 1:
        return (
            f"of which each of {trial.replicas} replicas has only its own: the numbers depend on the number of "
            f"replicas. {_REMEDY}"
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
    if _same(together["loss"][:1], alone["loss"]):
        return False
    # Other random numbers than those of layers differ from call to call: they say nothing of the neighbors.
    shared = batch_norm_variables(model)
    before = [variable.numpy() for variable in shared]
    for values, rows in ((alone, slice(1)), (together, slice(None))):
        if not _same(_values(compute, example, rows)["loss"], values["loss"]):
            return False
    # Where BatchNormalization has taken statistics of the batch, these are those of all replicas in a step.
    if have_changed(shared, before):
        return False
    others = _values(compute, example, slice(1, None))
    # Not example by example: a mean that is repeated for each row has the right sum.
    of_all, of_first, of_others = (tf.stack(sums.sums(values, tf.float64)[1]) for values in (together, alone, others))
    return not _same(of_all, of_first + of_others)


def warn_of_state(compute: Compute, trial: Trial, model: Model) -> None:
    """Warns if a variable that isn't trained gets another value from more rows, such as a running mean.

    Args:
        compute: does with a batch what training does, but for the gradient.
        trial: has the examples.
        model: the model.
    """
    variables = _changing(model)
    if not trial.shares_batches or trial.fixed is not None or not variables:
        return
    gathers = all_gathers()
    before = [variable.numpy() for variable in variables]
    after = []
    with contextlib.suppress(Exception):  # a mistake in it shows when the step is traced
        for rows in (slice(None), slice(1)):
            with put_back(variables):
                _values(compute, trial.example, rows)
                after.append([variable.numpy() for variable in variables])
    if len(after) < 2:
        return
    # With `all_gather`, to look at all rows is the purpose.
    by_rows = trial.replicas > 1 and all_gathers() == gathers
    for name, old, of_few, of_one in zip(variable_names(variables), before, *after, strict=True):
        _warn_of_change(trial, name, old, of_few, of_one, by_rows)


def _warn_of_change(
    trial: Trial, name: str, before: np.ndarray, of_few: np.ndarray, of_one: np.ndarray, by_rows: bool
) -> None:
    """Warns of a variable, from its values before and after calls with a few rows, and with one of them."""
    if by_rows and not _same(of_few, of_one):
        warnings.warn(f"compute() changes {name} by its rows, {_sharing(trial)}", stacklevel=2)
    elif trial.parts > 1 and not np.array_equal(before, of_one):
        warnings.warn(
            f"compute() changes {name} in each call, which is made for each micro-batch: with accumulate="
            f"{trial.parts} a step changes it {trial.parts} times, so that the numbers depend on accumulate. Leave "
            "accumulate out; remat and shard_optimizer save memory, too",
            stacklevel=2,
        )


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


def _same(one: np.ndarray | tf.Tensor, other: np.ndarray | tf.Tensor) -> bool:
    """Whether numbers are the same, to what rounding in 16 bits makes of another size of a batch."""
    return np.allclose(tf.cast(one, tf.float64), tf.cast(other, tf.float64), 0.02, 1e-6, equal_nan=True)
