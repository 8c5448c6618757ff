"""Chaos: campaigns in small, what a witness sees, and `tfloop chaos`, which must find what has been planted."""

import json
import subprocess
import sys

import numpy as np
import pytest

from callbacks.example_log import Example, ExampleLog, _hash, differences, used
from loop import ArrayData, backends, fit
from loop.commands import chaos, killed_run
from tests.campaigns import damage, syscalls
from tests.conftest import ROOT, tfloop
from tests.tasks import Plain, Streamed, Weighted


def test_damage_is_never_loaded():
    outcomes = damage.main(rounds=100, seed=1)
    assert len(outcomes) >= 3


@pytest.mark.skipif(syscalls.missing() is not None, reason=str(syscalls.missing()))
def test_a_kill_at_any_system_call_loses_nothing():
    command = [sys.executable, "-P", "-m", "tests.campaigns.syscalls", "12"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[2]) > 30


# What a witness sees


class Worded(Plain):
    """Examples with words of several lengths, which are not trained on."""

    def train_data(self):
        inputs, labels = super().train_data().arrays
        words = np.array([b"a" * (i % 7) for i in range(len(labels))], object)
        return ArrayData({"inputs": inputs, "labels": labels, "words": words})

    def eval_data(self):
        return None

    def compute(self, model, batch, training):
        return super().compute(model, (batch["inputs"], batch["labels"]), training)


def watched(task, directory, quiet, **options):
    fit(task, epochs=2, batch_size=8, callbacks=quiet() + [ExampleLog(directory)], **options)
    return used(directory)


@pytest.mark.parametrize("task", [Weighted, Worded, Streamed])
def test_a_witness_sees_the_same_on_any_engine(task, tmp_path, quiet):
    one = watched(task(), tmp_path / "one", quiet, backend="single")
    three = watched(task(), tmp_path / "three", quiet, backend=backends.create("mirrored", 3), accumulate=2)
    assert list(differences(one, three)) == []
    assert [sorted(example.address for example in examples) for examples in one.values()] == [list(range(101))] * 2
    assert one[0] != one[1]
    assert len({example.content for example in one[0]}) == 101


def test_a_witness_sees_every_byte():
    strings = [np.array([b"ab", b"c"], object), np.array([b"a", b"bc"], object), np.array([b"ab", b"c\0"], object)]
    different = [[each] for each in strings] + [[b"a"], [b"a\0"], [b"", b"a"], [np.int32(1)], [np.zeros((0, 3))]]
    assert len({_hash([[part] for part in parts], 0) for parts in different}) == len(different)


# The comparison


def written(directory, *lives):
    """Files as witnesses leave them; a life is a list of (epoch, number, addresses)."""
    directory.mkdir()
    for life, batches in enumerate(lives):
        lines = [batches[0][:2], *([e, n, 0, index, [f"{i:x}" for i in index]] for e, n, index in batches)]
        (directory / f"{life:06d}-0.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return directory


WHOLE = [(0, 0, [3, 1]), (0, 1, [0, 2]), (1, 0, [2, 0]), (1, 1, [1, 3])]


def test_what_is_rolled_back_and_torn_lines_do_not_count(tmp_path):
    directory = written(tmp_path / "w", [*WHOLE[:2], (1, 0, [9, 9]), (2, 0, [8])], WHOLE[1:])
    with (directory / "000000-0.jsonl").open("a") as file:
        file.write("[1, 1, 0, [7")
    expected = {0: [Example(i, f"{i:x}") for i in (3, 1, 0, 2)], 1: [Example(i, f"{i:x}") for i in (2, 0, 1, 3)]}
    assert used(directory) == expected


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((1, 1, [1, 1]), ["epoch 2: example 1 was used 2 times", "epoch 2: example 3 was not used"]),
        ((1, 1, [1]), ["epoch 2: example 3 was not used"]),
        ((1, 1, [1, 3, 4]), ["epoch 2: example 4 was used, but not without kills"]),
        ((1, 1, [3, 1]), ["epoch 2: another order from place 2 on"]),
        ((2, 0, [0]), ["epoch 3: example 0 was used, but not without kills"]),
        ((1, 1, [1, 3]), []),
    ],
)
def test_doctored_testimony_is_found(batch, found, tmp_path):
    one = used(written(tmp_path / "one", WHOLE))
    other = used(written(tmp_path / "other", [each for each in WHOLE if each[:2] != batch[:2]] + [batch]))
    assert list(differences(one, other)) == found


def test_another_content_is_found():
    one, other = {0: [Example(0, "a"), Example(1, "b")]}, {0: [Example(0, "a"), Example(1, "c")]}
    assert list(differences(one, other)) == ["epoch 1: example 1 had another content"]


# The command


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("none", None),
        ("forgets", "was not used"),
        ("doubles", "was used 2 times"),
        ("noise", "weights "),
        ("fails", "failed without a kill, with code 1: planted"),
        ("lingers", "did not end within 1 s"),
    ],
)
def test_chaos_finds_what_is_planted(fault, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(killed_run, "_COMMAND", [sys.executable, "-P", "-m", "tests.campaigns.trainer"])
    monkeypatch.setattr(chaos, "_GONE", 1.0 if fault == "lingers" else 30.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    report = chaos.chaos([fault], chaos.Plan(6 if fault == "none" else 3, 3, "5"), tmp_path)
    assert report.exact == (problem is None)
    if problem is None:
        assert sum(report.kills.values()) == 6
        assert report.kills[killed_run.WRITING] > 0
        assert report.attempts == report.runs + 6
    else:
        assert any(problem in text for text in report.problems), report.problems


TASK = """
import keras, numpy as np
from loop import ArrayData, TrainTask

class Tiny(TrainTask):
    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.Adam(0.01)

    def train_data(self):
        return ArrayData(np.random.default_rng(0).normal(size=(1001, 5)).astype("float32"))

    def compute(self, model, batch, training):
        return {"loss": (model(batch, training=training)[:, 0] - batch[:, 0]) ** 2}
"""


def test_chaos_on_a_real_task(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    command = ["chaos", "task.py:Tiny", "--epochs", 2, "--kills", 2, "--backend", "single", "--keep", "kept", "--json"]
    done = tfloop(*command, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["exact"]
    assert (report["steps"], sum(report["kills"].values()), report["backend"]) == (64, 2, "single")
    assert report["lives"] == report["runs"] + 2
    examples = used(tmp_path / "kept" / "killed-1" / "witness")
    assert [len(examples[epoch]) for epoch in (0, 1)] == [1001, 1001]


def test_a_run_moves_from_machine_to_machine(tmp_path):
    """On two workers, on three with another backend, on one: with nothing but the URL."""
    (tmp_path / "task.py").write_text(TASK)
    arguments = ["task.py:Tiny", "--epochs", 2, "--kills", 2, "--migrate", "--keep", "kept", "--json"]
    done = tfloop("chaos", *arguments, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["exact"]
    assert [text.split()[-1] for text in report["machines"]] == ["--workers=2", "--workers=3", "--backend=single"]
    assert sum(report["kills"].values()) == 2
    assert report["distance"] < 5e-6
    last = tmp_path / "kept" / f"killed-{report['runs']}"
    assert [len(examples) for examples in used(last / "witness").values()] == [1001, 1001]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--migrate", "--workers", "2"], "--workers 2: --migrate chooses"),
        (["digits", "--store", "folder"], "folder: this isn't a URL of a store"),
        (["digits", "--store", "s3://bucket"], "path of its own"),
        (["nowhere.py:Task"], "there is no file nowhere.py"),
        (["digits", "--keep", "."], "--keep .: it is there already"),
        (["digits", "--epochs", "1", "--steps", "2"], "give one of the two"),
        (["digits", "--kills", "0"], "--kills"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path):
    (tmp_path / "something").touch()
    done = tfloop("chaos", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
