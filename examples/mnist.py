"""MNIST with a small convolutional network: a checkpoint for each epoch, TensorBoard, and the best weights at the end.

`tfloop train mnist` takes the file that Keras has downloaded before, or downloads it. `tfloop train mnist --workers 2`
trains on two workers; Ctrl-C saves, and the same command with `--run-dir` goes on from there.

Many guides have a batch size "of 64 per replica". The batch, and so the model, then depends on the number of replicas.
Here `batch_size` is the *global* batch: 64 examples a step, 32 on each of two replicas, and the same model. For 64 on
each of N replicas, give `--batch-size` 64 * N, and scale the learning rate: `callbacks.LearningRateScaling`.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from callbacks import Checkpoint, EarlyStopping, TensorBoard
from loop import ArrayData, TrainTask, UsageError, fit


@dataclass
class Mnist(TrainTask):
    """The network of Keras's own first example.

    Fields:
        file: `mnist.npz`, as Keras has it; "": where Keras keeps it.
    """

    file: str = ""
    width: int = 32
    dropout: float = 0.5
    learning_rate: float = 1e-3

    defaults = {"batch_size": 64, "epochs": 5}

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Conv2D(self.width, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(2 * self.width, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dropout(self.dropout),
                keras.layers.Dense(10),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.Adam(self.learning_rate)

    def build_callbacks(self):
        best = EarlyStopping("eval_accuracy", patience=3, restore_best=True)
        return [Checkpoint(every="epoch", keep_last=3), TensorBoard(), best]

    def train_data(self):
        images, labels = self.read()["train"]
        return ArrayData(images, labels)

    def eval_data(self):
        images, labels = self.read()["test"]
        return ArrayData(images, labels)

    def compute(self, model, batch, training):
        images, labels = batch
        # Bytes in memory, a quarter of what floats would take; scaled where they are used.
        logits = model(tf.cast(images[..., None], tf.float32) / 255, training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True),
            "accuracy": tf.cast(tf.argmax(logits, -1) == tf.cast(labels, tf.int64), tf.float32),
        }

    def read(self):
        """Images, uint8 [n, 28, 28], and labels, uint8 [n], of the training and of the test set."""
        home = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras"))
        file = Path(self.file) if self.file else home / "datasets" / "mnist.npz"
        if file.exists() or self.file:
            try:
                with np.load(file) as arrays:
                    return {name: (arrays[f"x_{name}"], arrays[f"y_{name}"]) for name in ("train", "test")}
            except (OSError, ValueError, KeyError) as error:
                raise UsageError(f"{file} isn't a file of MNIST ({error}): give another one, --set file=PATH") from None
        try:
            train, test = keras.datasets.mnist.load_data()
        except Exception as error:
            raise UsageError(
                f"MNIST isn't at {file}, and can't be downloaded ({error}): copy mnist.npz there, or give "
                "--set file=PATH"
            ) from None
        return {"train": train, "test": test}


if __name__ == "__main__":
    print(fit(Mnist()).metrics)
