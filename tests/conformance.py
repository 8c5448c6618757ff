"""What every engine must do, in the words of its interface. Runs within one process, or as the worker of a job.

`python tests/conformance.py horovod` under a launcher runs all checks in each worker; `test_backends.py` starts it.
"""

import functools
import os
import sys

import numpy as np
import pytest
import tensorflow as tf

from loop import ArrayData, TrainTask, UsageError, backends
from loop.data import open_data
from loop.options import BACKENDS, with_defaults
from loop.step import approximations, communication
from loop.step.build import build
from loop.step.train_step import TrainStep

TYPES = ("bfloat16", "float16", "int8", "uint8", "int16", "uint16", "uint32", "uint64", "complex64", "complex128")
"""Types of numbers that not all collectives take."""


def check_ranks(backend):
    assert 0 <= backend.rank < backend.workers
    assert backend.replicas == backend.workers * backend.local_replicas
    assert backend.is_chief == (backend.rank == 0)
    ranks = backend.exchange(backend.rank, 7)
    assert ranks.tolist() == [[rank, 7] for rank in range(backend.workers)]


def check_replica_numbers(backend):
    own = backend.run(lambda: tf.cast(backend.replica(), tf.int64))
    assert int(backend.first(own)) == backend.rank * backend.local_replicas

    # In a graph, as in training. Outside of one, Horovod makes one, and AutoGraph converts all of its functions first.
    @tf.function(autograph=False)
    def everyone():
        return backend.run(lambda: backend.all_reduce([tf.one_hot(backend.replica(), backend.replicas)])[0])

    assert backend.first(everyone()).numpy().tolist() == [1.0] * backend.replicas


def check_all_reduce_sums_all_dtypes_and_shapes_in_graph(backend):
    def reduced(factor):
        share = tf.cast(backend.replica(), tf.float32) + 1.0
        tensors = [tf.fill([2, 3], share * factor), tf.fill([], share), tf.fill([4], tf.cast(share, tf.float64))]
        return backend.all_reduce(tensors)

    def added(step, total):
        # Each step depends on the one before, as in training: TensorFlow would run them side by side otherwise.
        factor = tf.cast(step, tf.float32) + 0.0 * total[0, 0]
        return step + 1, total + backend.first(backend.run(reduced, factor))[0]

    @tf.function(autograph=False)
    def twice():
        _, total = tf.while_loop(lambda step, total: step < 3, added, [tf.constant(0), tf.zeros([2, 3])])
        return total, backend.first(backend.run(reduced, tf.constant(1.0)))

    n = backend.replicas
    total, (matrix, scalar, wide) = twice()
    whole = n * (n + 1) / 2
    np.testing.assert_array_equal(total, np.full([2, 3], 3 * whole))
    np.testing.assert_array_equal(matrix, np.full([2, 3], whole))
    assert scalar == whole
    assert wide.dtype == tf.float64
    assert wide.shape == [4]


def check_all_gather_gives_the_bits_of_all_replicas(backend):
    def values(replica):
        share = tf.cast(replica, tf.float32)
        large = tf.fill([1 << 18], share)  # a collective of its own
        return [tf.stack([share, np.float32(-0.0), np.inf]), large, tf.fill([2], tf.cast(share, tf.float64))]

    @tf.function(autograph=False)
    def gathered():
        return backend.run(lambda: backend.all_gather(values(backend.replica())))

    for found, *expected in zip(backend.first(gathered()), *map(values, range(backend.replicas)), strict=True):
        np.testing.assert_array_equal(found.numpy(), np.stack(expected))
        assert np.signbit(found.numpy()).tolist() == np.signbit(np.stack(expected)).tolist()


def check_numbers_of_each_type_are_added_up_and_gathered(backend):
    def of(replica, name):
        numbers = tf.cast(tf.cast(replica, tf.int64) + [1, 3], name)
        return numbers * tf.constant(1 + 2j, name) if numbers.dtype.is_complex else numbers

    def in_replica():
        own = [of(backend.replica(), name) for name in TYPES]
        return backend.all_reduce([*own, own[-1][0]]), backend.all_gather(own)

    (*sums, scalar), tables = backend.first(tf.function(lambda: backend.run(in_replica), autograph=False)())
    for name, total, table in zip(TYPES, sums, tables, strict=True):
        rows = np.stack([of(replica, name).numpy() for replica in range(backend.replicas)])
        assert total.dtype == table.dtype == name
        assert table.numpy().tolist() == rows.tolist()
        assert total.numpy().tolist() == rows.sum(0).tolist()
    assert scalar == sums[-1][0]


def check_values_are_gathered_and_handed_out(backend):
    if backend.no_sharding():
        return  # no replica has a value of its own
    with backend.scope():
        variable = tf.Variable(tf.zeros([3, 2], tf.float64))
    first = backend.rank * backend.local_replicas
    backend.set_local_values(variable, [np.full([3, 2], first + own + 0.5) for own in range(backend.local_replicas)])
    gathered = backend.gather_values(variable)
    assert gathered.dtype == np.float64
    assert gathered.tolist() == [[[replica + 0.5] * 2] * 3 for replica in range(backend.replicas)]
    value = np.array([-0.0, np.nan, backend.rank], "float32") if backend.is_chief else None
    received = backend.broadcast_value(value, tf.TensorShape([3]), tf.float32)
    assert received.tobytes() == np.array([-0.0, np.nan, 0], "float32").tobytes()
    with backend.scope():
        short = tf.Variable(tf.zeros([2], tf.bfloat16))
    backend.set_local_values(short, [np.full([2], first + own, "bfloat16") for own in range(backend.local_replicas)])
    assert backend.gather_values(short).tolist() == [[replica] * 2 for replica in range(backend.replicas)]


def check_compression_is_within_its_bound(backend):
    """Each of p numbers is rounded once, and each of the p - 1 additions rounds once more, or to a denormal step."""
    shares = [np.random.default_rng(rank).normal(size=(3, 50)) * [[1e4], [1.0], [1e-5]] for rank in range(9)]
    own = tf.constant(np.stack(shares), tf.float32)

    def reduced(compression, scaled):
        headroom = 1 if scaled else 200  # a batch of 200
        gradients = tf.unstack(tf.gather(own, backend.replica()))
        sums = tf.constant([1.0 + 2**-20])
        return communication.reduced(backend, gradients, sums, compression=compression, groups=2, headroom=headroom)

    p = backend.replicas
    for name, digits, smallest in (("none", 24, 0.0), ("fp16", 11, 2.0**-24), ("bf16", 8, 2.0**-133)):
        if name in backend.cannot_send and p > 1:
            with pytest.raises(UsageError, match="don't take bfloat16; use fp16"):
                communication.check(backend, name)
            continue
        communication.check(backend, name)
        for scaled in (False, True):
            in_replica = functools.partial(backend.run, reduced, name, scaled)
            gradients, sums = backend.first(tf.function(in_replica, autograph=False)())
            digits = 24 if p == 1 else digits
            bound = ((1 + 2.0**-digits) ** p - 1) * np.abs(shares[:p]).sum(0) + p * smallest * (1 if scaled else 256)
            off = np.abs(np.stack(gradients).astype("float64") - np.sum(np.float32(shares[:p]), 0, "float64"))
            assert (off <= bound).all(), (name, scaled, (off / bound).max())
            assert (off.max() > 1e-2) == (name != "none" and p > 1)  # it did travel in 16 bits
            assert gradients[0].dtype == tf.float32
            assert sums.numpy() == np.float32(p * (1.0 + 2**-20))


def check_a_step_sends_its_gradients_in_as_many_collectives_as_asked_for(backend):
    """Read off the compiled step: 4 variables of 29 numbers in all, and 3 sums."""
    if backend.workers == 1:
        return  # an addition in one process: see `test_one_fused_collective_a_step`
    import keras

    class Small(TrainTask):
        def build_model(self):
            return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(1)])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def train_data(self):
            return ArrayData(np.ones((40, 5), "float32"))

        def compute(self, model, batch, training):
            return {"loss": tf.reduce_sum(model(batch, training=training) ** 2, -1)}

    found = {}
    for chosen in ({"accumulate": 2}, {"groups": 9}, {"compression": "fp16"}):
        options = with_defaults(Small(), {"batch_size": 20, **chosen}) | {"backend": backend.name}
        data = open_data(Small(), options)
        built = build(Small(), backend, "float32", data.train.example)
        step = TrainStep(Small(), built, backend, data.sharded(backend, "example"), options)
        numbers = [tf.constant(number, tf.int64) for number in (0, 0, 2)]
        compiled = step._train.get_concrete_function(step.data.train.start(0, 0), *numbers)
        found[str(chosen)] = communication.collectives(compiled)
    if backend.name not in BACKENDS and not any(found.values()):
        return  # a plug-in's own operation, which `communication.collectives` doesn't know
    gradients, sums = 29, 4  # numbers: examples, skipped steps, loss, weight
    expected = [[4 * (gradients + sums)], [4 * 20, 4 * (5 + sums), 4 * 4], [2 * gradients, 4 * sums]]
    assert [sorted(each, reverse=True) for each in found.values()] == expected, found


def check_adasum_is_the_adaptive_sum_or_refused(backend):
    """Of two vectors: a (1 - ab / 2aa) + b (1 - ab / 2bb), which is their sum where they are at right angles, and their
    mean where they are the same; of more, that of pairs."""
    options = with_defaults(TrainTask(), {"reduction": "adasum"})
    p = backend.replicas
    if p > 1 and (reason := backend.no_adasum()):
        with pytest.raises(UsageError, match=r"only Horovod can|without MPI|a power of 2"):
            approximations.check(backend, options, None)
        assert reason
        return
    approximations.check(backend, options, None)
    if p == 1:
        return
    shares = [np.random.default_rng(rank).normal(size=5) for rank in range(p)]
    gradients = tf.function(
        lambda: backend.run(
            lambda: backend.adasum([tf.gather(tf.constant(np.stack(shares)), backend.replica()), tf.ones([2])])
        ),
        autograph=False,
    )
    found, ones = backend.first(gradients())
    while len(shares) > 1:
        pairs = zip(shares[::2], shares[1::2], strict=True)
        shares = [a * (1 - a @ b / (2 * a @ a)) + b * (1 - a @ b / (2 * b @ b)) for a, b in pairs]
    np.testing.assert_allclose(found, shares[0], rtol=1e-12)
    np.testing.assert_allclose(ones, [1, 1], rtol=1e-6)


def check_apply_takes_gradients_as_they_are(backend):
    import keras

    with backend.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(model.trainable_variables)
    gradients = [tf.ones([2, 1]), tf.ones([1])]

    @tf.function(autograph=False)
    def step():
        backend.run(lambda: backend.apply(optimizer, gradients, model.trainable_variables))

    step()
    step()
    np.testing.assert_array_equal(model.get_weights()[0], np.zeros([2, 1]))  # 1 - 2 * 0.5, not summed over replicas
    assert int(optimizer.iterations.numpy()) == 2


def check_broadcast_gives_the_chiefs_bits(backend):
    with backend.scope():
        values = [
            np.array([1.5, -0.0, np.inf, 1e-45], "float32") * (1 if backend.is_chief else 3),
            np.array([backend.rank + 1, -5], "int32"),
            np.array(7 * (backend.rank + 1), "int64"),
            np.array([[0.1, backend.rank]], "float64"),
            np.array([True, backend.is_chief]),
            *(np.array([[2, 3 + backend.rank]]).astype(name) for name in TYPES),
        ]
        variables = [tf.Variable(value, trainable=False) for value in values]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    backend.broadcast_variables(variables)
    assert variables[0].numpy().tobytes() == np.array([1.5, -0.0, np.inf, 1e-45], "float32").tobytes()
    assert variables[1].numpy().tolist() == [1, -5]
    assert int(variables[2].numpy()) == 7
    assert variables[3].numpy().tolist() == [[0.1, 0.0]]
    assert variables[4].numpy().tolist() == [True, True]
    assert [variable.numpy().tolist() for variable in variables[5:]] == [[[2, 3]]] * len(TYPES)
    hashes = backend.fingerprints(variables)
    assert sorted(hashes) == list(range(backend.replicas))
    assert all(each == hashes[0] for each in hashes.values())


def check_fingerprints_tell_replicas_apart(backend):
    with backend.scope():
        variable = tf.Variable(0.0)
    variable.assign(float(backend.rank))
    hashes = backend.fingerprints([variable])
    assert len({tuple(each) for each in hashes.values()}) == backend.workers


def check_json_travels(backend):
    texts = backend.gather_json({"rank": backend.rank, "text": "Größe" * backend.rank})
    assert texts == [{"rank": rank, "text": "Größe" * rank} for rank in range(backend.workers)]
    assert backend.broadcast_json(["from", backend.rank]) == ["from", 0]
    assert backend.broadcast_json("x" * 5000 if backend.is_chief else None) == "x" * 5000


CHECKS = {name.removeprefix("check_"): check for name, check in globals().copy().items() if name.startswith("check_")}

if __name__ == "__main__":
    made = backends.create(sys.argv[1])
    for name, check in CHECKS.items():
        check(made)
        os.write(1, f"{name} ok\n".encode())  # in one piece: others write to the same pipe
    made.exchange(0)  # no worker leaves before all are done
    made.close()
