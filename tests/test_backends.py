"""Every engine passes one conformance suite: in this process, or in real workers."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf

from loop import UsageError, backends, launch
from tests import conformance
from tests.conftest import ROOT, needs_horovod


@pytest.mark.parametrize("check", conformance.CHECKS)
@pytest.mark.parametrize(("name", "replicas"), [("single", None), ("mirrored", 2), ("mirrored", 3)])
def test_in_one_process(name, replicas, check):
    conformance.CHECKS[check](backends.create(name, replicas))


def passed(output):
    return [
        line.split("]<stdout>:")[-1].split(" ok")[0].lstrip() for line in output.splitlines() if line.endswith(" ok")
    ]


@needs_horovod
def test_horovod_in_three_workers():
    command = [sys.executable, str(ROOT / "tests" / "conformance.py"), "horovod"]
    done = subprocess.run(
        [sys.executable, "-m", "loop.horovodrun", "3", *command], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(passed(done.stdout)) == sorted(3 * list(conformance.CHECKS))


def test_multiworker_in_two_workers():
    addresses = [f"127.0.0.1:{port}" for port in launch.free_ports(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "conformance.py"), "multiworker"],
            env={
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=240) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    for stdout, _ in outputs:
        assert passed(stdout) == list(conformance.CHECKS)


def test_more_replicas_than_devices_are_refused():
    with pytest.raises(UsageError, match="mirrored with 9 replicas, but TensorFlow has already started with 4"):
        backends.create("mirrored", 9)


def test_unknown_backend_is_refused():
    with pytest.raises(UsageError, match="there is no backend 'nccl'"):
        backends.create("nccl")


def test_one_fused_collective_a_step():
    """The graph of a two-replica step adds up one flat tensor, not one for each variable."""
    backend = backends.create("mirrored", 2)

    @tf.function
    def step():
        return backend.run(lambda: backend.all_reduce([tf.ones([3]), tf.ones([2, 2]), tf.ones([])]))

    additions = [op for op in step.get_concrete_function().graph.get_operations() if op.type in ("AddN", "AddV2")]
    assert len(additions) == 1
