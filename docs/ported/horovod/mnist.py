"""Handwritten digits: data and network."""

import keras
from keras import layers
from sklearn.datasets import load_digits

digits = load_digits()
images = (digits.images / 16).astype("float32")[..., None]
labels = digits.target


def make_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
