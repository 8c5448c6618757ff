"""`tfloop bench`: the contenders train, take turns, and minimise what tfloop minimises."""

import json

import keras
import numpy as np
import pytest

from loop import fit
from loop.commands import bench, bench_contender, terminal
from tests.tasks import Legacy, Weighted

PHASES = """
from loop import Phase
from tests.tasks import Weighted

class Mine(Weighted):
    def phases(self):
        return [Phase('head', epochs=1), Phase('all', steps=9)]

class One(Mine):
    def phases(self):
        return []
"""


def test_all_contenders_are_measured_in_processes_of_their_own(command, tmp_path):
    """Also those of a task whose phases are left out: the way out that the message below names."""
    (tmp_path / "mine.py").write_text(PHASES)
    code, out, err = command("bench", "mine.py:One", "--rounds", 1, "--seconds", 0.1, "--batch-size", 10, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["batch_size"], found["rounds"]) == (10, 1)
    measured = [(each["name"], each["steps"], len(each["speeds"]), each["problem"]) for each in found["contenders"]]
    assert measured == [
        ("tfloop", None, 1, ""), ("by hand", 1, 1, ""), ("by hand", 50, 1, ""), ("Keras fit", 1, 1, ""),
        ("Keras fit", 50, 1, ""),
    ]  # fmt: skip
    assert all(speed > 0 for each in found["contenders"] for speed in each["speeds"])


def test_bad_input_is_one_line(command):
    code, _, err = command("bench", "digits", "--seconds", 0)
    assert (code, err.strip()) == (2, "tfloop: error: --seconds 0.0: give a number > 0")


@pytest.mark.parametrize("name", ["bench", "tune"])
def test_a_task_with_phases_is_refused_without_a_word_of_steps(name, command, tmp_path):
    (tmp_path / "mine.py").write_text(PHASES)
    code, out, err = command(name, "mine.py:Mine", "--rounds", 1, "--seconds", 0.1)
    [line] = [line for line in err.splitlines() if "error" in line]
    assert (code, out) == (2, "")
    assert line.startswith("tfloop: error: Mine has phases (head, all), which end by themselves, and a trial trains")
    if name == "tune":  # the way out that the message names; the test above has that of bench
        assert command(name, "mine.py:One", "--rounds", 1, "--seconds", 0.1, "--only", "prefetch")[0] == 0


@pytest.mark.parametrize("defaults_", [{}, {"clip_norm": 0.01}, {"clip_value": 0.01}])
def test_a_contender_minimises_what_tfloop_does(quiet, defaults_):
    """One step of plain gradient descent by hand, from the same weights, over one batch of all examples."""

    class Once(Weighted):
        defaults = defaults_

        def build_model(self):
            return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, kernel_initializer="ones")])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

    size = Once().train_data().size
    result = fit(Once(), epochs=1, batch_size=size, callbacks=quiet(), eval_every="never")
    kept = []

    class Kept(Once):
        def build_model(self):
            kept.append(super().build_model())
            return kept[0]

    assert bench_contender._by_hand(Kept(), size, 1)() == size
    for ours, by_hand in zip(result.model.get_weights(), kept[0].get_weights(), strict=True):
        np.testing.assert_allclose(by_hand, ours, rtol=1e-5, atol=1e-6)  # examples are added up in another order


class Heavy(Weighted):
    defaults = {"accumulate": 4, "compile": "xla", "batch_size": 10, "clip_norm": 1.0}


def test_options_of_the_task_that_a_contender_goes_without_are_told():
    left_out = bench_contender._left_out(Heavy())
    assert left_out == "accumulate=4, compile='xla'"
    assert bench_contender._left_out(Weighted()) == ""
    hand = bench.Contender(bench.BY_HAND, 1, [2.0], left_out=left_out)
    report = bench.Report("mine", 8, 1, [bench.Contender(bench.OURS, None, [1.0]), hand])
    shown = "".join(terminal.as_text(line) for line in bench.lines(report) if not isinstance(line, tuple))
    assert "1.00 of the loop by hand, without accumulate=4, compile='xla'" in shown


class OwnStep(Weighted):
    def train_step(self, model, step):
        step.minimize(lambda batch: self.compute(model, batch, training=True))


class InFloat64(Weighted):
    defaults = {"precision": "float64"}


def test_what_a_short_loop_cannot_train_is_said():
    with pytest.raises(bench_contender._NotComparableError, match="a train_step of its own, which only tfloop calls"):
        bench_contender._check(OwnStep())
    bench_contender._check(Weighted())
    with pytest.raises(bench_contender._NotComparableError, match="the task trains in float64 by itself"):
        bench_contender._check(InFloat64())
    with pytest.raises(bench_contender._NotComparableError, match="model and optimizer aren't Keras 3's"):
        bench_contender._keras(Legacy(), 8, 1)


def test_lines_compare_the_best_ways():
    contenders = [
        bench.Contender("tfloop", None, [90.0, 110.0, 100.0]),
        bench.Contender("by hand", 1, [40.0]), bench.Contender("by hand", 50, [50.0]),
        bench.Contender("Keras fit", 1, problem="no Keras model"),
        bench.Contender("Keras fit", 50, [200.0], problem="killed in round 2"),
    ]  # fmt: skip
    told = [line[0] for line in bench.lines(bench.Report("t.py:T", 8, 3, contenders)) if isinstance(line, tuple)]
    assert told == ["tfloop makes 2.00 times the examples of by hand, 50 steps a call"]
