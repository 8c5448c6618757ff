"""`fit(workers=N)`: what is handed to other processes, and what they hand back. Real ones: `test_notebook`."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from callbacks import Checkpoint, MLflowTracker, standard
from loop import TrainingError, UsageError, fit
from loop.run import worker_processes
from tests.conftest import ROOT
from tests.tasks import Plain


@dataclass
class Named(Plain):
    defaults = {"shard_optimizer": True}
    name: str | None = "a"
    count: int | str = 1


class Undecorated(Plain):
    def __init__(self, factor=0.1):
        super().__init__()
        self.factor = factor


def changed(task, **attributes):
    for name, value in attributes.items():
        setattr(task, name, value)
    return task


@pytest.fixture
def handed_over(monkeypatch, tmp_path):
    """Calls `fit(workers=2)`, which starts no process; returns the arguments of the command."""
    monkeypatch.chdir(tmp_path)
    taken = []

    def train(arguments):
        taken.extend(arguments)
        raise TrainingError("no process is started")

    monkeypatch.setattr(worker_processes, "_train", train)

    def call(*arguments, **options):
        with pytest.raises(TrainingError, match="no process"):
            fit(*arguments, workers=2, **options)
        return taken

    return call


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        # The workers had the usual callback, without a word: another schedule, another store.
        (Plain(), {"callbacks": standard(checkpoint=Checkpoint(every=5))}, "build_callbacks"),
        (Plain(), {"callbacks": standard(mlflow=MLflowTracker("sqlite:///mine.db"))}, "build_callbacks"),
        # They trained with another value than the one that was set.
        (Undecorated(0.5), {}, "factor of this Undecorated was set, but it isn't a field"),
        (changed(Undecorated(), factor=0.5), {}, "factor of this Undecorated was set"),
        (Named(name="none"), {}, "name of Named is 'none'.*for None"),
        (Named(count="2"), {}, "count of Named is '2'.*for 2"),
        (Named(), {"shard_optimizer": False}, "shard_optimizer=False: put it into the task's defaults"),
    ],
)
def test_what_workers_would_not_get_is_refused(task, options, message):
    with pytest.raises(UsageError, match=message):
        fit(task, workers=2, **options)


def test_what_a_training_before_has_left_is_no_change(handed_over):
    used = Checkpoint()
    used.best = "eval_val_loss"
    used.best_step, used.best_value = 3, 0.5
    task = changed(Named(name=None, count="two"), vocabulary_size=3, cache=[1])
    arguments = handed_over(task, callbacks=standard(checkpoint=used))
    assert arguments[1:3] == ["--set=name=None", "--set=count=two"]


@pytest.mark.parametrize("run_dir", ["file:///runs/one", "s3://bucket/one"])
def test_a_url_stays_one_and_nan_is_a_number(monkeypatch, run_dir):
    typed = []

    def train(arguments):
        typed.extend(arguments)
        numbers = {"steps": 1, "epochs": 1, "examples": 8, "replicas": 2, "examples_per_second": 1.0}
        texts = {"status": "finished", "run_dir": "/spool/one", "weights_sha256": "", "backend": "horovod"}
        return {**numbers, **texts, "metrics": {"loss": "nan"}, "history": [{"epoch": 1, "loss": "inf"}]}

    monkeypatch.setattr(worker_processes, "_train", train)
    monkeypatch.setattr(worker_processes, "_model", lambda task, options, directory: directory)
    result = fit(Named(name="y"), workers=2, run_dir=run_dir)
    assert {f"--run-dir={run_dir}", "--set=name=y"} <= set(typed)
    assert result.run_dir == result.model == Path("/spool/one")
    assert math.isnan(result.metrics["loss"])
    assert result.history == [{"epoch": 1, "loss": math.inf}]


def test_workers_of_a_trial_do_not_take_its_launcher_for_theirs(monkeypatch, tmp_path):
    """They ended at once, by SIGTERM: the launcher of the trial isn't their parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFLOOP_LAUNCHER", str(os.getppid()))
    assert worker_processes._train(["digits", "--dry-run"])["backend"] == "single"


UNGUARDED = """
from pathlib import Path
import loop
from tests.tasks import Plain

Path("starts").open("a").write("x")
assert Path("starts").stat().st_size < 4


class Mine(Plain):
    pass


loop.fit(Mine(), workers={workers})
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_whose_workers_would_call_fit_again_is_refused(workers, tmp_path):
    """Each process imports the file, and with one worker there was no end to it."""
    (tmp_path / "mine.py").write_text(UNGUARDED.format(workers=workers))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "warm", "mine.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    last = done.stderr.splitlines()[-1]
    assert 'in a worker of a job: in a script, call fit below `if __name__ == "__main__":`' in last
    assert len((tmp_path / "starts").read_text()) == 1 + workers
