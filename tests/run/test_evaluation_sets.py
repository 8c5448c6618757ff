"""Several evaluation sets: each as exact as a single one, each at its own pace, and none is lost or made twice."""

import json
import os
import signal
from pathlib import Path

import keras
import numpy as np
import pytest

import loop
from callbacks import Callback, Checkpoint, EarlyStopping
from loop import ArrayData, KerasTask, Phase, UsageError, fit
from loop.backends import create
from loop.commands.dry_run import dry_run
from loop.data import evaluation_sets
from loop.run.epoch_metrics import EpochMetrics
from tests.conftest import tfloop
from tests.tasks import Plain, regression

TASK = """
from loop import ArrayData
from tests.tasks import Plain, regression

class Several(Plain):
    def eval_data(self):
        return {name: ArrayData(*regression(53 + seed, seed=seed)[:2]) for name, seed in (("val", 1), ("test", 2))}
"""
OPTIONS = {"epochs": 2, "batch_size": 20, "steps_per_call": 2}


def held_out(seed):
    return ArrayData(*regression(53 + seed, seed=seed)[:2])


class Several(Plain):
    """Two sets of other sizes than the training data."""

    def eval_data(self):
        return {"val": held_out(1), "test": held_out(2)}


class Single(Plain):
    """The first of the two sets alone."""

    def eval_data(self):
        return held_out(1)


class Stream(Several):
    """The second set is a stream."""

    def eval_data(self):
        import tensorflow as tf

        return {"val": held_out(1), "test": tf.data.Dataset.from_tensor_slices(regression(55, seed=2)[:2])}


def evaluated(directory):
    """The steps at which each metric was evaluated, by the journal."""
    steps = {}
    for line in Path(directory, "journal.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "eval_end":
            for name in event["metrics"]:
                steps.setdefault(name, []).append(event["step"])
    return steps


@pytest.mark.parametrize("kind", [Several, Stream])
def test_each_set_has_the_numbers_of_a_single_one_and_replicas_agree(kind, quiet):
    single = fit(Single(), **OPTIONS, callbacks=quiet(), run_dir="single")
    both = fit(kind(), **OPTIONS, callbacks=quiet(), run_dir="both")
    assert both.weights_sha256 == single.weights_sha256
    for row, one in zip(both.history, single.history, strict=True):
        assert row["eval_val_loss"] == one["eval_loss"]
        assert row["eval_test_loss"] != row["eval_val_loss"]
        assert "eval_loss" not in row
    replicated = fit(kind(), **OPTIONS, backend=create("mirrored", 3), callbacks=quiet(), run_dir="replicated")
    for name in ("loss", "eval_val_loss", "eval_test_loss"):
        assert replicated.metrics[name] == pytest.approx(both.metrics[name], rel=1e-5)
    by_evaluate = loop.evaluate(kind(), "both")
    own = {name: value for name, value in both.metrics.items() if name.startswith("eval_")}
    assert by_evaluate == {name: pytest.approx(value, rel=1e-6) for name, value in own.items()}  # in other batches


@pytest.mark.parametrize(
    ("every", "val", "test"),
    [
        ("epoch", [6, 12], [6, 12]),
        ({"test": 5}, [6, 12], [5, 10, 12]),
        ({"val": 4, "test": "never"}, [4, 8, 12], None),
        ({"val": 6, "test": "epoch"}, [6, 12], [6, 12]),
    ],
)
def test_each_set_has_its_own_pace(every, val, test, quiet):
    fit(Several(), **OPTIONS, eval_every=every, callbacks=quiet(), run_dir="run")
    steps = evaluated("run")
    assert (steps["eval_val_loss"], steps.get("eval_test_loss")) == (val, test)


class InEvaluation(Callback):
    """Is told to stop at the nth time that all workers agree within an evaluation."""

    def __init__(self, nth):
        self.nth = nth

    def on_setup(self, run):
        synchronize, seen = run.synchronize, []

        def synchronizing(steps=1):
            if run.epoch.evaluating:
                seen.append(steps)
                if len(seen) == self.nth:
                    os.kill(os.getpid(), signal.SIGTERM)
            return synchronize(steps)

        run.synchronize = synchronizing


@pytest.mark.parametrize(
    ("kind", "every", "within", "between"),
    [(Several, "epoch", 2, 3), (Several, {"val": 4, "test": 6}, None, 9), (Stream, {"val": 6}, None, 3)],
)
def test_stopped_within_or_between_evaluations_it_goes_on_with_what_is_left(kind, every, within, between, quiet):
    options = {**OPTIONS, "ema": 0.9, "eval_every": every}
    whole = fit(kind(), **options, callbacks=quiet(), run_dir="whole")
    for nth in filter(None, (within, between)):
        cut = fit(kind(), **options, callbacks=quiet() + [InEvaluation(nth)], run_dir=f"cut-{nth}")
        assert cut.status == "preempted"
        newest = sorted(Path(f"cut-{nth}/checkpoints").iterdir())[-1]
        manifest = json.loads((newest / "manifest.json").read_text())
        assert manifest["evaluating"]
        assert bool(manifest.get("evaluated")) is (nth == between)
        resumed = fit(kind(), **options, callbacks=quiet(), run_dir=f"cut-{nth}")
        assert resumed.status == "finished"
        assert (resumed.weights_sha256, resumed.history) == (whole.weights_sha256, whole.history)
        assert evaluated(f"cut-{nth}") == evaluated("whole")


def test_a_set_that_is_evaluated_no_more_leaves_the_metrics_of_the_others(quiet):
    fit(Several(), **OPTIONS, callbacks=quiet() + [InEvaluation(3)], run_dir="run")
    resumed = fit(Several(), **OPTIONS, eval_every={"test": "never"}, callbacks=quiet(), run_dir="run")
    assert evaluated("run") == {"eval_val_loss": [6, 12]}
    assert "eval_test_loss" not in resumed.metrics


@pytest.mark.parametrize("every", [{"val": "never"}, "never"])
def test_a_set_that_was_evaluated_before_the_cut_is_dropped_too(every, quiet):
    """Its metrics came into the rows of all later epochs."""
    fit(Several(), **OPTIONS, callbacks=quiet() + [InEvaluation(3)], run_dir="run")
    resumed = fit(Several(), **OPTIONS, eval_every=every, callbacks=quiet(), run_dir="run")
    assert all("eval_val_loss" not in row for row in resumed.history)
    assert evaluated("run") == ({} if every == "never" else {"eval_test_loss": [6, 12]})


class MoreValues(Plain):
    """The same task after a change of its code."""

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        return values | {"double": 2 * values["loss"]}


MoreValues.__name__ = "Plain"


def test_an_epoch_without_totals_is_restored_as_such(quiet):
    """Cut off in its evaluation, changed, and cut off there again: the totals were taken for a vector of one number."""
    options = {**OPTIONS, "run_dir": "run"}
    fit(Plain(), **options, callbacks=quiet() + [InEvaluation(2)])
    fit(MoreValues(), **options, callbacks=quiet() + [InEvaluation(2)])
    resumed = fit(MoreValues(), **options, callbacks=quiet())
    first, second = resumed.history
    assert np.isnan(first["loss"])
    assert second["double"] == pytest.approx(2 * second["loss"])


@pytest.mark.parametrize("before", [{"": 3}, {"": -1, "val": 3, "val_hard": 3}])
def test_metrics_of_sets_that_the_task_has_no_more_are_dropped_by_whole_names(before):
    epoch = EpochMetrics()
    epoch.evaluated_at = before
    epoch.eval_metrics = {f"{evaluation_sets.prefix(name)}loss": 1.0 for name, step in before.items() if step > 0}
    epoch.eval_metrics["of_a_callback"] = 2.0
    epoch.drop_evaluations(["val_hard", "test"])
    kept = {"eval_val_hard_loss": 1.0} if "val_hard" in before else {}
    assert epoch.eval_metrics == kept | {"of_a_callback": 2.0}


def test_callbacks_judge_their_own_set_only_and_once_for_each_measurement(quiet):
    stopping = EarlyStopping("eval_test_loss", patience=99)
    judged = []
    stopping.judge = lambda run, metrics: judged.append(run.progress.step)
    best = Checkpoint(keep_last=9)
    fit(
        Several(),
        **OPTIONS,
        eval_every={"val": 2, "test": 5},
        callbacks=quiet(checkpoint=best) + [stopping],
        keep="best",
    )
    assert judged == [5, 10, 12]
    assert best.best == "eval_val_loss"
    with pytest.raises(UsageError, match="did you mean 'eval_val_loss'"):
        fit(Several(), **OPTIONS, callbacks=quiet() + [EarlyStopping()])


class Phased(Several):
    def phases(self):
        return [Phase("one", epochs=1), Phase("both", epochs=1)]

    def eval_data(self):
        sets = super().eval_data()
        return {"val": sets["val"]} if self.phase.name == "one" else sets


def test_phases_may_have_sets_of_their_own(quiet):
    result = fit(Phased(), batch_size=20, eval_every={"test": 2}, callbacks=quiet(), run_dir="run")
    assert evaluated("run") == {"eval_val_loss": [6, 12], "eval_test_loss": [8, 10, 12]}
    assert "eval_test_loss" not in result.history[0]


def test_with_overfit_all_sets_are_the_batches_trained_on(quiet):
    metrics = fit(Several(), epochs=3, batch_size=20, overfit=1, callbacks=quiet()).metrics
    assert metrics["eval_val_loss"] == metrics["eval_test_loss"]


def returning(made):
    return type("Returning", (Plain,), {"eval_data": lambda self: made})()


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        ({"val": held_out(1)}, {"eval_every": {"vla": 5}}, r"eval_data\(\) has no set 'vla'; did you mean 'val'\?"),
        (held_out(1), {"eval_every": {"val": 5}}, r"eval_data\(\) returns no dict of several sets: give"),
        ({"val": held_out(1)}, {"eval_every": {"val": 0}}, "eval_every=.*: give"),
        ({"a/b": held_out(1)}, {}, "the name 'a/b': give names of letters"),
        ({"x": np.zeros((4, 5), "float32")}, {}, r"eval_data\(\)\['x'\] returned ndarray: return ArrayData"),
        ({"val": ArrayData(*regression(9, features=7)[:2])}, {}, r"eval_data\(\)\['val'\] has other examples"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(made, options, message, quiet):
    with pytest.raises(UsageError, match=message):
        fit(returning(made), epochs=1, batch_size=20, callbacks=quiet(), **options)


def test_two_sets_with_a_metric_of_one_name_are_refused(quiet):
    class Twice(Plain):
        def eval_data(self):
            return {"a": held_out(1), "a_b": held_out(2)}

        def compute(self, model, batch, training):
            loss = super().compute(model, batch, training)["loss"]
            return {"loss": loss, "b_loss": loss}

    with pytest.raises(UsageError, match="'a' and 'a_b' both have the metric 'eval_a_b_loss'"):
        fit(Twice(), epochs=1, batch_size=20, callbacks=quiet())


def test_none_is_no_set_and_no_sets_are_no_evaluation(quiet):
    assert evaluation_sets.named({"val": None}) == {}
    assert "eval_loss" not in fit(returning({}), epochs=1, batch_size=20, callbacks=quiet()).metrics


def test_dry_run_and_keras_task_know_them(quiet):
    assert {"eval_val_loss", "eval_test_loss"} <= set(dry_run(Several(), create("single"), {})["metrics"])
    assert "eval_test_loss" not in dry_run(Several(), create("single"), {"eval_every": {"test": "never"}})["metrics"]
    inputs, labels, _ = regression(64)

    def model():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    task = KerasTask(model, "sgd", "mse", (inputs, labels), {"val": (inputs, labels), "test": held_out(2)}, ["mae"])
    metrics = fit(task, epochs=1, callbacks=quiet()).metrics
    assert {"eval_val_loss", "eval_val_mae", "eval_test_loss"} <= set(metrics)


def test_command_line_on_two_workers_evaluates_predicts_and_verifies_them(command, quiet):
    Path("several.py").write_text(TASK)
    arguments = ["--epochs", 2, "--batch-size", 20, "--track", "off", "--eval-every", "val=epoch,test=5", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = tfloop(
        "train", "several.py:Several", *arguments, "--workers", 2, "--backend", "multiworker", "--run-dir", "run",
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = fit(Several(), **OPTIONS, eval_every={"test": 5}, callbacks=quiet())
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert metrics == {name: pytest.approx(value, rel=1e-5) for name, value in alone.metrics.items()}
    assert evaluated("run") == {"eval_val_loss": [6, 12], "eval_test_loss": [5, 10, 12]}

    code, out, err = command("evaluate", "run", "--json")
    assert code == 0, err
    assert {"eval_val_loss", "eval_test_loss"} <= json.loads(out.splitlines()[-1]).keys()

    assert [len(loop.predict(Several(), "run", name)) for name in ("val", "test")] == [54, 55]
    with pytest.raises(UsageError, match=r"DATA 'eval': eval_data\(\) of Several has the sets val, test"):
        loop.predict(Several(), "run")

    for typed, message in (
        ("val=", "give each set once"),
        ("val=1,val=2", "give each set once"),
        ("val=x", "eval_every"),
    ):
        code, _, err = command("train", "several.py:Several", "--eval-every", typed)
        assert (code, message in err) == (2, True), err


def test_verify_compares_all_sets(quiet):
    from loop.commands import verify

    numbers = verify.record(Several(), create("mirrored", 2), verify.options_of(Several(), "float32", 20))
    assert {"metrics/end/eval_val_loss", "metrics/end/eval_test_loss"} <= set(numbers)


@pytest.mark.parametrize("task", [Single, Several])
def test_a_resumed_run_shows_no_metrics_of_sets_that_it_no_longer_evaluates(task, quiet):
    def shown(epochs, every):
        row = fit(task(), epochs=epochs, run_dir="run", eval_every=every, callbacks=quiet()).history[-1]
        return {name for name in row if name.startswith("eval_")}

    first = shown(1, "epoch")
    assert first
    assert not shown(2, "never")
    assert shown(3, "epoch") == first
