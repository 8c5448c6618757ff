"""`fit(workers=N)`: what is handed to other processes, and what they hand back. Real ones: `test_notebook`."""

import dataclasses
import math
from pathlib import Path

import pytest

from loop import UsageError, fit
from loop.run import worker_processes
from tests.tasks import Plain


@dataclasses.dataclass
class Named(Plain):
    defaults = {"shard_optimizer": True}
    name: str | None = "x"
    size: int | str = 1


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"name": "none"}, {}, "name of Named is 'none'.*for None"),
        ({"size": "2"}, {}, "size of Named is '2'.*for 2"),
        ({}, {"shard_optimizer": False}, "shard_optimizer=False: put it into the task's defaults"),
    ],
)
def test_what_other_processes_would_take_for_another_value_is_refused(fields, options, message):
    with pytest.raises(UsageError, match=message):
        fit(Named(**fields), workers=2, **options)


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
