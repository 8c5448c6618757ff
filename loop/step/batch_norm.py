"""State that a model computes from its batches, such as BatchNorm's statistics: the same on all replicas."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from loop.model.variables import Layer, all_variables, as_tf, layers, trainable_variables
from loop.step.replica import Replica, current
from loop.task import Model

Moments: TypeAlias = tuple[tf.Tensor, tf.Tensor]
"""Mean and variance: shape [channels]."""


def share(model: Model, synchronized: bool) -> None:
    """Lets the model's BatchNormalization layers take mean and variance over the rows of all replicas, or of each.

    Keras's own synchronization (`synchronized=True`) works under `tf.distribute` only, and computes the variance as a
    difference of two means, which loses digits. Horovod's layer doesn't work with Keras 3. Here the counts, means and
    sums of squared distances of all replicas are combined exactly.
    """
    legacy = sys.modules.get("tf_keras")
    for layer in batch_norms(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer._moments = _Keras3(layer, synchronized)
        elif legacy:
            # The fused operation can't be taken apart, and it computes the variance in another way.
            layer.fused = False
            layer._calculate_mean_and_var = _Legacy(layer, synchronized)


def batch_norms(model: Model) -> list[Layer]:
    """The BatchNormalization layers of a model, of both Keras families."""
    classes = [keras.layers.BatchNormalization]
    # Not imported here, which takes long: a model with its layers has imported it.
    legacy = sys.modules.get("tf_keras")
    if legacy:
        classes.append(legacy.layers.BatchNormalization)
    return [layer for layer in layers(model) if isinstance(layer, tuple(classes))]


def batch_norm_variables(model: Model) -> list[tf.Variable]:
    """The variables of the BatchNormalization layers of a model."""
    variables: list[tf.Variable] = []
    for layer in batch_norms(model):
        variables += as_tf(layer.variables)
    return variables


@contextlib.contextmanager
def as_in_evaluation(model: Model) -> Iterator[None]:
    """A context in which BatchNormalization takes its moving statistics, also in training: each row by itself."""
    active = [layer for layer in batch_norms(model) if layer.trainable]
    for layer in active:
        # A frozen layer takes them. Not its property `trainable`, which would freeze its weights, too.
        layer._trainable = False
    try:
        yield
    finally:
        for layer in active:
            layer._trainable = True


def statistics(model: Model) -> list[tf.Variable]:
    """The variables that may differ between replicas: floating-point state of layers that aren't frozen."""
    # Integers, such as counted seeds, are equal: all replicas change them in the same way.
    return [variable for variable in state(model) if variable.dtype.is_floating]


def state(model: Model) -> list[tf.Variable]:
    """The variables that aren't trained, but may change while training: not the weights of frozen layers."""
    fixed = set(map(id, as_tf(trainable_variables(model))))
    for layer in layers(model):
        if not layer.trainable:
            # Its seeds aren't among its weights: the dropout of a frozen layer goes on drawing.
            fixed.update(map(id, as_tf(layer.weights)))
    return [variable for variable in as_tf(all_variables(model)) if id(variable) not in fixed]


def seeds(model: Model) -> list[tf.Variable]:
    """The states of the seed generators that layers hold."""
    generators: list[keras.random.SeedGenerator] = []
    for layer in layers(model):
        generators += getattr(layer, "_seed_generators", [])  # tf_keras counts no seeds
    return as_tf([generator.state for generator in generators])


def global_seeds() -> list[tf.Variable]:
    """The state of Keras's global seed generator, if there is one."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return [] if generator is None else as_tf([generator.state])


def normalized_kernels(model: Model) -> list[tf.Variable]:
    """The weights that SpectralNormalization divides by their norm in each forward pass, though they are trained."""
    kernels = []
    for layer in layers(model):
        is_of_keras = type(layer).__module__.startswith(("keras.", "tf_keras."))
        if is_of_keras and type(layer).__name__ == "SpectralNormalization" and hasattr(layer, "kernel"):
            kernels.append(layer.kernel)
    return as_tf(kernels)


def has_own_state(model: Model) -> bool:
    """Whether the model has state that a step changes even without rows, such as counted seeds or power iterations."""
    # The state of BatchNormalization stays as it is without rows.
    return not set(map(id, batch_norm_variables(model))).issuperset(map(id, state(model)))


class _Keras3:
    """Replaces the method `_moments` of a Keras 3 layer."""

    def __init__(self, layer: keras.layers.BatchNormalization, synchronized: bool) -> None:
        # From the class: a layer that was trained before has one of these already.
        self._original = type(layer)._moments.__get__(layer)
        self._layer = layer
        self._synchronized = synchronized

    def __call__(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> Moments:
        replica = current()
        if replica is None:
            return self._original(inputs, mask)
        layer = self._layer
        moving = tf.cast(layer.moving_mean, inputs.dtype), tf.cast(layer.moving_variance, inputs.dtype)
        if not self._synchronized or replica.backend.replicas == 1:
            return unless_stand_in(replica, self._original(inputs, mask), moving)
        mean, variance, n = moments(replica, inputs, list(layer._reduction_axes), mask, moving)
        if mask is not None:
            # With a mask, Keras divides by n + epsilon. The same is done here, for the same numbers as on one replica.
            share = n / (n + keras.config.epsilon())
            variance = share * (variance + (mean - mean * share) ** 2)
            mean = mean * share
        return mean, variance


class _Legacy:
    """Replaces the method `_calculate_mean_and_var` of a tf_keras layer."""

    def __init__(self, layer: Layer, synchronized: bool) -> None:
        self._original = type(layer)._calculate_mean_and_var.__get__(layer)
        self._layer = layer
        self._synchronized = synchronized

    def __call__(
        self, inputs: tf.Tensor, reduction_axes: Sequence[int], keep_dims: bool, mask: tf.Tensor | None = None
    ) -> Moments:
        replica = current()
        if replica is None:
            return self._original(inputs, reduction_axes, keep_dims, mask=mask)
        layer = self._layer
        moving = tf.cast(layer.moving_mean, inputs.dtype), tf.cast(layer.moving_variance, inputs.dtype)
        if not self._synchronized or replica.backend.replicas == 1:
            own = self._original(inputs, reduction_axes, keep_dims, mask=mask)
            # The layer may want the axes kept; its moving ones have none.
            mean = tf.reshape(moving[0], tf.shape(own[0]))
            variance = tf.reshape(moving[1], tf.shape(own[0]))
            return unless_stand_in(replica, own, (mean, variance))
        mean, variance, _ = moments(replica, inputs, list(reduction_axes), mask, moving)
        if keep_dims:
            shape = inputs.shape.as_list()
            for axis in reduction_axes:
                shape[axis] = 1
            return tf.reshape(mean, shape), tf.reshape(variance, shape)
        return mean, variance


def unless_stand_in(replica: Replica, own: Moments, moving: Moments) -> Moments:
    """Mean and variance of the replica's own rows; without rows the moving ones, which then stay as they are."""
    has_rows = replica.counts_something
    if has_rows is None:
        return own
    return tf.where(has_rows, own[0], moving[0]), tf.where(has_rows, own[1], moving[1])


def moments(
    replica: Replica, inputs: tf.Tensor, axes: list[int], mask: tf.Tensor | None, moving: Moments
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean and variance over some axes and all replicas, through which gradients flow. A collective.

    Each replica contributes its count n, mean m and sum of squared distances q. They are combined as by Chan, Golub and
    LeVeque (1979), for any number of parts: mean = sum(n m) / sum(n), and q = sum(q) + sum(n (m - mean)^2).

    Args:
        replica: this replica.
        inputs: its tensor, of float32 or float64.
        axes: the axes to reduce: all but that of the channels.
        mask: which positions count, in the shape of the inputs without the last axis; or None: all.
        moving: mean and variance if no replica has a row. The moving ones then stay as they are, to rounding.

    Returns:
        Mean and variance (biased), shape [channels]; and the count, shape [1], or [channels] if it differs by channel.
    """
    # This replica's part. With a mask, only the positions that count.
    if mask is None:
        shape = tf.shape(inputs)
        n = tf.cast(tf.reduce_prod(tf.gather(shape, axes)), inputs.dtype)[tf.newaxis]
        mean, variance = tf.nn.moments(inputs, axes)
        q = variance * n
    else:
        counted = tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        n = tf.reduce_sum(counted)[tf.newaxis]
        last = inputs.shape.rank - 1
        if last in axes:  # the channels have an axis that the mask has, too, and so a count each
            order = [*axes, *(axis for axis in range(last) if axis not in axes)]
            counted = tf.transpose(counted * tf.ones_like(inputs), order)
            inputs = tf.transpose(inputs, order)
            axes = list(range(last))
            n = tf.reduce_sum(counted, axes)
        mean = tf.reduce_sum(inputs * counted, axes) / tf.maximum(n, 1)
        q = tf.reduce_sum((inputs - mean) ** 2 * counted, axes)
    if replica.counts_something is not None:
        n, mean, q = (tf.where(replica.counts_something, moment, 0) for moment in (n, mean, q))

    # All parts, put together: in one collective, a row for each replica.
    channels = mean.shape[0]
    table = replica.table(tf.concat([n, mean, q], 0))
    counts, means, squares = tf.split(table, [n.shape[0], channels, channels], 1)
    total = tf.reduce_sum(counts, 0)
    # A quotient of 0 by 0 is selected away below, but its gradient would still be nan.
    divisor = tf.maximum(total, 1)
    mean = tf.reduce_sum(counts * means, 0) / divisor
    variance = (tf.reduce_sum(squares, 0) + tf.reduce_sum(counts * (means - mean) ** 2, 0)) / divisor
    return tf.where(total > 0, mean, moving[0]), tf.where(total > 0, variance, moving[1]), divisor
