"""Every engine passes one conformance suite: here in one process, in `test_same_numbers` in real workers."""

import pytest
import tensorflow as tf

from loop import UsageError, backends
from tests import conformance


@pytest.mark.parametrize("check", conformance.CHECKS)
@pytest.mark.parametrize(("name", "replicas"), [("single", None), ("mirrored", 2), ("mirrored", 3)])
def test_in_one_process(name, replicas, check):
    conformance.CHECKS[check](backends.create(name, replicas))


def test_more_replicas_than_devices_are_refused():
    with pytest.raises(UsageError, match="mirrored with 9 replicas, but TensorFlow has already started with 4"):
        backends.create("mirrored", 9)


def test_unknown_backend_is_refused():
    with pytest.raises(UsageError, match="there is no backend 'nccl'"):
        backends.create("nccl")


@pytest.mark.parametrize("name", ["multiworker", "parameter_server"])
def test_workers_without_a_place_are_refused(name):
    with pytest.raises(UsageError, match=f"backend='{name}' without TF_CONFIG"):
        backends.create(name)


def test_one_fused_collective_a_step():
    """The graph of a two-replica step adds up one flat tensor, not one for each variable."""
    backend = backends.create("mirrored", 2)

    @tf.function
    def step():
        return backend.run(lambda: backend.all_reduce([tf.ones([3]), tf.ones([2, 2]), tf.ones([])]))

    additions = [op for op in step.get_concrete_function().graph.get_operations() if op.type in ("AddN", "AddV2")]
    assert len(additions) == 1
