"""Embedding layers read the rows that a batch looks up, and give the same bits as Keras's own."""

import copy
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from loop import ArrayData, TrainTask, fit
from loop.backends import create
from loop.data import open_data
from loop.options import with_defaults
from loop.step import train_step
from loop.step.build import build
from loop.step.train_step import TrainStep
from tests.products import pairs

WORDS = np.random.default_rng(0).integers(-50, 50, (60, 4))  # an index below 0 counts from the end of the table
LABELS = np.random.default_rng(1).integers(0, 3, 60).astype("int32")


class Own(keras.layers.Embedding):
    """Computes something else from the table."""

    def call(self, inputs):
        return 2 * super().call(inputs)


class Words(TrainTask):
    """A classifier of words with two tables, one of which is looked up twice."""

    def __init__(self, optimizer=lambda: keras.optimizers.SGD(0.5), table=keras.layers.Embedding, words=WORDS):
        self.optimizer, self.table, self.words = optimizer, table, words

    def build_model(self):
        inputs = keras.Input((4,), dtype=str(self.words.dtype))
        table = self.table(50, 8)
        hidden = table(inputs) + keras.layers.Embedding(50, 8)(inputs) * table(inputs[:, ::-1])
        return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(hidden)))

    def build_optimizer(self):
        return self.optimizer()

    def train_data(self):
        return ArrayData(self.words, LABELS)

    def eval_data(self):
        return self.train_data()

    def compute(self, model, batch, training):
        logits = tf.cast(model(batch[0], training=training), tf.float32)
        return {"loss": keras.losses.sparse_categorical_crossentropy(batch[1], logits, from_logits=True)}


def reads_of_tables(task):
    """The types of the operations that read the tables of the task's model in a compiled step."""
    backend = create("single")
    options = with_defaults(task, {"backend": "single", "batch_size": 20})
    data = open_data(task, options)
    built = build(task, backend, "float32", data.train.example)
    step = TrainStep(task, built, backend, data, options)
    numbers = [tf.constant(number, tf.int64) for number in (0, 0, 1)]
    program = step._train.get_concrete_function(data.train.start(0, 0), *numbers).graph
    types = []
    for function in program.as_graph_def().library.function:
        for node in function.node_def:
            if node.op in ("ReadVariableOp", "ResourceGather") and re.search("(embedding|own)[_0-9]*/", node.name):
                types.append(node.op)
    return types


def test_a_step_reads_no_table_as_a_whole():
    """TensorFlow copies a table at each such read, once an optimizer updates its rows in place."""
    assert reads_of_tables(Words()) == ["ResourceGather"] * 3


def test_nor_does_a_class_of_the_users_own_that_asks_keras_for_the_rows():
    assert reads_of_tables(Words(table=Own)) == ["ResourceGather"] * 3


OPTIONS = {}, {"precision": "bfloat16"}, {"accumulate": 2}, {"compile": "xla"}, {"clip_norm": 0.01}


@pytest.mark.parametrize(("optimizer", "options", "replicas"), pairs(["sgd", "adam"], OPTIONS, [1, 2]), ids=str)
def test_the_bits_are_those_of_the_layer_itself(optimizer, options, replicas, quiet, monkeypatch):
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    task = Words({"sgd": lambda: keras.optimizers.SGD(0.5), "adam": lambda: keras.optimizers.Adam(0.1)}[optimizer])
    evaluated = "never" if options else "epoch"  # the options change the training alone
    options = {"epochs": 2, "batch_size": 20, "eval_every": evaluated, "backend": backend} | options
    by_rows = fit(task, callbacks=quiet(), **options)
    monkeypatch.setattr(train_step, "replace_lookup", lambda: None)
    monkeypatch.setattr(keras.layers.Embedding, "call", keras.layers.Embedding.call.replaces)
    by_table = fit(task, callbacks=quiet(), **options)
    assert by_rows.weights_sha256 == by_table.weights_sha256
    assert by_rows.history == by_table.history


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_words_of_any_number_type(dtype, quiet):
    words = (WORDS + 50).astype(dtype)
    found = fit(Words(words=words // 2), epochs=1, batch_size=20, callbacks=quiet())
    as_integers = fit(Words(words=words.astype("int64") // 2), epochs=1, batch_size=20, callbacks=quiet())
    assert found.weights_sha256 == as_integers.weights_sha256


def test_low_rank_adaptation_computes_its_table(quiet):
    class Adapted(Words):
        def build_model(self):
            model = super().build_model()
            for layer in model.layers:
                if isinstance(layer, keras.layers.Embedding):
                    layer.enable_lora(2)
            return model

    found = fit(Adapted(), epochs=1, batch_size=20, callbacks=quiet())
    changed = [variable.path for variable in found.model.trainable_variables if np.any(variable.numpy())]
    assert any("lora_embeddings_b" in path for path in changed)


def test_the_trained_model_is_saved_copied_and_called_as_before(quiet, tmp_path):
    model = fit(Words(), epochs=1, batch_size=20, callbacks=quiet()).model
    expected = model(WORDS).numpy()

    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(WORDS).numpy(), expected)

    # A copy looks up in its own table, not in that of the model it was made from.
    other = copy.deepcopy(model)
    for variable in model.variables:
        variable.assign(tf.zeros_like(variable))
    np.testing.assert_array_equal(other(WORDS).numpy(), expected)
