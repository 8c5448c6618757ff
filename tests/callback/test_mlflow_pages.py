"""What MLflow's pages show of a run: its name, description, parameters, best values, data, and kept checkpoints."""

import contextlib
import json
import os
import shutil
import sqlite3
from dataclasses import dataclass

import mlflow
import pytest

import callbacks
from callbacks import Checkpoint, MLflowTracker
from callbacks.mlflow.description import run_name, values
from callbacks.mlflow.mlflow_run import NOTE
from loop import fit
from tests.callback.test_tracking import journaled, line, only_run, run_directory, stored
from tests.tasks import Plain


@dataclass
class Sized(Plain):
    hidden: int = 32
    rate: float = 0.1
    api_key: str = "the-default-key"


@pytest.fixture
def database(empty_store, tmp_path):
    return shutil.copy(empty_store, tmp_path / "mlflow.db")


def train(directory, uri, epochs, task=None, **changes):
    tracker = MLflowTracker(uri, "own")
    chosen = callbacks.standard(
        mlflow=tracker, progress=None, checkpoint=Checkpoint(every="epoch", keep_last=1), **changes
    )
    return fit(task or Sized(hidden=16, rate=0.03), epochs=epochs, batch_size=20, callbacks=chosen, run_dir=directory)


def models(client, run):
    return {
        model.name: model
        for model in client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    }


def test_a_run_is_named_described_and_has_a_model_for_each_kept_checkpoint(database, tmp_path, command):
    uri = f"sqlite:///{database}"
    client = mlflow.MlflowClient(uri)
    result = train(tmp_path / "run", uri, 3)
    run = only_run(uri, "own")
    assert run.info.run_name == "rate=0.03 hidden=16"  # in the order of the fields
    fields = {name for name in run.data.params if not name.startswith("option.")}
    assert {"hidden", "rate", "api_key", "seed"} <= fields
    assert "batch_size" not in fields
    assert (run.data.params["option.batch_size"], run.data.params["api_key"]) == ("20", "***")
    note = run.data.tags[NOTE]
    assert note.startswith("**Sized** · finished\n")
    evaluated = {row["step"]: row["eval_loss"] for row in result.history}
    best = min(evaluated, key=evaluated.get)
    assert f"best eval\\_loss: {evaluated[best]:.4g} at step {best:,}" in note
    assert run.data.metrics["best/eval_loss"] == evaluated[best]
    assert run.data.metrics["examples_per_second"] > 0

    about = json.loads((result.run_dir / "run.json").read_text())
    seen = {each.tags[0].value: each.dataset for each in run.inputs.dataset_inputs}
    assert set(seen) == {"train", "eval"}
    assert seen["train"].digest == about["data"]["train"]["sha256"][:36]
    assert json.loads(seen["train"].profile) == {"num_rows": about["data"]["train"]["examples"]}

    def check(run, kept):
        found = models(client, run)
        assert set(found) == {path.name for path in (result.run_dir / "checkpoints").iterdir()} == kept
        assert {each.model_id for each in run.outputs.model_outputs} >= {each.model_id for each in found.values()}
        for name, model in found.items():
            step = int(name.removeprefix("step-"))
            metrics = {metric.key: (metric.step, metric.value) for metric in model.metrics}
            assert metrics["eval_loss"] == (step, evaluated[step])
            assert (model.status, model.params["hidden"]) == ("READY", "16")
            assert model.tags["tfloop.checkpoint"] == str(result.run_dir / "checkpoints" / name)
            assert ("eval_loss" in model.tags.get("tfloop.best", "").split()) == (step == best)
        assert stored(database) == journaled(result.run_dir)  # no point is there twice

    check(run, set(models(client, run)))
    assert command("sync", result.run_dir)[1].startswith("delivered 0 points")
    again = only_run(uri, "own")
    assert (again.data.tags, len(models(client, again))) == (run.data.tags, len(models(client, run)))

    before = set(models(client, run))
    # It goes on: checkpoints that are gone have no model any more, and the description is that of the whole run.
    result = train(tmp_path / "run", uri, 5)
    evaluated = {row["step"]: row["eval_loss"] for row in result.history}
    best = min(evaluated, key=evaluated.get)
    again = only_run(uri, "own")
    assert set(models(client, again)) == {path.name for path in (result.run_dir / "checkpoints").iterdir()} != before
    assert f"at step {best:,}" in again.data.tags[NOTE]
    assert len(again.inputs.dataset_inputs) == 2
    # Another description is the user's, and stays.
    client.set_tag(again.info.run_id, NOTE, "mine")
    assert command("sync", result.run_dir)[0] == 0
    assert only_run(uri, "own").data.tags[NOTE] == "mine"


class Fails(callbacks.Callback):
    def on_epoch_end(self, run, metrics):
        raise RuntimeError("lost *the* way to https://user:hunter22@host/")


def test_a_path_whose_bytes_are_not_utf_8_has_its_models(database, tmp_path, capsys):
    uri = f"sqlite:///{database}"
    train(tmp_path / os.fsdecode(b"run-\xff"), uri, 1)
    assert "warning" not in capsys.readouterr().err
    [model] = models(mlflow.MlflowClient(uri), only_run(uri, "own")).values()
    assert model.tags["tfloop.checkpoint"] == rf"{tmp_path}/run-\udcff/checkpoints/{model.name}"


def test_a_failed_run_says_why_and_no_secret(database, tmp_path):
    uri = f"sqlite:///{database}"
    chosen = callbacks.standard(mlflow=MLflowTracker(uri, "own"), progress=None) + [Fails()]
    with pytest.raises(RuntimeError):
        fit(Plain(), epochs=1, batch_size=20, callbacks=chosen, run_dir=tmp_path / "wrong")
    run = only_run(uri, "own")
    assert (run.info.run_name, run.info.status) == ("wrong", "FAILED")  # no field differs: the directory's name
    first, second = run.data.tags[NOTE].split("\n\n")[:2]
    assert first == "**Plain** · failed"
    assert second.startswith("**Failed at step ")
    assert "RuntimeError: lost \\*the\\* way to https://***@host/" in second
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert "hunter22" not in "\n".join(connection.iterdump())


def test_a_sweep_names_its_best_trial_and_its_trials_by_their_values(database, tmp_path, command):
    uri = f"sqlite:///{database}"
    best = {"trial": "trial-001", "params": {"rate": "0.5"}, "metric": "eval_loss", "value": 0.25}
    fields = {"rate": ["0.1", "0.5"]}
    sweep = run_directory(
        tmp_path / "sweep", [line("eval_end", 2, best_eval_loss=0.25)], sweep={"grid": fields}, hyperparameters=fields,
        best=best,
    )  # fmt: skip
    for number, rate in enumerate((0.1, 0.5)):
        trial = sweep / f"trial-{number:03d}"
        run_directory(trial, [line("epoch_end", 1, loss=rate)], hyperparameters={"rate": rate, "other": 1}, changed=[])
    assert command("sync", sweep, "--track", uri)[0] == 0
    client = mlflow.MlflowClient(uri)
    runs = {run.info.run_name: run for run in client.search_runs([only_experiment(client)])}
    assert set(runs) == {"sweep", "rate=0.1", "rate=0.5"}
    assert "best: **trial-001** (rate=0.5): eval\\_loss 0.25" in runs["sweep"].data.tags[NOTE]


def only_experiment(client):
    return client.get_experiment_by_name("Mine").experiment_id


def test_names_of_runs_are_short_and_have_no_secret(tmp_path):
    fields = {"a": 1, "rate": 0.1 + 0.2, "on": True, "token": "s3cret-value", "text": "x" * 100, "nested": [1, 2]}
    about = {"hyperparameters": fields, "changed": [*fields, "gone"]}
    assert run_name(tmp_path, about) == "a=1 rate=0.3 on=True nested=[1, 2]"
    assert run_name(tmp_path, about | {"changed": []}) == tmp_path.name
    assert run_name(tmp_path, {}) == tmp_path.name  # of an older version
    assert (
        len(
            run_name(
                tmp_path,
                {"hyperparameters": dict.fromkeys(map(str, range(99)), 1), "changed": list(map(str, range(99)))},
            )
        )
        <= 100
    )
    assert values({}) == ""
