"""Real jobs in real processes: the engines, outside launchers, kills, and failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loop.launch import machine, schedulers
from tests.conftest import TFLOOP, needs_horovod, tfloop

ENGINES = {
    "single": ["--backend", "single"],
    "mirrored": ["--backend", "mirrored", "--workers", "2"],
    "central": ["--backend", "central", "--workers", "2"],
    "horovod": ["--backend", "horovod", "--workers", "2"],
    "multiworker": ["--backend", "multiworker", "--workers", "2"],
}


def result_of(done):
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The digits on each engine, into one MLflow store, from the same command."""
    directory = tmp_path_factory.mktemp("digits")
    settings = 'backend = "multiworker"\ncommunication = "ring"\nworkers = 2\nthreads = 1\nepochs = 9\nseed = 1\n'
    (directory / "job.toml").write_text(settings)
    engines = {name: [*engine, "--seed", "1"] for name, engine in ENGINES.items()}
    engines["multiworker"] = ["--config", "job.toml"]
    engines["horovod"] += ["--profile", "2:4"]  # the numbers don't depend on it
    command = ["train", "digits", "--epochs", "6", "--json"]
    return directory, {name: tfloop(*command, *engine, cwd=directory) for name, engine in engines.items()}


@needs_horovod
def test_engines_agree(digits):
    _, runs = digits
    results = {name: result_of(done) for name, done in runs.items()}
    assert {name: (each["backend"], each["replicas"]) for name, each in results.items()} == {
        "single": ("single", 1),
        "mirrored": ("mirrored", 2),
        "central": ("central", 2),
        "horovod": ("horovod", 2),
        "multiworker": ("multiworker", 2),
    }
    for each in results.values():
        assert each["metrics"]["eval_accuracy"] >= 0.93
        for name, value in results["single"]["metrics"].items():
            assert each["metrics"][name] == pytest.approx(value, rel=0, abs=1e-5)
        assert (each["status"], each["steps"], each["examples"]) == ("finished", 270, 6 * 1437)
        about = json.loads((Path(each["run_dir"]) / "run.json").read_text())
        # As typed, and this worker's share of the cores.
        threads = {"multiworker": 1, "horovod": max(1, machine.usable_cpus() // 2)}
        assert about["machine"]["intra_op_threads"] == threads.get(each["backend"], 0)
        assert about["machine"]["inter_op_threads"] == (1 if threads.get(each["backend"]) == 1 else 0)


@needs_horovod
def test_all_runs_are_in_one_store(digits):
    import mlflow

    directory, runs = digits
    client = mlflow.MlflowClient(f"sqlite:///{directory / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("Digits")
    found = client.search_runs([experiment.experiment_id])
    assert {run.data.tags["backend"] for run in found} == set(ENGINES)
    for run in found:
        assert run.info.status == "FINISHED"
        assert run.data.params["learning_rate"] == "0.005"
        assert [point.step for point in client.get_metric_history(run.info.run_id, "eval_accuracy")] == list(
            range(45, 271, 45)
        )
        expected = result_of(runs[run.data.tags["backend"]])["metrics"]
        assert {name: run.data.metrics[name] for name in expected} == expected


@needs_horovod
def test_output_of_workers_bears_their_rank_and_only_the_chief_speaks(digits):
    _, runs = digits
    for name in ("horovod", "multiworker"):
        lines = runs[name].stderr.splitlines()
        assert f"starting 2 workers ({name}) ..." in lines[:2]  # behind the choice of the engine
        assert any(line.startswith("[0] epoch 6/6  step 270") for line in lines)
        assert not [line for line in lines if line.startswith("[1]")]


@needs_horovod
def test_a_profiled_job_has_traces_of_all_ranks_and_says_what_holds_it_back(digits):
    directory, runs = digits
    result = result_of(runs["horovod"])
    for rank in (0, 1):
        [trace] = (directory / result["run_dir"]).glob(f"profile/rank-{rank}/plugins/profile/*/*.xplane.pb")
        assert trace.stat().st_size > 0
    lines = [line.removeprefix("[0] ") for line in runs["horovod"].stderr.splitlines()]
    for start in ("rank 0 ", "rank 1 ", "slowest: rank ", "profile: steps 2 to 4: "):
        assert len([line for line in lines if line.startswith(start)]) == 1, lines
    journal = (directory / result["run_dir"] / "journal.jsonl").read_text()
    [summary] = [entry for entry in map(json.loads, journal.splitlines()) if entry["event"] == "summary"]
    assert len(summary["seconds"]) == 2
    assert set(summary["text"]) <= set(lines)


TASK = '''
import os, subprocess, sys
import callbacks
import tensorflow as tf
from examples_digits import Digits as Base
from loop.launch import environment

class Digits(Base):
    """Fails on one rank when it is told to."""

class Failing(Base):
    def train_data(self):
        if environment.job_rank() == 1:
            raise RuntimeError("planted on rank 1")
        return super().train_data()

class Early(Base):
    def __init__(self):
        super().__init__()
        self.one = tf.constant(1.0)

class Refused(Base):
    def compute(self, model, batch, training):
        return {"loss": tf.constant(1.0)}

class Uneven(Base):
    """Another model on each rank."""
    def build_model(self):
        import keras
        model = super().build_model()
        return keras.Sequential([model, keras.layers.Dense(10)]) if environment.job_rank() else model

class Slow(Base):
    """Takes a hundredth of a second for a step."""
    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        with tf.control_dependencies([tf.py_function(lambda: __import__("time").sleep(0.01), [], [])]):
            return {name: tf.identity(value) for name, value in values.items()}

class Evaluates(callbacks.Callback):
    def on_fit_end(self, run, status):
        command = [sys.executable, "-P", "-m", "cli", "evaluate", str(run.directory), "--json"]
        subprocess.run(command, stdout=open("evaluated", "w"), check=True)

class Nested(Base):
    """Starts a command of tfloop in a callback."""
    def build_callbacks(self):
        return [Evaluates()]
'''


@pytest.fixture
def task(tmp_path):
    from loop.target import task_loader

    (tmp_path / "examples_digits.py").write_text(task_loader.shipped_path("digits").read_text())
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


@needs_horovod
def test_a_rank_that_fails_ends_the_job_and_is_named(task):
    """Under multiworker, `test_a_callback_that_fails_on_the_chief_alone_ends_all_with_its_error` shows it."""
    done = tfloop("train", "task.py:Failing", *ENGINES["horovod"], "--track", "off", "--json", cwd=task)
    assert (done.returncode, done.stdout) == (1, "")
    assert "RuntimeError: planted on rank 1" in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "tfloop: error: rank 1: RuntimeError: planted on rank 1 "
        "(task.py, line 14, in train_data; --debug shows the traceback)"
    )


@needs_horovod
def test_bad_input_in_a_job_is_one_line(task):
    done = tfloop("train", "task.py:Refused", *ENGINES["horovod"], "--track", "off", cwd=task)
    assert (done.returncode, done.stdout) == (2, "")
    assert len([line for line in done.stderr.splitlines() if "error: " in line]) == 1
    assert "Traceback" not in done.stderr


def test_a_task_may_use_tensorflow_before_multiworker_starts(task):
    """The command starts the backend first."""
    done = tfloop("train", "task.py:Early", *ENGINES["multiworker"], "--track", "off", "--steps", 2, "--json", cwd=task)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["replicas"] == 2


@pytest.mark.parametrize("engine", [pytest.param("horovod", marks=needs_horovod)])
def test_workers_that_build_other_models_are_told(engine, task):
    done = tfloop("train", "task.py:Uneven", *ENGINES[engine], "--track", "off", cwd=task, timeout=240)
    assert done.returncode == 1
    assert "rank 1 has built another model than the chief" in done.stderr.splitlines()[-1]


def test_a_command_that_a_worker_starts_is_no_worker(task):
    arguments = ("--track", "off", "--steps", 2, "--json")
    done = tfloop("train", "task.py:Nested", *ENGINES["multiworker"], *arguments, cwd=task)
    result = result_of(done)
    assert json.loads((task / "evaluated").read_text())["eval_loss"] == pytest.approx(result["metrics"]["eval_loss"])


def test_workers_of_a_killed_launcher_end_too(task):
    process = start("train", "task.py:Slow", *ENGINES["multiworker"], "--epochs", 500, "--run-dir", "run", cwd=task)
    wait_for((task / "run" / "checkpoints" / "step-00000045").exists, process)
    worker = json.loads((task / "run" / "run.json").read_text())["pid"]
    process.kill()
    process.communicate(timeout=240)
    deadline = time.monotonic() + 240
    while Path(f"/proc/{worker}").exists() and "State:\tZ" not in Path(f"/proc/{worker}/status").read_text():
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.1)
    assert json.loads((task / "run" / "run.json").read_text())["status"] == "preempted"


def start(*arguments, cwd):
    return subprocess.Popen(
        [*TFLOOP, *map(str, arguments)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition, process, seconds=120):
    """Waits until there is something to see; the process must live on meanwhile."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


@needs_horovod
def test_kill_9_and_start_again_gives_the_same_bits(task):
    """On one device, `test_chaos_on_a_real_task` shows it."""

    def command(directory):
        return [
            "train", "task.py:Slow", *ENGINES["horovod"], "--epochs", 4, "--checkpoint-every", 20, "--seed", 3,
            "--run-dir", directory, "--track", "off", "--json",
        ]  # fmt: skip

    victim = start(*command("killed"), cwd=task)
    checkpoints = task / "killed" / "checkpoints"
    wait_for(lambda: (checkpoints / "step-00000060").exists(), victim)  # in the middle of epoch 2
    os.kill(json.loads((task / "killed" / "run.json").read_text())["pid"], signal.SIGKILL)
    _, err = victim.communicate(timeout=240)
    assert victim.returncode != 0
    assert "tfloop: error: rank 0 ended without a word" in err
    resumed = tfloop(*command("killed"), cwd=task)
    whole = result_of(tfloop(*command("whole"), cwd=task))
    assert "going on from step" in resumed.stderr
    step = int(resumed.stderr.split("going on from step ")[1].split()[0])
    assert step >= 60
    assert step % 20 == 0 or step % 45 == 0
    assert result_of(resumed)["weights_sha256"] == whole["weights_sha256"]
    assert result_of(resumed)["history"] == whole["history"]


@pytest.mark.parametrize("engine", ["single", pytest.param("horovod", marks=needs_horovod), "multiworker"])
def test_sigterm_saves_and_exits_75(engine, task):
    arguments = ["--epochs", 20, "--batch-size", 1, "--run-dir", "run", "--track", "off", "--json"]
    process = start("train", "task.py:Slow", *ENGINES[engine], *arguments, cwd=task)
    # In the middle of an epoch of some fifteen seconds, when no other save is due.
    journal = task / "run" / "journal.jsonl"
    wait_for(lambda: journal.exists() and '"steps_end"' in journal.read_text(), process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75, err
    result = json.loads(out)
    assert result["status"] == "preempted"
    assert 0 < result["steps"] < 1437
    assert json.loads((task / "run" / "run.json").read_text())["status"] == "preempted"
    assert (task / "run" / "checkpoints" / f"step-{result['steps']:08d}" / "manifest.json").exists()


MINE = """
import json, os
from pathlib import Path
from examples.digits import Digits

class Mine(Digits):
    def train_data(self):
        others = [os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")]
        Path(f"policies-{os.environ['HOROVOD_RANK']}").write_text(json.dumps([os.sched_getscheduler(0), others]))
        return super().train_data()
"""


@needs_horovod
def test_horovodrun_is_joined(tmp_path, monkeypatch):
    monkeypatch.delenv("HOROVOD_CYCLE_TIME")  # as users have it: ours is the default of `loop.backends.horovod`
    horovodrun = Path(sys.executable).parent / "horovodrun"
    (tmp_path / "mine.py").write_text(MINE)
    command = ["train", "mine.py:Mine", "--steps", "5", "--track", "off", "--json", "--workers", "2"]
    done = subprocess.run(
        [horovodrun, "-np", "2", *TFLOOP, *command], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "weights_sha256" in line]
    result = json.loads(line.split("<stdout>:")[1])
    assert (result["backend"], result["replicas"], result["steps"]) == ("horovod", 2, 5)
    for rank in range(2):
        main, others = json.loads((tmp_path / f"policies-{rank}").read_text())
        assert main == os.SCHED_OTHER
        assert os.SCHED_BATCH in others  # those that Horovod has started


def test_tf_config_is_joined(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in machine.free_ports(2)]
    cluster = {"chief": addresses[:1], "worker": addresses[1:]}
    workers = [
        subprocess.Popen(
            [*TFLOOP, "train", "digits", "--steps", "5", "--track", "off", "--json"],
            env={**os.environ, "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})},
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for kind in ("chief", "worker")
    ]  # fmt: skip
    (chief_out, err), (other_out, _) = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], err
    result = json.loads(chief_out)
    assert (result["backend"], result["replicas"], result["steps"]) == ("multiworker", 2, 5)
    assert other_out == ""
    assert len(list((tmp_path / "runs").iterdir())) == 1  # the chief's


def test_workers_that_contradict_the_job_are_refused():
    environment = {**os.environ, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    done = tfloop("train", "digits", "--workers", "3", env=environment)
    assert done.returncode == 2
    assert "--workers 3, but this job has been started with 2 workers" in done.stderr


@needs_horovod
def test_a_horovod_job_without_a_place_to_meet_is_refused():
    environment = {**os.environ, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    if schedulers.horovod_has_mpi():
        pytest.skip("MPI finds it")
    done = tfloop("train", "digits", env=environment)
    assert done.returncode == 2
    assert "HOROVOD_SIZE=2 without HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT" in done.stderr.splitlines()[-1]
