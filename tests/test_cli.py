"""The command line: what is typed wrong is one line and exit code 2; what is typed right does what it says."""

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import numpy as np
import pytest

from callbacks.run_record.redaction import as_typed, mask
from loop import IndexedData
from loop.commands.command_line import report_error, written_out
from loop.data.examples import unusable
from tests.conftest import ROOT, TFLOOP, tfloop

TASK = """
from dataclasses import dataclass
from loop import ArrayData, TrainTask
from tests.tasks import Plain, Streamed, Weighted

@dataclass
class Mine(Weighted):
    name: str = "x"
    deep: bool = False
    ratio: float | None = None
    shape: tuple = (1, 2)

class Scalar(Plain):
    def compute(self, model, batch, training):
        import tensorflow as tf
        return {"loss": tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)}

class Required(Plain):
    def __init__(self, cfg):
        self.cfg = cfg

class Other:
    pass
"""


@pytest.fixture
def command(command, tmp_path):
    """Runs a command line beside a task."""
    (tmp_path / "mine.py").write_text(TASK)
    return command


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["train", "--help"], ["train", "digits", "--batch-size", "0"], ["train"], ["train", "t.py"],
        ["train", "digits", "--resume", "nowhere"], ["evaluate", "nowhere"], ["export", "nowhere", "x"],
        ["replay", "nowhere"], ["sync", "nowhere"],
    ],
)  # fmt: skip
def test_help_and_wrong_arguments_load_no_tensorflow(arguments):
    code = (
        f"import sys; sys.argv = ['tfloop', *{arguments!r}]; import cli\n"
        "print('numpy' in sys.modules, file=sys.stderr)\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print(sorted({'tensorflow', 'keras', 'mlflow', 'horovod'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert (done.stderr.splitlines()[0], done.stderr.splitlines()[-1]) == ("False", "[]")


def test_ctrl_c_while_all_is_loaded_ends_it_without_a_word():
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in a shell's background ignores it
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == sys.argv[1]: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import cli\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    for name, expected in (("typer", 130), ("loop.commands.command_line", 130), ("none", 0)):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, cwd=ROOT, timeout=240)
        assert (done.returncode, done.stderr) == (expected, "")


def test_an_error_whose_text_raises_is_one_line(capfd):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    assert report_error(Mute()) == 1
    assert capfd.readouterr().err.startswith("tfloop: error: Mute: its __str__ raises RuntimeError (")


def test_a_thread_of_the_task_that_the_end_waits_for_is_named():
    code = (
        "import sys, threading, cli\n"
        "cli.command_line._PAUSE = 0\n"
        "threading.Thread(target=sys.stdin.read, name='loader').start()\n"
        "sys.argv = ['tfloop', 'nonsense']\n"
        "cli.main()"
    )
    pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], text=True, cwd=ROOT, **pipes) as process:
        process.stderr.readline()  # the error
        assert process.stderr.readline().startswith("waiting for threads that still run: 'loader'. Have the task end")
        process.stdin.close()
        assert process.wait(60) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [(["runs", "--json"], ""), (["runs", "--json"], "1"), (["--help"], "")]
)
def test_stdout_that_takes_nothing_is_one_line(arguments, unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}

    def run(stdout):
        done = subprocess.run(
            [*TFLOOP, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=240
        )
        return done.returncode, done.stderr

    with open("/dev/full", "w") as full:
        code, err = run(full)
    assert code == 1
    assert re.fullmatch(r"tfloop: error: stdout.* can't be written \(No space left on device\): .*\n", err)
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has seen enough
    assert run(writer) == (1, "")
    os.close(writer)


def test_stderr_that_takes_nothing_changes_no_exit_code():
    """A wrong input ended with 1, and a training whose log lay on a full disk did not start."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*TFLOOP, "train", "digits", "--epochs", "0"], stderr=full, cwd=ROOT, timeout=240)
        assert done.returncode == 2
        print_a_line = "from callbacks.run_record.redaction import tell; tell('a line')"
        assert subprocess.run([sys.executable, "-c", print_a_line], stderr=full, cwd=ROOT, timeout=240).returncode == 0
        show_a_stage = "from loop.commands.cli.output import shown_stages as s\nwith s(1) as show: show('a stage')"
        assert subprocess.run([sys.executable, "-c", show_a_stage], stderr=full, cwd=ROOT, timeout=240).returncode == 0


def test_a_full_disk_is_told_as_such_and_not_as_a_wrong_name(command, tmp_path, monkeypatch):
    run = {"task": "T", "status": "finished", "hyperparameters": {}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))

    def fail(partial, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "replace", fail)
    code, out, err = command("report", tmp_path / "run", "--out", "page.html")
    assert (code, out) == (1, "")
    assert "page.html can't be written (No space left on device): make room there, and start the same" in err
    with pytest.raises(OSError, match="No space left"), written_out(tmp_path / "rates.json"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mine.py"}


BEFORE_TENSORFLOW = [
    (["train", "digits", "--checkpoint-every", "0"], "--checkpoint-every 0: every=0 isn't a schedule: give"),
    (["train", "digits", "--checkpoint-every", "0s"], "--checkpoint-every 0s: every='0s' isn't a schedule: give"),
    (["train", "digits", "--set", "hidden"], "--set hidden: give key=value$"),
    (["find-lr", "digits", "--set=hidden"], "--set hidden: give key=value$"),
    (
        ["train", "digits", "--track", "http://h", "--callback", "MLflowTracker(experiment='mine')"],
        "--track with --callback MLflowTracker, which has an argument for it: leave one of them out",
    ),
    (
        ["train", "digits", "--track-wait", "0", "--callback", "MLflowTracker()"],
        "--track-wait with --callback MLflowTracker, which has an argument for it: leave one of them out",
    ),
    (["train", "digits", "--start-timeout", "-1"], "--start-timeout -1.0: give a number of seconds > 0"),
    (["train", "digits", "--stall-timeout", "0"], "stall_timeout=0.0: give a number of seconds > 0"),
    (["train", "digits", "--profile", "5:2"], "profile='5:2': give the first and the last step to trace, such as"),
    (["train", "digits", "--profile", "x"], "profile='x': give the first and the last step"),
    (["train", "digits", "--profile", "0:3"], "profile='0:3': give .*; steps count from 1"),
    (["chaos", "digits", "--checkpoint-every", "never"], "--checkpoint-every never: every='never' isn't a schedule"),
    (["train", "digist"], "TARGET 'digist': give file.py:Class, .* did you mean 'digits'"),
    (["train", "digits", "--epoch", "1"], "there is no option --epoch; did you mean '--epochs'"),
    (["train", "digits", "--learning-rate=1"], "no option --learning-rate; .* by --set learning_rate=VALUE"),
    (["runs", "--learning-rate=1"], "there is no option --learning-rate$"),
    (["train", "digits", "--drop-remainder=x"], "--drop-remainder takes no value: give it alone, or leave it out"),
    (["runs", "show"], "RUN is missing: --help says what to give"),
    (["train", "digits", "--threads", "two"], "--threads two: give a whole number"),
    (["train", "digits", "--clip-norm", "much"], "--clip-norm much: give a number"),
    (["ui", "--port", "70000"], "--port 70000: give a number <= 65535"),
    (["train", "digits", "--set"], "--set is without its value: give one after it"),
    (["doctor", "more"], "more: the command takes no more arguments: leave it out"),
    (["train", "nowhere.py:Task"], "there is no file nowhere.py"),
    (["train", "./nowhere.py"], r"TARGET './nowhere\.py': there is no file nowhere\.py$"),
    (["train", "mien.py"], "there is no file mien.py; did you mean 'mine.py'"),
    (["train", "no\nwhere.py:Task"], r"there is no file no\\nwhere.py$"),
    (["train", "dangling.py:Task"], "there is no file dangling.py$"),
    (["train", "digits", "--backend", "horovd"], "backend='horovd': give one of auto"),
    (["train", "digits", "--batch-size", "0"], "batch_size=0: the global batch must hold at least 1"),
    (["train", "digits", "--epochs", "1", "--steps", "1"], "epochs=1 and steps=1: give one of the two"),
    (["train", "digits", "--workers", "0"], "--workers 0: give a whole number >= 1"),
    (["train", "digits", "--workers", "2", "--backend", "single"], "workers=2 with backend='single'"),
    (["train", "digits", "--eval-every", "val=1, val=2"], "--eval-every val=1, val=2: give each set once"),
    (["train", "digits", "--eval-every", "val= "], "--eval-every val= : give each set once with its pace"),
    (["train", "digits", "--eval-every", "often"], "eval_every='often': give"),
    (["train", "digits", "--checkpoint-every", "often"], "--checkpoint-every often: .* isn't a schedule"),
    (["train", "digits", "--precision", "fp8"], "precision='fp8': give float32"),
    (["train", "digits", "--threads", "0"], "--threads 0: give a whole number >= 1"),
    (["train", "digits", "--prefetch", "0"], 'prefetch=0: give "auto" or a whole number >= 1'),
    (["train", "digits", "--config", "nowhere.toml"], "--config nowhere.toml: No such file"),
    (["tune", "digist"], "TARGET 'digist': give file.py:Class, .* did you mean 'digits'"),
    (["tune", "digits", "--config", "nowhere.toml"], "--config nowhere.toml: No such file"),
    (["tune", "digits", "--only", "thread"], "--only thread: nothing of .*; did you mean 'threads'"),
    (["tune", "digits", "--seconds", "0"], "--seconds 0.0: give a number > 0"),
    (["tune", "digits", "--out", "mine.py"], "--out mine.py exists already: give another name, or --force"),
    (["tune", "digits", "--out", "no/x.toml"], "--out no/x.toml: the directory can't be written, or isn't there"),
    (["ui"], "mlflow.db isn't there: train something first"),
    (["train", "digits", "--workers", "9999"], "--workers 9999: give at most 1024"),
    (["train", "digits", "--overfit", "0"], "overfit=0: give a whole number >= 1 of global batches"),
    (["train", "mien.py:Mine"], "there is no file mien.py; did you mean 'mine.py'"),
    (["train", "digits", "--eval-every", "9" * 5000], "eval_every='999"),
    (["evaluate", "nowhere", "--backend", "mirored"], "backend='mirored': give one of auto"),
    (["evaluate", "x" * 300], "xxx.*: the name is too long"),
    (["export", "nowhere", "out.npz"], "nowhere: no checkpoint there"),
    (["export", "trained", "mine.py"], "mine.py exists already: remove it, or give another name"),
    (["export", "trained", ""], r"\. exists already"),
    (["export", "trained", "model.h5"], "model.h5: there is no such format: give OUT.npz, OUT.keras, OUT.onnx,"),
    (["export", "trained", "model.npz/"], "model.npz/: .npz is the ending of a file: leave out the slash"),
    (["predict", "trained", "--out", "all.npz/"], "all.npz/: this is the name of a directory, .*: leave out the slash"),
    (["report", "trained", "--out", "page.html/"], "page.html/: this is the name of a directory"),
    (["find-lr", "digits", "--out", "plot.svg/"], "plot.svg/: this is the name of a directory"),
    (["tune", "digits", "--out", "best.toml/"], "best.toml/: this is the name of a directory"),
    (["export", "trained", "model.onnx/", "--no-check"], "model.onnx/: .onnx is the ending of a file"),
    (["export", "trained", "model.onnx", "--serving"], "--serving: model.onnx is a file: give a directory"),
    (["export", "trained", "model.NPZ"], "model.NPZ: there is no such format"),
    (["export", "trained", "nowhere/model.npz"], "nowhere/model.npz: there is no directory nowhere: make it first"),
    (["export", "trained", "mine.py/model"], "mine.py/model: mine.py isn't a directory: give another name"),
    (["export", "trained", "x.keras", "--target", "digist"], "TARGET 'digist': .* did you mean 'digits'"),
    (["evaluate", "trained", "--batch-size", "0"], "batch_size=0: the global batch must hold"),
    (["replay", "nowhere"], "nowhere: no checkpoint there"),
    (["sync", "trained", "--track", "nonsense"], "--track nonsense: give a URI such as [^ ]* or http://host:5000$"),
    (["sync", "trained", "--track", "off"], "--track off: there is nothing to deliver to"),
    (["train", "digits", "--run-dir", "/dev/null"], "--run-dir /dev/null: it is a file: give a directory"),
    (["train", "digits", "--remat", "0MB"], 'remat.*0MB.*: give "full", a size'),
    (["train", "digits", "--track", "of"], "--track of: give a URI such as .*, or off"),
    (["train", "digits", "--track", "htp://user:secret@h"], r"--track htp://\*\*\*@h: give a URI"),
    (["train", "digits", "--track-wait", "nan"], "--track-wait nan: give seconds, from 0"),
    (["train", "digits", "--track", "off", "--track-wait", "-1"], "--track-wait -1.0: give seconds, from 0"),
    (["train", "digits", "--register", "a/b"], "--register a/b: give a name without /"),
    (["train", "digits", "--resume", "nowhere"], "--resume nowhere: no checkpoint there"),
    (["train", "digits", "--run-dir", ""], "--run-dir: the value is empty"),
    (["train", "digits", "--run-dir="], "--run-dir: the value is empty"),
    (["train", "digits", "--batch-size", "9" * 20], "batch_size=9+: give a smaller number"),
    (["train", "digits", "--steps", "9" * 4000], r"steps=9+\.\.\.9+: give a smaller number"),
    (["train", "digits", "--threads", "9" * 20], "--threads 9+: give a whole number >= 1, at most 1024"),
    (["train", "digits", "--start-timeout", "inf"], "--start-timeout inf: give a number of seconds > 0"),
    (["train", "digits", "--config", "."], r"--config \.: Is a directory$"),
    (["train", "mine.py"], "TARGET 'mine.py': .*; did you mean 'mine.py:Mine'"),
    (["train", "mine.py:"], "TARGET 'mine.py:': .*; did you mean 'mine.py:Mine'"),
    (["train", ":Mine"], "TARGET ':Mine': give file.py:Class, package.module:Class"),
    (["train", ".mine:Mine"], "TARGET '.mine:Mine': give file.py:Class, package.module:Class"),
    (["train", "mine..mine:Mine"], "TARGET 'mine..mine:Mine': give file.py:Class, package.module:Class"),
    (["train", "wrong.py:Mine"], "TARGET 'wrong.py:Mine': wrong.py, line 2: "),
    (["train", "binary.py:Mine"], "TARGET 'binary.py:Mine': binary.py isn't text: give a Python file"),
    (
        ["sweep", "digits", "--grid", "hidden=8,16", "--metric", "quality"],
        "--metric quality: the name doesn't say",
    ),
    (["evaluate", "nowhere"], "nowhere: no checkpoint there"),
    (["find-lr", "digits", "--workers", "2"], "find-lr runs in one process, not on [a-z]+: give --backend mirrored"),
]


@pytest.mark.parametrize(("arguments", "message"), BEFORE_TENSORFLOW)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, command, tmp_path):
    (tmp_path / "wrong.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "binary.py").write_bytes(b"\0\1")
    (tmp_path / "dangling.py").symlink_to("gone.py")
    (tmp_path / "trained" / "checkpoints" / "step-00000001").mkdir(parents=True)
    for name, text in (("run.json", '{"task": "Mine"}'), ("journal.jsonl", "")):
        (tmp_path / "trained" / name).write_text(text)
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("tfloop: error: ")
    assert re.search(message, line)


def test_a_deleted_directory_is_named_before_anything_starts_in_it(command, tmp_path, monkeypatch):
    """Workers failed of it one by one, and the launcher waited two minutes for them."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for arguments in (["train", "digits", "--workers", 2], ["verify", "digits"]):
        message = "tfloop: error: the current directory was deleted: change to one that is there (cd)\n"
        assert command(*arguments) == (2, "", message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.py:Mien"], "mine.py has no class 'Mien'; did you mean 'Mine'"),
        (["mine.py:Other"], "Other isn't a subclass of loop.TrainTask"),
        (["no.such.module:Task"], "there is no module 'no'"),
        (["mine.py:Scalar"], 'compute\\(\\) returned a scalar for "loss": return one value per example'),
        (["mine.py:Mine", "--set", "hiden=3"], "Mine has no field 'hiden'; did you mean 'hidden'"),
        (["mine.py:Mine", "--set", "hidden=many"], "--set hidden=many: 'many' isn't of type int"),
        (["mine.py:Mine", "--set", "deep=perhaps"], "'perhaps' isn't of type bool .true or false"),
        (["mine.py:Mine", "--set", "ratio=x"], "'x' isn't of type float or None"),
        (["mine.py:Mine", "--set", "hidden"], "--set hidden: give key=value"),
        (["mine.py:Mine", "--set", "shape=3"], "can't be typed on a command line: make a subclass"),
        (["mine.py:Required"], "missing 1 required .*'cfg'.*: .* the arguments of an __init__ of its own defaults"),
        (["mine.py:Mine", "--run-dir", "/proc/x"], "the run directory /proc/x can't be written"),
        (["mine.py:Mine", "--resume", "nowhere"], "nowhere: no checkpoint there"),
    ],
)
def test_bad_tasks_are_one_line_too(arguments, message, command):
    code, out, err = command("train", *arguments, "--track", "off")
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.startswith("tfloop: error: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0])
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["callbacks.py", "loop.py", "cli.py", "loop/__init__.py"])
def test_files_that_would_shadow_ours_are_named(name, command, tmp_path):
    shadow = tmp_path / name
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("")
    code, _, err = command("train", "mine.py:Mine")
    assert code == 2
    assert f"{shadow} has the name of tfloop's own" in err


def test_a_script_beside_a_shadowing_file_is_told(tmp_path):
    (tmp_path / "callbacks.py").write_text("")
    (tmp_path / "script.py").write_text("import loop\nloop.fit\n")
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode != 0
    assert f"{tmp_path / 'callbacks.py'} hides tfloop's own package 'callbacks'" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_train_evaluate_export(command, tmp_path):
    """One run, and all that can be made of it."""
    code, out, err = command(
        "train", "mine.py:Mine", "--set", "hidden=8", "--set", "deep=true", "--set", "ratio=none", "--epochs", 2,
        "--batch-size", 20, "--seed", 5, "--run-dir", "run", "--track", "off", "--json", "--checkpoint-every", 5,
    )  # fmt: skip
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert len(out.splitlines()) == 1
    assert {"status", "steps", "epochs", "examples", "metrics", "history", "run_dir", "weights_sha256"} < set(result)
    assert {"backend", "replicas", "examples_per_second"} < set(result)
    assert "model" not in result
    assert (result["status"], result["steps"], result["backend"], result["replicas"]) == ("finished", 12, "single", 1)
    assert "epoch 2/2  step 12" in err

    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["status"], about["hyperparameters"]["hidden"]) == ("finished", 8)
    assert about["hyperparameters"]["deep"] is True

    code, out, _ = command("evaluate", "run", "--json")
    assert code == 0
    evaluated = json.loads(out.splitlines()[-1])
    assert evaluated["eval_loss"] == pytest.approx(result["metrics"]["eval_loss"], rel=1e-6)

    assert command("export", "run", "weights.npz")[0] == 0
    with np.load("weights.npz") as weights:
        assert [name[:6] for name in weights] == ["00000:", "00001:", "00002:", "00003:"]
        assert weights[next(iter(weights))].shape == (5, 8)
        first = weights[next(iter(weights))]
    assert command("export", "run", "model.keras")[0] == 0
    import keras

    model = keras.models.load_model("model.keras")
    np.testing.assert_array_equal(model.get_weights()[0], first)
    assert command("export", "run", "saved")[0] == 0
    import tensorflow as tf

    inputs = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")
    loaded = tf.saved_model.load("saved")
    np.testing.assert_allclose(loaded.serve(inputs), model(inputs), atol=1e-6)
    code, _, err = command("evaluate", "run", "--target", "mine.py:Scalar")
    assert code == 2
    assert "Scalar can't be made from the fields of the run" in err
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "runs").mkdir()
    (tmp_path / "away").rename(tmp_path / "runs" / "run")
    assert "--trust" in command("evaluate", "latest")[2]  # it lies at another path than it was trained at
    code, again, _ = command("evaluate", "latest", "--trust", "--json")
    assert (code, again) == (0, out)
    assert command("export", "ru", "again.npz")[0] == 0
    code, _, err = command("evaluate", "rnu")
    assert (code, err) == (2, "tfloop: error: rnu: no run of that name in runs; did you mean 'run'?\n")
    code, _, err = command("export", "run", "weights.npz")
    assert code == 2
    assert "weights.npz exists already" in err
    newest = max((tmp_path / "runs" / "run" / "checkpoints").iterdir())
    (newest / "tensors.npz").write_bytes(b"")
    code, _, err = command("evaluate", "latest", "--trust")
    assert (code, err.count("checkpoint passed over")) == (0, 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "epochs = 1\nbach-size = 3", "there is no option 'bach-size'; did you mean 'batch-size'"),
        ("a.toml", "epochs = 1\nseed = 0x", r"it can't be read: .*line 2"),
        ("a.toml", "epochs = [1,", r"it can't be read: .*line 1"),
        ("a.yaml", "epochs: 1\nseed: [2\nema: 3", r"it can't be read: .*line 3"),
        ("a.yml", "- epochs", r"it holds \['epochs'\]: give options"),
        ("a.toml", "batch-size = '64'", "batch-size = '64': give a whole number"),
        ("a.toml", "batch_size = 64.0", "batch-size = 64.0: give a whole number"),
        ("a.toml", "batch_size = true", "batch-size = True: give a whole number"),
        ("a.toml", "seed = 99999999999999999999", "give a whole number"),
        ("a.toml", "shuffle = 'no'", "shuffle = 'no': give true or false"),
        ("a.toml", "ema = 'much'", "ema = 'much': give a number"),
        ("a.yaml", "track: off", "track = False: give a text, in quotes"),
        ("a.toml", "batch_size = 1\nbatch-size = 2", "batch-size is there twice"),
        ("a.toml", "set = 1", "set = 1: give a table of the task's fields"),
        ("a.toml", "set.'a=b' = 1", "set has 'a=b', which can't be the name of a field"),
        ("a.toml", "set.shape = [1, [2]]", r"set.shape = \[1, \[2\]\]: give a number, a text.* or a list of these"),
        ("a.toml", "precision = 'fp8'", "precision='fp8': give float32"),
    ],
)
def test_bad_files_are_one_line_too(name, text, message, command, tmp_path):

    (tmp_path / name).write_text(text)
    code, out, err = command("train", "digits", "--config", name)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert re.search(message, line)


def test_what_is_typed_wins_over_files_and_a_later_file_over_an_earlier(command, tmp_path, monkeypatch):
    monkeypatch.setattr("callbacks.run_record.redaction.as_typed", as_typed.copy())
    (tmp_path / "one.toml").write_text(
        'batch-size = 20\nepochs = 3\nclip_norm = 1\nshuffle = false\n[set]\nhidden = 8\nrate = 0.01\nname = "it = 1"'
    )
    (tmp_path / "two.yaml").write_text(
        "steps: 9\nprefetch: auto\naccept-changes: false\nset: {rate: 0.02, ratio: null}"
    )
    code, _, err = command(
        "train", "mine.py:Mine", "--set", "hidden=6", "--config", "one.toml", "--steps", 2, "--config=two.yaml",
        "--clip-value", 0.5, "--run-dir", "run", "--track", "off",
    )  # fmt: skip
    assert code == 0, err
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    expected = {
        "batch_size": 20, "epochs": 1, "steps": 2, "clip_norm": None, "clip_value": 0.5, "shuffle": False,
        "prefetch": "auto", "accept_changes": False,
    }  # fmt: skip
    assert {name: about["options"][name] for name in expected} == expected
    fields = {"hidden": 6, "rate": 0.02, "name": "it = 1", "ratio": None}
    assert {name: about["hyperparameters"][name] for name in fields} == fields

    (tmp_path / "secret.toml").write_text("set.api_key = 'hunter2hunter2'")
    command("train", "nowhere.py:Task", "--config", "secret.toml")
    assert mask("no hunter2hunter2 here") == "no *** here"


@pytest.mark.slow
def test_tune_writes_what_train_takes(command, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "base.toml").write_text("prefetch = 3\nbatch-size = 20\nepochs = 9\n")
    (tmp_path / "tags.toml").write_text('tag = ["for=train"]\nlog-model = true\n')  # trials aren't tracked
    arguments = ["mine.py:Streamed", "--config", "base.toml"]
    code, out, err = command(
        "tune", *arguments, "--config", "tags.toml", "--only", "steps-per-call",
        "--rounds", 1, "--seconds", 0.3, "--json",
    )  # fmt: skip
    assert code == 0, err
    assert err.splitlines() == ["as it is", "steps-per-call 1"]
    found = json.loads(out)
    assert [row["changes"] for row in found["rows"]] == [{}, {"steps-per-call": 1}]
    assert all(row["examples_per_second"] > 0 and row["memory"] > 1e8 for row in found["rows"])
    chosen = tomllib.loads((tmp_path / "tune.toml").read_text())
    assert chosen == found["settings"]
    assert chosen in [{"compile": "graph", "prefetch": 3, "steps-per-call": steps} for steps in (1, "auto")]
    assert not [*(tmp_path / "tmp").iterdir(), *tmp_path.glob(".*tmp"), *tmp_path.glob("runs")]

    code, _, err = command(
        "train", *arguments, "--config", "tune.toml", "--steps", 2, "--run-dir", "run", "--track", "off"
    )
    assert code == 0, err
    options = json.loads((tmp_path / "run" / "run.json").read_text())["options"]
    assert options["batch_size"] == 20
    assert {name: options[name.replace("-", "_")] for name in chosen} == chosen


def test_resume_by_the_same_command(command):
    arguments = ["train", "mine.py:Mine", "--batch-size", 20, "--run-dir", "run", "--track", "off", "--json"]
    shorter = json.loads(command(*arguments, "--epochs", 1)[1])
    longer = json.loads(command(*arguments, "--epochs", 2)[1])
    again = json.loads(command(*arguments, "--epochs", 2)[1])
    assert (shorter["steps"], longer["steps"]) == (6, 12)
    assert again["weights_sha256"] == longer["weights_sha256"]
    code, _, err = command(*arguments, "--epochs", 3, "--set", "rate=0.5")
    assert code == 2
    assert "the field rate was 0.05, now 0.5" in err


def test_mirrored_by_workers(command):
    arguments = ["train", "mine.py:Mine", "--batch-size", 20, "--track", "off", "--json"]
    code, out, _ = command(*arguments, "--backend", "mirrored", "--workers", 3)
    result = json.loads(out)
    assert (code, result["backend"], result["replicas"]) == (0, "mirrored", 3)


def test_a_mistake_in_the_users_code_keeps_its_traceback(command, tmp_path):
    (tmp_path / "mine.py").write_text(TASK + "    \nraise RuntimeError('planted')\n")
    code, _, err = command("train", "mine.py:Mine", "--track", "off")
    assert code == 1
    assert "RuntimeError: planted" in err
    assert "mine.py" in err
    assert "typer" not in err


def test_doctor(command):
    code, out, _ = command("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == 0
    assert set(findings) == {
        "Python", "TensorFlow", "Devices", "Horovod", "Compilers", "TF_CONFIG", "MLflow", "Run directory", "Free ports",
    }  # fmt: skip
    if findings["Horovod"]["state"] == "ok":
        assert "built with: gloo yes" in findings["Horovod"]["found"]
    else:
        assert "install" in findings["Horovod"]["found"]


def test_doctor_names_a_broken_tf_config(command, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    code, out, _ = command("doctor")
    assert code == 1
    assert "broken  TF_CONFIG" in out
    code, out, _ = command("doctor", "--json")
    assert code == 1
    assert "broken" in [finding["state"] for finding in json.loads(out) if finding["what"] == "TF_CONFIG"]


def test_shipped_examples_are_listed_by_their_file_and_class():
    from loop.target import task_loader

    for name, kind in task_loader.SHIPPED.items():
        assert f"\nclass {kind}(" in task_loader.shipped_path(name).read_text()


def themes(text):
    """The names in a help, by theme."""
    found, entries = {}, []
    for line in text.splitlines():
        if re.fullmatch(r"\S.*:", line):
            entries = found.setdefault(line[:-1], [])
        elif entry := re.match(r"  (--?[\w-]+|[a-z]\S*)", line):
            entries.append(entry[1])
    return found


def test_help_is_grouped_by_what_one_wants_to_do(command):
    code, text, error = command("--help")
    assert (code, error) == (0, "")
    of_commands = themes(text)
    assert list(of_commands) == ["Options", "Train", "Look at runs", "Check", "Tune", "Use the model"]
    assert of_commands["Train"] == ["new", "train", "sweep"]
    assert of_commands["Look at runs"][0] == "runs"
    assert not re.search(r"\.\.\.$", text.partition("\n")[2], re.MULTILINE)  # no text is cut
    assert max(map(len, text.splitlines())) <= 80

    of_train = themes(command("train", "--help")[1])
    assert of_train["Used most"] == [
        "--epochs", "--steps", "--batch-size", "--backend", "--workers", "--set", "--run-dir", "--seed", "--track",
        "--config",
    ]  # fmt: skip
    assert of_train["Numbers"][0] == "--precision"
    assert of_train["Options"] == ["--json", "--help"]  # all others have a theme
    assert len(of_train) == 11
    of_sweep = themes(command("sweep", "--help")[1])
    assert list(of_sweep)[1:4] == ["Trials", "Used most", "What is trained, and how long"]
    assert list(themes(command("export", "--help")[1])) == ["Arguments", "Options"]  # few need no themes


def test_command_is_installed():
    done = tfloop("--help")
    assert done.returncode == 0
    for word in ("train", "evaluate", "export", "doctor", "ui"):
        assert word in done.stdout


@pytest.mark.parametrize("own", [{}, {"MLFLOW_WORKERS": "2"}])
def test_ui_asks_mlflow_for_one_process_without_jobs_unless_told_otherwise(own, command, tmp_path, monkeypatch):
    from mlflow.environment_variables import MLFLOW_SERVER_ENABLE_JOB_EXECUTION as JOBS

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").touch()
    for name in ("MLFLOW_WORKERS", JOBS.name, "MLFLOW_BACKEND_STORE_URI", "PYTHONPATH"):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append((arguments, dict(os.environ), JOBS.get())))
    command("ui")
    [(arguments, environment, jobs)] = started
    assert arguments[1:4] == ["-P", "-m", "callbacks.mlflow.ui"]
    assert environment["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert environment["MLFLOW_WORKERS"] == own.get("MLFLOW_WORKERS", "1")
    assert not jobs
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host:5000")
    code, _, err = command("ui")
    assert (code, len(started)) == (2, 1)
    assert re.search("MLFLOW_TRACKING_URI=http://[^t]*@host:5000 is a server, which has a UI of its own", err)


def test_a_map_that_fails_is_told_with_its_line(capsys):
    """The line named the example and the error, and not where in the user's code it came from."""

    def broken(example):
        raise ValueError("no label")

    [error] = IndexedData(np.zeros([3, 2]), map=broken).reader.read(np.arange(1), np.zeros([1, 2], np.int64))
    assert report_error(unusable(0, error)) == 1
    told = capsys.readouterr().err
    assert re.search(
        r"example 0 can't be read: ValueError: no label \(.*test_cli.py, line \d+, in broken\)$", told.strip()
    )
