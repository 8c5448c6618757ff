"""The values of several variables at once: read, assigned, or put back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf


def read_values(variables: Iterable[tf.Variable]) -> list[tf.Tensor]:
    """The values that variables have now."""
    return [variable.read_value() for variable in variables]


def assign_values(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Gives variables these values."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def put_back_unless(condition: tf.Tensor, variables: Sequence[tf.Variable], old_values: Sequence[tf.Tensor]) -> None:
    """While tracing: gives variables their old values, unless the condition holds; without a branch in the graph."""
    for variable, old in zip(variables, old_values, strict=True):
        variable.assign(tf.where(condition, variable, old))
