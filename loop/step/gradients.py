"""Operations on gradients: dense ones, and sparse ones, which hold only some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
"""The gradient of a variable that the objective depends on: dense, or the rows of a table that a batch looked up."""


def divided(gradient: Gradient, divisor: tf.Tensor) -> Gradient:
    """A gradient divided by a scalar."""
    divisor = tf.cast(divisor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return gradient / divisor


def clipped(gradients: list[Gradient], norm: float | None, value: float | None, by_lookup: bool) -> list[Gradient]:
    """Gradients, clipped by their norm, and then by their elements.

    Args:
        gradients: the gradients of the global batch.
        norm: the greatest norm of all gradients together; None: any.
        value: the greatest absolute value of an element; None: any.
        by_lookup: whether some gradients have a row for each lookup.
    """
    # The norm first: `value` is then a limit on what is applied.
    if norm is not None:
        dense_norm = None
        if by_lookup:
            # A row that is looked up twice has two entries, which must be added up before they are squared.
            dense_norm = tf.linalg.global_norm(list(map(tf.convert_to_tensor, gradients)))
        gradients, _ = tf.clip_by_global_norm(gradients, norm, dense_norm)
    if value is not None:
        gradients = [tf.clip_by_value(gradient, -value, value) for gradient in gradients]
    return gradients


def each_row_once(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """A sparse gradient in which no row comes twice."""
    # In the same order as when a sparse gradient is made dense, so that the sums have the same bits.
    indices, positions = tf.unique(gradient.indices)
    if gradient.dtype.size < 4:
        # Types of 16 bits are added up in float32, as in a dense gradient.
        values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    else:
        # The same bits in two thirds of the time.
        shape = tf.concat([[tf.size(indices)], tf.shape(gradient.values)[1:]], 0)
        values = tf.scatter_nd(positions[:, tf.newaxis], gradient.values, shape)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def are_finite(loss: tf.Tensor, gradients: Mapping[int, Gradient], trained: Sequence[int]) -> tf.Tensor:
    """Whether the loss and the gradient of each trained variable are finite; a missing gradient counts as finite.

    A gradient is checked by its sum, which isn't finite if one of the elements isn't. That takes a quarter of the time
    of checking each element. (A finite gradient whose sum overflows counts as infinite.)

    Args:
        loss: a scalar.
        gradients: the gradients, by the variable's index.
        trained: the indices of the trained variables.

    Returns:
        bool [1 + the number of trained variables], the loss first.
    """
    sums = {}
    for index, gradient in gradients.items():
        total = tf.reduce_sum(content(gradient))
        sums[index] = tf.abs(total) if total.dtype.is_complex else total  # a cast would lose the imaginary part
    checked = [loss]
    for index in trained:
        if index in sums:
            checked.append(tf.cast(sums[index], loss.dtype))
        else:
            checked.append(tf.zeros_like(loss))
    return tf.math.is_finite(tf.stack(checked))


def content(gradient: Gradient) -> tf.Tensor:
    """The elements of a gradient: those of its rows, if it is sparse."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def weight_or_one(weight: tf.Tensor) -> tf.Tensor:
    """The weight as a divisor. A weight of 0 becomes 1: the result is never applied then, but must not be nan."""
    return tf.where(weight == 0.0, tf.ones_like(weight), weight)


def all_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Whether no element is nan or infinite."""
    # In two steps, the last axis by itself: XLA then uses vector instructions for the others.
    all_but_last = list(range(tensor.shape.rank - 1))
    return tf.reduce_all(tf.reduce_all(tf.math.is_finite(tensor), all_but_last))
