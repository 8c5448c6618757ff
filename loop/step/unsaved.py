"""Warns of what the steps change and no checkpoint has: variables that aren't the model's, and hidden random states."""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils  # there is no public way to ask what a graph changes

from loop.model.variables import layers
from loop.step.example_trace import global_seeds, held_by
from loop.task import Model, TrainTask

_REMEDY = (
    "Draw random numbers with layers; or with keras.random and model.seed, where build_model() has set model.seed = "
    "keras.random.SeedGenerator(1)"
)


def warn_of_unsaved(task: TrainTask, model: Model, saved: Sequence[tf.Variable], graph: tf.Graph) -> None:
    """Warns if the steps change something that is as it was at first in a resumed run.

    Args:
        task: the task. It may hold variables, and so may layers: Keras doesn't count those of TensorFlow as its own.
        model: the model of the task.
        saved: the variables that a checkpoint has.
        graph: that of the training steps.
    """
    draws = _hidden_draws(graph)
    if draws:
        warnings.warn(
            f"the steps draw random numbers with {', '.join(draws)}, whose state TensorFlow hides: a resumed run and "
            f"another number of replicas draw other ones. {_REMEDY}",
            stacklevel=2,
        )
    unsaved = _changed(graph) - set(map(id, _handles(saved)))
    owners = []
    for owner, variable in _held(task, model):
        handles = set(map(id, _handles([variable])))
        if handles & unsaved and owner not in owners:
            owners.append(owner)
    if owners:
        warnings.warn(
            f"the steps change {', '.join(owners)}, which no checkpoint has: a resumed run has the first value again. "
            f"Let the model have it, as by self.add_weight(trainable=False) in a layer. {_REMEDY}",
            stacklevel=2,
        )


def _held(task: TrainTask, model: Model) -> Iterator[tuple[str, tf.Variable]]:
    """The variables that the task, the model and its layers hold as attributes, each with the attribute's name."""
    for owner in (task, model, *layers(model)):
        for name, value in getattr(owner, "__dict__", {}).items():
            if name.startswith("_self_"):  # TensorFlow's own list of the attributes
                continue
            attribute = f"{type(owner).__name__}.{name}"
            if isinstance(value, tf.random.Generator):
                yield attribute, value.state
            for variable in held_by(types.SimpleNamespace(attribute=value)):
                yield attribute, variable
    for seed in global_seeds():
        yield "the seed of keras.random", seed


def _hidden_draws(graph: tf.Graph) -> list[str]:
    """The names of the operations in a graph that draw random numbers from a state of their own."""
    definition = graph.as_graph_def()
    functions = (function.node_def for function in definition.library.function)
    nodes = itertools.chain(definition.node, *functions)
    # All operations of this kind have this attribute; those of cuDNN have it, too, and draw without dropout nothing.
    return sorted({node.op for node in nodes if "seed2" in node.attr and not node.op.startswith("Cudnn")})


def _changed(graph: tf.Graph) -> set[int]:
    """The ids of the handles of the variables that a graph writes."""
    read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
    written = {id(tensor) for index, tensor in enumerate(graph.inputs) if index not in read_only}
    return {id(outer) for outer, inner in graph.captures if id(inner) in written}


def _handles(variables: Sequence[tf.Variable]) -> Iterator[tf.Tensor]:
    """The handles of variables; of one that each replica has, those of all replicas."""
    for variable in variables:
        for part in getattr(variable, "values", [variable]):
            yield part.handle
