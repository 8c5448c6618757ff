"""A variational autoencoder of handwritten digits: data and network."""

import keras
from keras import layers, ops
from sklearn.datasets import load_digits

images = (load_digits().data / 16).astype("float32")[:700]


class Sampling(layers.Layer):
    """Draws a latent vector from its mean and the logarithm of its variance."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1337)

    def call(self, moments):
        mean, log_variance = moments
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * noise


def make_encoder():
    inputs = keras.Input((64,))
    hidden = layers.Dense(32, "relu")(inputs)
    mean = layers.Dense(2)(hidden)
    log_variance = layers.Dense(2)(hidden)
    return keras.Model(
        inputs, [mean, log_variance, Sampling()([mean, log_variance])]
    )


def make_decoder():
    inputs = keras.Input((2,))
    hidden = layers.Dense(32, "relu")(inputs)
    return keras.Model(inputs, layers.Dense(64, "sigmoid")(hidden))
