"""The same as a task."""

from dataclasses import dataclass

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from callbacks import Checkpoint
from loop import ArrayData, TrainTask, fit


@dataclass
class Digits(TrainTask):
    hidden: int = 64  # params["hidden"]
    learning_rate: float = 0.1  # params["learning_rate"]

    defaults = {"batch_size": 64, "steps": 75, "shuffle": False}

    def __post_init__(self):
        digits = load_digits()
        self.images = (digits.data / 16).astype("float32")
        self.labels = digits.target

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(self.hidden, "relu"),
                keras.layers.Dense(10),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.SGD(self.learning_rate, momentum=0.9)

    def train_data(self):  # train_input_fn: without batch and repeat
        return ArrayData(self.images[:1600], self.labels[:1600])

    def eval_data(self):  # eval_input_fn
        return ArrayData(self.images[1600:], self.labels[1600:])

    def compute(self, model, batch, training):  # model_fn
        images, labels = batch
        logits = model(images, training=training)
        loss = keras.losses.sparse_categorical_crossentropy
        return {
            "loss": loss(labels, logits, from_logits=True),
            "accuracy": tf.cast(tf.argmax(logits, -1) == labels, tf.float32),
        }


if __name__ == "__main__":
    result = fit(
        Digits(),
        run_dir="runs/digits",  # model_dir
        callbacks=[Checkpoint(every=25, keep_last=3)],
        seed=0,
    )
    loss = result.metrics["eval_loss"]
    print(f"loss {loss:.6f}")
