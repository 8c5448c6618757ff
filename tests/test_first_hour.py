"""A user's first hour: what is said at once, what is refused before anything is loaded, and what is warned of."""

import contextlib
import fcntl
import gc
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import cli
import loop
from callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EvaluateBeside,
    LambdaCallback,
    LearningRateMonitor,
    MLflowTracker,
    ReduceOnPlateau,
    StandardSet,
    complete,
    standard,
)
from loop import ArrayData, TrainTask, fit
from loop.errors import UsageError
from loop.launch import stderr
from loop.run import bus
from loop.target.task_loader import check
from tests.conftest import TFLOOP
from tests.tasks import Weighted

WATCH = """
import os, sys

def hear(event, arguments):
    if event == "import" and arguments[0] == "tensorflow" and os.environ.pop("WATCHED", ""):
        os.write(2, b"tensorflow is imported\\n")

sys.addaudithook(hear)
"""
"""Has a process that is started with the variable `WATCHED` say when it begins to import TensorFlow."""


class Terminal:
    """A command at a terminal, in a process of its own."""

    def __init__(self, *arguments, cwd, **variables):
        self.reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), writer)
        self.process = subprocess.Popen([*TFLOOP, *arguments], cwd=cwd, env=os.environ | variables, **streams)
        os.close(writer)

    def line(self, seconds=240):
        """The next line; "" at the end."""
        text, deadline = b"", time.monotonic() + seconds
        while not text.endswith(b"\n"):
            assert select.select([self.reader], [], [], deadline - time.monotonic())[0], text
            try:
                text += os.read(self.reader, 1)
            except OSError:  # the terminal has been closed
                break
        return text.decode()


@pytest.mark.cold
def test_a_run_at_a_terminal_says_at_once_what_it_does_and_at_the_end_where_to_look(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first/sitecustomize.py").write_text(WATCH)
    watched = {"WATCHED": "yes", "PYTHONPATH": str(tmp_path / "first")}
    terminal = Terminal("train", "digits", "--epochs", "6", "--track", "off", cwd=tmp_path, **watched)
    assert terminal.line().strip() == "loading TensorFlow ..."
    assert terminal.line().strip() == "tensorflow is imported"
    lines = [line.strip() for line in iter(terminal.line, "")]
    assert terminal.process.wait(60) == 0, lines
    [report] = tmp_path.glob("runs/Digits-*/report.html")
    assert lines[-1] == f"see it in the browser: {report}"
    bar = [line for line in lines if "100%" in line][-1].split("\r")[-1]
    assert re.match(r"epoch 6/6 100%\|.*loss 0\.1", bar), lines  # of the first epoch it is 1.3


@pytest.mark.parametrize(
    ("track", "seen"),
    [(None, "tfloop ui"), ("sqlite:///runs/mlflow.db", "tfloop ui"), ("off", "{}"), ("sqlite:///other.db", "{}")],
)
def test_the_end_names_what_shows_the_run(track, seen, tmp_path, monkeypatch, capfd):
    report = tmp_path / "report.html"
    report.touch()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(
        "loop.commands.train.train", lambda typed, arguments: (0, "", {"status": "finished", "run_dir": str(tmp_path)})
    )
    monkeypatch.setattr("sys.argv", ["tfloop", "train", "digits", *(["--track", track] if track else [])])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capfd.readouterr().err == f"see it in the browser: {seen.format(report)}\n"


def test_what_was_imported_costs_the_end_of_the_process_nothing(monkeypatch):
    monkeypatch.setattr(stderr, "_frozen", False)
    gc.unfreeze()
    with stderr.quiet_start():
        pass  # TensorFlow is there, as behind any of the command's starts
    assert gc.get_freeze_count() > 100_000


@pytest.mark.cold
def test_mlflow_is_imported_before_there_is_a_run_and_no_process_is_left_behind(tmp_path):
    tracker = MLflowTracker("sqlite:///mlflow.db")
    tracker.warm()
    tracker.warm()  # there is one already
    courier = tracker._courier.process
    deadline = time.monotonic() + 240
    while "_psutil" not in Path(f"/proc/{courier.pid}/maps").read_text():  # which MLflow imports
        assert time.monotonic() < deadline
        assert courier.poll() is None
        time.sleep(0.1)
    tracker.on_fit_end(None, "failed")  # before it began
    assert courier.returncode is not None
    assert not (tmp_path / "mlflow.db").exists()


# A target is looked at before anything is imported


FILES = {
    "plain": "import tensorflow as tf\nfrom loop import TrainTask\nclass Mine(TrainTask): pass\nclass Other: pass\n",
    "given": "try:\n    from elsewhere import Mine\nexcept ImportError:\n    Mine = None\n",
    "made": "def make():\n    class Mine: pass\n    return Mine\nif True:\n    Mine = make()\n",
    "star": "from elsewhere import *\n",
    "dynamic": "for name in ('Mine',):\n    globals()[name] = type(name, (), {})\n",
    "broken": "x = 1\ndef f(:\n",
    "deep": "x = " + "(" * 5000 + ")" * 5000,
}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("plain.py:Mien", "plain.py has no class 'Mien'; did you mean 'Mine'?"),
        ("plain:Mien", "plain has no class 'Mien'; did you mean 'Mine'?"),
        ("plain.py:Other", "Other isn't a subclass of loop.TrainTask"),
        ("broken.py:Mine", "broken.py, line 2: invalid syntax"),
        ("no_such_module:Mine", "there is no module 'no_such_module' here or on the path"),
        ("plain.py:Mine", ""),
        *((f"{name}.py:Mine", "") for name in ("given", "made", "star", "dynamic")),
        ("loop.examples:Mine", ""),
        ("digits", ""),
    ],
)
def test_a_wrong_class_is_refused_from_the_text_of_its_file(target, message, tmp_path):
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    if not message:
        check(target)  # what can't be told is left to the import
        return
    with pytest.raises(UsageError) as refused:
        check(target)
    assert str(refused.value) == f"TARGET {target!r}: {message}"
    assert not {"plain", "broken"} & set(sys.modules)


def test_any_text_is_a_file_with_or_without_the_class(tmp_path):
    (tmp_path / "deep.py").write_text(FILES["deep"])
    (tmp_path / "binary.py").write_bytes(b"\0\1")
    for name in ("deep", "binary"):
        with contextlib.suppress(UsageError):
            check(f"{name}.py:Mine")


# What is refused before the first step


@pytest.mark.parametrize(
    ("made", "name", "near"),
    [
        (lambda: EarlyStopping("val_loss"), "EarlyStopping(metric='val_loss')", "eval_loss"),
        (lambda: EarlyStopping("eval_los", mode="min"), "EarlyStopping(metric='eval_los')", "eval_loss"),
        (lambda: ReduceOnPlateau("los", mode="min"), "ReduceOnPlateau(metric='los')", "loss"),
        (lambda: Checkpoint(best="val_error"), "Checkpoint(best='val_error')", "eval_error"),
    ],
)
def test_a_callback_that_waits_for_an_unknown_metric_is_refused_before_the_first_step(made, name, near, quiet):
    heard, message = Heard(), f"{name}: this run has no such metric; did you mean {near!r}?"
    with pytest.raises(UsageError, match=re.escape(message)):
        fit(Weighted(), callbacks=StandardSet(complete(quiet(), [made(), heard])))
    assert heard.steps == 0


class Heard(Callback):
    every = "call"

    def __init__(self):
        self.steps = 0

    def on_steps_end(self, run, metrics):
        self.steps = run.progress.step


def test_metrics_that_are_known_are_taken(quiet):
    class Gauge(Callback):
        runs_on = "all"

        def on_setup(self, run):
            run.gauges["pressure"] = lambda: 1.0

    adds = LambdaCallback(eval_end=lambda run, metrics: metrics.update(eval_bleu=np.float32(0.5)))
    named = [EarlyStopping(name, mode="min") for name in ("loss", "error", "eval_error", "pressure", "learning_rate")]
    given = [Gauge(), LearningRateMonitor(), *named, Checkpoint(best="eval_error")]
    fit(Weighted(), callbacks=standard(mlflow=None, progress=None, checkpoint=None) + given)
    result = fit(Weighted(), callbacks=quiet() + [adds, EarlyStopping("eval_bleu", mode="max")])
    assert result.history[-1]["eval_bleu"] == 0.5
    with pytest.raises(UsageError, match=r"this run makes no evaluation: define eval_data\(\), .* or watch 'loss'"):
        fit(Weighted(), eval_every="never", callbacks=quiet() + [EarlyStopping("eval_loss")])
    beside = [EvaluateBeside(), EarlyStopping("eval_loss")]
    with pytest.raises(UsageError, match=r"EvaluateBeside \(--eval-beside\) .* leave it out; or watch 'loss'"):
        fit(Weighted(), eval_every="never", callbacks=quiet() + beside)


def test_metrics_that_a_callback_adds_are_for_those_behind_it_on_each_rank():
    class Adds(Callback):  # on the chief alone
        def on_eval_end(self, run, metrics):
            metrics["eval_bleu"] = "high"

    def check(is_chief, *given):
        run = SimpleNamespace(backend=SimpleNamespace(is_chief=is_chief), callbacks={}, metric_names=lambda: ["loss"])
        run.defer_errors = contextlib.nullcontext
        bus.Bus(list(given), run).check_metrics()

    check(False, Adds(), ReduceOnPlateau("eval_bleu", mode="max"))
    with pytest.raises(UsageError, match=r"best='eval_bleu'\): this .*; if Adds adds it, list it before Checkpoint"):
        check(True, Checkpoint(best="eval_bleu"), Adds())  # `Checkpoint` is at its place in the standard set
    metrics = {"eval_bleu": "high"}
    with pytest.raises(UsageError, match=r"Adds.on_eval_end has set the metric 'eval_bleu' to 'high': give a number"):
        bus._as_numbers("Adds.on_eval_end", metrics)
    assert metrics == {}


def test_a_class_and_what_is_no_task_are_refused():
    with pytest.raises(UsageError, match=re.escape("fit(Weighted): give an object, not its class: fit(Weighted())")):
        fit(Weighted)
    with pytest.raises(UsageError, match=re.escape("fit(Sequential): give an object of a subclass of loop.TrainTask")):
        fit(keras.Sequential([keras.layers.Dense(1)]))


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_what_is_no_task_or_no_path_of_a_run_is_refused(call):
    function = getattr(loop, call)
    with pytest.raises(UsageError, match=re.escape(f"{call}(Weighted): give an object, not its class")):
        function(Weighted, "run")
    result = object.__new__(loop.FitResult)
    with pytest.raises(UsageError, match=re.escape(f"{call}(task, FitResult): give the path of a run directory or")):
        function(Weighted(), result)


@dataclass
class Classes(TrainTask):
    """Ten classes of inputs with 8 features."""

    features: int = 8
    one_hot: bool = False
    wants_one_hot: bool = False
    rate: float = 0.0
    counted: int = 0
    cached: float = 0.0
    unknown: float = float("nan")
    labels: int = field(default=10, repr=False)

    def build_model(self):
        return keras.Sequential([keras.Input((8,)), keras.layers.Dropout(self.rate), keras.layers.Dense(10)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)

    def train_data(self):
        labels = np.arange(40) % 10
        inputs = np.ones((40, self.features), "float32")
        return ArrayData(inputs, np.eye(10, dtype="float32")[labels] if self.one_hot else labels)

    def compute(self, model, batch, training):
        inputs, labels = batch
        kind = "categorical_crossentropy" if self.wants_one_hot else "sparse_categorical_crossentropy"
        return {"loss": getattr(keras.losses, kind)(labels, model(inputs, training=training), from_logits=True)}


@pytest.mark.parametrize(
    ("fields", "shapes", "fix"),
    [
        ({"one_hot": True}, "[8], [10]", "the labels are one-hot, of shape [10] each: give classes, as by labels.arg"),
        (
            {"wants_one_hot": True},
            "[8], []",
            "the labels are classes, a number each: take a loss for classes, such as ",
        ),
        ({"features": 32}, "[32], []", "the model takes inputs of shape [8]: give keras.Input((32,)), or reshape the "),
    ],
)
def test_shapes_that_do_not_fit_are_one_line_with_the_shapes_and_the_fix(fields, shapes, fix):
    task = Classes(**fields)
    with pytest.raises(UsageError) as refused:
        fit(task)
    assert str(refused.value).startswith(f"compute() can't take examples of shapes {shapes} (")
    assert f"): {fix}" in str(refused.value)
    assert str(refused.value).isprintable()  # in one line, without Keras's bold
    assert "compute" not in vars(task)


def test_other_errors_of_compute_stay_as_they_are():
    class Broken(Classes):
        def compute(self, model, batch, training):
            raise ValueError("the moon is full")

    with pytest.raises(ValueError, match="the moon is full") as raised:
        fit(Broken())
    assert not isinstance(raised.value, UsageError)


def test_python_side_effects_and_a_forgotten_training_are_warned_of_once(quiet):
    class Counts(Classes):
        def compute(self, model, batch, training):
            self.counted += 1
            self.cached = 1.0
            self.unknown = self.unknown  # nan, which isn't equal to itself
            return super().compute(model, batch, training)

    class Forgets(Classes):
        def compute(self, model, batch, training):
            inputs, labels = batch
            logits = model(inputs)
            return {"loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)}

    def warned(task):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(task, steps=2, callbacks=quiet(checkpoint=None, journal=None, report=None))
        return [str(each.message) for each in caught if "compute()" in str(each.message)]

    [text] = warned(Counts())
    assert text.startswith(
        "compute() of Counts changes self.counted: that is Python, which runs while the step is traced"
    )
    [text] = warned(Forgets(rate=0.5))
    assert re.match(r"compute\(\) of Forgets calls the model without `training`: dropout\w* does while training ", text)
    assert not warned(Forgets(rate=0.0))
    assert not warned(Classes(rate=0.5))
