"""The same as a task: it knows of no strategy."""

import keras
from sklearn.datasets import load_digits

from loop import ArrayData, TrainTask, fit
from loop.backends import create


class Digits(TrainTask):
    defaults = {"batch_size": 64, "epochs": 3, "shuffle": False}

    def __init__(self):
        digits = load_digits()
        images = (digits.data / 16).astype("float32")
        self.train = images[:1600], digits.target[:1600]
        self.test = images[1600:], digits.target[1600:]

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
        return ArrayData(*self.train)

    def eval_data(self):
        return ArrayData(*self.test)

    def compute(self, model, batch, training):
        images, labels = batch
        logits = model(images, training=training)
        loss = keras.losses.sparse_categorical_crossentropy
        return {"loss": loss(labels, logits, from_logits=True)}


if __name__ == "__main__":
    # Typed: tfloop train ours.py:Digits --backend mirrored --workers 4
    result = fit(Digits(), backend=create("mirrored", 4), seed=0)
    loss = result.metrics["eval_loss"]
    print(f"loss {loss:.6f}")
