"""Trains small tasks with a sharded optimizer, and without: both must come to the same bits, on any engine."""

import json
from dataclasses import dataclass

import keras
import numpy as np
import tf_keras

import callbacks
from loop import ArrayData, KerasTask, fit
from tests.tasks import Affine, Legacy, TwoRates, Unweighted, Weighted

OPTIMIZERS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {}, "AdamW": {"weight_decay": 0.01}, "Adamax": {}, "Ftrl": {}, "Lion": {},
    "Nadam": {}, "RMSprop": {"momentum": 0.9, "centered": True}, "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip
"""Each optimizer that can be sharded, with what it adds to a learning rate."""


@dataclass
class Chosen(Weighted):
    """Layers of 20, 4, 4 and 1 elements, of which no two or three replicas have slices of one size; any optimizer."""

    optimizer: str = "Adam"

    def build_optimizer(self):
        return getattr(keras.optimizers, self.optimizer)(0.01, **OPTIMIZERS[self.optimizer])


@dataclass
class ChosenLegacy(Legacy):
    """The same in tf_keras."""

    optimizer: str = "Adam"

    def build_optimizer(self):
        return getattr(tf_keras.optimizers, self.optimizer)(0.01, **OPTIMIZERS[self.optimizer])


class Bounded(Unweighted):
    """Its weights are constrained, which looks at whole columns."""

    def build_model(self):
        bound = keras.constraints.MaxNorm(0.5)
        layers = [keras.layers.Dense(4, "tanh", kernel_constraint=bound), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((5,)), *layers])

    def build_optimizer(self):
        return keras.optimizers.Adam(0.05)


class WithoutDecay(Unweighted):
    """Its biases don't decay."""

    def build_optimizer(self):
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.3)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer


class Module(Unweighted):
    """A plain tf.Module, whose bias is a scalar."""

    def build_model(self):
        return Affine()

    def build_optimizer(self):
        return keras.optimizers.Adam(0.05)


def words():
    """A Keras model with an embedding, whose rows come twice in a batch, as a task; Adam squares each of them."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 7, (101, 6)).astype("int32")
    labels = random.normal(size=(101, 1)).astype("float32")

    def build():
        layers = [keras.layers.Embedding(7, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])

    return KerasTask(build, lambda: keras.optimizers.Adam(0.05), "mse", ArrayData(tokens, labels))


ALL = {"ema": 0.9, "accumulate": 2, "clip_norm": 0.1}
"""Options that look at the reduced gradient, or at the new weights."""

CASES = {
    "adam": (Chosen, {}),
    "all": (Chosen, ALL),
    "float64": (Chosen, {"precision": "float64", "clip_value": 0.01, "groups": 2}),
    "mixed_float16": (Chosen, {"precision": "mixed_float16", "on_nonfinite": "skip", "ema": 0.5}),
    "two optimizers": (TwoRates, {"ema": 0.9}),
    "tf_keras": (ChosenLegacy, ALL),
    "module": (Module, {}),
    "constraint": (Bounded, {"ema": 0.9}),
    "excluded": (WithoutDecay, {}),
    "lookups": (words, {}),
    "xla": (Chosen, {"compile": "xla"}),
}
"""Tasks, and options of `fit`."""


def trained(backend, task, options, sharded, **settings):
    """The result of `fit`."""
    quiet = callbacks.standard(mlflow=None, progress=None, checkpoint=None, journal=None)
    # Evaluation is of the averages, whatever the task; without them, it is of the weights, which each replica has as a
    # whole.
    evaluated = "epoch" if options is ALL else "never"
    settings = {"epochs": 2, "batch_size": 20, "eval_every": evaluated, "callbacks": quiet, **options, **settings}
    return fit(task(), backend=backend, shard_optimizer=sharded, **settings)


def differences(backend, task, options):
    """What differs between a sharded and an unsharded run: nothing should."""
    plain = trained(backend, task, options, False)
    sharded = trained(backend, task, options, True)
    found = [name for name, value in plain.metrics.items() if sharded.metrics[name] != value]
    return found + ["weights"] * (sharded.weights_sha256 != plain.weights_sha256)


IN_WORKERS = ("all",)
"""The cases that real workers train. Lookups they train in `tests.exactness`."""


def compare_all(backend, out):
    """Compares sharded with unsharded runs on a backend; the chief writes what differs, by case."""
    found = {name: differences(backend, *CASES[name]) for name in IN_WORKERS}
    if backend.is_chief:
        (out / "sharded.json").write_text(json.dumps(found))
