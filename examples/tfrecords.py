"""Image classification from TFRecord files: each worker reads its own files, and each example has its own seed.

`tfloop train tfrecords` reaches an accuracy of 0.975 on held-out pictures after 184 steps (seed 0, 8 s; 0.92
with seed 1, 0.93 with seed 0 and two workers).
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import loop
from callbacks import ShardData
from loop import TrainTask, fit


@dataclass
class DigitFiles(TrainTask):
    """A small convolutional network on PNG pictures.

    With `--set sharding=file`, as it is, nothing is read twice: each worker process (`--workers 2`) reads every second
    file, so that which examples meet in a batch depends on how many there are. With `sharding=example` each reads all,
    and keeps its rows: the same batches, and the same numbers, with any number of workers. Replicas within one process
    (`--backend mirrored --workers 2`) share its files, and have the same numbers either way.
    """

    records: str = "runs/digits-tfrecords"
    sharding: str = "file"
    width: int = 16
    learning_rate: float = 5e-3

    defaults = {"batch_size": 64, "epochs": 8}

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(self.width, 3, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.Activation("relu"),
                keras.layers.Conv2D(2 * self.width, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )

    def build_optimizer(self):
        return keras.optimizers.Adam(self.learning_rate)

    def build_callbacks(self):
        return [ShardData(self.sharding)]

    def train_data(self):
        return self.read("train-*").shuffle(2000)  # anew in each epoch, from the run's seed

    def eval_data(self):
        return self.read("eval-*")

    def read(self, pattern):
        """The examples of some files, one by one: `fit` makes batches of them. It must begin with a list of files."""
        files = sorted(str(path) for path in written(Path(self.records)).glob(pattern))
        return tf.data.TFRecordDataset(files).map(parsed, tf.data.AUTOTUNE)

    def compute(self, model, batch, training):
        images, labels = batch
        logits = model(moved(images) if training else images, training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True),
            "accuracy": tf.cast(tf.argmax(logits, -1) == labels, tf.float32),
        }


def moved(images):
    """Each picture moved by up to one pixel: by its own seed, so that it is the same on any worker."""

    def move(pair):
        image, seed = pair
        return tf.image.stateless_random_crop(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), [8, 8, 1], seed)

    return tf.map_fn(move, (images, loop.example_seed()), fn_output_signature=images.dtype)


def parsed(record):
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_single_example(record, features)
    image = tf.ensure_shape(tf.io.decode_png(example["image"], channels=1), [8, 8, 1])
    return tf.cast(image, tf.float32) / 255, example["label"]


def written(directory):
    """The directory of the files; writes them if it isn't there: eight to train on, four to evaluate on."""
    if directory.is_dir():
        return directory
    digits = load_digits()
    held_out = np.arange(len(digits.target)) % 5 == 0
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    for name, places, count in (("train", np.flatnonzero(~held_out), 8), ("eval", np.flatnonzero(held_out), 4)):
        for number in range(count):
            with tf.io.TFRecordWriter(str(partial / f"{name}-{number}-of-{count}.tfrecord")) as writer:
                for place in places[number::count]:
                    writer.write(record(digits.images[place] / 16, int(digits.target[place])))
    try:
        partial.rename(directory)  # whole, or not at all
    except OSError:
        shutil.rmtree(partial)
        if not directory.is_dir():  # else another worker was first, and its files are the same
            raise
    return directory


def record(image, label):
    png = tf.io.encode_png(np.uint8(image[..., np.newaxis] * 255)).numpy()
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[png])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


if __name__ == "__main__":
    print(fit(DigitFiles()).metrics)
