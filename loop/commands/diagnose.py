"""Why a task's numbers would depend on the number of replicas: tries its parts one by one, on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.backends.host_collectives import fingerprint
from loop.data import Rows, contents, count, first, in_float64
from loop.model.precision import keras_precision
from loop.model.variables import layers, model_variables
from loop.run.session import Session, enter
from loop.step import row_random
from loop.step.batch_norm import batch_norms
from loop.step.build import BuiltModel
from loop.step.replica import Replica, all_gathers, within
from loop.task import TrainTask

EXAMPLES = 6

PLACES = (
    "random ops without our seeds: the loss of an example depends on its place in the batch, as it does where numbers "
    "are drawn with a seed of one's own, by every replica for its own rows. Use Keras's layers (Dropout, ...), or "
    "tf.random.stateless_* with loop.example_seed()"
)


def causes(task: TrainTask, options: dict[str, Any]) -> list[str]:
    """The mistakes that can be seen in a task, each with its fix; empty if there are none.

    Args:
        task: the task.
        options: the options of `fit`.
    """
    enter(task, options, 0)
    found = list(_data(task, options))
    if type(task).compute is TrainTask.compute:
        return found  # a training step of its own, in which one loss may follow from another
    try:
        found += _compute(task, options, "float64")
    except Exception:  # such as a tf.Module of float32 tensors
        found += _compute(task, options, "float32")
    return found


def _data(task: TrainTask, options: dict[str, Any]) -> Iterator[str]:
    """Whether the data is the same each time that it is asked for."""
    for method in ("train_data", "eval_data"):
        prints = []
        for _ in range(2):
            keras.utils.set_random_seed(options["seed"])
            data = getattr(task, method)()
            prints.append(fingerprint(*contents(data, 2 * options["batch_size"] + 1)))
        if len(set(prints)) > 1:
            yield (
                f"host randomness in the data: {method}() gives other examples each time that it is called, so that "
                "every worker, and every attempt at a run, has its own. Seed it (np.random.default_rng(seed), "
                "random.Random(seed), shuffle(n, seed=seed)), or draw in compute() with loop.example_seed()"
            )


def _compute(task: TrainTask, options: dict[str, Any], precision: str) -> list[str]:
    """Whether the values of an example depend on anything but the example."""
    options = options | {"precision": precision, "drop_remainder": False, "eval_every": "never"}
    session = Session(task, Backend(), options, trained_on=1, change=_few)  # of a task with phases: the first one
    built, batch = session.built, session.data.train.head(EXAMPLES)
    if built.fixed_rows is not None:
        return []  # an example can't be tried alone
    row_random.reseed(built.model)
    row_random.by_row()
    with keras_precision(precision):
        probe = _Probe(task, built, batch, 1e-9 if precision == "float64" else 1e-4)
        return list(probe.causes(options))


def _few(data: Any, options: dict[str, Any]) -> Any:
    """The first examples of what a task returned, in memory and in the precision of the options."""
    few = first(data, EXAMPLES)
    return in_float64(few) if options["precision"] == "float64" else few


class _Probe:
    """A built task, one batch of it, and the relative difference that is taken for rounding."""

    def __init__(self, task: TrainTask, built: BuiltModel, batch: Any, bound: float) -> None:
        self.task, self.built, self.model, self.batch, self.bound = task, built, built.model, batch, bound
        self.size = int(tf.shape(tf.nest.flatten(batch)[0])[0])
        self._start = [(variable, variable.numpy()) for variable in model_variables(built.model)]
        # As graphs that know no number of rows, as in training: random numbers are drawn by row there.
        rows = tf.nest.map_structure(lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), batch)
        signature = [rows, tf.TensorSpec([], tf.int64)]
        self._losses = {
            training: tf.function(functools.partial(self._loss, training), input_signature=signature)
            for training in (False, True)
        }

    def causes(self, options: dict[str, Any]) -> Iterator[str]:
        """The mistakes, the plainest first; what only follows from another one is left out."""
        gathers = all_gathers()
        evaluated = self.loss(self.batch, training=False)
        again = self.loss(self.batch, training=False)
        trained, trained_again = (self.loss(self.batch, training=True) for _ in range(2))
        turned = tf.nest.map_structure(lambda tensor: tf.reverse(tensor, [0]), self.batch)
        by_place = self.differ(evaluated, self.loss(turned, training=False)[::-1])
        if self.differ(evaluated, again) or self.differ(trained, trained_again):
            yield (
                f"random ops without our seeds: {self.random_operations()} draws other numbers each time, and on each "
                "replica. Use Keras's layers (Dropout, ...), keras.random with a SeedGenerator of the model, or "
                "tf.random.stateless_* with loop.example_seed()"
            )
            return
        if all_gathers() != gathers or self.size < 2:
            return  # the loss is meant to look at the whole batch
        ones = [tf.nest.map_structure(lambda tensor, i=i: tensor[i : i + 1], self.batch) for i in range(self.size)]
        dependent = list(self.dependent_layers())
        if dependent:
            yield (
                f"batch-dependent layers: what {', '.join(dependent)} makes of an example depends on which others are "
                "in its batch, and each replica has other ones. Normalise over features (LayerNormalization), use "
                "BatchNormalization, whose statistics are taken over all replicas, or loop.all_gather() in it"
            )
        names = [layer.name for layer in batch_norms(self.model)]
        for training, together in ((False, evaluated), (True, trained)):
            if dependent or (training and names):
                break  # BatchNorm's output depends on the batch, as it must
            alone = np.concatenate([self.loss(one, training, first=i) for i, one in enumerate(ones)])
            if self.differ(together, alone):
                yield PLACES if by_place else self.mixing(together, training)
                break
        if names and not options["sync_batch_norm"]:
            yield (
                f"an unsynchronised BatchNorm: {', '.join(names)} takes mean and variance over each replica's rows "
                "alone, because of sync_batch_norm=False. Leave it at True"
            )

    def mixing(self, together: np.ndarray, training: bool) -> str:
        """How the loss of an example depends on its batch."""
        first = tf.nest.map_structure(lambda tensor: tensor[:1], self.batch)
        two, four = (
            self.loss(tf.nest.map_structure(lambda tensor, n=n: tf.repeat(tensor, n, 0), first), training)[:1]
            for n in (2, 4)
        )
        if self.differ(two, four):
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

    def loss(self, batch: Any, training: bool, first: int = 0) -> np.ndarray:
        """The loss of each row, one number each, where `first` is the place of the first one in the whole batch."""
        self.reset()
        value = self._losses[training](batch, tf.constant(first, tf.int64)).numpy()
        return value.reshape(len(value), -1).sum(1)

    def _loss(self, training: bool, batch: Any, first: tf.Tensor) -> tf.Tensor:
        with within(self.replica(batch, first)):
            return tf.cast(self.task.compute(self.model, batch, training=training)["loss"], tf.float64)

    def reset(self) -> None:
        """Takes the model's state back to what it was."""
        for variable, value in self._start:
            variable.assign(value)

    def replica(self, batch: Any, first: Any) -> Replica:
        """The one replica, whose rows start at place `first`."""
        zero, first = tf.constant(0, tf.int64), tf.cast(first, tf.int64)
        return Replica(Backend(), Rows(batch, first, zero, zero, first + tf.range(count(batch))), 0, EXAMPLES)

    def differ(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Whether two arrays differ by more than rounding."""
        known = np.isfinite(one) & np.isfinite(other)
        if (np.isfinite(one) != np.isfinite(other)).any():
            return True
        apart, scale = (np.abs(each[known]).max(initial=1e-12) for each in (one - other, one))
        return bool(apart > max(1e-12, self.bound * scale))

    def random_operations(self) -> str:
        """The names of the stateful random operations in `compute`, and of code of the host."""
        try:
            graph = self._losses[True].get_concrete_function().graph
        except Exception:
            return "something in compute()"
        names = {operation.type for operation in graph.get_operations()}
        for function in graph.as_graph_def().library.function:
            names |= {node.op for node in function.node_def}
        random = {name for name in names if ("Random" in name and "Stateless" not in name) or "PyFunc" in name}
        random |= {name for name in names if name.startswith(("Multinomial", "StatefulStandard", "StatefulUniform"))}
        return ", ".join(sorted(random)) or "something in compute()"

    def dependent_layers(self) -> Iterator[str]:
        """The layers whose output for the first row changes with the others; synchronised BatchNorm aside."""
        whole, seen = batch_norms(self.model), []

        def watch(layer: Any, call: Any) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                seen.append((layer, call, args, kwargs))
                return call(*args, **kwargs)

            return watched

        # A cell of a recurrent layer keeps what it was first called with (its masks): its layer is looked at instead.
        leaves = [
            layer
            for layer in layers(self.model)
            if not [inner for inner in layer._flatten_layers(include_self=False) if not is_cell(inner)]
            and not is_cell(layer)
        ]
        calls = [(layer, layer.call) for layer in leaves if not any(layer is each for each in whole)]
        for layer, call in calls:
            object.__setattr__(layer, "call", watch(layer, call))
        try:
            self.reset()
            with within(self.replica(self.batch, 0)):
                self.task.compute(self.model, self.batch, training=True)
        finally:
            for layer, _ in calls:
                object.__delattr__(layer, "call")
        told = set()
        for layer, call, args, kwargs in list(seen):
            tensors = [each for each in tf.nest.flatten((args, kwargs)) if isinstance(each, tf.Tensor)]
            rows = [tensor for tensor in tensors if tensor.shape.rank and tensor.shape[0] == self.size]
            if not rows or len(rows) != len([tensor for tensor in tensors if tensor.shape.rank]) or id(layer) in told:
                continue

            def first(value: Any) -> Any:
                return value[:1] if isinstance(value, tf.Tensor) and value.shape.rank else value

            def output(args: Any, kwargs: Any, call: Any = call) -> np.ndarray | None:
                self.reset()
                made = tf.nest.flatten(call(*args, **kwargs))[0]
                return tf.cast(made, tf.float64).numpy() if isinstance(made, tf.Tensor) and made.shape.rank else None

            with within(self.replica(self.batch, 0)):
                all_rows = output(args, kwargs)
            with within(self.replica(tf.nest.map_structure(first, self.batch), 0)):
                one_row = output(*tf.nest.map_structure(first, (args, kwargs)))
            if all_rows is None or one_row is None or all_rows.shape[0] != self.size:
                continue
            if all_rows[:1].shape != one_row.shape or self.differ(all_rows[:1], one_row):
                told.add(id(layer))
                yield layer.name


def is_cell(layer: Any) -> bool:
    """Whether a layer is the cell of a recurrent one."""
    return hasattr(layer, "state_size") and not hasattr(layer, "return_sequences")
