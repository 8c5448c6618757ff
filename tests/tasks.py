"""Small tasks with real gradients, for the tests."""

from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import loop
from loop import ArrayData, TrainTask


def regression(examples, features=5, seed=0):
    """Inputs [n, features], labels [n, 1] and weights [n], some of which are 0."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(examples, features)).astype("float32")
    labels = (np.tanh(inputs @ random.normal(size=(features, 1))) + 0.1).astype("float32")
    return inputs, labels, random.integers(0, 4, examples).astype("float32")


@dataclass
class Weighted(TrainTask):
    """Two dense layers with L2, momentum, sample weights with zeros."""

    examples: int = 101
    rate: float = 0.05
    hidden: int = 4
    seed: int = 0
    log: list = field(default_factory=list, repr=False)

    def build_model(self):
        regularizer = keras.regularizers.L2(1e-2)
        return keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(self.hidden, activation="tanh", kernel_regularizer=regularizer),
                keras.layers.Dense(1),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.SGD(self.rate, momentum=0.9)

    def train_data(self):
        return ArrayData(*regression(self.examples, seed=self.seed))

    def eval_data(self):
        return ArrayData(*regression(self.examples, seed=self.seed))

    def compute(self, model, batch, training):
        inputs, labels, weight = batch
        error = model(inputs, training=training) - tf.cast(labels, model.compute_dtype)
        return {"loss": tf.reduce_sum(error**2, -1), "weight": weight, "error": tf.abs(error[:, 0])}


class Conv(TrainTask):
    """Pictures through convolution, BatchNorm and dropout, with Adam: much state, all of it to be restored."""

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(4, 3),
                keras.layers.BatchNormalization(),
                keras.layers.Activation("relu"),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(10),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.Adam(1e-2)

    def train_data(self):
        from sklearn.datasets import load_digits

        digits = load_digits()
        return ArrayData((digits.images[:200, ..., None] / 16).astype("float32"), digits.target[:200])

    def compute(self, model, batch, training):
        images, labels = batch
        logits = model(images, training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)}


class Spread(Weighted):
    """A layer on the first device, two with weights and one without on the second, and one on the first."""

    family = keras

    def build_model(self):
        layers = self.family.layers
        inputs = outputs = self.family.Input((5,))
        outputs = layers.Dense(6, "relu", name="first")(outputs)
        with tf.device(loop.device(1)):
            outputs = layers.Dense(7, "relu", name="second")(outputs)
            outputs = layers.LayerNormalization(name="norm")(outputs)
            outputs = layers.Dropout(0.3)(outputs)
        return self.family.Model(inputs, layers.Dense(1, name="last")(outputs))

    def build_optimizer(self):
        return self.family.optimizers.Adam(0.05)


class Unweighted(Weighted):
    """The same without weights, from bare inputs: the base of the other families."""

    def train_data(self):
        return ArrayData(*regression(self.examples)[:2])

    eval_data = train_data

    def compute(self, model, batch, training):
        inputs, labels = batch
        return {"loss": tf.reduce_sum((model(inputs, training=training) - labels) ** 2, -1)}


class TwoRates(Unweighted):
    """The first layer learns slowly, the second fast."""

    def build_model(self):
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4, "tanh", name="body"), keras.layers.Dense(1, name="head")]
        )

    def build_optimizer(self):
        return {"body": keras.optimizers.SGD(0.001), "head": keras.optimizers.Adam(0.01)}


class Legacy(Unweighted):
    """A tf_keras model without an input shape: it is built by its first call."""

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(4, activation="tanh"), tf_keras.layers.Dense(1)])

    def build_optimizer(self):
        return tf_keras.optimizers.Adam(0.01)


class Affine(tf.Module):
    """A plain TensorFlow module."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.zeros([5, 1]), name="w")
        self.b = tf.Variable(0.0, name="b")

    def __call__(self, inputs, training=False):
        return inputs @ self.w + self.b


class Plain(Unweighted):
    """A plain tf.Module with a Keras 3 optimizer."""

    def build_model(self):
        return Affine()


class Streamed(Plain):
    """The same from a tf.data pipeline that shuffles anew each epoch."""

    def train_data(self):
        return tf.data.Dataset.from_tensor_slices(regression(self.examples)[:2]).shuffle(50)

    def eval_data(self):
        return tf.data.Dataset.from_tensor_slices(regression(self.examples)[:2])


class Alarm(Plain):
    """Its loss is not finite once example 60 comes by."""

    def train_data(self):
        inputs, labels, _ = regression(self.examples)
        inputs[60] = np.inf
        return ArrayData(inputs, labels)
