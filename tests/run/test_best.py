"""The best weights: what a run returns, exports and evaluates where they are kept."""

import math
from pathlib import Path

import numpy as np
import pytest

import callbacks
from callbacks import Callback, Checkpoint, EarlyStopping
from callbacks import checkpoint as policy
from loop import Phase, UsageError, evaluate, fit
from loop.backends import create
from loop.commands.export import export
from tests.products import singles
from tests.tasks import Legacy, Plain, Weighted


class Scores(Callback):
    """Says how good the evaluations are."""

    runs_on = "all"

    def __init__(self, *scores):
        self.scores = scores

    def on_eval_end(self, run, metrics):
        metrics["eval_loss"] = float(self.scores[run.progress.epoch])


class Killed(BaseException):
    """Nothing in the loop catches this: the process might as well be gone."""


class KillAt(Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_start(self, run):
        if run.progress.epoch == self.epoch:
            run.checkpointing.held = None  # which would be lost with the process
            raise Killed


SCORES = (5, 4, 1, 3, 2, 2, 2)


def train(directory, *more, epochs=5, task=None, backend="single", checkpoint=None, scores=SCORES, **options):
    chosen = callbacks.standard(
        mlflow=None, progress=None, report=None, checkpoint=checkpoint or Checkpoint(keep_last=1)
    )
    return fit(
        task or Weighted(), epochs=epochs, batch_size=50, backend=backend, run_dir=directory,
        callbacks=callbacks.StandardSet([Scores(*scores), *chosen, *more]), **options,
    )  # fmt: skip


def steps_of(directory):
    return sorted(int(path.name.removeprefix("step-")) for path in Path(directory, "checkpoints").iterdir())


@pytest.mark.parametrize(("replicas", "pause"), singles([1, 2], [0.0, math.inf]))
def test_the_best_weights_are_the_result_and_a_resume_goes_on_from_the_last(replicas, pause, monkeypatch):
    monkeypatch.setattr(policy, "PAUSE", pause)
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    third = train("third", epochs=3, backend=backend)
    last = train("last", epochs=7, backend=backend, scores=(7, 6, 5, 4, 3, 2, 1))
    with pytest.raises(Killed):
        train("run", KillAt(4), keep="best", backend=backend)
    best = train("run", keep="best", backend=backend)
    assert (best.status, best.steps, best.best_step) == ("finished", 15, 9)
    assert (best.weights_sha256, best.metrics) == (third.weights_sha256, third.metrics)
    assert best.history[-1]["step"] == 15
    assert {9, 15} <= set(steps_of("run"))
    assert train("run", keep="best", backend=backend).weights_sha256 == third.weights_sha256  # nothing to do

    evaluated = evaluate(Weighted(), "run")
    assert evaluated == evaluate(Weighted(), "third") != evaluate(Weighted(), "run/checkpoints/step-00000015")
    export(None, Path("run"), Path("run.npz"))
    with np.load("run.npz") as stored:
        for name, own in zip(stored.files, third.model.get_weights(), strict=True):
            np.testing.assert_array_equal(stored[name], own)

    longer = train("run", epochs=7, keep="best", backend=backend, scores=(5, 4, 1, 3, 2, 2, 0.5))
    assert (longer.steps, longer.best_step) == (21, None)  # the last is the best
    assert longer.weights_sha256 == last.weights_sha256


def test_early_stopping_restores_the_best(monkeypatch):
    monkeypatch.setattr(policy, "PAUSE", math.inf)
    second = train("second", epochs=2, scores=(5, 4))
    stopping = EarlyStopping(patience=2, min_delta=2, restore_best=True)  # 4 is no better than 5, nor 3.5
    result = train("run", stopping, epochs=7, scores=(7, 4, 3.5, 3))
    assert (result.status, result.steps, result.best_step) == ("stopped", 12, 6)
    assert result.weights_sha256 == second.weights_sha256
    assert evaluate(Weighted(), "run") == evaluate(Weighted(), "second")
    # It goes on from the last step, and may find better ones.
    resumed = train(
        "run", EarlyStopping(patience=2, min_delta=2, restore_best=True), epochs=7, scores=(9,) * 4 + (0, 1, 1)
    )
    assert (resumed.status, resumed.steps, resumed.best_step) == ("stopped", 21, 15)


def test_best_by_another_metric_with_averages_and_without_an_evaluation():
    by_loss = train("loss", epochs=3, keep="best", eval_every="never")
    assert by_loss.history[-1]["loss"] == min(row["loss"] for row in by_loss.history)
    assert by_loss.best_step is None
    named = Checkpoint(best="eval_error", mode="max", keep_last=1)
    best = train("named", epochs=3, keep="best", ema=0.9, checkpoint=named)
    errors = [row["eval_error"] for row in best.history]
    assert best.metrics["eval_error"] == max(errors)
    assert evaluate(Weighted(), "named")["eval_error"] == pytest.approx(max(errors), rel=1e-6)


def test_no_value_is_compared_with_one_of_another_metric_of_an_earlier_attempt():
    def saving(metric):
        return Checkpoint("epoch", best=metric, keep_last=1)

    def again(directory, epochs, *more, **options):
        return train(directory, *more, epochs=epochs, scores=(6, 4, 5, 3, 2, 8), **options)

    again("kept", 2, keep="best", checkpoint=saving("eval_error"))  # which is below all of the scores
    resumed = again("kept", 6, keep="best", checkpoint=saving("eval_loss"))
    assert (resumed.steps, resumed.best_step) == (18, 15)

    again("stopped", 2, EarlyStopping("eval_error", patience=2, restore_best=True))
    resumed = again("stopped", 5, EarlyStopping("eval_loss", patience=2, restore_best=True))
    assert (resumed.status, resumed.steps, resumed.best_step) == ("finished", 15, None)


@pytest.mark.parametrize("steps", [8, 10])  # within an epoch, and at its end
def test_the_metrics_are_those_of_the_best_weights_also_within_an_epoch(steps):
    evaluated = {}

    class ByStep(Callback):
        def on_eval_end(self, run, metrics):
            metrics["eval_loss"] = {2: 5.0, 4: 1.0, 6: 3.0, 8: 2.0, 10: 4.0}[run.progress.step]
            evaluated[run.progress.step] = dict(metrics)

    chosen = callbacks.standard(mlflow=None, progress=None, report=None)
    best = fit(
        Weighted(), steps=steps, batch_size=20, eval_every=2, keep="best", run_dir="run",
        callbacks=callbacks.StandardSet([ByStep(), *chosen]),
    )  # fmt: skip
    assert best.best_step == 4
    assert {name: best.metrics[name] for name in evaluated[4]} == evaluated[4]
    assert best.metrics["loss"] == best.history[0]["loss"]
    assert evaluate(Weighted(), "run")["eval_error"] == pytest.approx(best.metrics["eval_error"], rel=1e-6)


class WithoutEvaluationAtFirst(Weighted):
    """The training's loss is far below the scores of the evaluation, which only the second phase has."""

    def phases(self):
        return [Phase("alone", epochs=2), Phase("evaluated", epochs=3)]

    def eval_data(self):
        return super().eval_data() if self.phase.name == "evaluated" else None


def test_no_value_is_compared_with_one_of_another_metric_of_an_earlier_phase():
    best = train("run", epochs=None, task=WithoutEvaluationAtFirst(), scores=(0, 0, 5, 4, 6), keep="best")
    assert (best.steps, best.best_step, best.metrics["eval_loss"]) == (15, 12, 4)


class InPhases(Legacy):
    """Of tf_keras, whose models order their variables by whether they are trained."""

    def phases(self):
        return [Phase("head", epochs=2), Phase("all", epochs=2)]

    def begin_phase(self, model, phase):
        model.layers[0].trainable = phase.name == "all"


def test_the_best_weights_of_an_earlier_phase():
    head = train("head", epochs=None, task=InPhases(), scores=(5, 1, 2, 3), keep="best")
    assert (head.steps, head.best_step) == (12, 6)

    class First(InPhases):
        def phases(self):
            return super().phases()[:1]

    alone = train("alone", epochs=None, task=First(), scores=(5, 1))
    for own, other in zip(head.model.layers, alone.model.layers, strict=True):
        for ours, theirs in zip(own.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert evaluate(InPhases(), "head") == evaluate(First(), "alone")


def test_what_the_best_needs(capfd):
    without = callbacks.standard(mlflow=None, progress=None, checkpoint=None)
    with pytest.raises(UsageError, match="keep='best' takes the weights of the best checkpoint"):
        fit(Plain(), keep="best", callbacks=without)
    with pytest.raises(
        UsageError, match="EarlyStopping\\(restore_best=True\\) takes the weights of the best checkpoint"
    ):
        fit(Plain(), callbacks=without + [EarlyStopping(restore_best=True)])
    with pytest.raises(UsageError, match="with keep='best': give one of the two"):
        train("both", EarlyStopping(restore_best=True), keep="best")
    train("from", epochs=2, keep="best", scores=(1, 2))
    capfd.readouterr()
    elsewhere = train("elsewhere", epochs=4, keep="best", resume="from", scores=(1, 2, 4, 5))
    assert (elsewhere.steps, elsewhere.best_step) == (12, 9)
    assert "the best weights so far, of step 3, are not in this run directory" in capfd.readouterr().err
    for path in Path("elsewhere/checkpoints/step-00000009").iterdir():
        path.write_bytes(b"garbage")
    assert train("elsewhere", epochs=4, keep="best").best_step is None
    assert "warning: the best weights can't be read, these are the last ones" in capfd.readouterr().err
