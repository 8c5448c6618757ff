"""Devices, memory growth and threads are set before the task is loaded; GPUs are made up, since there is none."""

import json
import os
import socket
import subprocess
import sys

import pytest
import tensorflow as tf

from loop import UsageError, backends
from loop.backends import devices
from loop.launch import machine, schedulers
from loop.launch.backend_choice import choose_backend
from loop.launch.fixed_job import run_job
from tests.conftest import ROOT
from tests.gpus import Machine

EARLY = '''
from dataclasses import dataclass
import keras
import numpy as np
import tensorflow as tf
from loop import ArrayData, TrainTask, UsageError

ACCURACY = keras.metrics.SparseCategoricalAccuracy()
ROWS = tf.data.Dataset.range(3)
LOOKUP = keras.layers.StringLookup(vocabulary=["a", "b"])
ROOT_OF = tf.function(tf.sqrt)


@dataclass
class Early(TrainTask):
    """Uses TensorFlow when its module is imported, and when it is made."""
    broken: bool = False
    calls_python: bool = False
    calls_function: bool = False

    def __post_init__(self):
        self.texts = keras.layers.TextVectorization()
        self.texts.adapt(["one two", "two three"])
        self.mean = keras.metrics.Mean()

    def build_model(self):
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.01)

    def train_data(self):
        if self.broken:
            raise UsageError("its data was asked for")
        return ArrayData(np.linspace(-1, 1, 30, dtype="float32").reshape(10, 3), np.ones((10, 1), "float32"))

    def eval_data(self):
        return self.train_data()

    def compute(self, model, batch, training):
        rows, targets = batch
        losses = tf.reduce_sum((model(rows, training=training) - targets) ** 2, -1)
        if self.calls_python:
            losses += tf.ensure_shape(tf.numpy_function(np.sqrt, [tf.stop_gradient(losses)], tf.float32), [None])
        if self.calls_function:
            losses += tf.ensure_shape(tf.py_function(ROOT_OF, [tf.stop_gradient(losses)], tf.float32), [None])
        return {"loss": losses}
'''
COMMANDS = """
import json, os, sys
import cli
if cores := int(sys.argv[2]):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["tfloop", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
"""


def commands(directory, *each, cores=0):
    """Runs commands in one new process, on so many cores or on all; its exit code, stdout and stderr."""
    (directory / "early.py").write_text(EARLY)
    done = subprocess.run(
        [sys.executable, "-P", "-X", "warm", "-c", COMMANDS, json.dumps(each), str(cores)],
        cwd=directory, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_task_may_use_tensorflow_before_it_is_trained(tmp_path):
    common = ["early.py:Early", "--batch-size", "4", "--backend"]
    train = ["--workers", "2", "--track", "off", "--json", "--threads", "2"]
    code, out, err = commands(
        tmp_path,
        ["train", *common, "mirrored", *train, "--run-dir", "run"],
        ["train", *common, "central", *train],
        ["evaluate", "run", "--backend", "mirrored", "--workers", "2", "--json"],
    )
    assert code == 0, err
    mirrored, central, evaluated = map(json.loads, out.splitlines())
    assert (mirrored["replicas"], central["replicas"]) == (2, 2)
    assert central["metrics"]["loss"] == pytest.approx(mirrored["metrics"]["loss"], rel=1e-6)
    assert evaluated["eval_loss"] == pytest.approx(mirrored["metrics"]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_python_in_a_step_of_one_thread_is_warned_of(threads, tmp_path):
    """A second thread would run a `tf.function` that this Python calls."""
    train = ["train", "early.py:Early", "--batch-size", "4", "--track", "off", "--set", "calls_python=true"]
    code, _, err = commands(tmp_path, [*train, "--run-dir", "run", "--threads", str(threads)])
    assert code == 0, err
    assert err.count("the step calls Python in its graph (PyFunc), and TensorFlow has one thread") == (threads == 1)
    about = json.loads((tmp_path / "run" / "run.json").read_text())["machine"]
    assert about["intra_op_threads"] == threads
    decided = threads == 1 or threads > about["cpus"]
    assert about["inter_op_threads"] == (threads if decided else 0)  # 0: TensorFlow decides


def test_python_in_a_step_may_call_a_function_of_tensorflow_if_it_has_two_threads_on_one_core(tmp_path):
    """With one thread, both wait for each other without end, and the command reaches its time limit."""
    train = ["train", "early.py:Early", "--batch-size", "4", "--track", "off", "--set", "calls_function=true"]
    code, _, err = commands(tmp_path, [*train, "--threads", "2"], cores=1)
    assert code == 0, err
    assert "calls Python" not in err


def test_such_a_task_is_verified(tmp_path):
    """The devices are there before the task is: it ends where its data is asked for."""
    arguments = ["verify", "early.py:Early", "--no-processes", "--set", "broken=true"]
    code, _, err = commands(tmp_path, arguments)
    assert (code, err.splitlines()[-1]) == (2, "tfloop: error: its data was asked for")


def test_each_worker_has_a_gpu_of_its_own_or_none(monkeypatch):
    machine = Machine(monkeypatch, 2)
    monkeypatch.setenv("TFLOOP_LOCAL_RANK", "1")
    devices.prepare("multiworker", 4)
    assert machine.visible == machine.all[1:]
    assert machine.done == [(machine.all[1], True)]
    assert devices.use_gpus(devices.local_rank()) == machine.all[1:]  # as the backend asks for it later
    machine = Machine(monkeypatch, 2)
    with pytest.raises(UsageError, match=r"worker 3 on this machine, but only 2 GPUs, .* at most 2, .*CUDA_VISIBLE"):
        devices.use_gpus(2)
    machine = Machine(monkeypatch, 1)  # the launcher has given each worker its own
    assert devices.use_gpus(3) == machine.all


@pytest.mark.parametrize(
    ("backend", "variables", "typed", "threads", "at_once"),
    [
        ("horovod", {"TFLOOP_LOCAL_SIZE": "3"}, None, 2, None),
        ("multiworker", {"TFLOOP_LOCAL_SIZE": "20"}, None, 1, 1),
        ("multiworker", {"TFLOOP_LOCAL_SIZE": "3"}, 5, 5, None),
        ("horovod", {"TFLOOP_LOCAL_SIZE": "1"}, None, None, None),
        ("horovod", {"HOROVOD_LOCAL_SIZE": "3"}, None, None, None),  # of another launcher, which may have bound it
        ("horovod", {"TFLOOP_LOCAL_SIZE": "3", "TF_NUM_INTRAOP_THREADS": "4"}, None, None, None),
        ("horovod", {"TFLOOP_LOCAL_SIZE": "20", "TF_NUM_INTEROP_THREADS": "4"}, None, 1, None),
        ("single", {"TFLOOP_LOCAL_SIZE": "3"}, None, None, None),
        ("single", {}, 1, 1, 1),
        ("single", {}, 8, 8, None),
        ("single", {}, 9, 9, 9),  # more than cores
        ("mirrored", {}, 1, 1, None),  # its replicas compute at the same time
    ],
    ids=str,
)
def test_workers_of_one_machine_share_its_cores(backend, variables, typed, threads, at_once, monkeypatch):
    found = {"intra": None, "inter": None}
    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    for kind in found:
        name = f"set_{kind}_op_parallelism_threads"
        monkeypatch.setattr(tf.config.threading, name, lambda count, kind=kind: found.update({kind: count}))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    devices.prepare(backend, 3, threads=typed)
    assert found == {"intra": threads, "inter": at_once}


@pytest.mark.parametrize(
    ("set_here", "variable", "expected"), [(2, "5", 2), (0, "5", 5), (0, "many", 8), (0, "0", 8), (0, None, 8)]
)
def test_the_operations_that_a_graph_runs_at_a_time(set_here, variable, expected, monkeypatch):
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: set_here)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    monkeypatch.delenv("TF_NUM_INTEROP_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("TF_NUM_INTEROP_THREADS", variable)
    assert devices.graph_threads() == expected


def test_workers_with_gpus_have_all_threads(monkeypatch):
    monkeypatch.setenv("TFLOOP_LOCAL_SIZE", "2")
    Machine(monkeypatch, 2)
    monkeypatch.setattr(tf.config.threading, "set_intra_op_parallelism_threads", pytest.fail)
    devices.prepare("horovod", 2)


def test_workers_that_have_the_same_gpu_are_refused():
    devices.refuse_sharing([0, 0, 0])  # no GPUs
    devices.refuse_sharing([5, 0, 7])
    with pytest.raises(UsageError, match="ranks 0 and 2 have the same GPU: start at most one worker for each"):
        devices.refuse_sharing([5, 7, 5])


def test_what_comes_too_late_is_told_with_the_lines_to_write(monkeypatch):
    tf.constant(0)  # TensorFlow has started with the four devices of the tests
    machine = Machine(monkeypatch, 2, started=True)
    lines = r"write this before anything uses TensorFlow .*\n    for gpu in .*\n        tf.config.*set_memory_growth\("
    with pytest.warns(UserWarning, match=lines) as warned:
        assert devices.use_gpus() == machine.all
    assert len(warned) == 1
    with pytest.raises(UsageError, match=r"\n    gpus = .*\n    tf.config.set_visible_devices\(gpus\[1\], \"GPU\"\)"):
        devices.use_gpus(1)
    with pytest.raises(UsageError, match=r"\n    cpu = .*\n    tf.config.set_logical_device_configuration\(cpu, .*9\)"):
        devices.logical_cpus(9)


def test_a_program_that_makes_the_multiworker_backend_too_late_is_told_how(monkeypatch):
    tf.constant(0)
    ports = machine.free_ports(2)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    lines = r"must start before anything else uses TensorFlow: .*\n    from loop import backends\n    backend = "
    with socket.create_server(("127.0.0.1", ports[1])), pytest.raises(UsageError, match=lines):
        backends.create("multiworker")


@pytest.mark.parametrize(
    ("gpus", "where"),
    [
        (0, "3 logical CPU devices"),
        (1, "3 logical CPU devices, since this machine has 1 GPU and 3 replicas need as many"),
        (2, "3 logical CPU devices, since this machine has 2 GPUs and 3 replicas need as many"),
        (3, "3 GPUs"),
    ],
)
def test_runs_are_compared_on_devices_of_one_kind(gpus, where, monkeypatch):
    machine = Machine(monkeypatch, gpus)
    assert devices.alike(3) == where
    assert len(machine.visible) == (3 if gpus == 3 else 0)


def test_gpus_that_tensorflow_cannot_load_are_named_unless_they_are_hidden(monkeypatch, recwarn):
    monkeypatch.setattr(machine, "count_gpus", lambda: 2)
    with pytest.warns(UserWarning, match=r"this machine has 2 GPUs, which TensorFlow can't load"):
        devices.prepare()
    Machine(monkeypatch, 2)
    devices.prepare()
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)  # CUDA_VISIBLE_DEVICES=-1
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    devices._warn_of_unused_gpus()
    assert not recwarn.list


def test_more_workers_than_gpus_are_refused_before_they_start(monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: 2)
    with pytest.raises(UsageError, match=r"3 workers \(--workers\), but only 2 GPUs, .* start at most 2"):
        run_job("multiworker", 3, ["train", "digits"])
    machine.check_gpus(2)


@pytest.mark.parametrize(
    ("gpus", "nccl", "backend", "why"),
    [
        (0, False, "horovod", "it is installed"),
        (2, True, "horovod", "it is installed"),
        (2, False, "multiworker", "Horovod is built without NCCL, so that gradients between GPUs would go through"),
    ],
)
def test_auto_takes_no_horovod_that_sends_gradients_of_gpus_through_the_cpu(gpus, nccl, backend, why, monkeypatch):
    monkeypatch.setattr(machine, "horovod_missing", lambda: None)
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "horovod_built_with", lambda name: name == machine.MPI or nccl)
    chosen, reason = choose_backend("auto", 2, {})
    assert chosen == backend
    assert reason.startswith(why)
    monkeypatch.setenv("TFLOOP_PORT_BASE", "5000")
    mpirun = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(
        ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "1212", strict=True)}  # fmt: skip
    place = schedulers.place("auto", mpirun | {"TFLOOP_PORT_BASE": "5000"})
    assert ("HOROVOD_RANK" in place) == (backend == "horovod")
    assert ("TF_CONFIG" in place) == (backend == "multiworker")


def test_horovods_library_is_looked_into(monkeypatch, tmp_path):
    library = tmp_path / "mpi_lib.so"
    monkeypatch.setattr(machine, "horovod_libraries", lambda: [library])
    library.write_bytes(b"horovod_nccl_built\0libmpi.so.40\0")
    assert machine.horovod_built_with(machine.MPI)
    assert not machine.horovod_built_with(machine.NCCL)
    library.write_bytes(b"horovod_nccl_built\0ncclAllReduce\0")
    assert machine.horovod_built_with(machine.NCCL)


def test_a_horovod_whose_mpi_is_gone_is_none(monkeypatch, tmp_path):
    """Such as one that was built on another machine: without a word it would fail when it is loaded."""
    library = tmp_path / "mpi_lib.so"
    monkeypatch.setattr(machine, "horovod_libraries", lambda: [library])
    library.write_bytes(b"gloo\0")
    assert machine.horovod_missing() is None
    library.write_bytes(b"gloo\0libmpi_cxx.so.40\0libmpi.so.4711\0")
    assert "is built with MPI, whose library libmpi.so.4711 can't be loaded" in machine.horovod_missing()
