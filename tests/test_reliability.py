"""Nothing lost: what a run does when it is stopped, when something fails, and when it goes on."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks import Callback, Checkpoint
from callbacks.run_record import journal, record
from loop import fit
from loop.backends import create
from loop.checkpoint import checkpoint_files, lock
from loop.checkpoint.lock import locked
from loop.commands import replay as replaying
from loop.errors import TrainingError, UsageError
from loop.launch.environment import LAUNCHER
from loop.monitor.watchdog import Watchdog
from loop.run import run_directory
from tests.products import singles
from tests.tasks import Alarm, Conv, Plain, Streamed, TwoRates, Unweighted, regression


class Killed(BaseException):
    """Ends a run with no more ado, as a kill does."""


class At(Callback):
    """Does something once, at a step."""

    runs_on = "all"

    def __init__(self, step, act):
        self.every, self.step, self.act = step, step, act

    def on_steps_end(self, run, metrics):
        if run.progress.step == self.step:
            self.act(run)


def kill(run):
    run.checkpointing.writer.wait()
    raise Killed


@contextlib.contextmanager
def dies():
    with pytest.raises(Killed):
        yield


# Streams


def stream(kind, directory, quiet, *more, replicas=1, **options):
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    saving = quiet(checkpoint=Checkpoint(every=4)) + list(more)
    options = {"epochs": 3, "batch_size": 20, **options}
    return fit(kind(), **options, backend=backend, callbacks=saving, run_dir=directory)


class Reshuffled(Streamed):
    """In another order each epoch, by a seed of its own."""

    def train_data(self):
        return tf.data.Dataset.from_tensor_slices(regression(self.examples)[:2]).shuffle(30, seed=5)


class Drawn(Streamed):
    """In an order that a generator draws from NumPy's global numbers."""

    def train_data(self):
        inputs, labels = regression(self.examples)[:2]

        def examples():
            for place in np.random.permutation(len(inputs)):
                yield inputs[place], labels[place]

        spec = tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32)
        return tf.data.Dataset.from_generator(examples, output_signature=spec)


class Generated(Streamed):
    """From a Python generator, whose position is unknown."""

    def train_data(self):
        inputs, labels = regression(self.examples)[:2]
        spec = tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32)
        return tf.data.Dataset.from_generator(lambda: zip(inputs, labels, strict=True), output_signature=spec)


def _varied(inputs, label):
    drawn = tf.numpy_function(lambda: np.float32(np.random.rand()), [], tf.float32)
    return inputs * tf.ensure_shape(drawn, []), label


class Varied(Streamed):
    """With a number for each example that a map draws from NumPy's global ones; so does that of the evaluations."""

    def train_data(self):
        return super().train_data().map(_varied)

    def eval_data(self):
        return super().eval_data().map(_varied)


@pytest.mark.parametrize(("kind", "saved"), [(Reshuffled, True), (Generated, False), (Drawn, False), (Varied, False)])
def test_stream_goes_on_from_its_iterators_state_or_counts_its_way_and_says_so(kind, saved, quiet, capfd):
    whole = stream(kind, "whole", quiet)
    said = capfd.readouterr().err
    assert ("position can't be saved (PyFunc is stateful)" in said) is not saved
    with dies():
        stream(kind, "killed", quiet, At(9, kill))
    path, manifest = run_directory.locate(run_directory.Path("killed"))
    assert manifest["step"] == 8
    assert any(name.startswith("stream/") for name in checkpoint_files.read(path, manifest)) is saved
    capfd.readouterr()
    resumed = stream(kind, "killed", quiet)
    assert ("reading up to where the run was" in capfd.readouterr().err) is not saved
    assert (resumed.weights_sha256, resumed.history) == (whole.weights_sha256, whole.history)


class Interrupted(Drawn):
    """Counts the examples that are read, and gets a signal at one of them."""

    read = 0
    signal_at = 0

    def train_data(self):
        def note(label):
            Interrupted.read += 1
            if Interrupted.read == Interrupted.signal_at:
                os.kill(os.getpid(), signal.SIGINT)
            return label

        def noted(inputs, label):
            return inputs, tf.ensure_shape(tf.numpy_function(note, [label], tf.float32), [1])

        return super().train_data().map(noted)


def test_a_signal_ends_a_run_that_reads_a_stream_up_to_its_place(quiet, monkeypatch):
    whole = stream(Interrupted, "whole", quiet)
    with dies():
        stream(Interrupted, "killed", quiet, At(9, kill))
    for at in (30, 130):  # the place is in the second epoch: 101 examples, and 40 more
        monkeypatch.setattr(Interrupted, "signal_at", Interrupted.read + at)
        cut = stream(Interrupted, "killed", quiet)
        assert (cut.status, cut.steps) == ("preempted", 8)
        assert Interrupted.read < Interrupted.signal_at + 101
    resumed = stream(Interrupted, "killed", quiet)
    assert (resumed.weights_sha256, resumed.history) == (whole.weights_sha256, whole.history)


def test_stream_goes_on_with_another_number_of_replicas(quiet):
    whole = stream(Reshuffled, "whole", quiet)
    with dies():
        stream(Reshuffled, "killed", quiet, At(9, kill), replicas=2)
    resumed = stream(Reshuffled, "killed", quiet, replicas=3)
    assert resumed.history[-1]["loss"] == pytest.approx(whole.history[-1]["loss"], rel=1e-6)
    assert resumed.examples == 303


class OtherPipeline(Reshuffled):
    """The same examples from a pipeline of other parts."""

    def train_data(self):
        return super().train_data().map(lambda *example: example).prefetch(3).take(101)


OtherPipeline.__name__ = "Reshuffled"


def test_state_of_another_pipeline_is_refused_unless_accepted(quiet):
    with dies():
        stream(Reshuffled, "run", quiet, At(9, kill))
    with pytest.raises(UsageError, match="isn't the pipeline whose position the checkpoint has"):
        stream(OtherPipeline, "run", quiet)
    assert stream(OtherPipeline, "run", quiet, accept_changes=True, epochs=2).examples == 202


def test_stream_with_another_batch_size_goes_on_at_the_same_example_if_accepted(quiet):
    with dies():
        stream(Reshuffled, "run", quiet, At(9, kill))
    # 141 examples were used, 40 of them in the second epoch.
    result = stream(Reshuffled, "run", quiet, batch_size=10, accept_changes=True, epochs=2)
    assert (result.examples, result.steps) == (202, 8 + 7)


# Evaluation, signals


class Many(Plain):
    """Its evaluation takes many calls."""

    def eval_data(self):
        return super().train_data()


class Noise(keras.layers.Layer):
    """Draws in evaluations, too, as the sampling of an autoencoder does; counts its calls, and changes its weights."""

    def build(self, shape):
        self.generator = keras.random.SeedGenerator(1)
        self.drawn = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.level = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        self.drawn.assign_add(1)
        self.level.assign(0.9 * self.level)
        self.scale.assign(0.9 * self.scale + self.level)
        noise = keras.random.normal(tf.shape(inputs), seed=self.generator)
        return self.scale * inputs + noise / tf.cast(self.drawn, tf.float32)


class Noisy(Many):
    """Its layer has state that it changes, which an evaluation must not do for the training."""

    def build_model(self):
        return keras.Sequential([keras.Input((5,)), Noise(), keras.layers.Dense(1)])


class InEvaluation(Callback):
    """Does something at the nth time that all workers agree within an evaluation."""

    def __init__(self, nth, act):
        self.nth, self.act = nth, act

    def on_setup(self, run):
        synchronize, seen = run.synchronize, []

        def synchronizing(steps=1):
            if run.epoch.evaluating:
                seen.append(steps)
                if len(seen) == self.nth:
                    self.act(run)
            return synchronize(steps)

        run.synchronize = synchronizing


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluations_do_not_change_the_state_of_layers_in_training(replicas, quiet):
    """Nor does the evaluation at the end of a run within an epoch, when the run goes on."""

    def weights(**options):
        backend = create("mirrored", replicas) if replicas > 1 else "single"
        return fit(Noisy(), batch_size=20, backend=backend, callbacks=quiet(), **options).weights_sha256

    once = weights(steps=9, eval_every="never")
    weights(steps=3, eval_every=2, run_dir="run")
    assert weights(steps=9, eval_every=2, run_dir="run") == once


@pytest.mark.parametrize(
    ("kind", "options"),
    singles([Many, Reshuffled, Noisy], [{"epochs": 2}, {"steps": 9}, {"epochs": 2, "eval_every": 4}]),
)
def test_signal_within_an_evaluation_saves_and_the_evaluation_is_made_again(kind, options, quiet):
    options = {"batch_size": 20, "ema": 0.9, "steps_per_call": 2, **options}
    whole = fit(kind(), **options, callbacks=quiet(), run_dir="whole")
    for nth in (1, 3, 6):
        stop = InEvaluation(nth, lambda run: os.kill(os.getpid(), signal.SIGTERM))
        cut = fit(kind(), **options, callbacks=quiet() + [stop], run_dir=f"cut-{nth}")
        assert cut.status == "preempted" or nth == 6
        resumed = fit(kind(), **options, callbacks=quiet(), run_dir=f"cut-{nth}")
        assert resumed.status == "finished"
        assert (resumed.weights_sha256, resumed.history) == (whole.weights_sha256, whole.history)


def test_an_interrupted_evaluation_that_nobody_wants_any_more(quiet):
    stop = InEvaluation(2, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    options = {"epochs": 1, "batch_size": 20, "run_dir": "run"}
    assert fit(Many(), **options, callbacks=quiet() + [stop]).status == "preempted"
    resumed = fit(Many(), **options, eval_every="never", callbacks=quiet())
    assert (resumed.status, resumed.steps, list(resumed.metrics)) == ("finished", 6, ["loss"])


def test_sigusr1_saves_at_once_and_training_goes_on(quiet):
    seen = []
    ask = At(3, lambda run: os.kill(os.getpid(), signal.SIGUSR1))
    look = At(5, lambda run: (run.checkpointing.writer.wait(), seen.extend(path.name for path in run.checkpoints())))
    result = fit(Plain(), epochs=1, batch_size=20, callbacks=quiet() + [ask, look], run_dir="run")
    assert (result.status, result.steps) == ("finished", 6)
    assert seen == ["step-00000003"]
    events = map(json.loads, run_directory.Path("run/journal.jsonl").read_text().splitlines())
    first = next(each for each in events if each["event"] == "checkpoint")
    assert (first["reason"], first["checkpoint"]) == ("SIGUSR1", "step-00000003")


class SignalledInFirstCompile(Plain):
    """Is told to stop while its step is being traced."""

    def compute(self, model, batch, training):
        if training and tf.inside_function():
            os.kill(os.getpid(), signal.SIGTERM)
        return super().compute(model, batch, training)


def test_a_signal_that_the_launcher_hands_on_too_is_not_a_second_one(quiet, monkeypatch):
    """As where it is sent to all processes: by systemd, or in a step of Slurm."""
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    again = [At(3, lambda run: os.kill(os.getpid(), signal.SIGTERM)) for _ in range(2)]
    result = fit(Plain(), epochs=2, batch_size=20, steps_per_call=1, callbacks=quiet() + again)
    assert result.status == "preempted"


def test_signal_within_the_first_compile_saves_after_it(quiet):
    cut = fit(SignalledInFirstCompile(), epochs=2, batch_size=20, callbacks=quiet(), run_dir="run")
    assert cut.status == "preempted"
    assert cut.steps == run_directory.locate(run_directory.Path("run"))[1]["step"] == 1


# The writer


class Full(Callback):
    """The disk is full from a step on."""

    def __init__(self, monkeypatch, first, last=99):
        self.first, self.last, self.monkeypatch = first, last, monkeypatch

    def on_setup(self, run):
        write = checkpoint_files.write

        def full(directory, step, *rest):
            if self.first <= step <= self.last:
                raise OSError(28, "No space left on device")
            return write(directory, step, *rest)

        self.monkeypatch.setattr(checkpoint_files, "write", full)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("first", [4, 12])
def test_error_of_the_writer_ends_the_run_and_old_checkpoints_are_kept(first, background, quiet, monkeypatch):
    saving = Checkpoint(every=2, background=background)
    with pytest.raises(OSError, match="No space left"):
        fit(
            Plain(), epochs=2, batch_size=20, eval_every="never", run_dir="run",
            callbacks=quiet(checkpoint=saving) + [Full(monkeypatch, first)],
        )  # fmt: skip
    assert run_directory.locate(run_directory.Path("run"))[1]["step"] == first - 2
    assert run_directory.read_json(run_directory.Path("run/run.json"))["status"] == "failed"


@pytest.mark.parametrize("background", [True, False])
def test_error_of_the_writer_may_be_a_warning_but_not_for_the_last_checkpoint(background, quiet, monkeypatch, capfd):
    def run(directory, *full):
        saving = Checkpoint(every=2, on_error="warn", background=background)
        return fit(
            Plain(), epochs=2, batch_size=20, eval_every="never", run_dir=directory,
            callbacks=quiet(checkpoint=saving) + [Full(monkeypatch, *full)],
        )  # fmt: skip

    assert run("a", 4, 8).status == "finished"
    assert "warning: a checkpoint could not be written ([Errno 28] No space left" in capfd.readouterr().err
    assert run_directory.locate(run_directory.Path("a"))[1]["step"] == 12
    with pytest.raises(OSError, match="No space left"):
        run("b", 12)


def test_training_goes_on_while_a_checkpoint_is_written_and_its_values_are_those_of_then(quiet, monkeypatch):
    begun, gate, write, log = threading.Event(), threading.Event(), checkpoint_files.write, []

    def slow(directory, step, tensors, state):
        log.append(("begin", step))
        begun.set()
        assert gate.wait(60)
        log.append(("end", step))
        return write(directory, step, tensors, state)

    monkeypatch.setattr(checkpoint_files, "write", slow)

    class Watch(Callback):
        every = 1

        def on_steps_end(self, run, metrics):
            if run.progress.step == 5:
                assert begun.wait(60)
            log.append(("step", run.progress.step))
            if run.progress.step == 5:
                gate.set()
                run.checkpointing.writer.wait()

        def on_checkpoint(self, run, reason):
            log.append(("saved", run.checkpoints()[-1].name))

    saving = quiet(checkpoint=Checkpoint(every=3))
    fit(Plain(), steps=5, batch_size=20, eval_every="never", callbacks=saving + [Watch()], run_dir="run")
    assert log.index(("begin", 3)) < log.index(("step", 5)) < log.index(("end", 3))
    assert log.index(("end", 3)) < log.index(("saved", "step-00000003"))
    monkeypatch.setattr(checkpoint_files, "write", write)
    three = fit(Plain(), steps=3, batch_size=20, eval_every="never", callbacks=quiet(), run_dir="three")
    stored = checkpoint_files.read(
        path := run_directory.Path("run/checkpoints/step-00000003"), checkpoint_files.verify(path)
    )
    np.testing.assert_array_equal(stored["model/00001:w"], three.model.w.numpy())


def changes():
    """Each kind of operation that changes a variable in place."""
    dense, rows = tf.ones([1000]), tf.constant([[3], [5]])
    adam = keras.optimizers.Adam(0.1)
    compiled = tf.function(lambda variable: variable.assign_add(variable * 2), jit_compile=True)

    def applied(variable):
        adam.apply([dense], [variable])

    yield "assign", lambda variable: variable.assign(dense)
    yield "assign_add", lambda variable: variable.assign_add(dense)
    yield "scatter", lambda variable: variable.scatter_nd_sub(rows, tf.constant([1.0, 2.0]))
    yield "optimizer", applied
    yield "in a graph", tf.function(lambda variable: variable.assign_sub(variable * variable))
    yield "by XLA", compiled
    raw = tf.raw_ops.ResourceApplyGradientDescent
    yield "raw", lambda variable: raw(var=variable.handle, alpha=tf.constant(0.1), delta=dense)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_snapshot_is_not_changed_by_what_comes_after_it(replicas):
    backend = create("mirrored", replicas) if replicas > 1 else create("single")
    for name, change in changes():
        if replicas > 1 and name != "assign_add":
            continue
        with backend.scope():
            variable = tf.Variable(tf.range(1000, dtype=tf.float32))
        before = variable.numpy()
        snapshot = backend.snapshot(variable)
        for _ in range(2):
            backend.run(change, variable) if replicas > 1 else change(variable)
        assert not np.array_equal(backend.local_values(variable)[0], before), name
        np.testing.assert_array_equal(snapshot.numpy(), before, err_msg=name)


# What is kept: random numbers, changed settings


def test_random_numbers_of_callbacks_go_on(quiet):
    class Dice(Callback):
        every = 2

        def __init__(self):
            self.thrown = []

        def on_steps_end(self, run, metrics):
            import random

            self.thrown.append((run.progress.step, random.random(), random.gauss(0, 1), np.random.rand()))

    def run(directory, *more):
        dice = Dice()
        saving = quiet(checkpoint=Checkpoint(every=4)) + [dice, *more]
        with contextlib.suppress(Killed):
            fit(Plain(), epochs=2, batch_size=20, callbacks=saving, run_dir=directory)
        return {step: rest for step, *rest in dice.thrown}

    whole = run("whole")
    first, second = run("cut", At(9, kill)), run("cut")
    assert {**first, **second} == whole
    assert list(second) == [10, 12]


def test_changed_settings_are_shown_and_refused_unless_accepted(quiet, capfd):
    def run(**options):
        task = Unweighted(rate=options.pop("rate", 0.05))
        return fit(
            task, epochs=2, callbacks=quiet(checkpoint=Checkpoint(every=4)), run_dir="run", eval_every="never",
            **{"batch_size": 20, **options},
        )  # fmt: skip

    class Stop(Callback):
        every = 4

        def on_steps_end(self, run, metrics):
            run.stop("enough")

    first = fit(
        Unweighted(), epochs=2, batch_size=20, eval_every="never", run_dir="run",
        callbacks=quiet(checkpoint=Checkpoint(every=4)) + [Stop()],
    )  # fmt: skip
    assert first.steps == 4
    message = "batch_size was 20, now 10; seed was 0, now 3; the field rate was 0.05, now 0.5.*--accept-changes"
    told = [Path("run", name).read_text() for name in ("run.json", "journal.jsonl")]
    with pytest.raises(UsageError, match=message):
        run(batch_size=10, seed=3, rate=0.5)
    # The run is still described as it was by the attempt before.
    assert [Path("run", name).read_text() for name in ("run.json", "journal.jsonl")] == told
    found = record.read(Path("run"))
    assert (found.status, found.steps, found.hyperparameters["rate"]) == ("stopped", 4, 0.05)
    page = Path("run/report.html").read_text()
    assert "stopped</" in page
    assert "failed</" not in page
    capfd.readouterr()
    result = run(batch_size=10, rate=0.5, accept_changes=True)
    assert "note: goes on with another setting: batch_size was 20, now 10" in capfd.readouterr().err
    # 80 examples were used: 21 are left of the epoch, in batches of 10, and then a whole one.
    assert (result.steps, result.examples) == (4 + 3 + 11, 202)


def test_accepted_learning_rate_takes_effect(quiet):
    rates = []

    def run(rate, *more, **options):
        look = At(6, lambda run: rates.append(float(run.optimizer.learning_rate)))
        with contextlib.suppress(Killed):
            fit(
                Unweighted(rate=rate), epochs=1, batch_size=20, run_dir="run", eval_every="never", **options,
                callbacks=quiet(checkpoint=Checkpoint(every=2)) + [look, *more],
            )  # fmt: skip

    run(0.05, At(3, kill))
    run(0.5, accept_changes=True)
    assert rates == [pytest.approx(0.5)]


def two_optimizers(rate):
    return {"body": keras.optimizers.Adam(0.01), "head": keras.optimizers.Adam(rate)}


@pytest.mark.parametrize(
    ("before", "now", "problem"),
    [
        (partial(keras.optimizers.Adam, 0.01), partial(keras.optimizers.Adam, 0.25), "ing rate was 0.01, now 0.25"),
        (partial(keras.optimizers.Adam, 0.01), partial(keras.optimizers.Adamax, 0.01), "r was 'Adam', now 'Adamax'"),
        (partial(two_optimizers, 0.01), partial(two_optimizers, 0.25), "rate of 'head' was 0.01, now 0.25"),
    ],
)  # fmt: skip
def test_a_change_of_the_optimizer_in_the_code_is_refused_unless_accepted(before, now, problem, quiet):
    """The rate of the checkpoint took its place without a word, and an Adamax the slots of an Adam."""

    def run(make, epochs, **options):
        task = TwoRates()
        task.build_optimizer = make
        return fit(task, epochs=epochs, run_dir="run", eval_every="never", callbacks=quiet(), **options)

    run(before, 1)
    with pytest.raises(UsageError, match=problem):
        run(now, 2)
    assert run(now, 2, accept_changes=True).epochs == 2


def test_accepted_changes_within_the_evaluation_of_an_epoch(quiet):
    """The epoch has no steps left: its row is that of its steps, and the short batch at its end isn't a whole one."""

    class Signal(Callback):
        every = "epoch"

        def on_steps_end(self, run, metrics):
            run.stops.signalled = True
            self.loss = metrics["loss"]

    signal = Signal()
    options = {"epochs": 2, "run_dir": "run", "eval_every": "epoch"}
    first = fit(Plain(), batch_size=60, **options, callbacks=quiet(checkpoint=Checkpoint()) + [signal])
    assert (first.status, first.steps, first.history) == ("preempted", 2, [])
    result = fit(Plain(), batch_size=10, **options, accept_changes=True, callbacks=quiet())
    assert (result.steps, result.examples) == (2 + 11, 202)
    assert result.history[0]["loss"] == signal.loss


def test_accepted_changes_of_a_run_that_has_come_to_its_end(quiet):
    """The first epoch with the changes was skipped, and then refused as one in which nothing was trained."""
    options = {"run_dir": "run", "eval_every": "never", "callbacks": quiet()}
    assert fit(Plain(), epochs=1, batch_size=20, **options).steps == 6
    result = fit(Plain(), epochs=2, batch_size=10, accept_changes=True, **options)
    assert (result.steps, result.examples) == (6 + 11, 202)
    assert [row["epoch"] for row in result.history] == [1, 2]


def test_means_are_those_of_the_steps_since_accepted_changes_also_if_the_run_stopped_again_before_one(quiet):
    class Field(Unweighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"rate": tf.fill(tf.shape(values["loss"]), self.rate)}

    class StopAtStart(Callback):
        def on_fit_start(self, run):
            run.stop("test")

    options = {"batch_size": 20, "run_dir": "run", "eval_every": "never"}
    fit(Field(rate=0.25), steps=3, **options, callbacks=quiet())
    stopped = fit(Field(rate=0.5), epochs=1, **options, accept_changes=True, callbacks=quiet() + [StopAtStart()])
    assert stopped.status == "stopped"
    assert fit(Field(rate=0.5), epochs=1, **options, callbacks=quiet()).metrics["rate"] == 0.5


@pytest.mark.parametrize("values", [["other"], ["first", "more"]])
def test_means_of_other_values_are_those_of_the_steps_since(quiet, values):
    class Valued(Plain):
        values = ("first",)

        def compute(self, model, batch, training):
            result = super().compute(model, batch, training)
            return result | {name: tf.zeros_like(result["loss"]) + len(name) for name in self.values}

    task = Valued()
    stop = At(2, lambda run: run.stop("enough"))
    options = {"epochs": 1, "batch_size": 20, "run_dir": "run", "eval_every": "never"}
    fit(task, **options, callbacks=quiet(checkpoint=Checkpoint()) + [stop])
    task.values = values
    row = fit(task, **options, callbacks=quiet()).history[0]
    assert {name: row[name] for name in values} == {name: len(name) for name in values}


def test_other_versions_and_places_are_told(quiet, capfd):
    fit(Plain(), epochs=1, callbacks=quiet(), run_dir="run")
    path, manifest = run_directory.locate(run_directory.Path("run"))
    manifest["run"]["versions"]["tensorflow"] = "2.0.0"
    tensors = checkpoint_files.read(path, manifest)
    manifest = {name: value for name, value in manifest.items() if name not in ("format", "step", "files", "tensors")}
    (path / "manifest.json").unlink()
    checkpoint_files.write(path.parent, 4, tensors, manifest)
    fit(Plain(), epochs=2, callbacks=quiet(), run_dir="run")
    assert "note: goes on elsewhere than it was: tensorflow was '2.0.0', now" in capfd.readouterr().err


def test_a_manifest_that_is_none_of_a_run_is_bad_input(quiet, tmp_path):
    for state in ({}, {"run": {}}, {"run": {"task": "Plain"}}, {"run": []}):
        directory = tmp_path / str(len(str(state)))
        directory.mkdir(exist_ok=True)
        checkpoint_files.write(directory / "checkpoints", 3, {"model/00000:w": np.zeros(3)}, state)
        with pytest.raises(UsageError, match="none of its 1 checkpoints is good"):
            fit(Plain(), callbacks=quiet(), run_dir=directory)


def test_a_save_that_is_due_at_an_evaluation_waits_for_it_and_more_steps_go_on(quiet):
    saving = quiet(checkpoint=Checkpoint(every=3))
    options = {"batch_size": 20, "run_dir": "run", "steps_per_call": 2}
    first = fit(Many(), steps=9, **options, callbacks=saving)
    assert run_directory.locate(run_directory.Path("run"))[1]["evaluating"] is False
    again = fit(Many(), steps=9, **options, callbacks=quiet())
    assert (again.steps, again.history) == (9, first.history)
    result = fit(Many(), steps=16, **options, callbacks=quiet(checkpoint=Checkpoint(every=3)))
    whole = fit(Many(), steps=16, batch_size=20, callbacks=quiet(), run_dir="whole")
    assert (result.steps, result.weights_sha256) == (16, whole.weights_sha256)


def test_state_with_numbers_as_keys_is_kept(quiet):
    class Counts(Callback):
        key = "counts"

        def __init__(self):
            self.seen = {}

        def on_epoch_end(self, run, metrics):
            self.seen[run.progress.step] = 1

        def state_dict(self):
            return self.seen

        def load_state_dict(self, state):
            self.seen = {int(step): count for step, count in state.items()}

    fit(Plain(), epochs=3, callbacks=quiet() + [Counts()], run_dir="run")
    counts = Counts()
    fit(Plain(), epochs=4, callbacks=quiet() + [counts], run_dir="run")
    assert counts.seen == {4: 1, 8: 1, 12: 1, 16: 1}


def test_each_worker_gets_its_own_state_back():
    from types import SimpleNamespace

    from loop.run import state
    from loop.run.data_position import DataPosition
    from loop.run.epoch_metrics import EpochMetrics
    from loop.run.progress import Progress

    taken = []
    backend = SimpleNamespace(rank=1, workers=2)
    run = SimpleNamespace(
        backend=backend, callbacks={"mine": SimpleNamespace(load_state_dict=taken.append)}, data=DataPosition(),
        epoch=EpochMetrics(), progress=Progress(), plan=SimpleNamespace(named=[]),
        evaluated_sets=[],
    )  # fmt: skip
    kept = {
        "evaluating": False, "epoch_ends": False, "progress": {}, "epoch_totals": [], "eval_metrics": {}, "history": [],
        "evaluated_at": 0, "workers": [{"random": rank, "callbacks": {"mine": {"rank": rank}}} for rank in (0, 1)],
    }  # fmt: skip
    state.restore(run, None, kept)
    assert run.data.random_state == 1
    backend.workers = 3  # where the number has changed, the chief's serves all
    state.restore(run, None, kept)
    assert run.data.random_state == 0
    assert taken == [{"rank": 1}, {"rank": 0}]


def test_damaged_later_checkpoints_take_no_place_among_the_last(quiet):
    options = {"steps": 9, "batch_size": 20, "eval_every": "never", "run_dir": "run"}
    fit(Plain(), **options, callbacks=quiet(checkpoint=Checkpoint(every=3)))
    for step in (6, 9):
        run_directory.Path(f"run/checkpoints/step-{step:08d}/tensors.npz").write_bytes(b"garbage")
    seen = []
    look = At(5, lambda run: seen.append(run.saved_path.name))
    with dies():
        saving = Checkpoint(every=4, keep_last=1, background=False)
        fit(Plain(), **options, callbacks=quiet(checkpoint=saving) + [look, At(5, kill)])
    assert seen == ["step-00000004"]
    assert run_directory.locate(run_directory.Path("run"))[1]["step"] == 4


# The lock


def test_second_run_in_a_directory_is_refused_and_names_the_first(quiet, tmp_path):
    code = (
        "import sys, loop.checkpoint.lock, pathlib\n"
        "with loop.checkpoint.lock.locked(pathlib.Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"is in use by process {other.pid} on .* since 2"):
            fit(Plain(), callbacks=quiet(), run_dir=tmp_path)
    finally:
        other.kill()
        other.communicate()
    # Killed, it could not clean up: its lock is taken over.
    assert json.loads((tmp_path / "lock").read_text())["pid"] == other.pid
    assert fit(Plain(), callbacks=quiet(), run_dir=tmp_path).status == "finished"
    assert not (tmp_path / "lock").exists()


def test_lock_is_free_after_its_owner_though_a_child_has_inherited_it(tmp_path):
    code = (
        "import os, sys, loop.checkpoint.lock, pathlib\n"
        "with loop.checkpoint.lock.locked(pathlib.Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if child: print(child, flush=True); os._exit(0)\n"
        "    sys.stdin.read(); os._exit(0)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = int(owner.stdout.readline())
    owner.wait()
    os.kill(child, 0)  # lives, and has it open
    with locked(tmp_path), pytest.raises(UsageError, match="is in use by process"), locked(tmp_path):
        pass
    owner.stdin.close()
    owner.stdout.close()


def test_a_process_of_another_machine_of_the_same_name_is_not_taken_for_dead():
    """The first namespace of process ids has the same number on each machine."""
    owner = lock.about_this_process() | {"pid": 5_000_000}  # more than a system has
    assert lock.is_dead(owner)
    number = owner["namespace"].rpartition(" ")[2]
    assert not lock.is_dead(owner | {"namespace": f"4a74c8cd-f558-4251-985e-000000000000 {number}"})


@contextlib.contextmanager
def files_no_longer_than(size):
    """As a disk that is full then, for every thread of this process: no checkpoint may be written beside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_lock_that_finds_no_room_is_one_line(quiet):
    with files_no_longer_than(0), pytest.raises(UsageError, match=r"run directory .*/run can't be written \(File too"):
        fit(Plain(), callbacks=quiet(), run_dir="run")
    assert fit(Plain(), callbacks=quiet(), run_dir="run").status == "finished"


def test_a_line_of_the_journal_that_finds_no_room_takes_none_with_it(quiet):
    class Filling(Callback):
        every = "epoch"

        def on_setup(self, run):
            self.journal = run.callbacks["Journal"]

        def on_epoch_start(self, run):
            if run.progress.epoch == 1:
                with files_no_longer_than(Path("run/journal.jsonl").stat().st_size + 20):
                    self.journal.on_epoch_start(run)

    with pytest.raises(OSError, match=r"File too large: '.*/run/journal.jsonl'"):
        fit(Plain(), epochs=3, batch_size=20, callbacks=quiet(checkpoint=None) + [Filling()], run_dir="run")
    lines = Path("run/journal.jsonl").read_text().splitlines()
    torn = [place for place, line in enumerate(lines) if len(line) == 20]
    assert len(torn) == 1
    behind = [json.loads(line)["event"] for line in lines[torn[0] + 1 :]]
    assert behind[-3:] == ["exception", "system", "fit_end"]


def test_a_sample_that_finds_no_room_takes_no_line_of_the_journal_with_it(quiet):
    class Filling(Callback):
        every = "epoch"

        def on_epoch_start(self, run):
            if run.progress.epoch == 1:
                with files_no_longer_than(Path("run/journal.jsonl").stat().st_size + 20):
                    run.callbacks["SystemMetrics"]._sample(run)

    result = fit(Plain(), epochs=3, batch_size=20, callbacks=quiet(checkpoint=None) + [Filling()], run_dir="run")
    assert journal.read_history(Path("run/journal.jsonl")) == result.history
    events = []
    for line in Path("run/journal.jsonl").read_text().splitlines():
        events.append("torn" if len(line) == 20 else json.loads(line)["event"])
    assert events.count("torn") == 1
    assert events.count("epoch_start") == 3


# The watchdog


def test_watchdog_names_rank_phase_step_time_and_stacks(quiet, capfd):
    said = threading.Event()

    class Sleepy(Callback):
        def on_epoch_end(self, run, metrics):
            deadline = time.monotonic() + 240
            while "it is at callback on_epoch_end of Sleepy" not in said.text and time.monotonic() < deadline:
                time.sleep(0.05)
                said.text += capfd.readouterr().err

    said.text = ""
    fit(Plain(), epochs=1, stall_timeout=0.5, callbacks=quiet() + [Sleepy()])
    assert "watchdog: rank 0 of 1: no call has ended for" in said.text
    assert "(step 4, epoch 1)" in said.text
    assert "thread MainThread:" in said.text
    assert "in on_epoch_end" in said.text


def test_watchdog_tells_what_a_compiled_call_waits_for(quiet, capfd):
    log = {"text": "", "asked": 0}

    class Slow(Generated):
        def train_data(self):
            def examples():
                for number, pair in enumerate(zip(*regression(self.examples)[:2], strict=True)):
                    if number == 60:
                        deadline = time.monotonic() + 240
                        while "it is at data for" not in log["text"] and time.monotonic() < deadline:
                            time.sleep(0.05)
                            log["text"] += capfd.readouterr().err
                    yield pair

            spec = tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32)
            return tf.data.Dataset.from_generator(examples, output_signature=spec)

    fit(Slow(), epochs=1, batch_size=10, steps_per_call=2, stall_timeout=0.5, eval_every="never", callbacks=quiet())
    assert "it is at data for" in log["text"]


def test_watchdog_is_silent_while_things_end():
    dog = Watchdog(1, 2, None)
    with dog.watching(), dog.phase("compute"):
        assert "rank 1 of 2" in dog.report()
        assert "it is at compute" in dog.report()


# Steps that aren't finite


class Named(Alarm):
    """The same from a stream, with a text in each example."""

    def train_data(self):
        inputs, labels = super().train_data().arrays
        names = [f"name {number}".encode() for number in range(len(inputs))]
        return tf.data.Dataset.from_tensor_slices({"x": inputs, "y": labels, "name": names})

    def compute(self, model, batch, training):
        return super().compute(model, (batch["x"], batch["y"]), training)

    eval_data = train_data


@pytest.mark.parametrize("kind", [Alarm, Named])
@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_step_that_is_not_finite_is_kept_and_replayed(kind, on_nonfinite, quiet):
    task = kind()
    options = {"epochs": 1, "batch_size": 20, "eval_every": "never", "shuffle": False, "on_nonfinite": on_nonfinite}
    if on_nonfinite == "stop":
        with pytest.raises(TrainingError, match=r"step 4 .*`tfloop replay .*/run/bad/step-00000004` shows it"):
            fit(task, **options, callbacks=quiet(), run_dir="run")
    else:
        assert fit(task, **options, callbacks=quiet(), run_dir="run").steps == 6
    before = fit(kind(), **options | {"epochs": None, "steps": 3}, callbacks=quiet(), run_dir="before").model
    path = run_directory.Path("run/bad/step-00000004")
    tensors = checkpoint_files.read(path, checkpoint_files.verify(path))
    np.testing.assert_array_equal(tensors["model/00001:w"], before.w.numpy())
    found = replaying.replay(kind(), path)
    assert (found.step, found.epoch, found.examples) == (4, 1, 20)
    assert found.names == found.again == ["the loss", "the gradient of b", "the gradient of w"]
    [loss] = found.values
    assert (loss.name, loss.shape, loss.not_finite, loss.examples) == ("loss", [20], 1, [60])
    assert {each.name: (each.shape, each.not_finite) for each in found.gradients} == {"b": ([], 1), "w": ([5, 1], 5)}
    assert "example 60" in "\n".join(replaying.lines(found))
    assert replaying.as_json(found)["values"][0]["norm"] == "nan"


def test_a_bad_step_for_which_there_is_no_file_is_still_named(quiet):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    class NoMoreFiles(Callback):
        every = 1

        def on_steps_end(self, run, metrics):
            if run.progress.step == 3:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))

        def on_exception(self, run, error):
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    Path("run/bad").mkdir(parents=True)
    # The limit holds for the whole process: nothing else may open a file meanwhile.
    alone = quiet(checkpoint=None, system=None) + [NoMoreFiles()]
    with pytest.raises(TrainingError, match=r"step 4 .* could not be kept \(.*Too many open files"):
        fit(Alarm(), batch_size=20, shuffle=False, callbacks=alone, run_dir="run")


@pytest.mark.parametrize("accumulate", [2, 3, 7])
def test_replay_names_the_example_of_a_micro_batch(accumulate, quiet):
    """Micro-batches don't wait for each other: their values were taken in the order in which they had ended."""
    with pytest.raises(TrainingError, match="not finite"):
        fit(Alarm(), epochs=1, batch_size=20, accumulate=accumulate, callbacks=quiet(), run_dir="run")
    [loss] = replaying.replay(Alarm(), "run").values
    assert (loss.shape, loss.examples) == ([20], [60])


def test_replay_of_a_checkpoint_is_refused(quiet):
    fit(Plain(), epochs=1, callbacks=quiet(), run_dir="run")
    with pytest.raises(UsageError, match="no step that wasn't finite was kept there: give"):
        replaying.replay(Plain(), "run")


class Poisoned(Conv):
    """One picture is infinite: BatchNorm's statistics would be, for good."""

    def train_data(self):
        data = super().train_data()
        data.arrays[0][60] = np.inf
        return data


@pytest.mark.parametrize("replicas", [1, 2])
def test_state_gathered_in_a_skipped_step_is_taken_back(replicas, quiet):
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    result = fit(
        Poisoned(), epochs=1, batch_size=20, on_nonfinite="skip", backend=backend, callbacks=quiet(), shuffle=False
    )
    assert result.metrics["skipped_steps"] == 1
    for variable in result.model.variables:
        assert np.isfinite(variable.numpy()).all(), variable.path


# Names, clocks, shapes


def test_hostile_names_stay_within_the_runs_directory(quiet):
    for name in ("../../../etc/x", "/abs", "Ünïcode\n\x1b[31m", "...", "a" * 300):
        kind = type(name, (Plain,), {})
        directory = fit(kind(), epochs=1, callbacks=quiet(journal=None)).run_dir
        assert directory.parent == run_directory.Path("runs").resolve()
        assert directory.name.isascii()
        assert directory.name.isprintable()


def test_jumping_clocks_change_no_order(quiet, monkeypatch):
    times = iter(range(10**9, 0, -1000))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    try:
        result = fit(
            Plain(), epochs=3, batch_size=20, callbacks=quiet(checkpoint=Checkpoint(every="1s")), run_dir="run"
        )
    finally:
        monkeypatch.setattr(time, "time", real)
    assert result.steps == 18
    points = [json.loads(line) for line in run_directory.Path("run/journal.jsonl").read_text().splitlines()]
    assert [each["step"] for each in points] == sorted(each["step"] for each in points)
    assert run_directory.locate(run_directory.Path("run"))[1]["step"] == 18


class Ragged(Plain):
    """Each batch has another length of its rows: no new trace for any of them."""

    def train_data(self):
        lengths = [3 + number % 7 for number in range(101)]
        return tf.data.Dataset.from_tensor_slices(lengths).map(lambda n: (tf.ones([n // 3 * 3]), tf.ones([1])))

    eval_data = train_data

    def compute(self, model, batch, training):
        rows, labels = batch
        inputs = tf.tile(tf.reduce_mean(rows, -1, keepdims=True), [1, 5])
        return {"loss": tf.reduce_sum((model(inputs, training=training) - labels) ** 2, -1)}


def test_batches_that_change_shape_are_traced_once(quiet):
    traces = []
    look = At(101, lambda run: traces.append(run.step.traces))
    fit(Ragged(), epochs=1, batch_size=1, callbacks=quiet() + [look])
    assert traces == [1]


# One rank fails: the bus is tested with engines in test_callbacks, real processes in test_failures


def test_faults_can_be_planned(quiet, monkeypatch):
    from loop.monitor import fault_injection

    monkeypatch.setattr(fault_injection, "_faults", None)
    monkeypatch.setenv("TFLOOP_FAULT", "callback-epoch_end:0:4:raise")
    with pytest.raises(fault_injection.PlannedError, match="callback-epoch_end:0:4:raise"):
        fit(Plain(), epochs=2, callbacks=quiet(), run_dir="run")
    monkeypatch.setattr(fault_injection, "_faults", None)
    for wrong in ("save", "save:0:0:explode", "save:one:0:kill"):
        monkeypatch.setattr(fault_injection, "_faults", None)
        monkeypatch.setenv("TFLOOP_FAULT", wrong)
        with pytest.raises(UsageError, match=f"TFLOOP_FAULT={wrong}: give point:rank:step:how"):
            fault_injection.reached("save")
    monkeypatch.setattr(fault_injection, "_faults", None)
