"""Where a run comes from: what is recorded, `tfloop runs diff` and `tfloop rerun`."""

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from callbacks.run_record import provenance
from callbacks.run_record.record import read
from loop.commands import rerun
from loop.launch import signals
from tests.conftest import until

TASK = """
from dataclasses import dataclass

import keras
import numpy as np

from loop import ArrayData, TrainTask

API_TOKEN = "not-to-be-shown-12345"


@dataclass
class Line(TrainTask):
    width: int = 4
    rates: tuple[float, ...] = (0.1, 0.2)

    def build_model(self):
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(self.width, "tanh"), keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.SGD(self.rates[0])

    def train_data(self):
        inputs = np.arange(60, dtype="float32").reshape(20, 3) / 60
        return ArrayData(inputs, inputs.sum(-1, keepdims=True))

    def compute(self, model, batch, training):
        inputs, targets = batch
        return {"loss": keras.losses.mean_squared_error(targets, model(inputs, training=training))}
"""


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a task, a lock file and one commit; the working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "line.py").write_text(TASK)
    (folder / "requirements.lock").write_text("keras==3\n")
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "begin")
    monkeypatch.chdir(folder)
    return folder


def train(command, run_dir, *more):
    code, _, problem = command("train", "line.py:Line", "--epochs", 2, "--track", "off", "--run-dir", run_dir, *more)
    assert code == 0, problem


def test_a_run_records_where_it_comes_from_and_diff_shows_the_changed_line(project, command):
    train(command, "a")
    first = read(project / "a")
    assert first.provenance["branch"] == "trunk"
    assert first.provenance["changed"] == 0
    assert first.provenance["lock_file"] == str(project / "requirements.lock")
    assert first.data["train"]["examples"] == 20

    changed = TASK.replace('"tanh"', '"relu"')
    (project / "line.py").write_text(changed)
    train(command, "b", "--set", "width=5", "--set", f"rates={','.join(['0.1'] * 50)}")
    code, shown, _ = command("runs", "diff", "a", "b")
    assert code == 0
    assert '-        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(self.width, "tanh")' in shown
    assert '+        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(self.width, "relu")' in shown
    assert "changes since the commit" in shown
    [row] = [line for line in shown.splitlines() if line.startswith("width")]
    assert row.split() == ["width", "4", "5"]
    assert "train data" not in shown  # it is the same

    # Of long texts, the part is shown in which they differ.
    [row] = [line for line in shown.splitlines() if line.startswith("command")]
    assert re.search(r" --run-dir a  +\.\.\..* --run-dir b --set width=5 --set rates=[01.,]+\.\.\.$", row)

    for path in (project / "b").rglob("*"):
        if path.is_file():
            assert b"not-to-be-shown-12345" not in path.read_bytes(), path


def test_rerun_has_the_same_bits_and_says_what_has_changed(project, command):
    options = ["--batch-size", 6, "--no-shuffle", "--clip-norm", "0.5", "--drop-remainder"]
    train(command, "a", "--set", "rates=0.05,0.3", *options)
    code, shown, said = command("rerun", "a", "--run-dir", "again")
    assert (code, "the same weights to the bit: 4 variables after 6 steps" in shown) == (0, True), said
    again = read(project / "again").options
    assert (again["shuffle"], again["drop_remainder"]) == (False, True)
    assert "has changed since" not in said

    (project / "line.py").write_text(TASK.replace('"tanh"', '"relu"'))
    code, shown, said = command("rerun", "a", "--run-dir", "other", "--json")
    assert code == 1
    assert "line.py has changed since: tfloop runs diff shows where" in said
    report = json.loads(shown.splitlines()[-1])
    assert not report["exact"]
    assert set(report["differing"]) <= {"model/00000", "model/00001", "model/00002", "model/00003"}
    assert report["differing"]


@pytest.mark.parametrize("length", ["steps", "phases", "stopped"])
def test_a_run_is_made_again_with_its_length_and_threads(project, command, length):
    more = {
        "steps": "",
        "phases": """
    def phases(self):
        return [Phase("one", epochs=1), Phase("two", steps=2)]
""",
        "stopped": """
    def build_callbacks(self):
        return [LambdaCallback(epoch_end=lambda run, metrics: run.stop("enough"))]
""",
    }
    text = TASK.replace("import ArrayData,", "import ArrayData, Phase,") + more[length]
    (project / "line.py").write_text("from callbacks import LambdaCallback\n" + text)
    options = {"steps": ["--steps", 3], "phases": [], "stopped": ["--epochs", 3]}[length]
    trained = command("train", "line.py:Line", "--track", "off", "--run-dir", "a", *options)
    assert trained[0] == 0, trained
    # As `--threads 1` does, which can't be set any more in this process.
    about = json.loads((project / "a" / "run.json").read_text())
    about["machine"]["intra_op_threads"] = 1
    (project / "a" / "run.json").write_text(json.dumps(about))
    code, shown, said = command("rerun", "a", "--run-dir", "again")
    assert (code, "the same weights to the bit" in shown) == (0, True), said
    assert read(project / "again").machine["intra_op_threads"] == 1


def test_a_run_with_fields_that_cannot_be_typed_is_made_again(project, command):
    fields = """    rates: tuple[float, ...] = (0.1, 0.2)
    data: str = None
    count: int = None
    sizes: list = field(default_factory=lambda: [1])
    weights: dict = field(default_factory=dict)
    names: list[str | None] = field(default_factory=list)

    def __post_init__(self):
        assert self.data is None
        assert self.names in ([], [None, "a"])
"""
    changed = TASK.replace("    rates: tuple[float, ...] = (0.1, 0.2)\n", fields)
    (project / "line.py").write_text(changed.replace("import dataclass\n", "import dataclass, field\n"))
    train(command, "a", "--set", "names=none,a")
    code, shown, said = command("rerun", "a", "--run-dir", "again")
    assert (code, "the same weights to the bit" in shown) == (0, True), said


def test_a_signal_has_the_second_training_save_before_rerun_ends(project):
    def interrupt():
        until(lambda: "epoch_end" in (project / "again" / "journal.jsonl").read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    (project / "again").mkdir()
    (project / "again" / "journal.jsonl").touch()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with signals.interrupting(), pytest.raises(KeyboardInterrupt):
        rerun.train("line.py:Line", ["--steps=100000000"], Path("again"))
    thread.join()
    second = read(project / "again")
    assert (second.status, [saved.step for saved in second.checkpoints][-1:]) == ("preempted", [second.steps])


def test_rerun_has_the_typed_callbacks_and_says_which_others_are_left_out(project, command):
    typed = ["--callback=EMA(0.5)", "--backend=mirrored", "--workers=2", "--communication=hierarchical"]
    train(command, "a", *typed)
    about = json.loads((project / "a" / "run.json").read_text())
    assert about["callbacks"] == {"EMA": "EMA(0.5)"}
    # As if a program had given it to `fit`; one that `rerun` goes without; and a text that would import a module.
    about["callbacks"] |= {"Mine": "", "MLflowTracker": "MLflowTracker(wait=1)", "Other": "@os:getcwd"}
    (project / "a" / "run.json").write_text(json.dumps(about))
    code, shown, said = command("rerun", "a", "--run-dir", "again")
    assert (code, "the same weights to the bit" in shown) == (0, True), said
    assert "the first training also had the callback Mine, which isn't part of the task" in shown
    again = json.loads((project / "again" / "run.json").read_text())
    assert (again["callbacks"], again["machine"]["communication"]) == ({"EMA": "EMA(0.5)"}, "hierarchical")

    texts = list(rerun.callback_arguments(about, is_own=False))
    assert texts == []


def test_a_run_that_goes_on_tells_what_has_changed_in_code_and_data(project, command):
    def goes_on(epochs):
        code, _, said = command("train", "line.py:Line", "--epochs", epochs, "--track", "off", "--run-dir", "a")
        assert code == 0, said
        return [line for line in said.splitlines() if "other code or data" in line]

    def write(code):
        (project / "line.py").write_text(code)

    assert goes_on(1) == goes_on(2) == []
    write(TASK.replace("/ 60", "/ 30"))
    [told] = goes_on(3)
    short = "[0-9a-f]{12}"
    assert re.search(f"the task's file was {short}, now {short}; the diff since the commit was none, now {short}", told)
    assert re.search(rf"; train data was 20 examples \({short}\), now 20 examples \({short}\)$", told)
    assert goes_on(4) == []  # it is compared with the last attempt

    git(project, "commit", "-q", "-a", "-m", "other data")
    (project / "requirements.lock").write_text("keras==4\n")
    [told] = goes_on(5)
    assert re.search(f"the lock file was {short}, now {short}; commit was {short}, now {short}; the diff", told)
    assert "task's file" not in told
    assert "train data" not in told


@pytest.mark.parametrize("before", [None, 3, {}, {"train": 3}, {"commit": ["\x1b[2J"]}, {"train": {"sha256": {}}}])
def test_what_changed_since_a_damaged_record_is_told_without_harm(before):
    data = {"train": {"examples": 2, "sha256": "ab"}}
    assert (
        provenance.changes_of_data({"train": {"examples": None}}, {"train": {"examples": None, "sha256": "ab"}}) == []
    )
    told = provenance.changes(before, {"commit": "cd"}) + provenance.changes_of_data(before, data)
    assert "\x1b" not in "".join(told)
    assert len(told) == (before in ({"commit": ["\x1b[2J"]}, {"train": {"sha256": {}}}))


def test_what_cannot_be_made_again_is_refused(project, command):
    train(command, "a")
    about = json.loads((project / "a" / "run.json").read_text())
    for change, message in [
        ({"status": "preempted"}, "a is preempted, and not finished: let it end first"),
        ({"backend": "parameter_server"}, "parameter_server trains asynchronously"),
    ]:
        (project / "a" / "run.json").write_text(json.dumps(about | change))
        code, _, said = command("rerun", "a")
        assert (code, message in said) == (2, True), said


def test_code_that_a_strange_directory_names_is_not_run(project, command, tmp_path):
    train(command, "a")
    (project / "a").rename(tmp_path / "strange")
    code, _, said = command("rerun", tmp_path / "strange")
    assert (code, "you haven't trained there on this machine" in said) == (2, True), said


def test_a_task_whose_file_was_moved_is_asked_for(project, command):
    train(command, "a")
    (project / "line.py").rename(project / "moved.py")
    for name in ("rerun", "evaluate"):
        code, _, said = command(name, "a")
        assert code == 2
        assert "line.py', isn't there any more: give the task where it is now, as --target file.py:Class" in said, said
    assert command("rerun", "a", "--target", "moved.py:Line")[0] == 0


@pytest.mark.parametrize("name", ["../run.json", "/etc/passwd", "link", "none", 3, None])
def test_only_plain_files_in_the_folder_of_texts_are_shown(name, tmp_path):
    folder = tmp_path / provenance.FOLDER
    folder.mkdir()
    (tmp_path / "run.json").write_text("{}")
    (folder / "link").symlink_to("/etc/passwd")
    assert provenance.text(tmp_path, {"task_copy": name}, "task") is None


def test_no_program_that_a_repository_names_is_run(project):
    (project / "evil").write_text(f"#!/bin/sh\ntouch {project}/ran\n")
    (project / "evil").chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "diff.evil.textconv", "diff.evil.command"):
        git(project, "config", key, str(project / "evil"))
    (project / ".gitattributes").write_text("*.py diff=evil\n")
    (project / "line.py").write_text(TASK + "\n")
    (project / "run").mkdir()
    facts = provenance.collect(project / "run", project / "line.py")
    assert facts["changed"] == 1
    assert "+" in provenance.text(project / "run", facts, "diff")
    assert not (project / "ran").exists()


def test_without_git_and_without_a_file_there_is_less_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "task.py").write_text("")
    facts = provenance.collect(tmp_path, tmp_path / "task.py")
    assert {"commit", "changed"}.isdisjoint(facts)
    assert set(provenance.collect(tmp_path, None)) == {"command", "host"}
