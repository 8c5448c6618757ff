"""The order of an epoch in which examples of similar length meet: a pure function of seed, epoch and step."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from loop.data.batch import BatchOptions
from loop.data.order import shuffled


class LengthBuckets:
    """Which examples are in global batch s of epoch e, so that the examples of a batch have similar lengths.

    Examples are sorted by length once. In each epoch, `size % batch_size` of them, spread evenly over all lengths, are
    set aside for the short last batch. The others, still sorted, are cut into at most `buckets` classes of whole
    batches. Each class is permuted and cut into batches, and all batches are permuted. All of this is arithmetic on
    positions: any batch can be computed by itself, and every example is in exactly one.

    Without `shuffle`, the examples come sorted by length.
    """

    def __init__(self, lengths: np.ndarray, options: BatchOptions, buckets: int) -> None:
        self._options = options
        self._size = len(lengths)
        self._full, self._left = divmod(self._size, options.batch_size)
        # Each class has at least four batches, so that a batch isn't made of the same examples in each epoch.
        self._buckets = max(1, min(buckets, self._full // 4))
        # Stable, so that the order of equally long examples is the same on every machine.
        with tf.device("CPU:0"):
            self._by_length = tf.constant(np.argsort(lengths, kind="stable").astype(np.int64))

    def batch(self, epoch: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The examples of the global batch at `step` of `epoch`, in order: int64 [n]; undefined after the last step."""
        size = self._options.batch_size
        if not self._options.shuffle:
            start = tf.minimum(step * size, self._size - 1)
            return self._by_length[start : start + size]
        # A branch of the graph is made only where there are batches of both kinds.
        if not self._left:
            return self._whole_batch(epoch, tf.minimum(step, self._full - 1))
        if not self._full:
            return self._last_batch(epoch)
        return tf.cond(step < self._full, lambda: self._whole_batch(epoch, step), lambda: self._last_batch(epoch))

    def _whole_batch(self, epoch: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The examples of a whole batch."""
        # Purpose 0 shuffles what is set aside, 1 the batches, and 2 and above the examples of each class.
        size = self._options.batch_size
        number = self._shuffled(step, epoch, 1, self._full)
        # The class of the batch: `bucket` is the only one with first <= number < end.
        bucket = ((number + 1) * self._buckets - 1) // self._full
        first = bucket * self._full // self._buckets
        end = (bucket + 1) * self._full // self._buckets
        positions = (number - first) * size + tf.range(size, dtype=tf.int64)
        positions = first * size + self._shuffled(positions, epoch, bucket + 2, (end - first) * size)
        if self._left:
            # Positions among the examples that are not set aside become positions among all examples.
            aside = self._aside(epoch)
            before = tf.searchsorted(aside - tf.range(self._left, dtype=tf.int64), positions, "right", tf.int64)
            positions += before
        return tf.gather(self._by_length, positions)

    def _last_batch(self, epoch: tf.Tensor) -> tf.Tensor:
        """The examples of the short last batch."""
        return tf.gather(self._by_length, self._aside(epoch))

    def _aside(self, epoch: tf.Tensor) -> tf.Tensor:
        """The positions that are set aside for the short batch, ascending: int64 [left]; each is equally likely."""
        start = self._shuffled(tf.constant(0, tf.int64), epoch, 0, self._size)
        return (tf.range(self._left, dtype=tf.int64) * self._size + start) // self._left

    def _shuffled(
        self, positions: tf.Tensor, epoch: tf.Tensor, purpose: int | tf.Tensor, size: int | tf.Tensor
    ) -> tf.Tensor:
        """Some positions after a permutation of `size` positions; each purpose has a permutation of its own."""
        return shuffled(positions, self._options.seed, epoch, size, purpose + 1)
