"""A large and a small network for handwritten digits: data and networks."""

import keras
from keras import layers
from sklearn.datasets import load_digits

digits = load_digits()
images = (digits.images / 16).astype("float32")[:640, ..., None]
labels = digits.target[:640]


def make_network(name, filters):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(filters, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(2 * filters, 3, strides=2, padding="same"),
            layers.Flatten(),
            layers.Dense(10),
        ],
        name=name,
    )
