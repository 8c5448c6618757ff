"""Contrastive learning (SimCLR): digits without their labels, and a loss that looks at the whole global batch.

After 360 steps of `tfloop train contrastive` the nearest neighbour of 91 % of the held-out pictures shows the same
digit (seed 0, 17 s), with all of them changed at random. By the pixels of the changed pictures it does for 63 %.
"""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import loop
from loop import ArrayData, TrainTask, fit


@dataclass
class SimCLR(TrainTask):
    """Each picture is changed in two ways, and must find its other self among all pictures of the batch.

    `partner` is how often it does. `neighbour` is how often the nearest other picture shows the same digit: for this
    alone labels are used.
    """

    width: int = 32
    temperature: float = 0.2
    learning_rate: float = 2e-3

    defaults = {"batch_size": 256, "epochs": 60}

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(self.width, 3, activation="relu", padding="same"),
                keras.layers.Conv2D(self.width, 3, activation="relu", strides=2, padding="same"),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(32),
                keras.layers.UnitNormalization(),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.Adam(self.learning_rate)

    def train_data(self):
        images, labels, held_out = self._digits()
        return ArrayData(images[~held_out], labels[~held_out])

    def eval_data(self):
        images, labels, held_out = self._digits()
        return ArrayData(images[held_out], labels[held_out])

    def compute(self, model, batch, training):
        images, labels = batch
        views = tf.stack([model(changed(images, salt), training=training) for salt in (0, 1)], 1)
        # Rows of other replicas too: gradients flow back to where a row came from, so that the loss, and what is
        # learned, is that of one replica with the whole batch.
        everyone = loop.all_gather(views)
        size = tf.shape(everyone)[0]
        others = tf.concat([everyone[:, 0], everyone[:, 1]], 0)
        own = tf.cast(loop.first_row(), tf.int32) + tf.range(tf.shape(images)[0])

        def scores(view, itself):
            found = tf.matmul(view, others, transpose_b=True) / self.temperature
            return found - 1e9 * tf.one_hot(itself, 2 * size, dtype=found.dtype)

        first, second = scores(views[:, 0], own), scores(views[:, 1], own + size)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits
        nearest = tf.argmax(first[:, :size], -1)
        return {
            "loss": (loss(own + size, first) + loss(own, second)) / 2,
            "partner": tf.cast(tf.argmax(first, -1, tf.int32) == own + size, tf.float32),
            "neighbour": tf.cast(tf.gather(loop.all_gather(labels), nearest) == labels, tf.float32),
        }

    @staticmethod
    def _digits():
        digits = load_digits()
        held_out = np.arange(len(digits.target)) % 5 == 0
        return (digits.images[..., np.newaxis] / 16).astype("float32"), digits.target.astype("int64"), held_out


def changed(images, salt):
    """Each picture moved by up to one pixel, fainter or bolder, and with noise.

    The seeds are those of the examples and the epoch: nothing depends on which replica has them, or on a restart.
    """

    def change(pair):
        image, seed = pair
        image = tf.image.stateless_random_crop(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), [8, 8, 1], seed)
        strength = tf.random.stateless_uniform([], tf.random.fold_in(seed, 1), 0.6, 1.4, image.dtype)
        noise = tf.random.stateless_normal([8, 8, 1], tf.random.fold_in(seed, 2), 0, 0.1, image.dtype)
        return image * strength + noise

    return tf.map_fn(change, (images, loop.example_seed(salt)), fn_output_signature=images.dtype)


if __name__ == "__main__":
    print(fit(SimCLR()).metrics)
