"""Embeddings as in Keras's `fit`, whose optimizers square each lookup's gradient: on any number of replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from loop import KerasTask
from tests.test_keras_task import BATCH, ROWS, assert_same, by_fit, by_task, compiled, engines  # noqa: F401

WORDS = np.random.default_rng(0).integers(0, 6, (ROWS, 4))
LABELS = np.random.default_rng(1).normal(size=(ROWS, 1))


class Shared(keras.layers.Layer):
    """Adds a table's rows, looked up by the same places for each example, some of them twice."""

    def build(self, shape):
        self.table = self.add_weight(shape=(3, 2), name="table")

    def call(self, x):
        return x + keras.ops.take(self.table, [0, 1, 1, 2], axis=0)


def words():
    x = keras.Input((4,), dtype="int64")
    table = keras.layers.Embedding(8, 2)
    positions = keras.layers.Embedding(4, 2)(keras.ops.arange(4))
    hidden = Shared()(table(x) + positions)
    both = keras.layers.Concatenate()([keras.layers.Flatten()(hidden), keras.layers.Flatten()(table(x[:, :2]))])
    return keras.Model(x, keras.layers.Dense(1)(both))


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "clipped": lambda: keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.01),
    "globally": lambda: keras.optimizers.AdamW(0.1, global_clipnorm=0.01),
}


def in_fit_and_in_task(name, backends, quiet, **options):
    def make():
        model = words()
        model.compile(OPTIMIZERS[name](), "mse")
        return model

    witness, _ = by_fit(make, (WORDS, LABELS), epochs=1)
    for backend in backends:
        task = KerasTask.from_compiled(make, (WORDS, LABELS))
        assert_same(by_task(task, quiet, backend, epochs=1, **options).model, witness)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_that_come_twice_are_squared_as_in_fit(name, engines, quiet):  # noqa: F811
    in_fit_and_in_task(name, [engines[1]], quiet)


def test_and_so_on_any_number_of_replicas(engines, quiet):  # noqa: F811
    in_fit_and_in_task("adam", [engines[2], engines[3]], quiet)


def test_and_in_micro_batches(engines, quiet):  # noqa: F811
    in_fit_and_in_task("rmsprop", [engines[2]], quiet, accumulate=3)


def test_where_lengths_differ_replicas_agree_too(engines, quiet):  # noqa: F811
    def make():
        model = keras.Sequential([keras.layers.Embedding(8, 2), keras.layers.GlobalAveragePooling1D()])
        model.add(keras.layers.Dense(1))
        return compiled(model, "adam", loss="mse")

    def generate():
        yield from zip(WORDS, LABELS, strict=True)

    spec = tf.TensorSpec([None], "int64"), tf.TensorSpec([1], "float64")
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    results = [by_task(KerasTask.from_compiled(make, data), quiet, engines[replicas]) for replicas in (1, 2)]
    assert_same(*(result.model for result in results))
