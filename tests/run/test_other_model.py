"""Checkpoints of versions that took a weight which layers share for several ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from loop import ArrayData, TrainTask, UsageError, evaluate, fit
from loop.model import variables

INPUTS = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")


class Shared(tf.Module):
    def __init__(self):
        super().__init__()
        inputs = keras.Input((3,))
        code = keras.layers.Dense(2)(inputs)
        self.encoder = keras.Model(inputs, code)
        self.whole = keras.Model(inputs, keras.layers.Dense(1)(code))


class Task(TrainTask):
    def build_model(self):
        return Shared()

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)

    def train_data(self):
        return ArrayData(INPUTS)

    eval_data = train_data

    def compute(self, model, batch, training):
        return {"loss": tf.square(model.whole(batch, training=training)[:, 0] - 1)}


def test_shared_weights_of_an_earlier_version(quiet, tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(variables, "_unique", list)
        before = fit(Task(), run_dir=tmp_path, callbacks=quiet())
    with pytest.raises(
        UsageError, match=r"has 6 model .* builds 4: it is of a version .* or start a new run in another"
    ):
        fit(Task(), epochs=2, run_dir=tmp_path, callbacks=quiet())
    assert evaluate(Task(), tmp_path)["eval_loss"] == pytest.approx(before.metrics["eval_loss"])


class Towers(Task):
    """Two layers of one shape, with names of their own."""

    names = ("left", "right")

    def build_model(self):
        inputs = keras.Input((3,))
        left, right = (keras.layers.Dense(1, name=name)(inputs) for name in self.names)
        return keras.Model(inputs, left - right)

    def compute(self, model, batch, training):
        return {"loss": tf.square(model(batch, training=training)[:, 0] - 1)}


def test_layers_in_another_order_are_refused(quiet, tmp_path):
    """Each had the weights of the other, without a word."""
    task = Towers()
    fit(task, run_dir=tmp_path, callbacks=quiet())
    task.names = ("right", "left")
    refused = "builds the variable right/kernel where the checkpoint has left/kernel"
    with pytest.raises(UsageError, match=refused):
        fit(task, epochs=2, run_dir=tmp_path, callbacks=quiet())
    with pytest.raises(UsageError, match=refused):
        evaluate(task, tmp_path)
    task.names = ("one", "two")  # as another process may number them
    assert fit(task, epochs=2, run_dir=tmp_path, callbacks=quiet()).steps == 2


class Growing(Task):
    """Its model has a variable whose size is open."""

    def build_model(self):
        model = super().build_model()
        model.seen = tf.Variable(tf.zeros([2]), shape=[None], trainable=False)
        return model


def test_a_variable_of_open_size_goes_on(quiet, tmp_path):
    assert fit(Growing(), epochs=1, run_dir=tmp_path / "run", callbacks=quiet()).steps == 1
    assert fit(Growing(), epochs=2, run_dir=tmp_path / "run", callbacks=quiet()).steps == 2
