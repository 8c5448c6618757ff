"""What MLflow gets beside metrics: artifacts, models, tags; runs within runs, and runs that others have begun."""

import json
import types

import mlflow
import pytest

from callbacks import journal
from callbacks.delivery import SENT
from tests.test_tracking import command, database, line, only_run, run_directory, stored, write

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

    # What is noted again is sent again; where files can't be written, metrics go on, and the file waits.
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
    run = types.SimpleNamespace(directory=tmp_path, progress=progress)
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
