"""Examples of different lengths, which are padded; and data that is batched already, which is refused."""

import itertools
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from loop import ArrayData, IndexedData, Padding, StreamData, TrainTask, UsageError, fit
from loop.backends import create
from loop.data import BatchOptions, count, fixed_head, head, in_float64, open_data, source
from loop.data.buckets import LengthBuckets
from loop.options import with_defaults
from loop.run.serving import served_by
from loop.step.build import build
from loop.step.train_step import TrainStep
from tests.data.test_sources import Worker
from tests.test_docs import DOCS, blocks


def texts(examples=45, longest=12, seed=0):
    """Lists of numbers from 1 to 8, each of 1 to `longest` of them; and of each number whether it is odd."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(1, 9, random.integers(1, longest + 1)) for _ in range(examples)]
    return tokens, [each % 2 for each in tokens]


def at(epoch, step):
    return tf.constant(epoch, tf.int64), tf.constant(step, tf.int64)


def read(opened, epoch, step, replica=0, part=0, parts=1, taken=None):
    """The rows of one replica at a position."""
    taken = opened.read_batch((), *at(epoch, step), parts) if taken is None else taken
    return opened.replica_rows((*at(epoch, step), taken), replica, tf.constant(part, tf.int64), parts)


# The order, and what a batch is


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 30),
    longest=st.sampled_from([12, 70]),  # short ones are stored by position, long ones in pieces
    batch_size=st.integers(2, 17),
    workers=st.integers(1, 3),
    local=st.integers(1, 2),
    parts=st.integers(1, 3),
    bucket_by=st.booleans(),
    shuffle=st.booleans(),
    drop=st.booleans(),
    multiple=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 10**6),
)
def test_every_example_once_padded_as_its_batch_on_any_number_of_replicas(
    size, longest, batch_size, workers, local, parts, bucket_by, shuffle, drop, multiple, seed, epoch
):
    drop = drop and batch_size <= size
    tokens, _ = texts(size, longest, seed)
    data = ArrayData(tokens, padding=Padding(-1, multiple=multiple, bucket_by=bucket_by, buckets=3))
    options = BatchOptions(batch_size, seed, shuffle, drop)
    opened = source(data, options, "data")
    shared = [opened.sharded(Worker(rank, workers, local), "example") for rank in range(workers)]
    together = []
    for step in range(opened.steps_per_epoch):
        whole = read(opened, epoch, step)
        numbers, mask = (each.numpy() for each in whole.batch)
        index = whole.index.numpy()
        width = max(len(tokens[i]) for i in index)
        assert numbers.shape == mask.shape == (len(index), -(-width // multiple) * multiple)
        for row, valid, i in zip(numbers, mask, index, strict=True):
            np.testing.assert_array_equal(row[valid], tokens[i])
            np.testing.assert_array_equal(row[len(tokens[i]) :], -1)
        assert len(index) == batch_size or (step == opened.steps_per_epoch - 1 and not drop)
        taken = [worker.read_batch((), *at(epoch, step), parts) for worker in shared]
        found = [
            read(shared[rank], epoch, step, rank * local + replica, each, parts, taken[rank])
            for each, rank, replica in itertools.product(range(parts), range(workers), range(local))
        ]
        np.testing.assert_array_equal(np.concatenate([each.index for each in found]), index)
        for place, expected in enumerate((numbers, mask)):  # with the padding of the whole batch
            np.testing.assert_array_equal(np.concatenate([each.batch[place] for each in found]), expected)
        together.extend(index)
    assert len(together) == (size // batch_size * batch_size if drop else size)
    assert len(set(together)) == len(together)
    if not shuffle and not bucket_by:
        assert together == list(range(len(together)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    shapes=st.one_of(
        st.lists(st.tuples(st.integers(0, 90)), min_size=1, max_size=12),
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=8),  # pictures
    ).filter(lambda shapes: any(map(np.prod, shapes))),
    tail=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from(["int32", "int8", "float32", "bool"]),
    value=st.booleans(),
)
def test_examples_are_as_numpy_pads_them(shapes, tail, dtype, value):
    random = np.random.default_rng(len(shapes))
    examples = [random.integers(0, 2, (*shape, *tail)).astype(dtype) for shape in shapes]
    expected = np.full([len(shapes), *np.max(shapes, axis=0), *tail], value, dtype)
    for row, example in zip(expected, examples, strict=True):
        row[tuple(map(slice, example.shape))] = example
    padding = Padding(value if dtype == "bool" else int(value), mask=False)
    opened = source(ArrayData(examples, padding=padding), BatchOptions(len(shapes)), "data")
    batch = read(opened, 0, 0).batch
    assert batch.dtype == dtype
    np.testing.assert_array_equal(batch, expected)


def test_order_of_buckets_is_a_pure_function_that_changes_with_seed_and_epoch():
    def order(seed, epoch):
        data = ArrayData(texts(50)[0], padding=Padding(bucket_by=True, buckets=2))
        opened = source(data, BatchOptions(4, seed, shuffle=True), "data")
        return [read(opened, epoch, step).index.numpy().tolist() for step in reversed(range(13))]

    assert order(1, 0) == order(1, 0)
    orders = [order(*address) for address in [(1, 0), (1, 1), (2, 0)]]
    assert len(set(map(str, orders))) == 3
    data = ArrayData(texts(50)[0], padding=Padding(bucket_by=True, buckets=2))
    opened = source(data, BatchOptions(4, 1, shuffle=True), "data")
    left = {tuple(read(opened, epoch, 12).index.numpy()) for epoch in range(9)}
    assert len(left) > 4  # the short last batch has others each time


def test_each_bucket_has_an_order_of_its_own():
    """Buckets of one size were permuted alike, with the permutation of the batches and that of arrays."""
    lengths = np.arange(1, 1601)
    buckets = LengthBuckets(lengths, BatchOptions(25, shuffle=True), 4)
    batches = buckets.batches(tf.constant(0, tf.int64), tf.range(64, dtype=tf.int64)).numpy()
    ranks = {tuple(sorted(batch % 400)) for batch in batches}
    assert len(ranks) == 64  # each bucket of 400 examples had the same 16 batches


def test_order_of_buckets_stays_what_it_was():
    """Runs of earlier versions are resumed in their order, here that of 2026-11-30."""
    buckets = LengthBuckets(np.arange(30) * 7 % 11, BatchOptions(4, seed=3, shuffle=True), 2)
    *whole, last = buckets.batches(tf.constant(300, tf.int64), tf.range(8, dtype=tf.int64)).numpy().tolist()
    assert whole == [
        [0, 3, 1, 2],
        [13, 17, 29, 8],
        [28, 27, 20, 12],
        [5, 15, 16, 25],
        [24, 23, 26, 10],
        [21, 22, 6, 19],
        [9, 4, 11, 18],
    ]
    assert last[:2] == [7, 14]  # the short last batch


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_buckets_pad_less(kind, shuffle):
    def length(tokens):
        return len(tokens) if kind == "arrays" else tf.shape(tokens)[0]

    def cells(bucket_by):
        padding = Padding(bucket_by=bucket_by, buckets=6)
        data = ArrayData(texts(80, 50)[0], padding=padding)
        if kind == "stream":
            data = StreamData(tf.data.Dataset.from_tensor_slices(tf.ragged.constant(texts(80, 50)[0])), padding)
        opened = source(data, BatchOptions(3, 0, shuffle), "data")
        steps = [read(opened, 0, step).batch for step in range(27)] if kind == "arrays" else list(opened.start(0, 0))
        return sum(int(tf.size(numbers)) for numbers, _ in steps), sum(int(np.sum(mask)) for _, mask in steps)

    (plain, data), (bucketed, again) = cells(False), cells(length)
    assert data == again == sum(map(len, texts(80, 50)[0]))
    assert bucketed - data < (plain - data) / 2


def test_what_examples_of_different_lengths_may_be():
    tokens, odd = texts(4)
    objects = np.empty(4, object)
    objects[:] = tokens
    ragged = tf.ragged.constant([each.tolist() for each in tokens], tf.int64)
    pictures = [np.ones((height, width, 3), "float32") for height, width in [(2, 3), (4, 1), (1, 1), (2, 2)]]
    words = [["a", "bc"], ["d"], [], ["e", "f", "g"]]

    def batch(*arrays, **padding):
        return source(ArrayData(*arrays, padding=Padding(**padding)), BatchOptions(4), "data").head(4)

    expected, mask = batch(tokens)
    for same in (objects, ragged, [each.tolist() for each in tokens], tuple(tokens)):
        np.testing.assert_array_equal(batch(same)[0], expected)
    assert mask.dtype == tf.bool
    _, others, mask = batch(tokens, odd, values=(0, -1))
    np.testing.assert_array_equal(others.numpy()[~mask.numpy()], -1)
    named = batch({"tokens": tokens, "label": np.arange(4)})
    assert list(named) == ["tokens", "label", "mask"]
    named = batch({"a": tokens, "b": pictures}, mask=["b", "a"])
    assert named["b"].shape == (4, 4, 3, 3)
    assert named["b_mask"].shape == (4, 4, 3)
    np.testing.assert_array_equal(tf.reduce_sum(named["b"], -1), 3 * tf.cast(named["b_mask"], tf.float32))
    assert tf.reduce_sum(tf.cast(named["b_mask"], tf.int32), [1, 2]).numpy().tolist() == [6, 4, 1, 4]
    assert batch(words, values="-")[0].numpy().tolist()[2] == [b"-", b"-", b"-"]
    encoded = batch([["ä".encode(), b"b"], [b"\xff"]], values="ö")[0]
    assert encoded.numpy().tolist() == [["ä".encode(), b"b"], [b"\xff", "ö".encode()]]
    assert batch(words, mask=False).shape == (4, 3)
    alike = ArrayData([[1, 2], [3, 4]], padding=0)  # by chance
    assert [each.shape for each in source(alike, BatchOptions(2), "data").head(2)] == [(2, 2), (2, 2)]
    halves = in_float64(ArrayData([[0.5], [1.5, 2.5]], padding=np.float16(0)))
    assert source(halves, BatchOptions(2), "data").head(2)[0].dtype == tf.float64
    assert head(ArrayData(tokens, odd, padding=0), 2).size == 2


@pytest.mark.parametrize("bucket_by", [False, True])
def test_streams_are_padded_and_opened_at_any_position(bucket_by):
    tokens, _ = texts(30)

    def pipeline():
        numbers = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([each.tolist() for each in tokens]))
        places = tf.data.Dataset.range(30).map(lambda i: tf.cast(i, tf.float32))
        return tf.data.Dataset.zip({"tokens": numbers, "place": places}).shuffle(30, seed=3)

    def new():
        data = StreamData(pipeline(), Padding(-1, bucket_by=bucket_by, buckets=3))
        return source(data, BatchOptions(4), "data", lambda: StreamData(pipeline(), data.padding))

    stream = new()
    assert count(stream.example) == 3
    for worker in (Worker(0, 1, 2), Worker(1, 2)):
        stream = stream.sharded(worker, "example")
    iterator, batches, states = stream.start(0, 0), {}, {}
    for epoch in range(2):
        for step in range(9):
            states[epoch, step] = stream.state(iterator)
            batches[epoch, step] = stream.read_batch(iterator, *at(0, 0))
        iterator = stream.next_epoch(iterator)
    for epoch in range(2):
        own = [batches[epoch, step] for step in range(9)]
        assert [int(count(batch)) for batch in own] == [4] * 7 + [2, 0]
        assert sorted(int(i) for batch in own for i in batch["place"]) == list(range(30))
        for batch in own[:-1]:
            lengths = [len(tokens[int(i)]) for i in batch["place"]]
            assert batch["mask"].shape == batch["tokens"].shape == (len(lengths), max(lengths))
            for row, i in zip(batch["tokens"].numpy(), batch["place"].numpy(), strict=True):
                assert row.tolist() == [*tokens[int(i)], *[-1] * (max(lengths) - len(tokens[int(i)]))]
    for position in [(0, 7), (1, 4)]:
        assert states[position] is not None
        for state in (None, states[position]):
            opened = new()
            again = opened.read_batch(opened.start(*position, state), *at(0, 0))
            np.testing.assert_array_equal(again["tokens"], batches[position]["tokens"])
    in_memory = fixed_head(StreamData(pipeline(), Padding(-1)), 6)
    assert set(source(in_memory, BatchOptions(6), "data").head(6)) == {"tokens", "place", "mask"}


class Pair(NamedTuple):
    tokens: tf.Tensor
    place: tf.Tensor


def _length(pair):
    return tf.shape(pair.tokens)[0]


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("change", [lambda data: data, lambda data: fixed_head(data, 3), in_float64])
def test_examples_of_a_stream_may_be_named_tuples(change, ragged):
    # Functions get them whole, unlike the parts of a plain tuple.
    if ragged:
        pairs = tf.data.Dataset.from_tensor_slices(Pair(tf.ragged.constant([[1.0], [1.0, 1.0]]), np.arange(2)))
    else:
        pairs = tf.data.Dataset.range(2).map(lambda i: Pair(tf.ensure_shape(tf.ones([i + 1]), [None]), i))
    tokens, place, mask = opened(change(StreamData(pairs, Padding(bucket_by=_length)))).head(2)
    assert tokens.numpy().tolist() == mask.numpy().tolist() == [[1, 0], [1, 1]]
    assert place.numpy().tolist() == [0, 1]
    bare = opened(change(StreamData(pairs.map(lambda pair: pair._replace(tokens=tf.reduce_sum(pair.tokens)))))).head(2)
    assert type(bare) is Pair
    assert bare.tokens.numpy().tolist() == [1, 2]


def _bucketed(length):
    pairs = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]]))
    return StreamData(pairs, Padding(bucket_by=length))


def _with_values(values):
    return ArrayData({"token": [[1], [2, 3]], "label": [0, 1]}, padding=Padding(values))


def _streamed(data):
    pairs = tf.data.Dataset.from_tensor_slices({"token": tf.ragged.constant([[1], [2, 3]]), "label": [0, 1]})
    return StreamData(pairs, data.padding)


def _indexed(data):
    return IndexedData({"token": [[1], [2, 3]], "label": [0, 1]}, padding=data.padding, lengths={"token": [1, 2]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArrayData([[1], [2, 3]]), r"different lengths \(1 to 2\): give padding=loop.Padding\(\)"),
        (lambda: ArrayData([np.ones((3, 2)), np.ones((3, 1))], np.ones(3)), r"array 0 is a list of 2 arrays: give"),
        (lambda: ArrayData([0, 1], [[1], [2, 3]]), r"array 1: examples of different lengths"),
        (lambda: ArrayData({"x": [[1], [2, 3]]}, [0, 1]), r"array 'x': .*: put all arrays into one dict, and give"),
        (lambda: ArrayData({"a": {"x": [[1], [2, 3]]}}), r"array 'x': .*: put all arrays into one dict, and give"),
        (lambda: ArrayData(np.zeros((3, 2)), padding=0), "nothing to pad: leave padding out"),
        (lambda: ArrayData([[1], [[2, 3]]], padding=0), "examples of 1, 2 dimensions"),
        (lambda: ArrayData([[[1], [2, 3]], [[1]]], padding=0), "an example whose own parts have different lengths"),
        (lambda: ArrayData(tf.ragged.constant([[[1], [2]], [[1]]]), padding=0), "ragged_rank 2"),
        (lambda: ArrayData([[1], [2, 3]], [[1, 2], [3]], padding=0), r"mask=1\) or Padding\(mask=\[0, 1\]\)"),
        (lambda: ArrayData([[1], [2, 3]], padding=True), "give what fills the gaps, such as 0"),
        (lambda: Padding(multiple=0), r"Padding\(multiple=0\): give an integer of at least 1"),
        (lambda: Padding(bucket_by="length"), "give True, or a function of an example"),
        (lambda: Padding(mask=None), r"Padding\(mask=None\): give True, False, the name"),
        (lambda: opened(_with_values({"tokens": -1})), "the examples have no array 'tokens'; did you mean 'token'"),
        (lambda: opened(_with_values((0, -1))), "the examples have no array 0; there are: label, token"),
        (lambda: opened(_streamed(_with_values({"tokens": -1}))), "no array 'tokens'; did you mean 'token'"),
        (lambda: opened(_indexed(_with_values({"tokens": -1}))), "no array 'tokens'; did you mean 'token'"),
        (lambda: opened(ArrayData([[1], [2, 3]], padding=0.5)), "0.5 isn't a value of dtype int64, of array 0"),
        (lambda: opened(ArrayData([["a"], []], padding=1)), "1 isn't text, of array 0"),
        (lambda: opened(ArrayData([[1], [2, 3]], padding=Padding(mask="x"))), "'x' is not padded; these are: 0"),
        (
            lambda: opened(ArrayData({"mask": [[1], [2, 3]]}, padding=0)).head(1),
            "the examples have a 'mask': rename it",
        ),
        (lambda: opened(ArrayData({0: [[1], [2, 3]]}, padding=0)).head(1), r"keys \[0, 'mask'\], which can't be"),
        (
            lambda: opened(ArrayData([[1], [2, 3]], padding=Padding(bucket_by=lambda x: 0.5))),
            "gave float64.* for example 0: return its length as an integer",
        ),
        (lambda: opened(_bucketed(lambda x: None)), "gave None: return the length of an example as an integer"),
        (lambda: opened(_bucketed(lambda x: 0.5)), r"gave float32\(\): return the length"),
        (lambda: opened(_bucketed(lambda x: "7")), r"gave string\(\): return the length"),
        (lambda: opened(_bucketed(lambda x: [1, 2])), r"gave int32\(2,\): return the length"),
        (lambda: StreamData([1]), r"StreamData\(list\): give a tf.data.Dataset"),
        (lambda: opened(StreamData(tf.data.Dataset.range(3), padding=0)), "one known shape, .* leave padding out"),
        (
            lambda: opened(tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]]))),
            r"different shapes .*return loop.StreamData\(dataset, padding=loop.Padding\(\)\)",
        ),
        (
            lambda: fixed_head(tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])), 2),
            r"different shapes .*return loop.StreamData\(dataset, padding=loop.Padding\(\)\)",
        ),
        (
            lambda: opened(
                StreamData(
                    tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1]]), tf.ragged.constant([[1, 2]]))), 0
                )
            ),
            r"different lengths, so that one mask can't serve all: .* Padding\(mask=\[0, 1\]\)",
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_padded_is_said_with_the_fix(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def opened(data):
    return source(data, BatchOptions(2), "data")


# Training


class Tagger(TrainTask):
    """Is a number odd? Each is seen through its embedding and the mean of its text."""

    def __init__(self, kind, padding, dropout=0.3):
        self.kind, self.padding, self.dropout = kind, padding, dropout

    def build_model(self):
        tokens, mask = keras.Input((None,), dtype="int64"), keras.Input((None,), dtype="bool")
        states = keras.layers.Embedding(9, 4)(tokens)
        mean = keras.layers.GlobalAveragePooling1D()(states, mask=mask)
        states = keras.layers.Add()([states, keras.layers.RepeatVector(1)(mean)])
        return keras.Model([tokens, mask], keras.layers.Dense(1)(keras.layers.Dropout(self.dropout)(states)))

    def build_optimizer(self):
        return keras.optimizers.Adam(0.02)

    def train_data(self):
        tokens, odd = texts()
        if self.kind == "arrays":
            return ArrayData(tokens, odd, padding=self.padding)
        pairs = tuple(tf.ragged.constant([each.tolist() for each in part]) for part in (tokens, odd))
        return StreamData(tf.data.Dataset.from_tensor_slices(pairs).shuffle(20, seed=1), self.padding)

    eval_data = train_data

    def compute(self, model, batch, training):
        tokens, odd, mask = batch
        logits = model([tokens, mask], training=training)[..., 0]
        loss = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(odd, logits.dtype), logits)
        return {"loss": loss, "weight": mask}


def train(task, quiet, **options):
    options = {"backend": "single", "batch_size": 7, "epochs": None if "steps" in options else 2} | options
    return fit(task, callbacks=quiet(), **options)


def apart(one, other):
    pairs = zip(one.model.trainable_variables, other.model.trainable_variables, strict=True)
    return max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)


@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_the_same_weights_on_any_number_of_replicas_and_the_same_bits_after_a_resume(kind, quiet):
    task = Tagger(kind, Padding(bucket_by=True, buckets=2))
    alone = train(task, quiet)
    assert alone.steps == 14
    logits = alone.model([np.array([[3]]), np.array([[True]])]).numpy()
    assert logits.shape == (1, 1, 1)
    # Every number of every text counts once, whatever was padded: the mean, worked out text by text.
    losses = []
    for tokens, odd in zip(*texts(), strict=True):
        logits = alone.model([tokens[None], np.ones((1, len(tokens)), bool)]).numpy()[0, :, 0]
        losses.extend(np.log1p(np.exp(-logits * (2 * odd - 1))))
    np.testing.assert_allclose(alone.metrics["eval_loss"], np.mean(losses), rtol=1e-5)  # float32
    # Adam's steps are 0.02, whatever rounding has done to the gradient: 14 of them, in float32.
    together = train(task, quiet, backend=create("mirrored", 3 if kind == "arrays" else 2))
    assert apart(alone, together) < 1e-5
    assert together.metrics["eval_loss"] == pytest.approx(alone.metrics["eval_loss"], rel=1e-5)
    parts = {"run_dir": "cut", "eval_every": "never"}
    train(task, quiet, steps=5, **parts)
    assert train(task, quiet, **parts).weights_sha256 == alone.weights_sha256


def test_options_of_fit_hold_for_padded_arrays(quiet):
    task = Tagger("arrays", Padding(multiple=4, bucket_by=True), dropout=0.0)
    options = {"drop_remainder": True, "eval_every": "never"}
    alone = train(task, quiet, **options)
    assert (alone.steps, alone.examples) == (12, 84)
    assert apart(alone, train(task, quiet, accumulate=3, **options)) < 1e-5
    few = train(task, quiet, overfit=1, epochs=3, eval_every="never")
    assert (few.steps, few.examples) == (3, 21)


class Sums(tf.Module):
    """A model without a declared input shape."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.ones([9]))

    def __call__(self, tokens, mask):
        return tf.gather(self.w, tokens) * tf.cast(mask, tf.float32)


@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_an_exported_model_takes_other_lengths(kind, tmp_path):
    class Plain(Tagger):
        def build_model(self):
            return Sums()

        def compute(self, model, batch, training):
            tokens, odd, mask = batch
            return {"loss": (model(tokens, mask) - tf.cast(odd, tf.float32)) ** 2, "weight": mask}

    task = Plain(kind, Padding(multiple=4))
    opened = source(task.train_data(), BatchOptions(4), "data")
    served = served_by(task, build(task, create("single"), "float32", opened.example), opened)
    assert opened.example[0].shape[1] % 4 == 0
    tf.saved_model.save(served, str(tmp_path))
    again = tf.saved_model.load(str(tmp_path))
    tokens, mask = np.array([[1, 2, 3]]), np.array([[True, True, False]])
    np.testing.assert_array_equal(again.serve({"input_0": tokens, "input_1": mask}), [[1, 1, 0]])


class Reshaped(Sums):
    """A model that takes one length."""

    def __call__(self, tokens, mask):
        return super().__call__(tf.reshape(tokens, [-1, 16]), tf.reshape(mask, [-1, 16]))


def test_an_exported_model_of_one_length_keeps_it():
    class Sixteen(Tagger):
        def build_model(self):
            return Reshaped()

        def compute(self, model, batch, training):
            tokens, odd, mask = batch
            values = model(tokens, mask) - tf.cast(odd, tf.float32)
            return {"loss": values**2, "weight": mask}

    task = Sixteen("arrays", Padding(multiple=16))
    opened = source(task.train_data(), BatchOptions(4), "data")
    served = served_by(task, build(task, create("single"), "float32", opened.example), opened)
    assert [spec.shape[1] for spec in served.serve.input_signature[0].values()] == [16, 16]


def test_lengths_do_not_trace_the_step_anew():
    task = Tagger("arrays", Padding())
    options = with_defaults(task, {"batch_size": 4})
    engine, data = create("single"), open_data(task, options)
    step = TrainStep(task, build(task, engine, "float32", data.train.example), engine, data, options)
    step.train((), 0, 0, 11)
    step.train((), 1, 0, 3)
    assert step.traces == 1


def test_the_program_of_the_page_trains_and_pads(quiet):
    found: dict = {}
    for code in blocks(DOCS / "data.md", "python"):
        exec(code, found)
    longest = max(map(len, found["words"]))
    [[letters, _]] = list(source(found["stream"], BatchOptions(14), "data").start(0, 0))
    assert letters.shape == (14, longest)
    task, options = found["Vowels"](), {"batch_size": 5, "epochs": 12, "clip_norm": 1.0}
    alone, together = (
        train(task, quiet, backend=create(*backend), **options) for backend in (("single",), ("mirrored", 2))
    )
    assert alone.metrics["loss"] < 0.3  # 0.69 is what knowing nothing costs
    assert together.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-3)  # 36 steps of Adam in float32


# Data that is batched already


def pairs(size=20):
    return tf.data.Dataset.from_tensor_slices((np.zeros((size, 3)), np.zeros(size)))


def generated(first, *shapes):
    """A generator's examples, of which nothing is known but the number of axes."""
    signature = tuple(tf.TensorSpec([None] * len(shape)) for shape in shapes)
    return tf.data.Dataset.from_generator(
        lambda: (tuple(np.zeros([size, *shape[1:]]) for shape in shapes) for size in first), output_signature=signature
    )


@pytest.mark.parametrize(
    ("pipeline", "size"),
    [
        (lambda: pairs().batch(10), "of 10"),
        (lambda: pairs().batch(10, drop_remainder=True), "of 10"),
        (lambda: pairs().batch(5, num_parallel_calls=2, deterministic=True), "of 5"),
        (lambda: pairs().padded_batch(5), "of 5"),
        (lambda: pairs().batch(5).map(lambda x, y: (x + 1, y)).cache().shuffle(4).take(3).prefetch(2), "of 5"),
        (lambda: tf.data.Dataset.zip((pairs().batch(5), pairs().batch(5))), "of 5"),
        (lambda: pairs().batch(5).concatenate(pairs().batch(5)), "of 5"),
        (lambda: tf.data.Dataset.sample_from_datasets([pairs().batch(5), pairs().batch(5)], seed=1), "of 5"),
        (lambda: tf.data.Dataset.range(3).interleave(lambda i: pairs().batch(5).prefetch(1)), "of 5"),
        (lambda: pairs().bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [2], [4, 4]), ""),
        (lambda: pairs().batch(5).rebatch(2), ""),
        (lambda: pairs().map(lambda x, y: {"x": x, "y": y}).batch(5), "of 5"),
        (lambda: pairs().map(lambda x, y: x).batch(4), "of 4"),
        (lambda: tf.data.Dataset.range(20).batch(7), "of 7"),
        (lambda: StreamData(pairs().padded_batch(5), Padding()), "of 5"),
    ],
)  # fmt: skip
def test_batches_are_refused_by_name(pipeline, size):
    with pytest.raises(UsageError, match=rf"train_data\(\) yields batches ?{size}.* take the batch\(...\) out"):
        source(pipeline(), BatchOptions(4), "train_data()")
    data = pipeline()
    if not isinstance(data, StreamData):
        StreamData(data, check_batched=False)
        with pytest.raises(UsageError, match="yields batches"):
            fixed_head(data, 8)


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda: pairs().batch(5).unbatch(),
        lambda: pairs().map(lambda x, y: (x, x)),  # legitimately equal shapes
        lambda: pairs().window(4).flat_map(lambda x, y: tf.data.Dataset.zip((x.batch(4), y.batch(4)))),
        lambda: pairs().map(lambda x, y: x).window(4, shift=1, drop_remainder=True).flat_map(lambda x: x.batch(4)),
        lambda: tf.data.Dataset.range(24).batch(8, drop_remainder=True),  # pieces of a text
        lambda: tf.data.Dataset.range(24).batch(8, drop_remainder=True).map(lambda x: (x[:-1], x[1:])),
        lambda: pairs().map(lambda x, y: x).batch(5, drop_remainder=True).map(lambda x: (x[:-2], x[-2:])),
        lambda: pairs().batch(5).map(lambda x, y: (x[0], tf.reduce_sum(y))),
        lambda: StreamData(pairs().batch(5, drop_remainder=True), check_batched=False),
        lambda: StreamData(tf.data.Dataset.range(20).batch(7), Padding()),
        lambda: generated([4, 4, 4, 4], (None, 3), (3,)).map(lambda x, y: (tf.ensure_shape(x, [4, 3]), y)),
        lambda: generated([4, 4, 4, 4], (None,), (None,)),
    ],
)
def test_what_only_looks_like_batches_is_taken(pipeline):
    source(pipeline(), BatchOptions(4), "train_data()")


def test_examples_of_a_generator_that_look_like_batches_are_warned_of():
    with pytest.warns(UserWarning, match=r"a first axis of 4, .*if these are batches, add .unbatch\(\)"):
        source(generated([4, 4, 4, 2], (None, 3), (None,)), BatchOptions(4), "train_data()")
    source(generated([1, 1, 1], (None, 3), (None,)), BatchOptions(4), "train_data()")


def test_a_late_example_of_another_shape_ends_training_with_the_fix(quiet):
    class Generated(Tagger):
        def train_data(self):
            tokens, odd = texts()
            same = [(np.ones(5, "int64"),) * 3] * 12
            everything = [*same, (tokens[0][:2], odd[0][:2], odd[0][:2])]
            signature = tuple(tf.TensorSpec([None], tf.int64) for _ in range(3))
            return tf.data.Dataset.from_generator(lambda: iter(everything), output_signature=signature)

        eval_data = TrainTask.eval_data

        def compute(self, model, batch, training):
            return super().compute(model, (batch[0], batch[1], batch[2] > 0), training)

    with pytest.raises(UsageError, match=r"different shapes .*loop.StreamData\(dataset, padding=loop.Padding\(\)\)"):
        train(Generated("stream", None), quiet)
