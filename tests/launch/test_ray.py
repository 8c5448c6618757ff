"""Workers on a Ray cluster: three raylets on loopback, one of which is killed; jobs that Ray has no room for."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import cli
from callbacks import files
from callbacks.example_log import ExampleLog, differences, used
from callbacks.mlflow.tracker import default_uri
from examples.digits import Digits
from loop import UsageError, fit
from loop.commands.command_line import callback_option
from loop.launch import machine, ray_options
from tests.campaigns.elastic import OPTIONS, TASK, distance, last_weights
from tests.campaigns.ray_sweep import through_kills
from tests.conftest import ROOT, TFLOOP, needs_horovod, tfloop
from tests.ray_nodes import nodes

pytestmark = pytest.mark.timeout(900)  # a node's first worker imports TensorFlow, which has taken two minutes


@pytest.fixture(scope="module")
def cluster():
    with nodes() as found:
        yield found


OF_TASK = ["task.py:Held", *OPTIONS, "--epochs=3"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The directory of a run of `OF_TASK` with three workers here, and what it printed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "task.py").write_text(TASK)
    log = callback_option(ExampleLog, directory / "used")
    done = tfloop("train", *OF_TASK, log, "--workers=3", "--run-dir=run", cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory, json.loads(done.stdout)


def on_ray(cluster, *arguments, workers="--workers=3", paths=(), **more):
    """Starts `tfloop train` with workers there; `paths` come first where Python looks for modules."""
    command = [*TFLOOP, "train", *arguments, workers, "--launcher=ray", f"--address={cluster.address}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def assert_nothing_is_left(cluster, directory):
    """Waits until no agent of the cluster and no process of a job in this directory runs.

    The agent of a node that is gone gives its worker time to save.
    """
    deadline = time.monotonic() + 240
    while found := list(left_behind(cluster, directory)):
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def left_behind(cluster, directory):
    """The commands of the agents of the cluster, and of the processes of a job in this directory, that still run."""
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            is_agent = "loop.launch.host_agent" in command and Path(process.cwd()).is_relative_to(cluster.directory)
            ours = is_agent or str(directory) in " ".join(command)
        except psutil.Error:
            continue
        if ours and process.pid != os.getpid():
            yield command


@needs_horovod
def test_digits_have_the_weights_of_local_workers(cluster, tmp_path):
    options = ["digits", "--steps=20", "--seed=1", "--track=off", "--json"]
    process = on_ray(cluster, *options)
    local = tfloop("train", *options, "--workers=3")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    [line] = out.splitlines()
    result = json.loads(line)
    assert (result["backend"], result["replicas"], result["steps"]) == ("horovod", 3, 20)
    assert result["weights_sha256"] == json.loads(local.stdout)["weights_sha256"]
    assert Path(result["run_dir"]).parent == tmp_path / "runs"
    assert "[127.0.0.1 0] finished at step 20" in err
    assert "starting 3 workers on Ray (horovod) ..." in err.splitlines()[:2]


@needs_horovod
def test_a_raylet_is_killed_and_another_one_joins(cluster, undisturbed, tmp_path, monkeypatch):
    """The job goes on by itself, to the bits of a run that nothing has disturbed."""
    (tmp_path / "task.py").write_text(TASK)
    go = tmp_path / "go"
    monkeypatch.setenv("ELASTIC_GO", str(go))
    runs = tmp_path / "runs"
    job = on_ray(cluster, *OF_TASK, "--checkpoint-every=9")
    wait_for(lambda: [*runs.glob("*/checkpoints/step-00000009")], job)
    cluster.replace_one()
    wait_for(lambda: events(runs).count("fit_start") == 2, job)
    go.touch()
    out, err = job.communicate(timeout=500)
    assert job.returncode == 0, err
    assert "host 127.0.0.1 is gone, and rank " in err
    assert "; going on from the last checkpoint, where Ray finds room" in err
    result = json.loads(out)
    assert result["weights_sha256"] == undisturbed[1]["weights_sha256"]
    about = json.loads(Path(result["run_dir"], "run.json").read_text())
    assert about["target"] == f"{tmp_path / 'task.py'}:Held"  # not the copy that Ray has made
    assert_nothing_is_left(cluster, tmp_path)


@needs_horovod
def test_an_elastic_job_goes_on_from_memory_and_takes_the_next_node_in(cluster, undisturbed, tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK)
    go = tmp_path / "go"
    monkeypatch.setenv("ELASTIC_GO", str(go))
    runs = tmp_path / "runs"
    log = callback_option(ExampleLog, tmp_path / "there")
    job = on_ray(cluster, *OF_TASK, log, "--run-dir=runs/there", workers="--elastic=2:3")
    wait_for(lambda: "steps_end" in events(runs), job)
    cluster.replace_one()
    wait_for(lambda: "worker_gone" in events(runs) and last_of(events(runs)) == "worker_joined", job)
    go.touch()
    out, err = job.communicate(timeout=500)
    assert job.returncode == 0, err
    assert "starting 2 to 3 workers on Ray (horovod) ..." in err
    assert "elastic: going on with 2 workers" in err
    assert " joins: 3 workers from the next boundary on" in err
    assert json.loads(out)["steps"] == 303

    here, _ = undisturbed
    assert list(differences(used(here / "used"), used(tmp_path / "there"))) == []
    assert distance(last_weights(here / "run"), last_weights(runs / "there")) < 5e-6
    assert_nothing_is_left(cluster, tmp_path)


# Python imports it by itself. Agents wait, so that a node can be lost before its agent answers; that one never does.
SITE = """
import os, sys, time
if "loop.launch.host_agent" in sys.orig_argv:
    here = os.path.dirname(__file__)
    open(os.path.join(here, f"agent-{os.getpid()}"), "w").close()
    while not os.path.exists(os.path.join(here, "answer")) or os.path.exists(os.path.join(here, f"not-{os.getpid()}")):
        time.sleep(0.05)
"""


@needs_horovod
def test_a_node_that_is_lost_before_its_worker_has_started_is_replaced(cluster, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    options = ["digits", "--steps=5", "--seed=1", "--track=off", "--json"]
    job = on_ray(cluster, *options, paths=[site])
    wait_for(lambda: len(list(site.glob("agent-*"))) == 3, job)
    cluster.replace_one()
    agents = [int(path.name.partition("-")[2]) for path in site.glob("agent-*")]
    # Ray leaves the process of an actor running when its raylet is killed, and gives the actor up.
    wait_for(lambda: any(psutil.Process(agent).parent().ppid() == 1 for agent in agents), job)
    [lost] = [agent for agent in agents if psutil.Process(agent).parent().ppid() == 1]
    (site / f"not-{lost}").touch()
    (site / "answer").touch()
    try:
        out, err = job.communicate(timeout=500)
    finally:
        psutil.Process(lost).kill()
    assert job.returncode == 0, err
    [line] = [line for line in err.splitlines() if line.endswith("; starting again, where Ray finds room")]
    # The second, if the node is lost after the agent's start and before Ray has noted its actor's.
    assert line.startswith(("127.0.0.1: can't be reached: ", "a Ray actor has not started: "))
    local = tfloop("train", *options, "--workers=3")
    assert json.loads(out)["weights_sha256"] == json.loads(local.stdout)["weights_sha256"]


@needs_horovod
def test_a_node_that_is_lost_before_the_first_step_is_replaced(cluster, undisturbed, tmp_path, monkeypatch):
    """Its worker runs, and reads its data: there is no checkpoint."""
    reading = tmp_path / "reading"
    wait = f"""
    def train_data(self):
        open(f"{reading}-{{os.getpid()}}", "w").close()
        while not os.path.exists(os.environ["ELASTIC_GO"]):
            time.sleep(0.05)
"""
    (tmp_path / "task.py").write_text(TASK.replace("\n    def train_data(self):\n", wait))
    go = tmp_path / "go"
    monkeypatch.setenv("ELASTIC_GO", str(go))
    job = on_ray(cluster, *OF_TASK)
    wait_for(lambda: len(list(tmp_path.glob("reading-*"))) == 3, job)
    cluster.replace_one()
    wait_for(lambda: len(list(tmp_path.glob("reading-*"))) == 6, job)
    go.touch()
    out, err = job.communicate(timeout=500)
    assert job.returncode == 0, err
    assert "host 127.0.0.1 is gone, and rank " in err
    result = json.loads(out)
    assert (result["steps"], result["weights_sha256"]) == (303, undisturbed[1]["weights_sha256"])
    assert_nothing_is_left(cluster, tmp_path)


def test_each_worker_has_a_gpu_of_its_own(tmp_path):
    """GPUs that the test makes up, on a node that has two."""
    task = f"""
import os
from examples.digits import Digits

class Sees(Digits):
    def train_data(self):
        open(f"{tmp_path}/sees-{{os.getpid()}}", "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
        return super().train_data()
"""
    (tmp_path / "task.py").write_text(task)
    with nodes(num_cpus=2, num_gpus=2) as cluster:
        process = on_ray(cluster, "task.py:Sees", "--steps=2", "--track=off", "--json", workers="--workers=2")
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err
        assert json.loads(out)["replicas"] == 2
        assert sorted(path.read_text() for path in tmp_path.glob("sees-*")) == ["0", "1"]
        many = on_ray(cluster, "task.py:Sees", "--start-timeout=2")
        out, err = many.communicate(timeout=300)
        assert (many.returncode, out) == (2, "")
        message = err.splitlines()[-1]
        assert "no room for 3 workers with 1 CPU and 1 GPU each within 2 s (--start-timeout): the cluster " in message
        assert "2 GPU (2 free); start fewer workers, or add nodes" in message


def last_of(events):
    """The last change of an elastic job's workers."""
    return [event for event in events if event.startswith("worker_")][-1]


def events(runs):
    """What the journal of the only run has noted."""
    text = "".join(path.read_text() for path in runs.glob("*/journal.jsonl"))
    return [json.loads(line)["event"] for line in text.splitlines()]


def test_a_sweep_through_the_loss_of_a_node_and_of_itself(cluster, tmp_path):
    assert "going on" in through_kills(cluster, tmp_path, 4)  # 24 in tests.campaigns.ray_sweep


def test_one_worker_is_stopped_and_goes_on_to_the_weights_of_a_run_here(cluster, tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK)
    go = tmp_path / "go"
    monkeypatch.setenv("ELASTIC_GO", str(go))
    options = ["task.py:Held", *OPTIONS, "--epochs=1", "--checkpoint-every=9"]
    stopped = on_ray(cluster, *options, workers="--workers=1")
    wait_for(lambda: [*tmp_path.glob("runs/*/checkpoints/step-00000009")], stopped)
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=500)
    assert stopped.returncode == 75, err
    found = json.loads(out)
    assert found["backend"] == "single"
    assert found["steps"] < 101
    assert_nothing_is_left(cluster, tmp_path)

    go.touch()
    there = on_ray(cluster, *options, f"--run-dir={found['run_dir']}", workers="--workers=1")
    here = tfloop("train", *options, "--run-dir=local")
    out, err = there.communicate(timeout=500)
    assert there.returncode == 0, err
    assert json.loads(out)["weights_sha256"] == json.loads(here.stdout)["weights_sha256"]


def test_fit_is_called_from_a_ray_program(cluster, tmp_path, quiet):
    program = ROOT / "examples" / "cluster" / "ray_program.py"
    own = {"PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    command = [sys.executable, str(program), cluster.address]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("learning rate ")]
    result = fit(Digits(learning_rate=1e-2), epochs=3, seed=1, callbacks=quiet())
    assert lines[1] == f"learning rate 0.01: accuracy {result.metrics['eval_accuracy']:.4f}"
    assert len(lines) == 3


def test_what_does_not_fit_the_cluster_is_said_before_anything_starts(cluster, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "task.py").write_text(TASK)
    many = on_ray(cluster, "digits", "--cpus-per-worker=2", "--start-timeout=2")
    out, err = many.communicate(timeout=300)
    assert (many.returncode, out) == (2, "")
    assert "no room for 3 workers with 2 CPU each within 2 s (--start-timeout): the cluster has 3 CPU" in err
    outside = on_ray(cluster, "../task.py:Held", cwd=tmp_path / "inner")
    out, err = outside.communicate(timeout=300)
    assert (outside.returncode, out) == (2, "")
    assert "127.0.0.1: has no ../task.py:Held: Ray brings only what is in " in err.splitlines()[-1]
    assert_nothing_is_left(cluster, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_paths_of_runs_begin_where_the_command_was_typed(tmp_path, monkeypatch):
    """Workers on a cluster run in a copy of that directory."""
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv(files.LAUNCH_DIRECTORY, str(tmp_path))
    assert default_uri() == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert files.absolute_sqlite("sqlite:///own.db") == f"sqlite:///{tmp_path}/own.db"
    assert files.launch_path("/there") == Path("/there")
    assert files.original_path(tmp_path / "copy" / "task.py") == tmp_path / "task.py"
    assert files.original_path(tmp_path / "task.py") == tmp_path / "task.py"


def test_an_address_whose_host_is_no_host_name_is_refused():
    with pytest.raises(UsageError, match=r"--address a\.\.b:1: no Ray cluster there"):
        ray_options.check_address("a..b:1")


def test_no_cluster(tmp_path):
    [port] = machine.free_ports(1)
    done = tfloop("train", "digits", "--workers=2", "--launcher=ray", f"--address=127.0.0.2:{port}")
    assert done.returncode == 2
    assert f"--address 127.0.0.2:{port}: no Ray cluster there (" in done.stderr.splitlines()[-1]


def test_no_answer(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = tfloop("train", "digits", "--launcher=ray", f"--address={address}", "--start-timeout=2")
    assert done.returncode == 2
    message = done.stderr.splitlines()[-1]
    assert f"--address {address}: no answer within 2 s (--start-timeout); if it asks for a token, set " in message


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(cli.app, ["train", "digits", "--launcher=ray", "--workers=2"])
    assert isinstance(done.exception, UsageError)
    assert "pip install 'tfloop[ray]'" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--launcher", "slurm"], "--launcher slurm: give ray; without it"),
        (["--launcher", "ray", "--workers", "2", "--backend", "mirrored"], "use horovod or multiworker"),
        (["--launcher", "ray", "--workers", "2", "--backend", "single"], "use horovod or multiworker"),
        (["--launcher", "ray", "--hosts", "a,b"], "--launcher ray with --hosts a,b: leave one of them out"),
        (["--launcher", "ray", "--workers", "2", "--cpus-per-worker", "0"], "--cpus-per-worker 0: give a whole number"),
        (["--launcher", "ray", "--workers", "2", "--placement", "near"], "--placement near: give pack or spread"),
        (["--launcher", "ray", "--workers", "2", "--address", "ray://h:1"], "--address ray://h:1: give HOST:PORT"),
        (["--address", "auto"], "--address auto is of use with --launcher ray alone"),
        (["--cpus-per-worker", "2"], "--cpus-per-worker 2 is of use with --launcher ray alone"),
    ],
)
def test_bad_options(arguments, message):
    done = CliRunner().invoke(cli.app, ["train", "digits", *arguments])
    assert isinstance(done.exception, UsageError), done
    assert message in str(done.exception)
