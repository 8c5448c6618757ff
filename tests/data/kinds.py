"""Scikit-learn's digits from each kind of file: a task for tests, and what writes the files."""

import dataclasses
from pathlib import Path

import datasets
import grain
import keras
import numpy as np
import pyarrow
import pyarrow.parquet
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter
from sklearn.datasets import load_digits

import loop

KINDS = ("memmap", "records", "array_record", "arrow", "parquet")
FEATURES = {"image": tf.io.FixedLenFeature([64], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}


def examples():
    """Images, float32 [1797, 64], and labels, int64 [1797]."""
    digits = load_digits()
    return digits.data.astype("float32"), digits.target.astype("int64")


@dataclasses.dataclass
class Digits(loop.TrainTask):
    """Adam and dropout: a batch or a draw that differs shows in the weights."""

    kind: str = "arrays"
    files: str = "."

    def build_model(self):
        layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input([64]), *layers])

    def build_optimizer(self):
        return keras.optimizers.Adam(1e-2)

    def train_data(self):
        if self.kind == "arrays":
            images, labels = examples()
            return loop.ArrayData({"image": images, "label": labels})
        return opened(self.kind, Path(self.files))

    def compute(self, model, batch, training):
        logits = model(batch["image"], training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(batch["label"], logits, from_logits=True)}


def opened(kind, directory):
    """The examples as `IndexedData`."""
    if kind == "memmap":
        return loop.IndexedData({name: directory / f"{name}.npy" for name in ("image", "label")})
    if kind == "records":
        return loop.IndexedData(loop.records(directory / "*.tfrecord", FEATURES))
    if kind == "array_record":
        source = grain.sources.ArrayRecordDataSource([str(directory / "digits.array_record")])
        return loop.IndexedData(source, map=parsed)
    if kind == "arrow":
        return loop.IndexedData(datasets.load_from_disk(str(directory / "arrow")).with_format("numpy"))
    return loop.IndexedData(directory / "digits.parquet")


def parsed(record):
    return {name: tensor.numpy() for name, tensor in tf.io.parse_single_example(record, FEATURES).items()}


def write(directory):
    """Writes files of all kinds."""
    images, labels = examples()
    np.save(directory / "image.npy", images)
    np.save(directory / "label.npy", labels)
    encoded = [_encoded(image, label) for image, label in zip(images, labels, strict=True)]
    half = len(encoded) // 2
    for name, part in (("first", encoded[:half]), ("second", encoded[half:])):
        with tf.io.TFRecordWriter(str(directory / f"{name}.tfrecord")) as file:
            for record in part:
                file.write(record)
    writer = ArrayRecordWriter(str(directory / "digits.array_record"), "group_size:1")
    for record in encoded:
        writer.write(record)
    writer.close()
    datasets.Dataset.from_dict({"image": images, "label": labels}).save_to_disk(str(directory / "arrow"))
    table = pyarrow.table({"image": list(images), "label": labels})
    pyarrow.parquet.write_table(table, directory / "digits.parquet", row_group_size=100)


def _encoded(image, label):
    features = {
        "image": tf.train.Feature(float_list=tf.train.FloatList(value=image)),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
