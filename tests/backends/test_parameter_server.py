"""The engine `parameter_server` in real processes: what it keeps exact, killed workers, a killed parameter server.

`python tests/backends/test_parameter_server.py OUT PARTITION CASE...` is the chief of a job: it runs the conformance
suite if there are several cases, and trains them into `OUT`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import callbacks
from loop import UsageError, fit
from loop.backends.parameter_server import _partitioner, answers
from loop.launch import machine
from loop.launch.backend_choice import choose_backend
from loop.launch.environment import read_tf_config, tf_cluster
from loop.options import read_partition
from loop.target import task_loader
from tests import conformance
from tests.conftest import ROOT, TFLOOP, tfloop
from tests.exactness import SETTINGS, Prime, by_hand, largest_difference, weights_of

JOB = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
CASES = {
    "judged": ({"judged": True}, {"clip_norm": 0.02, "accumulate": 3}),
    "batch_norm": ({"batch_norm": True}, {}),
}
"""What one worker trains: fields of the task, and options of `fit`."""


def config(cluster, job="chief", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def test_its_job_is_known_by_its_parameter_servers():
    assert choose_backend("auto", None, {"TF_CONFIG": config(JOB)})[0] == "parameter_server"
    ranks = [read_tf_config(config(JOB, *task)) for task in (("chief", 0), ("worker", 1), ("ps", 0))]
    assert ranks == [(0, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize(
    ("backend", "cluster", "message"),
    [
        ("parameter_server", JOB | {"ps": []}, "has 1 chief, 2 worker and 0 ps, but a parameter_server job has"),
        ("parameter_server", JOB | {"chief": []}, "has 0 chief, 2 worker and 1 ps, but"),
        ("auto", JOB | {"chief": []}, "has 0 chief, 2 worker and 1 ps, but"),
        ("parameter_server", JOB | {"worker": []}, "has 1 chief, 0 worker and 1 ps, but"),
        ("auto", JOB | {"ps": [f"e:{port}" for port in range(1, 66)]}, "65 parameter servers .*: give 1 to 64"),
        ("multiworker", JOB, "has 1 ps .* ask for backend='parameter_server'"),
        ("parameter_server", None, "backend='parameter_server' without TF_CONFIG: start them with"),
    ],
)
def test_jobs_of_another_kind_are_refused(backend, cluster, message):
    task = next((job for job in ("chief", "worker") if (cluster or {}).get(job)), "chief")
    environment = {"TF_CONFIG": config(cluster, task)} if cluster else {}
    with pytest.raises(UsageError, match=message):
        choose_backend(backend, None, environment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ps", "0"], "0 parameter servers (--ps): give 1 to 64"),
        (["--ps", "65"], "65 parameter servers (--ps): give 1 to 64"),
        (
            ["--ps", "2", "--backend", "multiworker"],
            "--ps 2 with backend='multiworker', which has no parameter servers",
        ),
        (["--min-shard-bytes", "0"], "--min-shard-bytes 0: give a number >= 1"),
        (["--partition", "max:0"], "partition='max:0': give fixed:N shards, or min:SIZE or max:SIZE of a shard"),
        (["--partition", "max:1MB", "--backend", "multiworker"], "--partition max:1MB: give it with --backend param"),
        (["--partition", "fixed:2", "--min-shard-bytes", "9"], "--partition fixed:2: give it with --backend param"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    done = tfloop("train", "digits", "--workers", 2, "--backend", "parameter_server", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "read"),
    [("fixed:3", ("fixed", 3)), ("min:40", ("min", 40)), ("max:1.5kb", ("max", 1500)), ("min:64MiB", ("min", 2**26))],
)
def test_partitions_are_read(text, read):
    assert read_partition(text) == read


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0", "fixed:1MB", "min:", "max:-1", "rows:3", "min:2x", "max:1.5"])
def test_partitions_that_mean_nothing_are_refused(text):
    with pytest.raises(UsageError, match=f"partition='{text}': give fixed:N shards"):
        read_partition(text)


FAILING = """
import faulthandler, json, os, socket, sys, threading
from loop.backends.parameter_server import ParameterServer

def serve():
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=lambda: [server.accept() for _ in range(99)], daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"

cluster = {"chief": ["127.0.0.1:1", serve()], "worker": [serve()], "ps": [serve()]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
timers = []
start, cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
faulthandler.dump_traceback_later = lambda *given, **named: (timers.append("started"), start(*given, **named))
faulthandler.cancel_dump_traceback_later = lambda: (timers.append("ended"), cancel())
try:
    ParameterServer()
except ValueError as error:
    sys.exit(0 if "at most one 'chief'" in str(error) and timers == ["started", "ended"] else f"{timers}: {error}")
sys.exit("it has started")
"""


def test_a_start_that_fails_leaves_no_timer_that_ends_the_process():
    """Such as that of a notebook: it was ended when the start timeout was over."""
    done = subprocess.run(
        [sys.executable, "-X", "warm", "-c", FAILING],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def in_servers(directory, partition, cases):
    """Trains cases in a job of a chief, a worker and two parameter servers; what the chief has printed."""
    ports = machine.free_ports(4)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}
    serve = [*TFLOOP, "train", "digits"]
    chief = [sys.executable, "-X", "warm", str(Path(__file__)), str(directory), partition, *cases]
    tasks = [(chief, "chief", 0), (serve, "worker", 0), (serve, "ps", 0), (serve, "ps", 1)]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "TF_CONFIG": config(cluster, job, index), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, job, index in tasks
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], outputs
    for case in cases:
        fields, options = CASES[case]
        expected, _ = by_hand({**fields, "dtype": "float32"}, options, **SETTINGS)
        with np.load(directory / f"{case}.npz") as found:
            assert largest_difference(list(found.values()), expected) <= 1e-5, case
    return outputs[0][0]


def test_partitions_are_those_of_tensorflow():
    shapes = [tf.TensorShape([5, 4]), tf.TensorShape([4]), tf.TensorShape([1])]
    shards = {"fixed:2": [2, 2, 1], "min:40": [2, 1, 1], "max:40": [3, 1, 1]}
    for text, expected in shards.items():
        cut = _partitioner(text, 2)
        assert [cut(shape, tf.float32)[0] for shape in shapes] == expected
    assert _partitioner(None, 2) is None
    assert _partitioner(cut, 2) is cut


def test_variables_are_cut_as_asked_for(tmp_path):
    assert "shards [3, 1, 1, 1]" in in_servers(tmp_path, "max:40", ["judged"])


def test_one_worker_is_exact_and_its_checkpoint_is_any_engines(tmp_path):
    """Joined through TF_CONFIG. Steps of one worker are made in their order; variables are in shards."""
    printed = in_servers(tmp_path, "min:40", CASES)
    assert [line.split()[0] for line in printed.splitlines() if line.endswith(" ok")] == list(conformance.CHECKS)
    assert "shards [2, 1, 1, 1, 1, 1]" in printed
    quiet = callbacks.standard(mlflow=None, progress=None, checkpoint=None, journal=None)
    fields, options = CASES["judged"]
    settings = {**SETTINGS, "epochs": 3}
    went_on = fit(Prime(**fields), resume=tmp_path / "judged", callbacks=quiet, **settings, **options)
    assert (went_on.backend, went_on.steps) == ("single", 18)
    expected, _ = by_hand({**fields, "dtype": "float32"}, options, **settings)
    assert largest_difference([each.numpy() for each in weights_of(went_on.model)], expected) <= 1e-5


def wait_for(what, process, seconds=240):
    """What `what` returns, as soon as it is true; the job must live until then."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


HELD = """
import pathlib, time
from callbacks import Callback
from digits import Digits

class Hold(Callback):
    def on_epoch_start(self, run):
        while not pathlib.Path(f"epoch-{run.progress.epoch}").exists():
            time.sleep(0.05)

class Held(Digits):  # no epoch begins before its file is there
    def build_callbacks(self):
        return [Hold()]
"""


def test_a_worker_that_is_killed_twice_costs_nothing_and_a_killed_server_is_named_with_the_checkpoint(tmp_path):
    (tmp_path / "digits.py").write_text(task_loader.shipped_path("digits").read_text())
    (tmp_path / "held.py").write_text(HELD)
    command = ["train", "held.py:Held", "--backend", "parameter_server", "--workers", 2, "--ps", 1, "--run-dir", "run"]
    # By steps: at the ends of epochs, how long the last one took would decide whether there is one.
    command += ["--track", "off", "--json", "--checkpoint-every", 45]
    with (tmp_path / "stderr").open("w") as stderr:
        job = start(tmp_path, command, "--epochs", 6, stderr=stderr)

        def killed():
            return (tmp_path / "stderr").read_text().count("worker 0 ended without a word: killed by signal 9")

        for epoch in range(2):
            (tmp_path / f"epoch-{epoch}").touch()
            wait_for((tmp_path / "run" / "checkpoints" / f"step-{45 * (epoch + 1):08d}").exists, job)
            before = pid(tmp_path, 1)
            os.kill(before, signal.SIGKILL)
            wait_for(lambda epoch=epoch: killed() == epoch + 1, job)
            if not epoch:
                wait_for(lambda before=before: pid(tmp_path, 1) != before and serves(tmp_path, 1), job)
        for epoch in range(2, 7):
            (tmp_path / f"epoch-{epoch}").touch()
        out, _ = job.communicate(timeout=240)
    assert job.returncode == 0, (tmp_path / "stderr").read_text()
    result = json.loads(out)
    assert (result["status"], result["steps"], result["examples"]) == ("finished", 45 * 6, 1437 * 6)
    assert result["metrics"]["eval_accuracy"] >= 0.93

    (tmp_path / "epoch-6").unlink()
    with (tmp_path / "more").open("w") as stderr:
        job = start(tmp_path, command, "--epochs", 7, stderr=stderr)
        wait_for(lambda: "going on from step 270" in (tmp_path / "more").read_text(), job)
        os.kill(pid(tmp_path, 3), signal.SIGKILL)
        (tmp_path / "epoch-6").touch()
        job.communicate(timeout=240)
    told = (tmp_path / "more").read_text()
    assert job.returncode == 1
    [error] = [line for line in told.splitlines() if line.startswith("tfloop: error:")]
    assert re.search(r"chief 0: parameter server gone: ps 0 \(127\.0\.0\.1:\d+\), and the variables in it", error)
    assert f"to go on from {tmp_path / 'run' / 'checkpoints' / 'step-00000270'}" in error
    assert "Traceback" not in told


def start(directory, command, *more, stderr):
    environment = {**os.environ, "TMPDIR": str(directory)}
    return subprocess.Popen(
        [*TFLOOP, *map(str, [*command, *more])], cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=stderr,
        text=True,
    )  # fmt: skip


def pid(directory, rank):
    [place] = directory.glob("tfloop-*")
    return int((place / f"rank-{rank}.pid").read_text() or 0)


def serves(directory, rank):
    """Whether this process listens at its port."""
    variables = Path(f"/proc/{pid(directory, rank)}/environ").read_text().split("\0")
    [text] = [each.partition("=")[2] for each in variables if each.startswith("TF_CONFIG=")]
    return answers(list(tf_cluster(text)[1].values())[rank])


if __name__ == "__main__":
    from loop.backends.parameter_server import ParameterServer, shards

    out = Path(sys.argv[1])
    made = ParameterServer(sys.argv[2])
    cases = sys.argv[3:]
    for name, check in conformance.CHECKS.items() if len(cases) > 1 else ():
        check(made)
        print(name, "ok")
    for name in cases:
        fields, options = CASES[name]
        saving = callbacks.standard(mlflow=None, progress=None)
        trained = fit(Prime(**fields), backend=made, run_dir=out / name, callbacks=saving, **SETTINGS, **options)
        np.savez(out / f"{name}.npz", *(variable.numpy() for variable in weights_of(trained.model)))
    print("shards", [len(shards(variable.value)) for variable in trained.model.trainable_variables])
