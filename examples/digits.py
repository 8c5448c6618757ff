"""Handwritten digits: the first thing to train. 1,797 real pictures of 8x8 pixels, which come with scikit-learn."""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from loop import ArrayData, TrainTask, fit


@dataclass
class Digits(TrainTask):
    """A small dense network; every field is a hyperparameter (`--set hidden=128`)."""

    hidden: int = 64
    learning_rate: float = 5e-3

    defaults = {"batch_size": 32, "epochs": 6}

    def build_model(self):
        return keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(self.hidden, activation="relu"), keras.layers.Dense(10)]
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
        logits = model(images, training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True),
            "accuracy": tf.cast(tf.argmax(logits, -1) == labels, tf.float32),
        }

    @staticmethod
    def _digits():
        digits = load_digits()
        held_out = np.arange(len(digits.target)) % 5 == 0
        return (digits.data / 16.0).astype("float32"), digits.target.astype("int64"), held_out


if __name__ == "__main__":
    print(fit(Digits()).metrics)
