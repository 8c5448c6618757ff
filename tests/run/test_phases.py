"""Phases: freeze, train, unfreeze, train; one run, one resume."""

import json
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks import Callback, Checkpoint, LearningRateMonitor
from loop import ArrayData, Phase, TrainTask, UsageError, evaluate, fit
from loop.backends import create
from loop.checkpoint import checkpoint_files
from loop.commands import dry_run, find_lr, verify
from loop.commands.export import export
from loop.run.calls import Calls
from tests.tasks import regression


class Killed(BaseException):
    """Nothing in the loop catches this: the process might as well be gone."""


class KillAt(Callback):
    every = 1

    def __init__(self, step):
        self.step = step

    def on_steps_end(self, run, metrics):
        if run.progress.step == self.step:
            run.checkpointing.held = None
            raise Killed


def test_the_first_call_of_each_phase_counts_for_the_speed_only_while_there_is_no_other():
    calls = Calls(8, None)
    calls._record(8, 80, 4.0)
    assert calls.examples_per_second == 20
    calls._record(8, 80, 0.5)
    assert calls.examples_per_second == 160
    calls.start_phase(8, None)
    calls._record(8, 80, 4.0)
    assert calls.examples_per_second == 160
    calls._record(8, 80, 0.3)
    assert calls.examples_per_second == 200


@dataclass
class FineTune(TrainTask):
    """A body with BatchNormalization and dropout, and a head: the head alone, then all, with another optimizer."""

    drop: float = 0.2
    streams: bool = False

    def phases(self):
        return [Phase("head", epochs=2), Phase("all", steps=8, batch_size=25), Phase("cool", epochs=1)]

    def begin_phase(self, model, phase):
        model.get_layer("body").trainable = phase.name == "all"

    def build_model(self):
        body = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization()], name="body"
        )
        head = keras.layers.Dense(1, name="head")
        return keras.Sequential([keras.Input((5,)), body, keras.layers.Dropout(self.drop), head])

    def build_optimizer(self):
        return keras.optimizers.Adam(1e-2) if self.phase.name == "head" else keras.optimizers.SGD(1e-3, momentum=0.9)

    def train_data(self):
        arrays = regression(100)[:2]
        if self.streams:
            return tf.data.Dataset.from_tensor_slices(arrays).shuffle(100)
        return ArrayData(*arrays)

    def eval_data(self):
        return ArrayData(*regression(40, seed=1)[:2])

    def compute(self, model, batch, training):
        inputs, labels = batch
        error = model(inputs, training=training) - labels
        values = {"loss": tf.reduce_sum(error**2, -1)}
        return values if self.phase.name == "head" else values | {"error": tf.abs(error[:, 0])}


def train(directory, quiet, *more, task=None, backend="single", every=3, batch_size=20, **options):
    chosen = quiet(report=None, checkpoint=Checkpoint(every=every)) + [LearningRateMonitor(), *more]
    return fit(
        task or FineTune(), batch_size=batch_size, backend=backend, callbacks=chosen, run_dir=directory, **options
    )


def weights(result):
    return [np.asarray(each) for each in result.model.get_weights()]


def entries(directory):
    return [json.loads(line) for line in Path(directory, "journal.jsonl").read_text().splitlines()]


def test_two_phases_are_the_two_fits_of_keras(quiet):
    class Ported(FineTune):
        def phases(self):
            return [Phase("head", epochs=3), Phase("all", epochs=2)]

    task, shown = Ported(drop=0.0), regression(100)[:2]
    ours = train("run", quiet, task=task, shuffle=False, eval_every="never")
    keras.utils.set_random_seed(0)
    task.phase = None
    model = FineTune(drop=0.0).build_model()
    for frozen, optimizer, epochs in (
        (True, keras.optimizers.Adam(1e-2), 3),
        (False, keras.optimizers.SGD(1e-3, momentum=0.9), 2),
    ):
        model.get_layer("body").trainable = not frozen
        model.compile(optimizer, loss="mse")
        model.fit(*shown, batch_size=20, epochs=epochs, shuffle=False, verbose=0)
    for own, theirs in zip(weights(ours), model.get_weights(), strict=True):
        # Both sum 20 float32 losses, in another order.
        np.testing.assert_allclose(own, theirs, atol=2e-6 * np.abs(theirs).max(), rtol=0)


# In the first; at its end; in the second; in the last. One replica meets all of them.
@pytest.mark.parametrize(("replicas", "streams", "kills"), [(1, False, (4, 10, 14, 20)), (2, True, (10, 14))])
def test_a_run_that_is_killed_in_any_phase_ends_with_the_same_bits(replicas, streams, kills, quiet):
    options = {"backend": "single"}
    if replicas > 1:
        options = {"backend": create("mirrored", replicas), "eval_every": "never"}
    whole = train("whole", quiet, task=FineTune(streams=streams), **options)
    assert (whole.steps, whole.epochs, whole.status) == (23, 5, "finished")
    assert [(row["epoch"], row["step"]) for row in whole.history] == [(1, 5), (2, 10), (3, 14), (4, 18), (5, 23)]
    assert [row["learning_rate"] for row in whole.history] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3, 1e-3])
    for step in kills:
        with pytest.raises(Killed):
            train("killed", quiet, KillAt(step), task=FineTune(streams=streams), **options)
    resumed = train("killed", quiet, task=FineTune(streams=streams), **options)
    assert (resumed.weights_sha256, resumed.history) == (whole.weights_sha256, whole.history)
    assert (resumed.steps, resumed.epochs, resumed.examples) == (whole.steps, whole.epochs, whole.examples)
    assert train("killed", quiet, task=FineTune(streams=streams), **options).weights_sha256 == whole.weights_sha256

    named = [(entry["event"], entry["phase"]) for entry in entries("whole") if entry["event"] == "phase_start"]
    assert named == [("phase_start", name) for name in ("head", "all", "cool")]
    manifest = checkpoint_files.verify(Path("whole/checkpoints/step-00000023"))
    assert manifest["phase"] == {"index": 2, "step": 18, "epoch": 4, "ended": False}
    slots = [each["name"] for each in manifest["tensors"] if each["name"].startswith("optimizer/")]
    assert len(slots) == 4  # counter, rate and the momenta of the head's two: those of other phases are dropped


def test_any_number_of_replicas_gives_the_same_numbers(quiet):
    options = {"eval_every": "never"}
    one, three = (train(f"run-{n}", quiet, backend=create("mirrored", n), **options) for n in (1, 3))
    for own, other in zip(weights(one), weights(three), strict=True):
        np.testing.assert_allclose(other, own, atol=1e-5 * max(np.abs(own).max(), 1), rtol=0)


class Changed(FineTune):
    changes = {}
    rates = {}

    def build_optimizer(self):
        optimizer = super().build_optimizer()
        optimizer.learning_rate = self.rates.get(self.phase.name, optimizer.learning_rate)
        return optimizer

    def phases(self):
        found = {phase.name: phase for phase in super().phases()}
        return [each for each in (found | self.changes).values() if each]


Changed.__name__ = "FineTune"


def test_phases_that_have_begun_must_stay_and_later_ones_may_change(quiet):
    with pytest.raises(Killed):
        train("run", quiet, KillAt(14))
    for changes in ({"head": None}, {"head": Phase("head", epochs=3)}, {"all": Phase("all", steps=8)}):
        Changed.changes = changes
        with pytest.raises(UsageError, match="the phases so far was"):
            train("run", quiet, task=Changed())
    Changed.changes = {"all": Phase("all", steps=9, batch_size=25), "cool": None}
    assert train("run", quiet, task=Changed()).steps == 19


def test_the_optimizer_of_the_phase_under_way_changes_only_if_that_is_accepted(quiet, monkeypatch):
    """The rate of the checkpoint took its place without a word."""
    with pytest.raises(Killed):
        train("run", quiet, KillAt(14))
    Changed.changes = {"cool": None}
    monkeypatch.setattr(Changed, "rates", {"head": 0.5, "all": 0.25})
    with pytest.raises(UsageError, match=r"the learning rate was 0\.001, now 0\.25\. Give"):
        train("run", quiet, task=Changed())
    assert train("run", quiet, task=Changed(), accept_changes=True).history[-1]["learning_rate"] == 0.25


@pytest.mark.parametrize(
    ("phase", "batch_size", "epoch_ends", "streams"),
    [
        (Phase("all", epochs=1, batch_size=10), 20, 17, False),  # the other 50 of 100 examples are five more batches
        (Phase("all", epochs=1, batch_size=10), 20, 17, True),
        (Phase("all", epochs=1, batch_size=50), 20, 13, True),
        (Phase("all", epochs=1), 50, 13, False),
        (Phase("all", epochs=1, batch_size=25), 40, 14, False),  # the size of the phase stays, whatever is typed
    ],
)
def test_a_phase_that_goes_on_with_another_batch_size_goes_on_at_the_same_example(
    phase, batch_size, epoch_ends, streams, quiet
):
    Changed.changes = {"all": Phase("all", epochs=1, batch_size=25), "cool": None}
    with pytest.raises(Killed):
        train("run", quiet, KillAt(13), task=Changed(streams=streams), every=1, eval_every="never")
    Changed.changes = {"all": phase, "cool": None}
    options = {"batch_size": batch_size, "accept_changes": True, "eval_every": "never"}
    result = train("run", quiet, task=Changed(streams=streams), **options)
    assert result.history[-1]["step"] == epoch_ends
    assert result.examples == 300


def test_what_a_run_with_phases_can_be_asked_for(quiet, tmp_path):
    result = train("run", quiet)
    for options in ({"epochs": 3}, {"steps": 3}):
        with pytest.raises(UsageError, match=r"FineTune has phases \(head, all, cool\), which say how long each is"):
            fit(FineTune(), **options)
    assert evaluate(FineTune(), "run")["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-6)
    export(None, Path("run"), Path("weights.npz"))
    export(FineTune(), Path("run"), Path("model.keras"), check=False)
    stored = keras.saving.load_model("model.keras").get_weights()
    for own, other in zip(weights(result), stored, strict=True):
        np.testing.assert_array_equal(own, other)
    about = dry_run.dry_run(FineTune(), create("single"), {})
    assert (about["parameters"]["trained"], about["steps"]) == (7, 2)  # the head's
    options = {**_defaults(FineTune()), "backend": "single"}
    assert len(find_lr.find_lr(FineTune(), create("single"), options, 5, 1e-4, 1e-3).losses) == 5
    Changed.changes = {"cool": None}
    report = verify.verify(Changed(), batch_size=20, replicas=[2])
    assert (report.same, report.steps) == (True, 12)


def _defaults(task):
    from loop.options import with_defaults

    return with_defaults(task, {})


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (["head"], r"FineTune.phases\(\) returned \['head'\]: return a list of loop.Phase"),
        ([Phase("a")], r"Phase\('a'\): give its length, as epochs=N or as steps=N"),
        ([Phase("a", epochs=1, steps=1)], r"Phase\('a'\): give its length"),
        ([Phase("a", epochs=0)], r"Phase\('a'\): epochs=0: give a whole number >= 1"),
        ([Phase("a", epochs=1, batch_size=True)], r"batch_size=True: give a whole number >= 1"),
        ([Phase("a", epochs=1), Phase("a", epochs=1)], r"Phase\('a'\) is there twice"),
        ([Phase("", epochs=1)], r"Phase\(''\): give it a name"),
    ],
)
def test_phases_that_can_not_be(phases, message):
    task = FineTune()
    task.phases = lambda: phases
    with pytest.raises(UsageError, match=message):
        fit(task)


def test_a_phase_that_trains_nothing_is_refused():
    class Frozen(FineTune):
        def begin_phase(self, model, phase):
            model.trainable = False

    with pytest.raises(UsageError, match=r"no trainable variables in the phase 'head', after begin_phase\(\)"):
        fit(Frozen())


def test_an_optimizer_of_the_phase_before_is_refused(quiet):
    class Kept(FineTune):
        """Its optimizer would begin the second phase with the slots and the counter of the first."""

        def begin_phase(self, model, phase):
            pass  # all phases train the same variables, so the optimizer itself would take them

        def build_optimizer(self):
            return {"body": kept, "head": keras.optimizers.SGD(1e-3)}

    kept = keras.optimizers.Adam(1e-2)
    with pytest.raises(UsageError, match=r"the Adam of the phase before again in the phase 'all'.*make a new one"):
        train("run", quiet, task=Kept())
