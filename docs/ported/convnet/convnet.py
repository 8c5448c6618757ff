"""A small convolutional network: data and compiled model."""

import keras
from keras import layers
from sklearn.datasets import load_digits

digits = load_digits()
images = (digits.images / 16).astype("float32")[..., None]
labels = keras.utils.to_categorical(digits.target, 10)


def make_model():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(32, 3, activation="relu", padding="same"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="categorical_crossentropy",
        optimizer="adam",
        metrics=["accuracy"],
    )
    return model
