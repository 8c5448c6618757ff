"""Gradients of tables, such as embeddings, with a row for each lookup.

A batch may look up a row of a table twice. Its sparse gradient then has two entries for the row; its dense gradient has
their sum. An optimizer such as Adam or RMSprop squares the gradient: the sum, if it gets a dense one. Keras's `fit`
hands it the sparse gradient, and its optimizers add up the squares of both entries. To do the same on any number of
replicas, each lookup has a position of its own in the tensor that is reduced. All other replicas and micro-batches have
zeros there, so that the sum is a concatenation. These are the kinds `EACH` and `SHARED`.

The kinds `GATHERED` and `GATHERED_ROWS` are for optimizers that get the sum of both. Of a large table, only the rows
that a batch looks up are gathered from all replicas, and added up on each. That sends less than a sum of whole tables.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from loop.backends.base import Gradient
from loop.step.example_trace import of_size
from loop.step.gradients import each_row_once
from loop.task import Batch, Optimizer

LookedUp: TypeAlias = Callable[[Batch], Sequence[np.ndarray]]
"""Computes `row_indices` the gradient of each variable for a batch."""

_CODE = 4096
"""An index is sent as two floats, its quotient and remainder by this number: exact for tables of up to 2**36 rows."""

EACH = "each"
"""The kind of a table in which each example looks up rows of its own."""
SHARED = "shared"
"""The kind of a table in which all examples look up the same rows, such as positions."""
GATHERED = "gathered"
"""The kind of a table whose rows are gathered and added up, so that its gradient is dense."""
GATHERED_ROWS = "gathered_rows"
"""The same, but the gradient has the rows alone, each once: for an optimizer that changes no other row."""
_LARGE = 1 << 18
"""The size in bytes from which a table may be worth a collective of its own."""


def matter(optimizer: Optimizer) -> bool:
    """Whether an optimizer computes something else from two entries for a row than from their sum.

    All optimizers of Keras 3 do, except plain SGD, which only adds gradients up.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return False
    clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    return type(optimizer) is not keras.optimizers.SGD or bool(clips)


def row_indices(gradient: Gradient) -> tf.Tensor:
    """The indices of the rows in a sparse gradient, int64 [lookups]; none for a dense gradient."""
    # Types of less than 4 bytes can't hold the two floats of an index exactly.
    if not isinstance(gradient, tf.IndexedSlices) or gradient.values.dtype.size < 4:
        return tf.zeros([0], tf.int64)
    return tf.cast(gradient.indices, tf.int64)


def is_large(variable: tf.Variable) -> bool:
    """Whether a variable may be a table of which it is worth sending only some rows."""
    return variable.shape.rank >= 2 and variable.shape.num_elements() * variable.dtype.size >= _LARGE


def is_gathered(kind: str | None) -> bool:
    """Whether the rows of a table of this kind are gathered."""
    return kind in (GATHERED, GATHERED_ROWS)


def are_less(shape: tf.TensorShape, lookups: int) -> bool:
    """Whether this number of rows, each with its index, is less to send than a whole table of this shape."""
    return lookups * (shape[1:].num_elements() + 2) < shape.num_elements()


def kinds(looked_up: LookedUp, example: Batch, names: Sequence[str], fixed_rows: int | None) -> dict[int, str]:
    """Finds which variables get gradients by lookups, and of which kind, by trying batches of one and two examples.

    Args:
        looked_up: computes `row_indices` the gradient of each variable for a batch.
        example: a few examples as a batch.
        names: the names of the variables.
        fixed_rows: the number of rows that a batch must have; None: any number.

    Returns:
        `EACH` or `SHARED` by the variable's index. A variable that is left out has a dense gradient: no row of it is
        looked up twice, or it has lookups of both kinds.
    """
    by_index: dict[int, str] = {}
    if fixed_rows is not None:  # the model takes no batches of one and of two examples, which could be compared
        for index, rows in enumerate(looked_up(of_size(example, fixed_rows))):
            if len(rows) and len(rows) % fixed_rows == 0:
                by_index[index] = EACH
        return by_index
    # The same example twice: lookups that double belong to examples, those that stay belong to the batch.
    one = tf.nest.map_structure(lambda tensor: tensor[:1], example)
    two = tf.nest.map_structure(lambda tensor: tf.concat([tensor, tensor], 0), one)
    for index, (of_one, of_two) in enumerate(zip(looked_up(one), looked_up(two), strict=True)):
        if not len(of_one):
            continue
        if len(of_two) == 2 * len(of_one):
            by_index[index] = EACH
        elif len(of_two) != len(of_one):
            warnings.warn(
                f"{names[index]} is looked up by each example and for all examples at once: its gradient is made "
                "dense, so that rows which come twice are squared as a sum, which Keras's fit doesn't do",
                stacklevel=2,
            )
        elif len(np.unique(of_one)) < len(of_one):  # else no row comes twice, and a dense gradient is the same
            by_index[index] = SHARED
    return by_index


def tables(looked_up: LookedUp, batch: Batch) -> dict[int, int]:
    """The number of rows that an example looks up on average, rounded up, by the index of each table."""
    examples = len(tf.nest.flatten(batch)[0])
    rows_per_example = {}
    for index, rows in enumerate(looked_up(batch)):
        if len(rows):
            rows_per_example[index] = -(-len(rows) // examples)
    return rows_per_example


def packed(
    gradient: tf.IndexedSlices, kind: str, examples: tf.Tensor, most: int, place: tf.Tensor, places: int
) -> tf.Tensor:
    """A gradient by lookups, as a tensor for the reduction.

    A place is one micro-batch of one replica. The sum of these tensors over all places has the lookups of all places.
    The tensor of a gathered table is different: it has the lookups of its place alone, and no zeros for the others.

    Args:
        gradient: the gradient of this place's examples.
        kind: `EACH`, `SHARED`, `GATHERED` or `GATHERED_ROWS`.
        examples: the number of examples at this place, at least 1; int64 [].
        most: the greatest number of examples at a place.
        place: the index of this place; int64 [].
        places: the number of places.

    Returns:
        Shape [lookups, elements of a row + 2]. The last two columns are the index of the row; see `_CODE`.
    """
    values = tf.reshape(gradient.values, [-1, math.prod(gradient.values.shape[1:])])
    indices = tf.cast(gradient.indices, tf.int64)
    code = tf.cast(tf.stack([indices // _CODE, indices % _CODE], 1), values.dtype)
    if kind == SHARED:
        # All places have the same lookups. The sum adds up their values, so only one place may give the indices.
        return tf.concat([values, tf.where(tf.equal(place, 0), code, tf.zeros_like(code))], 1)
    rows = tf.concat([values, code], 1)
    if is_gathered(kind):  # `Backend.gather_rows` takes any number of rows, so no room is needed
        return rows
    own = tf.shape(rows, tf.int64)[0]
    # Each place has room for the lookups of the largest one: collectives need the same shape on all replicas.
    room = most * (own // tf.cast(examples, tf.int64))
    before = tf.cast(place, tf.int64) * room
    return tf.pad(rows, [[before, places * room - before - own], [0, 0]])


def unpacked(rows: tf.Tensor, shape: tf.TensorShape, kind: str) -> tf.Tensor | tf.IndexedSlices:
    """The gradient of a variable of that shape, from what `packed` returned, reduced over all places.

    It is dense for a table of the kind `GATHERED`. Else it is sparse, and has a row for each lookup; or each row once.
    """
    values = rows[:, :-2]
    # Rounded, since a cast alone cuts off digits.
    code = tf.cast(tf.round(rows[:, -2:]), tf.int64)
    indices = code[:, 0] * _CODE + code[:, 1]
    by_row = tf.IndexedSlices(tf.reshape(values, [-1, *shape[1:]]), indices, tf.constant(shape.as_list(), tf.int64))
    if kind == GATHERED:
        return tf.ensure_shape(tf.convert_to_tensor(by_row), shape)
    return each_row_once(by_row) if kind == GATHERED_ROWS else by_row


def nothing(shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """What stands for the result of `packed` where there are no examples: no lookups."""
    return tf.zeros([0, shape[1:].num_elements() + 2], dtype)
