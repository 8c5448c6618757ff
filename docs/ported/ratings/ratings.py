"""Ratings of films by people: data and network."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

PEOPLE, FILMS = 40, 60
random = np.random.default_rng(0)
pairs = np.stack(
    [random.integers(0, PEOPLE, 1500), random.integers(0, FILMS, 1500)], 1
)
taste = random.normal(size=(PEOPLE, 3))
kind = random.normal(size=(FILMS, 3))
scores = (taste[pairs[:, 0]] * kind[pairs[:, 1]]).sum(1)
ratings = (1 / (1 + np.exp(-scores))).astype("float32")[:, None]


class Recommender(keras.Model):
    def __init__(self, size=8):
        super().__init__()
        penalty = keras.regularizers.l2(1e-6)
        self.people = layers.Embedding(
            PEOPLE, size, "he_normal", embeddings_regularizer=penalty
        )
        self.people_bias = layers.Embedding(PEOPLE, 1)
        self.films = layers.Embedding(
            FILMS, size, "he_normal", embeddings_regularizer=penalty
        )
        self.films_bias = layers.Embedding(FILMS, 1)

    def call(self, pairs):
        person = self.people(pairs[:, 0])
        film = self.films(pairs[:, 1])
        match = ops.sum(person * film, -1, keepdims=True)
        bias = self.people_bias(pairs[:, 0]) + self.films_bias(pairs[:, 1])
        return tf.nn.sigmoid(match + bias)
