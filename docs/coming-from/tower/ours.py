"""The same as a task: the towers are the engine's business."""

from dataclasses import dataclass

import keras
from sklearn.datasets import load_digits

from loop import ArrayData, TrainTask, fit
from loop.backends import create


@dataclass
class Digits(TrainTask):
    examples: int = 1600

    defaults = {"batch_size": 64, "epochs": 3, "shuffle": False}

    def __post_init__(self):
        digits = load_digits()
        self.images = (digits.data / 16).astype("float32")
        self.labels = digits.target

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(10),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def train_data(self):
        end = self.examples
        return ArrayData(self.images[:end], self.labels[:end])

    def eval_data(self):
        return ArrayData(self.images[1600:], self.labels[1600:])

    def compute(self, model, batch, training):
        images, labels = batch
        logits = model(images, training=training)
        loss = keras.losses.sparse_categorical_crossentropy
        return {"loss": loss(labels, logits, from_logits=True)}


if __name__ == "__main__":
    # Typed: tfloop train ours.py:Digits --backend mirrored --workers 2
    # or, with GPUs: --devices gpu:0,gpu:1
    result = fit(Digits(), backend=create("mirrored", 2), seed=0)
    loss = result.metrics["eval_loss"]
    print(f"loss {loss:.6f}")
