"""Run directories that aren't what a run has left: links, pipes, lost checkpoints, directories that go away."""

import contextlib
import json
import math
import os
import random
import re
import resource
import shutil
import sys
import time
from dataclasses import dataclass

import keras
import numpy as np
import pytest

import cli
from callbacks import Callback, EarlyStopping, FromKeras, ReduceOnPlateau, Timer, files, standard
from callbacks.run_record import record
from loop import UsageError, fit
from loop.checkpoint import checkpoint_files
from loop.checkpoint.lock import locked
from loop.checkpoint.writer import Snapshot, Writer
from loop.commands import command_line, replay, runs, sweep
from loop.launch import explain
from loop.run import run_directory, trust
from loop.target import task_loader
from tests import tasks
from tests.campaigns import hostile
from tests.conftest import ROOT

CANARY = "what stands elsewhere stays as it is\n"


def tiny(**more):
    return tasks.Weighted(examples=24, **more)


def prepare(directory, resume="auto"):
    """What a run does first in a directory."""
    return run_directory._prepare(tiny(), directory, resume, in_memory=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory with checkpoints; each test gets a copy."""
    import callbacks

    path = tmp_path_factory.mktemp("trained") / "run"
    fit(tiny(), epochs=2, run_dir=path, callbacks=callbacks.standard(mlflow=None, progress=None))
    return path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "elsewhere"
    path.mkdir()
    (path / "canary").write_text(CANARY)
    yield path / "canary"
    assert (path / "canary").read_text() == CANARY
    assert [each.name for each in path.iterdir()] == ["canary"]


def put(kind, place, canary):
    """Puts something into the place of a file."""
    place.unlink(missing_ok=True)
    {
        "symlink": lambda: place.symlink_to(canary),
        "dangling": lambda: place.symlink_to(canary.with_name("new")),
        "hard link": lambda: os.link(canary, place),
        "pipe": lambda: os.mkfifo(place),
        "directory": place.mkdir,
    }[kind]()


KINDS = ("symlink", "dangling", "hard link", "pipe", "directory")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lock", "journal.jsonl", "run.json", "mlflow.json"])
def test_what_is_no_file_of_a_run_is_refused_and_leads_nowhere(name, kind, run, canary):
    put(kind, run / name, canary)
    with pytest.raises(UsageError, match=rf"{name}: it (is a|has 2 names).*remove it, or give another directory"):
        prepare(run)
    record.read(run)  # nor does who only looks wait for a pipe, or read what is elsewhere
    assert files.read_json(run / name) == {}
    if name == "lock":
        with pytest.raises(UsageError, match="lock: it "), locked(run):
            pass


def test_a_pipe_in_the_place_of_the_journal_ends_a_run_at_once(run, canary, quiet):
    put("pipe", run / "journal.jsonl", canary)
    with pytest.raises(UsageError, match=r"journal.jsonl: it is a pipe"):
        fit(tiny(), epochs=3, run_dir=run, callbacks=quiet())


def test_a_link_in_the_place_of_a_half_written_file_is_not_followed(run, canary, quiet):
    put("symlink", run / "run.json.tmp", canary)
    put("dangling", run / "report.html.tmp", canary)
    put("symlink", run / "report.html", canary)
    assert fit(tiny(), epochs=3, run_dir=run, callbacks=quiet()).epochs == 3
    assert not (run / "report.html").is_symlink()
    assert record.read_about(run)["status"] == "finished"


def test_links_of_directories(run, tmp_path, canary, quiet):
    disk = tmp_path / "disk"
    (run / "checkpoints").rename(disk)
    (run / "checkpoints").symlink_to(disk)
    link = tmp_path / "link"
    link.symlink_to(run)  # as people do who have their runs on another disk
    assert fit(tiny(), epochs=3, run_dir=link, callbacks=quiet()).epochs == 3
    assert "step-00000003" in [path.name for path in disk.iterdir()]

    (run / "checkpoints").unlink()
    (run / "checkpoints").symlink_to(canary.parent)
    with pytest.raises(UsageError, match="which holds 'canary': let it lead to a directory for this run's checkpoints"):
        prepare(run)
    other = shutil.copytree(run, tmp_path / "other", symlinks=True)
    (other / "checkpoints").unlink()
    disk.rename(other / "checkpoints")
    (run / "checkpoints").unlink()
    (run / "checkpoints").symlink_to(other / "checkpoints")
    with pytest.raises(UsageError, match="is a link into another run's directory"):
        prepare(run)
    (run / "checkpoints").unlink()
    (run / "bad").symlink_to(canary.parent)
    with pytest.raises(UsageError, match="bad: it is a symbolic link"):
        prepare(run)


def test_files_of_a_checkpoint_are_no_links(run, tmp_path):
    path = checkpoint_files.complete(run / "checkpoints")[-1]
    os.link(path / "tensors.npz", tmp_path / "copy")  # a copy as `cp -al` makes one: it is never written in place
    assert checkpoint_files.verify(path)
    (path / "tensors.npz").unlink()
    (path / "tensors.npz").symlink_to(tmp_path / "copy")
    with pytest.raises(checkpoint_files.CheckpointError, match=r"tensors.npz can't be read"):
        checkpoint_files.verify(path)


def test_one_place_writes_a_file_under_another_name():
    """Elsewhere whole directories are renamed, which is another matter: checkpoints and exported models."""
    renaming = {
        path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("loop/**/*.py"), *ROOT.glob("callbacks/**/*.py")]
        if ".replace(path)" in path.read_text() or "partial.replace(" in path.read_text()
    }
    assert renaming == {"callbacks/files.py", "callbacks/mlflow/logged_model.py", "loop/commands/export.py"}


# Lost checkpoints


def lose(how, run):
    place = run / "checkpoints"
    if how == "unreadable":
        place.chmod(0)
        return "checkpoints can't be read"
    shutil.rmtree(place)
    if how == "gone":
        return "checkpoints is gone"
    if how == "dangling":
        place.symlink_to(run.parent / "unmounted")
        return "is a link to .*unmounted, which isn't there"
    place.mkdir()
    return "checkpoints holds none"


@pytest.mark.parametrize("told_by", ["both", "run.json", "journal.jsonl"])
@pytest.mark.parametrize("how", ["gone", "empty", "dangling"])
def test_lost_checkpoints_are_no_start_from_step_0(how, told_by, run):
    if told_by != "both":
        (run / ({"run.json", "journal.jsonl"} - {told_by}).pop()).unlink()
    why = lose(how, run)
    with pytest.raises(UsageError, match=f"had the checkpoint 'step-00000002'.*{why}.*--resume never"):
        prepare(run)
    assert prepare(run, "never") == run
    assert not (run / "checkpoints").is_symlink()


def test_a_newest_checkpoint_that_is_lost_is_missed_by_all_that_take_another(run, quiet, command, capfd):
    lost = run / "checkpoints/step-00000002"
    shutil.rmtree(lost)
    missed = f"warning: {lost} isn't there any more: bring it back, or what came after step-00000001 is lost"
    code, stderr = command("export", run, run.parent / "weights.npz")
    assert code == 0
    assert missed in stderr
    assert fit(tiny(), epochs=2, run_dir=run, callbacks=quiet()).steps == 2
    assert missed in capfd.readouterr().err
    # It has been written again: nothing is lost any more.
    assert fit(tiny(), epochs=3, run_dir=run, callbacks=quiet()).steps == 3
    assert "any more" not in capfd.readouterr().err


def test_a_run_json_without_a_task_belongs_to_no_run(run):
    (run / "run.json").write_text('{"name": "of another program"}')
    with pytest.raises(UsageError, match="names no task: give another one"):
        prepare(run)


def test_after_a_new_start_the_checkpoints_of_before_are_not_missed(run, quiet, capsys):
    lose("dangling", run)
    with pytest.raises(UsageError, match="had the checkpoint"):
        fit(tiny(), epochs=3, run_dir=run, callbacks=quiet())
    saves_nothing = quiet(checkpoint=None)
    assert fit(tiny(), epochs=1, run_dir=run, resume="never", callbacks=saves_nothing).steps == 1
    assert "checkpoints can't be read (No such file or directory): it is now checkpoints.2" in capsys.readouterr().err
    assert prepare(run) == run


def test_the_only_checkpoint_put_aside_by_a_kill_is_not_lost(run, quiet):
    """As between the two renames by which a checkpoint of the same step takes its place."""
    checkpoints = run / "checkpoints"
    for path in checkpoint_files.complete(checkpoints)[:-1]:
        shutil.rmtree(path)
    [last] = checkpoints.iterdir()
    last.rename(last.with_name(f"{last.name}.old.tmp"))
    with pytest.raises(UsageError, match="would write over them"):
        prepare(run, "never")
    assert fit(tiny(), epochs=3, run_dir=run, callbacks=quiet()).steps == 3
    assert last in checkpoint_files.complete(checkpoints)


def test_a_run_that_never_saved_starts_again(run):
    (run / "run.json").write_text(json.dumps({"task": "Weighted", "progress": {"step": 90}}))  # of an older version
    shutil.rmtree(run / "checkpoints")
    journal, lines = run / "journal.jsonl", (run / "journal.jsonl").read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"event": "checkpoint"' not in line))
    assert prepare(run) == run
    journal.unlink()
    with pytest.raises(UsageError, match="had the checkpoint 'step 90'"):
        prepare(run)


# A directory that goes away


class Meddler(Callback):
    """Does something to the run directory after the first epoch."""

    runs_on = "chief"

    def __init__(self, act):
        self.act = act

    def on_epoch_end(self, run, metrics):
        if run.progress.epoch == 0:
            self.act(run.directory)


@pytest.mark.parametrize(("how", "journal"), [("moved", True), ("deleted", False), ("replaced", False)])
def test_a_run_directory_that_goes_away_is_noticed_and_not_made_anew(how, journal, tmp_path, quiet):
    place = tmp_path / "run"

    def act(directory):
        directory.rename(tmp_path / "new") if how != "deleted" else shutil.rmtree(directory)
        if how == "replaced":
            directory.mkdir()

    meddler = [Meddler(act)]
    with pytest.raises(files.MovedError, match=r"run(/journal.jsonl)?: .* was moved or deleted .*; start again"):
        fit(tiny(), epochs=5, run_dir=place, callbacks=quiet(**({} if journal else {"journal": None})) + meddler)
    assert not place.exists() or not list(place.iterdir())


def test_a_journal_that_is_deleted_is_noticed(tmp_path, quiet):
    meddler = [Meddler(lambda directory: (directory / "journal.jsonl").unlink())]
    with pytest.raises(files.MovedError, match=r"journal.jsonl: it was moved or deleted while the run was writing it"):
        fit(tiny(), epochs=5, run_dir=tmp_path / "run", callbacks=quiet() + meddler)
    assert not (tmp_path / "run" / "journal.jsonl").exists()
    assert record.read_about(tmp_path / "run")["status"] == "failed"


# The task that a directory names


EVIL = """
from pathlib import Path
Path({mark!r}).touch()
from tests.tasks import Weighted
"""


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs a command line in this process; gives its exit code and what it printed on stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["tfloop", *map(str, words)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        os.environ.pop(explain.DEBUG, None)
        return ended.value.code or 0, capfd.readouterr().err

    return run


@pytest.fixture
def strangers(run, tmp_path, monkeypatch):
    """A run directory that names a task whose file leaves a mark when it is imported; and the mark."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(mark)))
    path = checkpoint_files.complete(run / "checkpoints")[-1]
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["run"]["target"] = f"{tmp_path / 'evil.py'}:Weighted"
    manifest["bad"] = {"step": 3, "epoch": 2, "step_in_epoch": 0, "names": ["the loss"]}
    sign(path, manifest)
    (run / "run.json").write_text(json.dumps({**record.read_about(run), "target": manifest["run"]["target"]}))
    return run, mark


def sign(path, manifest):
    """Writes a manifest with the right digest, as an attacker would."""
    manifest = {name: value for name, value in manifest.items() if name != "sha256"}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoint_files._digest(manifest)}))


def test_the_task_that_a_strangers_directory_names_is_not_imported(strangers, command, tmp_path):
    run, mark = strangers
    bad = checkpoint_files.complete(run / "checkpoints")[-1]
    for line in (["evaluate", run], ["export", run, "out"], ["replay", bad], ["evaluate", bad], ["replay", run]):
        code, err = command(*line)
        assert (code, err.count("\n")) == (2, 1), err
        assert "give the task as --target file.py:Class, or --trust" in err or line == ["replay", run]
        assert not mark.exists(), line
    assert command("export", run, "weights.npz")[0] == 0  # which needs no task
    (tmp_path / "own").mkdir()  # beside tests/tasks.py are folders with names of tfloop's
    own = shutil.copy(ROOT / "tests" / "tasks.py", tmp_path / "own" / "own_tasks.py")
    code, err = command("evaluate", run, "--target", f"{own}:Weighted")
    assert (code, mark.exists()) == (0, False), err
    code, err = command("evaluate", run, "--trust")
    assert (code, mark.exists()) == (0, True), err


def test_the_task_with_which_this_user_has_trained_there_is_taken(strangers, command, quiet, tmp_path, monkeypatch):
    run, mark = strangers
    fit(tiny(), epochs=3, run_dir=run, callbacks=quiet())
    assert command("evaluate", run)[0] == 0
    assert command("evaluate", checkpoint_files.complete(run / "checkpoints")[-2])[0] == 0  # which names the stranger's
    assert not mark.exists()
    moved = run.rename(tmp_path / "moved")
    assert "you haven't trained there on this machine" in command("evaluate", moved)[1]
    moved.rename(tmp_path / "aside")
    shutil.copytree(tmp_path / "aside", moved)
    os.rename(tmp_path / "aside", run)
    assert command("evaluate", run)[0] == 0
    (tmp_path / "state" / "tfloop" / "runs").chmod(0o777)  # other users may have written there
    assert "you haven't trained there" in command("evaluate", run)[1]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "others"))
    assert "you haven't trained there" in command("evaluate", run)[1]


def test_what_is_noted_of_own_runs_is_bounded_and_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "MOST", 10)
    for number in range(30):
        (tmp_path / str(number)).mkdir()
        trust.note(tmp_path / str(number), "task.py:Mine")
        if number < 5:
            (tmp_path / str(number)).rmdir()
    kept = list((tmp_path / "state" / "tfloop" / "runs").iterdir())
    assert len(kept) <= 10
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert trust.target_of(tmp_path / "29" / "checkpoints" / "step-00000001") == "task.py:Mine"
    assert trust.target_of(tmp_path / "3") is None
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")  # can't be written: no reason for a run to fail
    trust.note(tmp_path / "29", "task.py:Mine")
    assert trust.target_of(tmp_path / "29") is None


def test_the_store_and_the_sweep_that_a_strangers_directory_names(strangers, command, tmp_path):
    run, _ = strangers
    (run / "mlflow.json").write_text(json.dumps({"uri": f"sqlite:///{tmp_path / 'theirs' / 'mlflow.db'}"}))
    code, err = command("sync", run)
    assert (code, err.count("\n")) == (2, 1)
    assert "isn't contacted unasked: give it as --track URI, or --trust" in err
    assert not (tmp_path / "theirs").exists()
    plan = sweep.Plan(
        target="evil.py:Weighted", grid={"rate": "1"}, random={}, metric="loss", direction="minimize",
        sampler="tpe", pruner="none", seed=0, place=str(tmp_path), arguments=[],
    )  # fmt: skip
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "run.json").write_text(json.dumps({"sweep": plan.as_json(), "trials": 1}))
    code, err = command("sweep", tmp_path / "sweep")
    assert (code, err.count("\n")) == (2, 1)
    assert "isn't run unasked: give its command again with --sweep-dir, or --trust" in err
    with pytest.raises(UsageError, match="haven't begun this sweep"):
        sweep.reopened(tmp_path / "sweep")
    trust.note(tmp_path / "sweep", plan.target, {**plan.as_json(), "arguments": ["--epochs=1"]})
    with pytest.raises(UsageError, match="haven't begun this sweep"):  # the plan was changed since
        sweep.reopened(tmp_path / "sweep")
    trust.note(tmp_path / "sweep", plan.target, plan.as_json())
    assert sweep.reopened(tmp_path / "sweep")[0] == plan


# Numbers that aren't finite


@dataclass
class Rates(tasks.Plain):
    """A task whose fields hold what JSON has no number for."""

    examples: int = 24
    rate: float = 0.05
    bounds: list[float] | None = None

    def build_optimizer(self):
        return keras.optimizers.SGD(self.rate)


class Counter(Callback):
    """Has a state that isn't finite."""

    key = "counter"

    def __init__(self):
        self.lowest = math.inf

    def state_dict(self):
        return {"lowest": self.lowest, "seen": [1.5, math.nan, {"float": "up"}]}

    def load_state_dict(self, state):
        assert state["lowest"] == math.inf
        assert math.isnan(state["seen"][1])
        assert state["seen"][2] == {"float": "up"}
        self.lowest = "restored"


def test_numbers_that_are_not_finite_are_saved_restored_and_replayed(tmp_path, quiet):
    rate = math.inf

    def train(epochs):
        counter = Counter()
        task = Rates(rate=rate, bounds=[-math.inf, 1.0])
        more = {"on_nonfinite": "skip", "batch_size": 8, "run_dir": tmp_path / "run"}
        return fit(task, epochs=epochs, callbacks=quiet() + [counter], **more), counter

    result, _ = train(1)
    assert result.steps == 3
    texts = [path.read_text() for path in tmp_path.glob("run/*/step-*/manifest.json")]
    texts += [(tmp_path / "run" / "run.json").read_text()]
    texts += (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    for text in texts:
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} isn't JSON"))
    assert train(1)[1].lowest == "restored"
    place, _ = replay.locate(tmp_path / "run")
    task, *_ = run_directory.task_of(place, f"{__file__}:Rates")
    assert (str(task.rate), task.bounds) == (str(rate), [-math.inf, 1.0])
    assert replay.replay(Rates(rate=rate), place).again
    assert math.isnan(task_loader.load(f"{__file__}:Rates", fields={"rate": "nan"}).rate)


# What is sealed, and absurd


ABSURD = [
    ({"step": -5, "progress": {"step": -5, "epoch": 0, "step_in_epoch": 0, "examples": 0}}, "is of step -5"),
    ({"progress": {"step": 2, "epoch": 0, "step_in_epoch": 10**9, "examples": 0}}, "step_in_epoch 1000000000 after 2"),
    ({"progress": {"step": 2, "epoch": 10**9, "step_in_epoch": 0, "examples": 0}}, "epoch 1000000000 after 2"),
    ({"progress": {"step": 9, "epoch": 0, "step_in_epoch": 0, "examples": 0}}, "is of step 2, and stands at step 9"),
    ({"progress": {"step": 2, "epoch": True, "step_in_epoch": 0, "examples": 0}}, "progress.epoch is True"),
    ({"progress": {"step": 2}}, "it has no progress.epoch"),
    ({"progress": []}, "progress is "),
    ({"run": None}, "run is None, not an object"),
    ({"evaluated_at": "x"}, "evaluated_at is 'x'"),
    ({"evaluating": 1}, "evaluating is 1"),
    ({"learning_rates": [[]]}, r"learning_rates is \[\[\]\]"),
    ({"learning_rates": ["one"]}, r"learning_rates is \['one'\]"),
    ({"workers": []}, r"workers is \[\], not a list of workers' states"),
    ({"workers": [{"random": {}, "callbacks": []}]}, "workers is "),
    ({"epoch_totals": {"a": 1}}, "epoch_totals is "),
    ({"eval_metrics": {"loss": "low"}}, "eval_metrics is "),
]
ABSURD_RUN = [
    ({"options": None}, "run.options is None, not the options of a run"),
    ({"options": {"batch_size": 0}}, "run.options is "),
    ({"options": {"precision": "int4"}}, "run.options is "),
    ({"hyperparameters": [1]}, "run.hyperparameters is "),
    ({"target": 3}, "run.target is 3, not a target"),
    ({"task": None}, "run.task is None, not the name of a class"),
]


WAITED = {"best": 1.0, "waited": 0}
ABSURD_STATES = [
    ("Checkpoint", {"best_step": "nan"}),
    ("Checkpoint", {"best_value": "low"}),
    ("Checkpoint", {"known": [["x", 1.0, 0.0]]}),
    ("Checkpoint", {"known": [[1, 1.0, None]]}),
    ("EarlyStopping", {"waited": None, "best": 1.0}),
    ("EarlyStopping", {"best": {"float": "nan"}, "waited": 0}),
    ("EarlyStopping", {"best_step": [2], **WAITED}),
    ("ReduceOnPlateau", {"cooling": "x", **WAITED}),
    ("ReduceOnPlateau", {"best": []}),
    ("Timer", {"seconds": "long"}),
    ("FromKeras", {"begun": None}),
    ("FromKeras", {"attributes": 3, "begun": 0}),
]


def with_states(folder):
    keras_log = FromKeras(keras.callbacks.CSVLogger(folder / "log.csv"))
    added = [EarlyStopping("loss"), ReduceOnPlateau("loss"), Timer("1h"), keras_log]
    return standard(mlflow=None, progress=None) + added


def test_a_sealed_manifest_with_absurd_content_is_refused(run, tmp_path):
    path = checkpoint_files.complete(run / "checkpoints")[-1]
    original = json.loads((path / "manifest.json").read_text())
    cases = ABSURD + [({"run": {**original["run"], **changes}}, why) for changes, why in ABSURD_RUN]
    for changes, why in cases:
        sign(path, {**original, **changes})
        with pytest.raises(UsageError, match=why) as told:
            run_directory.locate(path)
        assert "\n" not in str(told.value)
        assert len(str(told.value)) < 500
    shutil.rmtree(checkpoint_files.complete(run / "checkpoints")[0])
    for key, state in ABSURD_STATES:
        worker = original["workers"][0]
        states = {**worker["callbacks"], key: {**worker["callbacks"].get(key, {}), **state}}
        sign(path, {**original, "workers": [{**worker, "callbacks": states}]})
        with pytest.raises(UsageError, match=rf"step-00000002: its manifest .* callback {key}: ") as told:
            fit(tiny(), epochs=3, run_dir=run, callbacks=with_states(run.parent))
        assert "\n" not in str(told.value)
    sign(path, {**original, "workers": [{"random": {"python": [3, "zz", None]}, "callbacks": {}}]})
    with pytest.raises(UsageError, match="state of the random generators is none"):
        fit(tiny(), epochs=3, run_dir=run)
    sign(path, {**original, "progress": {**original["progress"], "epoch": 0, "step_in_epoch": 2}})
    with pytest.raises(UsageError, match=r"stands at step 2 of an epoch, and train_data\(\) has 1 in one"):
        fit(tiny(), epochs=3, run_dir=run)


def fill(kind, place):
    """Puts something that is hard to read in the place of a JSON file."""
    place.unlink(missing_ok=True)
    if kind == "sparse":
        with place.open("wb") as file:
            file.truncate(8 << 30)
    elif kind == "deep":
        place.write_text('{"task": "Weighted", "a": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    elif kind == "digits":
        place.write_text('{"task": "Weighted", "progress": {"step": ' + "9" * 5000 + "}}\n")
    else:
        place.write_text('{"task": 3, "options": null, "progress": "all", "hyperparameters": []}\n')


def test_what_is_hard_to_read_is_read_quickly_or_not_at_all(run, tmp_path, command):
    for name in ("run.json", "journal.jsonl"):
        for kind in ("sparse", "deep", "digits", "absurd"):
            copy = shutil.copytree(run, tmp_path / "copy")
            fill(kind, copy / name)
            began = time.process_time()
            for line in (["runs", "show", copy], ["tail", copy]):
                code, err = command(*line)
                assert (code, "Traceback" in err) == (0, False), (name, kind, err)
            code, err = command("sync", copy, "--track", "file:nowhere")
            assert (err.count("\n") < 6, "Traceback" in err, code != 0) == (True, False, True), (name, kind, err)
            assert files.read_json(copy / name).keys() <= {"task", "options", "progress", "hyperparameters"}
            assert time.process_time() - began < 30  # reading 8 GB takes longer, and does not fit
            shutil.rmtree(copy)


def as_another_user(tmp_path, *acts):
    """What is said of each of these in a process of another user, whose files are all below `tmp_path`.

    In a child, since a process can't go back to who it was; it runs no TensorFlow.
    """
    if os.geteuid():
        pytest.skip("only root can become another user")
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and not path.stat().st_mode & 0o001:
            path.chmod(0o755)
    answers, told = os.pipe()
    if not (child := os.fork()):
        sys.stderr = os.fdopen(told, "w")
        os.setgid(12345)
        os.setuid(12345)
        for act in acts:
            try:
                act()
                print("done", file=sys.stderr)
            except BaseException as error:
                print(command_line.report_error(error), file=sys.stderr)
        sys.stderr.flush()
        os._exit(0)
    os.close(told)
    os.waitpid(child, 0)
    with os.fdopen(answers) as file:
        return [re.sub("/.*/", "", line) for line in file.read().splitlines()]


def give_away(*directories):
    for directory in directories:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, 12345, 12345)


def test_what_is_another_users(run, tmp_path):
    closed = shutil.copytree(run, tmp_path / "closed")
    protected = shutil.copytree(run, tmp_path / "protected")
    give_away(closed, protected)
    os.chown(run, 12345, 12345)
    (run / "journal.jsonl").chmod(0o600)  # which stays root's
    (closed / "checkpoints").chmod(0)
    (protected / "checkpoints").chmod(0o555)
    mine = shutil.copytree(run, tmp_path / "mine")  # root's
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0)
    denied = "can't be written (Permission denied)"
    said = as_another_user(
        tmp_path, lambda: prepare(run), lambda: prepare(closed), lambda: runs.checkpointed(closed),
        lambda: prepare(protected), lambda: runs.remove(mine), lambda: runs.locate(tmp_path, str(hidden)),
    )  # fmt: skip
    assert said == [
        f"tfloop: error: journal.jsonl {denied}: give another run directory", "2",
        "tfloop: error: checkpoints can't be read (Permission denied)", "2",
        "tfloop: error: checkpoints can't be read (Permission denied)", "2",
        "tfloop: error: checkpoints can't be written: make it writable, or give another run directory", "2",
        f"tfloop: error: the run directory mine {denied}: make it writable, or give another one", "2",
        "tfloop: error: hidden: can't be read (Permission denied): make it readable", "2",
    ]  # fmt: skip


def test_a_task_file_that_only_another_user_can_read(tmp_path):
    file = tmp_path / "task.py"
    file.touch(0o600)
    said = as_another_user(tmp_path, lambda: task_loader.check(f"{file}:Mine"))
    assert said == ["tfloop: error: TARGET 'task.py can't be read: make it readable", "2"]


def test_an_old_checkpoint_that_is_write_protected_ends_no_run(run, tmp_path):
    directory = run / "checkpoints"
    old, new = checkpoint_files.complete(directory)
    give_away(run)
    old.chmod(0o555)

    def save():
        writer = Writer()
        writer.remove(old)
        for step in (7, 8):
            writer.write(directory, [Snapshot("epoch", step, {"w": np.zeros(3)})])
        writer.close()
        for error in filter(None, writer.outcomes()):
            raise error

    said = as_another_user(tmp_path, save)
    assert said == [
        "warning: the old checkpoint step-00000001 can't be removed ([Errno 13] Permission denied: 'tensors.npz')",
        "done",
    ]
    assert [path.name for path in checkpoint_files.complete(directory)] == [new.name, "step-00000007", "step-00000008"]


def test_a_lock_that_cannot_be_removed_hides_no_error(run, tmp_path):
    give_away(run)

    def end():
        with locked(run):
            run.chmod(0o555)
            raise UsageError("what it ended with")

    assert as_another_user(tmp_path, end) == ["tfloop: error: what it ended with", "2"]


def test_a_limit_of_file_sizes(run, quiet, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as ended:
            fit(tiny(), epochs=4, run_dir=run, callbacks=quiet(report=None))
        assert command_line.report_error(ended.value) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "can't be written (File too large): make room there" in err
    assert [path.name for path in checkpoint_files.complete(run / "checkpoints")][-1] == "step-00000002"


USERS = r"""
from dataclasses import dataclass
import keras
from loop import ArrayData
from tests.tasks import Unweighted, regression

@dataclass
class Mine(Unweighted):
    labels: int = 3
    where: str = ""

    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(self.hidden), keras.layers.Dense(3)])

    def train_data(self):
        labels = [0] * (self.examples - 1) + [self.labels - 1]
        return ArrayData(regression(self.examples)[0], __import__("numpy").array(labels))

    eval_data = train_data

    def compute(self, model, batch, training):
        if self.where == "compute":
            raise ValueError("a mistake\nin two lines")
        inputs, labels = batch
        logits = model(inputs, training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)}
"""


def test_an_error_in_the_users_code_is_a_line_with_its_place(tmp_path, command):
    (tmp_path / "mine.py").write_text(USERS)
    for assignment, told in (
        ("hidden=0", r"Received an invalid value for `units`, .* \(mine.py, line 13, in build_model; --debug shows"),
        ("labels=9", r"InvalidArgumentError: Received a label value of 8 which is outside the valid range of \[0, 3\)"),
        ("where=compute", r"ValueError: a mistake in two lines \(mine.py, line 23, in compute; --debug shows"),
    ):
        typed = ["train", "mine.py:Mine", "--set", assignment, "--track", "off", "--backend", "single"]
        code, err = command(*typed)
        assert (code, "Traceback" in err) == (1, False), err
        [line] = [line for line in err.splitlines() if line.startswith("tfloop: error: ")]
        assert re.search(told, line), line
    code, err = command(*typed, "--debug")
    assert code == 1
    assert 'mine.py", line 23, in compute' in err
    assert "Traceback (most recent call last)" in err


def test_a_part_of_the_campaign(run, command, tmp_path):
    """What is quick of `tests.campaigns.hostile`, in this process: readers, and what a run does first."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "canary").write_text(CANARY)
    good = shutil.copytree(run, tmp_path / "good")
    draw = random.Random(0)
    for _ in range(25):
        copy = shutil.copytree(run, tmp_path / "runs" / "run")
        what = hostile.hurt(draw, copy, tmp_path / "elsewhere")
        before = hostile.seen(tmp_path / "elsewhere", good)
        line = draw.choice(hostile.commands(copy, good, tmp_path)[: hostile.QUICK])
        code, err = command(*line)
        assert not hostile.judge(line, code, 0.0, err, before, hostile.seen(tmp_path / "elsewhere", good)), (what, err)
        if copy.exists():
            with contextlib.suppress(UsageError):
                prepare(copy)
            hostile.clear(copy)
        assert hostile.seen(tmp_path / "elsewhere", good) == before, what


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_place_of_the_run_directory_is_named_as_such(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"the run directory .*file.*: it, or what stands above it, is a file: give"):
        fit(tiny(), run_dir=tmp_path / "file" / below, callbacks=standard(mlflow=None, progress=None))


def test_a_link_that_leads_to_itself_is_no_run_directory(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(UsageError, match=r"the run directory .*link: links there lead in a circle: give another one"):
        fit(tiny(), run_dir=tmp_path / "link", callbacks=standard(mlflow=None, progress=None))
