"""The same without the loop."""

import keras
from net import images, labels, make_model

from loop import ArrayData, TrainTask, fit


class Digits(TrainTask):
    defaults = {"batch_size": 64, "epochs": 2, "shuffle": False}

    def build_model(self):
        return make_model()

    def build_optimizer(self):
        return keras.optimizers.Adam(1e-3)

    def train_data(self):
        return ArrayData(images[:1000], labels[:1000])

    def eval_data(self):
        return ArrayData(images[1000:], labels[1000:])

    def compute(self, model, batch, training):
        images, labels = batch
        logits = model(images, training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            ),
            "accuracy": keras.metrics.sparse_categorical_accuracy(
                labels, logits
            ),
        }


if __name__ == "__main__":
    result = fit(Digits(), seed=0)
    weights = result.model.get_weights()
    accuracy = result.metrics["eval_accuracy"]
