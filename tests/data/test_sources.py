"""Which examples are in which batch, and who gets them."""

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from loop import ArrayData, IndexedData, Padding, UsageError
from loop.backends.base import Backend
from loop.backends.devices import logical_cpus
from loop.data import BatchOptions, StreamSource, count, fixed_head, source


class Worker(Backend):
    """A worker of a job, as the data sees it."""

    def __init__(self, rank, workers, local_replicas=1):
        self.rank, self.workers, self.local_replicas = rank, workers, local_replicas


def read(opened, epoch, step, replica=0, part=0, parts=1):
    """The rows of one replica at a position of addressed data, eagerly."""
    at = tf.constant(epoch, tf.int64), tf.constant(step, tf.int64)
    taken = opened.read_batch((), *at, parts)
    return opened.replica_rows((*at, taken), replica, tf.constant(part, tf.int64), parts).batch


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    workers=st.integers(1, 3),
    local=st.integers(1, 2),
    parts=st.integers(1, 3),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 10**6),
)
def test_every_example_once_an_epoch_on_any_number_of_replicas(size, batch_size, workers, local, parts, seed, epoch):
    opened = source(ArrayData(np.arange(size)), BatchOptions(batch_size, seed, shuffle=True), "data")
    shared = [opened.sharded(Worker(rank, workers, local), "example") for rank in range(workers)]
    together = []
    for step in range(opened.steps_per_epoch):
        whole = read(opened, epoch, step).numpy()
        found = []
        for part in range(parts):
            own = [
                read(shared[rank], epoch, step, rank * local + replica, part, parts).numpy()
                for rank in range(workers)
                for replica in range(local)
            ]
            assert max(map(len, own)) - min(map(len, own)) <= 1
            found += own
        np.testing.assert_array_equal(np.concatenate(found), whole)  # in order, none twice, none lost
        together.extend(whole)
    assert sorted(together) == list(range(size))


@pytest.mark.parametrize("shuffle", [True, False])
def test_many_batches_at_once_are_the_same_as_one_by_one(shuffle):
    opened = source(ArrayData(np.arange(23), np.ones((23, 2))), BatchOptions(5, 3, shuffle=shuffle), "data")
    index, (numbers, ones) = opened.read_batches(tf.constant(1, tf.int64), tf.constant(2, tf.int64), 4)
    assert (numbers.shape, ones.shape) == ((4, 5), (4, 5, 2))
    for place in (0, 1):
        np.testing.assert_array_equal(numbers[place], read(opened, 1, 2 + place)[0])
        np.testing.assert_array_equal(index[place], numbers[place])


def test_order_is_a_pure_function_of_seed_and_epoch():
    def order(seed, epoch):
        opened = source(ArrayData(np.arange(50)), BatchOptions(50, seed, shuffle=True), "data")
        return read(opened, epoch, 0).numpy().tolist()

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(*address)) for address in [(1, 0), (1, 1), (2, 0), (2, 1)]}) == 4


def test_without_shuffle_the_order_is_the_arrays():
    opened = source(ArrayData(np.arange(10)), BatchOptions(4), "data")
    assert read(opened, 3, 2).numpy().tolist() == [8, 9]


def test_structures_follow_the_arrays():
    one = source(ArrayData(np.zeros((4, 2))), BatchOptions(2), "data")
    several = source(ArrayData(np.zeros((4, 2)), np.ones(4)), BatchOptions(2), "data")
    named = source(ArrayData({"x": np.zeros((4, 2)), "name": np.array(["a", "b", "c", "d"])}), BatchOptions(2), "data")
    assert read(one, 0, 0).shape == (2, 2)
    assert [tuple(part.shape) for part in read(several, 0, 0)] == [(2, 2), (2,)]
    assert read(named, 0, 1)["name"].numpy().tolist() == [b"c", b"d"]


def test_dicts_may_stand_in_place_of_arrays():
    left, right, labels = np.arange(10), np.arange(10.0), list(range(10))
    nested = ArrayData({"left": left, "more": {"right": right}}, labels)
    flat = ArrayData({"left": left, "right": right, "label": labels})
    inputs, label = read(source(nested, BatchOptions(4, seed=3), "data"), 1, 1)
    expected = read(source(flat, BatchOptions(4, seed=3), "data"), 1, 1)
    np.testing.assert_array_equal(inputs["left"], expected["left"])
    np.testing.assert_array_equal(inputs["more"]["right"], expected["right"])
    np.testing.assert_array_equal(label, expected["label"])


def test_texts_in_lists_keep_the_zero_bytes_at_their_end():
    """NumPy's own types for text drop them: records of protobuf lost their last fields."""
    records = [b"\x08\x00", b"\xff", b""]
    padded = ArrayData([records, records[:1]], padding=Padding(mask=False))
    for data, expected in (
        (ArrayData(records), records),
        (ArrayData.of((records, records)), records),
        (ArrayData({"record": records}, np.zeros(3)), records),
        (ArrayData([text.decode("latin-1") for text in records[::2]]), [b"\x08\x00", b""]),
        (padded, [records, [*records[:1], b"", b""]]),
    ):
        head = source(data, BatchOptions(2), "train_data()").head(3)
        assert tf.nest.flatten(head)[0].numpy().tolist() == expected


def test_a_shuffle_that_goes_on_from_an_earlier_training_is_said():
    """A run that resumed in a second phase, with one data set for both, had another order, without a word."""

    def opened(data):
        source(data, BatchOptions(4), "train_data()", lambda: data)

    numbers = tf.data.Dataset.range(10)
    for again in (numbers, numbers.shuffle(10, seed=4, reshuffle_each_iteration=False)):
        for data in (again, again, numbers.shuffle(10, seed=4)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                opened(data)
    shuffled = numbers.shuffle(10, seed=4)
    opened(shuffled)
    with pytest.warns(UserWarning, match=r"^train_data\(\) returns a data set that this process, .* shuffled before"):
        opened(shuffled.take(9))


def test_numpys_text_of_any_length_is_text():
    """It was refused: "give numbers or text"."""
    texts = np.array(["a", "\u00e4bc", "a"], np.dtypes.StringDType())
    for data in (ArrayData(texts), IndexedData(texts), IndexedData((texts,), map=lambda example: example[0])):
        head = source(data, BatchOptions(2), "train_data()").head(3)
        assert tf.nest.flatten(head)[0].numpy().tolist() == [text.encode() for text in texts.tolist()]


def test_a_batch_is_copied_to_the_device_that_computes():
    worker = Worker(0, 1)
    worker.device = logical_cpus(2)[1]
    opened = source(ArrayData(np.arange(6), np.array(list("abcdef"))), BatchOptions(4), "data").sharded(
        worker, "example"
    )
    zero = tf.constant(0, tf.int64)
    index, (numbers, letters) = opened.read_batch((), zero, zero)
    assert [tensor.device[-5:] for tensor in (index, numbers, letters)] == ["CPU:1", "CPU:1", "CPU:0"]


def drain(stream, handle, steps):
    """The sizes of what a worker takes in the next steps."""
    zero = tf.constant(0, tf.int64)
    return [int(count(stream.read_batch(handle, zero, zero))) for _ in range(steps)]


def test_stream_ends_each_epoch_with_an_empty_batch_and_waits_there():
    stream = source(tf.data.Dataset.range(10), BatchOptions(4), "data")
    handle = stream.start(0, 0)
    assert drain(stream, handle, 6) == [4, 4, 2, 0, 0, 0]
    assert drain(stream, stream.next_epoch(handle), 4) == [4, 4, 2, 0]


def shuffled():
    return tf.data.Dataset.range(10).shuffle(10, seed=4)


def shuffled_twice():
    parts = tf.data.Dataset.range(5).shuffle(5, seed=1)
    return parts.interleave(lambda i: tf.data.Dataset.range(2 * i, 2 * i + 2), cycle_length=2).shuffle(4, seed=2)


def shuffled_within():
    return tf.data.Dataset.range(6).shuffle(6, seed=1).concatenate(tf.data.Dataset.range(6, 10).shuffle(3, seed=2))


def shuffled_and_repeated():
    return tf.data.Dataset.range(5).shuffle(5, seed=1).repeat(2)


def shuffled_and_kept():
    return shuffled().cache()


def drawn():
    draws = np.random.default_rng(3)  # goes on from epoch to epoch

    def numbers():
        for number in range(10):
            yield number + 100 * draws.integers(9)

    return tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.int64))


UNSAVED = (shuffled_within, shuffled_and_repeated, shuffled_and_kept, drawn)


@pytest.mark.parametrize(
    ("pipeline", "by_state"),
    [(shuffled, True), (shuffled, False), (shuffled_twice, True), *((pipeline, True) for pipeline in UNSAVED)],
)
def test_stream_is_opened_at_any_position(pipeline, by_state):
    zero = tf.constant(0, tf.int64)

    def new(prefetch=5):  # a new process has a new data set, which has been looked at once
        stream = source(pipeline(), BatchOptions(4, prefetch=prefetch), "data", pipeline)
        assert count(stream.example) == 3
        return stream

    assert bool(new().unsaved(new().start(0, 0))) is (pipeline in UNSAVED)

    def take(stream, handle):
        return stream.read_batch(handle, zero, zero).numpy().tolist()

    reference = new()
    handle, batches, states = reference.start(0, 0), {}, {}
    for epoch in range(4):
        for step in range(4):  # at the last one, the end of the epoch has been seen
            states[epoch, step] = reference.state(handle) if by_state else None
            batches[epoch, step] = take(reference, handle)
        handle = reference.next_epoch(handle)
    assert (batches[0, 0] != batches[1, 0] != batches[2, 0]) is (pipeline is not shuffled_and_kept)
    for (position, state), prefetch in zip(states.items(), itertools.cycle([2, 1, 9, "auto"])):
        stream = new(prefetch)  # how far another one reads ahead is its own business
        epoch, step = position
        handle = stream.start(epoch, step, state)
        while epoch < 4:
            assert take(stream, handle) == batches[epoch, step]
            step += 1
            if step == 4:
                handle, epoch, step = stream.next_epoch(handle), epoch + 1, 0


def test_a_look_at_a_stream_draws_as_many_numbers_each_time():
    """Else a run that is made again has other numbers."""
    drawn_numbers = []
    for _ in range(20):
        generator = tf.random.Generator.from_seed(1)
        numbers = tf.data.Dataset.range(60).map(lambda _, generator=generator: generator.uniform([]))
        assert count(source(numbers, BatchOptions(4), "data").example) == 3
        drawn_numbers.append(generator.uniform([]).numpy())
    assert len(set(drawn_numbers)) == 1


@pytest.mark.parametrize("shape", [[], [2]])
def test_the_first_examples_of_a_stream_keep_their_dtypes(shape):
    arrays = {dtype: np.full([4, *shape], 1, dtype) for dtype in ("uint8", "int64", "float32", "complex64", "bool")}
    arrays["text"] = np.full([4, *shape], b"a\0", object)
    held = fixed_head(tf.data.Dataset.from_tensor_slices(arrays), 3).arrays  # as for `overfit`
    for name, array in arrays.items():
        assert held[name].dtype == array.dtype
        np.testing.assert_array_equal(held[name], array[:3])


def test_stream_is_shared_by_example_over_workers_and_replicas():
    seen = []
    for rank in (0, 1):
        stream = source(tf.data.Dataset.range(11), BatchOptions(4), "data").sharded(Worker(rank, 2, 2), "example")
        handle = stream.start(0, 0)
        zero = tf.constant(0, tf.int64)
        while count(batch := stream.read_batch(handle, zero, zero)):
            for replica in (2 * rank, 2 * rank + 1):
                seen.extend(stream.replica_rows((zero, zero, batch), replica).batch.numpy().tolist())
    assert sorted(seen) == list(range(11))


def test_stream_is_shared_by_file(tmp_path):
    for name in range(4):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}-{line}\n" for line in range(name + 1)))
    files = sorted(str(path) for path in tmp_path.glob("*.txt"))
    seen = []
    for rank in (0, 1):
        stream = StreamSource(tf.data.TextLineDataset(files), BatchOptions(4)).sharded(Worker(rank, 2), "file")
        own = [line.decode() for line in stream.dataset.as_numpy_iterator()]
        assert len({line.split("-")[0] for line in own}) == 2  # whole files
        assert stream.options.batch_size == 2
        seen.extend(own)
    assert sorted(seen) == sorted(f"{name}-{line}" for name in range(4) for line in range(name + 1))


def test_stream_that_has_no_files_cannot_be_shared_by_file():
    with pytest.raises(UsageError, match="can't be split by files"):
        StreamSource(tf.data.Dataset.range(4), BatchOptions(4)).sharded(Worker(0, 2), "file")


@pytest.mark.parametrize("where", ["options", "map", "interleave", "within", "large"])
def test_stream_in_no_order_is_refused_where_several_workers_must_read_the_same(where, monkeypatch):
    loose, numbers = {"num_parallel_calls": 2, "deterministic": False}, tf.data.Dataset.range(8)
    stream = numbers.map(lambda x: x)
    if where == "options":
        options = tf.data.Options()
        options.deterministic = False
        stream = stream.with_options(options)
    elif where == "map":
        stream = stream.map(lambda x: x, **loose).take(7)
    elif where == "interleave":
        stream = stream.interleave(tf.data.Dataset.from_tensors, **loose).take(7)
    elif where == "within":
        stream = stream.flat_map(lambda x: numbers.map(lambda y: x + y, **loose))
    else:  # no graph is made of it
        monkeypatch.setattr("loop.data.pipelines._MOST_IN_GRAPH", 7)
        stream = tf.data.Dataset.from_tensor_slices(np.arange(8)).map(lambda x: x, **loose)
    alone = StreamSource(stream, BatchOptions(4)).sharded(Worker(0, 1), "example")
    assert int(alone.start(0, 0).get_next().shape[0]) == 4
    with pytest.raises(UsageError, match=r"deterministic=False.* each of 2 workers would read another one"):
        StreamSource(stream, BatchOptions(4)).sharded(Worker(0, 2), "example")
    ordered = numbers.interleave(tf.data.Dataset.from_tensors, num_parallel_calls=2)
    StreamSource(ordered, BatchOptions(4)).sharded(Worker(0, 2), "example")


MASKED = np.ma.masked_equal(np.arange(3), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArrayData(), "give at least one"),
        (lambda: ArrayData(np.zeros(3), np.zeros(4)), r"unequal length \(3, 4 examples"),
        (lambda: ArrayData(np.float32(3)), "a scalar has no examples"),
        (lambda: ArrayData({"x": np.zeros(3)}, np.zeros(3), padding=0), "put all arrays into one dict"),
        (lambda: ArrayData({"x": {"y": np.zeros(3)}}, np.zeros(4)), r"unequal length \(3, 4 examples"),
        (lambda: ArrayData((np.zeros((9, 2)), np.zeros(9))), "tuple of 2 arrays with 9 rows"),
        (lambda: ArrayData((tf.zeros((9, 2)), np.zeros(9))), "tuple of 2 arrays with 9 rows"),
        (lambda: ArrayData({"x": {}}), "a dict without arrays: give at least one"),
        (lambda: ArrayData(number for number in [1, 2]), "array 0 is a generator, which has no examples"),
        (lambda: ArrayData(np.zeros(3), None), "array 1 is a NoneType"),
        (lambda: ArrayData({"x": scipy.sparse.eye(3)}), "array 'x' is a dia_matrix.* the columns of each row"),
        (lambda: ArrayData({}), "a dict without arrays: give at least one"),
        (lambda: ArrayData(MASKED), "array 0: some values are masked, which training doesn't see: fill them"),
        (lambda: ArrayData.of((MASKED, MASKED)), "some values are masked"),
        (lambda: ArrayData([[1], MASKED], padding=0), "some values are masked"),
        (
            lambda: ArrayData({"x": np.zeros(3), 1: np.zeros(3)}),
            r"keys \['x', 1\], which can't be sorted: give",
        ),
        (lambda: ArrayData.of(({"x": np.zeros(3), 1: np.zeros(3)}, np.zeros(3))), "which can't be sorted"),
        (
            lambda: source(ArrayData(np.zeros((0, 2))), BatchOptions(4), "train_data()"),
            r"train_data\(\) has no examples",
        ),
        (lambda: source(tf.data.Dataset.range(0), BatchOptions(4), "eval_data()"), r"eval_data\(\) has no examples"),
        (
            lambda: source(ArrayData(np.array([1, object()], object)), BatchOptions(4), "x"),
            r"array 0 of dtype object, shape \[2\], isn't a tensor .* all examples of one shape$",
        ),
        (
            lambda: source(ArrayData({"a": np.zeros(2), "b": np.zeros(2, "M8[s]")}, np.zeros(2)), BatchOptions(4), "x"),
            r"array '0/b' of dtype datetime64\[s\]",
        ),
        (
            lambda: source(ArrayData(pd.DataFrame({"a": [0.1, 0.2], "b": ["x", "y"]})), BatchOptions(4), "x"),
            r"array 0 of dtype object, .* or the columns of a table as dict\(table\)",
        ),
        (
            lambda: source(tf.data.Dataset.range(3).map(lambda x: (x, None)), BatchOptions(4), "x"),
            "the data set yields NoneTensorSpec: .* leave it out, in a map",
        ),
        (lambda: source(tf.data.Dataset.range(3).window(2), BatchOptions(4), "x"), "yields DatasetSpec: only dense"),
        (lambda: source([1, 2], BatchOptions(4), "train_data()"), r"returned list: return ArrayData"),
        (
            lambda: source(ArrayData(np.zeros(3)), BatchOptions(4, drop_remainder=True), "x"),
            "leaves nothing of 3 examples",
        ),
    ],
)
def test_bad_data_is_refused_with_the_fix(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def generated(function):
    return tf.data.Dataset.from_generator(function, output_signature=tf.TensorSpec([], tf.int64))


def from_one(iterator):
    return lambda: iterator


def remembered(kept):
    """A function that keeps what it returns, and makes a new one in each call."""

    def function():
        kept[:] = [iter([1, 2, 3, 4])]
        return kept[0]

    return function


class Restarting:
    """An iterator that begins again when it is asked for one."""

    def __iter__(self):
        self.numbers = iter([1, 2, 3, 4])
        return self

    def __next__(self):
        return next(self.numbers)


@pytest.mark.parametrize("iterator", [(number for number in range(9)), iter(range(9)), map(int, range(9))])
def test_a_generator_that_can_be_read_once_is_refused(iterator):
    """The examples that are looked at first would be lost, and an epoch would have some less."""
    pipeline = generated(from_one(iterator)).map(lambda number: number + 1).prefetch(2)
    with pytest.raises(UsageError, match=f"from_generator: .* the same {type(iterator).__name__} .* return a new one"):
        source(pipeline, BatchOptions(4), "train_data()")


@pytest.mark.parametrize(
    "function",
    [lambda: iter([1, 2, 3, 4]), lambda: [1, 2, 3, 4], from_one([1, 2, 3, 4]), from_one(Restarting()),
     remembered([])],
)  # fmt: skip
def test_a_generator_that_begins_again_is_taken(function):
    stream = source(generated(function), BatchOptions(4), "train_data()")
    assert drain(stream, stream.start(0, 0), 2) == [4, 0]


def test_a_look_at_a_generator_calls_its_function_once():
    calls = []

    def function():
        calls.append(1)
        return iter([1, 2, 3, 4])

    source(generated(function), BatchOptions(4), "train_data()")
    assert calls == [1]
