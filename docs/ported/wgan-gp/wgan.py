"""A Wasserstein GAN of handwritten digits: data and networks."""

import keras
from keras import layers
from sklearn.datasets import load_digits

NOISE = 8
images = (load_digits().images / 8 - 1).astype("float32")[:600, ..., None]


def make_critic():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 5, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(16, 5, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def make_generator():
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(4 * 4 * 8, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Reshape((4, 4, 8)),
            layers.UpSampling2D(),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ]
    )


def make_optimizer():
    return keras.optimizers.Adam(2e-4, beta_1=0.5, beta_2=0.9)
