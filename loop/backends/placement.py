"""Placement: on which device each operation of a step runs, if a replica owns several.

TensorFlow places an operation without a device on the first one, even if its weights are on another one; so it places
all gradients. Here an operation runs where its variables are, a gradient where its forward operation ran, and any other
operation where its inputs come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from loop.backends import devices

_BACKWARD = "gradient_tape/"
"""In the name of a gradient's operation, what TensorFlow puts before the name of the forward operation."""


@contextlib.contextmanager
def placed() -> Iterator[None]:
    """Within it, the operations of a replica are traced; does nothing if a replica owns one device."""
    if devices.per_replica() == 1:
        yield
        return
    with tf.compat.v1.get_default_graph().device(_Placement().device_of):
        yield


class _Placement:
    """Chooses devices for operations, in the order in which they are created."""

    def __init__(self) -> None:
        self._by_name: dict[str, str] = {}

    def device_of(self, operation: tf.Operation) -> str:
        """The device of an operation that is being created; called by TensorFlow, after the task's own `tf.device`."""
        device = operation.device or self._chosen(operation)
        forward = operation.name.partition(_BACKWARD)[2]
        if device and not forward:
            # Also its scope: a gradient may be named after the scope alone. The last operation in the scope counts.
            self._by_name[operation.name] = device
            self._by_name[operation.name.rpartition("/")[0]] = device
        return device

    def _chosen(self, operation: tf.Operation) -> str:
        name = operation.name.partition(_BACKWARD)[2]
        while name:
            if name in self._by_name:
                return self._by_name[name]
            name = name.rpartition("/")[0]
        # A variable among the inputs decides; without one, the first input does.
        first_device = ""
        for tensor in operation.inputs:
            handle = _handle_of(tensor)
            device = tensor.device if handle is None else _handle_device(handle)
            if not devices.is_of_replica(device):  # such as the device of the data
                continue
            if handle is not None:
                return device
            first_device = first_device or device
        return first_device


def _handle_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """The handle of the variable whose handle or value a tensor is; None: it is neither."""
    # TensorFlow gives the operations that read a variable no device: they are followed back to the handle.
    operation = tensor.op
    while operation.type in ("Cast", "Identity"):
        operation = operation.inputs[0].op
    if operation.type in ("ReadVariableOp", "ResourceGather"):
        return operation.inputs[0]
    return tensor if tensor.dtype == tf.resource else None


def _handle_device(handle: tf.Tensor) -> str:
    """The device of a variable, from its handle. A graph has only a copy of the handle, captured from outside."""
    graph = getattr(handle, "graph", None)
    while graph is not None and not handle.device:
        outside = _captured(graph, handle)
        if outside is None:
            return ""
        handle = outside
        graph = None if isinstance(handle, tf.__internal__.EagerTensor) else handle.graph
    return str(handle.device)


def _captured(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor | None:
    """The tensor outside of a graph that the graph has captured as this one, or None."""
    for outer, inner in reversed(graph.captures):  # usually the newest one is asked for
        if inner is tensor:
            return outer
    return None
