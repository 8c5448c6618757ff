"""A model on several devices of a replica: the same numbers, and each operation where its weights are."""

import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import callbacks
import loop
from loop import UsageError, backends, fit
from loop.backends import devices
from loop.commands.evaluate import evaluate
from tests.conftest import ROOT, needs_horovod, tfloop
from tests.exactness import largest_difference
from tests.tasks import Spread, Unweighted


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    devices.own_several("single", None)


class Legacy(Spread):
    """The same in tf_keras."""

    family = tf_keras


class WithBatchNorm(Spread):
    """Its statistics are on the second device, and change with each micro-batch."""

    def build_model(self):
        with tf.device(loop.device(1)):
            norm = keras.layers.BatchNormalization()
            norm.build((None, 5))
        return keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(1)])


class Net(tf.Module):
    """A plain module, which places what it computes itself."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(0)
        self.first = tf.Variable(random.normal(size=(5, 4)).astype("float32"))
        with tf.device(loop.device(1)):
            self.second = tf.Variable(random.normal(size=(4, 1)).astype("float32"))

    def __call__(self, inputs, training=False):
        hidden = tf.nn.tanh(inputs @ self.first)
        with tf.device(loop.device(1)):
            return hidden @ self.second


class Module(Unweighted):
    """Trains it."""

    def build_model(self):
        return Net()

    def build_optimizer(self):
        return keras.optimizers.Adam(0.05)


def trained(kind, per_replica, quiet, **options):
    backend = backends.create("single", devices_per_replica=per_replica)
    options = {"epochs": 2, "batch_size": 20, "callbacks": quiet(checkpoint=None, journal=None), **options}
    return fit(kind(), backend=backend, **options)


OPTIONS = ({}, {"ema": 0.9, "clip_norm": 0.1, "precision": "mixed_float16"}, {"remat": "full"})


@pytest.mark.parametrize(
    ("kind", "options"), [(Module, {}), *itertools.product([Spread, Legacy, WithBatchNorm], OPTIONS)], ids=str
)
def test_same_bits_as_on_one_device(kind, options, quiet):
    evaluated = "never" if "remat" in options else "epoch"  # of which evaluations know nothing
    one, two = (trained(kind, count, quiet, eval_every=evaluated, **options) for count in (1, 2))
    assert (two.weights_sha256, two.metrics) == (one.weights_sha256, one.metrics)


@pytest.mark.parametrize(("kind", "precision", "bound"), [(Spread, "float32", 5e-6), (WithBatchNorm, "float64", 1e-12)])
def test_overlapping_micro_batches_change_nothing_but_rounding(kind, precision, bound, quiet):
    options = {"accumulate": 7, "precision": precision, "eval_every": "never"}
    one, two = (trained(kind, count, quiet, **options) for count in (1, 2))
    weights = ([variable.numpy() for variable in result.model.trainable_variables] for result in (one, two))
    assert largest_difference(*weights) <= bound


class Looks(callbacks.Callback):
    """Notes on which device each operation of the step is, and each variable."""

    def on_epoch_end(self, run, metrics):
        graph = run.step.graph(run.data.iterator).as_graph_def()
        nodes = [node for function in graph.library.function for node in function.node_def]
        self.nodes = {(node.op, node.name): node.device.rpartition("device:")[2] for node in nodes}
        self.slots = {variable.path: variable.value.device[-5:] for variable in run.optimizer.variables}
        weights = run.model.trainable_variables
        self.averages = {
            weight.path: average.device[-5:]
            for weight, average in zip(weights, run.step.averages.variables, strict=True)
        }


@pytest.mark.parametrize("accumulate", [1, 7])
def test_weights_gradients_and_the_optimizer_are_on_one_device(accumulate, quiet):
    looks = Looks()
    backend = backends.create("single", devices_per_replica=2)
    quiet_ones = quiet(checkpoint=None, journal=None)
    options = {"batch_size": 20, "accumulate": accumulate, "ema": 0.9, "eval_every": "never"}
    fit(Spread(), backend=backend, callbacks=quiet_ones + [looks], **options)
    seen = set()
    for (kind, name), device in looks.nodes.items():
        if kind in ("MatMul", "ReluGrad", "BiasAddGrad", "Rsqrt", "RsqrtGrad"):
            layer = next(layer for layer in ("first", "second", "norm", "last") if f"/{layer}" in name)
            assert device == ("CPU:1" if layer in ("second", "norm") else "CPU:0"), (kind, name)
            seen.add((kind, layer, name.startswith("gradient_tape")))
    assert {("MatMul", layer, back) for layer in ("first", "second", "last") for back in (False, True)} <= seen
    assert ("RsqrtGrad", "norm", True) in seen
    for names in (looks.slots, looks.averages):
        for name, device in names.items():
            assert device == ("CPU:1" if "second" in name or "norm" in name else "CPU:0"), name


def test_a_checkpoint_goes_on_and_is_evaluated_on_one_device(quiet, tmp_path):
    whole = trained(Spread, 1, quiet, epochs=3, eval_every="never")
    for epochs, count in ((1, 2), (2, 1), (3, 2)):
        found = trained(Spread, count, quiet, epochs=epochs, run_dir=tmp_path / "run", callbacks=quiet())
    assert found.weights_sha256 == whole.weights_sha256
    devices.own_several("single", None)
    metrics = evaluate(Spread(), tmp_path / "run")
    assert metrics["eval_loss"] == pytest.approx(found.metrics["eval_loss"], rel=1e-6)


def test_where_a_replica_owns_one_device_all_is_there():
    assert loop.device(0) == loop.device(7) == ""
    backends.create("single", devices_per_replica=2)
    assert [loop.device(0), loop.device(1)] == ["CPU:0", "CPU:1"]


def test_what_cannot_be_is_refused():
    for wrong in (0, -1, 2.0, "2"):
        with pytest.raises(UsageError, match=f"devices_per_replica={wrong!r}: give a whole number >= 1"):
            backends.create("single", devices_per_replica=wrong)
    with pytest.raises(
        UsageError, match="backend='mirrored', which places variables itself: use 'single' or 'horovod'"
    ):
        backends.create("mirrored", 2, devices_per_replica=2)
    with pytest.raises(
        UsageError, match="a replica on 9 devices, but TensorFlow has already started with 4 logical CPU"
    ):
        backends.create("single", devices_per_replica=9)
    backends.create("single", devices_per_replica=2)
    for index in (2, -1):
        with pytest.raises(UsageError, match=rf"loop.device\({index}\): a replica owns 2 devices, from 0 on"):
            loop.device(index)


@needs_horovod
def test_on_the_command_line_with_two_workers(tmp_path):
    (tmp_path / "mine.py").write_text("from tests import tasks\n\n\nclass Mine(tasks.Spread):\n    pass\n")
    hashes = []
    for more in ([], ["--devices-per-replica", 2]):
        options = ["--backend", "horovod", "--workers", 2, "--steps", 4, "--track", "off", "--json"]
        options += ["--eval-every", "never"]
        ended = tfloop(
            "train", "mine.py:Mine", *options, *more, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert ended.returncode == 0, ended.stderr
        hashes.append(ended.stdout.partition('"weights_sha256": "')[2][:64])
    assert hashes[0]
    assert hashes[0] == hashes[1]
