"""A global batch: how data is cut into batches, and which rows of one each replica computes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from loop.options import Options
from loop.task import Batch

DataIterator: TypeAlias = tf.data.Iterator | tuple[()]
"""What the `start` of a source returns. Arrays are read by position and need no iterator: theirs is ()."""
ReadBatch: TypeAlias = Any
"""What the `read_batch` of a source returns: of a stream a batch, of arrays the indices of the examples and a batch."""
Feed: TypeAlias = tuple[tf.Tensor, tf.Tensor, ReadBatch]
"""The input of a step: the epoch and the step within it, int64 [] each, and what was read for the step."""

Number = TypeVar("Number", int, tf.Tensor)
"""A number that is known while tracing, or one that is computed in the graph."""

SKIPPED = -1
"""Stands for the index of an example that is left out."""

EVALUATION_EPOCH = 1 << 31
"""Stands for the epoch in an evaluation, whose examples have other seeds than those of training."""


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How a source is cut into global batches."""

    batch_size: int  # the number of examples in a global batch, over all replicas
    seed: int = 0  # the seed of the permutations
    shuffle: bool = False  # whether array data is permuted anew in each epoch; a stream has its own order
    drop_remainder: bool = False  # whether a short last batch is left out
    prefetch: int | str = 2  # how many batches a stream reads ahead, or "auto". It doesn't change the results.


class Rows(NamedTuple):
    """A replica's rows of a (micro-)batch."""

    batch: Batch  # the examples, stacked along a first axis n; n may be 0
    # The position of the first row that was shared out to the replica among those of all replicas; int64 [].
    first: tf.Tensor
    epoch: tf.Tensor  # the epoch, from 0; int64 []
    number: tf.Tensor  # the number of the (micro-)batch in the epoch, from 0; int64 []
    # A number for each example that no other example of the epoch has: its index in array data, its position in a
    # stream; int64 [n].
    index: tf.Tensor
    # Which of the rows that were shared out to the replica are here: bool [shared out]. The others were left out.
    # None: all are.
    kept: tf.Tensor | None = None

    def without_skipped(self) -> Rows:
        """The rows without those that are left out. Rows are shared out before, so no other row changes its replica."""
        kept = self.index != SKIPPED
        index, batch = tf.nest.map_structure(lambda tensor: tf.boolean_mask(tensor, kept), (self.index, self.batch))
        return self._replace(index=index, batch=batch, kept=kept)

    def with_skipped(self) -> Rows:
        """The reverse of `without_skipped`: rows that were left out are back, with the contents of another row."""
        if self.kept is None:
            return self
        places = tf.maximum(tf.cumsum(tf.cast(self.kept, tf.int64)) - 1, 0)
        index, batch = tf.nest.map_structure(lambda tensor: tf.gather(tensor, places), (self.index, self.batch))
        return self._replace(index=tf.where(self.kept, index, SKIPPED), batch=batch, kept=None)

    def of_count(self, count: int | None) -> Rows:
        """The same rows, as tensors whose static shapes say how many rows there are; None: as they are."""
        if count is None or self.index.shape[0] == count:  # no operation where the shape is known already
            return self
        index, batch = tf.nest.map_structure(
            lambda tensor: tf.ensure_shape(tensor, [count, *tensor.shape[1:]]), (self.index, self.batch)
        )
        return self._replace(index=index, batch=batch)


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """The numbers of rows that `compute` may be called with, for the batches of a source."""

    batch_size: int  # the number of examples in a global batch
    replicas: int  # the number of replicas that share it
    parts: int  # the number of micro-batches that it is cut into
    whole: list[int]  # the numbers of rows that a replica may get of a whole batch; increasing, without 0
    short: list[int]  # the same for a short last batch: [] if there is none, [0] if its size isn't known


def row_counts(batch_size: int, remainder: int | None, replicas: int, parts: int) -> RowCounts:
    """Makes `RowCounts`; `remainder` is the size of a short last batch, 0 if there is none, None if it isn't known."""
    whole = _shares(batch_size, replicas, parts)
    short = [0] if remainder is None else _shares(remainder, replicas, parts)
    return RowCounts(batch_size, replicas, parts, whole, short)


def likely_rows(options: Options, replicas: int, others: int = 1) -> RowCounts:
    """For a model that isn't trained here: how many rows its batches probably have.

    Args:
        options: the options of `fit` with which it is trained.
        replicas: the number of replicas that it is trained on.
        others: the number of replicas that it is used on here.
    """
    # One replica's share of a micro-batch, which is what the model sees in training.
    share = max(1, options["batch_size"] // (replicas * (options["accumulate"] or 1)))
    return RowCounts(share, others, 1, [], [])


def _shares(n: int, replicas: int, parts: int) -> list[int]:
    """The different numbers of rows, without 0, in the replicas' shares of the micro-batches of n rows."""
    # In the order in which a batch is cut: first into micro-batches, and each of these into replicas' shares.
    sizes = set()
    for part in range(parts):
        low, high = part_bounds(n, part, parts)
        for replica in range(replicas):
            start, end = part_bounds(high - low, replica, replicas)
            sizes.add(end - start)
    return sorted(sizes - {0})


def part_bounds(n: Number, part: Number | int, parts: int) -> tuple[Number, Number]:
    """Where part number `part` of n rows begins and ends. Parts are contiguous and differ by one row at most."""
    # By integers alone, so that Python and the graph come to the same; neighbors share a border, whatever n is.
    return part * n // parts, (part + 1) * n // parts


def count(batch: Batch) -> tf.Tensor:
    """The number of rows of a batch: int64 []."""
    return tf.shape(tf.nest.flatten(batch)[0], out_type=tf.int64)[0]
