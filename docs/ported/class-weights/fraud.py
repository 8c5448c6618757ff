"""Payments of which few are frauds: data and compiled model."""

import keras
import numpy as np
from keras import layers

random = np.random.default_rng(0)
features = random.normal(size=(2000, 12)).astype("float32")
fraud = (features[:, 0] + features[:, 1] > 2.6).astype("uint8")[:, None]
frauds = int(fraud.sum())
class_weight = {0: 1.0 / (2000 - frauds), 1: 1.0 / frauds}


def make_model():
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(32, activation="relu"),
            layers.Dense(32, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss="binary_crossentropy",
        metrics=[
            keras.metrics.TruePositives(name="true_positives"),
            keras.metrics.FalsePositives(name="false_positives"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
        ],
    )
    return model
