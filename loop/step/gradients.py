"""Operations on gradients: dense ones, and sparse ones, which hold only some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def divided(gradient: Any, divisor: tf.Tensor) -> Any:
    """A gradient divided by a scalar."""
    divisor = tf.cast(divisor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return gradient / divisor


def clipped(gradients: list[Any], norm: float | None, value: float | None, by_lookup: bool) -> list[Any]:
    """Gradients, clipped by their norm, and then by their elements.

    Args:
        gradients: of the global batch.
        norm: the greatest norm of all together; None: any.
        value: the greatest absolute value of an element; None: any.
        by_lookup: whether some have a row for each lookup. For the norm, rows that come twice must be added up.
    """
    if norm is not None:
        dense_norm = (
            tf.linalg.global_norm([tf.convert_to_tensor(gradient) for gradient in gradients]) if by_lookup else None
        )
        gradients, _ = tf.clip_by_global_norm(gradients, norm, dense_norm)
    if value is not None:
        gradients = [tf.clip_by_value(gradient, -value, value) for gradient in gradients]
    return gradients


def each_row_once(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """A sparse gradient in which no row comes twice. They are added up in the same order as in a dense gradient."""
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def are_finite(loss: tf.Tensor, gradients: Mapping[int, Any], trained: Sequence[int]) -> tf.Tensor:
    """Whether the loss and the gradient of each trained variable are finite; a missing gradient counts as finite.

    The sum of a gradient isn't finite if one of its elements isn't, and costs a quarter of a look at each element. (A
    finite gradient whose sum overflows counts as infinite.)
    """
    values = [content(gradient) for gradient in gradients.values()]
    sums = dict(zip(gradients, map(tf.reduce_sum, values), strict=True))
    looked_at = [tf.cast(sums[index], loss.dtype) if index in sums else tf.zeros_like(loss) for index in trained]
    return tf.math.is_finite(tf.stack([loss, *looked_at]))


def content(gradient: Any) -> tf.Tensor:
    """The numbers of a gradient: those of its rows, if it is sparse."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def weight_or_one(weight: tf.Tensor) -> tf.Tensor:
    """The weight as a divisor. A weight of 0 becomes 1: the result is never applied then, but must not be nan."""
    return tf.where(weight == 0.0, tf.ones_like(weight), weight)


def all_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Whether no element is nan or infinite."""
    # In two steps, the last axis by itself: XLA then uses vector instructions for the others.
    return tf.reduce_all(tf.reduce_all(tf.math.is_finite(tensor), list(range(tensor.shape.rank - 1))))
