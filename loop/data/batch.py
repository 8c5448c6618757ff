"""A global batch: how data is cut into batches, and which rows of one each replica computes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How a source is cut into global batches.

    Attributes:
        batch_size: examples in a global batch, over all replicas.
        seed: of the permutations.
        shuffle: whether addressed data is permuted anew each epoch; a stream has its own order.
        drop_remainder: whether a short last batch is left out.
        prefetch: how many batches a stream reads ahead, or "auto": changes no number.
    """

    batch_size: int
    seed: int = 0
    shuffle: bool = False
    drop_remainder: bool = False
    prefetch: int | str = 2


class Rows(NamedTuple):
    """A replica's rows of a (micro-)batch.

    Attributes:
        batch: the examples, stacked along a first axis n; n may be 0.
        first: the place of the first of them among the rows of all replicas; int64.
        epoch: the epoch, from 0; int64.
        number: that of the (micro-)batch in the epoch, from 0; int64.
        index: what tells each example from all others of the epoch: its index in addressed data, its position in a
            stream; int64 [n].
    """

    batch: Any
    first: tf.Tensor
    epoch: tf.Tensor
    number: tf.Tensor
    index: tf.Tensor


def rows(n: Any, part: Any, parts: int) -> tuple[Any, Any]:
    """The rows `part*n//parts .. (part+1)*n//parts`: contiguous, even to one, possibly none."""
    return part * n // parts, (part + 1) * n // parts


def count(batch: Any) -> Any:
    """The number of rows of a batch, as an int64 tensor."""
    return tf.shape(tf.nest.flatten(batch)[0], out_type=tf.int64)[0]
