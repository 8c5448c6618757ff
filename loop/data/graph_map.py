"""A map of indexed data that is a `tf.function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

import tensorflow as tf

from loop.data.example_parts import Part, map_parts
from loop.data.examples import as_array


def is_graph(function: object) -> TypeGuard[Callable[..., Any]]:
    """Whether a function is a `tf.function`."""
    return isinstance(function, tf.types.experimental.PolymorphicFunction)


def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `tf.function` that is called with tensors: it is traced anew for each text or number of Python."""

    def call(example: Any, **seed: Any) -> Any:
        tensors = map_parts(_tensor, example)
        with tf.device("CPU:0"):
            return function(tensors, **seed)

    # Whether it takes a seed is read off its signature.
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


def _tensor(part: Part) -> tf.Tensor:
    # In a graph parts are tensors already; read one by one, they are what the source gives.
    return part if tf.is_tensor(part) else tf.convert_to_tensor(as_array(part))
