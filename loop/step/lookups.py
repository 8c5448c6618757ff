"""Gradients of tables as Keras's own `fit` hands them to its optimizers: a row for each lookup.

A row of an embedding that a batch looks up twice is twice in a sparse gradient. A dense gradient has the sum of both,
which an optimizer such as Adam or RMSprop then squares; given the sparse gradient, Keras's optimizers add up the
squares. To give the same numbers on any number of replicas, each lookup has a place of its own in the tensor that is
reduced: all other replicas and micro-batches have zeros there, so that the sum is a concatenation.

Where an optimizer gets the sum of both anyway, only the rows of a large table that a batch looks up are gathered from
all replicas, and added up on each: the sum of whole tables would send more.
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

EACH = "each"
"""The kind of a table in which each example looks up rows of its own."""
SHARED = "shared"
"""The kind of a table in which all examples look up the same rows, such as positions."""
GATHERED = "gathered"
"""The kind of a table whose rows are gathered and added up, so that its gradient is dense."""
_LEAST = 1 << 18
"""From so many bytes on, a table may be worth a collective of its own."""


def matter(optimizer: Any) -> bool:
    """Whether an optimizer's numbers depend on rows that come twice: one of Keras 3 that doesn't just add gradients."""
    if not isinstance(optimizer, keras.optimizers.Optimizer) or optimizer.loss_scale_factor:
        return False
    clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    return type(optimizer) is not keras.optimizers.SGD or bool(clips)


def rows_of(gradient: Any) -> tf.Tensor:
    """The indices of the rows in a sparse gradient: int64; of a dense gradient, none."""
    sparse = isinstance(gradient, tf.IndexedSlices) and gradient.values.dtype.size >= 4
    return tf.cast(gradient.indices, tf.int64) if sparse else tf.zeros([0], tf.int64)


def is_large(variable: tf.Variable) -> bool:
    """Whether a variable may be a table whose looked up rows are less than all of it."""
    return variable.shape.rank >= 2 and variable.shape.num_elements() * variable.dtype.size >= _LEAST


def are_less(shape: tf.TensorShape, lookups: int) -> bool:
    """Whether so many looked up rows are less to send than a table of this shape."""
    return lookups * (shape[1:].num_elements() + 2) < shape.num_elements()


def kinds(
    looked_up: Callable[[Any], Sequence[np.ndarray]], example: Any, names: Sequence[str], fixed_rows: int | None = None
) -> dict[int, str]:
    """Which variables get gradients by lookups, and of which kind.

    Args:
        looked_up: returns, for a batch, `rows_of` the gradient of each variable.
        example: a few examples as a batch.
        names: those of the variables.
        fixed_rows: how many rows a batch must have; None: any number.

    Returns:
        `EACH` or `SHARED` by the variable's index. A variable isn't there, so that its gradient stays dense, if rows
        can't come twice, or if lookups of both kinds go to its table.
    """
    by_index: dict[int, str] = {}
    if fixed_rows is not None:  # batches of one and of two examples can't be compared
        for index, rows in enumerate(looked_up(of_size(example, fixed_rows))):
            if len(rows) and len(rows) % fixed_rows == 0:
                by_index[index] = EACH
        return by_index
    one = tf.nest.map_structure(lambda tensor: tensor[:1], example)
    two = tf.nest.map_structure(lambda tensor: tf.concat([tensor, tensor], 0), one)
    for index, (alone, doubled) in enumerate(zip(looked_up(one), looked_up(two), strict=True)):
        if not len(alone):
            continue
        if len(doubled) == 2 * len(alone):
            by_index[index] = EACH
        elif len(doubled) != len(alone):
            warnings.warn(
                f"{names[index]} is looked up by each example and for all examples at once: its gradient is made "
                "dense, so that rows which come twice are squared as a sum, which Keras's fit doesn't do",
                stacklevel=2,
            )
        elif len(np.unique(alone)) < len(alone):
            by_index[index] = SHARED
    return by_index


def tables(looked_up: Callable[[Any], Sequence[np.ndarray]], batch: Any) -> dict[int, int]:
    """How many rows an example of a batch looks up on average, rounded up, by the index of each table."""
    examples = len(tf.nest.flatten(batch)[0])
    return {index: -(-len(rows) // examples) for index, rows in enumerate(looked_up(batch)) if len(rows)}


def packed(gradient: tf.IndexedSlices, kind: str, examples: Any, most: int, place: Any, places: int) -> tf.Tensor:
    """A gradient by lookups as a tensor which, added up over all places, has the lookups of all places.

    A place is one micro-batch of one replica. Of a gathered table, it has the lookups of this place alone.

    Args:
        gradient: of this place's examples.
        kind: `EACH`, `SHARED` or `GATHERED`.
        examples: how many examples this place has, at least 1.
        most: how many examples a place has at most.
        place: the index of this place.
        places: the number of places.

    Returns:
        Shape [lookups, elements of a row + 2].
    """
    values = tf.reshape(gradient.values, [-1, math.prod(gradient.values.shape[1:])])
    indices = tf.cast(gradient.indices, tf.int64)
    code = tf.cast(tf.stack([indices // _CODE, indices % _CODE], 1), values.dtype)
    if kind == SHARED:
        # The same lookups at each place: their values are added up, so only one place may give the indices.
        return tf.concat([values, tf.where(tf.equal(place, 0), code, tf.zeros_like(code))], 1)
    rows = tf.concat([values, code], 1)
    if kind == GATHERED:
        return rows
    own = tf.shape(rows, tf.int64)[0]
    room = most * (own // tf.cast(examples, tf.int64))
    before = tf.cast(place, tf.int64) * room
    return tf.pad(rows, [[before, places * room - before - own], [0, 0]])


def unpacked(rows: tf.Tensor, shape: tf.TensorShape) -> tf.IndexedSlices:
    """The gradient of a variable of that shape, from the sum of what `packed` has returned at all places."""
    values = rows[:, :-2]
    code = tf.cast(tf.round(rows[:, -2:]), tf.int64)
    indices = code[:, 0] * _CODE + code[:, 1]
    return tf.IndexedSlices(tf.reshape(values, [-1, *shape[1:]]), indices, tf.constant(shape.as_list(), tf.int64))


def nothing(shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """What `packed` returns for a place without examples."""
    return tf.zeros([0, shape[1:].num_elements() + 2], dtype)
