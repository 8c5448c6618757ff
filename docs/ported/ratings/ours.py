"""Collaborative filtering as a task: model, optimizer and loss as they are."""

import keras
from ratings import Recommender, pairs, ratings

from loop import KerasTask, fit


class Ratings(KerasTask):
    defaults = {"batch_size": 64, "epochs": 3, "shuffle": False}

    def __init__(self):
        super().__init__(
            Recommender,
            lambda: keras.optimizers.Adam(learning_rate=0.001),
            keras.losses.BinaryCrossentropy(),
            train=(pairs[:1350], ratings[:1350]),
            eval=(pairs[1350:], ratings[1350:]),
        )


if __name__ == "__main__":
    result = fit(Ratings(), seed=0)
    weights = result.model.get_weights()
