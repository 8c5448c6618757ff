"""The graph of layers of a functional or sequential Keras model, of either family: its calls of layers, in order."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer in the graph.

    Attributes:
        layer: the layer, or the operation of `keras.ops`.
        inputs: the ids of the tensors that it takes.
        outputs: the ids of the tensors that it returns.
        sizes: how many floating-point numbers each output has for an example; lengths that aren't known count 1.
        run: calls the layer; takes the tensors by id, and whether the model trains.
    """

    layer: Any
    inputs: list[int]
    outputs: list[int]
    sizes: list[int]
    run: Callable[[Mapping[int, Any], Any], Any]

    @property
    def computes(self) -> int:
        """About how many numbers it computes for an example: its outputs, once for each layer within the layer."""
        return sum(self.sizes) * (1 + len(inner_layers(self.layer)))


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """The graph of a functional or sequential model.

    Attributes:
        owner: the object whose method `call` runs the graph.
        calls: in the order in which they run.
        inputs: the ids of its input tensors.
        outputs: the ids of its output tensors.
        flat_inputs: the input tensors in order, from the arguments `inputs` and `mask` of `call`.
        packed: the result of `call`, from the output tensors.
    """

    owner: Any
    calls: list[LayerCall]
    inputs: list[int]
    outputs: list[int]
    flat_inputs: Callable[[Any, Any], list[Any]]
    packed: Callable[[list[Any]], Any]


def inner_layers(layer: Any) -> list[Any]:
    """All layers within a layer; none within an operation of `keras.ops`."""
    return list(layer._flatten_layers(include_self=False)) if hasattr(layer, "_flatten_layers") else []


def layer_graph(model: Any) -> LayerGraph | None:
    """The graph of a model; None: it has none, or a `call` of its own."""
    owner = getattr(model, "_functional", None) or model  # of a sequential model, which Keras 3 makes functional
    if isinstance(owner, Functional):
        return _keras3(owner) if type(owner).call is Functional.call else None
    legacy = sys.modules.get("tf_keras")
    if legacy and isinstance(owner, legacy.Model) and getattr(owner, "_is_graph_network", False):
        from tf_keras.src.engine.functional import Functional as LegacyFunctional

        is_plain = type(owner).call in (LegacyFunctional.call, legacy.Sequential.call)
        return _legacy(owner) if is_plain else None
    return None


def _keras3(model: Any) -> LayerGraph:
    def flat_inputs(inputs: Any, mask: Any) -> list[Any]:
        flat = model._standardize_inputs(inputs)
        _set_masks(flat, mask)
        return list(flat)

    def packed(outputs: list[Any]) -> Any:
        result = keras.tree.pack_sequence_as(model._outputs_struct, outputs)
        return result[0] if isinstance(result, list | tuple) and len(result) == 1 else result

    calls = []
    for node in _in_order(model):
        if node.operation and not node.is_input:
            outputs = tf.nest.flatten(node.outputs)
            calls.append(
                LayerCall(
                    node.operation,
                    _ids(node.input_tensors),
                    _ids(outputs),
                    _sizes(outputs),
                    _keras3_run(node),
                )
            )
    return LayerGraph(model, calls, _ids(model.inputs), _ids(model.outputs), flat_inputs, packed)


def _keras3_run(node: Any) -> Callable[[Mapping[int, Any], Any], Any]:
    def run(tensors: Mapping[int, Any], training: Any) -> Any:
        args, named = node.arguments.fill_in(tensors)
        if training is not None and "training" in named:
            named["training"] = training  # as Keras does: that of the model counts
        return node.operation(*args, **named)

    return run


def _legacy(model: Any) -> LayerGraph:
    def flat_inputs(inputs: Any, mask: Any) -> list[Any]:
        flat = model._flatten_to_reference_inputs(inputs)
        _set_masks(flat, mask)
        return [
            model._conform_to_reference_input(given, ref_input=wanted)
            for given, wanted in zip(flat, model.inputs, strict=False)
        ]

    def packed(outputs: list[Any]) -> Any:
        return tf.nest.pack_sequence_as(model._nested_outputs, outputs)

    calls = []
    for node in _in_order(model):
        if not node.is_input:
            outputs = tf.nest.flatten(node.outputs)
            calls.append(
                LayerCall(node.layer, _ids(node.keras_inputs), _ids(outputs), _sizes(outputs), _legacy_run(node))
            )
    return LayerGraph(model, calls, _ids(model.inputs), _ids(model.outputs), flat_inputs, packed)


def _legacy_run(node: Any) -> Callable[[Mapping[int, Any], Any], Any]:
    uses = Counter(_ids(node.keras_inputs))

    def run(tensors: Mapping[int, Any], training: Any) -> Any:
        args, named = node.map_arguments({str(key): [tensors[key]] * count for key, count in uses.items()})
        return node.layer(*args, **named)

    return run


def _in_order(model: Any) -> list[Any]:
    """The nodes of a functional model, in the order in which Keras runs them."""
    depths = sorted(model._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in model._nodes_by_depth[depth]]


def _set_masks(tensors: Sequence[Any], mask: Any) -> None:
    masks = tf.nest.flatten(mask) if mask is not None else []
    for tensor, own in zip(tensors, masks, strict=False):
        if own is not None:
            tensor._keras_mask = own


def _ids(tensors: Sequence[Any]) -> list[int]:
    return [id(tensor) for tensor in tensors]


def _sizes(outputs: Sequence[Any]) -> list[int]:
    sizes = []
    for output in outputs:
        is_float = tf.as_dtype(output.dtype).is_floating
        sizes.append(math.prod(size or 1 for size in output.shape[1:]) if is_float else 0)
    return sizes
