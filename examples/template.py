"""Template: a task for tfloop.

tfloop train template.py:Template --workers 2      trains it, with the same numbers on any number of workers
tfloop train template.py:Template --dry-run        shows what would be trained, in two steps
tfloop train template.py:Template --overfit 1      a sanity check: it must learn one batch by heart
"""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from loop import ArrayData, TrainTask, fit


@dataclass
class Template(TrainTask):
    """Handwritten digits, to begin with: replace them by your own data, and the model by yours."""

    # Every field is a hyperparameter: `--set hidden=128` on the command line, a column in MLflow.
    hidden: int = 64
    learning_rate: float = 5e-3

    # What you would else type each time; what you type wins. `tfloop train --help` lists all options.
    defaults = {"epochs": 5, "batch_size": 32}

    def build_model(self):
        """A Keras model; or any tf.Module."""
        return keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(self.hidden, activation="relu"), keras.layers.Dense(10)]
        )

    def build_optimizer(self):
        """A Keras optimizer; its learning rate may be a schedule."""
        return keras.optimizers.Adam(self.learning_rate)

    def train_data(self):
        """Arrays with an equal first axis; or an unbatched tf.data.Dataset. The loop makes the batches."""
        images, labels = self._digits()
        return ArrayData(images[360:], labels[360:])

    def eval_data(self):
        """The same, of examples that it doesn't train on; leave it out for no evaluation."""
        images, labels = self._digits()
        return ArrayData(images[:360], labels[:360])

    def compute(self, model, batch, training):
        """One value for each example, never a mean: "loss" is minimised, all others are metrics."""
        images, labels = batch
        logits = model(images, training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True),
            "accuracy": tf.cast(tf.argmax(logits, -1) == labels, tf.float32),
        }

    def _digits(self):
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))  # a seed: each worker must draw the same
        return (digits.data[order] / 16).astype("float32"), digits.target[order]


if __name__ == "__main__":
    print(fit(Template()).metrics)
