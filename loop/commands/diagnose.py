"""Why a task's numbers would depend on the number of replicas: tries its parts one by one, on one device."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, TextIO, TypeAlias

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.backends.host_collectives import fingerprint
from loop.data import Rows, contents, count, evaluation_sets, fixed_head, in_float64
from loop.data.host_random import seed_generators
from loop.errors import ReplicaWarning
from loop.model.precision import keras_precision
from loop.model.variables import Layer, as_tf, layers, model_variables
from loop.options import Options
from loop.run.session import Session, enter
from loop.step import row_random
from loop.step.batch_norm import batch_norms
from loop.step.build import BuiltModel
from loop.step.replica import Replica, all_gathers, within
from loop.step.unsaved import changed_outside
from loop.task import Batch, Dataset, TrainTask

Structure: TypeAlias = Any
"""A tensor or another value, or a tuple, list or dict of them."""

EXAMPLES = 6
"""The number of examples with which a task is tried."""

DEPENDS_ON_POSITION = (
    "random ops without our seeds: the loss of an example depends on its place in the batch, as it does where numbers "
    "are drawn with a seed of one's own, by every replica for its own rows. Use Keras's layers (Dropout, ...), or "
    "tf.random.stateless_* with loop.example_seed()"
)

RANDOM = (
    "random ops without our seeds: {} draws other numbers each time, and on each replica. Use Keras's layers (Dropout, "
    "...), keras.random with a SeedGenerator of the model, or tf.random.stateless_* with loop.example_seed()"
)

UNKNOWN = (
    "the cause can't be told from outside: look at what compute() makes of the variable that differs first, for a "
    "number that depends on how many examples it sees, or on the rank"
)


@contextlib.contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Within it, warnings that numbers depend on the number of replicas are kept, each once, and not shown."""
    kept: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", ReplicaWarning)
        show = warnings.showwarning

        def keep(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, ReplicaWarning):
                show(message, category, filename, lineno, file, line)
            elif str(message) not in kept:
                kept.append(str(message))

        warnings.showwarning = keep
        yield kept


def explained(task: TrainTask, options: Options, warned: list[str], same: bool) -> list[str]:
    """Why numbers differ, or would differ with other data.

    Args:
        task: the task.
        options: those it was trained with.
        warned: what a training on several replicas has warned of.
        same: whether all numbers were the same.

    Returns:
        The causes, each with its fix; empty if the numbers are the same, and no mistake is known.
    """
    # Even if all numbers agree: a mistake may change nothing with this data.
    found = causes(task, options)
    # A warning says what draws numbers by place; and what compares rows may look as if it did.
    if warned and (not found or found == [DEPENDS_ON_POSITION]):
        return warned
    return found if found or same else [UNKNOWN]


def causes(task: TrainTask, options: Options) -> list[str]:
    """The mistakes that a trial of a task with these options shows, each with its fix; empty if there are none."""
    enter(task, options, 0)  # of a task with phases, the first one
    mistakes = list(_data(task, options))
    if type(task).compute is TrainTask.compute:
        return mistakes  # in a training step of the task's own, one loss may follow from another
    try:
        mistakes += _compute(task, options, "float64")
    except Exception:  # a task may be bound to float32, such as a tf.Module of float32 tensors
        mistakes += _compute(task, options, "float32")
    return mistakes


def _data(task: TrainTask, options: Options) -> Iterator[str]:
    """The mistakes in the data: whether it is the same each time that it is made."""
    for method in ("train_data", "eval_data"):
        fingerprints = set()
        for _ in range(2):
            arrays: list[np.ndarray] = []
            # As `fit` does: global generators give the same data on each worker. Only the task's own can be a mistake.
            seed_generators(options["seed"])
            for data in evaluation_sets.named(getattr(task, method)()).values():
                arrays += contents(data, 2 * options["batch_size"] + 1)
            fingerprints.add(fingerprint(*arrays))
        if len(fingerprints) > 1:
            yield (
                f"host randomness in the data: {method}() gives other examples each time that it is called, so that "
                "every worker, and every attempt at a run, has its own. Seed it (np.random.default_rng(seed), "
                "random.Random(seed), shuffle(n, seed=seed)), or draw in compute() with loop.example_seed()"
            )


def _compute(task: TrainTask, options: Options, precision: str) -> list[str]:
    """The mistakes in `compute`: whether the values of an example depend on anything but the example."""
    # In float64, rounding is so small that it neither looks like a mistake nor hides one.
    options = options | {"precision": precision, "drop_remainder": False, "eval_every": "never"}
    session = Session(task, Backend(), options, trained_on=1, change=_few)  # of a task with phases: the first one
    built = session.built
    batch = session.data.train.head(EXAMPLES)
    if built.fixed_rows is not None:
        return []  # the model doesn't take an example by itself
    # As in training: an example draws the same numbers in any batch, so that dropout isn't a mistake.
    row_random.reseed(built.model)
    row_random.by_row()
    with keras_precision(precision):
        bound = 1e-9 if precision == "float64" else 1e-4
        probe = _Probe(task, built, batch, bound)
        return list(probe.causes(options))


def _few(data: Dataset, options: Options) -> Dataset:
    """The first examples of what a task returned, in memory and in the precision of the options."""
    return in_precision(fixed_head(data, EXAMPLES), options)


def in_precision(data: Dataset, options: Options) -> Dataset:
    """Data in memory, in the precision of the options."""
    return in_float64(data) if options["precision"] == "float64" else data


class _Probe:
    """Tries a built task with one batch. Up to the bound, a relative difference counts as rounding."""

    def __init__(self, task: TrainTask, built: BuiltModel, batch: Batch, bound: float) -> None:
        self.task = task
        self.model = built.model
        self.batch = batch
        self.bound = bound
        self.size = int(count(batch))
        self._start = [(variable, variable.numpy()) for variable in model_variables(built.model)]
        # Graphs with an open number of rows, as in training: with a known number, `row_random` wouldn't draw by row.
        rows = tf.nest.map_structure(lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), batch)
        signature = [rows, tf.TensorSpec([], tf.int64)]
        self._losses: dict[bool, tf.types.experimental.PolymorphicFunction] = {}
        for training in (False, True):
            loss = functools.partial(self._loss, training)
            self._losses[training] = tf.function(loss, input_signature=signature)

    def causes(self, options: Options) -> Iterator[str]:
        """The mistakes, the most obvious first. A mistake that only follows from another one is left out."""
        gathers = all_gathers()
        evaluated = self.loss(self.batch, training=False)
        evaluated_again = self.loss(self.batch, training=False)
        trained = self.loss(self.batch, training=True)
        trained_again = self.loss(self.batch, training=True)
        if self.differ(evaluated, evaluated_again) or self.differ(trained, trained_again):
            yield self.changing()
            return
        if all_gathers() != gathers or self.size < 2:
            return  # the loss is meant to look at the whole batch

        # Layers before losses: a layer that depends on the batch makes the loss depend on it.
        dependent = list(self.dependent_layers())
        norms = list(map(attrgetter("name"), batch_norms(self.model)))
        if dependent:
            yield (
                f"batch-dependent layers: what {', '.join(dependent)} makes of an example depends on which others are "
                "in its batch, and each replica has other ones. Normalize over features (LayerNormalization), use "
                "BatchNormalization, whose statistics are taken over all replicas, or loop.all_gather() in it"
            )
        else:
            together = {False: evaluated}
            if not norms:  # in training, the output of BatchNorm depends on the batch, as it must
                together[True] = trained
            yield from self.dependent_losses(together)
        if norms and not options["sync_batch_norm"]:
            yield (
                f"an unsynchronized BatchNorm: {', '.join(norms)} takes mean and variance over each replica's rows "
                "alone, because of sync_batch_norm=False. Leave it at True"
            )

    def dependent_losses(self, together: dict[bool, np.ndarray]) -> Iterator[str]:
        """Why an example by itself has another loss than in the batch, if it has; for the first case that differs.

        `together` has the losses of the whole batch, by whether the model trains.
        """
        for training, losses in together.items():
            alone = [self.loss(self.rows(i, i + 1), training, first=i) for i in range(self.size)]
            if self.differ(losses, np.concatenate(alone)):
                # In reverse order, an example has the same neighbors, but another place.
                reversed_batch = tf.nest.map_structure(lambda tensor: tf.reverse(tensor, [0]), self.batch)
                by_position = self.differ(together[False], self.loss(reversed_batch, training=False)[::-1])
                yield DEPENDS_ON_POSITION if by_position else self.mixing(losses, training)
                return

    def rows(self, start: int, end: int) -> Batch:
        """Some examples of the batch, as a batch."""
        return tf.nest.map_structure(lambda tensor: tensor[start:end], self.batch)

    def mixing(self, together: np.ndarray, training: bool) -> str:
        """How the loss of an example depends on its batch."""
        # Copies of one example: nothing but their number can make a difference.
        if self.differ(self.loss_of_copies(2, training), self.loss_of_copies(4, training)):
            return (
                "a loss that depends on the batch size: the same example has another loss in a batch of 2 than in one "
                "of 4, so compute() divides by the number of rows, or adds over them. Return each example's own loss: "
                "tfloop divides by the global weight itself"
            )
        if not self.differ(together, np.broadcast_to(together[:1], together.shape)):
            return (
                "a mean inside the loss: all examples of a batch have the same loss, the batch's mean, which is that "
                "of each replica's rows alone. Return one value per example: leave out tf.reduce_mean(...), or use the "
                "function (keras.losses.mean_squared_error) instead of the class"
            )
        return (
            "a mean inside the loss, or something else over the batch: the loss of an example depends on which others "
            "are in its batch, and each replica has other ones. Return each example's own loss; for a loss over the "
            "whole batch, compare with loop.all_gather(...)"
        )

    def loss_of_copies(self, copies: int, training: bool) -> np.ndarray:
        """The loss of the first example in a batch of copies of it."""
        batch = tf.nest.map_structure(lambda tensor: tf.repeat(tensor, copies, 0), self.rows(0, 1))
        return self.loss(batch, training)[:1]

    def loss(self, batch: Batch, training: bool, first: int = 0) -> np.ndarray:
        """The loss of each row: float64 [n]. `first` is the position of the first row in the whole batch."""
        self.reset()  # a call may change state, such as the statistics of BatchNorm
        value = self._losses[training](batch, tf.constant(first, tf.int64)).numpy()
        return value.reshape(len(value), -1).sum(1)

    def _loss(self, training: bool, batch: Batch, first: tf.Tensor) -> tf.Tensor:
        """See `loss`, while tracing."""
        with within(self.replica(batch, first)):
            return tf.cast(self.task.compute(self.model, batch, training=training)["loss"], tf.float64)

    def reset(self) -> None:
        """Gives the model's variables the values that they had at the start."""
        for variable, value in self._start:
            variable.assign(value)

    def replica(self, batch: Batch, first: tf.Tensor | int) -> Replica:
        """The only replica, whose rows start at position `first` of the whole batch."""
        zero = tf.constant(0, tf.int64)
        first = tf.cast(first, tf.int64)
        return Replica(Backend(), Rows(batch, first, zero, zero, first + tf.range(count(batch))), 0, EXAMPLES)

    def differ(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Whether two arrays differ by more than rounding."""
        # What isn't finite in both is taken for the same; the rest is compared.
        finite = np.isfinite(one)
        if (finite != np.isfinite(other)).any():
            return True
        distance = np.abs(one - other)[finite].max(initial=1e-12)
        scale = np.abs(one[finite]).max(initial=1e-12)
        return bool(distance > max(1e-12, self.bound * scale))

    def changing(self) -> str:
        """Why the same examples have other losses each time."""
        try:
            graph = self._losses[True].get_concrete_function().graph
        except Exception:
            return RANDOM.format("something in compute()")
        held = ", ".join(changed_outside(self.task, self.model, as_tf(model_variables(self.model)), graph))
        drawing = self.random_operations(graph)
        if held and not drawing:
            return (
                f"state outside of the model: compute() changes {held}, which each worker has for itself, and no "
                "checkpoint has. Let the model have it, as by self.add_weight(trainable=False) in a layer"
            )
        return RANDOM.format(drawing or "something in compute()")

    def random_operations(self, graph: tf.Graph) -> str:
        """The types of the stateful random operations in a graph, and of those that call Python; for a message."""
        names = {operation.type for operation in graph.get_operations()}
        # The bodies of loops and branches aren't operations of the graph itself.
        for function in graph.as_graph_def().library.function:
            names.update(node.op for node in function.node_def)
        return ", ".join(sorted(filter(_is_random, names)))

    def dependent_layers(self) -> Iterator[str]:
        """The layers whose output for the first row changes with the other rows; except BatchNorm."""
        dependent: set[int] = set()
        for layer_call in self.layer_calls():
            layer = layer_call.layer
            if id(layer) not in dependent and self.mixes_rows(layer_call):
                dependent.add(id(layer))
                yield layer.name

    def layer_calls(self) -> list[_LayerCall]:
        """The calls that `compute` makes of layers that have no layers in them; except BatchNorm."""
        calls: list[_LayerCall] = []

        def watched(layer: Layer, call: Callable[..., Structure]) -> Callable[..., Structure]:
            def record(*args: Any, **kwargs: Any) -> Structure:
                calls.append(_LayerCall(layer, call, args, kwargs))
                return call(*args, **kwargs)

            return record

        norms = set(map(id, batch_norms(self.model)))
        watchable = [layer for layer in layers(self.model) if is_leaf(layer) and id(layer) not in norms]
        for layer in watchable:
            # Past the layer's own `__setattr__`, which would track the attribute.
            object.__setattr__(layer, "call", watched(layer, layer.call))
        try:
            self.reset()
            # Not compiled: a layer that is called again below needs the values of its inputs.
            with within(self.replica(self.batch, 0)):
                self.task.compute(self.model, self.batch, training=True)
        finally:
            for layer in watchable:
                object.__delattr__(layer, "call")
        return calls

    def mixes_rows(self, layer_call: _LayerCall) -> bool:
        """Whether a layer's output for the first row changes if the other rows are left out."""
        inputs = layer_call.args, layer_call.kwargs
        with_rows = filter(_has_rows, tf.nest.flatten(inputs))
        lengths = {leaf.shape[0] for leaf in with_rows}
        if lengths != {self.size}:
            return False  # it isn't called with examples
        first_row = tf.nest.map_structure(lambda leaf: leaf[:1] if _has_rows(leaf) else leaf, inputs)
        of_all = self.output(layer_call, inputs, self.batch)
        of_first = self.output(layer_call, first_row, self.rows(0, 1))
        if of_all is None or of_first is None or of_all.shape[0] != self.size:
            return False
        return of_all[:1].shape != of_first.shape or self.differ(of_all[:1], of_first)

    def output(self, layer_call: _LayerCall, inputs: Structure, batch: Batch) -> np.ndarray | None:
        """Calls a layer once more; returns its first output, or None if that isn't a tensor with rows.

        `inputs` are its arguments in place of those of the call, positional and named ones, computed from the rows of
        `batch`.
        """
        args, kwargs = inputs
        self.reset()
        with within(self.replica(batch, 0)):
            output = tf.nest.flatten(layer_call.call(*args, **kwargs))[0]
            return tf.cast(output, tf.float64).numpy() if _has_rows(output) else None


class _LayerCall(NamedTuple):
    """A call of a layer: the layer, its own method `call`, and the arguments."""

    layer: Layer
    call: Callable[..., Structure]
    args: tuple[Structure, ...]
    kwargs: dict[str, Structure]


def _has_rows(value: object) -> bool:
    """Whether a value is a tensor with at least one axis."""
    return isinstance(value, tf.Tensor) and bool(value.shape.rank)


def _is_random(operation: str) -> bool:
    """Whether an operation of this type draws random numbers from a state of its own, or calls Python."""
    if "Random" in operation and "Stateless" not in operation:
        return True
    return "PyFunc" in operation or operation.startswith(("Multinomial", "StatefulStandard", "StatefulUniform"))


def is_leaf(layer: Layer) -> bool:
    """Whether a layer has no other layers in it. A recurrent layer counts as one, and its cell doesn't."""
    # A cell can't be called again by itself: it keeps dropout masks of its first call.
    return not is_cell(layer) and all(map(is_cell, layer._flatten_layers(include_self=False)))


def is_cell(layer: Layer) -> bool:
    """Whether a layer is the cell of a recurrent one."""
    return hasattr(layer, "state_size") and not hasattr(layer, "return_sequences")
