"""Runs by their directories: what the reader tells, the commands that list, show, compare, follow and remove them."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import callbacks
from callbacks.nearest import nearest
from callbacks.run_record import record
from examples.digits import Digits
from loop import fit
from loop.checkpoint.lock import locked
from loop.commands import runs, terminal
from loop.errors import UsageError
from tests.conftest import ROOT, TFLOOP


class Watcher(callbacks.Callback):
    """Looks at its own run from outside, while it is under way, and follows it in a thread."""

    def __init__(self):
        self.status = self.thread = None
        self.lines = []

    def on_fit_start(self, run):
        self.thread = threading.Thread(target=lambda: self.lines.extend(runs.tail(run.directory, 100, True)))
        self.thread.start()

    def on_epoch_end(self, run, metrics):
        self.status = record.read(run.directory).status


def train(directory, *more, **options):
    chosen = callbacks.standard(mlflow=None, progress=None, journal=callbacks.Journal(every=20))
    task = Digits(hidden=options.pop("hidden"))
    return fit(task, backend="single", run_dir=directory, callbacks=chosen + list(more), batch_size=64, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs of the same task, one of them profiled; what `fit` returned for each, and who watched the second."""
    root, watcher = tmp_path_factory.mktemp("trained"), Watcher()
    first = train(root / "small", hidden=8, epochs=2)
    second = train(root / "wide", watcher, hidden=32, epochs=3, profile="3:4")
    return root, first, second, watcher


@pytest.fixture
def root(trained, tmp_path):
    """The two runs, to do with as one likes."""
    shutil.copytree(trained[0], tmp_path / "runs")
    return tmp_path / "runs"


def journal(directory, *entries, **about):
    """Writes a run directory by hand: for attempts that would take too long."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time": 1e9 + index, "step": index, "epoch": 0} | each) for index, each in enumerate(entries)]
    (directory / "journal.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "run.json").write_text(json.dumps({"task": "T", "status": "finished", "hyperparameters": {}} | about))
    return directory


# The reader


def test_a_record_is_what_fit_returned(trained):
    root, first, second, _ = trained
    for name, result in (("small", first), ("wide", second)):
        found = record.read(root / name)
        assert (found.name, found.task, found.backend, found.replicas) == (name, "Digits", "single", 1)
        assert (found.status, found.steps, found.epochs) == ("finished", result.steps, result.epochs)
        assert (found.examples, found.total_steps, found.attempts) == (result.examples, result.steps, 1)
        assert found.parameters == result.model.count_params()
        for metric in ("loss", "accuracy", "eval_loss", "eval_accuracy"):
            assert found.curves[metric] == [(row["step"], row[metric]) for row in result.history]
        assert {step for step, _ in found.curves["step/loss"]} <= {step for step, _ in found.speed}
        assert found.best("eval_loss")[1] == min(row["eval_loss"] for row in result.history)
        assert found.best("accuracy")[1] == max(row["accuracy"] for row in result.history)
        assert found.checkpoints[-1].step == result.steps
        assert all(each.bytes > 1000 and each.reason and each.time > found.started for each in found.checkpoints)
        assert found.seconds > 0
        assert not found.faults
        # The time of all parts is that of the run; what isn't told is a moment before the first and after the last one.
        assert {"starting", "compiling", "evaluation", "callbacks"} <= set(found.split)
        assert sum(found.split.values()) <= found.seconds * 1.01
    small, wide = record.read(root / "small"), record.read(root / "wide")
    assert small.hyperparameters["hidden"] == 8
    assert small.options["epochs"] == 2
    assert "training" in small.split
    assert "compute" in wide.split
    assert not small.verdict
    assert wide.ranks[0]["compute"] > 0
    assert "compute" in wide.verdict[1]


def test_a_short_reading_tells_the_same(trained):
    for name in ("small", "wide"):
        whole, short = (record.read(trained[0] / name, whole) for whole in (True, False))
        same = ("status", "steps", "epochs", "examples", "seconds", "started", "attempts", "metric", "hyperparameters")
        assert [getattr(whole, each) for each in same] == [getattr(short, each) for each in same]
        assert all(whole.curves[each] == short.curves[each] for each in whole.curves if not each.startswith("step/"))


@pytest.mark.parametrize("whole", [True, False])
def test_a_run_under_way_has_the_steps_and_examples_that_it_has_noted(tmp_path, whole):
    seen = {}

    def look(run, *metrics):
        found = record.read(run.directory, whole)
        assert found.status == "running"
        seen[run.progress.step] = (found.steps, found.examples)

    looking = callbacks.LambdaCallback(steps_end=look, epoch_end=look, epoch_start=look, every=20)
    result = train(tmp_path / "r", looking, hidden=8, epochs=2)
    in_epoch = result.examples // 2  # of 23 steps, the last of which has a part of a batch
    # Points that lie in two epochs are not noted, as that of step 40.
    assert seen == {0: (0, 0), 20: (20, 1280), 23: (23, in_epoch), 40: (23, in_epoch), 46: (46, result.examples)}


def test_lives_and_faults(tmp_path):
    journal(
        tmp_path / "r",
        {"event": "restore", "checkpoint": None},
        {"event": "steps_end", "step": 5, "metrics": {"loss": 3.0, "examples_per_second": 10}},
        {"event": "restore", "checkpoint": "step-00000004", "step": 4, "time": 1e9 + 500},
        {"event": "steps_end", "step": 5, "metrics": {"loss": 2.0}, "time": 1e9 + 510},
        # A sample of the machine is written by a thread, also while the training stalls.
        {"event": "system", "step": 4, "metrics": {"system/rank0/cpu": 1.0}, "time": 1e9 + 700},
        {"event": "epoch_end", "step": 9, "metrics": {"loss": "nan", "skipped_steps": 2.0}, "time": 1e9 + 1000},
        {"event": "worker_gone", "worker": "w1", "how": "killed", "time": 1e9 + 1001},
        {"event": "restore", "checkpoint": "step-00000009", "step": 9, "time": 1e9 + 1001},
        {"event": "exception", "error": "ValueError: \x1b[31mred", "step": 9, "time": 1e9 + 1002},
        {"event": "fit_end", "status": "failed", "reason": "", "step": 9, "time": 1e9 + 1002},
        status="failed",
        options={"stall_timeout": 300},
    )
    found = record.read(tmp_path / "r")
    assert [each.text for each in found.faults] == [
        "killed at step 5",
        "went on from step-00000004",
        "nothing ended for 490 s",
        "2 steps of the epoch were skipped: a loss or gradient not finite",
        "worker w1 gone: killed",
        "went on from step-00000009",
        "ValueError: \\x1b[31mred",
    ]
    assert (found.attempts, found.status, found.seconds) == (3, "failed", 1 + 501 + 1)
    assert found.curves["step/loss"] == [(5, 2.0)]  # the later attempt has the last word
    assert "system/rank0/cpu" not in found.curves
    assert found.best("loss") is None
    assert found.last("loss") != found.last("loss")


def test_the_start_of_an_attempt_that_was_killed_is_not_all_of_its_time(tmp_path):
    killed = [{"event": "restore"}, {"event": "fit_start", "time": 1e9 + 2}, {"event": "epoch_end", "time": 1e9 + 90}]
    whole = [{"event": "restore", "time": 2e9}, {"event": "fit_start", "time": 2e9 + 3}]
    whole.append({"event": "fit_end", "status": "finished", "seconds": {"other": 7.0}, "time": 2e9 + 10})
    assert record.read(journal(tmp_path / "killed", *killed, status="running")).split == {}
    found = record.read(journal(tmp_path / "both", *killed, *whole))
    assert (found.seconds, found.split) == (100, {"starting": 3.0, "training": 7.0})


def test_running_needs_somebody_who_holds_the_lock(tmp_path):
    journal(tmp_path / "r", {"event": "restore"}, status="running")
    assert record.read(tmp_path / "r").status == "killed"
    with locked(tmp_path / "r"):
        assert record.read(tmp_path / "r").status == "running"
    (tmp_path / "r" / "lock").write_text("{}")  # as a kill leaves it
    assert record.read(tmp_path / "r").status == "killed"
    assert not record.under_way(tmp_path / "nothing")


def test_what_is_half_there_is_told(tmp_path, trained):
    shutil.copytree(trained[0] / "small", tmp_path / "r")
    whole = record.read(tmp_path / "r")
    (tmp_path / "r" / "run.json").write_text('{"task": ')
    with (tmp_path / "r" / "journal.jsonl").open("ab") as file:
        file.write(b'\xff\n[[[\n{"event": 7}\n{"time": 1e400, "event": "epoch_end"}\n{"event": "epoch_en')
    found = record.read(tmp_path / "r")
    assert (found.status, found.steps, found.curves) == (whole.status, whole.steps, whole.curves)
    assert found.hyperparameters == whole.hyperparameters  # from the journal
    (tmp_path / "r" / "journal.jsonl").unlink()
    os.mkfifo(tmp_path / "r" / "journal.jsonl")  # nobody writes: who reads would wait for ever
    assert record.read(tmp_path / "r").status == ""


VALUES = [
    None, True, -1, 5, 2**60, 10**400, 0.5, 1e308, float("nan"), float("-inf"), "nan", "", "\x1b[2J", "\ud800", "a\nb",
    "running", "step-00000001", "2026-11-21T00:00:00Z", [], [[1]], ["\x9b"], {}, {"\x1b]0;x\x07": ["\x00"]},
    {"lr": -(10**400)}, {"lr": float("nan")}, {"lr": "x"}, {"loss": 1}, {"compute": 1e300, "data": -1},
    {"eval_loss": "nan", "loss": 10**400, "\u202e": 1e308},
]  # fmt: skip
EVENTS = ["restore", "fit_start", "steps_end", "eval_end", "epoch_end", "checkpoint", "call", "summary", "exception"]
values = st.sampled_from(VALUES)
about = st.dictionaries(st.sampled_from(runs.FIELDS + ("hyperparameters", "options", "progress", "updated")), values)
entry = st.fixed_dictionaries(
    {"time": st.one_of(st.floats(0, 1e10), values), "event": st.sampled_from([*EVENTS, "fit_end", *VALUES])},
    optional=dict.fromkeys(("step", "epoch", "metrics", "checkpoint", "reason", "seconds", "text", "status"), values)
    | {"about": about, "total_steps": values},
)  # fmt: skip


def as_bytes(value):
    return json.dumps(value).encode()


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.binary(), about.map(as_bytes), st.just(b"[" * 2000)),
    st.lists(st.one_of(st.binary(), entry.map(as_bytes), st.just(b'{"a":' * 2000)), max_size=8),
)
def test_whatever_is_in_a_run_directory_it_can_be_read_and_shown(run_json, lines):
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run\x1b[2J"
        directory.mkdir()
        (directory / "run.json").write_bytes(run_json)
        (directory / "journal.jsonl").write_bytes(b"\n".join([*lines, b""]))
        found = record.read(directory)
        with contextlib.suppress(UsageError):  # where there is no lr
            runs.listed(Path(place), ["lr<1"], "-lr", None)
        shown = [
            runs.table(runs.listed(Path(place), (), None, None), None),
            *runs.compare([found, record.read(directory, whole=False)]),
            *runs.show(found),
            *runs.tail(directory, 10, True),
            runs.as_json([found]),
            runs.shown_as_json(found),
        ]
        for each in map(terminal.as_text, shown):
            assert each.replace("\n", "").isprintable(), each


# The commands


def test_runs_are_listed_with_their_best_metric(root, command):
    code, out, _ = command("runs")
    head, small, wide = out.splitlines()
    assert code == 0
    assert head.split()[:4] == ["run", "status", "backend", "steps"]
    assert small.split()[:5] == ["small", "finished", "single", "x1", str(record.read(root / "small").steps)]
    assert f"{record.read(root / 'wide').best('eval_loss')[1]:.4g} eval_loss" in wide
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--filter", "hidden=8"], ["small"]),
        (["--filter", "hidden>8", "--filter", "status = finished"], ["wide"]),
        (["--filter", "epochs!=2"], ["wide"]),
        (["--filter", "engine=single", "--sort", "-hidden"], ["wide", "small"]),
        (["--filter", "eval_loss<0"], []),
        (["--filter", "shuffle=true", "--sort", "name"], ["small", "wide"]),
        (["--filter", "started>=2001-01-01T00:00"], ["small", "wide"]),
        (["--sort", "eval_accuracy"], ["small", "wide"]),
        (["--sort=-duration", "--filter", "profile=3:4"], ["wide"]),
    ],
)
def test_filters_and_columns(root, command, arguments, names):
    code, out, _ = command("runs", "--json", *arguments)
    found = json.loads(out)
    assert code == 0
    assert [each["name"] for each in found] == names
    assert all(each["best"]["eval_loss"]["value"] > 0 for each in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "--filter", "statu=finished"], "did you mean 'status'?"),
        (["runs", "--filter", "status=finish"], "did you mean 'finished'?"),
        (["runs", "--filter", "backend=horovd"], "did you mean 'horovod'?"),
        (["runs", "--filter", "eval_loss<low"], "'low' isn't a number"),
        (["runs", "--filter", "hidden"], "give KEY=VALUE"),
        (["runs", "--filter", "hiden=8"], "did you mean 'hidden'?"),
        (["runs", "--sort", "eval_los"], "did you mean 'eval_loss'?"),
        (["runs", "--metric", "acuracy"], "did you mean 'accuracy'?"),
        (["runs", "--root", "run"], "there is no such directory"),
        (["runs", "--json", "show", "small"], "give its options after it"),
        (["runs", "show", "smal1"], "did you mean 'small'?"),
        (["runs", "show", "nothing/here"], "isn't a run directory"),
        (["runs", "show", ""], "is empty"),
        (["runs", "show", "\x1b[2Jx"], "\\x1b[2Jx: no run of that name"),
        (["runs", "show", "wide", "--metric", "los"], "did you mean 'loss'?"),
        (["runs", "compare", "small"], "1 run to compare: give 2 to 26"),
        (["runs", "compare", "small", "wide", "--metric", "x"], "no metric of that name; there are: "),
        (["runs", "rm", "small"], "there is no terminal: give --yes"),
        (["runs", "rm", "small", "smal1", "--yes"], "did you mean 'small'?"),
        (["tail", "wid3"], "did you mean 'wide'?"),
        (["sync", "wid3"], "did you mean 'wide'?"),
        (["replay", "wid3"], "did you mean 'wide'?"),
    ],
)
def test_what_is_not_there_is_one_line_with_the_nearest_right_name(root, command, arguments, message):
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("tfloop: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(os.listdir(root)) == ["small", "wide"]


def test_a_run_is_found_by_prefix_path_and_latest(root):
    shutil.copytree(root / "small", root / "smaller")
    for name in ("wid", "wide", "latest", str(root / "wide"), "runs/wide", "./runs/wide"):
        assert runs.locate(root, name).resolve() == root / "wide"
    assert runs.locate(root, "small") == root / "small"  # a whole name isn't a prefix of another
    with pytest.raises(UsageError, match="2 runs begin so: small, smaller"):
        runs.locate(root, "sma")


@pytest.mark.parametrize("typed", ["evaluate", "predict", "report", "rerun", "tail", "runs show", "runs rm", "sync"])
def test_a_name_that_means_two_runs_is_refused(typed, root, command, tmp_path):
    """Some commands took the one in `runs/`, and others the one here."""
    shutil.copytree(root / "small", tmp_path / "small")
    words = [*typed.split(), "small"]
    message = "tfloop: error: small is a run here, and one in runs, too: give ./small or runs/small\n"
    assert command(*words) == (2, "", message)


def test_a_name_means_one_run_for_all_commands(root, tmp_path):
    shutil.copytree(root / "wide", tmp_path / "small")
    shutil.copytree(root / "wide", tmp_path / "latest")
    (tmp_path / "wide").mkdir()  # no run
    for find in (runs.named, lambda text: runs.locate(runs.ROOT, text)):
        assert find("./small") == Path("small")
        assert find("runs/small") == Path("runs/small")
        assert find("wide") == find("wid") == find("latest") == Path("runs/wide")


def test_hostile_names_and_broken_runs_are_listed_like_others(root, command):
    journal(root / "\x1b[31mevil\nname\x9b", {"event": "restore"})
    shutil.copytree(root / "small", root / os.fsdecode(b"not-utf8-\xff"))
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    (root / "mlflow.db").touch()
    (root / "none").mkdir()
    code, out, err = command("runs")
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert code == 0
    assert err == ""
    assert sorted(names) == sorted(["\\x1b[31mevil\\nname\\x9b", "not-utf8-\\udcff", "broken", "small", "wide"])


def test_no_runs_is_no_error(command):
    assert command("runs") == (0, "", "no runs here yet: tfloop train digits makes one\n")


def test_show_draws_a_run_in_plain_characters(root, command):
    code, out, _ = command("runs", "show", "wide")
    assert code == 0
    assert out.isascii()
    assert "\x1b" not in out
    legend = "loss  * step/loss  o loss  + eval_loss"
    for part in (
        "hidden=32",
        "epochs=3",
        legend,
        "eval_accuracy",
        "where the time went",
        "compute",
        "step-0000",
        "rank 0",
    ):
        assert part in out
    code, out, _ = command("runs", "show", "wide", "--json")
    found = json.loads(out)
    assert set(found) == {field.name for field in dataclasses.fields(record.Record)}
    assert found["curves"]["loss"] == [list(point) for point in record.read(root / "wide").curves["loss"]]


def test_parts_of_the_time_have_the_names_that_the_report_and_the_options_have():
    assert "all-reduce" in terminal.as_text(terminal.bars({"all_reduce": 3.0, "data": 1.0}))


def test_one_is_one_and_an_artifact_is_named(tmp_path):
    journal(tmp_path / "r", {"event": "epoch_end", "step": 5, "epoch": 0, "metrics": {"loss": 3.0}})
    one = dataclasses.replace(record.read(tmp_path / "r"), epochs=1)
    assert ", 1 epoch, " in runs.show(one)[1]
    entry = {"event": "fit_start", "step": 0, "time": 1e9, "about": {"task": "T", "backend": "single", "replicas": 1}}
    assert runs.event_line(entry).endswith("T on single, 1 replica")
    assert runs.event_line({"event": "artifact", "step": 5, "time": 1e9, "path": "model"}).endswith(
        "artifact     model"
    )
    assert runs.event_line({"event": "system", "step": 5, "time": 1e9, "metrics": {"system/rank0/cpu": 1.0}}) == ""


def test_compare_shows_what_differs_and_nothing_else(root, command):
    code, out, _ = command("runs", "compare", "small", "wide", "--metric", "eval_accuracy")
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert code == 0
    assert out.isascii()
    assert rows["hidden"] == ["hidden", "8", "32"]
    assert rows["option epochs"] == ["option", "epochs", "2", "3"]
    assert not {"learning_rate", "option batch_size", "version tensorflow", "backend"} & set(rows)
    assert rows["eval_loss"][2].endswith("*")
    assert "eval_accuracy  A  B" in out
    assert "they differ in nothing" in command("runs", "compare", "small", "small")[1]


def test_a_run_is_followed_to_its_end(trained):
    _, _, second, watcher = trained
    watcher.thread.join(60)
    assert watcher.status == "running"
    assert watcher.lines[-1] == f"finished at step {second.steps}"
    text = "\n".join(watcher.lines)
    for each in ("fit_start", "epoch_start", "steps_end", "eval_end", "checkpoint", "summary", "fit_end"):
        assert f"  {each}" in text
    assert text.count("eval_end") == 3
    assert f"accuracy {second.history[0]['eval_accuracy']:.4g}" in text


def test_following_ends_when_the_run_is_killed(tmp_path):
    hold = (
        "import sys, pathlib as p, loop.checkpoint.lock as l\n"
        "with l.locked(p.Path('r')):\n    print(flush=True); sys.stdin.read()"
    )
    journal(tmp_path / "r", {"event": "restore"}, status="running")
    with subprocess.Popen(
        [sys.executable, "-c", hold], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=-1, stdout=-1
    ) as owner:  # fmt: skip
        owner.stdout.readline()
        lines = runs.tail(Path("r"), 10, True)
        assert "restore" in next(lines)
        with (tmp_path / "r" / "journal.jsonl").open("a") as file:
            file.write('{"time": 1e9, "event": "epoch_start", "step": 7, "epoch": 3}\n')
        assert "epoch 4" in next(lines)
        owner.kill()
    assert list(lines) == ["killed at step 7"]


def test_tail_shows_what_there_is(root, command):
    code, out, _ = command("tail", "wide", "-n", "2", "--no-follow")
    assert code == 0
    assert [line.split()[3] for line in out.splitlines()][-1] == "fit_end"
    assert command("tail", "wide", "-n", "0")[1] == f"finished at step {record.read(root / 'wide').steps}\n"


class Fails(Digits):
    """Its compiled step fails: TensorFlow's message begins with a stack of dozens of lines."""

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        if training:
            tf.debugging.assert_less(values["loss"], 0.0, "the loss is too large")
        return values


def test_a_failure_is_shown_by_the_line_that_says_what_is_wrong(tmp_path, command):
    with pytest.raises(tf.errors.InvalidArgumentError, match="Detected at node"):
        fit(Fails(), steps=1, run_dir=tmp_path / "r", callbacks=callbacks.standard(mlflow=None))
    [fault] = record.read(tmp_path / "r").faults
    followed = command("tail", str(tmp_path / "r"), "--no-follow")[1].split("exception    ")[1]
    for line in (fault.text, followed.splitlines()[0]):
        assert line.startswith("InvalidArgumentError: assertion failed: [the loss is too large]")
        assert "File" not in line


# Removing


def test_rm_removes_runs_and_never_what_links_lead_to(root, command, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("all I have")
    (root / "small" / "link").symlink_to(tmp_path / "precious")
    (root / "small" / "checkpoints" / "link").symlink_to(tmp_path / "precious" / "file")
    (root / "alias").symlink_to(root / "wide")
    assert command("runs", "rm", "small", "runs/small", "--yes") == (0, "", "")
    assert sorted(os.listdir(root)) == ["alias", "wide"]
    assert (tmp_path / "precious" / "file").read_text() == "all I have"
    code, _, err = command("runs", "rm", "alias", "--yes")
    assert code == 2
    assert "is a link" in err
    assert (root / "wide" / "run.json").exists()


def test_rm_refuses_what_is_no_run_alone_or_under_way(root, command, tmp_path, monkeypatch):
    journal(tmp_path / "runs" / "no-manifest", {"event": "restore"})
    (root / "no-manifest" / "run.json").write_text('{"task": "T"}')
    journal(root / "outer", {"event": "restore"})
    journal(root / "outer" / "inner", {"event": "restore"})
    (root / "wide" / "lock").symlink_to(tmp_path / "runs" / "outer" / "run.json")
    refused = {"no-manifest": "no run.json of a run", "outer": "holds other runs", "wide": "under way"}
    for name, why in refused.items():
        code, _, err = command("runs", "rm", name, "--yes")
        assert code == 2
        assert why in err
    with locked(root / "small"):
        assert "under way" in command("runs", "rm", "small", "--yes")[2]
    monkeypatch.chdir(root / "small")
    assert "holds where you are" in command("runs", "--root", root, "rm", "small", "--yes")[2]
    assert sorted(os.listdir(root)) == ["no-manifest", "outer", "small", "wide"]


def test_rm_says_what_is_left_and_can_be_called_again(root, command, monkeypatch):
    unlink = os.unlink

    def stuck(path, *more, **names):
        if str(path).endswith("manifest.json"):
            raise PermissionError(13, "Permission denied", path)
        unlink(path, *more, **names)

    monkeypatch.setattr(os, "unlink", stuck)
    code, _, err = command("runs", "rm", "small", "--yes")
    assert code == 1
    assert "left: " in err
    assert "manifest.json (Permission denied)" in err
    monkeypatch.undo()
    os.chdir(root.parent)
    assert (root / "small" / "run.json").exists()
    assert command("runs", "rm", "small", "--yes")[0] == 0
    assert not (root / "small").exists()


def test_rm_asks_on_a_terminal(root):
    for answer, there in (("n\n", True), ("y\n", False)):
        main, terminal = pty.openpty()
        rm, environment = [*TFLOOP, "runs", "rm", "small"], {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(rm, stdin=terminal, stdout=subprocess.PIPE, text=True, env=environment) as asking:
            os.write(main, answer.encode())
            out, _ = asking.communicate(timeout=240)
        os.close(main)
        os.close(terminal)
        assert asking.returncode == 0
        assert "small" in out
        assert (root / "small").exists() is there


def test_rm_without_an_answer_removes_nothing(root):
    main, terminal = pty.openpty()
    rm, environment = [*TFLOOP, "runs", "rm", "small"], {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(rm, stdin=terminal, **pipes, text=True, env=environment) as asking:
        os.write(main, b"\x04")  # Ctrl-D; typer reports Ctrl-C in the same way
        _, err = asking.communicate(timeout=240)
    os.close(main)
    os.close(terminal)
    assert (asking.returncode, err) == (130, "\nnothing is removed\n")
    assert (root / "small").exists()


@pytest.mark.parametrize(("columns", "head"), [(40, "run status"), (80, "run status steps best duration")])
def test_the_table_fits_a_narrow_terminal(root, columns, head):
    (root / "small").rename(root / "Digits-20261121T201028Z-71c1e4")
    main, terminal = pty.openpty()
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    with subprocess.Popen([*TFLOOP, "runs"], stdout=terminal, env=environment) as process:
        pass
    lines = os.read(main, 9999).decode().splitlines()
    os.close(main)
    os.close(terminal)
    assert process.returncode == 0
    assert lines[0].split() == head.split()
    assert len(lines) == 4  # two runs below the head and its rule
    assert max(map(len, lines)) <= columns


def test_what_is_best_follows_from_the_name_of_a_metric_or_is_not_told(root, command):
    for name, values in (("small", (3.0, 1.0, 2.0)), ("wide", (6.0, 4.0, 5.0))):
        with (root / name / "journal.jsonl").open("a") as file:
            for step, value in enumerate(values):
                metrics = {"eval_mae": value, "eval_f1": value, "eval_odd": value}
                file.write(
                    json.dumps({"time": 2e9, "event": "eval_end", "step": 900 + step, "metrics": metrics}) + "\n"
                )
    about = json.loads(command("runs", "--json", "--filter", "name=small")[1])[0]
    assert [about["best"].get(name) for name in ("eval_mae", "eval_f1", "eval_odd")] == [
        {"step": 901, "value": 1.0}, {"step": 900, "value": 3.0}, None,
    ]  # fmt: skip

    def table(*arguments):
        words = [line.split() for line in command(*arguments)[1].splitlines() if line]
        return {first: rest for first, *rest in words}

    rows = table("runs", "show", "small")
    assert [rows[name] for name in ("eval_mae", "eval_odd")] == [["2", "1", "901"], ["2"]]
    rows = table("runs", "compare", "small", "wide")
    assert [rows[name] for name in ("eval_mae", "eval_f1", "eval_odd")] == [["1*", "4"], ["3", "6*"], ["2", "5"]]


def test_none_of_this_loads_what_is_slow(root):
    code = (
        "import sys, cli\n"
        "for arguments in sys.argv[1:]:\n"
        "    sys.argv = ['tfloop', *arguments.split()]\n"
        "    try: cli.main()\n"
        "    except SystemExit as ended: assert not ended.code, ended\n"
        "slow = {'tensorflow', 'numpy', 'mlflow', 'optuna'}\n"
        "print('loaded:', slow & set(sys.modules), file=sys.stderr)\n"
    )
    commands = ["runs", "runs --json", "runs show wide", "runs compare small wide", "tail wide", "runs rm small --yes"]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240)  # fmt: skip
    assert done.stderr == "loaded: set()\n", done.stderr


def test_of_hundreds_of_names_the_first_are_listed():
    """A run with 600 metrics had its error message in 16,000 characters."""
    names = [f"group/metric_{number}" for number in range(600)]
    hint = nearest("zzz", names)
    assert hint.startswith("; there are: group/metric_0, group/metric_1, ")
    assert hint.endswith("group/metric_49, and 550 more")
    assert nearest("zzz", names[:50]) == "; there are: " + ", ".join(names[:50])
    assert nearest("group/metrics_70", names) == "; did you mean 'group/metric_70'?"
