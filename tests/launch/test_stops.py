"""What stops a run: signals, a closed terminal, sys.exit in the user's code; and what is said and left behind then."""

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

import callbacks
import loop.commands.train as train_
from loop import TrainingError, fit
from loop.launch import signals, worker
from tests.conftest import ROOT, TFLOOP
from tests.launch.test_failures import Started, pid_of, start, task, training  # noqa: F401 - fixtures among them
from tests.tasks import Plain
from tests.test_cli import command  # noqa: F401 - a fixture


class Does(callbacks.Callback):
    """Does something when its hook is called."""

    def __init__(self, hook, act):
        setattr(self, f"on_{hook}", lambda run, *args: act())


def raises(number):
    return lambda: signal.raise_signal(number)


# What counts as a wish to stop


@pytest.mark.parametrize(
    ("heard", "count"),
    [
        ([(signal.SIGINT, 0.0)], 1),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 1.0)], 2),
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.01)], 1),  # `timeout` sends it twice
        ([(signal.SIGTERM, 0.0), (signal.SIGINT, 0.01)], 2),
        ([(signal.SIGHUP, 0.0), (signal.SIGHUP, 5.0)], 1),  # the shell's, and the kernel's
        ([(signal.SIGTERM, 0.0), (signal.SIGHUP, 1.0)], 1),  # a session that ends
        ([(signal.SIGHUP, 0.0), (signal.SIGTERM, 1.0)], 1),
        ([(signal.SIGHUP, 0.0), (signal.SIGTERM, 1.0), (signal.SIGTERM, 2.0)], 2),
    ],
)
def test_wishes_are_counted(heard, count, monkeypatch):
    wishes = signals.Wishes()
    for number, moment in heard:
        monkeypatch.setattr(signals.time, "monotonic", lambda moment=moment: moment)
        assert wishes.hear(number) == wishes.count
    assert wishes.count == count


def test_a_closed_terminal_saves_and_ends_and_it_is_said_at_once(quiet, capfd):
    before = signal.getsignal(signal.SIGHUP)
    acts = [Does("epoch_start", raises(signal.SIGHUP)), Does("epoch_end", raises(signal.SIGHUP))]
    result = fit(Plain(), epochs=3, batch_size=20, callbacks=quiet() + acts, run_dir="run")
    assert (result.status, result.epochs) == ("preempted", 0)
    assert list(Path("run/checkpoints").glob("step-*"))
    assert signal.getsignal(signal.SIGHUP) is before
    deadline = time.monotonic() + 240
    text = ""
    while signals.STOPPING not in text:  # of a thread
        assert time.monotonic() < deadline
        text += capfd.readouterr().err


def test_a_run_under_nohup_goes_on(quiet):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = fit(Plain(), epochs=1, batch_size=20, callbacks=quiet() + [Does("epoch_start", raises(signal.SIGHUP))])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.status == "finished"


def test_a_second_signal_ends_at_once_what_hears_none(tmp_path):
    """As in a call into TensorFlow, which no handler of Python's can end."""
    code = """
import hashlib, signal
from loop.launch import signals
wishes = signals.Wishes()
def heard(number):
    if wishes.hear(number) > 1:
        signals.die(number)
    print("heard", flush=True)
with signals.handled({signal.SIGINT: lambda *_: None}), signals.watched(heard):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "heard\n"
        time.sleep(2 * signals._SAME)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == -signal.SIGINT


def test_a_signal_before_anything_listens_to_it_is_not_lost():
    """It came between the handler and the thread that acts on it: the run went to its end."""
    code = """
import contextlib, signal
from loop.launch import signals, worker
signals.watched = lambda heard: contextlib.nullcontext()
with worker.before_training():
    signal.raise_signal(signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, f"{signals.STOPPED}\n")


def test_a_fork_can_be_terminated_and_its_signal_stops_no_training():
    """As a pool of `multiprocessing` within a map terminates its processes, and waits for them."""
    script = """
import os, signal
from loop.launch.signals import handled, watched

heard = []
reader, writer = os.pipe()
with handled({signal.SIGTERM: lambda number, frame: None}), watched(heard.append):
    child = os.fork()
    if not child:
        os.write(writer, b"x")
        signal.pause()
        os._exit(0)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status), heard)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "-15 []\n", done.stderr


def test_what_leaves_before_training_leaves_nothing_behind(tmp_path):
    code = (
        "import pathlib\nfrom loop.launch import signals\n"
        "with signals.temporary_directory('tfloop-dry-run-') as place:\n"
        "    pathlib.Path(place, 'file').touch()\n    signals.leave(75)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=240
    )
    assert done.returncode == 75
    assert not list(tmp_path.iterdir())


# What is said


@pytest.mark.parametrize(
    ("typed", "more", "goes_on"),
    [
        (["digits", "--epochs", "6"], {}, "digits --epochs 6 --run-dir runs/mine"),
        (["digits", "--resume", "never"], {"resume": "never"}, "digits --run-dir runs/mine"),
        (["digits", "--resume=old/run"], {"resume": "old/run"}, "digits --run-dir runs/mine"),
        (["digits", "--run-dir", "runs/mine"], {"run_dir": Path("runs/mine")}, "digits --run-dir runs/mine"),
        (["a b.py:T", "--set", "x=$y"], {}, "'a b.py:T' --set 'x=$y' --run-dir runs/mine"),
        (
            ["digits", "--config", "c.toml"],
            {"resume": "never", "config_": ["c.toml"]},
            "digits --config c.toml --resume=auto --run-dir runs/mine",
        ),
    ],
)
def test_the_command_that_goes_on(typed, more, goes_on, capsys):
    about = types.SimpleNamespace(**{"resume": None, "run_dir": None, "config_": None, **more})
    train_._tell_how_to_go_on(about, ["train", *typed], {"run_dir": str(Path("runs/mine").resolve()), "steps": 1200})
    assert capsys.readouterr().err.splitlines() == [
        "interrupted at step 1,200; go on with:",
        f"tfloop train {goes_on}",
    ]


def test_ctrl_c_says_how_to_go_on_and_it_does(command):  # noqa: F811
    Path("mine.py").write_text(
        Path("mine.py").read_text() + "\nimport signal\nimport callbacks\n\n"
        "class Stops(callbacks.Callback):\n    def on_epoch_end(self, run, metrics):\n"
        "        if run.progress.epoch == 0:\n            signal.raise_signal(signal.SIGINT)\n\n"
        "class Stopped(Mine):\n    def build_callbacks(self):\n        return [Stops()]\n"
    )
    code, out, err = command(
        "train", "mine.py:Stopped", "--epochs", 2, "--track", "off", "--backend", "single", "--json"
    )
    assert (code, json.loads(out)["status"]) == (75, "preempted")
    assert "\ninterrupted at step " in err
    assert "preempted" not in err
    words = shlex.split(err.splitlines()[-1])
    code, out, err = command(*words[1:])
    result = json.loads(out)
    assert (code, result["status"], result["epochs"]) == (0, "finished", 2)
    code, out, _ = command("runs")
    assert code == 0
    assert "finished" in out


# sys.exit in the user's code


@pytest.mark.parametrize("hook", ["setup", "epoch_end", "fit_end"])
def test_sys_exit_in_a_callback_is_an_error(hook, quiet):
    with pytest.raises(
        TrainingError, match=r"test_stops.py, line \d+, in <lambda>: sys.exit\(0\) can't end a run: raise"
    ):
        fit(Plain(), epochs=1, batch_size=20, callbacks=quiet() + [Does(hook, lambda: sys.exit(0))], run_dir="run")
    assert json.loads(Path("run/run.json").read_text())["status"] in ("failed", "finished")


@pytest.mark.parametrize("place", ["train_data", "build_model", "compute", "the module"])
def test_sys_exit_in_a_task_is_no_success(place, command):  # noqa: F811
    exits = "import sys; sys.exit(0)"
    if place == "the module":
        added = f"{exits}\n"
    else:
        added = f"\nclass Exits(Mine):\n    def {place}(self, *args, **named):\n        {exits}\n"
    Path("mine.py").write_text(Path("mine.py").read_text() + added)
    name = "Mine" if place == "the module" else "Exits"
    code, out, err = command("train", f"mine.py:{name}", "--track", "off", "--backend", "single")
    assert (code, out) == (1, ""), err
    assert "sys.exit(0) can't end a run" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", ["asyncio.CancelledError", "GeneratorExit", "BaseException"])
def test_an_error_that_is_no_exception_is_one_line_without_secrets(kind, command):  # noqa: F811
    raises = f"import asyncio\nraise {kind}('db_password=Hunter2Hunter2')\n"
    Path("mine.py").write_text(raises + Path("mine.py").read_text())
    code, out, err = command("train", "mine.py:Mine", "--track", "off", "--backend", "single")
    assert (code, out) == (1, "")
    error = kind.rpartition(".")[2]
    assert err.splitlines()[-1].startswith(f"tfloop: error: {error}: db_password=*** (mine.py, line 2, in <module>; ")
    assert "Hunter2Hunter2" not in err
    assert "Traceback" not in err


# Processes

EXITS = '''
import json, os, sys
from examples_digits import Digits

class Exits(Digits):
    """One worker of two ends the process, as if all were well."""
    def train_data(self):
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"]:
            sys.exit(0)
        return super().train_data()
'''


def test_one_worker_of_two_that_exits_fails_the_job(start, task):  # noqa: F811
    (task / "task.py").write_text(EXITS)
    code, out, lines = start(task, "task.py:Exits", "--backend", "multiworker", "--workers", 2).end()
    assert (code, out) == (1, "")
    assert lines[-1].startswith("tfloop: error: rank 1: task.py, line ")
    assert "sys.exit(0) can't end a run" in lines[-1]


def test_a_job_whose_terminal_is_closed_saves_and_says_how_to_go_on(start, task):  # noqa: F811
    job = start(task, "task.py:Slow", "--backend", "multiworker", "--workers", 2, "--epochs", 500, "--run-dir", "run")
    job.wait_for(lambda: training(task))
    job.process.send_signal(signal.SIGHUP)
    job.process.send_signal(signal.SIGHUP)
    code, _, lines = job.end()
    assert code == 75
    assert signals.STOPPING in lines
    assert lines[-1].startswith(
        "tfloop train task.py:Slow --backend multiworker --workers 2 --epochs 500 --run-dir run"
    )
    assert json.loads((task / "run" / "run.json").read_text())["status"] == "preempted"
    assert not job.alive()
    assert not list(task.glob("tfloop-*"))


def test_a_terminal_that_is_closed_loses_nothing(task):  # noqa: F811
    """The terminal itself: what is printed afterwards has nowhere to go."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(task)
        os.execv(sys.executable, [*TFLOOP, "train", "task.py:Slow", "--backend", "single", "--epochs", "500",
                                  "--run-dir", "run", "--track", "off"])  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not training(task):
            assert time.monotonic() < deadline
            os.read(terminal, 1 << 16)
    finally:
        os.close(terminal)
    assert os.waitpid(pid, 0)[0] == pid
    assert json.loads((task / "run" / "run.json").read_text())["status"] == "preempted"
    last = max((task / "run" / "checkpoints").glob("step-*"))
    assert json.loads((last / "manifest.json").read_text())["step"] == int(last.name[5:])


@pytest.mark.parametrize("place", [["--backend", "single"], ["--backend", "multiworker", "--workers", "2"]])
def test_a_full_pipe_keeps_no_signal_from_the_workers_and_a_second_one_ends_it(place, start, task):  # noqa: F811
    # Long epochs: at the end of one, the line of the epoch would wait for the pipe.
    job = start(task, "task.py:Slow", *place, "--epochs", 500, "--batch-size", 4, "--run-dir", "run")
    job.wait_for(lambda: training(task))
    stderr = os.open(f"/proc/{job.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    for size in (512, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(stderr, size * b"x")
    os.close(stderr)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(lambda: json.loads((task / "run" / "run.json").read_text())["status"] == "preempted")
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=240) in (-signal.SIGTERM, 1)
    job.end(seconds=240)  # what it has started is gone, too
    assert not job.alive()
    assert not list(task.glob("tfloop-*"))


def in_shell(directory, *arguments, closed):
    line = f"{shlex.join([*TFLOOP, *arguments])} {closed}"
    return subprocess.run(
        ["bash", "-c", line], cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240,
        capture_output=True, text=True,
    )  # fmt: skip


def test_closed_descriptors_fail_no_run_and_take_none_of_its_files(task):  # noqa: F811
    arguments = ["digits", "--backend", "single", "--steps", "4", "--track", "off", "--json", "--run-dir", "run"]
    assert in_shell(task, "train", *arguments, closed="<&- >&- 2>&-").returncode == 0
    assert json.loads((task / "run" / "run.json").read_text())["status"] == "finished"
    for each in (task / "run" / "journal.jsonl").read_text().splitlines():
        json.loads(each)  # nothing that was printed
    for closed in ("2>&-", ">&- 2>&-", ">&-"):
        done = in_shell(task, "train", "digits", "--epochs", "0", closed=closed)
        assert (done.returncode, done.stdout) == (2, "")
        assert ("epochs=0" in done.stderr) == (closed == ">&-")


SWEEP = ["--grid", "hidden=8,16", "--epochs", "500", "--backend", "multiworker", "--workers", "2", "--track", "off"]


@pytest.mark.parametrize(
    ("tool", "arguments", "number"),
    [
        ("chaos", ["--kills", "1", "--epochs", "500"], signal.SIGHUP),
        ("sweep", SWEEP, signal.SIGHUP),
    ],
)
def test_a_tool_that_is_stopped_leaves_nothing_in_the_temporary_directory(tool, arguments, number, start, task):  # noqa: F811
    job = start(task, "task.py:Slow", *arguments, command=tool)
    job.wait_for(lambda: len(job.alive()) > 1, seconds=240)
    job.process.send_signal(number)
    code, _, lines = job.end(seconds=240)
    assert code == 75, lines
    deadline = time.monotonic() + 240
    while job.alive():
        assert time.monotonic() < deadline, "something lives on"
        time.sleep(0.05)
    assert not list(task.glob("tfloop-*"))
    if tool == "chaos":
        assert lines[-1] == "stopped: nothing is left behind"


@pytest.mark.parametrize("kills", [0, -1, 1001, 10**30])
def test_chaos_kills_a_number_of_times_that_can_be_waited_for(kills, command):  # noqa: F811
    code, out, err = command("chaos", "digits", "--kills", kills)
    assert (code, out) == (2, "")
    assert err == f"tfloop: error: --kills {kills}: give a whole number from 1 to 1000\n"


def test_a_signal_is_left_to_the_next_attempt_only_while_there_may_be_one(quiet):
    worker.has_unsaved.set()
    fit(Plain(), steps=2, callbacks=quiet())
    assert not worker.has_unsaved.is_set()


def test_directories_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, used, new, others = (
        tmp_path / name for name in ("tfloop-a.tfloop", "tfloop-b.tfloop", "tfloop-c.tfloop", "tfloop-d")
    )
    for directory in (abandoned, used, new, others):
        directory.mkdir()
        (directory / "file").touch()
        if directory != new:
            os.utime(directory, (0, 0))
    link = tmp_path / "tfloop-e.tfloop"
    link.symlink_to(others)
    with signals.in_use(str(used)), signals.temporary_directory("tfloop-") as own:
        assert Path(own).is_dir()
        assert not abandoned.exists()
        assert all((directory / "file").exists() for directory in (used, new, others, link))
    with signals.temporary_directory("tfloop-"):
        assert not used.exists()
    assert not Path(own).exists()


def test_every_temporary_directory_is_one_that_is_removed_after_a_kill():
    """The folders of `tune`, `verify`, `bench`, `export`, `memory` and of hosts' agents stayed."""
    makers = {"loop/launch/signals.py", "callbacks/mlflow/delivery.py"}  # they give it the name that is looked for
    for path in [*(ROOT / "loop").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]:
        made = re.findall(r"TemporaryDirectory|mkdtemp(?!\(dir=)", path.read_text())
        assert not made or str(path.relative_to(ROOT)) in makers, path
