"""Operations on gradients, dense ones and those that hold some rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf


def divided(gradient: Any, divisor: tf.Tensor) -> Any:
    """A gradient, divided by a scalar."""
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
        by_lookup: whether some have a row for each lookup. Rows that come twice must be added up for the norm.
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
    """A gradient that holds some rows, with no row twice: added up in the order in which a dense one would be."""
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def are_finite(loss: tf.Tensor, gradients: Mapping[int, Any], trained: Sequence[int]) -> tf.Tensor:
    """Whether the loss and the gradient of each trained variable are finite; one without a gradient is.

    A sum is as little finite as any of its elements, and costs a quarter of looking at each. (A finite gradient whose
    sum is beyond the largest number counts as infinite.)
    """
    values = [content(gradient) for gradient in gradients.values()]
    sums = dict(zip(gradients, map(tf.reduce_sum, values), strict=True))
    looked_at = [tf.cast(sums[index], loss.dtype) if index in sums else tf.zeros_like(loss) for index in trained]
    return tf.math.is_finite(tf.stack([loss, *looked_at]))


def content(gradient: Any) -> tf.Tensor:
    """The numbers of a gradient."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def weight_or_one(weight: tf.Tensor) -> tf.Tensor:
    """What to divide by: a weight of 0 says nothing, and nothing is applied."""
    return tf.where(weight == 0.0, tf.ones_like(weight), weight)


def all_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Whether no element is nan or infinite."""
    # The last axis by itself: XLA makes vector instructions of the others.
    return tf.reduce_all(tf.reduce_all(tf.math.is_finite(tensor), list(range(tensor.shape.rank - 1))))
