"""Placement: on which device each operation of a step runs, if a replica owns several.

TensorFlow places an operation that isn't told where to run on the first device, also if its weights are on another, and
so for all gradients. Here an operation runs where its variables are, a gradient where its forward operation ran, and
anything else where what it gets comes from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from loop.backends import devices

_BACKWARD = "gradient_tape/"
"""What TensorFlow puts before the name of a forward operation, in the names of its gradient's operations."""


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
            # Also its scope: gradients may be named after that alone. The last operation in a scope counts.
            self._by_name[operation.name] = device
            self._by_name[operation.name.rpartition("/")[0]] = device
        return device

    def _chosen(self, operation: tf.Operation) -> str:
        name = operation.name.partition(_BACKWARD)[2]
        while name:
            if name in self._by_name:
                return self._by_name[name]
            name = name.rpartition("/")[0]
        others = ""
        for tensor in operation.inputs:
            handle = _handle_of(tensor)
            device = tensor.device if handle is None else _handle_device(handle)
            if not devices.is_of_replica(device):  # such as that of the data
                continue
            if handle is not None:
                return device
            others = others or device
        return others


def _handle_of(tensor: tf.Tensor) -> Any:
    """The handle of a variable whose handle or value this is; else None. TensorFlow places no reading itself."""
    operation = tensor.op
    while operation.type in ("Cast", "Identity"):
        operation = operation.inputs[0].op
    if operation.type in ("ReadVariableOp", "ResourceGather"):
        return operation.inputs[0]
    return tensor if tensor.dtype == tf.resource else None


def _handle_device(handle: Any) -> str:
    """The device of a variable, from its handle, which may have come through several graphs."""
    graph = getattr(handle, "graph", None)
    while graph is not None and not handle.device:
        # The newest is the one that is being asked for, as a rule.
        outside = next((outer for outer, inner in reversed(graph.captures) if inner is handle), None)
        if outside is None:
            return ""
        handle = outside
        graph = None if isinstance(handle, tf.__internal__.EagerTensor) else handle.graph
    return str(handle.device)
