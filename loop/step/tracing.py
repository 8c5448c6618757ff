"""How Python becomes a graph: the task's own functions are converted by AutoGraph, those of tfloop aren't."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils, ops  # there is no public way to these

from loop.errors import UsageError
from loop.launch import signals

_autograph = tf.__internal__.autograph  # there is no public interface; Keras uses this one, too
_OUTSIDE = _autograph.control_status_ctx()
atexit.register(signals.remove_generated_code)


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the task, in which `if`, `for` and `while` over tensors become operations of the graph.

    tfloop's own functions aren't converted: some fifty of them took four seconds of each start.
    """
    converted = _autograph.tf_convert(function, _OUTSIDE)

    @functools.wraps(function)
    def call(*arguments: object, **named: object) -> Any:
        try:
            with _OUTSIDE:  # so that it is converted although its caller isn't
                return converted(*arguments, **named)
        except Exception as error:
            # AutoGraph raises a copy of the error, with the lines of the task added to its text. The text of a
            # `UsageError` is complete without them.
            original = error.__context__
            if isinstance(original, UsageError) and isinstance(error, UsageError):
                raise original from None
            raise

    return call


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """A `tf.function` of tfloop's own code, traced as it stands.

    TensorFlow warns of functions of the same code that are traced again and again; each run has its own.
    """

    @functools.wraps(function)
    def traced(*arguments: object, **named: object) -> Any:
        with _traces:
            return function(*arguments, **named)

    made = tf.function(traced, autograph=False, **options)
    made._omit_frequent_tracing_warning = True
    return made


class _Traces:
    """The traces that are under way, in all threads.

    After the last of them, the gradient functions that they have registered are removed: nothing differentiates a whole
    step. Each use of `tf.custom_gradient` registers one, such as each collective of `tf.distribute`. TensorFlow keeps
    it, and with it the graph, until the process ends: 8 MB for each `fit` of a small model on `mirrored`.
    """

    def __init__(self) -> None:
        self._registered = ops.gradient_registry._registry
        self._lock = threading.Lock()
        self._count = 0
        self._before: set[str] = set()  # the names when the first of them began

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._before = set(self._registered)
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count:  # another trace may still need its own
                return
            # Other names stay: a module that was imported during the trace registers its gradients only once.
            for name in set(self._registered) - self._before:
                if name.startswith("CustomGradient-"):
                    del self._registered[name]


_traces = _Traces()


def repeated(more: Callable[..., tf.Tensor], body: Callable[..., Any], *start: Any) -> Any:
    """A loop of the graph: calls `body` while `more` is true.

    Args:
        more: a function of the loop variables, which returns a bool [].
        body: a function of the loop variables, which returns their new values.
        start: the first values of the loop variables.

    Returns:
        The last values of the loop variables.
    """
    # Iterations must not overlap: memory suffices for one, and all replicas must enter collectives in one order.
    return tf.while_loop(more, body, start, parallel_iterations=1)


def changed(graph: tf.Graph) -> set[int]:
    """The ids of the handles of the variables that a graph changes, also within its branches and loops.

    The graph may still be under construction.
    """
    # What isn't known to read only is taken for a change.
    read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
    handles = set()
    for index, tensor in enumerate(graph.inputs):
        if index not in read_only:
            handles.add(id(_outermost(tensor)))
    return handles


def _outermost(tensor: tf.Tensor) -> tf.Tensor:
    """Follows a captured tensor outward, to the tensor outside of all functions."""
    graph = getattr(tensor, "graph", None)  # a tensor outside of all functions has none
    for outer, inner in getattr(graph, "captures", ()):
        if inner is tensor:
            return _outermost(outer)
    return tensor
