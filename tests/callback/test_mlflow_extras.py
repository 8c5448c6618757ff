"""What MLflow gets besides metrics: artifacts, models, tags; runs within runs, and runs that the user has started."""

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import keras
import mlflow
import numpy as np
import pytest
import tensorflow as tf

from callbacks import MLflowTracker, SamplePredictions, SystemMetrics
from callbacks.mlflow.delivery import SENT
from callbacks.mlflow.mlflow_run import ID, PARENT
from callbacks.mlflow.points import points
from callbacks.mlflow.tracker import write_state
from callbacks.run_record import journal
from callbacks.samples import grid
from loop import TrainTask, fit
from tests.callback.test_tracking import command, database, line, only_run, run_directory, stored, write
from tests.tasks import Conv, Plain, regression

__all__ = ["command", "database"]  # fixtures


def artifact(path, **more):
    return {"time": 1.7e9, "event": "artifact", "step": 1, "epoch": 0, "path": path, **more}


def artifacts(uri, run, path=None):
    """All files of a run, by their paths."""
    client, found = mlflow.MlflowClient(uri), {}
    for each in client.list_artifacts(run.info.run_id, path):
        found |= artifacts(uri, run, each.path) if each.is_dir else {each.path: each.file_size}
    return found


def test_artifacts_arrive_once_and_a_bad_one_holds_nothing_up(database, tmp_path, command):
    uri = f"sqlite:///{database}"
    directory = run_directory(tmp_path / "run", [line("epoch_end", 1, loss=1)])
    (directory / "model").mkdir()
    (directory / "model" / "weights").write_bytes(b"w" * 100)
    (directory / "report.html").write_text("first")
    (tmp_path / "secret").touch()
    odd = [artifact("../secret"), artifact("gone.png"), {"event": "artifact"}, artifact("report.html", to="pages/a")]
    write(directory, [artifact("model"), *odd, artifact("report.html")])
    code, told, error = command("sync", directory, "--track", uri)
    assert (code, told.split()[:5]) == (0, ["delivered", "1", "points", "and", "3"])
    assert error.count("any more") == 3
    run = only_run(uri)
    own = {"run.json", "journal.jsonl"}
    assert set(artifacts(uri, run)) - own == {"model/weights", "pages/a/report.html", "report.html"}
    assert artifacts(uri, run)["model/weights"] == 100
    assert run.data.tags[SENT] == "6"
    assert command("sync", directory)[1].startswith("delivered 0 points to")

    # An artifact that is noted again is sent again. While files can't be written, metrics are sent.
    (directory / "report.html").write_text("the second")
    root = tmp_path / "mlartifacts"
    root.rename(tmp_path / "away")
    root.touch()
    write(directory, [artifact("report.html"), line("epoch_end", 2, loss=2)])
    code, told, error = command("sync", directory)
    assert (code, told.split()[:3]) == (0, ["delivered", "1", "points"])
    assert "did not take the file report.html" in error
    assert [step for step, _ in stored(database)["loss"]] == [1, 2]
    root.unlink()
    (tmp_path / "away").rename(root)
    assert command("sync", directory)[1].startswith("delivered 0 points and 1 artifacts")
    assert artifacts(uri, run)["report.html"] == len("the second")


def test_artifact_is_a_line_of_the_journal_and_nothing_without_one(tmp_path):
    progress = types.SimpleNamespace(step=3, epoch=1)
    run = types.SimpleNamespace(directory=tmp_path, progress=progress, phase=None)
    journal.artifact(run, tmp_path / "report.html")
    assert not (tmp_path / journal.NAME).exists()
    (tmp_path / journal.NAME).touch()
    journal.artifact(run, tmp_path / "a" / "b.png", to="c")
    entry = json.loads((tmp_path / journal.NAME).read_text())
    assert {name: entry[name] for name in ("event", "step", "epoch", "path", "to")} == {
        "event": "artifact", "step": 3, "epoch": 1, "path": "a/b.png", "to": "c",
    }  # fmt: skip
    with pytest.raises(ValueError, match="is not in the subpath"):
        journal.artifact(run, tmp_path.parent / "elsewhere")


LOAD = """
import sys, numpy as np
from mlflow import pyfunc
for place, file in zip(sys.argv[1::2], sys.argv[2::2]):
    model, data = pyfunc.load_model(place), dict(np.load(file))
    assert model.metadata.get_input_schema().has_input_names() == (len(data) > 1)
    found = model.predict(data if len(data) > 1 else data["inputs"])
    np.savez(file, **(found if isinstance(found, dict) else {"output_0": found}))
    assert not {"loop", "tests"} & set(sys.modules)
"""


def test_model_is_logged_registered_and_the_same_in_a_new_process(database, tmp_path, command, quiet, monkeypatch):
    uri = f"sqlite:///{database}"
    client = mlflow.MlflowClient(uri)
    parent = client.create_run(client.create_experiment("mine", f"file://{tmp_path}/artifacts"))
    monkeypatch.setenv("MLFLOW_PARENT_RUN_ID", parent.info.run_id)
    code, _, error = command(
        "train", "tests.tasks:Conv", "--steps", 3, "--ema", 0.9, "--track", uri, "--log-model", "--register", "digits",
        "--tag", "team=a=b", "--tag", "mlflow.note.content=what it is", "--tag", "api_key=hush", "--run-dir", "run",
    )  # fmt: skip
    assert (code, "warning" in error.lower()) == (0, False), error
    [run] = client.search_runs([parent.info.experiment_id], f"tags.`{PARENT}` = '{parent.info.run_id}'")
    assert {name: run.data.tags[name] for name in ("team", "mlflow.note.content", "api_key")} == {
        "team": "a=b", "mlflow.note.content": "what it is", "api_key": "***",
    }  # fmt: skip
    [version] = client.search_model_versions("name = 'digits'")
    source = f"runs:/{run.info.run_id}/registered/step-00000003"
    assert (version.run_id, version.source) == (run.info.run_id, source)

    from tests.commands.test_export import Mixed

    tracker = MLflowTracker(uri, log_model=True, parent=parent.info.run_id)
    two = fit(Mixed(), steps=2, run_dir=tmp_path / "two", callbacks=quiet(mlflow=tracker), batch_size=20)
    two_id = json.loads((tmp_path / "two" / "mlflow.json").read_text())["run_id"]
    inputs = regression(6)[0]
    images = Conv().train_data().arrays[0][:6]
    np.savez("one.npz", inputs=images)
    np.savez("two.npz", a_b=inputs, mask=inputs)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # without tfloop
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, "models:/digits/1", "one.npz", f"runs:/{two_id}/model", "two.npz"],
        capture_output=True, text=True, timeout=240, env={**environment, "MLFLOW_TRACKING_URI": uri}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert command("export", "run", "model.keras", "--no-check")[0] == 0
    expected = keras.models.load_model("model.keras")(images)
    np.testing.assert_allclose(np.load("one.npz")["output_0"], expected, atol=1e-6)
    outputs = two.model({"a b": tf.constant(inputs)}, mask=inputs, training=False)
    np.testing.assert_allclose(np.load("two.npz")["sum"], outputs["sum"], atol=1e-6)


def test_registered_once_though_sent_twice_with_the_tags_that_the_run_had(database, tmp_path, command):
    uri = f"sqlite:///{database}"
    directory = run_directory(tmp_path / "run", [artifact("model", register="mine")])
    (directory / "model").mkdir()
    (directory / "model" / "MLmodel").touch()
    write_state(directory, "http://127.0.0.1:9", "Mine", tags={"team": "a"}, given="of another store")
    assert command("sync", directory, "--track", uri)[0] == 0
    run, client = only_run(uri), mlflow.MlflowClient(uri)
    assert (run.data.tags["team"], run.info.status) == ("a", "FINISHED")
    client.set_tag(run.info.run_id, SENT, "0")  # as if killed before it was counted
    assert command("sync", directory)[1].startswith("delivered 0 points and 1 artifacts")
    assert len(client.search_model_versions("name = 'mine'")) == 1
    assert command("sync", directory)[1].startswith("delivered 0 points to")
    # The run goes on, and ends twice while the store is down. Only the last model is still there.
    (directory / "model" / "MLmodel").write_text("later")
    write(directory, [{**artifact("model", register="mine"), "step": step} for step in (7, 9)])
    assert command("sync", directory)[0] == 0
    versions = client.search_model_versions("name = 'mine'")
    assert {version.source.rpartition("/")[2] for version in versions} == {"step-00000001", "step-00000009"}
    for step, text in ((1, ""), (9, "later")):
        path = client.download_artifacts(run.info.run_id, f"registered/step-{step:08d}/MLmodel", tmp_path)
        assert Path(path).read_text() == text


def test_run_that_is_active_is_used_and_left_open_and_a_second_training_goes_into_it(database, tmp_path, quiet):
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    client = mlflow.MlflowClient()
    try:
        with mlflow.start_run(tags={"backend": "my own"}) as active:
            mlflow.log_param("epochs", "mine")
            for name in ("first", "second"):
                fit(Plain(), steps=2, run_dir=tmp_path / name, callbacks=quiet(mlflow=MLflowTracker()))
            assert mlflow.active_run() is active
            found = client.get_run(active.info.run_id)
            assert (found.info.status, found.info.end_time) == ("RUNNING", None)
        [child] = client.search_runs([active.info.experiment_id], f"tags.`{PARENT}` = '{active.info.run_id}'")
    finally:
        mlflow.set_tracking_uri(None)
    assert (found.data.tags["backend"], found.data.params["epochs"]) == ("my own", "mine")
    assert found.data.tags[ID] != child.data.tags[ID]
    assert child.info.status == "FINISHED"
    for run in (found, child):
        assert "eval_loss" in run.data.metrics
    assert json.loads((tmp_path / "first" / "mlflow.json").read_text())["run_id"] == active.info.run_id


def test_environment_names_a_run(monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    assert MLflowTracker("sqlite:////a.db")._store_and_run() == ("sqlite:////a.db", "abc")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--tag", "a"], "--tag a: give KEY=VALUE"),
        (["--tag", "=a"], "--tag =a: give KEY=VALUE"),
        (["--register", "a/b"], "--register a/b: give a name without / : and quotes"),
        (["--track", "off", "--log-model"], "--track off with --log-model: leave one of them out"),
        (["--track", "off", "--tag", "a=b"], "--track off with --tag: leave one of them out"),
    ],
)
def test_bad_options(typed, message, command):
    code, _, error = command("train", "digits", *typed)
    assert (code, error.count("\n")) == (2, 1)
    assert message in error


class Told(Conv):
    """Shows texts."""

    def sample(self, model, batch):
        return [f"{label} is {score:.3f}" for label, score in zip(batch[1], model(batch[0])[:, 0])]


class Bare(Plain):
    """Its examples aren't pairs."""

    def sample(self, model, batch):
        return TrainTask.sample(self, model, {"a": batch[0]})


def test_samples_as_pictures_and_text_and_what_the_machine_is_at(quiet, tmp_path, monkeypatch):
    system = SystemMetrics(interval=0.1)
    chosen = quiet() + [SamplePredictions(5), system]
    result = fit(Conv(), epochs=2, batch_size=50, run_dir=tmp_path / "run", callbacks=chosen)
    sheet = tf.io.decode_png((tmp_path / "run/samples/step-00000008.png").read_bytes()).numpy()
    tile = 64 + 16 + 4
    assert sheet.shape == (3 * tile, 2 * 68, 3)
    first = (Conv().train_data().arrays[0][0, :, :, 0] * 255).round()
    np.testing.assert_array_equal(sheet[2:66:8, 2:66:8, 0], first)
    entries = [entry for entry, _ in journal.read(result.run_dir / journal.NAME)]
    noted = [entry["path"] for entry in entries if entry["event"] == "artifact"]
    assert noted == ["samples/step-00000004.png", "samples/step-00000008.png"]
    [*_, last] = [entry for entry in entries if entry["event"] == "system"]
    names = {"cpu", "rss_mb", "free_memory_mb", "free_disk_mb", "received_mb_per_s", "sent_mb_per_s"}
    assert {f"system/rank0/{name}" for name in names} <= set(last["metrics"])
    assert last["metrics"]["system/rank0/rss_mb"] > 100
    assert ("system/rank0/cpu", last["step"]) in {(name, step) for name, _, _, step in points(last)}
    assert system._thread is None

    # Samples of other ranks are sent at the end of an epoch, and keep their time and step.
    progress = types.SimpleNamespace(step=9, epoch=0)
    other = types.SimpleNamespace(directory=tmp_path / "run", progress=progress, phase=None)
    other.backend = types.SimpleNamespace(rank=1, is_chief=False, gather_json=lambda own: [[], own])
    elsewhere = SystemMetrics()
    elsewhere.on_fit_start(other)
    elsewhere._sample(other)
    other.backend.is_chief = True
    progress.step = 12
    elsewhere.on_epoch_end(other, {})
    elsewhere.on_fit_end(other, "finished")
    lines = [entry for entry, _ in journal.read(result.run_dir / journal.NAME)][-2:]
    assert [(entry["event"], entry["step"]) for entry in lines] == [("system", 9), ("system", 12)]
    assert all("system/rank1/cpu" in entry["metrics"] for entry in lines)

    # A driver that doesn't answer holds the end of the run up for a moment, and no longer.
    asked, answer = threading.Event(), threading.Event()
    monkeypatch.setattr("callbacks.system._PATIENCE", 0.1)
    monkeypatch.setattr("callbacks.system._gpus", lambda: {"gpu0/use": lambda: asked.set() or float(answer.wait(60))})
    hanging = SystemMetrics(interval=0.1)
    hanging.on_fit_start(other)
    assert asked.wait(60)
    hanging.on_fit_end(other, "finished")
    assert len([*journal.read(result.run_dir / journal.NAME)]) == len(entries) + 2  # those of above
    answer.set()

    fit(Told(), steps=1, run_dir=tmp_path / "told", callbacks=quiet() + [SamplePredictions()])
    told = (tmp_path / "told/samples/step-00000001.txt").read_text().splitlines()
    assert len(told) == 16
    assert told[0].startswith("0 is ")
    with pytest.raises(ValueError, match="define sample"):
        fit(Bare(), steps=1, run_dir=tmp_path / "bare", callbacks=quiet() + [SamplePredictions()])


def test_grid_says_what_is_right():
    pictures = np.zeros((2, 4, 4), "uint8")
    sheet = tf.io.decode_png(grid(pictures, np.array([3, 3]), np.array([3, 8]))).numpy()
    top, bottom = ({tuple(pixel) for pixel in half.reshape(-1, 3)} for half in np.split(sheet, 2))
    assert (90, 200, 120) in top
    assert (255, 110, 100) in bottom
    assert (255, 110, 100) not in top
    nothing = tf.io.decode_png(grid(np.full((3, 70, 80, 3), np.nan), predictions=np.array(["ä", "", "b"]))).numpy()
    assert nothing.shape == (2 * (70 + 20), 2 * 84, 3)
