"""An existing Keras model, optimizer and loss, as they are: one line makes them a task that trains on any engine."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from loop import ArrayData, KerasTask, fit


def model_fn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def optimizer_fn():
    return keras.optimizers.Adam(0.01)


def accuracy(labels, predictions):
    return tf.cast(tf.argmax(predictions, -1) == labels, tf.float32)


class MyModel(KerasTask):
    """The task by a name, so that the command line finds it: `tfloop train bring_your_keras_model.py:MyModel`."""

    defaults = {"epochs": 3}

    def __init__(self):
        digits = load_digits()
        images, labels = (digits.images[..., None] / 16).astype("float32"), digits.target.astype("int64")
        held_out = np.arange(len(labels)) % 5 == 0
        # The line:
        super().__init__(
            model_fn, optimizer_fn, keras.losses.SparseCategoricalCrossentropy(),
            train=ArrayData(images[~held_out], labels[~held_out]),
            eval=ArrayData(images[held_out], labels[held_out]),
            metrics={"accuracy": accuracy},
        )  # fmt: skip


if __name__ == "__main__":
    print(fit(MyModel()).metrics)
