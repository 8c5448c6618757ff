"""Models that need much memory, and what makes them need less: a Transformer, and a dense net of 41 million weights.

    tfloop train bigger --remat full
    tfloop train bigger --devices-per-replica 2 --accumulate 8
    tfloop train bigger.py:Dense --accumulate 4

`python -m benchmarks.memory` measures both with each setting; see docs/memory.md.
"""

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

import loop
from loop import ArrayData, TrainTask, fit


@dataclass
class Transformer(TrainTask):
    """Reads a random sequence of symbols twice: what comes in the second half stands in the first."""

    blocks: int = 12
    width: int = 128
    heads: int = 4
    length: int = 128
    symbols: int = 64
    dropout: float = 0.1
    examples: int = 2048
    learning_rate: float = 1e-3

    defaults = {"batch_size": 64, "epochs": 20}

    def build_model(self):
        symbols = keras.Input((self.length,), dtype="int32")
        outputs = keras.layers.Embedding(self.symbols, self.width)(symbols)
        outputs = Places(self.length, self.width)(outputs)
        for number in range(self.blocks):
            # The second half of the blocks is on a second device, if a replica owns one: --devices-per-replica 2.
            with tf.device(loop.device(2 * number // self.blocks)):
                outputs = Block(self.width, self.heads, self.dropout, name=f"block_{number}")(outputs)
        outputs = keras.layers.LayerNormalization()(outputs)
        return keras.Model(symbols, keras.layers.Dense(self.symbols)(outputs))

    def build_optimizer(self):
        return keras.optimizers.Adam(self.learning_rate)

    def train_data(self):
        half = np.random.default_rng(0).integers(0, self.symbols, (self.examples, self.length // 2 + 1), np.int32)
        return ArrayData(np.concatenate([half, half], 1)[:, : self.length + 1])

    def compute(self, model, batch, training):
        logits = model(batch[:, :-1], training=training)  # [n, length, symbols]
        following = batch[:, 1:]
        losses = keras.losses.sparse_categorical_crossentropy(following, logits, from_logits=True)
        right = tf.cast(tf.argmax(logits, -1, tf.int32) == following, tf.float32)
        return {"loss": tf.reduce_mean(losses, -1), "accuracy": tf.reduce_mean(right[:, self.length // 2 :], -1)}


class Places(keras.layers.Layer):
    """Adds a vector for each place of the sequence."""

    def __init__(self, length, width, **named):
        super().__init__(**named)
        self.vectors = self.add_weight(shape=(length, width), initializer="glorot_uniform", name="vectors")

    def call(self, inputs):
        return inputs + self.vectors


class Block(keras.layers.Layer):
    """Attention to the places before, and two dense layers for each place."""

    def __init__(self, width, heads, dropout, **named):
        super().__init__(**named)
        self.width = width
        self.before_attention = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=dropout)
        self.before_dense = keras.layers.LayerNormalization()
        self.wide = keras.layers.Dense(4 * width, activation="gelu")
        self.narrow = keras.layers.Dense(width)
        self.dropout = keras.layers.Dropout(dropout)

    def build(self, shape):
        self.before_attention.build(shape)
        self.attention.build(shape, shape)
        self.before_dense.build(shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 4 * self.width))

    def call(self, inputs):
        normed = self.before_attention(inputs)
        inputs += self.dropout(self.attention(normed, normed, use_causal_mask=True))
        return inputs + self.dropout(self.narrow(self.wide(self.before_dense(inputs))))


@dataclass
class Dense(TrainTask):
    """8000-4000-2000-500-300-1: 41,157,101 weights, of which Adam keeps two more copies."""

    inputs: int = 8000
    examples: int = 8192
    learning_rate: float = 1e-4

    defaults = {"batch_size": 2048, "epochs": 5}

    def build_model(self):
        layers = [keras.layers.Dense(units, activation="relu") for units in (4000, 2000, 500, 300)]
        return keras.Sequential([keras.Input((self.inputs,)), *layers, keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.Adam(self.learning_rate)

    def train_data(self):
        inputs = np.random.default_rng(0).normal(size=(self.examples, self.inputs)).astype("float32")
        return ArrayData(inputs, np.sign(inputs[:, :1] + inputs[:, 1:2]))

    def compute(self, model, batch, training):
        inputs, labels = batch
        return {"loss": tf.reduce_sum((model(inputs, training=training) - labels) ** 2, -1)}


if __name__ == "__main__":
    fit(Transformer(), remat="full")
