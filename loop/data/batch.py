"""A global batch: how data is cut into batches, and which rows of one each replica computes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

EVALUATION_EPOCH = 1 << 31
"""Stands for the epoch in an evaluation, whose examples have other seeds than those of training."""


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

    def of_count(self, count: int | None) -> Rows:
        """The same rows as tensors whose shapes say how many they are; None: that stays open."""
        if count is None:
            return self
        index, batch = tf.nest.map_structure(
            lambda tensor: tf.ensure_shape(tensor, [count, *tensor.shape[1:]]), (self.index, self.batch)
        )
        return self._replace(index=index, batch=batch)


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """How many rows `compute` is handed: those of the replicas' shares of the (micro-)batches of a source.

    Attributes:
        batch_size: examples in a global batch.
        replicas: how many share it.
        parts: into how many micro-batches it is cut.
        whole: how many rows a replica gets of a whole batch; increasing.
        short: of a short last batch, if there is one; 0: if its size isn't known.
    """

    batch_size: int
    replicas: int
    parts: int
    whole: list[int]
    short: list[int]


def row_counts(batch_size: int, remainder: int | None, replicas: int, parts: int) -> RowCounts:
    """See `RowCounts`; `remainder` is the size of a short last batch, 0 if there is none, None if that isn't known."""
    whole = _shares(batch_size, replicas, parts)
    short = [0] if remainder is None else _shares(remainder, replicas, parts)
    return RowCounts(batch_size, replicas, parts, whole, short)


def likely_rows(options: dict[str, Any], replicas: int, others: int = 1) -> RowCounts:
    """For a model that isn't trained here: how many rows its batches are likely to have; nothing is promised.

    Args:
        options: those of `fit` with which it is or was trained.
        replicas: on how many it was.
        others: on how many it is to be used.
    """
    share = max(1, options["batch_size"] // (replicas * (options["accumulate"] or 1)))
    return RowCounts(share, others, 1, [], [])


def _shares(n: int, replicas: int, parts: int) -> list[int]:
    """The different numbers of rows, but none, in the replicas' shares of the micro-batches of n rows."""
    found = set()
    for part in range(parts):
        low, high = rows(n, part, parts)
        shares = [rows(high - low, replica, replicas) for replica in range(replicas)]
        found |= {end - start for start, end in shares}
    return sorted(found - {0})


def rows(n: Any, part: Any, parts: int) -> tuple[Any, Any]:
    """The rows `part*n//parts .. (part+1)*n//parts`: contiguous, even to one, possibly none."""
    return part * n // parts, (part + 1) * n // parts


def count(batch: Any) -> Any:
    """The number of rows of a batch, as an int64 tensor."""
    return tf.shape(tf.nest.flatten(batch)[0], out_type=tf.int64)[0]
