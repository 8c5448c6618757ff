"""The same as a task."""

import keras
import numpy as np
from sklearn.datasets import load_digits

from loop import ArrayData, TrainTask, fit

random = np.random.default_rng(0)
START = [
    random.normal(0, 0.1, shape).astype("float32")
    for shape in ((64, 64), (64,), (64, 10), (10,))
]


class Digits(TrainTask):
    defaults = {"batch_size": 64, "epochs": 3, "shuffle": False}

    def __init__(self):
        digits = load_digits()
        self.images = (digits.data / 16).astype("float32")
        self.labels = digits.target

    def build_model(self):
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, "relu"),
                keras.layers.Dense(10),
            ]
        )
        model.set_weights(START)
        return model

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def train_data(self):
        return ArrayData(self.images[:1600], self.labels[:1600])

    def eval_data(self):
        return ArrayData(self.images[1600:], self.labels[1600:])

    def compute(self, model, batch, training):
        images, labels = batch
        logits = model(images, training=training)
        loss = keras.losses.sparse_categorical_crossentropy
        return {"loss": loss(labels, logits, from_logits=True)}


if __name__ == "__main__":
    loss = fit(Digits()).metrics["eval_loss"]
    print(f"loss {loss:.6f}")
