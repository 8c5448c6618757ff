"""State that a model gathers from its batches, such as BatchNorm's statistics: the same on all replicas."""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

from loop.model.variables import all_variables, as_tf, layers, trainable_variables
from loop.step.replica import Replica, current


def share(model: Any, synchronised: bool) -> None:
    """Lets the model's BatchNormalization layers take mean and variance over the rows of all replicas, or of each.

    Keras's own way (`synchronized=True`) averages the replicas' means, which is wrong where they have unequally many
    rows, and Horovod's layer doesn't work with Keras 3. Here counts, means and sums of squared distances of all
    replicas are put together exactly.
    """
    legacy = sys.modules.get("tf_keras")
    for layer in batch_norms(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer._moments = _Keras3(layer, synchronised)
        elif legacy:
            layer.fused = False  # the fused operation can't be taken apart; and it counts variance in another way
            layer._calculate_mean_and_var = _Legacy(layer, synchronised)


def batch_norms(model: Any) -> list[Any]:
    """The BatchNormalization layers of a model, of both Keras families."""
    legacy = sys.modules.get("tf_keras")
    kinds = (keras.layers.BatchNormalization, *((legacy.layers.BatchNormalization,) if legacy else ()))
    return [layer for layer in layers(model) if isinstance(layer, kinds)]


def statistics(model: Any) -> list[tf.Variable]:
    """The variables that replicas may gather differently: floating-point state of layers that aren't frozen."""
    return [variable for variable in state(model) if variable.dtype.is_floating]


def state(model: Any) -> list[tf.Variable]:
    """The variables that aren't trained, but may change while training: not the weights of frozen layers.

    The seeds of a frozen layer aren't among its weights: its dropout goes on drawing.
    """
    fixed = {id(variable) for variable in as_tf(trainable_variables(model))}
    for layer in layers(model):
        if not layer.trainable:
            fixed |= {id(variable) for variable in as_tf(layer.weights)}
    return [variable for variable in as_tf(all_variables(model)) if id(variable) not in fixed]


def has_own_state(model: Any) -> bool:
    """Whether the model has state that a step changes even without rows, such as counted seeds or power iterations.

    That of BatchNormalization stays as it is without rows.
    """
    gathered: set[int] = set()
    for layer in batch_norms(model):
        gathered |= {id(variable) for variable in as_tf(layer.variables)}
    return any(id(variable) not in gathered for variable in state(model))


class _Keras3:
    """Replaces the method `_moments` of a Keras 3 layer."""

    def __init__(self, layer: Any, synchronised: bool) -> None:
        # From the class: a layer that was trained before has one of these already.
        self._original = type(layer)._moments.__get__(layer)
        self._layer = layer
        self._synchronised = synchronised

    def __call__(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        replica = current()
        if replica is None:
            return self._original(inputs, mask)
        layer = self._layer
        old = tf.cast(layer.moving_mean, inputs.dtype), tf.cast(layer.moving_variance, inputs.dtype)
        if not self._synchronised or replica.backend.replicas == 1:
            return unless_stand_in(replica, self._original(inputs, mask), old)
        mean, variance, n = moments(replica, inputs, list(layer._reduction_axes), mask, old)
        if mask is not None:
            # With a mask, Keras divides by n + epsilon. To give the same numbers as one replica, so do we.
            share = n / (n + keras.config.epsilon())
            variance = share * (variance + (mean - mean * share) ** 2)
            mean = mean * share
        return mean, variance


class _Legacy:
    """Replaces the method `_calculate_mean_and_var` of a tf_keras layer."""

    def __init__(self, layer: Any, synchronised: bool) -> None:
        self._original = type(layer)._calculate_mean_and_var.__get__(layer)
        self._layer = layer
        self._synchronised = synchronised

    def __call__(
        self, inputs: tf.Tensor, reduction_axes: Any, keep_dims: bool, mask: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        replica = current()
        if replica is None:
            return self._original(inputs, reduction_axes, keep_dims, mask=mask)
        layer = self._layer
        old = tf.cast(layer.moving_mean, inputs.dtype), tf.cast(layer.moving_variance, inputs.dtype)
        if not self._synchronised or replica.backend.replicas == 1:
            own = self._original(inputs, reduction_axes, keep_dims, mask=mask)
            return unless_stand_in(replica, own, [tf.reshape(moment, tf.shape(own[0])) for moment in old])
        mean, variance, _ = moments(replica, inputs, list(reduction_axes), mask, old)
        if keep_dims:
            shape = [1 if axis in reduction_axes else size for axis, size in enumerate(inputs.shape)]
            return tf.reshape(mean, shape), tf.reshape(variance, shape)
        return mean, variance


def unless_stand_in(replica: Replica, own: Any, moving: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of the replica's own rows; without rows the moving ones, which then stay as they are."""
    has_rows = replica.counts_something
    if has_rows is None:
        return own
    return tf.where(has_rows, own[0], moving[0]), tf.where(has_rows, own[1], moving[1])


def moments(
    replica: Replica, inputs: tf.Tensor, axes: list[int], mask: Any, empty: tuple[tf.Tensor, tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Mean and variance over some axes and all replicas, through which gradients flow.

    Each replica contributes its count n, mean m and sum of squared distances q; together (Chan, Golub and LeVeque 1979,
    for any number of parts): mean = sum(n m) / sum(n), and q = sum(q) + sum(n (m - mean)^2).

    Args:
        replica: this replica.
        inputs: its tensor, of float32 or float64.
        axes: over which to take them; with a mask, all but the last axis.
        mask: which positions count; shape of the inputs without the last axis; or None.
        empty: mean and variance if no replica has a row: the moving ones, which then stay as they are, to rounding.

    Returns:
        Mean, variance (biased), and the count; shape [channels], the last a scalar.
    """
    if mask is None:
        shape = tf.shape(inputs)
        n = tf.cast(tf.reduce_prod(tf.gather(shape, axes)), inputs.dtype)
        mean, variance = tf.nn.moments(inputs, axes)
        q = variance * n
    else:
        counted = tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        n = tf.reduce_sum(counted)
        mean = tf.reduce_sum(inputs * counted, axes) / tf.maximum(n, 1)
        q = tf.reduce_sum((inputs - mean) ** 2 * counted, axes)
    if replica.counts_something is not None:
        n, mean, q = (tf.where(replica.counts_something, moment, 0) for moment in (n, mean, q))
    channels = mean.shape[0]
    table = replica.table(tf.concat([n[tf.newaxis], mean, q], 0))
    counts, means, squares = tf.split(table, [1, channels, channels], 1)
    total = tf.reduce_sum(counts)
    some = tf.maximum(total, 1)  # a quotient that isn't used must not be nan either: gradients would be nan, too
    mean = tf.reduce_sum(counts * means, 0) / some
    variance = (tf.reduce_sum(squares, 0) + tf.reduce_sum(counts * (means - mean) ** 2, 0)) / some
    return tf.where(total > 0, mean, empty[0]), tf.where(total > 0, variance, empty[1]), some
