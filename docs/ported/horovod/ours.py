"""Horovod's example as a task: `tfloop train ours.py:Digits --workers 2`."""

import keras
from mnist import images, labels, make_model

import callbacks
from loop import ArrayData, TrainTask, fit


class Digits(TrainTask):
    defaults = {"batch_size": 64, "steps": 50, "shuffle": False}

    def build_model(self):
        return make_model()

    def build_optimizer(self):
        return keras.optimizers.Adam(0.001)

    def build_callbacks(self):
        # The rate is for a batch of 32: with the global batch of 64, twice it.
        return [callbacks.LearningRateScaling(32, warmup_epochs=0)]

    def train_data(self):
        return ArrayData(images[:1792], labels[:1792])

    def compute(self, model, batch, training):
        images, labels = batch
        outputs = model(images, training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(
                labels, outputs
            )
        }


if __name__ == "__main__":
    result = fit(Digits(), seed=0)
    weights = result.model.get_weights()
