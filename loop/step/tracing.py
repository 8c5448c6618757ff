"""How Python becomes a graph: the task's own functions by AutoGraph, ours as they stand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from loop.errors import UsageError

_autograph = tf.__internal__.autograph  # what Keras uses to the same end; there is no other way in
_OUTSIDE = _autograph.control_status_ctx()


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the task's, in which `if`, `for` and `while` over tensors become operations of the graph.

    What the loop calls between is not: to convert some fifty functions took four seconds of each start.
    """
    converted = _autograph.tf_convert(function, _OUTSIDE)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            with _OUTSIDE:  # also within what is called by a function that isn't converted
                return converted(*arguments, **named)
        except Exception as error:
            # AutoGraph puts another error, which shows the task's lines, in front of the one that was raised. Ours say
            # what to do by themselves.
            raised = error.__context__
            if isinstance(raised, UsageError) and isinstance(error, UsageError):
                raise raised from None
            raise

    return call


def repeated(more: Callable[..., tf.Tensor], body: Callable[..., Any], *start: Any) -> Any:
    """`body`, from `start` on, again and again while there is `more` to do: a loop of the graph.

    One round after the other: memory for one is enough, and the collectives of two must not overtake each other.
    """
    return tf.while_loop(more, body, start, parallel_iterations=1)
