"""Dynamic loss scaling for float16, which looks at reduced gradients: all replicas skip and halve together."""

from __future__ import annotations

import tensorflow as tf

GROWTH_STEPS = 2000
"""The number of steps without an overflow after which the scale doubles.

See Micikevicius et al. 2018, Mixed Precision Training.
"""
LARGEST = 2.0**24
"""The greatest scale."""
SMALLEST = 2.0**-24
"""The smallest scale. A gradient that isn't finite with this one has another reason than float16."""


class LossScale:
    """The factor of the loss, a power of 2, with which small gradients don't vanish in float16.

    It must be made in the backend's scope: its variables are the same in all replicas, and are saved in checkpoints.

    Args:
        batch_size: the size of the global batch. The loss is a sum over it, not a mean: the scale starts that much
            smaller.
    """

    def __init__(self, batch_size: int) -> None:
        # A power of 2, as it always is: multiplying by it, and dividing, changes no digit of a gradient.
        start = 2.0**15 / (1 << (batch_size - 1).bit_length())
        self.scale = tf.Variable(start, trainable=False, name="loss_scale", dtype=tf.float32)
        self.steps = tf.Variable(0, trainable=False, name="steps_without_overflow", dtype=tf.int64)
        self.variables = [self.scale, self.steps]

    def update(self, finite: tf.Tensor) -> None:
        """Within a replica, after each step: halves the scale if the gradient isn't finite, or may double it."""
        steps = tf.where(finite, self.steps + 1, tf.zeros_like(self.steps))
        grows = steps >= GROWTH_STEPS
        more = tf.where(grows, tf.minimum(self.scale * 2, LARGEST), self.scale)
        self.scale.assign(tf.where(finite, more, tf.maximum(self.scale / 2, SMALLEST)))
        self.steps.assign(tf.where(grows, tf.zeros_like(steps), steps))

    def exhausted(self) -> tf.Tensor:
        """Whether the scale can't be halved any more."""
        return self.scale.read_value() <= SMALLEST
