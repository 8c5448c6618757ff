"""Gradients of tables as Keras's own `fit` hands them to its optimizers: a row for each lookup.

A row of an embedding that a batch looks up twice is in its gradient twice. A dense gradient is their sum, and an
optimizer that squares it (Adam, RMSprop, ...) squares the sum; Keras's optimizers add up the squares. To give the same
numbers on any number of replicas, each lookup keeps a place of its own in what is reduced: a sum in which every other
replica and micro-batch has zeros is a concatenation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loop.step.example_trace import of_size

_CODE = 4096
"""An index is sent as two floats, its quotient and its remainder: exact up to tables of 2**36 rows."""

EACH, SHARED = "each", "shared"
"""Whether each example looks up rows of its own, or all look up the same ones, such as positions."""


def matter(optimizer: Any) -> bool:
    """Whether an optimizer's numbers depend on rows that come twice: those of Keras 3 that don't just add gradients."""
    if not isinstance(optimizer, keras.optimizers.Optimizer) or optimizer.loss_scale_factor:
        return False
    clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    return type(optimizer) is not keras.optimizers.SGD or bool(clips)


def rows_of(gradient: Any) -> tf.Tensor:
    """The rows of the table that are in a gradient: int64; none in a dense one."""
    sparse = isinstance(gradient, tf.IndexedSlices) and gradient.values.dtype.size >= 4
    return tf.cast(gradient.indices, tf.int64) if sparse else tf.zeros([0], tf.int64)


def kinds(
    looked_up: Callable[[Any], Sequence[np.ndarray]], example: Any, names: Sequence[str], fixed_rows: int | None = None
) -> dict[int, str]:
    """Which variables get gradients by lookups, and of which kind.

    Args:
        looked_up: for a batch, the rows that are in the gradient of each variable: none in a dense one.
        example: a few examples as a batch.
        names: those of the variables.
        fixed_rows: how many rows a batch must have; None: any number.

    Returns:
        `EACH` or `SHARED` by the variable's index. Where rows can't come twice, or where lookups of both kinds go to
        one table, the gradient stays dense.
    """
    if fixed_rows is not None:  # of no other number can it be seen what doubles
        all_rows = enumerate(looked_up(of_size(example, fixed_rows)))
        return {index: EACH for index, rows in all_rows if len(rows) and len(rows) % fixed_rows == 0}
    one = tf.nest.map_structure(lambda tensor: tensor[:1], example)
    two = tf.nest.map_structure(lambda tensor: tf.concat([tensor, tensor], 0), one)
    found: dict[int, str] = {}
    for index, (alone, doubled) in enumerate(zip(looked_up(one), looked_up(two), strict=True)):
        if not len(alone):
            continue
        if len(doubled) == 2 * len(alone):
            found[index] = EACH
        elif len(doubled) != len(alone):
            warnings.warn(
                f"{names[index]} is looked up by each example and for all examples at once: its gradient is made "
                "dense, so that rows which come twice are squared as a sum, which Keras's fit doesn't do",
                stacklevel=2,
            )
        elif len(np.unique(alone)) < len(alone):
            found[index] = SHARED
    return found


def packed(gradient: tf.IndexedSlices, kind: str, examples: Any, most: int, place: Any, places: int) -> tf.Tensor:
    """A gradient by lookups as a tensor which, added up over all places, has the lookups of all of them.

    Args:
        gradient: of this place's examples.
        kind: `EACH` or `SHARED`.
        examples: how many this place has, at least 1.
        most: how many one place has at most.
        place: which of all parts and replicas this is.
        places: how many there are.

    Returns:
        Shape [lookups, elements of a row + 2].
    """
    values = tf.reshape(gradient.values, [-1, math.prod(gradient.values.shape[1:])])
    indices = tf.cast(gradient.indices, tf.int64)
    code = tf.cast(tf.stack([indices // _CODE, indices % _CODE], 1), values.dtype)
    if kind == SHARED:  # the same lookups everywhere: their values are added up, their indices come from one place
        return tf.concat([values, tf.where(tf.equal(place, 0), code, tf.zeros_like(code))], 1)
    rows = tf.concat([values, code], 1)
    own = tf.shape(rows, tf.int64)[0]
    room = most * (own // tf.cast(examples, tf.int64))
    before = tf.cast(place, tf.int64) * room
    return tf.pad(rows, [[before, places * room - before - own], [0, 0]])


def unpacked(rows: tf.Tensor, shape: tf.TensorShape) -> tf.IndexedSlices:
    """What `packed` made of gradients for a variable of that shape, after adding up."""
    values, code = rows[:, :-2], tf.cast(tf.round(rows[:, -2:]), tf.int64)
    indices = code[:, 0] * _CODE + code[:, 1]
    return tf.IndexedSlices(tf.reshape(values, [-1, *shape[1:]]), indices, tf.constant(shape.as_list(), tf.int64))


def nothing(shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """What `packed` makes of no lookups at all."""
    return tf.zeros([0, shape[1:].num_elements() + 2], dtype)
