"""The same model, optimizer and loss as a task."""

import keras
from sklearn.datasets import load_digits

from loop import ArrayData, KerasTask, fit

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target


def model():
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(10),
        ]
    )


class Digits(KerasTask):
    defaults = {"batch_size": 64, "epochs": 3, "shuffle": False}

    def __init__(self):
        super().__init__(
            model,
            lambda: keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            train=ArrayData(images[:1600], labels[:1600]),
            eval=ArrayData(images[1600:], labels[1600:]),
        )


if __name__ == "__main__":
    loss = fit(Digits(), seed=0).metrics["eval_loss"]
    print(f"loss {loss:.6f}")
