"""Transfer learning as one run of two phases."""

import keras
from flowers import is_nine, make_model, new

from loop import KerasTask, Phase, fit


class Nines(KerasTask):
    defaults = {"batch_size": 64, "shuffle": False}

    def __init__(self):
        super().__init__(
            make_model,
            lambda: keras.optimizers.Adam(self.rate),
            keras.losses.BinaryCrossentropy(from_logits=True),
            train=(new, is_nine),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
        )

    def phases(self):
        return [Phase("head", epochs=2), Phase("all", epochs=1)]

    def begin_phase(self, model, phase):
        model.get_layer("base").trainable = phase.name == "all"
        self.rate = 1e-5 if phase.name == "all" else 1e-3


if __name__ == "__main__":
    result = fit(Nines(), seed=0)
    weights = result.model.get_weights()
