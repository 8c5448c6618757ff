"""A series and its moving average, cut into windows: data and network."""

import keras
import numpy as np
from keras import layers

BATCH = 8
series = np.random.default_rng(0).uniform(-0.1, 0.1, 648).astype("float32")
average = np.convolve(series, np.ones(4, "float32") / 4)[: len(series)]
# Row i of each batch goes on where row i of the batch before ended.
inputs = series.reshape(BATCH, -1, 3, 1).swapaxes(0, 1).reshape(-1, 3, 1)
targets = average.reshape(BATCH, -1, 3).swapaxes(0, 1).reshape(-1, 3)[:, -1:]


def make_model():
    model = keras.Sequential(
        [
            keras.Input((3, 1), batch_size=BATCH),
            layers.LSTM(10, stateful=True),
            layers.Dense(1),
        ]
    )
    model.compile(loss="mse", optimizer="adam")
    return model
