"""How Python becomes a graph: the task's own functions are converted by AutoGraph, those of tfloop aren't."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from loop.errors import UsageError

_autograph = tf.__internal__.autograph  # Keras uses it, too: there is no public interface
_OUTSIDE = _autograph.control_status_ctx()


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the task, in which `if`, `for` and `while` over tensors become operations of the graph.

    tfloop's own functions aren't converted: some fifty of them took four seconds of each start.
    """
    converted = _autograph.tf_convert(function, _OUTSIDE)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            with _OUTSIDE:  # converts also within a function that isn't converted itself
                return converted(*arguments, **named)
        except Exception as error:
            # AutoGraph replaces an error by another one, which shows the task's lines. A `UsageError` says what to do
            # without them.
            raised = error.__context__
            if isinstance(raised, UsageError) and isinstance(error, UsageError):
                raise raised from None
            raise

    return call


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """A `tf.function` of tfloop's own code, traced as it stands.

    TensorFlow warns of functions of the same code that are traced again and again; each run has its own.
    """
    made = tf.function(function, autograph=False, **options)
    made._omit_frequent_tracing_warning = True
    return made


def repeated(more: Callable[..., tf.Tensor], body: Callable[..., Any], *start: Any) -> Any:
    """A loop of the graph: `body` from `start` on, while `more` is true.

    Its rounds must not overlap: memory is there for one, and collectives must be entered in one order by all replicas.
    """
    return tf.while_loop(more, body, start, parallel_iterations=1)
