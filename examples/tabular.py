"""A table: is a tumour malignant? Judged by the area under the ROC curve, which isn't a mean over examples.

`tfloop train tabular` reaches an area of 0.991 and an accuracy of 0.982 on held-out patients after 300 steps (seed 0,
5 s; the same to seven digits on two replicas).
"""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_breast_cancer

from loop import ArrayData, TrainTask, fit


@dataclass
class Tumours(TrainTask):
    """A small network on 30 measurements of each of 569 tumours (Wisconsin, 1995), of which 37 % are malignant."""

    hidden: int = 32
    dropout: float = 0.2
    learning_rate: float = 2e-3
    malignant_weight: float = 2.0

    defaults = {"batch_size": 32, "epochs": 20}

    def build_model(self):
        (columns, _), _ = self._table()
        # Within the model, so that what is exported takes measurements as they are.
        scale = keras.layers.Normalization(mean=columns.mean(0), variance=columns.var(0))
        return keras.Sequential(
            [
                keras.Input((columns.shape[1],)),
                scale,
                keras.layers.Dense(self.hidden, activation="relu"),
                keras.layers.Dropout(self.dropout),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.AdamW(self.learning_rate, weight_decay=0.01)

    def build_metrics(self):
        # What replicas gather is counts, which can be added: the area of all isn't a mean of their areas.
        return {"auc": keras.metrics.AUC(num_thresholds=1000)}

    def train_data(self):
        return ArrayData(*self._table()[0])

    def eval_data(self):
        return ArrayData(*self._table()[1])

    def compute(self, model, batch, training):
        columns, malignant = batch
        probability = model(columns, training=training)
        values = {
            "loss": keras.losses.binary_crossentropy(malignant[:, tf.newaxis], probability),
            "accuracy": tf.cast((probability[:, 0] > 0.5) == (malignant > 0.5), tf.float32),
            "auc": (malignant, probability[:, 0]),  # what the metric is updated with
        }
        if training:  # to overlook one is worse: it weighs more. The evaluation counts each patient once.
            values["weight"] = tf.where(malignant > 0.5, self.malignant_weight, 1.0)
        return values

    @staticmethod
    def _table():
        """Columns and labels to train on, and to evaluate on: every fifth patient."""
        table = load_breast_cancer()
        columns, malignant = table.data.astype("float32"), (table.target == 0).astype("float32")
        held_out = np.arange(len(malignant)) % 5 == 0
        return tuple((columns[part], malignant[part]) for part in (~held_out, held_out))


if __name__ == "__main__":
    print(fit(Tumours()).metrics)
