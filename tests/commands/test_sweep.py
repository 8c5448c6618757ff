"""Sweeps: what is tried is what was asked for, each trial once, whatever is killed when. And the learning rate test."""

import io
import json
import random
import re
import shutil
import signal
import sqlite3
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import optuna
import pytest

import callbacks
from callbacks.files import read_json
from loop import UsageError, backends, fit
from loop.commands import sweep
from loop.commands.cli.training import train_options
from loop.commands.find_lr import find_lr, lines
from loop.commands.sweep import Plan, Range, directory, trials
from loop.options import with_defaults
from tests.campaigns.sweep import Life, check
from tests.conftest import ROOT
from tests.tasks import Plain, Streamed

TRIAL = [sys.executable, "-P", "-m", "tests.campaigns.trial"]
# Sweeps without TensorFlow: the task's fields, the trials' command, and a plan, as JSON.
DRIVER = """
import dataclasses, json, sys
from pathlib import Path
from loop.commands import sweep
from loop.commands.sweep import trials as making
fields, command, plan, trials = map(json.loads, sys.argv[1:])
making.COMMAND = command or making.COMMAND
types = {"float": float, "int": int}
kind = dataclasses.make_dataclass("Weighted", [(name, types[each]) for name, each in fields.items()])
found = sweep.sweep(sweep.Plan(**plan), kind, trials, 2, Path("swept"))
print(json.dumps(found.as_json()))
sys.exit(75 if found.stopped else 0)
"""


@dataclass
class Fields:
    """Stands for a task, whose fields alone are looked at."""

    x: float = 0.0
    hidden: int = 8
    kind: str = "plain"
    deep: bool = False
    shape: tuple = ()


@pytest.fixture
def trial(monkeypatch):
    """Trials are trained by `tests.campaigns.trial`."""
    monkeypatch.setattr(trials, "COMMAND", TRIAL)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def plan(grid=(), random=(), **changes):
    given = {
        "target": "fields.py:Fields", "grid": sweep.assigned("--grid", grid), "metric": "eval_loss",
        "random": sweep.assigned("--random", random), "direction": "minimize", "sampler": "tpe", "pruner": "none",
        "seed": 0, "arguments": ["--track=off"], "place": "/",
    }  # fmt: skip
    return Plan(**given | changes)


def swept(asked, trials=None, jobs=2):
    """What a sweep comes to, and what it has shown."""
    shown = io.StringIO()
    return sweep.sweep(asked, Fields, asked.trials(trials), jobs, Path("swept"), shown), shown.getvalue()


def test_the_quotes_around_a_value_are_not_part_of_it():
    asked = plan(["""kind="a,b",'c',d"e,"\\"f\\"",\"\""""])
    values = ["a,b", "c", 'd"e', '"f"', ""]
    assert [asked.combination(number)["kind"] for number in range(asked.trials(None))] == values
    assert sweep.space(Fields, asked) == {"kind": values}


def test_a_grid_is_tried_whole_and_failures_are_told(trial):
    asked = plan(["x=0.1,0.3,0.9", "kind=plain,fails"])
    found, shown = swept(asked)
    tried = [(row.params["x"], row.params["kind"], row.state) for row in found.rows]
    ends = {"plain": "complete", "fails": "failed"}
    assert tried == [(x, kind, ends[kind]) for x in ("0.1", "0.3", "0.9") for kind in ("plain", "fails")]
    assert found.best.number == 2
    assert found.best.value == pytest.approx(1 / 20)
    assert found.command(found.best)[:3] == ["tfloop", "train", "fields.py:Fields"]
    assert found.command(found.best)[-2:] == ["--set=x=0.3", "--set=kind=plain"]
    assert not found.stopped
    assert len(re.findall(r"failed: planted", shown)) == 3
    assert read_json(Path("swept/run.json"))["status"] == "finished"
    again, shown = swept(asked)  # nothing is left to do
    assert again.rows == found.rows
    assert "going on: 6 of 6 trials have ended" in shown
    assert [len(path.read_text().splitlines()) for path in Path("swept").glob("*/lives")] == [1] * 6
    with pytest.raises(UsageError, match=r"another sweep: grid was .*, now .*: give another --sweep-dir"):
        swept(plan(["x=0.1,0.3"]))


def test_each_column_of_the_table_holds_its_longest_value(trial):
    _, shown = swept(plan(["kind=plain,a-kind-with-a-long-name"], ["x=0.1..0.9"]), 2)
    head, *rows = shown.splitlines()[1:]
    assert {row.split()[1] for row in rows} == {"plain", "a-kind-with-a-long-name"}
    assert {len(row) for row in rows} == {len(head)}


def test_what_is_drawn_lies_in_its_range_and_follows_from_the_seed(trial):
    drawn = []
    asked = plan(["kind=plain,nan"], ["x=1e-4..1e-1:log", "hidden=16..256"], seed=1, sampler="random")
    for name in ("a", "b"):
        found = sweep.sweep(asked, Fields, 4, 4, Path(name), io.StringIO())
        drawn.append([row.params for row in found.rows])
        assert all(1e-4 <= float(each["x"]) <= 1e-1 and 16 <= int(each["hidden"]) <= 256 for each in drawn[-1])
        assert [row.state for row in found.rows] == ["complete", "failed"] * 2
        assert found.rows[1].problem == "eval_loss is nan"
    assert drawn[0] == drawn[1]
    assert len({each["x"] for each in drawn[0]}) == 4
    more = sweep.sweep(asked, Fields, 6, 4, Path("b"), io.StringIO())
    assert [row.params for row in more.rows][:4] == drawn[1]
    assert len({row.params["x"] for row in more.rows}) == 6


def test_a_trial_that_is_worse_than_most_is_pruned_and_not_failed(trial):
    asked = plan(["x=0.1,0.15,0.2,0.25,0.3,9"], pruner="median")
    found, shown = swept(asked, jobs=1)  # the last one would never end
    assert [row.state for row in found.rows] == ["complete"] * 5 + ["pruned"]
    assert found.best.number == 4
    assert read_json(Path("swept/trial-005/run.json"))["status"] == "stopped"
    assert re.search(r"^ +5 .*pruned$", shown, re.MULTILINE)


def test_all_failed_is_a_failure(trial):
    found, _ = swept(plan(["kind=fails"], ["x=0..1"]), 2)
    assert found.best is None
    assert not found.stopped
    assert read_json(Path("swept/run.json"))["status"] == "failed"


def test_a_metric_that_there_is_not_ends_the_sweep_at_once(trial):
    with pytest.raises(UsageError, match=r"--metric eval_los: .*did you mean 'eval_loss'\?"):
        swept(plan([], ["x=1..2"], metric="eval_los"), 4)
    assert not any(map(sweep.in_use, Path("swept").glob("trial-*")))


def driven(asked, trials, fields, command=()):
    """The command line of a sweep in a process of its own."""
    return [sys.executable, "-c", DRIVER, *map(json.dumps, (fields, command, asked.as_json(), trials))]


def test_no_trial_is_lost_or_made_twice_by_kills(trial, monkeypatch):
    monkeypatch.setenv("TRIAL_SECONDS", "0.05")
    command = driven(plan([], ["x=0..0.9"]), 8, {"x": "float"}, TRIAL)
    directory, draw = Path("swept"), random.Random(0)

    def made():
        return sum(len(path.read_text().splitlines()) for path in directory.glob("trial-*/witness"))

    for number in range(3):
        life, enough = Life(command), made() + draw.randrange(25)
        assert life.wait_for(lambda enough=enough: (directory / "trial-000").exists() and made() >= enough)
        life.kill(everything=number % 2 == 1)
    life = Life(command)
    code, shown = life.result()
    assert code == 0, shown
    assert "8 trials have ended" in shown
    rows = [json.loads(path.read_text()) for path in sorted(directory.glob("trial-*/state.json"))]
    assert rows == [20] * 8
    lives = 0
    for place in directory.glob("trial-*"):
        steps = [int(line) for line in (place / "witness").read_text().split()]
        started = [json.loads(line) for line in (place / "lives").read_text().splitlines()]
        assert len({json.dumps(fields) for _, fields in started}) == 1  # the same values in each life
        # A step that was not saved is made again, by the life that follows it; no other is.
        assert set(steps) == set(range(1, 21))
        assert max(Counter(steps).values()) <= len(started)
        assert len(steps) <= 20 + len(started) - 1
        lives += len(started)
    assert lives > 8


def test_a_signal_has_the_trials_save_and_the_same_command_goes_on(trial, monkeypatch):
    command = driven(plan([], ["x=2..3"]), 3, {"x": "float"}, TRIAL)
    life = Life(command)
    assert life.wait_for(lambda: len(list(Path("swept").glob("trial-*/witness"))) == 2)
    life.process.send_signal(signal.SIGINT)
    code, shown = life.result()
    assert code == 75
    assert "stopping: the trials under way save and end" in shown
    states = [read_json(path)["status"] for path in Path("swept").glob("trial-*/run.json")]
    assert states == ["preempted"] * 2
    assert not list(life.pids())
    assert read_json(Path("swept/run.json"))["status"] == "preempted"
    for number in range(3):  # they would never end
        (Path("swept") / f"trial-{number:03d}").mkdir(exist_ok=True)
        (Path("swept") / f"trial-{number:03d}" / "prune").touch()
    life = Life(command)
    code, shown = life.result()
    assert code == 0
    assert "going on: 0 of 3 trials have ended" in shown
    assert shown.count("pruned") == 3


@pytest.mark.timeout(900)
def test_real_trials_through_a_kill_come_once_and_below_one_run_of_mlflow(empty_store, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "mine.py").write_text("from dataclasses import dataclass\nfrom tests.tasks import Weighted as Plain\n")
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    asked = plan(
        ["hidden=2,3,4"], target="mine.py:Plain", arguments=["--epochs=3", f"--track={uri}", "--track-wait=300"],
        place=str(tmp_path),
    )  # fmt: skip
    command = driven(asked, 3, {"hidden": "int"})
    life = Life(command)
    directory = tmp_path / "swept"
    assert life.wait_for((directory / "trial-002").exists)  # later kills are in tests.campaigns.sweep
    life.kill(everything=True)
    life = Life(command)
    code, shown = life.result()
    assert code == 0, shown
    assert "going on" in shown
    check(directory, uri, 3)


@pytest.fixture
def command(command, tmp_path):
    """Runs a command line beside a task."""
    (tmp_path / "mine.py").write_text("from tests.tasks import Weighted\n\n\nclass Mine(Weighted):\n    pass\n")
    return command


BAD = [
    (["--grid", "x"], "--grid x: give a field and its values, such as lr=1e-3,1e-2"),
    (["--grid", "x=1,,2"], "--grid x=1,,2: give a field"),
    (["--grid", "x=1", "--grid", "x=2"], "--grid x=2: x is there twice"),
    (["--grid", "x=1", "--random", "x=1..2", "--trials", "2"], "x is in --grid and in --random"),
    (["--grid", "x=1", "--set", "x=2"], "x is in --set and in --grid"),
    ([], "give what is to be tried: --grid"),
    (["--random", "x=1..2"], "--random draws for ever: give --trials N"),
    (["--grid", "x=1,2", "--trials", "3"], "--trials 3: the grid has only 2 combinations"),
    (["--grid", "x=1", "--trials", "3"], "--trials 3: the grid has only 1 combination: leave"),
    (["--grid", "x=1,2", "--trials", "0"], "--trials 0: give a whole number from 1"),
    (["--grid", "x=1", "--sampler", "tbe"], "--sampler tbe: .*did you mean 'tpe'"),
    (["--grid", "x=1", "--pruner", "mean"], "--pruner mean: .*did you mean 'median'"),
    (["--grid", "x=1", "--direction", "up"], "--direction up: there is no such direction; there are: minimize, max"),
    (["--grid", "x=1", "--epochs", "0"], "epochs=0: give a whole number >= 1"),
    (["--grid", "rat=1"], "--grid rat=1: Mine has no field 'rat'; did you mean 'rate'"),
    (["--grid", "rate=1,two"], "--grid rate=two: 'two' isn't of type float"),
    (["--grid", "rate=1,1.0"], "--grid rate=1,1.0: 1.0 is there twice"),
    (["--random", "rate=2..1", "--trials", "2"], "--random rate=2..1: give LOW..HIGH with LOW < HIGH"),
    (["--random", "hidden=1..99999999999999999999", "--trials", "2"], "LOW < HIGH, of 9e\\+15 at most"),
    (["--random", "rate=0..1:log", "--trials", "2"], "a logarithm needs LOW > 0"),
    (["--random", "hidden=1.5..2", "--trials", "2"], "--random hidden=1.5: '1.5' isn't of type int"),
    (["--grid", "rate=1", "--set", "hiden=3"], "--set hiden=3: Mine has no field 'hiden'; did you mean 'hidden'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_before_anything_starts(command, arguments, message):
    code, out, err = command("sweep", "mine.py:Mine", "--track", "off", *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"tfloop: error: .*{message}.*\n", err), err
    assert not Path("runs").exists()


@pytest.mark.parametrize("content", ["text", [1], 3, True])
def test_the_directory_of_a_stranger_is_no_sweep(content, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"task": "T", "sweep": content}))
    with pytest.raises(UsageError, match=r"it holds run\.json, and no sweep: give a new directory"):
        directory.begin(tmp_path, {"sweep": {"target": "t.py:T"}})


def test_a_sweep_that_is_stopped_before_a_trial_may_be_started_again(command, monkeypatch):
    def stopped(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "sweep", stopped)
    code, out, err = command("sweep", "mine.py:Mine", "--grid", "rate=0.1")
    assert (code, out) == (75, "")
    assert err.endswith("stopped: no trial is under way; start again to go on\n")


def test_an_example_is_meant_also_where_a_directory_has_its_name(command):
    Path("digits").mkdir()
    code, _, err = command("sweep", "digits", "--grid", "hiden=8,16")
    assert (code, "--grid hiden=8: Digits has no field 'hiden'" in err) == (2, True), err


def test_a_sweep_goes_on_by_its_directory(command, trial):
    arguments = ["sweep", "mine.py:Mine", "--grid=hidden=2,3", "--random=rate=0.1..0.5", "--track=off", "--seed=3"]
    code, out, err = command(*arguments, "--trials=2", "--json")
    assert code == 0, err
    found = json.loads(out)
    directory = Path(found["sweep_dir"])
    assert directory.name.startswith("sweep-Mine-")
    assert found["best"]["command"][2:4] == [f"{Path('mine.py').resolve()}:Mine", "--seed=3"]
    code, out, _ = command(*arguments, "--trials=2", "--json")  # the same command, the same sweep
    assert json.loads(out) == found
    code, out, err = command("sweep", directory, "--trials=3", "--jobs=2")
    assert code == 0, err
    assert "going on: 2 of 3 trials have ended" in err
    best, line = out.splitlines()
    assert re.fullmatch(r"best: trial \d, eval_loss \S+, in \S+/trial-00\d", best)
    assert line.startswith("tfloop train ")
    for extra, message in (
        (["--epochs=3"], "--epochs: .* is a directory, whose sweep has its own: leave --epochs out"),
        (["--grid=rate=1"], "--grid: .*leave --grid out"),
    ):
        code, _, err = command("sweep", directory, *extra)
        assert code == 2
        assert re.search(message, err)
    code, _, err = command("sweep", ".")
    assert code == 2
    assert "isn't a directory of a sweep" in err
    for words in (["evaluate"], ["rerun"], ["export", "weights.npz"]):  # what a run has, and a sweep hasn't
        code, _, err = command(words[0], directory, *words[1:])
        assert code == 2
        assert re.fullmatch(r"tfloop: error: \S+ is a sweep: give a trial of it, such as \S+/trial-00\d\n", err), err
    shutil.rmtree(directory / best.rpartition("/")[2])
    code, out, err = command("sweep", directory, "--trials=3")
    assert code == 0, err
    assert re.match(r"best: trial \d, eval_loss \S+, \S+/trial-00\d is gone; to train it again:\ntfloop train ", out)
    (directory / "study.db").write_text("no database")
    code, _, err = command("sweep", directory)
    assert code == 2
    assert re.fullmatch(r"tfloop: error: \S+/study.db can't be used \(.*\): give another --sweep-dir\n", err), err


def test_a_full_disk_of_the_storage_is_told_as_such(monkeypatch):
    """It was a value that may be too long, or a reason for another directory, which may be on the same disk."""

    def create_study(**arguments):
        database = sqlite3.connect(":memory:")
        database.execute("PRAGMA max_page_count = 1")  # SQLite takes no second page, as on a full disk
        try:
            database.execute("CREATE TABLE trials (number)")
        except sqlite3.OperationalError as error:
            raise optuna.exceptions.StorageInternalError("typically due to exceeding max length") from error

    monkeypatch.setattr(optuna, "create_study", create_study)
    with pytest.raises(OSError, match=r"No space left on device: .*/swept/study.db"):
        swept(plan(["x=0.1,0.3"]))


def test_what_is_typed_and_what_a_file_says_reach_the_trials(command):
    Path("it.toml").write_text(
        "epochs = 4\nbatch-size = 8\nprecision = 'float64'\n[set]\nrate = 1.0\nhidden = 3\ndeep = true\n"
    )
    found = sweep.arguments({"epochs": 2, "track": None}, ["rate=0.5"], [Path("it.toml")], train_options(), ["deep"])
    assert found == ["--batch-size=8", "--precision=float64", "--set=hidden=3", "--epochs=2", "--set=rate=0.5"]


def test_secrets_are_in_no_file_of_a_sweep(monkeypatch):
    monkeypatch.setattr("sys.argv", ["tfloop", "sweep", "--set=api_key=hunter2hunter2"])
    asked = plan(["x=1"], arguments=["--set=api_key=hunter2hunter2"])
    assert "hunter2" not in json.dumps(asked.as_json())
    Path("run.json").write_text(json.dumps({"sweep": asked.as_json(), "trials": 1}))
    with pytest.raises(UsageError, match="doesn't have the secrets of its command"):
        sweep.reopened(Path())


def test_ranges_have_the_types_of_the_fields():
    found = sweep.space(Fields, plan(["deep=true,false"], ["hidden=16..256:log", "x=1..5", "kind=a,b"]))
    assert found == {
        "deep": ["true", "false"], "hidden": Range(16, 256, True), "x": Range(1.0, 5.0, False), "kind": ["a", "b"],
    }  # fmt: skip
    assert isinstance(found["x"].low, float)
    with pytest.raises(
        UsageError, match=r"--random kind=a..b: the field isn't a number: give its values, such as kind="
    ):
        sweep.space(Fields, plan([], ["kind=a..b"]))


# The learning rate


class Two(Plain):
    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")])

    def build_optimizer(self):
        return {"a": keras.optimizers.SGD(0.1), "b": keras.optimizers.SGD(0.02)}


class Decayed(Plain):
    def build_optimizer(self):
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))


def found_for(task, low=1e-4, high=10.0, steps=60, engine="single"):
    options = with_defaults(task, {"batch_size": 8, "backend": engine})
    return find_lr(task, backends.create(engine, 2 if engine == "mirrored" else None), options, steps, low, high)


@pytest.mark.parametrize("kind", [Plain, Streamed, Decayed])
def test_the_rate_is_found_where_the_loss_falls_and_the_test_ends_where_it_diverges(kind):
    found = found_for(kind())
    assert found.diverged
    assert found.rates[-1] < 10
    assert np.allclose(np.diff(np.log(found.rates)), np.log(1e5) / 59)
    assert len(found.losses) == len(found.rates) == len(found.smoothed)
    assert 1e-3 < found.suggestion < 1
    assert not Path("runs").exists()
    text = "\n".join(lines(found))
    assert f"suggestion: {found.suggestion:.1e}, where the loss falls fastest" in text
    assert "the loss diverged at" in text


class Losses(callbacks.Callback):
    every = 1

    def __init__(self):
        self.found = []

    def on_steps_end(self, run, metrics):
        self.found.append(metrics["loss"])


def test_the_losses_are_those_of_a_training(quiet):
    task, losses = Plain(rate=0.02), Losses()
    fit(task, steps=20, batch_size=8, callbacks=quiet() + [losses])
    found = found_for(task, 0.02, 0.02 * (1 + 1e-9), 20)
    assert found.losses == pytest.approx(losses.found, rel=1e-6)
    assert found.scaled == {"": 1.0}
    assert found_for(task, 0.02, 0.02 * (1 + 1e-9), 20, "mirrored").losses == pytest.approx(losses.found, rel=1e-5)


def test_several_rates_keep_their_ratios():
    found = found_for(Two())
    assert found.scaled == pytest.approx({"a": 1.0, "b": 0.2})
    assert f"  b: {0.2 * found.suggestion:.1e}" in list(lines(found))


def test_find_lr_prints_writes_and_refuses(command, tmp_path):
    code, out, err = command("find-lr", "mine.py:Mine", "--steps=40", "--low=1e-4", "--json", "--out=lr.json")
    assert code == 0, err
    assert json.loads(out) == json.loads(Path("lr.json").read_text())
    code, out, _ = command("find-lr", "mine.py:Mine", "--steps=40", "--low=1e-4", "--out=lr.svg")
    assert code == 0
    assert "learning rate" in Path("lr.svg").read_text()
    assert "suggestion: " in out
    code, out, _ = command("find-lr", "mine.py:Mine", "--steps=10", "--low=1e-30", "--high=1e-29")
    assert code == 1
    assert "no suggestion: the loss falls no more than by chance" in out
    for arguments, message in (
        (["--low=1", "--high=0.1"], "--low 1.0 --high 0.1: give learning rates > 0, the lower one first"),
        (["--out=x.pdf"], "--out x.pdf: give a name that ends in .png, .svg or .json"),
        (["--out=none/x.png"], "--out none/x.png: it can't be written there"),
        (["--workers=2", "--backend=multiworker"], "find-lr runs in one process, not on multiworker"),
    ):
        code, _, err = command("find-lr", "mine.py:Mine", *arguments)
        assert code == 2
        assert message in err
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"lr.json", "lr.svg", "mine.py"}
