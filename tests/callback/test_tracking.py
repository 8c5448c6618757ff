"""Delivery to MLflow: no point is lost or sent twice, and training never waits, whichever process is killed."""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import types
import urllib.request

import mlflow
import pytest

import callbacks
from callbacks import MLflowTracker
from callbacks.files import sqlite_path
from callbacks.mlflow import delivery, ui
from callbacks.mlflow.courier import Courier
from callbacks.mlflow.delivery import Delivery
from callbacks.mlflow.points import key, points
from callbacks.mlflow.tracker import store
from loop import fit
from loop.launch import machine
from loop.launch.signals import handled
from loop.run import trust
from tests.conftest import ROOT, needs_mounts, until
from tests.tasks import Plain

SQLITE_MAX = sys.float_info.max  # what MLflow's SQL stores keep of an infinity


class Server:
    """A real `mlflow server` on sqlite, to be killed and started again."""

    def __init__(self, database, *options):
        self.file, [self.port], self.options = database, machine.free_ports(1), options
        self.uri, self.process = f"http://127.0.0.1:{self.port}", None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.file}", *self.options]
        lean = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # starts in half the time
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, cwd=self.file.parent, start_new_session=True, env=lean, **quiet)

    def answers(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health"):
            return True

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def database(empty_store, tmp_path):
    return shutil.copy(empty_store, tmp_path / "mlflow.db")


@pytest.fixture
def command(command, monkeypatch):
    """Runs a command line without MLflow's retries."""
    for name, value in (("MAX_RETRIES", "0"), ("TIMEOUT", "60")):  # restores what `sync` sets
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    return command


def run_directory(path, lines=(), **about):
    """A run directory as a run leaves it, with these lines in its journal."""
    path.mkdir()
    defaults = {
        "task": "Mine", "target": "mine.py:Mine", "hyperparameters": {"rate": 0.1}, "options": {"epochs": 2},
        "parameters": 6, "backend": "single", "workers": 1, "replicas": 1, "versions": {"python": "3"},
        "status": "finished",
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(defaults | about))
    (path / "journal.jsonl").touch()
    trust.note(path, "mine.py:Mine")
    write(path, [line("restore", 0), *lines])
    return path


def line(event, step, **metrics):
    return {"time": 1.7e9 + step, "event": event, "step": step, "epoch": 0, "metrics": metrics}


def write(directory, lines):
    with (directory / "journal.jsonl").open("a") as file:
        file.writelines((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)


def journaled(directory):
    """What the store should have: of each metric, in the order of lines, the points of later steps than before."""
    found = {}
    for text in (directory / "journal.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(text)
            for name, value in entry["metrics"].items():
                name = key("step/" + name if entry["event"] == "steps_end" else name)
                before = found.setdefault(name, [])
                if entry["event"] == "epoch_end" and name.startswith("eval_"):
                    continue
                if not before or entry["step"] > before[-1][0]:
                    number = float(value)
                    clipped = "nan" if math.isnan(number) else max(min(number, SQLITE_MAX), -SQLITE_MAX)
                    before.append((entry["step"], clipped))
    return {name: found[name] for name in sorted(found) if found[name]}


def stored(database):
    """The rows in the store, so that duplicates show; without those that sum a run up at its end."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT key, step, value, is_nan FROM metrics"
            " WHERE key NOT LIKE 'best/%' AND key != 'examples_per_second' ORDER BY key, step"
        ).fetchall()
    found = {}
    for name, step, value, is_nan in rows:
        found.setdefault(name, []).append((step, "nan" if is_nan else value))
    return found


def only_run(uri, experiment="Mine"):
    client = mlflow.MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def tracking(directory, uri, **options):
    """A tracker whose process follows the journal of this directory."""
    tracker, run = MLflowTracker(uri, **options), types.SimpleNamespace(directory=directory, info={"task": "Mine"})
    tracker.on_fit_start(run)
    return tracker, lambda: tracker.on_fit_end(run, "finished")


LONG = "a" * 300
STRANGE = ["a@b", "a#b", "a//b", "../up", "/top", "", ".", "ü ñ", LONG + "1", LONG + "2", "line\nbreak", "\udc80"]


def test_names_that_mlflow_refuses_are_changed_and_never_into_one():
    from mlflow.utils.validation import _validate_metric

    keys = [key(name) for name in STRANGE]
    assert len(set(keys)) == len(STRANGE)
    for each in keys:
        _validate_metric(each, 1.0, 0, 0)
    assert [key(name) for name in ("loss", "step/a b", "ü ñ", "a" * 250)] == ["loss", "step/a b", "ü ñ", "a" * 250]


def test_lines_of_nonsense_have_no_points():
    for entry in ({}, {"event": "steps_end", "step": 1, "metrics": {"a": "b"}}, {"metrics": 5}, {"metrics": {"a": 1}}):
        assert points(entry) == []


@pytest.mark.timeout(600)
def test_server_down_killed_and_back_and_both_sides_agree(database, tmp_path, command):
    server = Server(database)
    lines = [line("steps_end", step, loss=step / 7, **{f"m{each}": each for each in range(40)}) for step in range(100)]
    directory = run_directory(tmp_path / "run", lines[:1])
    with socket.create_server(
        ("127.0.0.1", server.port)
    ) as closing:  # accepts the first request, and dies while it answers
        courier = Courier(Delivery(directory, server.uri), longest_pause=1.0)
        courier.start()
        closing.settimeout(60)
        connection, _ = closing.accept()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        connection.close()
    server.start()
    until(lambda: stored(database))  # it has tried again by itself
    write(directory, lines[1:])
    until(lambda: sum(map(len, stored(database).values())) > 1000)
    server.kill()
    until(lambda: courier.finish(0))
    courier.join(60)
    odd = [line("steps_end", 400, **dict.fromkeys(STRANGE, 1.5)), line("eval_end", 400, eval_a="nan", eval_b="-inf")]
    write(directory, [*odd, "nonsense", "[1]", '{"event": "eval_end"}', line("epoch_end", 401, loss=1, eval_b=9)])
    write(directory, [lines[7], line("fit_end", 401)])  # as of a run that has gone on from step 6
    with (directory / "journal.jsonl").open("a") as file:
        file.write('{"torn')

    code, _, error = command("sync", directory)
    assert code == 1
    assert f"tfloop: error: MLflow at {server.uri} did not take everything ([Errno 111] Connection refused)" in error
    assert error.count("asking MLflow") == 1  # though it tries twice
    server.start()
    try:
        until(server.answers)
        program = "import sys, cli\ntry: cli.main()\nfinally: print('tensorflow' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", program, "sync", directory], cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        told, tensorflow = done.stdout.splitlines()
        assert tensorflow == "False"
        assert f"points to {server.uri}, run " in told
        assert "MLflow can't hold" in done.stderr
        assert stored(database) == journaled(directory)
        (directory / "mlflow.json").unlink()  # as after a kill between creating the run and noting it
        code, told, error = command("sync", directory, "--track", server.uri)
        assert told.startswith("delivered 0 points"), error
        assert stored(database) == journaled(directory)
        run = only_run(server.uri)
        assert (run.info.status, run.info.end_time) == ("FINISHED", 1_700_000_401_000)
        assert {file.path for file in mlflow.MlflowClient(server.uri).list_artifacts(run.info.run_id)} == {
            "run.json",
            "journal.jsonl",
        }
    finally:
        server.kill()


def test_server_that_hangs_holds_nobody_up_and_sync_delivers_what_fit_has_left(quiet, command, database, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        uri = f"http://user:secret@127.0.0.1:{hanging.getsockname()[1]}"
        chosen = quiet(mlflow=MLflowTracker(uri, "own", wait=0), journal=callbacks.Journal(every=1))
        directory = fit(Plain(), epochs=2, batch_size=20, callbacks=chosen, run_dir=tmp_path / "run").run_dir
    code, _, error = command("sync", directory)
    assert code == 2
    assert "has the store's URI without its secrets: give it as --track URI" in error
    assert "secret" not in (directory / "mlflow.json").read_text()
    code, told, _ = command("sync", directory, "--track", f"sqlite:///{database}")
    assert (code, told.split()[:2]) == (0, ["delivered", str(sum(map(len, journaled(directory).values())))])
    assert stored(database) == journaled(directory)
    assert only_run(f"sqlite:///{database}", "own").info.status == "FINISHED"
    assert command("sync", directory)[1].startswith("delivered 0 points")


def test_killed_while_it_delivers_and_run_still_knows_where_it_is(database, tmp_path, command, capfd):
    lines = [line("steps_end", step, **{f"m{each}": each for each in range(500)}) for step in range(30)]
    directory = run_directory(tmp_path / "run", lines, status="running")
    tracker, end = tracking(directory, f"sqlite:///{database}")
    until(lambda: stored(database))
    tracker._courier.process.kill()
    end()
    assert "its process ended with -9" in capfd.readouterr().err
    assert stored(database) != journaled(directory)
    assert command("sync", directory)[0] == 0
    assert stored(database) == journaled(directory)
    assert only_run(f"sqlite:///{database}").info.status == "KILLED"  # run.json says that it was running


def test_courier_ends_with_its_run(tmp_path):
    tracker, _ = tracking(run_directory(tmp_path / "run"), "http://127.0.0.1:9")
    tracker._courier.process.communicate(timeout=240)  # closes its stdin without a line, as a kill does


def test_the_next_run_takes_the_process_that_has_delivered_all(database, tmp_path, monkeypatch):
    """Unless a new one would find other circumstances."""
    uri = f"sqlite:///{database}"
    taken = []

    def deliver(name):
        tracker, end = tracking(run_directory(tmp_path / name, [line("epoch_end", 1, loss=len(taken))]), uri)
        taken.append(tracker._courier.process)
        end()
        return taken[-1]

    def losses():
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("Mine")
        return sorted(run.data.metrics["loss"] for run in client.search_runs([experiment.experiment_id]))

    assert deliver("one") is deliver("two")
    assert losses() == [0, 1]
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "another")
    assert deliver("three") is not taken[0]
    assert taken[0].returncode is not None
    taken[-1].kill()
    taken[-1].wait()
    assert deliver("four") is not taken[2]
    assert losses() == [0, 1, 2, 3]
    database.unlink()  # MLflow keeps what it knows of a store
    assert deliver("five") is not taken[3]
    with contextlib.closing(sqlite3.connect(database)) as made:
        assert [value for (value,) in made.execute("SELECT value FROM metrics WHERE key = 'loss'")] == [4]


def test_very_many_names_parameters_and_long_values(database, tmp_path, command):
    names = {f"name-{each}": each for each in range(10_000)}
    fields = {f"field{each}": each for each in range(300)} | {"long": "x" * 9000, "empty": "", "bad@name": 1}
    directory = run_directory(tmp_path / "run", [line("epoch_end", 1, **names)], hyperparameters=fields)
    code, told, error = command("sync", directory, "--track", f"sqlite:///{database}")
    assert (code, told.split()[1]) == (0, "10,000")
    assert error.count("warning: MLflow can't hold") == 1
    assert stored(database) == journaled(directory)
    params = only_run(f"sqlite:///{database}").data.params
    assert len(params) == len(fields) + 1
    assert (params["field299"], params["empty"], params["long"]) == ("299", "", "x" * 6000)

    # Resumed with another value: MLflow lets no client change it.
    about = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps(about | {"options": {"epochs": 9}}))
    assert command("sync", directory)[1].startswith("delivered 0 points")


def test_a_path_whose_bytes_are_not_utf_8_is_delivered_with_escapes(database, tmp_path, command):
    data = os.fsdecode(b"data-\xff")
    fields = {"data": data, "hidden": 3}
    directory = run_directory(tmp_path / data, [line("epoch_end", 1, loss=1)], hyperparameters=fields, changed=["data"])
    code, _, error = command("sync", directory, "--track", f"sqlite:///{database}")
    assert code == 0, error
    run = only_run(f"sqlite:///{database}")
    assert run.data.params["data"] == "data-\\udcff"
    assert run.info.run_name == "data=data-\\udcff"
    assert run.data.metrics["loss"] == 1
    assert command("sync", directory)[0] == 0


def test_sync_refuses_what_is_no_run_or_still_under_way(tmp_path, command):
    code, _, error = command("sync", tmp_path)
    assert (code, error.count("\n")) == (2, 1)
    assert "isn't a run directory: it must have run.json and journal.jsonl" in error
    directory = run_directory(tmp_path / "run")
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"pid": 7, "host": "here"}, file)
        file.flush()
        code, _, error = command("sync", directory)
        assert code == 2
        assert "the run is under way (pid 7, host here): it delivers by itself" in error
    code, _, error = command("train", "digits", "--track-wait", "-1")
    assert code == 2
    assert "--track-wait -1" in error


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"
exec "$2" -P -m cli sync "$1" --track http://127.0.0.1:9
"""


@needs_mounts
def test_sync_of_a_read_only_directory_does_not_blame_the_store(tmp_path):
    directory = run_directory(tmp_path / "run")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", directory, sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{directory} can't be written, and mlflow.json must be: make it writable" in done.stderr


def test_what_has_been_deleted_there_is_told(database, tmp_path, command):
    uri = f"sqlite:///{database}"
    client = mlflow.MlflowClient(uri)
    directory = run_directory(tmp_path / "run", [line("epoch_end", 1, loss=1)])
    assert command("sync", directory, "--track", uri)[0] == 0
    run = only_run(uri)
    client.delete_run(run.info.run_id)
    code, _, error = command("sync", directory)
    assert code == 1
    assert f"its run {run.info.run_id} was deleted there: restore it, or remove {directory / 'mlflow.json'}" in error
    assert "try again later" not in error  # which would not help
    assert Delivery(directory, uri).run_id == ""
    (directory / "mlflow.json").unlink()
    assert command("sync", directory, "--track", uri)[1].startswith("delivered 1 points")
    assert only_run(uri).info.run_id != run.info.run_id

    client.delete_experiment(run.info.experiment_id)
    other = Delivery(run_directory(tmp_path / "other"), uri)
    with pytest.raises(ValueError, match="the experiment 'Mine' was deleted there: restore it"):
        other.connect()
    (tmp_path / "other" / "mlflow.json").write_text(json.dumps({"uri": uri, "given": "typo"}))
    with pytest.raises(ValueError, match=r"no run typo, which MLFLOW_RUN_ID, .* has named: start again"):
        other.connect()


def test_a_store_of_another_version_of_mlflow_is_told_with_the_fix(empty_store, tmp_path, monkeypatch, capsys):
    path = shutil.copy(empty_store, tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0584bdc529eb'")
    with pytest.raises(ValueError, match="another version of MLflow has made its tables") as refused:
        Delivery(run_directory(tmp_path / "run"), f"sqlite:///{path}").connect()
    assert delivery.is_refusal(refused.value)
    monkeypatch.setenv(ui.STORE, f"sqlite:///{path}")
    with handled({signal.SIGINT: signal.default_int_handler}), pytest.raises(SystemExit, match="2"):
        ui.main()
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"tfloop: error: MLflow can't open sqlite:///{path} (another version")
    assert f"`mlflow db upgrade sqlite:///{path}`" in said


def test_hanging_up_ends_the_servers_of_the_ui_too(empty_store, monkeypatch):
    """MLflow passes SIGTERM on to its server, and left it alone at SIGHUP."""
    passed_on = []

    def server(arguments, prog_name):
        signal.signal(signal.SIGTERM, lambda number, frame: passed_on.append(number))
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setenv(ui.STORE, f"sqlite:///{empty_store}")
    monkeypatch.setitem(sys.modules, "mlflow.cli", types.SimpleNamespace(cli=types.SimpleNamespace(main=server)))
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGHUP, signal.SIGTERM), signal.SIG_DFL)):
        ui.main()
    assert passed_on == [signal.SIGTERM]


@pytest.mark.parametrize("links", [True, False])
def test_a_store_is_made_whole_or_not_at_all(links, tmp_path, monkeypatch):
    path = tmp_path / "runs" / "mlflow.db"

    def making(meanwhile):
        """An MLflow whose tables are one, and within whose making something happens."""

        def make(uri):
            with contextlib.closing(sqlite3.connect(sqlite_path(uri))) as database:
                database.execute("CREATE TABLE made (a)")
            assert not path.exists()
            meanwhile()

        return lambda uri: types.SimpleNamespace(search_experiments=lambda max_results: make(uri))

    def killed():
        raise KeyboardInterrupt

    if not links:
        monkeypatch.setattr(os, "link", lambda source, target: os.stat(tmp_path / "nowhere"))
    monkeypatch.setattr(mlflow, "MlflowClient", making(killed))
    with pytest.raises(KeyboardInterrupt):
        delivery._open_once(path)
    assert not [*path.parent.iterdir()]
    for meanwhile, content in ((lambda: None, ["made"]), (lambda: path.write_bytes(b""), [])):
        monkeypatch.setattr(mlflow, "MlflowClient", making(meanwhile))
        delivery._open_once(path)
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert [name for (name,) in database.execute("SELECT name FROM sqlite_master")] == content
        assert [*path.parent.iterdir()] == [path]
        path.unlink()


def test_a_copy_is_a_run_of_its_own_and_what_was_moved_is_not(database, tmp_path, command):
    uri = f"sqlite:///{database}"
    first = run_directory(tmp_path / "first", [line("epoch_end", 1, loss=1)])
    assert command("sync", first, "--track", uri)[0] == 0
    own = only_run(uri).info.run_id
    (tmp_path / "elsewhere").mkdir()
    copies = [shutil.copytree(first, path) for path in (tmp_path / "second", tmp_path / "elsewhere" / "first")]
    for step, directory in enumerate((first, *copies), 2):  # each continues by itself
        write(directory, [line("epoch_end", 2, loss=step)])
        assert command("sync", directory, "--trust")[0] == 0  # a copy isn't in the directory in which the run was made
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("Mine").experiment_id])
    found = {run.data.tags["tfloop.run_directory"]: client.get_metric_history(run.info.run_id, "loss") for run in runs}
    assert {directory: [point.value for point in points] for directory, points in found.items()} == {
        str(first): [1, 2], str(copies[0]): [1, 3], str(copies[1]): [1, 4],
    }  # fmt: skip
    moved = first.rename(tmp_path / "third")
    write(moved, [line("epoch_end", 3, loss=5)])
    assert command("sync", moved, "--trust")[1].endswith(f"run {own}\n")


def test_sync_of_a_sweep_delivers_its_trials(database, tmp_path, command):
    uri = f"sqlite:///{database}"
    sweep = run_directory(tmp_path / "sweep", [line("eval_end", 1, best_loss=1)], sweep={})
    (sweep / "trial-003").mkdir()  # has not begun
    for number in range(3):
        run_directory(sweep / f"trial-{number:03d}", [line("epoch_end", 1, loss=number)])
    with (sweep / "trial-002" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # still runs, though the sweep was killed
        code, told, error = command("sync", sweep, "--track", uri)
    assert code == 0
    assert "trial-002: the run is under way" in error
    assert len(told.splitlines()) == 3
    command("sync", sweep)
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("Mine").experiment_id])
    [parent] = [run.info.run_id for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.data.metrics["loss"] for run in runs if run.data.tags.get("mlflow.parentRunId") == parent}
    assert (len(runs), children) == (4, {0, 1, 2})
    assert sorted(row for rows in stored(database).values() for row in rows) == [(1, 0), (1, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize("name", ["a?b", "c#d", "e%20f", "plain"])
def test_a_store_lies_where_its_path_says_whatever_is_in_it(name, empty_store, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    (tmp_path / name / "runs").mkdir()
    path = shutil.copy(empty_store, tmp_path / name / "runs" / "mlflow.db")
    assert sqlite_path(store(None)) == path
    assert store("sqlite:///runs/mlflow.db?timeout=9") == store(None) + "?timeout=9"
    directory = run_directory(tmp_path / "run", [line("epoch_end", 1, loss=0.5)])
    sent = Delivery(directory, store(None))
    sent.deliver()
    sent.close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT key, value FROM metrics").fetchall() == [("loss", 0.5), ("best/loss", 0.5)]
    assert {each.name for each in tmp_path.iterdir()} == {name, "run"}  # no file is anywhere else
