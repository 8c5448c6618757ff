"""The graph of layers of a functional or sequential Keras model, of either family: its calls of layers, in order.

Keras keeps such a model as nodes, each of which is one call of a layer. This module reads them, and can run each call
by itself, as the `call` of the model would.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from loop.model.variables import Layer
from loop.task import Model

Node: TypeAlias = Any
"""Keras's record of one call of a layer; the two families share no class."""
Structure: TypeAlias = Any
"""A tensor, or a tuple, list or dict of tensors: the inputs, masks or outputs of a model."""
Tensors: TypeAlias = Mapping[int, tf.Tensor]
"""Tensors by the ids of the symbolic tensors in whose place they are."""
Run: TypeAlias = Callable[[Tensors, bool | None], Structure]
"""Calls a layer. Takes its input tensors, and whether the model trains; None: that isn't said."""


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer in the graph."""

    layer: Layer  # the layer, or the operation of `keras.ops`
    inputs: list[int]  # the ids of the tensors that it takes
    outputs: list[int]  # the ids of the tensors that it returns
    # How many floating-point numbers each output has for an example; lengths that aren't known count as 1.
    sizes: list[int]
    run: Run  # calls the layer

    @property
    def computed_size(self) -> int:
        """About how many numbers the call computes for an example: its outputs, once for each layer within it."""
        return sum(self.sizes) * (1 + len(inner_layers(self.layer)))


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """The graph of a functional or sequential model."""

    owner: Model  # the object whose method `call` runs the graph
    calls: list[LayerCall]  # the calls of layers, in the order in which they run
    inputs: list[int]  # the ids of the input tensors
    outputs: list[int]  # the ids of the output tensors
    # Returns the input tensors in order, from the arguments `inputs` and `mask` of `call`.
    flat_inputs: Callable[[Structure, Structure], list[tf.Tensor]]
    packed: Callable[[list[tf.Tensor]], Structure]  # returns the result of `call`, from the output tensors


def inner_layers(layer: Layer) -> list[Layer]:
    """All layers within a layer; none within an operation of `keras.ops`."""
    return list(layer._flatten_layers(include_self=False)) if hasattr(layer, "_flatten_layers") else []


def layer_graph(model: Model) -> LayerGraph | None:
    """The graph of a model; None: it has none, or a `call` of its own."""
    # A sequential model of Keras 3 holds a functional one, which does its work.
    owner = getattr(model, "_functional", None) or model
    # A class with a `call` of its own may do anything beside running the graph.
    if isinstance(owner, Functional):
        return _keras3(owner) if type(owner).call is Functional.call else None
    legacy = sys.modules.get("tf_keras")
    if legacy and isinstance(owner, legacy.Model) and getattr(owner, "_is_graph_network", False):
        from tf_keras.src.engine.functional import Functional as LegacyFunctional

        is_plain = type(owner).call in (LegacyFunctional.call, legacy.Sequential.call)
        return _legacy(owner) if is_plain else None
    return None


def _keras3(model: Model) -> LayerGraph:
    """The graph of a functional model of Keras 3. It does what `Functional.call` does, call by call."""

    def flat_inputs(inputs: Structure, mask: Structure) -> list[tf.Tensor]:
        # In Keras's order: inputs are conformed to the model's first, and masks are noted on what comes of it.
        flat = model._standardize_inputs(inputs)
        _set_masks(flat, mask)
        return list(flat)

    def packed(outputs: list[tf.Tensor]) -> Structure:
        # Keras, too, hands a single output over without its list.
        result = keras.tree.pack_sequence_as(model._outputs_struct, outputs)
        return result[0] if isinstance(result, list | tuple) and len(result) == 1 else result

    calls = []
    for node in _in_order(model):
        if node.operation and not node.is_input:
            outputs = tf.nest.flatten(node.outputs)
            inputs = _ids(node.input_tensors)
            calls.append(LayerCall(node.operation, inputs, _ids(outputs), _sizes(outputs), _keras3_run(node)))
    return LayerGraph(model, calls, _ids(model.inputs), _ids(model.outputs), flat_inputs, packed)


def _keras3_run(node: Node) -> Run:
    def run(tensors: Tensors, training: bool | None) -> Structure:
        args, named = node.arguments.fill_in(tensors)
        if training is not None and "training" in named:
            named["training"] = training  # as in Keras, the argument of the model wins over that of its graph
        return node.operation(*args, **named)

    return run


def _legacy(model: Model) -> LayerGraph:
    """The graph of a functional model of tf_keras. It does what `Functional.call` does there, call by call."""

    def flat_inputs(inputs: Structure, mask: Structure) -> list[tf.Tensor]:
        # Other than in Keras 3, masks are noted before the inputs are conformed to the model's.
        flat = model._flatten_to_reference_inputs(inputs)
        _set_masks(flat, mask)
        conformed = []
        for tensor, symbolic in zip(flat, model.inputs, strict=False):
            conformed.append(model._conform_to_reference_input(tensor, ref_input=symbolic))
        return conformed

    def packed(outputs: list[tf.Tensor]) -> Structure:
        return tf.nest.pack_sequence_as(model._nested_outputs, outputs)

    calls = []
    for node in _in_order(model):
        if not node.is_input:
            outputs = tf.nest.flatten(node.outputs)
            inputs = _ids(node.keras_inputs)
            calls.append(LayerCall(node.layer, inputs, _ids(outputs), _sizes(outputs), _legacy_run(node)))
    return LayerGraph(model, calls, _ids(model.inputs), _ids(model.outputs), flat_inputs, packed)


def _legacy_run(node: Node) -> Run:
    uses = Counter(_ids(node.keras_inputs))

    def run(tensors: Tensors, training: bool | None) -> Structure:
        # `map_arguments` takes one tensor off the list at each use.
        values = {str(key): [tensors[key]] * count for key, count in uses.items()}
        args, named = node.map_arguments(values)
        return node.layer(*args, **named)

    return run


def _in_order(model: Model) -> list[Node]:
    """The nodes of a functional model, in the order in which Keras runs them."""
    nodes: list[Node] = []
    # Depth counts from the outputs: the deepest nodes run first.
    for depth in sorted(model._nodes_by_depth, reverse=True):
        nodes += model._nodes_by_depth[depth]
    return nodes


def _set_masks(tensors: Sequence[tf.Tensor], mask: Structure) -> None:
    """Notes on tensors the masks that `call` was given, as Keras does."""
    # Not strict: Keras pairs masks and tensors as far as there are both.
    masks = tf.nest.flatten(mask) if mask is not None else []
    for tensor, tensor_mask in zip(tensors, masks, strict=False):
        if tensor_mask is not None:
            tensor._keras_mask = tensor_mask


def _ids(tensors: Sequence[tf.Tensor]) -> list[int]:
    return list(map(id, tensors))


def _sizes(outputs: Sequence[tf.Tensor]) -> list[int]:
    """See `LayerCall.sizes`."""
    sizes = []
    for output in outputs:
        # Integers are indices or masks, which no backward pass keeps.
        size = 0
        if tf.as_dtype(output.dtype).is_floating:
            size = math.prod(axis_size or 1 for axis_size in output.shape[1:])
        sizes.append(size)
    return sizes
