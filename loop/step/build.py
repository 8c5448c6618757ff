"""Builds the model and the optimizer of a task, with all their variables, on a backend."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data import RowCounts
from loop.errors import UsageError, message_of
from loop.model.precision import keras_precision
from loop.model.variables import (
    Variable,
    as_tf,
    carried_variables,
    fixed_inputs,
    layers,
    model_variables,
    optimizer_variables,
    stateful_layers,
    trainable_variables,
    variable_names,
)
from loop.step import lookups, sharding
from loop.step.batch_norm import global_seeds
from loop.step.example_trace import (
    Trial,
    check_stateful,
    held_by,
    of_size,
    put_back,
    recorded,
    tried_step,
)
from loop.step.hints import hinted
from loop.step.metric_sums import checked_metrics
from loop.step.mistakes import ERRORS, check_dtypes, check_optimizer_is_given
from loop.step.neighbors import warn_of_loss, warn_of_minimized, warn_of_state
from loop.step.optimizers import AssignedOptimizers, assign_optimizers, check_are_new, made_for
from loop.step.penalties import Penalties, PenaltyTrial
from loop.step.replica import as_in_replica, probing
from loop.step.sharding import Shards
from loop.task import Batch, Model, Optimizer, TrainTask, Values


@dataclasses.dataclass
class BuiltModel:
    """What a task has built."""

    model: Model
    optimizer: Optimizer  # what `build_optimizer` returned: an optimizer, or a dict of them
    # By name, "" for a single one: each optimizer, and the indices of its variables among the model's trainable ones.
    optimizers: AssignedOptimizers
    # The names of the values of each `step.minimize` of a training step, by the optimizer's name, "" for all
    # optimizers.
    minimized: dict[str, list[str]]
    # The names of the values of `compute`, the loss first; empty if the task has no `compute`, but a training step of
    # its own.
    values: list[str]
    metrics: dict[str, keras.metrics.Metric]  # Keras metrics by the name of the value that they are updated with
    # What has shown of the losses that the model's layers add.
    penalties: Penalties = dataclasses.field(default_factory=Penalties)
    # The kind of reduction, by the variable's index, of gradients that keep a row for each lookup; see
    # `loop.step.lookups`.
    lookups: dict[int, str] = dataclasses.field(default_factory=dict)
    # For each large variable whose rows may be gathered, by index: how many rows an example looks up.
    tables: dict[int, int] = dataclasses.field(default_factory=dict)
    fixed_rows: int | None = None  # the number of rows that a batch must have; None: any number
    shards: Shards | None = None  # the parts on which optimizers are built; None: they are built on whole variables

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the model and of the optimizers that are the same in all replicas."""
        # By identity: variables can't be hashed, and `==` compares their values.
        sliced = set(map(id, self.sliced_variables))
        slots = as_tf(optimizer_variables(self.optimizer))
        whole_slots = [slot for slot in slots if id(slot) not in sliced]
        return model_variables(self.model) + whole_slots

    @property
    def sliced_variables(self) -> list[tf.Variable]:
        """The variables of the optimizers of which each replica has a slice of its own."""
        if self.shards is None:
            return []
        return list(filter(self.shards.is_sliced, as_tf(optimizer_variables(self.optimizer))))


@hinted
def build(
    task: TrainTask,
    backend: Backend,
    precision: str,
    example: Batch,
    rows: RowCounts | None = None,
    model: Model | None = None,
    sharded: bool = False,
) -> BuiltModel:
    """Builds model and optimizer with all their variables, before anything is traced.

    Args:
        task: the task.
        backend: the backend, in whose scope variables are made.
        precision: a key of `PRECISIONS`.
        example: a few examples as a batch, on which `compute` is tried.
        rows: the numbers of rows that `compute` gets in the run; None: not known.
        model: the model of the phase before; None: the task builds it.
        sharded: whether each replica holds only a part of the optimizers' state.

    Raises:
        UsageError: an object that the task returned can't be trained; the message shows the fix.
    """
    # Compiled functions and checkpoints need all variables, but a model or optimizer may make some of them late. So
    # everything is tried once on a few examples; each trial gives variables back the values that they had before.
    _check_loss_reduction(task)

    # The model. What is made while it is built is recorded: a task may make variables that its model doesn't list.
    made: list[tf.Variable] = []
    with backend.scope(), keras_precision(precision), recorded(made):
        model = task.build_model() if model is None else model
        _check_model(model)
        # Before anything asks what is trainable: a phase may freeze layers, or make variables.
        if task.phase is not None:
            task.begin_phase(model, task.phase)
        stateful = check_stateful(stateful_layers(model), rows)
        trial = Trial(example, rows, stateful, fixed_inputs(model))
        if type(task)._prepare is not TrainTask._prepare:
            with put_back(_state(task, model, made, backend)):
                trial.call(lambda batch: task._prepare(model, batch))

    # Metrics need no scope: the step uses them as pure functions, and keeps their states in its totals.
    metrics = checked_metrics(task.build_metrics())
    trial.metrics = metrics

    # The optimizer comes after the trial of `compute`, which is when some models make their variables.
    with backend.scope(), keras_precision(precision):
        names, penalties = _try_compute(task, model, made, backend, trial)
        optimizer = task.build_optimizer()
        check_optimizer_is_given(task, optimizer, model)
        minimized = {"": names}
        if type(task).train_step is not TrainTask.train_step:  # which may make variables of its own
            with put_back(_state(task, model, made, backend)):
                watch = functools.partial(warn_of_minimized, trial, model, backend)
                minimized = tried_step(task, optimizer, model, trial, backend, watch)
        _check_trainable(task, model)
        check_dtypes(model)
        optimizers = assign_optimizers(task, model, optimizer)
        check_are_new(task, model, optimizers)
        with made_for(task, model, optimizers, backend):
            shards = _built_optimizers(optimizers, trainable_variables(model), backend, sharded)

        _check_metric_values(metrics, names, minimized)
        by_lookup, tables = _by_lookup(task, model, optimizers, backend, example, trial.fixed_rows)
    return BuiltModel(
        model, optimizer, optimizers, minimized, names, metrics, penalties, by_lookup, tables, trial.fixed_rows, shards
    )


def _built_optimizers(
    optimizers: AssignedOptimizers, variables: Sequence[Variable], backend: Backend, sharded: bool
) -> Shards | None:
    """Builds optimizers on variables, or on parts of them: slots must exist before they are broadcast or restored."""
    if not sharded:
        for optimizer, indices in optimizers.values():
            optimizer.build([variables[index] for index in indices])
        return None
    sharding.check(backend, optimizers, variables)
    shards = Shards(variables, backend)
    for optimizer, indices in optimizers.values():
        shards.build(optimizer, indices)
    shards.empty()
    return shards


def _check_loss_reduction(task: TrainTask) -> None:
    if task.loss_reduction not in ("mean", "sum"):
        raise UsageError(
            f"{type(task).__name__}.loss_reduction is {task.loss_reduction!r}: give 'mean' (of the loss over the "
            "batch) or 'sum'"
        )


def _check_model(model: object) -> None:
    if not isinstance(model, tf.Module) and not isinstance(model, keras.Model):
        raise UsageError(
            f"build_model() returned {type(model).__name__}: return a keras.Model, a tf_keras.Model or a tf.Module"
        )


def _check_metric_values(
    metrics: Mapping[str, keras.metrics.Metric], names: Sequence[str], minimized: Mapping[str, Sequence[str]]
) -> None:
    # A value of a task's own `train_step` may have a metric, too.
    without_value = set(metrics).difference(names, *minimized.values())
    if without_value:
        raise UsageError(
            f"build_metrics() has {sorted(without_value)[0]!r}, but compute() returns no value of that name"
        )


def _check_trainable(task: TrainTask, model: Model) -> None:
    if not trainable_variables(model):
        where = f" in the phase {task.phase.name!r}, after begin_phase()" if task.phase else ""
        raise UsageError(
            f"the model has no trainable variables{where}: build_model() must return one with weights that aren't "
            "all frozen"
        )


def _try_compute(
    task: TrainTask, model: Model, made: Sequence[tf.Variable], backend: Backend, trial: Trial
) -> tuple[list[str], Penalties]:
    """Tries `compute` on a few examples. A model without an input shape makes its variables here.

    Returns:
        The names of the values of `compute`, empty for a task that has a training step of its own in place of it; and
        what has shown of the losses that the model's layers add.
    """
    if type(task).compute is TrainTask.compute and type(task).train_step is not TrainTask.train_step:
        return [], Penalties()
    given = functools.partial(task.compute, model)
    compute = PenaltyTrial(given, model, backend)
    with put_back(_state(task, model, made, backend)):
        names = trial.names(compute)
        penalties = compute.found(trial)
        # A layer that isn't Keras's may add a sum over rows in training alone. One replica with all rows may have it.
        if trial.shares_batches and not penalties.grow and trial.fixed_rows is None and _has_own_layers(model):
            # A mistake in it shows when the step is traced.
            with contextlib.suppress(Exception), put_back(_state(task, model, made, backend)):
                penalties = compute.found_in_training(trial, penalties)
        if not warn_of_state(compute.in_training, trial, model):
            warn_of_loss(given, trial, model, backend, names)
    return names, penalties


def try_evaluation(
    task: TrainTask, built: BuiltModel, backend: Backend, trained: Batch, evaluated: Batch, what: str
) -> None:
    """Tries `compute` on examples of the evaluation data, if they differ from the training data in shape or type.

    Otherwise a mistake would show only after the first epoch.

    Args:
        task: the task.
        built: the model and the optimizers of the task.
        backend: the backend.
        trained: a few examples of the training data, as a batch.
        evaluated: a few examples of the evaluation data, as a batch.
        what: the name of the evaluation data, for messages.

    Raises:
        UsageError: `compute` doesn't take them.
    """
    if type(task).compute is TrainTask.compute or _specs(trained) == _specs(evaluated):
        return
    try:
        in_trial(task, built, backend, evaluated, training=False)
    except ERRORS as error:
        raise UsageError(
            f"{what} has other examples than train_data(), {_in_words(evaluated)} instead of "
            f"{_in_words(trained)}, and compute() doesn't take them: {message_of(error)}"
        ) from error


def in_trial(task: TrainTask, built: BuiltModel, backend: Backend, example: Batch, training: bool) -> Values:
    """What `compute` returns for a few examples; variables get back the values that they had before."""
    batch = example if built.fixed_rows is None else of_size(example, built.fixed_rows)
    with backend.scope(), put_back(_state(task, built.model, (), backend)), probing(batch):
        return as_in_replica(backend, task.compute)(built.model, batch, training=training)


def _specs(batch: Batch) -> Batch:
    """The types and shapes of the parts of one example, in their structure."""
    return tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape[1:], tensor.dtype), batch)


def _in_words(batch: Batch) -> str:
    """The types and shapes of the parts of one example, for a message."""
    parts = [f"{tensor.dtype.name} {list(tensor.shape[1:])}" for tensor in tf.nest.flatten(batch)]
    return ", ".join(parts)


def _state(task: TrainTask, model: Model, others: Sequence[tf.Variable], backend: Backend) -> list[tf.Variable]:
    """The variables that a call of the model or of the task's methods may change, as far as they can be known."""
    variables = [*others, *held_by(task), *global_seeds()]
    with contextlib.suppress(ValueError):  # a tf_keras model without an input shape has no variables yet
        variables += model_variables(model)
    # A task may still hold metrics that it has made for another backend, which this build doesn't change.
    return list(filter(backend.can_read, variables))


def _by_lookup(
    task: TrainTask,
    model: Model,
    optimizers: AssignedOptimizers,
    backend: Backend,
    example: Batch,
    fixed_rows: int | None,
) -> tuple[dict[int, str], dict[int, int]]:
    """Finds the variables whose rows are looked up, by a trial on a few examples.

    Returns:
        The variables whose gradients keep a row for each lookup, if the task asks for that; and, of the others, the
        tables whose rows may be gathered. See `BuiltModel`.
    """
    variables = trainable_variables(model)
    # What the task asks for goes first: it decides what the optimizer computes, and not only what is sent.
    asked = _squared_each(task, optimizers)
    large = _large(task, variables, backend) - asked
    # Most models have no such table, and are spared the trial.
    if backend.asynchronous or not (asked or large) or not _may_look_up(model):
        return {}, {}

    def rows(batch: Batch) -> list[tf.Tensor]:
        with tf.GradientTape() as tape, probing(batch):
            loss = task.compute(model, batch, training=False)["loss"]
        gradients = tape.gradient(loss, as_tf(variables))
        return list(map(lookups.row_indices, gradients))

    def looked_up(batch: Batch) -> list[np.ndarray]:
        logger = tf.get_logger()
        level = logger.level
        logger.setLevel("ERROR")  # strategies warn that it is slow to run a function outside of a graph
        try:
            return [indices.numpy() for indices in backend.first(backend.run(rows, batch))]
        finally:
            logger.setLevel(level)

    by_lookup: dict[int, str] = {}
    gathered: dict[int, int] = {}
    with put_back(_state(task, model, carried_variables(model), backend)):
        if asked:
            kinds = lookups.kinds(looked_up, example, variable_names(variables), fixed_rows)
            by_lookup = {index: kind for index, kind in kinds.items() if index in asked}
        if large:
            batch = example if fixed_rows is None else of_size(example, fixed_rows)
            tables = lookups.tables(looked_up, batch)
            gathered = {index: count for index, count in tables.items() if index in large}
    return by_lookup, gathered


def _squared_each(task: TrainTask, optimizers: AssignedOptimizers) -> set[int]:
    """The variables whose optimizer is to get a row for each lookup."""
    asked: set[int] = set()
    for optimizer, indices in optimizers.values():
        if lookups.matter(optimizer) and task.repeated_rows == "squared_each":
            asked.update(indices)
    return asked


def _large(task: TrainTask, variables: Sequence[Variable], backend: Backend) -> set[int]:
    """The variables whose rows may be gathered, if they turn out to be looked up."""
    if not backend.gathers_rows or backend.replicas == 1 or type(task).compute is TrainTask.compute:
        return set()
    large: set[int] = set()
    for index, variable in enumerate(as_tf(variables)):
        if lookups.is_large(variable):
            large.add(index)
    return large


def _has_own_layers(model: Model) -> bool:
    """Whether a layer of the model, or the model itself, isn't Keras's own."""
    return any(not type(layer).__module__.startswith(("keras.", "tf_keras.")) for layer in layers(model))


def _may_look_up(model: Model) -> bool:
    """Whether a layer of the model may look up rows of a table: an embedding, or one that isn't Keras's own."""
    for layer in layers(model):
        is_of_keras = type(layer).__module__.startswith("keras.")
        if layer is not model and (not is_of_keras or isinstance(layer, keras.layers.Embedding)):
            return True
    return False
