"""What travels between replicas: groups, compression; and the model that predicts how it scales."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling
from loop import UsageError, fit
from loop.backends import create
from loop.step.communication import average, check, reduced, split
from loop.step.gradients import are_finite
from tests.exactness import SETTINGS, by_hand, largest_difference, trained, weights_of
from tests.tasks import Plain


@given(sizes=st.lists(st.integers(0, 10**9), min_size=1, max_size=50), groups=st.integers(1, 60))
def test_groups_hold_each_tensor_once_from_the_last_to_the_first(sizes, groups):
    found = split(sizes, groups)
    assert [place for group in found for place in group] == list(reversed(range(len(sizes))))
    assert all(found)
    assert len(found) <= groups
    if sum(sizes):
        # Beyond its part of the bytes, a group holds half a tensor at each end at most.
        assert all(sum(sizes[place] for place in group) <= sum(sizes) / groups + max(sizes) for group in found)


def test_a_large_first_layer_does_not_draw_in_those_behind_it():
    assert split([784 * 64, 64, 640, 10], 2) == [[3, 2, 1], [0]]


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_train_to_nearly_the_same_weights(compression):
    """Twelve steps, each off by a rounding of 2**-11 or 2**-8 for each of two replicas and their sum, at most."""
    found = trained(create("mirrored", 2), {}, {"compression": compression})
    weights, _ = by_hand({}, {}, **SETTINGS)
    off = largest_difference([variable.numpy() for variable in weights_of(found.model)], weights)
    assert 1e-6 < off < {"fp16": 12 * 3 * 2**-11, "bf16": 12 * 3 * 2**-8}[compression]


def test_one_replica_compresses_nothing():
    plain, compressed = (trained("single", {}, options) for options in ({}, {"compression": "fp16"}))
    assert plain.weights_sha256 == compressed.weights_sha256


@pytest.mark.parametrize(("scaled", "found"), [(False, 2e6), (True, math.inf)])
def test_gradients_of_a_sum_fit_into_float16(scaled, found):
    """Beyond 65504, divided by 8192 they aren't. With loss scaling they stay as they are: the scale sees to it."""
    backend = create("mirrored", 2)
    options = {"compression": "fp16", "headroom": 1 if scaled else 5000}
    gradient, sums = [tf.fill([3], 1e6)], tf.ones([3])
    step = tf.function(lambda: backend.run(lambda: reduced(backend, gradient, sums, **options)))
    np.testing.assert_allclose(backend.first(step())[0][0], 3 * [found], rtol=2 * 2**-11)


def test_a_resumed_run_keeps_its_compression(tmp_path, quiet):
    settings = {"run_dir": tmp_path / "run", "batch_size": 20, "backend": create("mirrored", 2)}
    fit(Plain(), epochs=1, compression="fp16", callbacks=quiet(), **settings)
    with pytest.raises(UsageError, match="compression"):
        fit(Plain(), epochs=2, callbacks=quiet(), **settings)


def test_what_an_engine_cannot_send_is_refused():
    backend = create("mirrored", 2)
    backend.cannot_send = {"bf16": "because of this"}
    with pytest.raises(UsageError, match="compression='bf16' with backend='mirrored': because of this"):
        check(backend, "bf16")
    check(create("single"), "bf16")


networks = st.builds(scaling.Network, st.floats(0, 1e-3), st.floats(0, 1e-6))
workloads = st.builds(scaling.Workload, st.floats(1, 1e10), st.floats(1e-5, 10))


@given(workload=workloads, network=networks, steps=st.integers(1, 11))
def test_efficiency_falls_with_replicas_and_rises_with_overlap_and_compression(workload, network, steps):
    near, far = (scaling.predicted(workload, network, 2**k) for k in (steps, steps + 1))
    for way, found in near.items():
        assert 0 < far[way] <= found <= 1
    for found in (near, far):
        assert found["ring, overlap"] >= found["ring"]
        assert found["better of both, overlap"] >= max(found["ring, overlap"], found["tree"])
        assert found["better of both, overlap, 16 bits"] >= found["better of both, overlap"]
        assert found["better of both, overlap, 16 bits"] >= found["better of both, 16 bits"]


@given(replicas=st.integers(2, 5000), size=st.floats(1, 1e12))
def test_times_are_latencies_and_volumes(replicas, size):
    """Counted message by message: in each of 2 (p - 1) rounds a member of the ring sends a p-th."""
    assert scaling.ring(replicas, size, scaling.Network(1.0, 0.0)) == 2 * (replicas - 1)
    volume = math.fsum([size / replicas] * (2 * (replicas - 1)))
    assert scaling.ring(replicas, size, scaling.Network(0.0, 1.0)) == pytest.approx(volume)
    rounds = 2 * (replicas - 1).bit_length()
    assert scaling.tree(replicas, size, scaling.Network(1.0, 1.0)) == pytest.approx(rounds * (1 + size))


@given(network=st.builds(scaling.Network, st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-7)))
def test_the_fit_finds_latency_and_bandwidth_again(network):
    cases = [(p, size) for p in scaling.PROCESSES for size in scaling.FITTED]
    found = scaling.fit([(p, size, scaling.ring(p, size, network)) for p, size in cases])
    np.testing.assert_allclose([found.alpha, found.beta], [network.alpha, network.beta], rtol=1e-6)


def test_complex_gradients_keep_their_imaginary_parts():
    backend = create("mirrored", 2)

    def in_replica():
        own = [tf.constant([1 + 2j, 3 - 4j]), tf.constant([0.5])]
        gradients, _ = reduced(backend, own, tf.ones([1]), compression="fp16", headroom=8)
        return gradients

    number, real = backend.first(tf.function(lambda: backend.run(in_replica))())
    assert number.numpy().tolist() == [2 + 4j, 6 - 8j]
    assert real.numpy().tolist() == [1.0]
    finite = are_finite(tf.constant(1.0), {0: number, 1: tf.constant([complex(0, np.nan)])}, [0, 1])
    assert finite.numpy().tolist() == [True, True, False]


def test_averages_of_complex_and_of_truth_values():
    backend = create("mirrored", 2)
    with backend.scope():
        number = tf.Variable([0j], trainable=False)
        truth = tf.Variable([False], trainable=False)
    backend.set_local_values(number, [np.array([2 + 4j], "complex64"), np.array([4 + 0j], "complex64")])
    backend.set_local_values(truth, [np.array([True]), np.array([False])])
    tf.function(lambda: backend.run(lambda variables: average(backend, variables), [number, truth]))()
    assert np.stack(backend.local_values(number)).tolist() == [[3 + 2j]] * 2
    assert np.stack(backend.local_values(truth)).tolist() == [[True]] * 2
