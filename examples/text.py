"""Text classification: functions of Python's standard library, of any length, and the package that each comes from.

`tfloop train text` reaches an accuracy of 0.87 on held-out functions after 102 steps (seed 0, Python 3.11), with two
workers, too.
"""

import itertools
import re
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from loop import IndexedData, Padding, TrainTask, fit

PACKAGES = ("asyncio", "email", "unittest", "xml")


@dataclass
class Functions(TrainTask):
    """Words as vectors, a recurrent layer, and a dense one.

    Functions of similar length meet in a batch, and each batch is padded to its longest: with `--set buckets=1`, as
    they come, a batch has about twice as many words.
    """

    words: int = 4096
    longest: int = 200
    width: int = 32
    dropout: float = 0.3
    buckets: int = 16
    learning_rate: float = 5e-3

    defaults = {"batch_size": 64, "epochs": 3}

    def __post_init__(self):
        self.source = Source()
        self.lengths = [min(max(1, count), self.longest) for count in self.source.word_counts]

    def build_model(self):
        words = keras.Input((None,), dtype="int32")
        mask = keras.Input((None,), dtype="bool")
        vectors = keras.layers.Embedding(self.words, self.width)(words)
        vectors = keras.layers.Dropout(self.dropout)(vectors)
        state = keras.layers.GRU(self.width)(vectors, mask=mask)
        state = keras.layers.Dropout(self.dropout)(state)
        return keras.Model([words, mask], keras.layers.Dense(len(PACKAGES))(state))

    def build_optimizer(self):
        return keras.optimizers.Adam(self.learning_rate)

    def train_data(self):
        train, _ = self.functions().split(0.2)
        return train

    def eval_data(self):
        _, held_out = self.functions().split(0.2)
        return held_out

    def functions(self):
        """`lengths` says how long each is after `map`: so no worker needs to read the rows of the others."""
        padding = Padding(bucket_by=self.buckets > 1, buckets=self.buckets)
        return IndexedData(self.source, map=self.numbers, padding=padding, lengths=self.lengths)

    def numbers(self, function):
        """The words of a function as numbers, int32 [length], and its package."""
        text, package = function
        hashed = [zlib.crc32(word) % self.words for word in words_of(text)[: self.longest]]
        return np.array(hashed or [0], np.int32), np.int64(package)

    def compute(self, model, batch, training):
        words, packages, mask = batch  # [n, length of the longest], [n], [n, length of the longest]
        logits = model([words, mask], training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(packages, logits, from_logits=True),
            "accuracy": tf.cast(tf.argmax(logits, -1) == packages, tf.float32),
        }


class Source:
    """Functions by index: only where each begins and ends is held in memory."""

    def __init__(self):
        self.places = []
        self.word_counts = []
        library = Path(sysconfig.get_path("stdlib"))
        for package, name in enumerate(PACKAGES):
            for path in sorted((library / name).rglob("*.py")):
                if "test" in path.relative_to(library / name).parts:
                    continue
                text = path.read_bytes()
                begins = [found.start() for found in re.finditer(rb"^ *(?:async )?def ", text, re.MULTILINE)]
                for begin, end in itertools.pairwise([*begins, len(text)]):
                    self.places.append((path, begin, end, package))
                    self.word_counts.append(len(words_of(text[begin:end])))

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        path, begin, end, package = self.places[index]
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin), package


def words_of(text):
    return re.findall(rb"[A-Za-z_]+", text)


if __name__ == "__main__":
    print(fit(Functions()).metrics)
