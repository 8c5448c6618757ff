"""Embeddings as in Keras's `fit`, whose optimizers square each lookup's gradient: on any number of replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from loop import ArrayData, KerasTask, fit
from loop.backends import create
from loop.data import open_data
from loop.options import with_defaults
from loop.step.build import build
from loop.step.gradients import each_row_once
from loop.step.lookups import GATHERED, GATHERED_ROWS
from loop.step.plan import make_plan
from tests.exactness import Prime, regression
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


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_model_may_have_nothing_but_tables(replicas, engines, quiet):  # noqa: F811
    def make():
        model = keras.Sequential([keras.layers.Embedding(8, 1), keras.layers.GlobalAveragePooling1D()])
        return compiled(model, "rmsprop", loss="mse")

    witness, _ = by_fit(make, (WORDS, LABELS), epochs=2)
    task = KerasTask.from_compiled(make, (WORDS, LABELS))
    assert_same(by_task(task, quiet, engines[replicas], epochs=2).model, witness)


def plan_of(task, backend, replicas, **given):
    engine = create(backend, replicas)
    options = with_defaults(task, {"batch_size": 20} | given)
    data = open_data(task, options)
    sharded = options["shard_optimizer"]
    return make_plan(build(task, engine, "float32", data.train.example, sharded=sharded), engine, data, options, False)


@pytest.mark.parametrize(
    ("backend", "replicas", "given", "gathered"),
    [
        ("mirrored", 2, {}, True),
        ("mirrored", 3, {"clip_norm": 1.0}, True),
        ("mirrored", 2, {"batch_size": 400}, False),  # 5 lookups for each of 400 examples: as much as the table
        ("mirrored", 2, {"accumulate": 2}, False),
        ("mirrored", 2, {"compression": "fp16"}, False),
        ("mirrored", 2, {"compile": "xla"}, False),
        ("central", 2, {}, False),
        ("mirrored", 1, {}, False),
    ],
)
def test_rows_of_a_large_table_are_gathered_where_that_is_less(backend, replicas, given, gathered):
    """That the weights are the same is shown by the case `table` of test_same_numbers.py, on each engine."""
    plan = plan_of(Prime(table=True), backend, replicas, **given)
    assert plan.lookups == ({0: GATHERED} if gathered else {})


class Plain(Prime):
    """As `Prime`, with an optimizer that leaves rows alone whose gradient is 0."""

    optimizer = keras.optimizers.SGD

    def build_optimizer(self):
        return self.optimizer(0.5)


class Dense(Plain):
    """The same, with a class of its own, which may change any row: it gets dense gradients."""

    class optimizer(keras.optimizers.SGD):
        pass


class Streamed:
    def train_data(self):
        return tf.data.Dataset.from_tensor_slices(super().train_data().arrays).repeat(2)


class StreamedPlain(Streamed, Plain):
    pass


class StreamedDense(Streamed, Dense):
    pass


@pytest.mark.parametrize(
    ("task", "given", "kind"),
    [
        (Plain, {}, GATHERED_ROWS),
        (StreamedPlain, {}, GATHERED_ROWS),
        (Dense, {}, GATHERED),
        (Prime, {}, GATHERED),
        (Plain, {"clip_norm": 1.0}, GATHERED),
        (Plain, {"shard_optimizer": True}, GATHERED),
    ],
)
def test_gathered_rows_stay_rows_where_an_optimizer_changes_no_other_row(task, given, kind):
    assert plan_of(task(table=True), "mirrored", 2, **given).lookups == {0: kind}


@pytest.mark.parametrize(
    ("rows", "dense", "given"),
    [
        (Plain, Dense, {}),
        (Plain, Dense, {"ema": 0.9}),
        (Plain, Dense, {"groups": 2}),
        (StreamedPlain, StreamedDense, {}),
    ],
    ids=str,
)
def test_they_give_the_same_bits_as_a_dense_gradient(rows, dense, given, engines, quiet):  # noqa: F811
    results = []
    for task in (rows(table=True), dense(table=True)):
        results.append(fit(task, epochs=2, batch_size=20, backend=engines[3], callbacks=quiet(), **given))
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].history == results[1].history


def test_and_skip_the_same_steps(engines, quiet):  # noqa: F811
    results = []
    for task in (Plain, Dense):

        class Bad(task):
            def train_data(self):
                inputs, labels, weights = regression(101)
                labels[30], weights[30] = np.inf, 1
                return ArrayData(inputs, labels, weights)

        options = {"epochs": 2, "batch_size": 20, "on_nonfinite": "skip"}
        results.append(fit(Bad(table=True), backend=engines[2], callbacks=quiet(), **options))
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].history == results[1].history
    assert [row["skipped_steps"] for row in results[0].history] == [1, 1]


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64", "complex64"]),
    lookups=st.integers(0, 3000),
    words=st.integers(1, 3000),
    row=st.sampled_from([[], [1], [7], [2, 3]]),
    seed=st.integers(0, 1 << 16),
)
def test_a_row_that_comes_several_times_has_the_bits_of_a_dense_gradient(dtype, lookups, words, row, seed):
    random = np.random.default_rng(seed)
    # Of very different sizes: another order of the additions would show in the last bits.
    values = random.normal(size=[lookups, *row]) * np.exp(2 * random.normal(size=[lookups, *row]))
    indices = random.integers(0, words, lookups)
    gradient = tf.IndexedSlices(tf.cast(values, dtype), tf.constant(indices), tf.constant([words, *row]))
    once = each_row_once(gradient)
    assert sorted(once.indices.numpy()) == np.unique(indices).tolist()
    np.testing.assert_array_equal(tf.gather(tf.convert_to_tensor(gradient), once.indices), once.values)
