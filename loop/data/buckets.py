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

    def batches(self, epoch: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """The examples of the global batches at some steps of `epoch`, in order: int64 [batches, batch size].

        Those after the end of a short last batch, and of batches after the last step, are undefined.
        """
        size = self._options.batch_size
        if not self._options.shuffle:
            positions = steps[:, tf.newaxis] * size + tf.range(size, dtype=tf.int64)
            return tf.gather(self._by_length, tf.minimum(positions, self._size - 1))
        if not self._left:
            return self._whole_batches(epoch, tf.minimum(steps, self._full - 1), None)
        aside = self._aside(epoch)
        # The short last batch, filled up with its last example.
        last = tf.gather(tf.gather(self._by_length, aside), np.minimum(np.arange(size), self._left - 1))
        if not self._full:
            return tf.tile(last[tf.newaxis], [tf.size(steps), 1])
        whole = self._whole_batches(epoch, tf.minimum(steps, self._full - 1), aside)
        return tf.where(steps[:, tf.newaxis] < self._full, whole, last)

    def _whole_batches(self, epoch: tf.Tensor, steps: tf.Tensor, aside: tf.Tensor | None) -> tf.Tensor:
        """The examples of some whole batches; `aside` are the positions that are set aside, if there are any."""
        # Purpose 0 shuffles what is set aside, 1 the batches, and 2 and above the examples of each class.
        size = self._options.batch_size
        number = self._shuffled(steps, epoch, 1, self._full)
        # The class of each batch: `bucket` is the only one with first <= number < end.
        bucket = ((number + 1) * self._buckets - 1) // self._full
        first = bucket * self._full // self._buckets
        end = (bucket + 1) * self._full // self._buckets

        # From here on, for each example of these batches.
        number, bucket, first, end = (tf.repeat(tensor, size) for tensor in (number, bucket, first, end))
        row = tf.tile(tf.range(size, dtype=tf.int64), [tf.size(steps)])
        positions = (number - first) * size + row
        positions = first * size + self._shuffled(positions, epoch, bucket + 2, (end - first) * size)
        if aside is not None:
            # Positions among the examples that are not set aside become positions among all examples.
            positions += tf.searchsorted(aside - tf.range(self._left, dtype=tf.int64), positions, "right", tf.int64)
        return tf.reshape(tf.gather(self._by_length, positions), [-1, size])

    def _aside(self, epoch: tf.Tensor) -> tf.Tensor:
        """The positions that are set aside for the short batch, ascending: int64 [left]; each is equally likely."""
        start = self._shuffled(tf.constant(0, tf.int64), epoch, 0, self._size)
        return (tf.range(self._left, dtype=tf.int64) * self._size + start) // self._left

    def _shuffled(
        self, positions: tf.Tensor, epoch: tf.Tensor, purpose: int | tf.Tensor, size: int | tf.Tensor
    ) -> tf.Tensor:
        """Some positions after a permutation of `size` positions; each purpose has a permutation of its own."""
        return shuffled(positions, self._options.seed, epoch, size, purpose + 1)
