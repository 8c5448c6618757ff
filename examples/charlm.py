"""A small Transformer that learns to write Python from the standard library's own source, character by character."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from loop import ArrayData, Perplexity, TrainTask, fit


@dataclass
class CharLM(TrainTask):
    """Loss and weight per token, in nats.

    `unigram` is the entropy of single characters: what a model would score that knows only how frequent each one is.
    """

    context: int = 64
    width: int = 96
    layers: int = 2
    heads: int = 4
    learning_rate: float = 3e-3
    characters: int = 1_000_000

    defaults = {"batch_size": 32, "steps": 300, "clip_norm": 1.0}

    def __post_init__(self):
        text = python_source(self.characters)
        self.alphabet, codes = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
        frequency = np.bincount(codes) / len(codes)
        self.surprise = -np.log(frequency).astype("float32")
        windows = codes[: len(codes) // (self.context + 1) * (self.context + 1)].reshape(-1, self.context + 1)
        self.windows = windows.astype("uint8")
        self.held_out = np.arange(len(windows)) % 20 == 0

    def build_model(self):
        tokens = keras.Input((self.context,), dtype="int32")
        x = Places()(keras.layers.Embedding(len(self.alphabet), self.width)(tokens))
        for _ in range(self.layers):
            y = keras.layers.LayerNormalization()(x)
            x += keras.layers.MultiHeadAttention(self.heads, self.width // self.heads)(y, y, use_causal_mask=True)
            y = keras.layers.LayerNormalization()(x)
            x += keras.layers.Dense(self.width)(keras.layers.Dense(4 * self.width, activation="gelu")(y))
        return keras.Model(tokens, keras.layers.Dense(len(self.alphabet))(keras.layers.LayerNormalization()(x)))

    def build_optimizer(self):
        return keras.optimizers.AdamW(self.learning_rate, weight_decay=0.01)

    def train_data(self):
        return ArrayData(self.windows[~self.held_out])

    def eval_data(self):
        return ArrayData(self.windows[self.held_out])

    def compute(self, model, batch, training):
        tokens = tf.cast(batch, tf.int32)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        logits = model(inputs, training=training)
        loss = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return {
            "loss": loss,
            # The first characters of a window have too little before them to be guessed: they count less.
            "weight": tf.minimum(1.0, (1.0 + tf.range(self.context, dtype=tf.float32)) / 16)
            * tf.ones(tf.shape(labels)),
            "unigram": tf.gather(self.surprise, labels),
            "perplexity": loss,
        }

    def build_metrics(self):
        return {"perplexity": Perplexity()}


@keras.saving.register_keras_serializable("charlm")
class Places(keras.layers.Layer):
    """Adds a learned vector for each place in the context."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform", name="vectors")

    def call(self, x):
        return x + self.vectors


def python_source(characters: int) -> bytes:
    """The first ASCII characters of the standard library's modules, in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_bytes()
        if source.isascii():
            text += source
        if len(text) >= characters:
            break
    return bytes(text[:characters])


if __name__ == "__main__":
    print(fit(CharLM()).metrics)
