"""The same model: `KerasTask` is the wrapper."""

import keras
from sklearn.datasets import load_digits

from loop import ArrayData, KerasTask, fit
from loop.backends import create

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
    # Typed: tfloop train ours.py:Digits --backend mirrored --workers 2
    # or, with GPUs: --devices gpu:0,gpu:1
    result = fit(Digits(), backend=create("mirrored", 2), seed=0)
    loss = result.metrics["eval_loss"]
    print(f"loss {loss:.6f}")
    result.model.save_weights("digits.weights.h5")
