"""Losses that layers add: means over rows are exact whatever the rows weigh, and what can't be exact is said."""

from dataclasses import dataclass

import keras
import pytest
import tensorflow as tf

import loop
from loop import backends, fit
from loop.model.precision import keras_precision
from tests.exactness import Prime, largest_difference, regression

OPTIONS = {"epochs": 1, "batch_size": 20, "precision": "float64"}


class Penalty(keras.layers.Layer):
    """Adds a mean of squares: of all positions, or of those that a mask leaves, of this replica or of all."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, inputs, training=False):
        squares = inputs**2
        if self.kind == "mean":
            self.add_loss(tf.reduce_mean(squares))
        if self.kind == "masked" or (self.kind == "masked in training" and training):
            self.add_loss(masked_mean(squares))
        if self.kind == "balanced" and training:  # as experts are, of a mixture
            self.add_loss(tf.reduce_sum(tf.reduce_mean(squares, 0) * tf.reduce_mean(inputs, 0)))
        if self.kind == "experts":  # in a few examples, three experts may be taken equally often
            taken = tf.one_hot(tf.math.top_k(inputs[:, :3], 2).indices, 3, dtype=inputs.dtype)
            chosen = tf.reduce_mean(tf.reduce_sum(taken, 1), 0)
            self.add_loss(tf.reduce_sum(chosen * tf.reduce_mean(tf.nn.softmax(inputs[:, :3]), 0)))
        if self.kind == "masked of all":
            self.add_loss(masked_mean(loop.all_gather(squares)))
        return inputs


def masked_mean(squares):
    mask = tf.cast(squares[:, :1] > 0.01, squares.dtype)
    return tf.reduce_sum(squares * mask) / tf.maximum(tf.reduce_sum(mask), 1)


@dataclass
class Penalised(Prime):
    """Weights that differ from row to row, and a penalty of activations."""

    dtype: str = "float64"
    kind: str = "mean"
    weighted: bool = True

    def looked_up(self):
        dense = keras.layers.Dense(5, activation="tanh")
        if self.kind == "activity":
            return [keras.layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.1))]
        if self.kind == "balanced":
            normalized = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=3)]
            return [dense, *normalized, Penalty(self.kind)]
        return [dense, Penalty(self.kind)]

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        return values if self.weighted else {"loss": values["loss"]}


def weights(task, quiet, **options):
    result = fit(task, callbacks=quiet(), **OPTIONS, **options)
    return [variable.numpy() for variable in result.model.variables]


@pytest.mark.parametrize("kind", ["activity", "mean", "masked of all"])
def test_penalties_of_activations_are_means_over_rows_that_weigh_differently(kind, quiet):
    one = weights(Penalised(kind=kind), quiet)
    three = weights(Penalised(kind=kind), quiet, backend=backends.create("mirrored", 3))
    assert largest_difference(three, one) <= 1e-12


def test_with_accumulate_that_is_said(checks):
    with pytest.warns(
        UserWarning, match=r"penalty.*: with accumulate=2, a penalty of activations counts by the weights"
    ):
        weights(Penalised(), checks, accumulate=2)
    weights(Penalised(weighted=False), checks, accumulate=2)  # rows weigh the same: nothing to say


@pytest.mark.parametrize("kind", ["masked", "masked in training", "balanced"])
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"backend": ("mirrored", 2)}])
def test_a_mean_over_what_a_mask_leaves_is_said(kind, options, checks):
    if "backend" in options:
        options = {"backend": backends.create(*options["backend"])}
    with pytest.warns(UserWarning, match=r"penalty.* adds a loss that isn't a mean over the rows of a batch"):
        weights(Penalised(kind=kind, weighted=False), checks, **options)
    weights(Penalised(kind=kind, weighted=False), checks)  # one replica has all rows: nothing to say


@dataclass
class Experts(Penalised):
    """Without a dense layer, the experts of three examples are known: of the second one, those of an example of zeros.

    In the first order of `PenaltyTrial`, the shares then differ in nothing that counts.
    """

    kind: str = "experts"
    weighted: bool = False

    def looked_up(self):
        return [Penalty(self.kind)]

    def train_data(self):
        data = super().train_data()
        inputs = data.arrays[0]
        inputs[:3, :3] = [[1, 0, 2], [2, 1, 0], [0, 1, 2]]
        return data


def test_a_balance_of_experts_is_said_whatever_the_first_examples_choose(checks):
    with pytest.warns(UserWarning, match=r"penalty.* adds a loss that isn't a mean over the rows of a batch"):
        weights(Experts(), checks, accumulate=2)


class OfFloat32(Prime):
    """Keras's regularizer has a factor in float32."""

    def looked_up(self):
        return [keras.layers.Dense(5, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1))]


def test_a_regularizer_that_fails_is_named(quiet):
    with pytest.raises(loop.UsageError, match=r"a regularizer of the model can't be computed: .*float tensor but is a"):
        fit(OfFloat32(dtype="float64"), callbacks=quiet(), **OPTIONS)


class OfEachRow(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_mean(inputs**2, -1))
        return inputs


def test_a_penalty_of_each_row_counts_by_its_sum_as_in_keras(quiet):
    """The loss of compute() counted once for each row."""
    inputs, labels, _ = regression(24, dtype="float64")

    def model():
        hidden = keras.layers.Dense(4, kernel_initializer="ones", kernel_regularizer="l2")
        return keras.Sequential(
            [keras.Input((5,)), hidden, OfEachRow(), keras.layers.Dense(1, kernel_initializer="ones")]
        )

    task = loop.KerasTask(model, lambda: keras.optimizers.SGD(0.01), "mse", loop.ArrayData(inputs, labels))
    found = fit(task, batch_size=8, shuffle=False, precision="float64", callbacks=quiet()).model.get_weights()
    with keras_precision("float64"):
        by_hand = model()
        by_hand.compile(keras.optimizers.SGD(0.01), "mse")
        by_hand.fit(inputs, labels, batch_size=8, shuffle=False, verbose=0)
    assert largest_difference(found, by_hand.get_weights()) <= 1e-12
