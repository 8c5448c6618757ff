"""Which rows of a global batch each replica computes, and which of them a worker reads, of data read by position."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from loop.data.batch import RowCounts, part_bounds, row_counts


@dataclasses.dataclass(frozen=True)
class RowShares:
    """The rows of the global batches of an epoch, shared out over replicas. A worker's replicas have adjacent rows."""

    size: int  # the number of examples
    batch_size: int  # the number of examples in a global batch
    drop_remainder: bool  # whether a short last batch is left out
    first: int = 0  # the index of the worker's first replica among all
    local: int = 1  # the number of replicas of the worker
    replicas: int = 1  # the number of all replicas

    def extent(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Where the global batch at `step` begins in the order of the epoch, and how many rows it has."""
        # A batch after the end of the data has a row, too: a compiled call reads one batch more than it uses.
        start = tf.minimum(step * self.batch_size, self.size - 1)
        return start, tf.minimum(tf.constant(self.batch_size, tf.int64), self.size - start)

    def places(self, step: tf.Tensor, parts: int) -> tf.Tensor:
        """The worker's positions in the order of the epoch: int64 [n], one micro-batch of `parts` after the other."""
        if self.replicas == 1 and self.even_count(1) and self.size >= self.batch_size:
            # After the end of the data, the last batch once more.
            start = tf.minimum(step * self.batch_size, self.size - self.batch_size)
            return start + np.arange(self.batch_size)
        start, n = self.extent(step)
        if self.replicas == 1:
            return tf.range(start, start + n)
        low, high = self._own(n, parts)
        return tf.ragged.range(start + low, start + high).flat_values

    @property
    def remainder(self) -> int:
        """The number of rows of a short last batch; 0 if there is none."""
        return 0 if self.drop_remainder else self.size % self.batch_size

    def rows_of(self, steps: tf.Tensor, parts: int) -> tuple[tf.Tensor, tf.Tensor]:
        """The worker's rows of the global batches at some steps, one micro-batch of `parts` after the other.

        Returns:
            How many rows it has of each batch: int64 [batches]. And which ones these are: int64 [batches, most rows];
            undefined after the last one.
        """
        whole = self.on_host(self.batch_size, parts)
        short = self.on_host(self.remainder, parts) if self.remainder else whole
        table = np.zeros([2, max(len(whole), len(short))], np.int64)
        table[0, : len(whole)] = whole
        table[1, : len(short)] = short
        is_short = tf.cast((steps + 1) * self.batch_size > self.size, tf.int32)
        counts = np.array([len(whole), len(short)], np.int64)
        return tf.gather(counts, is_short), tf.gather(table, is_short)

    def on_host(self, n: int, parts: int) -> np.ndarray:
        """The worker's rows of a global batch of n rows: int64 [own rows], one micro-batch after the other."""
        # The same arithmetic as in `places`, by Python's integers.
        ranges = []
        for part in range(parts):
            low, high = part_bounds(n, part, parts)
            first, _ = part_bounds(high - low, self.first, self.replicas)
            _, last = part_bounds(high - low, self.first + self.local - 1, self.replicas)
            ranges.append(np.arange(low + first, low + last))
        return np.concatenate(ranges)

    def of_replica(
        self, step: tf.Tensor, replica: tf.Tensor | int, part: tf.Tensor | int, parts: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The rows of a replica in a micro-batch.

        Returns:
            Where they begin and end among the rows that the worker has read; and the position of the first of them in
            the micro-batch. int64 [] each.
        """
        _, n = self.extent(step)
        low, high = part_bounds(n, part, parts)
        first, last = part_bounds(high - low, tf.cast(replica, tf.int64), self.replicas)
        own_low, own_high = self._own(n, parts)

        # The worker's rows start with those of the micro-batches before this one. Rows of this micro-batch that belong
        # to workers of lower rank were not read.
        ahead = tf.reduce_sum((own_high - own_low)[: tf.cast(part, tf.int32)]) - (own_low[part] - low)
        return ahead + first, ahead + last, first

    def known_count(self, parts: int) -> int | None:
        """The number of rows of each (micro-)batch that the graph may know; None: it is to stay open."""
        # With several replicas it must stay open: by an open size, `row_random` recognizes draws that have a number for
        # each row.
        return None if self.replicas > 1 else self.even_count(parts)

    def even_count(self, parts: int) -> int | None:
        """The number of rows that each replica has of each (micro-)batch, if it is always the same; else None."""
        count, rest = divmod(self.batch_size, self.replicas * parts)
        return None if self.remainder or rest else count

    def counts(self, replicas: int, parts: int) -> RowCounts:
        """The numbers of rows that each of so many replicas gets of a micro-batch."""
        batch = min(self.batch_size, self.size)
        remainder = 0 if self.drop_remainder else self.size % batch
        return row_counts(batch, remainder, replicas, parts)

    def leave_some_without(self, parts: int) -> bool:
        """Whether a batch may have an empty part, if it is cut into so many parts."""
        return parts > (self.remainder or self.batch_size)

    def _own(self, n: tf.Tensor, parts: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Where the worker's rows begin and end in each micro-batch of a global batch of n rows: int64 [parts] each."""
        low, high = part_bounds(n, tf.range(parts, dtype=tf.int64), parts)
        first, _ = part_bounds(high - low, self.first, self.replicas)
        _, last = part_bounds(high - low, self.first + self.local - 1, self.replicas)
        return low + first, low + last
