"""Warns of variables that the steps use and that aren't the model's, and of hidden random states."""

from __future__ import annotations

import contextlib
import itertools
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data.host_random import random_state, set_random_state
from loop.model.variables import Variable, as_tf, handles, layers, made_variables
from loop.step.batch_norm import global_seeds
from loop.step.build import BuiltModel, in_trial
from loop.step.example_trace import held_by, members
from loop.step.tracing import changed
from loop.step.values import content
from loop.task import Batch, Model, Optimizer, TrainTask

_SEED = "the seed of keras.random"
_REMEDY = (
    "Draw random numbers with layers; or with keras.random and model.seed, where build_model() has set model.seed = "
    "keras.random.SeedGenerator(1)"
)

_OF_SEQUENTIAL = (
    "A Sequential model doesn't count layers and models that are its attributes: make a functional model of it, by "
    "keras.Model(model.inputs, model.outputs), and give that the attribute"
)
_NO_DRAWS = ("Cudnn", "ComputeAccidentalHits")
"""How the names of operations begin that have a seed and draw nothing: those of cuDNN do so without dropout."""
_CHANGES_TABLE = ("LookupTableInsertV2", "LookupTableRemoveV2", "LookupTableImportV2")
"""The operations that change a table of `tf.lookup`."""
_CALLS_PYTHON = ("PyFunc", "EagerPyFunc")
"""The operations of tf.numpy_function and tf.py_function, unless the user has said that the function has no state."""


def warn_of_unsaved(
    task: TrainTask,
    built: BuiltModel,
    backend: Backend,
    saved: Sequence[tf.Variable],
    graph: tf.Graph,
    example: Batch,
) -> None:
    """Warns if the steps change something that no checkpoint has, or use something that isn't trained.

    Args:
        task: the task. It may hold variables, and so may layers: Keras doesn't count those of TensorFlow as its own.
        built: the model; and the optimizers, which may hold variables and seeds that Keras doesn't count as theirs,
            either.
        backend: the backend.
        saved: the variables that a checkpoint has.
        graph: that of the training steps.
        example: a few examples as a batch.
    """
    nodes = list(_nodes(graph))
    draws = _hidden_draws(nodes)
    if draws:
        sampled = "CandidateSampler" in "".join(draws)
        given = "; give a sampled loss such classes as its sampled_values" if sampled else ""
        warnings.warn(
            f"the steps draw random numbers with {', '.join(draws)}, whose state TensorFlow hides: a resumed run and "
            f"another number of replicas draw other ones. {_REMEDY}{given}",
            stacklevel=2,
        )
    if any(node.op in _CHANGES_TABLE for node in nodes):
        warnings.warn(
            "the steps change a lookup table, which no checkpoint has: a resumed run has the first contents again, and "
            "another number of replicas has other ones. Keep what changes in a variable of the model, as by "
            "self.add_weight(trainable=False) in a layer",
            stacklevel=2,
        )
    # Only the chief is here: collectives of the user's own in `compute` would wait for the other workers.
    if backend.workers == 1 and any(node.op in _CALLS_PYTHON for node in nodes):
        _warn_of_python(task, built, backend, example)
    optimizers = [optimizer for optimizer, _ in built.optimizers.values()]
    _warn_of_held(_unsaved(task, built.model, saved, graph, optimizers))


def _warn_of_python(task: TrainTask, built: BuiltModel, backend: Backend, example: Batch) -> None:
    """Warns if Python that the steps call draws random numbers or keeps a state: it gives other values each time."""
    values: list[list[tf.Tensor]] = []
    before = random_state()
    with contextlib.suppress(Exception):  # a task may have a training step in place of `compute`
        for _ in range(2):
            returned = in_trial(task, built, backend, example, training=True)
            values.append(tf.nest.flatten([content(value) for value in returned.values()]))
    # It may have drawn from the generators, of which a resumed run has the states after each step.
    set_random_state(before)
    if len(values) == 2 and not all(map(_are_close, *values)):
        warnings.warn(
            "compute() calls Python, by tf.numpy_function or tf.py_function, that gives other values for the same "
            "examples each time: each replica has its own, and no checkpoint has its state. Hand it a seed of "
            "loop.example_seed() to draw with; keep what it counts in a variable of the model",
            stacklevel=3,
        )


def _are_close(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether numbers are the same, up to rounding."""
    return np.allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), 1e-3, equal_nan=True)


def changed_outside(task: TrainTask, model: Model, saved: Sequence[tf.Variable], graph: tf.Graph) -> list[str]:
    """The names of the variables that a graph changes and no checkpoint has, without the seed of keras.random.

    The arguments are those of `warn_of_unsaved`; `model` is that of the task.
    """
    return [name for name in _unsaved(task, model, saved, graph).lost if name != _SEED]


class _Unsaved(NamedTuple):
    """The names of what no checkpoint has."""

    metrics: list[str]  # metrics that the steps update
    lost: list[str]  # what else they change
    untrained: list[str]  # what they only use, although it could be trained


def _unsaved(
    task: TrainTask,
    model: Model,
    saved: Sequence[tf.Variable],
    graph: tf.Graph,
    optimizers: Sequence[Optimizer] = (),
) -> _Unsaved:
    """What the task, the model, its layers or optimizers hold, a graph uses, and no checkpoint has."""
    used = {id(outer) for outer, _ in graph.captures} - set(map(id, handles(saved)))
    written = changed(graph) & used
    found = _Unsaved([], [], [])
    # TensorFlow's own list of the attributes is private. So is all that Keras gives an optimizer, some of which is
    # computed anew in each step.
    held = [*_held("_self_", task, model, *layers(model)), *_held("_", *optimizers)]
    for name, value in held:
        is_changed = bool(written.intersection(map(id, handles(_variables(value)))))
        if is_changed and isinstance(value, keras.metrics.Metric):
            found.metrics.append(name)
        elif is_changed:
            found.lost.append(name)
        elif used.intersection(map(id, handles(_trainable(value)))):
            found.untrained.append(name)
    if written.intersection(map(id, handles(global_seeds()))):
        found.lost.append(_SEED)
    return found


def _warn_of_held(unsaved: _Unsaved) -> None:
    """Warns of what `_unsaved` has found."""
    metrics, lost, untrained = unsaved
    if metrics:
        warnings.warn(
            f"the steps update {_listed(metrics)}: such a metric is neither reported nor saved, and each replica "
            "has its own. Return the metric from build_metrics(), and its arguments by the same name from compute(); "
            "with KerasTask, give metrics=[...]",
            stacklevel=3,
        )
    if lost:
        warnings.warn(
            f"the steps change {_listed(lost)}, which no checkpoint has: a resumed run has the first value again. "
            + _remedy(
                lost,
                "Let the model have it, as by self.add_weight(trainable=False) in a layer; or the optimizer that "
                f"changes it, as by self.add_variable(...) in its build(). {_REMEDY}",
            ),
            stacklevel=3,
        )
    if untrained:
        warnings.warn(
            f"the steps use {_listed(untrained)}, which isn't a part of the model: it isn't trained, and no checkpoint "
            "has it. "
            + _remedy(
                untrained,
                "To train it, make it in build_model() as an attribute of the model, in a layer by self.add_weight(); "
                "to leave it as it is, set its trainable=False",
            ),
            stacklevel=3,
        )


def _remedy(names: list[str], usual: str) -> str:
    """What to do, by the names of what is held outside of the model."""
    return _OF_SEQUENTIAL if "Sequential." in "".join(names) else usual


def _listed(names: list[str]) -> str:
    """Names in a message, each once: a model may have many layers of a class."""
    return ", ".join(dict.fromkeys(names))


def _held(private: str, *owners: object) -> Iterator[tuple[str, object]]:
    """The attributes of each owner with their names, without those whose names begin with `private`."""
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            if not name.startswith(private) and name != "_metrics":  # Keras's list of the metrics among them
                yield f"{type(owner).__name__}.{name}", value


def _variables(value: object) -> list[tf.Variable]:
    """The variables of an attribute."""
    if isinstance(value, tf.random.Generator):
        return [value.state]
    return held_by(types.SimpleNamespace(attribute=value))


def _trainable(attribute: object) -> list[tf.Variable]:
    """The variables of an attribute that an optimizer could train."""
    variables: list[Variable] = []
    for value in members(attribute):
        if isinstance(value, tf.Module | keras.Layer):
            variables += value.trainable_variables if made_variables(value) else []
        elif isinstance(value, tf.Variable | keras.Variable) and value.trainable:
            variables.append(value)
    return [variable for variable in as_tf(variables) if variable.dtype.is_floating]


def _hidden_draws(nodes: Sequence[tf.compat.v1.NodeDef]) -> list[str]:
    """The names of those operations that draw random numbers from a state of their own."""
    # All operations that draw have this attribute.
    names = set()
    for node in nodes:
        if "seed2" in node.attr and not node.op.startswith(_NO_DRAWS):
            names.add(node.op)
    return sorted(names)


def _nodes(graph: tf.Graph) -> Iterator[tf.compat.v1.NodeDef]:
    """The operations in a graph and in its functions."""
    definition = graph.as_graph_def()
    functions = (function.node_def for function in definition.library.function)
    return itertools.chain(definition.node, *functions)
