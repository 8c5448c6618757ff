"""Image classification from TFRecord files that are read by index: one global shuffle, and no order of files.

`tfloop train records` reaches an accuracy of 0.978 on held-out pictures after 184 steps (seed 0), on two
workers as well.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from loop import IndexedData, TrainTask, fit, records

FEATURES = {"image": tf.io.FixedLenFeature([8, 8, 1], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}


@dataclass
class DigitRecords(TrainTask):
    """A small convolutional network.

    Where each record begins is found once. So all records are shuffled, whichever file they are in; each worker reads
    its own alone, and any number of workers makes the same model; and a resume at any step costs nothing. The example
    `tfrecords` reads files as a stream, for those that are compressed.
    """

    folder: str = "runs/digits-records"
    width: int = 16
    learning_rate: float = 5e-3

    defaults = {"batch_size": 64, "epochs": 8}

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(self.width, 3, activation="relu"),
                keras.layers.Conv2D(2 * self.width, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.Adam(self.learning_rate)

    def train_data(self):
        return IndexedData(records(written(Path(self.folder)) / "train-*", FEATURES))  # examples are dicts

    def eval_data(self):
        return IndexedData(records(written(Path(self.folder)) / "eval-*", FEATURES))

    def compute(self, model, batch, training):
        logits = model(batch["image"], training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True),
            "accuracy": tf.cast(tf.argmax(logits, -1) == batch["label"], tf.float32),
        }


def written(folder):
    """The folder of the files; writes scikit-learn's digits there, if there is none."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    digits = load_digits()
    held_out = np.arange(len(digits.target)) % 5 == 0
    for name, places, count in (("train", np.flatnonzero(~held_out), 4), ("eval", np.flatnonzero(held_out), 1)):
        for number in range(count):
            with tf.io.TFRecordWriter(str(partial / f"{name}-{number}-of-{count}.tfrecord")) as writer:
                for place in places[number::count]:
                    writer.write(record(digits.images[place] / 16, digits.target[place]))
    try:
        partial.rename(folder)  # whole, or not at all
    except OSError:
        shutil.rmtree(partial)
        if not folder.is_dir():  # else another worker was first, and its files are the same
            raise
    return folder


def record(image, label):
    """One example, as bytes."""
    features = {
        "image": tf.train.Feature(float_list=tf.train.FloatList(value=image.reshape(-1))),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


if __name__ == "__main__":
    print(fit(DigitRecords()).metrics)
