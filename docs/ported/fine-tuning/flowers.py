"""The digits 8 and 9, for a network that knows others: data and networks."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

digits = load_digits()
known = digits.target < 8
images = (digits.images / 16).astype("float32")[..., None]
new = images[~known]
is_nine = (digits.target[~known] == 9).astype("float32")[:, None]


def make_base():
    """A network that has learned the digits 0 to 7, without its last layer."""
    base = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(16, 3, activation="relu"),
        ],
        name="base",
    )
    random = np.random.default_rng(0)
    for variable in base.trainable_variables:
        if "kernel" in variable.path:
            variable.assign(0.2 * random.normal(size=variable.shape))
    return base


def make_model():
    base = make_base()
    inputs = keras.Input((8, 8, 1))
    x = layers.Rescaling(scale=2.0, offset=-1)(inputs)
    x = base(x, training=False)  # BatchNormalization stays in inference mode
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.2)(x)
    return keras.Model(inputs, layers.Dense(1)(x))
