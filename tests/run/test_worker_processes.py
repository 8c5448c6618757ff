"""`fit(workers=N)`: what is handed to the processes that train, and what can't be."""

from dataclasses import dataclass

import pytest

from callbacks import Checkpoint, MLflowTracker, standard
from loop import TrainingError, UsageError, fit
from loop.run import worker_processes
from tests.tasks import Plain


@dataclass
class Named(Plain):
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
        (Undecorated(0.5), {}, "factor of this Undecorated was set, but it is no field"),
        (changed(Undecorated(), factor=0.5), {}, "factor of this Undecorated was set"),
        (Named(name="None"), {}, "the field name of Named is the text 'None'"),
        (Named(count="2"), {}, "the field count of Named is the text '2'"),
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


def test_a_run_at_a_url_is_there_with_workers_too(handed_over, tmp_path):
    """It was a directory on this machine that was named by the URL."""
    url = f"{(tmp_path / 'disk').as_uri()}/run"
    assert handed_over(Plain(), run_dir=url + "/")[-1] == f"--run-dir={url}"
    assert list(tmp_path.iterdir()) == []
