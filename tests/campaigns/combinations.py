"""Random combinations of options and features: the same numbers on 1, 2 and 3 replicas, the same bits after a resume.

`python -m tests.campaigns.combinations [COUNT] [FIRST]` draws combination FIRST, FIRST + 1, ... until COUNT have
trained (200 from 0). Each is trained whole on 1, 2 and 3 replicas, and once more in two parts, on one of the three. A
combination that tfloop refuses in a line doesn't count. 200 take about an hour on two cores.
"""

import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import callbacks
from callbacks import Callback
from loop import ArrayData, TrainTask, fit
from loop.backends import create
from loop.errors import UsageError

BOUND = 1e-9
"""In float64: rounding of sums in another order, over a few dozen steps."""
BOUND_FLOAT32 = 1e-5
"""Where float32 state lies within: metrics' means, XLA's own choices, or a layer that computes in float32."""

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.005, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 30)),
}


@dataclass
class Combination(TrainTask):
    """A task with the features that a combination has drawn."""

    optimizer: str = "sgd"
    two_optimizers: bool = False
    stream: bool = False
    weights: bool = False
    tokens: bool = False
    batch_norm: bool = False
    dropout: float = 0.0
    penalty: bool = False
    own_step: bool = False
    embedding: bool = False
    examples: int = 101
    width: int = field(default=5, repr=False)

    def build_model(self):
        shape = (4, self.width) if self.tokens else (self.width,)
        inputs = keras.Input((4,) if self.embedding and self.tokens else (1,) if self.embedding else shape)
        x = inputs
        if self.embedding:
            x = keras.layers.Embedding(11, self.width)(x)
            x = x if self.tokens else keras.layers.Flatten()(x)
        regularizer = keras.regularizers.L2(1e-2) if self.penalty else None
        x = keras.layers.Dense(4, "tanh", kernel_regularizer=regularizer, name="body")(x)
        if self.batch_norm:
            x = keras.layers.BatchNormalization(momentum=0.8)(x)
        if self.dropout:
            x = keras.layers.Dropout(self.dropout)(x)
        return keras.Model(inputs, keras.layers.Dense(1, name="head")(x))

    def build_optimizer(self):
        make = OPTIMIZERS[self.optimizer]
        return {"first": make(), "second": keras.optimizers.SGD(0.01)} if self.two_optimizers else make()

    def optimizer_variables(self, model, names):
        variables = model.trainable_variables
        return {"first": variables[:1], "second": variables[1:]}

    def _arrays(self, examples, seed):
        draw = np.random.default_rng(seed)
        shape = (examples, 4) if self.tokens else (examples,)
        if self.embedding:
            inputs = draw.integers(0, 11, shape if self.tokens else (examples, 1))
            labels = np.sin(inputs.reshape(shape).astype("float64"))
        else:
            inputs = draw.normal(size=(*shape, self.width))
            labels = np.tanh(inputs.sum(-1))
        weights = draw.integers(0, 4, shape).astype("float64")
        return inputs, labels, weights

    def _data(self, examples, seed):
        arrays = self._arrays(examples, seed)
        return tf.data.Dataset.from_tensor_slices(arrays) if self.stream else ArrayData(*arrays)

    def train_data(self):
        return self._data(self.examples, 0)

    def eval_data(self):
        return self._data(23, 1)

    def compute(self, model, batch, training):
        inputs, labels, weights = batch
        outputs = model(inputs, training=training)[..., 0]
        values = {"loss": (outputs - tf.cast(labels, outputs.dtype)) ** 2, "size": tf.abs(outputs)}
        if self.weights:
            values["weight"] = tf.cast(weights, outputs.dtype)
        return values

    def train_step(self, model, step):
        if self.own_step:
            step.minimize(lambda batch: self.compute(model, batch, True), "first" if self.two_optimizers else "")
        step.minimize(
            lambda batch: self.compute(model, batch, True), "second" if self.two_optimizers and self.own_step else ""
        )


class WholeStep(Combination):
    """The same with the `train_step` that a task has when it defines none."""

    train_step = TrainTask.train_step


class StopAt(Callback):
    """Ends the run after a step, as a user's callback would."""

    runs_on = "all"

    def __init__(self, step):
        self.step = step
        self.every = 1

    def on_steps_end(self, run, metrics):
        if run.progress.step == self.step:
            run.save("the first part ends")
            run.stop("the first part ends")


def draw(number):
    """The fields and options of a combination: the same for the same number."""
    pick = random.Random(number)
    some = pick.random
    fields = {
        "optimizer": pick.choice(sorted(OPTIMIZERS)),
        "two_optimizers": some() < 0.2,
        "stream": some() < 0.3,
        "weights": some() < 0.5,
        "tokens": some() < 0.3,
        "batch_norm": some() < 0.3,
        "dropout": 0.3 if some() < 0.3 else 0.0,
        "penalty": some() < 0.5,
        "own_step": some() < 0.15,
        "embedding": some() < 0.2,
        "examples": pick.choice([7, 40, 64, 101]),
    }
    options = {
        "batch_size": pick.choice([1, 3, 8, 20, 64]),
        "epochs": pick.choice([1, 2, 3]),
        "seed": pick.randrange(1000),
        "shuffle": some() < 0.7,
        "accumulate": pick.choice([1, 1, 1, 2, 3]),
        "drop_remainder": some() < 0.2,
        "compile": "xla" if some() < 0.15 else "graph",
        "steps_per_call": pick.choice(["auto", "auto", 1, 3, 50]),
        "eval_every": pick.choice(["epoch", "never", 5]),
        "precision": "float64",
    }
    if some() < 0.3:
        options["clip_norm"] = pick.choice([0.02, 0.5, 10.0])
    elif some() < 0.15:
        options["clip_value"] = 0.01
    if some() < 0.25:
        options["ema"] = 0.9
    if some() < 0.15:
        options["on_nonfinite"] = "skip"
    if some() < 0.2:
        options["groups"] = pick.choice([2, 3])
    if options["batch_size"] == 1:
        fields["examples"] = min(fields["examples"], 40)
    return fields, options, pick.choice([1, 2, 3]), some()


def trained(fields, options, replicas, directory, *more):
    """The weights of a run, as a list of arrays, and its metrics."""
    kind = Combination if fields["own_step"] else WholeStep
    chosen = callbacks.standard(mlflow=None, progress=None)
    chosen += list(more)
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    result = fit(kind(**fields), backend=backend, run_dir=directory, callbacks=chosen, **options)
    return result, [np.asarray(each) for each in result.model.get_weights()]


def difference(one, other):
    """The largest difference of two lists of weights, relative to numbers greater than 1."""
    pairs = zip(one, other, strict=True)
    return max(float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(a)), initial=0.0)) for a, b in pairs)


def compare(number, directory):
    """Trains a combination in all ways.

    Returns:
        What is wrong with it, or ""; and its largest difference between replicas.

    Raises:
        UsageError: tfloop refuses it.
    """
    fields, options, replicas, where = draw(number)
    runs = {}
    for count in (1, 2, 3):
        runs[count] = trained(fields, options, count, directory / f"whole-{count}")
    whole = runs[1]
    differences = [difference(whole[1], runs[count][1]) for count in (2, 3)]
    bound = BOUND_FLOAT32 if options["compile"] == "xla" else BOUND
    wrong = [f"{max(differences):.1e} > {bound:.0e}"] if max(differences) > bound else []
    for count in (2, 3):
        for name, value in whole[0].metrics.items():
            other = runs[count][0].metrics[name]
            if not np.isclose(value, other, rtol=1e-5, atol=1e-7, equal_nan=True):
                wrong.append(f"{name}: {value} on 1, {other} on {count} replicas")
    steps = runs[replicas][0].steps
    if steps > 1:
        at = 1 + int(where * (steps - 1))
        trained(fields, options, replicas, directory / "parts", StopAt(at))
        result, _ = trained(fields, options, replicas, directory / "parts")
        if result.weights_sha256 != runs[replicas][0].weights_sha256:
            wrong.append(f"resumed at step {at} of {steps} on {replicas} replicas: other bits")
    return "; ".join(wrong), max(differences)


def main(count=200, first=0):
    """Prints what is wrong; gives how many combinations are."""
    done, failed, refused, number, begun = 0, 0, {}, first, time.monotonic()
    worst = 0.0
    while done < count:
        with tempfile.TemporaryDirectory(prefix="tfloop-combinations-") as directory:
            try:
                wrong, largest = compare(number, Path(directory))
            except UsageError as error:
                key = str(error)[:100]
                refused[key] = refused.get(key, 0) + 1
            except Exception as error:
                wrong, largest = f"{type(error).__name__}: {str(error)[:300]}", 0.0
                done += 1
                failed += 1
                print(f"{number}: {wrong}\n   {draw(number)}", flush=True)
            else:
                done += 1
                worst = max(worst, largest)
                if wrong:
                    failed += 1
                    print(f"{number}: {wrong}\n   {draw(number)}", flush=True)
        keras.backend.clear_session()
        number += 1
        if number % 10 == 0:
            print(f"... {done} done, {failed} failed, {time.monotonic() - begun:.0f} s", flush=True)
    for text, times in refused.items():
        print(f"refused {times} times: {text}")
    print(f"{done} combinations, {failed} failed; largest difference between replicas {worst:.1e}")
    return failed


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
    )
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
