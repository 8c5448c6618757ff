"""Handwritten digits: data and network."""

import keras
from keras import layers
from sklearn.datasets import load_digits

digits = load_digits()
images = (digits.data / 16).astype("float32")
labels = digits.target


def make_model():
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(32, "relu"),
            layers.Dense(32, "relu"),
            layers.Dense(10),
        ]
    )
