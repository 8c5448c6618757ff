"""`tfloop memory`: what it works out from measurements, and how near that is to what a training takes."""

import contextlib
import json
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from loop import UsageError
from loop.commands import memory, memory_advice, memory_measurements, terminal, train
from loop.commands.memory import Setting
from loop.commands.memory_measurements import Curve, Prober
from loop.run import out_of_memory
from tests.conftest import TFLOOP, tfloop

MB = 10**6
OWN = {"batch_size": 64, "remat": None, "accumulate": 1, "shard_optimizer": False}
TASK = """
import keras, numpy as np
from loop import ArrayData, TrainTask

class Small(TrainTask):
    defaults = {"batch_size": 12, "ema": 0.9}
    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    def build_optimizer(self):
        return keras.optimizers.Adam()
    def train_data(self):
        return ArrayData(np.ones((24, 5), "float32"))
    def compute(self, model, batch, training):
        return {"loss": keras.ops.mean(model(batch, training=training), -1)}

class Huge(Small):  # so much for each example that few batches fit here, and so few are measured
    defaults = {"batch_size": 200_000}
    def build_model(self):
        layers = [keras.layers.Dense(8), keras.layers.RepeatVector(1_600_000), keras.layers.Activation("tanh")]
        return keras.Sequential([keras.Input((1,)), *layers, keras.layers.GlobalAveragePooling1D()])
    def train_data(self):
        return ArrayData(np.ones((200_000, 1), "float32"))

class Wrong(Small):
    def build_model(self):
        raise ValueError("no such model")
"""


def report_of(peak, own=()):
    """What the probe tells of a model of 100 MB."""
    sizes = {"weights": 100 * MB, "gradients": 100 * MB, "optimizer": 200 * MB, "averages": 100 * MB}
    return {**sizes, "example": 0.5 * MB, "own": {**OWN, **dict(own)}, "task": "Net", "memory": peak, "gpu_memory": 0}


def made(monkeypatch, plain, remat, own=(), two_workers=lambda n, sharded: 0, available=10**12, **given):
    """The report of `memory`, where these functions say what the peak of a batch is, in MB."""
    measured = []

    def outcome(self, name, examples, settings):
        if "--workers=2" in settings:
            return report_of(two_workers(examples, "--shard-optimizer" in settings) * MB, own)
        is_remat = "--remat=full" in settings
        measured.append((is_remat, examples))
        return report_of((remat if is_remat else plain)(examples) * MB, own)

    monkeypatch.setattr(Prober, "_measured", outcome)
    monkeypatch.setattr(memory_measurements, "available", lambda: available)
    return memory.memory("net.py:Net", **given), measured


def test_parts_are_counted_and_the_rest_is_what_is_left(monkeypatch):
    report, measured = made(monkeypatch, lambda n: 1000 + 10 * n, lambda n: 1010 + 3 * n)
    assert measured == [(False, 8), (False, 32), (True, 8), (True, 32)]
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["plain", "accumulate", "remat", "remat, accumulate"]
    plain = rows["plain"]
    # In the rest, a checkpoint holds 400 MB.
    parts = (plain.weights, plain.gradients, plain.optimizer, plain.activations, plain.rest)
    assert parts == (100 * MB, 100 * MB, 300 * MB, 640 * MB, 900 * MB)
    assert plain.total == (1400 + 10 * 64) * MB
    assert rows["remat"].total == (1410 + 3 * 64) * MB
    # A quarter of the activations, the rows of the other quarters, and a sum of gradients.
    assert rows["accumulate"].total == (1400 + 10 * 16 + 24 + 100) * MB
    assert rows["remat"].options == ["--remat", "full"]
    assert report.smallest.name == "remat, accumulate"


def test_replicas_share_the_batch_and_slots(monkeypatch):
    report, _ = made(monkeypatch, lambda n: 1000 + 10 * n, lambda n: 1000 + 2 * n, workers=4, batch_size=62)
    rows = {row.name: row for row in report.rows}
    assert {"sharded", "sharded, remat"} < set(rows)
    assert rows["plain"].activations == 10 * 16 * MB
    assert rows["plain"].optimizer == 4 * rows["sharded"].optimizer == 300 * MB
    assert rows["sharded, remat"].options == ["--shard-optimizer", "--remat", "full"]
    assert report.command == ["tfloop", "train", "net.py:Net", "--batch-size=62", "--workers=4"]


def test_two_workers_show_what_each_takes_beyond_a_process_that_is_alone(monkeypatch):
    def two_workers(examples, sharded):
        assert examples == 16  # 8 on each
        return 1080 + 170 - 150 if sharded else 1080 + 130  # of 300 MB of state, a half is on the other worker

    def rows_of(**given):
        report, _ = made(monkeypatch, lambda n: 1000 + 10 * n, lambda n: 1000 + 2 * n, two_workers=two_workers, **given)
        return {row.name: row for row in report.rows}

    alone, four = rows_of(), rows_of(workers=4)
    assert four["plain"].rest - alone["plain"].rest == 130 * MB
    assert four["plain"].gradients == 100 * MB
    # A checkpoint holds the state that a worker owns, a quarter.
    assert four["sharded"].rest - alone["plain"].rest == (170 - 225) * MB
    # Where two workers have no place, the gradients that are sent are counted.
    four = rows_of(workers=4, available=3000 * MB)
    assert (four["plain"].gradients, four["plain"].rest) == (200 * MB, alone["plain"].rest)


def test_larger_batches_are_measured_until_the_slope_is_clear(monkeypatch):
    _, measured = made(monkeypatch, lambda n: 1000 + n // 50, lambda n: max(1000, n), batch_size=5000)
    assert [examples for is_remat, examples in measured if not is_remat] == [8, 32, 512, 5000]
    assert [examples for is_remat, examples in measured if is_remat] == [8, 32, 512, 5000]
    _, measured = made(monkeypatch, lambda n: 1000, lambda n: 1000, batch_size=1)
    assert [examples for _, examples in measured] == [1, 2, 1, 2]
    _, measured = made(monkeypatch, lambda n: 1000, lambda n: 1000, {"batch_size": 6})
    assert [examples for _, examples in measured] == [8, 3, 8, 3]
    _, measured = made(monkeypatch, lambda n: 1000, lambda n: 1000, available=3999 * MB)
    assert [examples for _, examples in measured] == [8, 4, 8, 4]


@pytest.mark.parametrize(("limit", "best"), [(2100, "plain"), (1700, "accumulate"), (1610, "remat"), (1580, None)])
def test_the_fastest_that_fits_is_named(monkeypatch, limit, best):
    report, _ = made(monkeypatch, lambda n: 1000 + 10 * n, lambda n: 1010 + 3 * n, limit=limit * MB)
    assert (report.best and report.best.name) == best
    text = "\n".join(map(terminal.as_text, memory.lines(report)))
    assert max(map(len, text.splitlines()[:6])) < 80
    assert ("2,040 !" in text) == (limit < 2040)
    if best is None:
        assert "none fits in 1.58 GB: the smallest is remat, accumulate, 1.58 GB" in text
    else:
        told = f"the fastest that fits is {best}: tfloop train net.py:Net"
        assert any(line.startswith(told) for line in text.splitlines())


def test_what_the_task_has_by_itself_is_not_typed_again(monkeypatch):
    own = {"remat": "full", "accumulate": 4, "shard_optimizer": True}
    report, measured = made(monkeypatch, lambda n: 1000 + 10 * n, None, own, workers=2)
    assert [examples for _, examples in measured] == [8, 32]
    assert [row.name for row in report.rows] == ["sharded, remat"]
    assert [row.options for row in report.rows] == [["--accumulate", "1"]]


def test_a_curve_takes_its_slope_from_the_largest_batches():
    curve = Curve({8: report_of(500), 32: report_of(500), 128: report_of(980)})
    assert (curve.slope, curve.fixed) == (5, 340)
    assert Curve({8: report_of(500), 32: report_of(490)}).slope == 0
    assert not Setting().shard


@pytest.mark.parametrize(
    ("text", "bytes_"), [("16GB", 16e9), ("800 mb", 8e8), ("1.5TB", 1.5e12), ("2GiB", 2**31), ("64kB", 64e3)]
)
def test_sizes(text, bytes_):
    assert memory.parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["3 apples", "", "16", "-1GB", "0GB", "1e9GB", "nanGB", "1.2.3GB", "\u0661GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="give a size, such as 16GB or 800MB"):
        memory.parse_size(text)


def test_bad_input_is_one_line(command, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    for arguments, told in (
        (["nowhere"], "TARGET 'nowhere': give file.py:Class"),
        (["digits", "--memory", "3 apples"], "--memory 3 apples: give a size"),
        (["digits", "--batch-size", "0"], "batch_size=0: the global batch"),
        (["digits", "--workers", "0"], "--workers 0"),
    ):
        code, out, err = command("memory", *arguments)
        assert (code, out) == (2, "")
        [line] = err.splitlines()
        assert told in line
    code, out, err = command("memory", "mine.py:Wrong")
    assert (code, out) == (1, "")
    assert "no such model" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_task_is_measured_in_processes(command, tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    code, out, err = command("memory", "mine.py:Small", "--memory", "50MB", "--workers", 2, "--json")
    assert code == 1, err  # TensorFlow alone takes more
    stages = [f"{name}, a batch of {examples}" for name in ("plain", "remat") for examples in (8, 3)]
    assert err.splitlines() == [*stages, "2 workers, a batch of 6", "2 workers, sharded, a batch of 6"]
    found = json.loads(out)
    assert (found["task"], found["batch_size"], found["workers"]) == ("Small", 12, 2)
    rows = {row["name"]: row for row in found["rows"]}
    trained = 4 * (5 * 3 + 3 + 2 * 5)
    for row in rows.values():
        assert row["weights"] == trained + 4 * 2 * 5  # and the statistics of the normalization
        assert row["fits"] is False
        assert row["total"] == sum(row[part] for part in ("weights", "gradients", "optimizer", "activations", "rest"))
        assert row["rest"] > 10**8
    # Adam's two slots and the average, and a few scalars.
    assert 3 * trained <= rows["plain"]["optimizer"] < 3 * trained + 100
    assert found["best"] is None
    assert not [*tmp_path.glob("runs"), *tmp_path.glob("tfloop-memory-*")]


def peak_of(*arguments):
    """The greatest resident memory of a training, in bytes, as the system tells it."""
    process = subprocess.Popen(
        [*TFLOOP, "train", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(OSError):
            found = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
            peak = max(peak, *(1024 * int(kilobytes) for kilobytes in found), 0)
        time.sleep(0.02)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system doesn't tell the peak")
def test_totals_are_near_the_peaks_of_real_trainings(command, tmp_path):
    target = ["bigger", "--set", "blocks=2", "--set", "length=128"]
    code, out, err = command("memory", *target, "--json")
    assert code == 0, err
    totals = {row["name"]: row["total"] for row in json.loads(out)["rows"]}
    for name, options in (("plain", []), ("remat", ["--remat", "full"])):
        run = ["--steps", 4, "--track", "off", "--run-dir", tmp_path / name]
        assert totals[name] == pytest.approx(peak_of(*target, *options, *run), rel=0.12), name


# Out of memory in training


def test_out_of_memory_says_what_takes_it_and_what_each_setting_needs(tmp_path):
    """A step that needs 10 TB, of which Linux gives none."""
    (tmp_path / "task.py").write_text(TASK)
    ended = tfloop("train", "task.py:Huge", "--track", "off", "--json", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stdout == ""
    (error,) = (line for line in ended.stderr.splitlines() if line.startswith("tfloop: error: "))
    assert "out of memory in step 1, with a batch of 200,000: OOM when allocating tensor" in error
    assert "weights take 64 B, gradients 64 B, and the optimizer's state 140 B. Use remat, accumulate" in error
    for row in ("plain", "accumulate", "remat, accumulate"):
        assert re.search(rf"^{row} .* [0-9,]+ !$", ended.stderr, re.MULTILINE), ended.stderr
    assert "take a smaller batch (--batch-size), or more workers" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("where", "workers", "share"), [({"hosts_": "a:2,b:2"}, 4, 1), ({"devices": "gpu:0,gpu:2"}, 2, 1 / 2)]
)
def test_the_table_shares_the_batch_among_all_replicas(where, workers, share, monkeypatch):
    asked = []
    monkeypatch.setattr(memory_advice, "replace_process", lambda *request: asked.append(request))
    names = ("hosts_", "devices", "launcher", "interface", "remote_python", "backend")
    what = {"target_": "t.py:T", "set_": [], "batch_size": 64, "workers": None, "precision": None, "ema": None}
    train._end_with_memory(SimpleNamespace(**dict.fromkeys(names) | where | what), "out of memory")
    assert asked == [("t.py:T", [], 64, workers, {"precision": None, "ema": None}, share)]


def test_other_exhausted_resources_are_no_lack_of_memory():
    too_long = tf.errors.ResourceExhaustedError(None, None, "Received message larger than max (5 vs. 4)")
    assert out_of_memory.translated(None, too_long) is None
