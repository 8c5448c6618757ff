"""The order of an epoch: a permutation that can be read at any position."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

_KEY = 498247692
"""The first number of the key of a permutation, as `tf.random.experimental.index_shuffle` has it."""

_APART = 0x9E3779B1
"""What is added to it for the next stream: an odd number, whose multiples differ in the low bits."""


def shuffled(
    positions: tf.Tensor | np.ndarray,
    seed: int,
    epoch: tf.Tensor | int,
    size: int | tf.Tensor,
    stream: int | tf.Tensor = 0,
) -> tf.Tensor:
    """Some positions after a permutation of `size` positions.

    It takes constant memory, whatever the size, so a resume at step 1,000,000 costs what one at step 10 costs.

    Args:
        positions: which ones to permute; int64 [n], with n > 0, or [].
        seed: the seed of the run.
        epoch: the epoch; int64 [].
        size: how many positions there are; int64 [], or [n] if each position is among others.
        stream: each stream has a permutation of its own; int64 [], or [n]. That of stream 0 orders arrays and indexed
            data. Up to epoch 255, and with seeds up to 255, it is `tf.random.experimental.index_shuffle` with
            `seed=[seed, epoch]`.
    """
    if not isinstance(epoch, int) and tf.is_symbolic_tensor(epoch) and isinstance(stream, int):
        # In the graph that the epoch comes from, outside of the loop of steps, which all have one key.
        with epoch.graph.as_default():
            key = _key(seed, epoch, stream)
    else:
        key = _key(seed, epoch, stream)
    return tf.raw_ops.RandomIndexShuffle(
        index=positions, seed=key, max_index=tf.convert_to_tensor(size - 1, tf.int64), rounds=4
    )


def _key(seed: int, epoch: tf.Tensor | int, stream: int | tf.Tensor) -> tf.Tensor:
    """The key of a permutation, int64 [3], or of several ones, int64 [n, 3]. See `shuffled`."""
    # Only the low bits of each of the three numbers count, 8 for small sizes. So what a stream adds, and the higher
    # bits of epoch and seed, stand in the first one, which is constant in `index_shuffle`.
    high_bits = epoch >> 8 if isinstance(epoch, int) else tf.bitwise.right_shift(epoch, tf.constant(8, tf.int64))
    first = _KEY + (seed >> 8) * _APART + stream * _APART + high_bits
    numbers = [tf.convert_to_tensor(number, tf.int64) for number in (first, seed, epoch)]
    return tf.stack([tf.broadcast_to(number, tf.shape(numbers[0])) for number in numbers], -1)
