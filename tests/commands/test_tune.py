"""What `tfloop tune` concludes from what it has measured. (Real trials are in test_cli.py and test_failures.py.)"""

import itertools
import random
import re
import tomllib

import pytest

from loop import UsageError
from loop.commands import terminal, tune
from loop.commands.trial import reason
from loop.commands.tune import Report, Row, _Tuner
from loop.errors import TrainingError

ABOUT = {
    "options": {"compile": "graph", "steps_per_call": "auto", "prefetch": 2, "batch_size": 32},
    "machine": {"cpus": 8, "intra_op_threads": 0},
    "versions": {"tensorflow": "2"},
    "workers": 1,
    "replicas": 1,
    "backend": "single",
    "stream": True,
}


class Planned(_Tuner):
    """Its trials have the outcomes that a function says: examples per second and memory, or a reason."""

    def __init__(self, outcome, rounds=3, examples=None, about=ABOUT):
        super().__init__(["digits", "--set=hidden=1"], 1.0, rounds, None, None)
        self._outcome, self._code, self._examples, self._made_by = outcome, 1, examples, about
        self.trials = []

    def _measure(self, row):
        self.trials.append(str(row))
        found = self._outcome(row.changes)
        self._about = self._made_by
        if isinstance(found, str):
            row.problem = found
        else:
            row.speeds.append(found[0])
            row.memory = found[1]


def noisy(percent):
    """Up and down by so much."""
    draw = random.Random(0)
    return iter(lambda: 1 + draw.uniform(-percent, percent) / 100, None)


def test_what_is_faster_beyond_the_noise_is_taken():
    noise = noisy(1)
    factors = {"compile": {"xla": 1.3}, "prefetch": {1: 0.5, "auto": 1.005}, "threads": {4: 1.2, 1: 0.1}}

    def outcome(changes):
        speed = 1000 * next(noise)
        for name, value in changes.items():
            speed *= factors.get(name, {}).get(value, 1.0)
        return speed, 10**9

    tuner = Planned(outcome)
    found = tuner.tune(tune.TUNED[:5], False)
    assert found.best.changes == {"compile": "xla", "threads": 4}
    assert found.best.against == pytest.approx(1.3 * 1.2, rel=0.03)
    assert found.settings == {"compile": "xla", "steps-per-call": "auto", "prefetch": 2, "threads": 4}
    assert tuner.trials.count("compile xla, threads 1") == 1  # that it's slow is seen at once
    assert tuner.trials.count("compile xla, threads 4") == 6


@pytest.mark.parametrize(("missing", "first"), [(None, "horovod"), ("Horovod isn't installed", "multiworker")])
def test_backends_of_a_machine_are_tried_where_several_workers_are_asked_for(missing, first, monkeypatch, tmp_path):
    monkeypatch.setattr(tune.machine, "horovod_missing", lambda: missing)
    speeds = {"multiworker": 1500, "mirrored": 2000}

    def outcome(changes):
        return speeds.get(changes.get("backend"), 1000), 10**9

    of_two = ABOUT | {"workers": 2, "replicas": 2, "backend": first}
    tuner = Planned(outcome, 1, about=of_two)
    found = tuner.tune(["backend", "threads"], False)
    others = [f"backend {name}" for name in ("multiworker", "mirrored") if name != first]
    assert tuner.trials[: 1 + len(others)] == ["as it is", *others]
    assert tuner.trials[1 + len(others)].startswith("backend mirrored, threads ")  # each with the best of those before
    assert found.settings["backend"] == "mirrored"
    tune.write(tmp_path / "tune.toml", found)
    assert ", 8 CPUs, mirrored, 2 replicas, " in (tmp_path / "tune.toml").read_text()
    # One process keeps its backend.
    assert "backend" not in Planned(outcome, 1).tune(["backend"], False).settings


@pytest.mark.parametrize(
    ("typed", "tried"),
    [
        ([], True), (["--only", "backend"], True), (["--backend", "horovod"], False), (["--config", "own.toml"], False),
    ],
)  # fmt: skip
def test_a_backend_that_is_asked_for_is_kept(typed, tried, command, tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text('backend = "multiworker"\n')
    asked = []

    def noted(arguments, only, *rest):
        asked.append(only)
        raise UsageError("enough")

    monkeypatch.setattr(tune, "tune", noted)
    assert command("tune", "digits", "--workers", 2, *typed)[0] == 2
    assert ["backend" in only for only in asked] == [tried]


@pytest.mark.parametrize("typed", [[], ["--workers", 1], ["--workers", 2, "--backend", "mirrored"]])
def test_where_no_backend_can_be_tried_it_is_said(typed, command):
    code, _, err = command("tune", "digits", "--only", "backend", *typed)
    assert (code, "--only backend: give --workers N, at least 2, and no --backend" in err) == (2, True), err


@pytest.mark.parametrize("rounds", [1, 3])
def test_noise_keeps_things_as_they_are(rounds):
    noise = noisy(4)
    found = Planned(lambda changes: (1000 * next(noise), 10**9), rounds).tune(tune.TUNED, True)
    assert found.best.changes == {}


def test_what_fails_is_told_and_not_taken():
    found = Planned(lambda changes: "no XLA here" if changes else (1000, 10**9)).tune(["compile"], False)
    assert found.best.changes == {}
    lines = "\n".join(map(terminal.as_text, tune.lines(found))).splitlines()
    assert any("compile xla" in line and "failed: no XLA here" in line for line in lines)
    with pytest.raises(TrainingError, match="no data"):
        Planned(lambda changes: "no data").tune(["compile"], False)


def test_gains_that_do_not_add_up_are_seen():
    calls = itertools.count()

    def outcome(changes):  # the machine has become as fast without
        return (1000 + 100 * len(changes) if next(calls) < 7 else 1300), 10**9

    found = Planned(outcome, rounds=2).tune(["compile", "steps-per-call"], False)
    assert found.best.changes == {}
    assert found.notes == ["compile xla, steps-per-call 1: all in all no faster than as it is"]


@pytest.mark.parametrize(
    ("outcome", "examples", "free", "sizes", "note"),
    [
        (lambda b: (b, 10**9), 200, 10**12, [64, 128], "batch-size 256: there are only 200 examples"),
        (lambda b: (b, b * 10**8), None, 20 * 10**9, [64, 128], "batch-size 256: would need about 25.6 GB"),
        (lambda b: (min(b, 64), 10**9), None, 10**12, [64, 128, 256], ""),
        (lambda b: (b, 10**9) if b < 256 else "killed", None, 10**12, [64, 128, 256], ""),
    ],
)
def test_batches_grow_while_that_helps_and_there_is_room(outcome, examples, free, sizes, note, monkeypatch):
    monkeypatch.setattr(tune, "available", lambda: free)
    tuner = Planned(lambda changes: outcome(changes.get("batch-size", 32)), 1, examples)
    found = tuner.tune(["batch-size"], False)
    assert [row.changes["batch-size"] for row in found.rows[1:]] == sizes
    assert found.best.changes == {}
    assert "batch-size" not in found.settings or found.settings["batch-size"] == 32
    assert [each for each in found.notes if each.startswith(note)] == (found.notes if note else [])
    if examples:
        asked = Planned(lambda changes: outcome(changes.get("batch-size", 32)), 1, examples)
        assert asked.tune(["batch-size"], True).settings["batch-size"] == 128


def test_reasons_are_one_line():
    oom = "Traceback:\n  File\ntensorflow.ResourceExhaustedError: OOM when allocating [3]\n\n[[{{node x}}]]\n"
    assert reason(1, oom) == "tensorflow.ResourceExhaustedError: OOM when allocating [3]"
    assert reason(2, "a line\ntfloop: error: no such thing\n") == "no such thing"
    assert reason(-9, "") == "killed, or out of memory"
    assert reason(1, "\n") == "exit code 1, without a word"
    assert tune.available() > 0


def test_the_file_is_whole_or_not_there(tmp_path, monkeypatch):
    best = Row({"compile": "xla", "batch-size": 64}, [1300.0], 1.3)
    monkeypatch.setattr("sys.argv", ["tfloop", "tune", "digits", "--set", "api_key=hunter2hunter2"])
    arguments = ["digits", "--set=api_key=hunter2hunter2\nepochs = 3"]
    report = Report(arguments, ABOUT, [Row({}, [1000.0], 1.0), best], best, {"compile": "xla", "batch-size": 64}, [])
    tune.write(tmp_path / "out.toml", report)
    text = (tmp_path / "out.toml").read_text()
    assert tomllib.loads(text) == {"compile": "xla", "batch-size": 64}
    assert re.search(r"# 1.30 times as fast as it was: 1,300 examples/s instead of 1,000\n", text)
    assert "look at the learning rate" in text
    assert "hunter2hunter2" not in text
    report.arguments += ["--batch-size=32", "--workers=2"]  # 32 typed would win over the 64 of the file
    assert tune.command(tmp_path / "out.toml", report) == (
        f"tfloop train digits '--set=api_key=***\nepochs = 3' --workers=2 --config={tmp_path / 'out.toml'}"
    )
    with pytest.raises(UsageError, match="Is a directory"):
        tune.write(tmp_path, report)
    assert [path.name for path in tmp_path.iterdir()] == ["out.toml"]
