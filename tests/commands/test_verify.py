"""`tfloop verify`: good tasks pass, and each planted mistake is found and named."""

import contextlib
import json
import os
import re
import signal
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
import tf_keras

import loop
from loop import ArrayData, TrainTask, UsageError
from loop.commands.verify import lines, verify
from loop.target import task_loader
from tests.conftest import TFLOOP, needs_horovod, tfloop
from tests.step.test_optimizers import Adversarial
from tests.tasks import Conv, Plain, Unweighted, Weighted, regression


class Trained(Unweighted):
    """Gradients and weights show what most tests look for, so that no evaluation has to be compiled."""

    eval_data = TrainTask.eval_data


class Dropped(Conv):
    """Convolution, BatchNorm, dropout, Adam: what most models have; and a metric that isn't a mean."""

    defaults = {"batch_size": 8}

    def eval_data(self):
        return self.train_data()

    def build_metrics(self):
        return {"top": keras.metrics.SparseTopKCategoricalAccuracy(k=2)}

    def compute(self, model, batch, training):
        images, labels = batch
        logits = model(images, training=training)
        return {
            "loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True),
            "top": (labels, logits),
        }


class Streaming(Unweighted):
    """A stream, a loss over the whole batch, and seeds of examples."""

    def train_data(self):
        return tf.data.Dataset.from_tensor_slices(regression(self.examples)[:2])

    eval_data = train_data

    def compute(self, model, batch, training):
        noise = tf.map_fn(
            lambda seed: tf.random.stateless_normal([5], seed, dtype=batch[0].dtype), loop.example_seed(),
            fn_output_signature=batch[0].dtype,
        )  # fmt: skip
        found = model(batch[0] + 0.1 * noise, training=training)
        mean = tf.reduce_mean(loop.all_gather(found))
        return {"loss": tf.reduce_sum((found - mean - batch[1]) ** 2, -1)}


class LegacyDropped(Unweighted):
    """tf_keras, with a dropout that is used twice."""

    def build_model(self):
        inputs = tf_keras.Input((5,))
        drop = tf_keras.layers.Dropout(0.4)
        hidden = tf_keras.layers.Dense(8)(inputs)
        both = tf_keras.layers.Concatenate()([drop(hidden), drop(hidden)])
        return tf_keras.Model(inputs, tf_keras.layers.Dense(1)(both))

    def build_optimizer(self):
        return tf_keras.optimizers.SGD(0.05)


class Recurrent(Trained):
    """An LSTM with both dropouts, over the five inputs as a sequence, and layers that are float32 within."""

    def build_model(self):
        return keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Reshape((5, 1)),
                keras.layers.GaussianNoise(0.1),
                keras.layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2),
                keras.layers.Dense(1),
            ]
        )

    def build_metrics(self):
        return {"squared": keras.metrics.MeanSquaredError()}

    def compute(self, model, batch, training):
        found = model(batch[0], training=training)
        return {"loss": tf.reduce_sum((found - batch[1]) ** 2, -1), "squared": (batch[1], found)}


class Texts(Trained):
    """Inputs as texts, which are other objects of Python each time that the data is made."""

    def train_data(self):
        inputs, labels, _ = regression(self.examples)
        texts = [" ".join(map(repr, row.tolist())) for row in inputs]
        return ArrayData(texts, labels)

    def compute(self, model, batch, training):
        numbers = tf.strings.to_number(tf.strings.split(batch[0]).to_tensor(shape=[None, 5]), batch[1].dtype)
        return super().compute(model, (numbers, batch[1]), training)


@pytest.mark.parametrize(
    ("task", "count"),
    [(Dropped, 3), (Streaming, 3), (Weighted, 3), (Adversarial, 2), (LegacyDropped, 2), (Recurrent, 2), (Texts, 2)],
)
def test_good_tasks_pass(task, count):
    """In batches of which the replicas have unequal shares."""
    report = verify(task(), batch_size=7, replicas=(count,))
    assert report.same, [line for line, _ in lines(report)]
    assert (report.steps, report.causes) == (6, [])
    assert (f"compared on {count} logical CPU devices", None) in lines(report)
    assert [(each.precision, each.engine, each.replicas) for each in report.comparisons] == [
        (precision, engine, replicas)
        for precision in ("float32", "float64")
        for engine, replicas in (("single", 1), ("mirrored", count))
    ]
    for each in report.comparisons:
        numbers = [value for value in each.differences.values() if not np.isnan(value)]
        assert len(numbers) >= 3
        if each.replicas == 1:  # the same again, to the bit
            assert set(numbers) == {0.0}


def test_what_computes_in_float32_only_is_judged_by_it():
    report = verify(Plain(), batch_size=8, replicas=(2,))  # a tf.Module with float32 variables
    assert report.same
    [wide] = [each for each in report.comparisons if each.precision == "float64"]
    assert re.match(
        r"not compared: the task has float32 written into it \(\w+\.py, line \d+\); what counts is the comparison in "
        "float32. To compare in float64, too, use the dtype of the batch",
        wide.note,
    ), wide.note


def test_a_task_that_casts_to_float32_is_told_where():
    class Cast(Trained):
        """Mixes what it casts with what comes as it is."""

        def compute(self, model, batch, training):
            rows, targets = batch
            found = tf.cast(model(rows, training=training), tf.float32)
            return {"loss": tf.reduce_sum((found - targets) ** 2, -1)}  # the line that is named

    report = verify(Cast(), batch_size=8, replicas=(2,))
    [wide] = [each for each in report.comparisons if each.precision == "float64"]
    number = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "the line that is" in line)
    assert f"has float32 written into it (test_verify.py, line {number});" in wide.note
    assert report.same


class MeanInside(Weighted):
    """Planted: the mean of the batch as every example's loss."""

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        return values | {"loss": tf.ones_like(values["loss"]) * tf.reduce_mean(values["loss"])}


class Sized(Trained):
    """Planted: divides by the number of rows."""

    def compute(self, model, batch, training):
        loss = super().compute(model, batch, training)["loss"]
        return {"loss": loss / tf.cast(tf.shape(loss)[0], loss.dtype)}


class Unsynchronized(Conv):
    """Planted: BatchNorm with statistics of each replica."""

    defaults = {"batch_size": 8, "sync_batch_norm": False}


@keras.saving.register_keras_serializable("tests")
class Centred(keras.layers.Layer):
    """Takes the mean of its batch away."""

    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, 0, keepdims=True)


class Dependent(Trained):
    """Planted: a layer that looks at the whole batch of its replica."""

    def build_model(self):
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4), Centred(name="centred"), keras.layers.Dense(1)]
        )


class Unseeded(Trained):
    """Planted: noise from an operation with state of its own."""

    def compute(self, model, batch, training):
        noise = tf.random.normal(tf.shape(batch[0]), dtype=batch[0].dtype)
        return super().compute(model, (batch[0] + noise, batch[1]), training)


class Counts(Trained):
    """Planted: a variable that the model doesn't have counts the steps."""

    def __init__(self):
        self.count = tf.Variable(1.0, dtype=tf.float64)

    def compute(self, model, batch, training):
        if training:
            self.count.assign_add(1.0)
        loss = super().compute(model, batch, training)["loss"]
        return {"loss": tf.cast(self.count, loss.dtype) * loss}


class HostRandom(Trained):
    """Planted: each call gives other data."""

    def train_data(self):
        inputs, labels = super().train_data().arrays
        return ArrayData(inputs + np.random.default_rng().normal(size=inputs.shape).astype("float32"), labels)


class Hardest(Trained):
    """Planted: only the harder half of a batch counts. Each example has the same loss in any batch."""

    def compute(self, model, batch, training):
        loss = super().compute(model, batch, training)["loss"]
        limit = tf.sort(loss)[tf.shape(loss)[0] // 2]
        return {"loss": loss, "weight": tf.cast(loss >= limit, loss.dtype)}


class Centres(Trained):
    """Planted: a centre that each replica moves by its own rows. The first step is the same, since it starts at 0."""

    def build_model(self):
        model = super().build_model()
        model.centre = model.add_weight(shape=(5,), initializer="zeros", trainable=False, name="centre")
        return model

    def compute(self, model, batch, training):
        found = super().compute(model, (batch[0] - model.centre, batch[1]), training)
        if training:
            model.centre.assign_add(0.1 * tf.reduce_sum(batch[0] ** 2, 0))
        return found


class Chosen(Trained):
    """Planted: categories that can't be drawn by row."""

    def build_model(self):
        model = super().build_model()
        model.seeds = keras.random.SeedGenerator(3)
        return model

    def compute(self, model, batch, training):
        drawn = keras.random.categorical(batch[0], 1, seed=model.seeds)
        return super().compute(model, (batch[0] + tf.cast(drawn, batch[0].dtype), batch[1]), training)


class Related(Trained):
    """Planted: a likelihood of the batch as a whole, whose parts depend on the order of its rows."""

    def compute(self, model, batch, training):
        loss = super().compute(model, batch, training)["loss"]
        near = tf.exp(-tf.reduce_sum((batch[0][:, None] - batch[0][None]) ** 2, -1))
        return {"loss": tf.linalg.matvec(tf.linalg.cholesky(near + tf.eye(tf.shape(near)[0], dtype=near.dtype)), loss)}


MISTAKES = {
    MeanInside: "a mean inside the loss: all examples of a batch have the same loss",
    Sized: "a loss that depends on the batch size",
    Unsynchronized: "an unsynchronized BatchNorm: batch_normalization",
    Dependent: "batch-dependent layers: what centred makes of an example",
    Unseeded: "random ops without our seeds: RandomStandardNormal",
    Counts: "state outside of the model: compute() changes Counts.count, which each worker has for itself",
    Chosen: "layers draw random numbers for each example by `categorical`, which can't be drawn by row: each of 2",
    Related: "the loss of an example depends on the other examples of its batch, of which each of 2 replicas has only",
    Hardest: "the loss of an example depends on the other examples of its batch, of which each of 2 replicas has only",
    Centres: "compute() changes sequential/centre by its rows, of which each of 2 replicas has only its own",
    HostRandom: r"host randomness in the data: train_data() gives other examples",
}


@pytest.mark.parametrize("task", MISTAKES)
def test_planted_mistakes_are_found_and_named(task):
    report = verify(task(), batch_size=7, replicas=(2,))
    assert not report.same
    assert not all(each.same for each in report.comparisons)  # the numbers themselves show it
    [cause] = report.causes
    assert cause.startswith(MISTAKES[task])
    # The first step of one of them is right, and float32 is judged by it alone: the table says so.
    table = "\n".join(line for line, _ in lines(report))
    assert ("same*\n" in table) == (task is Centres)
    assert ("\n* only the first step is judged in float32" in table) == (task is Centres)


def test_draws_with_a_fixed_seed_are_by_row_and_right():
    class Fixed(Trained):
        def compute(self, model, batch, training):
            noise = tf.random.stateless_normal(tf.shape(batch[0]), seed=[1, 2], dtype=batch[0].dtype)
            return super().compute(model, (batch[0] + noise, batch[1]), training)

    # The same on any number of replicas; but it belongs to a place in the batch, and says so.
    report = verify(Fixed(), batch_size=8, replicas=(3,))
    assert all(each.same for each in report.comparisons)


def test_a_mean_while_training_alone_is_found():
    class InTraining(Weighted):
        eval_data = TrainTask.eval_data

        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            mean = tf.ones_like(values["loss"]) * tf.reduce_mean(values["loss"])
            return values | ({"loss": mean} if training else {})

    [cause] = verify(InTraining(), batch_size=8, replicas=(2,)).causes
    assert cause.startswith("a mean inside the loss")


def test_a_mean_that_does_no_harm_yet_is_told_too():
    class Harmless(Trained):
        """Without weights, the sum of means times rows is the sum. One variable isn't trained."""

        def build_model(self):
            model = super().build_model()
            model.unused = model.add_weight(shape=(), name="unused")
            return model

        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return {"loss": tf.ones_like(values["loss"]) * tf.reduce_mean(values["loss"])}

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        report = verify(Harmless(), batch_size=8, replicas=(2,))
    [warning] = shown  # once, for all trainings
    assert "the loss doesn't depend on sequential/unused: not trained" in str(warning.message)
    assert all(each.same for each in report.comparisons)
    assert not report.same
    assert "by chance" in list(lines(report))[-1][0]


def test_processes_that_fail_are_no_difference_of_the_numbers():
    report = verify(Trained(), batch_size=8, replicas=(2,), job=lambda directory: "rank 1: planted", job_engine="x")
    assert (report.same, report.causes) == (False, [])
    texts = [text for text, _ in lines(report)]
    assert "rank 1: planted" in " ".join(texts)
    assert texts[-1] == "not all could be compared"


def test_a_precision_in_which_processes_alone_fail_is_told():
    report = verify(Trained(), batch_size=8, replicas=(2,), job=lambda directory: "", job_engine="x")
    notes = [comparison.note for comparison in report.comparisons if comparison.engine == "x"]
    assert notes == ["it fails there, but not on 1 replica"] * 2
    assert not report.same


def test_what_cannot_be_trained_at_all_is_said():
    @dataclass
    class Wrong(Unweighted):
        def compute(self, model, batch, training):
            return {"loss": tf.reduce_mean(super().compute(model, batch, training)["loss"])}

    with pytest.raises(UsageError, match='returned a scalar for "loss"'):
        verify(Wrong())


@needs_horovod
def test_command_with_real_processes(tmp_path):
    done = tfloop("verify", "digits", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["same"] is True
    engines = [(each["precision"], each["engine"], each["replicas"]) for each in report["comparisons"]]
    assert ("float32", "horovod", 2) in engines
    assert ("float64", "horovod", 2) in engines
    for each in report["comparisons"]:
        assert each["differences"]["weights"] <= (1e-5 if each["precision"] == "float32" else 1e-12)


TASK = '''
import keras, numpy as np
from loop import ArrayData, TrainTask
from loop.launch import environment

class Halved(TrainTask):
    """Its loss depends on the rank."""
    defaults = {"batch_size": 8}
    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, name="dense")])
    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)
    def train_data(self):
        return ArrayData(np.random.default_rng(0).normal(size=(24, 5)).astype("float32"))
    def compute(self, model, batch, training):
        return {"loss": model(batch, training=training)[:, 0] ** 2 * (2.0 if environment.job_rank() else 1.0)}
'''


@needs_horovod
def test_a_mistake_that_only_real_processes_show(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    done = tfloop("verify", "task.py:Halved", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "first: gradients/1/00000:sequential/dense/kernel" in done.stdout
    assert "why: the cause can't be told from outside" in done.stdout
    assert "or on the rank" in done.stdout
    assert "Traceback" not in done.stderr
    assert tfloop("verify", "nonsense", cwd=tmp_path).returncode == 2


def test_a_stop_among_real_processes_leaves_no_traceback_and_no_process(tmp_path):
    command = [*TFLOOP, "verify", "digits"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        while len(workers := workers_of(process)) < 2:
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (75, "")  # as of `tune` and `chaos`, whatever the signal
    assert "Traceback" not in err
    assert err.endswith("stopped: nothing is left behind\n")
    assert not psutil.wait_procs(workers, timeout=10)[1]


def workers_of(process, word="--record"):
    """The workers that it has started, with this word in their commands; imports start children too."""
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if word in child.cmdline():
                found.append(child)
    return found


def test_charlm_passes():
    small = ["layers=1", "width=16", "context=8", "characters=20000"]
    report = verify(task_loader.load("charlm", small), batch_size=8, replicas=(2,))
    assert [*lines(report)][-1] == ("the same numbers everywhere", True)
