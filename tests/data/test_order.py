"""The order of an epoch, as a permutation of positions."""

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from loop import ArrayData, IndexedData
from loop.data import BatchOptions, source
from loop.data.order import shuffled


def order(size, seed, epoch, stream=0):
    positions = np.arange(size, dtype=np.int64)
    return shuffled(positions, seed, tf.constant(epoch, tf.int64), size, stream).numpy()


@hypothesis.given(st.integers(1, 300), st.integers(0, 2**31 - 1), st.integers(0, 2**40), st.integers(0, 2**20))
def test_each_order_has_every_position_once(size, seed, epoch, stream):
    whole = order(size, seed, epoch, stream)
    assert sorted(whole) == list(range(size))
    assert shuffled(np.int64(size - 1), seed, epoch, size, stream).numpy() == whole[-1]  # read by itself


def test_orders_of_many_epochs_and_seeds_differ():
    """TensorFlow takes low bits of each number alone: orders repeated after 256 epochs, and seeds modulo 256."""
    for name, addresses in {
        "epochs": [(7, epoch) for epoch in [*range(1024), 2**15, 2**15 + 2**8]],
        "seeds": [(seed, 3) for seed in [*range(1024), 2**15, 2**15 + 2**8]],
    }.items():
        orders = {order(1000, *address).tobytes() for address in addresses}
        assert len(orders) == len(addresses), name


def test_the_first_orders_are_those_of_index_shuffle():
    """Numbers that were published hold: what the key got lately changes no order up to 255."""
    positions = tf.range(1000, dtype=tf.int64)
    for seed, epoch in [(0, 0), (7, 255), (255, 255)]:
        expected = tf.random.experimental.index_shuffle(positions, seed=[seed, epoch], max_index=999)
        assert np.array_equal(order(1000, seed, epoch), expected)


def test_arrays_and_indexed_data_have_one_order_in_late_epochs():
    numbers = np.arange(50, dtype=np.float32)
    opened = [source(data(numbers), BatchOptions(50, 1234, shuffle=True), "data") for data in (ArrayData, IndexedData)]
    for epoch in (0, 256, 511):
        position = (tf.constant(epoch, tf.int64), tf.constant(0, tf.int64))
        for each in opened:
            index, _ = each.read_batch((), *position)
            assert np.array_equal(index, order(50, 1234, epoch))
    opened[1].close()
