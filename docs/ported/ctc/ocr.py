"""Reading three digits in a row: data and network."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

digits = load_digits()
places = np.random.default_rng(0).integers(0, 1797, (240, 3))
# Shape [240, 24, 8, 1]: the width of a picture is the time of the network.
images = np.concatenate(
    [digits.images[places[:, i]].transpose(0, 2, 1) for i in range(3)], 1
)
images = (images / 16).astype("float32")[..., None]
labels = digits.target[places] + 1  # 0 is CTC's blank


def make_reader():
    """Scores of each character at 12 moments: shape [n, 12, 11]."""
    inputs = keras.Input((24, 8, 1), name="image")
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Reshape((12, 4 * 8))(x)
    x = layers.Dense(16, activation="relu")(x)
    x = layers.Dropout(0.2)(x)
    x = layers.Bidirectional(layers.LSTM(12, return_sequences=True))(x)
    return keras.Model(inputs, layers.Dense(11)(x))
