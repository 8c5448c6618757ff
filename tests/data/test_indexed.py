"""Indexed data: the same numbers as arrays in memory, whatever it is read from; and what can go wrong with it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import operator
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import h5py
import keras
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
import scipy.sparse
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import callbacks
import loop
from loop.backends import create
from loop.commands.replay import replay
from loop.data import (
    BatchOptions,
    host_reader,
    mapped_memory,
    padded_arrays,
    random_access,
    read_ahead,
    reader_process,
    source,
)
from loop.data.batch import EVALUATION_EPOCH
from loop.data.batch_layout import BatchLayout
from loop.data.examples import checked, specs_of
from loop.data.graph_ahead import GraphReadAhead
from loop.data.host_reader import HostReader
from loop.data.parts import fixed_head
from loop.data.pending_batches import PendingBatches, Position
from loop.data.random_access import ArrayRows, reader_of
from loop.data.read_ahead import ReadAhead
from loop.errors import OutOfMemoryError, TrainingError, UsageError
from loop.monitor.phase_marker import PhaseMarker
from loop.step.batches import Batches
from tests.conftest import until
from tests.products import pairs

_RANDOM = np.random.default_rng(7)
INPUTS = _RANDOM.normal(size=(103, 6)).astype("float32")
LABELS = _RANDOM.integers(0, 3, 103)
EPOCH = tf.constant(2, tf.int64)


@dataclasses.dataclass
class Task(loop.TrainTask):
    data: object = None
    held_out: object = None
    dropout: float = 0.2

    def build_model(self):
        layers = [keras.layers.Dense(12, "relu"), keras.layers.Dropout(self.dropout), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input([6]), *layers])

    def build_optimizer(self):
        return keras.optimizers.Adam(1e-2)

    def train_data(self):
        return self.data

    def eval_data(self):
        return self.held_out

    def compute(self, model, batch, training):
        inputs, labels = batch
        logits = model(inputs, training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)}


class Items:
    """A map-style data set, as PyTorch has them."""

    def __init__(self, bad=()):
        self.bad = bad
        self.read = []

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        self.read.append(index)
        if index in self.bad:
            raise ValueError("broken file")
        return INPUTS[index], LABELS[index]


class KerasBatches(keras.utils.PyDataset):
    def __init__(self, arrays=(INPUTS, LABELS), size=10):
        super().__init__()
        self.arrays, self.size = arrays, size

    def __len__(self):
        return -(-len(INPUTS) // self.size)

    def __getitem__(self, number):
        rows = slice(self.size * number, self.size * number + self.size)
        return tf.nest.map_structure(lambda array: array[rows], self.arrays)


def _npy(directory):
    np.save(directory / "inputs.npy", INPUTS)
    np.save(directory / "labels.npy", LABELS)
    return str(directory / "inputs.npy"), directory / "labels.npy"


def _memory_map(directory):
    mapped = np.memmap(directory / "raw", "float32", "w+", shape=INPUTS.shape)
    mapped[:] = INPUTS
    mapped.flush()
    return np.memmap(directory / "raw", "float32", "r", shape=INPUTS.shape), LABELS


def _hdf5(directory):
    with h5py.File(directory / "data.h5", "w") as file:
        file["inputs"] = INPUTS
        file["labels"] = LABELS
    file = h5py.File(directory / "data.h5")
    return file["inputs"], file["labels"]


def _parquet(directory):
    table = pyarrow.table({"inputs": list(INPUTS), "labels": LABELS})
    pyarrow.parquet.write_table(table, directory / "data.parquet", row_group_size=20)
    return str(directory / "data.parquet")


def _pair(row):
    return row["inputs"], row["labels"]


SOURCES = {
    "arrays": lambda directory: loop.IndexedData((INPUTS, LABELS)),
    "byte order": lambda directory: loop.IndexedData((INPUTS.astype(">f4"), LABELS), map=lambda pair: pair),
    "columns first": lambda directory: loop.IndexedData((np.asfortranarray(INPUTS), LABELS)),
    "memory map": lambda directory: loop.IndexedData(_memory_map(directory)),
    "npy": lambda directory: loop.IndexedData(_npy(directory)),
    "hdf5": lambda directory: loop.IndexedData(_hdf5(directory)),
    "list": lambda directory: loop.IndexedData([(INPUTS[i], LABELS[i]) for i in range(len(INPUTS))]),
    "map data set": lambda directory: loop.IndexedData(Items()),
    "PyDataset": lambda directory: loop.IndexedData(KerasBatches()),
    "parquet": lambda directory: loop.IndexedData(_parquet(directory), map=_pair),
    "dict": lambda directory: loop.IndexedData({"inputs": INPUTS, "labels": LABELS}, map=_pair),
}


def _trained(quiet, data, held_out=None, **options):
    options = {"epochs": 3, "batch_size": 16, "backend": "single", "callbacks": quiet(), "resume": "never", **options}
    return loop.fit(Task(data, held_out), **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    directory = tmp_path_factory.mktemp("expected")
    standard = callbacks.standard(mlflow=None, progress=None)
    return loop.fit(
        Task(loop.ArrayData(INPUTS, LABELS), loop.ArrayData(INPUTS, LABELS)), epochs=3, batch_size=16,
        backend="single", callbacks=standard, run_dir=directory / "run",
    )  # fmt: skip


@pytest.mark.parametrize("kind", SOURCES)
def test_same_bits_as_arrays_from_any_source(kind, expected, quiet, tmp_path, monkeypatch):
    monkeypatch.setenv("TFLOOP_CACHE", str(tmp_path / "cache"))
    data = SOURCES[kind](tmp_path)
    found = _trained(quiet, data, data, run_dir=tmp_path / "run")
    assert found.weights_sha256 == expected.weights_sha256
    assert found.metrics == expected.metrics


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"compile": "xla"}, {"drop_remainder": True}, {"overfit": 2}])
def test_same_bits_as_arrays_with_other_options(options, quiet, tmp_path):
    found = _trained(quiet, loop.IndexedData(Items()), run_dir=tmp_path / "indexed", **options)
    in_memory = _trained(quiet, loop.ArrayData(INPUTS, LABELS), run_dir=tmp_path / "arrays", **options)
    assert found.weights_sha256 == in_memory.weights_sha256


def test_same_bits_in_float64(quiet, tmp_path):
    found = _trained(quiet, loop.IndexedData((INPUTS, LABELS)), precision="float64", run_dir=tmp_path / "indexed")
    in_memory = _trained(quiet, loop.ArrayData(INPUTS, LABELS), precision="float64", run_dir=tmp_path / "arrays")
    assert found.weights_sha256 == in_memory.weights_sha256


def test_same_bits_after_a_resume_in_the_middle_of_an_epoch(expected, quiet, tmp_path, monkeypatch):
    data = loop.IndexedData(Items())
    _trained(quiet, data, data, run_dir=tmp_path / "run", epochs=None, steps=10)
    planned = []
    plan = HostReader._plan

    def noted(reader, shares, parts, whole_batches, position, at_once):
        if reader._data is data:
            planned.append(position)
        return plan(reader, shares, parts, whole_batches, position, at_once)

    monkeypatch.setattr(HostReader, "_plan", noted)
    held_out = loop.IndexedData((INPUTS, LABELS))
    found = _trained(quiet, data, held_out, run_dir=tmp_path / "run", resume="auto")
    assert found.weights_sha256 == expected.weights_sha256
    assert min(planned) == Position(0, 0).after(10, steps_per_epoch=7)  # not from the start


class _Share:
    """A backend of which a source needs to know who reads what."""

    device = ""

    def __init__(self, replicas, workers, rank):
        self.replicas = replicas
        self.workers = workers
        self.rank = rank
        self.local_replicas = replicas // workers


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 20),  # two whole batches of 9, and a rest
    batch=st.integers(1, 9),
    workers=st.integers(1, 4),
    local=st.integers(1, 2),
    parts=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_rows_of_each_replica_are_those_of_arrays(size, batch, workers, local, parts, shuffle):
    numbers = np.arange(size, dtype=np.int64) * 10
    options = BatchOptions(batch, seed=3, shuffle=shuffle)
    in_memory = source(loop.ArrayData(numbers), options, "train_data()")
    indexed = source(loop.IndexedData(list(numbers)), options, "train_data()")
    for rank in range(workers):
        backend = _Share(workers * local, workers, rank)
        sources = [each.sharded(backend, "example") for each in (in_memory, indexed)]
        for step in range(in_memory.steps_per_epoch):
            position = tf.constant(2, tf.int64), tf.constant(step, tf.int64)
            feeds = [(*position, each.read_batch((), *position, parts)) for each in sources]
            for replica in range(rank * local, rank * local + local):
                for part in range(parts):
                    rows = [
                        each.replica_rows(feed, replica, part, parts) for each, feed in zip(sources, feeds, strict=True)
                    ]
                    np.testing.assert_array_equal(rows[0].batch, rows[1].batch)
                    np.testing.assert_array_equal(rows[0].index, rows[1].index)
        sources[1].close()


def test_each_worker_reads_its_own_rows_alone():
    items = Items()
    made = source(loop.IndexedData(items), BatchOptions(16, seed=1, shuffle=True, prefetch=1), "train_data()")
    mine = made.sharded(_Share(4, 4, 1), "example")
    items.read.clear()
    index, _ = mine.read_batch((), tf.constant(0, tf.int64), tf.constant(0, tf.int64))
    mine.close()
    assert len(index) == 4
    assert len(items.read) <= 4 * (1 + 1)


class Growing(Items):
    """A source that has more examples each time it is asked."""

    def __init__(self, growing):
        super().__init__()
        self.growing = growing
        self.size = len(INPUTS)

    def __len__(self):
        self.size += self.growing and len(self.read) > 20
        return self.size


def test_a_source_whose_length_changes_is_named(quiet, tmp_path):
    with pytest.raises(UsageError, match=r"the source has \d+ examples, and had 103 when the run began"):
        _trained(quiet, loop.IndexedData(Growing(True)), run_dir=tmp_path / "run")
    _trained(quiet, loop.IndexedData(Growing(False)), run_dir=tmp_path / "other")


@pytest.mark.parametrize("change", ["longer", "shorter", "gone"])
def test_a_file_that_changes_under_a_run_is_named(change, tmp_path):
    path = tmp_path / "inputs.npy"
    np.save(path, INPUTS)
    made = source(loop.IndexedData((path, LABELS)), BatchOptions(8, prefetch=1), "train_data()")
    if change == "gone":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(100 if change == "shorter" else 10**5)
    with pytest.raises(UsageError, match=r"inputs.npy (has changed since the run began|can't be read any more)"):
        _read_epoch(made)
    made.close()


class Text:
    """Lines of different lengths."""

    lengths = [3, 9, 1, 4, 7, 2, 8, 5, 6, 10, 3, 3, 12, 1, 5]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"tokens": np.arange(self.lengths[index], dtype=np.int32) + index, "label": index % 2}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("bucket_by", [False, True])
def test_padding_and_buckets_are_those_of_arrays(bucket_by, named):
    options = BatchOptions(4, seed=5, shuffle=True)
    padding = loop.Padding(bucket_by=bucket_by, multiple=2, buckets=2)
    text = Text()
    examples = [text[index] for index in range(len(text))]
    arrays = {"tokens": [each["tokens"] for each in examples], "label": [each["label"] for each in examples]}
    in_memory = source(loop.ArrayData(arrays, padding=padding), options, "train_data()")
    lengths = {"tokens": text.lengths} if named else text.lengths  # without a name: not of the label
    data = loop.IndexedData(text, padding=padding, lengths=lengths)
    indexed = source(data, options, "train_data()")
    for rank in range(2):
        sources = [each.sharded(_Share(2, 2, rank), "example") for each in (in_memory, indexed)]
        for step in range(in_memory.steps_per_epoch):
            position = tf.constant(1, tf.int64), tf.constant(step, tf.int64)
            rows = [each.replica_rows((*position, each.read_batch((), *position)), rank) for each in sources]
            tf.nest.map_structure(np.testing.assert_array_equal, rows[0].batch, rows[1].batch)
        sources[1].close()


def _of_loop(made, size):
    """A compiled loop over batches, in groups as for local steps; returns the serialized batch of each step."""

    def keep(step, read, kept):
        rows = made.replica_rows((EPOCH, step, read), made._shares.first)
        leaves = [tf.io.serialize_tensor(leaf) for leaf in [rows.index, *tf.nest.flatten(rows.batch)]]
        return tf.tensor_scatter_nd_update(kept, [[step]], [tf.strings.join(leaves)])

    @tf.function(autograph=False)
    def run(begin, end, group):
        batches = Batches(made, (), EPOCH, end, PhaseMarker(noted=False, timed=False, replicas=1))

        def body(step, following, kept):
            until = tf.minimum(end, (step // group + 1) * group)
            return batches.each(lambda step, _: step < until, keep, step, following, kept)

        start = begin, batches.first(begin), tf.fill([size], "")
        return tf.while_loop(lambda step, *_: step < end, body, start, parallel_iterations=1)[-1]

    return run


KINDS = "columns", "items", "padded", "buckets", "joined", "joined buckets"


@pytest.mark.parametrize(("kind", "at_once", "rank"), pairs(KINDS, [1, 3, 32], [None, 1]))
def test_batches_that_are_handed_over_together_are_those_of_arrays(kind, at_once, rank, monkeypatch):
    monkeypatch.setattr(read_ahead, "_FAST", np.inf)  # as if a batch were read in no time
    monkeypatch.setattr(read_ahead, "_AT_ONCE", 1e9)
    monkeypatch.setattr(host_reader, "_AT_ONCE", at_once)
    monkeypatch.setattr(host_reader, "_ORDERED", 5 * 8)  # the order of 5 of 13 batches at once
    monkeypatch.setattr(padded_arrays, "_UPCOMING", at_once)
    lengths = _RANDOM.integers(0, 9, len(INPUTS)).tolist()
    sequences = [(np.arange(length, dtype=np.int32), LABELS[index]) for index, length in enumerate(lengths)]
    if kind not in ("columns", "items"):
        padding = loop.Padding(values=-1, mask=0, bucket_by="buckets" in kind, buckets=2)
        tokens = [tokens for tokens, _ in sequences]
        arrays = loop.ArrayData(tokens, LABELS, padding=padding)
        if "joined" in kind:
            indexed = loop.IndexedData((loop.sequences(np.concatenate(tokens), lengths), LABELS), padding=padding)
        else:
            indexed = loop.IndexedData(sequences, padding=padding, lengths={0: lengths})
    else:
        arrays = loop.ArrayData(INPUTS, LABELS)
        indexed = loop.IndexedData((INPUTS, LABELS) if kind == "columns" else Items())
    options = BatchOptions(8, seed=5, shuffle=True)
    share = _Share(1, 1, 0) if rank is None else _Share(2, 2, rank)
    in_memory, made = (source(data, options, "train_data()").sharded(share, "example") for data in (arrays, indexed))
    of_arrays, of_indexed = (_of_loop(each, made.steps_per_epoch) for each in (in_memory, made))
    for bounds in ((0, 13, 13), (0, 5, 5), (5, 13, 2), (4, 9, 3), (12, 13, 1)):
        begin, end, group = (tf.constant(number, tf.int64) for number in bounds)
        np.testing.assert_array_equal(of_indexed(begin, end, group), of_arrays(begin, end, group))
    most = max(batches.count for batches in next(iter(made._reader._ahead.values()))[0]._pending)
    assert most <= at_once
    assert (most > 1) == (at_once > 1)
    made.close()


def test_no_more_batches_are_handed_over_than_bytes_allow(monkeypatch):
    monkeypatch.setattr(read_ahead, "_FAST", np.inf)
    monkeypatch.setattr(read_ahead, "_AT_ONCE", 1e9)
    monkeypatch.setattr(host_reader, "_AT_ONCE_BYTES", 3 * 8 * INPUTS[0].nbytes)
    made = source(loop.IndexedData(INPUTS), BatchOptions(8), "train_data()")
    _read_epoch(made)
    [(ahead, _)] = made._reader._ahead.values()
    assert {batches.count for batches in ahead._pending} == {1, 3}  # the last one is the 13th
    made.close()


def test_map_draws_the_same_numbers_on_any_worker_and_others_in_each_epoch():
    def noisy(example, seed):
        return np.float64(np.random.default_rng(seed).normal()), example

    def drawn(backend, epoch):
        made = source(loop.IndexedData(list(range(12)), map=noisy), BatchOptions(12, seed=4), "train_data()")
        share = made.sharded(backend, "example")
        position = tf.constant(epoch, tf.int64), tf.constant(0, tf.int64)
        rows = [share.replica_rows((*position, share.read_batch((), *position)), backend.rank)]
        share.close()
        return dict(zip(rows[0].index.numpy().tolist(), rows[0].batch[0].numpy().tolist(), strict=True))

    alone = drawn(_Share(1, 1, 0), 0)
    shared = drawn(_Share(3, 3, 0), 0) | drawn(_Share(3, 3, 1), 0) | drawn(_Share(3, 3, 2), 0)
    assert alone == shared
    assert len(set(alone.values())) == 12
    assert not set(alone.values()) & set(drawn(_Share(1, 1, 0), 1).values())


def test_map_gets_the_seeds_of_example_seed(quiet, tmp_path):
    seen = {}

    @dataclasses.dataclass
    class Seeds(Task):
        def compute(self, model, batch, training):
            (inputs, labels), seed = batch
            same = tf.reduce_all(tf.equal(loop.example_seed(), seed), 1)
            values = super().compute(model, (inputs, labels), training)
            return values | {"same": tf.cast(same, tf.float32)}

    data = loop.IndexedData(Items(), map=lambda example, seed: (example, seed))
    seen = loop.fit(
        Seeds(data, data),
        epochs=2,
        batch_size=16,
        seed=3,
        backend="single",
        callbacks=quiet(),
        run_dir=tmp_path / "run",
    )
    assert seen.metrics["same"] == 1.0
    assert seen.metrics["eval_same"] == 1.0


def test_take_skip_filter_and_split():
    data = loop.IndexedData(list(range(100)))

    def examples(part):
        made = source(part, BatchOptions(100), "train_data()")
        return made.head(part.size).numpy().tolist()

    assert examples(data.take(5)) == [0, 1, 2, 3, 4]
    assert examples(data.skip(97)) == [97, 98, 99]
    assert examples(data.skip(10).take(2)) == [10, 11]
    assert examples(data.filter(lambda index: index % 30 == 0)) == [0, 30, 60, 90]
    train, held_out = data.split(0.2)
    assert sorted(examples(train) + examples(held_out)) == list(range(100))
    assert 5 < held_out.size < 40
    longer = loop.IndexedData(list(range(150))).split(0.2)[1]
    assert set(examples(held_out)) <= set(examples(longer))
    by_person = data.split(0.3, key=lambda index: index // 10)
    assert {index // 10 for index in examples(by_person[0])}.isdisjoint(index // 10 for index in examples(by_person[1]))


def test_a_part_is_split_by_key_once_more():
    """No key of the first part had a hash in the second tenth, so that the second split left nothing."""
    people = np.arange(4000) // 4
    rest, test = loop.IndexedData(people).split(0.1, key=lambda index: people[index])
    left = rest.resolve(np.arange(rest.size), 0, 0)
    train, held_out = rest.split(0.1, key=lambda index: people[left[index]])
    of_parts = [set(people[part.resolve(np.arange(part.size), 0, 0)]) for part in (train, held_out, test)]
    assert sum(map(len, of_parts)) == 1000
    assert 60 < len(of_parts[1]) < 130
    # The first split is what it has always been.
    assert test.resolve(np.arange(5), 0, 0).tolist() == [12, 13, 14, 15, 36]


def test_a_bad_example_stops_the_run_and_is_named(quiet, tmp_path):
    with pytest.raises(TrainingError, match="example 57 can't be read: ValueError: broken file"):
        _trained(quiet, loop.IndexedData(Items(bad=[57])), run_dir=tmp_path / "run")


def test_a_bad_first_example_is_named_by_its_number_in_the_source():
    """The first one that is left by `filter` was called example 0."""
    for bad, said in ((Items(bad=[57]), "example 57 can't be read"), ([None] * 60, "example 57: array 0: None")):
        with pytest.raises((TrainingError, UsageError), match=said):
            _opened(loop.IndexedData(bad).filter(lambda index: index >= 57))


def test_a_function_of_the_index_that_fails_is_named_with_the_index():
    """The error was the function's own: of a million examples, it didn't say which one."""
    lengths = {index: 5 for index in range(60) if index != 17}.__getitem__
    data = loop.IndexedData(INPUTS)
    cases = (
        ("filter", lambda: data.filter(lengths)),
        ("split", lambda: data.split(0.5, key=lengths)),
        ("lengths", lambda: _opened(loop.IndexedData(INPUTS, padding=loop.Padding(), lengths=lengths))),
    )
    for what, make in cases:
        with pytest.raises(TrainingError, match=rf"function of {what}.* fails for example 17: KeyError: no 17$"):
            make()


def test_an_error_without_a_text_is_named_by_its_type(quiet, tmp_path):
    def read(index):
        raise MemoryError

    data = loop.IndexedData(list(range(9)), map=read)
    with pytest.raises(TrainingError, match=r"^example 0 can't be read: MemoryError$"):
        _trained(quiet, data, run_dir=tmp_path / "run")
    stops = callbacks.LambdaCallback(steps_end=lambda run, metrics: read(0), every=1)
    with pytest.raises(OutOfMemoryError, match=r"with a batch of 16: MemoryError. Whatever the batch is"):
        _trained(quiet, loop.IndexedData((INPUTS, LABELS)), callbacks=quiet() + [stops], run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: (INPUTS[0, :3], LABELS[0]), r"example 57: array 0: shape \[3\] instead of \[6\]"),
        (lambda: (INPUTS[0].astype("float64"), LABELS[0]), "example 57: array 0: dtype float64 instead of float32"),
        (lambda: (INPUTS[0], None), "example 57: array 1: None instead of an array"),
        (lambda: INPUTS[0], r"example 57 has the arrays \[0\], the first example \[0, 1\]"),
        (lambda: None, "example 57 is None: .* or leave it out"),
        (lambda: (INPUTS[0], object()), "example 57: array 1: object isn't an array"),
        (lambda: {"x": INPUTS[0], 1: LABELS[0]}, r"keys \['x', 1\], which can't be sorted"),
    ],
)
def test_an_example_unlike_the_first_one_is_named(other, said, quiet, tmp_path):
    class Odd(Items):
        def __getitem__(self, index):
            return other() if index == 57 else super().__getitem__(index)

    with pytest.raises(UsageError, match=said):
        _trained(quiet, loop.IndexedData(Odd()), run_dir=tmp_path / "run")


@pytest.mark.parametrize("make", [pyarrow.table, pyarrow.RecordBatch.from_pydict])
def test_a_null_of_a_table_is_a_bad_example_without_those_that_are_read_with_it(make):
    numbers = [*range(2**53, 2**53 + 7), None, 8, 9]
    table = make({"number": pyarrow.array(numbers), "odd": pyarrow.array([True, False] * 5)})
    made = source(loop.IndexedData(table, on_bad_example="skip"), BatchOptions(10), "train_data()")
    zero = tf.constant(0, tf.int64)
    with pytest.warns(UserWarning, match="example 7: array 'number': None instead of an array"):
        rows = made.whole(zero, zero)
    made.close()
    assert rows.batch["number"].numpy().tolist() == [*range(2**53, 2**53 + 7), 8, 9]
    assert rows.batch["odd"].numpy().tolist() == [True, False, True, False, True, False, True, True, False]
    # Also if it comes first: it says nothing of the others. And of a list that isn't there, or has a gap.
    for values, bad in (([None, 1, 2], 0), ([[1], None], 1), ([[1, None], [2, 3]], 0)):
        with pytest.raises(UsageError, match=f"example {bad}: array 'x': "):
            _opened(loop.IndexedData(make({"x": pyarrow.array(values)})))


def test_rows_of_a_table_are_read_batch_by_batch():
    """Arrow joined the whole column for each read, which fails for texts of 2 GiB and more."""
    batch = pyarrow.array([f"{number}{'x' * 2**20}" for number in range(32)])
    table = pyarrow.table({"text": pyarrow.chunked_array([batch] * 70), "number": np.arange(32 * 70)})
    asked = np.array([2239, 5, 70, 5, 2000, 6])
    examples = loop.IndexedData(table).reader.unmapped(asked)
    assert [example["number"] for example in examples] == asked.tolist()
    assert [example["text"].rstrip("x") for example in examples] == [str(number % 32) for number in asked]


def test_a_process_maps_a_parquet_file_itself(tmp_path):
    data = loop.IndexedData(_parquet(tmp_path))
    [expected] = data.reader.unmapped(np.array([50]))
    assert INPUTS[50].tobytes() not in reader_process.pickled(data.reader, specs_of(expected, 50))
    with _process(data, expected) as process:
        found = process.read(np.array([50]), np.zeros([1, 2], np.int64))
        for array, part in zip(found, tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(array[0], part)


def test_categories_of_pandas_are_their_values(tmp_path):
    """A null was another category; and a file whose groups of rows have categories of their own was refused."""
    path = tmp_path / "data.parquet"
    first = pyarrow.Table.from_pandas(pd.DataFrame({"name": pd.Categorical(["a", None, "b"])}))
    second = pyarrow.Table.from_pandas(pd.DataFrame({"name": pd.Categorical(["d", "b", "c"])}))
    with pyarrow.parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        writer.write_table(second)
    for table, expected in ((first, ["a", None, "b"]), (str(path), ["a", None, "b", "d", "b", "c"])):
        reader = loop.IndexedData(table).reader
        assert [example["name"] for example in reader.unmapped(np.arange(len(reader)))] == expected


@pytest.mark.parametrize("bad", [[0], [0, 1, 2, 3, 17]])
def test_a_first_example_that_is_bad_is_left_out_like_any_other(bad, quiet):
    """The run stopped, since the first example says what all others are like."""
    nulls = []
    for index in range(103):
        nulls.append((INPUTS[index], None if index in bad else LABELS[index]))
    for source_ in (Items(bad=bad), nulls):
        data = loop.IndexedData(source_, on_bad_example="skip")
        with pytest.warns(UserWarning, match="it is left out"):
            found = loop.fit(Task(data), epochs=1, batch_size=16, backend="single", callbacks=quiet())
        assert found.examples == 103 - len(bad)
    with pytest.raises(TrainingError, match="example 0 can't be read"):
        _opened(loop.IndexedData(Items(bad=range(103)), on_bad_example="skip"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bad_examples_that_are_skipped_are_as_if_they_had_no_weight(accumulate, quiet, tmp_path):
    @dataclasses.dataclass
    class Weighted(Task):
        def compute(self, model, batch, training):
            inputs, labels, weight = batch
            return super().compute(model, (inputs, labels), training) | {"weight": weight}

    weights = np.ones(103, "float32")
    weights[[5, 57]] = 0
    options = {"epochs": 2, "batch_size": 16, "backend": "single", "accumulate": accumulate, "callbacks": quiet()}
    expected = loop.fit(
        Weighted(loop.ArrayData(INPUTS, LABELS, weights), dropout=0.0), run_dir=tmp_path / "arrays", **options
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        data = loop.IndexedData(Items(bad=[5, 57]), on_bad_example="skip")
        found = loop.fit(Task(data, dropout=0.0), run_dir=tmp_path / "run", **options)
    # Once an epoch at least. How often reading ahead meets it in epochs that aren't trained depends on its speed.
    assert sum("example 57 can't be read" in str(each.message) for each in warned) >= 2
    for ours, theirs in zip(found.model.weights, expected.model.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)
    assert found.examples == 2 * (103 - 2)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_dropout_of_what_is_left_is_the_same_on_any_number_of_replicas(accumulate, quiet, tmp_path):
    """Rows behind one that was left out drew other numbers than on one replica."""
    weights = []
    for backend in ("single", create("mirrored", 2)):
        data = loop.IndexedData(Items(bad=range(1, 103, 3)), on_bad_example="skip")
        options = {"epochs": 1, "batch_size": 16, "backend": backend, "accumulate": accumulate, "callbacks": quiet()}
        with pytest.warns(UserWarning, match="it is left out"):
            found = loop.fit(Task(data, dropout=0.5), run_dir=tmp_path / f"run-{len(weights)}", **options)
        weights.append(found.model.weights)
    for single, mirrored in zip(*weights, strict=True):
        np.testing.assert_allclose(mirrored, single, atol=5e-6)


@pytest.mark.parametrize("batch_size", [16, 50])
def test_xla_computes_what_is_left_of_a_batch(batch_size, quiet):
    """Of batches that divide the examples, it took the number of rows for known."""
    weights = []
    for compile in ("graph", "xla"):
        data = loop.IndexedData(Items(bad=range(1, 103, 3)), on_bad_example="skip").take(100)
        options = {"epochs": 1, "batch_size": batch_size, "backend": "single", "callbacks": quiet()}
        with pytest.warns(UserWarning, match="it is left out"):
            weights.append(loop.fit(Task(data, dropout=0.0), compile=compile, **options).model.weights)
    for graph, xla in zip(*weights, strict=True):
        np.testing.assert_allclose(xla, graph, atol=5e-6)


def test_xla_drops_out_of_what_is_left_also_after_a_run_that_draws_by_row(quiet):
    """It ended with an error of TensorFlow where the same process had trained in the graph, or on several replicas."""
    for compile in ("graph", "xla"):
        data = loop.IndexedData(Items(bad=range(1, 103, 3)), on_bad_example="skip")
        options = {"epochs": 1, "batch_size": 16, "backend": "single", "callbacks": quiet()}
        with pytest.warns(UserWarning, match="it is left out"):
            found = loop.fit(Task(data, dropout=0.5), compile=compile, **options)
        assert found.examples == 69


@dataclasses.dataclass
class Overflowing(Task):
    """Each loss is noted; that of example 41 is infinite."""

    noted: list = dataclasses.field(default_factory=list, init=False)

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        loss = tf.where(batch[0][:, 0] == INPUTS[41, 0], np.inf, values["loss"])
        tf.numpy_function(self.noted.append, [loss], [])
        return values | {"loss": loss}


def _infinite_losses(task):
    """Those of the micro-batch with example 41 in it."""
    return [loss for loss in task.noted if np.isinf(loss).any()][-1]


def test_a_step_with_rows_that_were_left_out_is_replayed_with_the_same_dropout(quiet, tmp_path):
    bad = set(range(1, 103, 3))
    data = loop.IndexedData(Items(bad=bad), on_bad_example="skip")
    task = Overflowing(data, dropout=0.5)
    options = {"batch_size": 16, "accumulate": 2, "backend": "single", "callbacks": quiet(), "shuffle": False}
    with pytest.warns(UserWarning, match="it is left out"), pytest.raises(TrainingError, match="tfloop replay"):
        loop.fit(task, epochs=1, run_dir=tmp_path / "run", **options)
    trained = _infinite_losses(task)
    replayed = Overflowing(data, dropout=0.5)
    with pytest.warns(UserWarning, match="it is left out"):
        found = replay(replayed, tmp_path / "run")
    np.testing.assert_array_equal(_infinite_losses(replayed), trained)
    assert len(trained) == 8 - len(bad & set(range(40, 48)))
    assert found.examples == 16 - len(bad & set(range(32, 48)))


def _opened(data):
    return source(data, BatchOptions(4), "train_data()")


MASKED = np.ma.masked_equal(np.arange(3), 1)


def _of_lengths(lengths):
    return _opened(loop.IndexedData(Text(), padding=0, lengths=lengths))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: loop.IndexedData(5), "it has no __len__ and __getitem__"),
        (lambda: loop.IndexedData(iter([1])), "it has no __len__ and __getitem__"),
        (lambda: loop.IndexedData(pyarrow.table({"x": [1]}).to_reader()), "it has no __len__ and __getitem__"),
        (lambda: loop.IndexedData(scipy.sparse.eye(3, format="csr")), "length is ambiguous.*: give an array"),
        (lambda: loop.IndexedData(pd.Series(LABELS)), r"a Series has \[label\], and no \[index\]: give its .to"),
        (lambda: loop.IndexedData((INPUTS, pd.DataFrame(INPUTS))), r"DataFrame has \[label\]"),
        (lambda: loop.IndexedData({}), "give at least one source"),
        (lambda: _opened(loop.IndexedData(MASKED)), "some values are masked, which training doesn't"),
        (lambda: _opened(loop.IndexedData(list(MASKED[None]))), "example 0: array 0: some values are masked"),
        (lambda: _opened(loop.IndexedData([np.arange(3), MASKED])), "example 1: array 0: some values are masked"),
        (lambda: loop.IndexedData((INPUTS, LABELS[:50])), "sources of unequal length"),
        (lambda: loop.IndexedData("nothing.npy"), "there is no such file"),
        (lambda: loop.IndexedData(__file__), "only .npy and .parquet files"),
        (lambda: loop.IndexedData(INPUTS, map=3), "give a function"),
        (lambda: loop.IndexedData(INPUTS, map=lambda example, rng: example), "it is called as map"),
        (lambda: loop.IndexedData(INPUTS, map=tf.function(abs), readers=2), "leave readers out"),
        (lambda: loop.IndexedData(INPUTS, readers=-1), "give a number of processes"),
        (lambda: loop.IndexedData(INPUTS, on_bad_example="ignore"), "give 'stop' or 'skip'"),
        (lambda: loop.IndexedData(Text(), padding=0), "padding and lengths belong together"),
        (lambda: loop.IndexedData(loop.sequences(INPUTS, [100, 3])), "give padding"),
        (lambda: loop.sequences(INPUTS, [100, 4]), "2 lengths add up to 104, and there are 103 elements"),
        (lambda: loop.sequences(INPUTS, [104, -1]), "-1 for sequence 1: give numbers from 0 on"),
        (lambda: loop.sequences(INPUTS, [100.0, 3.0]), r"float64\[2\]: give the number"),
        (lambda: loop.sequences([INPUTS], [1]), r"loop.sequences\(list\): give one array"),
        (lambda: loop.sequences("nothing.npy", [1]), "there is no such file"),
        (lambda: loop.IndexedData(Text(), lengths=[1]), "without padding"),
        (lambda: loop.IndexedData(Text(), padding=loop.Padding(bucket_by=len), lengths=[1]), "give bucket_by=True"),
        (lambda: _opened(loop.IndexedData(Text(), padding=0, lengths={"words": [1]})), "there is no array 'words'"),
        (lambda: _opened(loop.IndexedData(Text(), padding=0, lengths=[7] * 15)), "7 for example 0, whose arrays have"),
        (
            lambda: _opened(loop.IndexedData(np.zeros(3, "f4,i4"))),
            r"example 0: array 0: dtype \[.*, which no tensor",
        ),
        (lambda: _opened(loop.IndexedData([np.zeros(3, "V4")])), r"dtype \|V4, which no tensor has: convert it in map"),
        (lambda: _opened(loop.IndexedData({"x": LABELS.astype("longdouble")})), "array 'x': dtype .*, which no tensor"),
        (lambda: _opened(loop.IndexedData({"x": INPUTS, 1: INPUTS})), r"keys \['x', 1\], which can't be sorted"),
        (lambda: _of_lengths(lambda index: None), "None for example 0: give its length, an integer from 0 on"),
        (lambda: _of_lengths(lambda index: float("nan")), "nan for example 0: give its length"),
        (lambda: _of_lengths(lambda index: 2.5), "2.5 for example 0: give its length"),
        (lambda: _of_lengths(lambda index: "7"), "'7' for example 0: give its length"),
        (lambda: _of_lengths(lambda index: 2**70), "1180591620717411303424 for example 0: give its length"),
        (lambda: _of_lengths(lambda index: np.array([7])), r"array\(\[7\]\) for example 0: give its length"),
        (lambda: _of_lengths(lambda index: len(Text()[index]) - 6 * (index == 3)), "-[0-9] for example 3: give its"),
        (lambda: _of_lengths([-1] * 15), "-1 for example 0: give its length"),
        (
            lambda: loop.IndexedData(INPUTS, LABELS),
            r"map=ndarray.*: .* into one tuple: IndexedData\(",
        ),
        (lambda: loop.IndexedData(INPUTS).take(-1), "give a number of examples"),
        (lambda: loop.IndexedData(INPUTS).filter([True]), "one bool for each example"),
        (lambda: loop.IndexedData(INPUTS).split(2), "between 0 and 1"),
        (lambda: loop.IndexedData(INPUTS).split("a"), r"IndexedData.split\('a'\): give a number between 0 and 1"),
        (lambda: loop.IndexedData(INPUTS).split(0.1, key=3), r"split\(key=3\): give a function"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(make, said):
    with pytest.raises(UsageError, match=said):
        make()


class OneBuffer(Items):
    """Returns the same array for each example."""

    buffer = np.zeros(INPUTS.shape[1], "float32")

    def __getitem__(self, index):
        self.buffer[:] = INPUTS[index]
        return self.buffer, LABELS[index]


class OneVariable(Items):
    """Returns the same object of TensorFlow for each example."""

    def __init__(self):
        super().__init__()
        self.variable = tf.Variable(tf.zeros([6]))

    def __getitem__(self, index):
        self.variable.assign(INPUTS[index])
        return self.variable


class OneMemory(Items):
    """Returns the same bytes for each example."""

    memory = bytearray(8)

    def __getitem__(self, index):
        self.memory[:] = index.to_bytes(8)
        return memoryview(self.memory)


class OneBlock(Items):
    """Returns rows of the same array in each call."""

    block = np.zeros(INPUTS.shape, "float32")

    def __getitems__(self, indices):
        self.block[: len(indices)] = INPUTS[indices]
        return list(self.block[: len(indices)])


class ManyAtOnce:
    """A source whose `__getitems__` is the function that is given."""

    def __init__(self, given):
        self.given = given

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return INPUTS[index]

    def __getitems__(self, indices):
        return self.given(indices)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda indices: {"x": INPUTS[indices]}, "returned one dict for all indices: return a list with the"),
        (lambda indices: INPUTS[indices[:1]], "returned 1 examples for 2 indices: return one for each"),
    ],
)
def test_examples_of_several_indices_are_one_for_each(given, message):
    with pytest.raises(UsageError, match=message):
        reader_of(ManyAtOnce(given)).read(np.arange(2))


def _doubled_in_place(pair):
    pair[0][:] *= 2
    return pair


@pytest.mark.parametrize(
    "make",
    [
        lambda: loop.IndexedData(OneBuffer()),
        lambda: loop.IndexedData(OneVariable()),
        lambda: loop.IndexedData(OneMemory()),
        lambda: loop.IndexedData(OneBlock()),
        lambda: loop.IndexedData(OneBuffer(), map=lambda pair: {"inputs": pair[0]}, on_bad_example="skip"),
        lambda: loop.IndexedData(list(zip(INPUTS.copy(), LABELS, strict=True)), map=_doubled_in_place),
    ],
)
def test_arrays_that_are_written_over_by_the_next_example_are_refused(make):
    with pytest.raises(UsageError, match="have changed while others were read: return new arrays for each"):
        _opened(make())


def test_arrays_of_one_memory_that_stay_as_they_are_are_taken():
    rows = np.full([9, 2], np.nan)
    made = _opened(loop.IndexedData([rows[0]] * 9))  # a NaN is not equal to itself
    made.close()


@pytest.mark.parametrize("size", [2, 3])
def test_lists_of_a_keras_data_set_are_several_inputs(size):
    """A list of two inputs in batches of two was taken for two examples."""
    arrays = [[INPUTS, 2 * INPUTS], {"label": LABELS}]
    data = loop.IndexedData(KerasBatches(arrays, size))
    assert data.size == len(INPUTS)
    index, ((first, second), labels) = _opened(data).read_batch((), EPOCH, tf.constant(0, tf.int64))
    for found, expected in ((first, INPUTS), (second, 2 * INPUTS), (labels["label"], LABELS)):
        np.testing.assert_array_equal(found, expected[index])


def test_a_list_of_numbers_is_an_array_of_a_keras_data_set():
    class Lists(KerasBatches):
        def __getitem__(self, number):
            return [[number, 0], [number, 1]], [0, 1]

    index, (rows, labels) = _opened(loop.IndexedData(Lists(size=2))).read_batch((), EPOCH, tf.constant(0, tf.int64))
    np.testing.assert_array_equal(rows, np.stack([index // 2, index % 2], 1))
    np.testing.assert_array_equal(labels, index % 2)


def test_no_examples_and_an_epoch_shorter_than_a_batch(quiet, tmp_path):
    with pytest.raises(UsageError, match="has no examples"):
        _trained(quiet, loop.IndexedData([]), run_dir=tmp_path / "run")
    data = loop.IndexedData((INPUTS, LABELS))
    with pytest.raises(UsageError, match="leaves nothing of 103 examples"):
        _trained(quiet, data, run_dir=tmp_path / "run", batch_size=200, drop_remainder=True)


def _following_of(steps):
    return lambda position: position._replace(step=position.step + 1) if position.step < steps - 1 else None


def _pairs(position, at_once, steps=10):
    """Batches of two rows each, not filled."""
    count = min(at_once, steps - position.step)
    index = np.arange(2 * count) + 2 * position.step
    return PendingBatches(position, index, [np.zeros(2 * count)], np.arange(0, 2 * count + 1, 2))


def _numbers(depth, filled, at_once=3):
    """A reader of batches of two rows, which notes what it fills."""

    def fill(batches, rows, thread):
        filled.extend(batches.index[rows].tolist())
        batches.leaves[0][rows] = batches.index[rows]

    return ReadAhead(_pairs, fill, _following_of(10), depth, threads=2, at_once=at_once)


@contextlib.contextmanager
def _read_fast(seconds):
    """Within it, batches that are read within these seconds are read several at once."""
    with mock.patch.object(read_ahead, "_FAST", seconds):
        yield


@settings(max_examples=50, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=12),
    depth=st.integers(1, 4),
    at_once=st.integers(0, 4),
)
def test_any_batch_can_be_asked_for_at_any_time(asked, depth, at_once):
    ahead = _numbers(depth, [], at_once)
    for step, fast, waits in asked:
        position = Position(EVALUATION_EPOCH, step)
        with _read_fast(np.inf if fast else 0):
            there = None if waits else ahead.get_if_ready(position)
            batches = there or ahead.get(position)
        assert batches.covers(position)
        np.testing.assert_array_equal(batches.leaves[0][batches.rows_at(position)], [2 * step, 2 * step + 1])
    assert len(ahead._pending) <= depth + 3
    ahead.close()


def _blocks(filled, failing=()):
    """A reader of 30 fast batches, 8 at once at most, which notes the thread and the batches of each reading."""

    def plan(position, at_once):
        if position.step in failing:
            raise UsageError(f"no plan from {position.step}")
        return _pairs(position, at_once, 30)

    def fill(batches, rows, thread):
        name = threading.current_thread().name
        filled.append(("reader" if name.startswith("tfloop-reader") else "asker", batches.first.step, batches.count))

    return ReadAhead(plan, fill, _following_of(30), 2, 2, at_once=8)


@pytest.fixture
def in_no_time():
    """As if reading took no time, and a thread had always read what is asked for."""
    with _read_fast(np.inf), mock.patch.multiple(read_ahead, _AT_ONCE=1e9, _PATIENCE=100):
        yield


def test_fast_batches_are_read_several_at_once_while_those_before_are_used(in_no_time):
    filled = []
    ahead = _blocks(filled)
    for step in range(30):
        assert ahead.get_if_ready(Position(0, step)) is not None
    assert filled == [("asker", 0, 8), ("reader", 8, 8), ("reader", 16, 8), ("reader", 24, 6)]  # none after the end
    filled.clear()
    with _read_fast(0):
        for step in range(30):
            ahead.get(Position(1, step))
    assert {(who, count) for who, _, count in filled} == {("reader", 1)}
    ahead.close()


def test_a_fast_batch_that_was_not_read_ahead_is_read_by_the_one_that_asks(in_no_time):
    filled = []
    ahead = _blocks(filled)
    for step in (3, 20, 27, 28):
        assert ahead.get_if_ready(Position(0, step)) is not None
    assert [step for who, step, _ in filled if who == "asker"] == [3, 20]
    ahead.close()


def test_a_fast_batch_that_is_late_is_not_waited_for_by_the_graph(in_no_time):
    waits = threading.Event()
    ahead = ReadAhead(
        _pairs, lambda batches, *_: waits.wait(100) if batches.first.step else None, _following_of(10), 2, 1, at_once=3
    )
    assert ahead.get_if_ready(Position(0, 0)) is not None
    with mock.patch.object(read_ahead, "_PATIENCE", 0.01):
        assert ahead.get_if_ready(Position(0, 3)) is None
    waits.set()
    assert ahead.get(Position(0, 3)).first.step == 3
    ahead.close()


def test_what_planning_ahead_raises_reaches_the_one_that_asks(in_no_time):
    ahead = _blocks([], failing=[8])
    for step in range(8):
        ahead.get(Position(0, step))
    for _ in range(2):
        with pytest.raises(UsageError, match="no plan from 8"):
            ahead.get(Position(0, 8))
    assert ahead.get(Position(0, 9)).first.step == 9
    ahead.close()


def test_batches_that_are_asked_for_in_order_are_read_once():
    filled = []
    ahead = _numbers(3, filled)
    with _read_fast(0):
        for step in (0, 1, 2, 3, 3, 4, 5, 7, 6, 8, 9):
            ahead.get(Position(0, step))
    ahead.close()
    assert sorted(filled) == list(range(20))


def _readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("tfloop-reader")]


@pytest.mark.parametrize("close", [True, False])
def test_what_reads_ahead_ends_with_its_source(close):
    """The threads must not hold what holds them."""
    before = set(_readers())  # those of tests before, which may be ending
    made = source(loop.IndexedData(Items()), BatchOptions(8), "train_data()")
    position = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    share = made.sharded(_Share(2, 2, 1), "example")
    share.read_batch((), *position)
    share.whole(*position)
    threads = set(_readers()) - before
    assert threads
    if close:
        share.close()
        share.read_batch((), *position)  # a batch that is asked for later starts new ones
        threads |= set(_readers()) - before
        share.close()
    else:
        del made, share
        gc.collect()
    for thread in threads:
        thread.join(20)
    assert not set(_readers()) - before


@tf.function
def _doubled(inputs):
    return tf.map_fn(lambda number: tf.cond(number > 0, lambda: 2 * number, lambda: number), inputs)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("map", [_doubled, lambda inputs: _doubled(inputs).numpy()], ids=["direct", "hidden"])
def test_a_map_may_run_graphs_while_all_of_tensorflows_threads_could_wait_for_it(map, fast, monkeypatch):
    monkeypatch.setattr(read_ahead, "_AT_ONCE", np.inf if fast else 0)
    threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count()
    made = source(loop.IndexedData(INPUTS, map=map), BatchOptions(2, prefetch=1), "train_data()")

    @tf.function
    def read_many(epoch, steps):
        return tf.concat([made.read_batch((), epoch, steps[place])[1] for place in range(threads + 2)], 0)

    read = []
    position = tf.constant(0, tf.int64), tf.range(threads + 2, dtype=tf.int64)
    thread = threading.Thread(target=lambda: read.append(read_many(*position).numpy()), daemon=True)
    thread.start()
    thread.join(100)
    assert read, "the graph and the threads that read wait for each other"
    expected = INPUTS[: len(read[0])]
    np.testing.assert_array_equal(read[0], np.where(expected > 0, 2 * expected, expected))
    made.close()


_EXAMPLES = [
    lambda n: (np.arange(n, dtype=np.int32), np.float32(n)),
    lambda n: {"tokens": np.full([n, 3], n, np.int32), "weight": 0.5},
    lambda n: np.arange(n, dtype=np.int32) * n,
]
_UNLIKE = [
    None, [1], 5, np.float64(1), np.arange(3.0), np.zeros([2, 3, 4], np.int32), np.zeros([], np.int32),
    (np.arange(3, dtype=np.int32),), (np.arange(3, dtype=np.int32), np.float64(1)), {"tokens": np.zeros([1, 3])},
    {"tokens": np.zeros([2, 3], np.int32), "weights": 0.5}, np.arange(3, dtype=">i4"), np.arange(9, dtype=np.int32),
]  # fmt: skip


def _filled(examples, lengths, padding, at_once):
    """The arrays of a batch, filled at once or one by one; None: that can't be."""
    data = loop.IndexedData(list(examples), padding=padding, lengths=lengths)
    layout = BatchLayout(data, examples[0], 0)
    longest = max(map(max, lengths.values())) if lengths else 0
    widths = np.full([1, len(layout.padded)], longest)
    batches = PendingBatches(Position(0, 0), np.arange(len(examples)), layout.new(len(examples)), widths=widths)
    if at_once:
        filled = layout.fill_all(batches, slice(0, len(examples)), examples)
        return layout.handed_over(batches) if filled else None
    with contextlib.suppress(UsageError):
        for row, arrays in enumerate(checked(examples, layout.specs, np.arange(len(examples)))):
            layout.fill(batches, row, arrays, row, widths[0])
        return layout.handed_over(batches)
    return None


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    kind=st.sampled_from(range(3)),
    padded=st.booleans(),
    unlike=st.none() | st.tuples(st.integers(1, 5), st.sampled_from(range(len(_UNLIKE)))),
)
def test_what_is_filled_at_once_is_what_is_filled_one_by_one(lengths, kind, padded, unlike):
    lengths = lengths if padded else [lengths[0]] * len(lengths)
    examples = [_EXAMPLES[kind](length) for length in lengths]
    if unlike and unlike[0] < len(examples):
        examples[unlike[0]] = _UNLIKE[unlike[1]]
    name = "tokens" if kind == 1 else 0
    padding = loop.Padding(mask=name) if padded else None
    given_lengths = {name: lengths} if padded else None
    at_once, one_by_one = (_filled(examples, given_lengths, padding, each) for each in (True, False))
    if at_once is not None:
        assert one_by_one is not None
        for fast, slow in zip(at_once, one_by_one, strict=True):
            np.testing.assert_array_equal(fast, slow)
    else:
        assert unlike


@tf.function
def _drawn_in_graph(example, seed):
    inputs, label = example
    drawn = tf.random.stateless_uniform([6], seed)
    return {"inputs": tf.cond(label > 0, lambda: inputs + drawn, lambda: inputs), "text": tf.strings.as_string(label)}


def _drawn(example, seed):
    """`_drawn_in_graph`, but for tf.data: a function of Python."""
    return {name: tensor.numpy() for name, tensor in _drawn_in_graph(example, seed).items()}


def _batches_at(data, positions):
    made = source(data, BatchOptions(8, seed=1, shuffle=True), "train_data()").sharded(_Share(2, 2, 1), "example")
    made.read_batch((), *(tf.constant(number, tf.int64) for number in (0, 0)))
    read = [made.read_batch((), *(tf.constant(number, tf.int64) for number in position)) for position in positions]
    return made, [tf.nest.map_structure(lambda tensor: tensor.numpy(), batch) for batch in read]


_POSITIONS = st.tuples(st.sampled_from([0, 1, EVALUATION_EPOCH]), st.integers(0, 13))


@settings(max_examples=8, deadline=None)  # each traces the map anew
@given(positions=st.lists(_POSITIONS, max_size=12), steps=st.integers(0, 30))
def test_a_map_in_a_graph_gives_what_python_gives_at_any_position(positions, steps):
    positions = [*positions, *((step // 13, step % 13) for step in range(steps))]
    made, in_graph = _batches_at(loop.IndexedData((INPUTS, LABELS), map=_drawn_in_graph), positions)
    [(ahead, _)] = made._reader._ahead.values()
    assert isinstance(ahead, GraphReadAhead)
    _, in_python = _batches_at(loop.IndexedData((INPUTS, LABELS), map=_drawn), positions)
    tf.nest.map_structure(np.testing.assert_array_equal, in_graph, in_python)


@pytest.mark.parametrize("size", [9, 1])
def test_a_worker_without_rows_of_the_last_batch_maps_in_its_graph_all_the_same(size):
    data = loop.IndexedData(INPUTS[:size], map=tf.function(lambda inputs: 2 * inputs))
    made = source(data, BatchOptions(4), "eval_data()").sharded(_Share(2, 2, 0), "example")
    epoch = tf.constant(EVALUATION_EPOCH, tf.int64)
    for _ in range(2):  # evaluations
        rows = []
        for step in range(made.steps_per_epoch):
            index, _ = made.read_batch((), epoch, tf.constant(step, tf.int64))
            rows += index.numpy().tolist()
        assert rows == [0, 1, 4, 5][: 4 * (size > 1)]
    [(ahead, _)] = made._reader._ahead.values()
    assert isinstance(ahead, GraphReadAhead)


def test_a_short_epoch_is_mapped_in_a_graph():
    """Also one of fewer batches than are read ahead."""
    data = loop.IndexedData(INPUTS[:8], map=tf.function(lambda inputs: 2 * inputs))
    made, [(_, read)] = _batches_at(data, [(0, 0)])
    [(ahead, _)] = made._reader._ahead.values()
    assert isinstance(ahead, GraphReadAhead)
    assert len(read) == 4
    made.close()


@pytest.mark.parametrize(
    ("map", "is_drawn"),
    [
        (lambda inputs: inputs + np.random.rand(), True),
        (lambda inputs: inputs[: np.random.randint(2, 100)], True),  # another shape
        (lambda inputs: {"inputs": inputs, "text": str(np.random.rand())}, True),
        (tf.function(lambda inputs: inputs + tf.random.uniform([])), True),
        (lambda inputs: {"inputs": inputs * np.nan, "text": f"{inputs[0]}"}, False),
        (lambda inputs, seed: inputs + np.random.default_rng(seed).random(), False),
    ],
)
def test_examples_that_are_others_when_they_are_read_again_are_said(map, is_drawn):
    data = loop.IndexedData(np.repeat(INPUTS, 20, 1), map=map, on_bad_example="skip")
    said = pytest.warns(UserWarning, match="example 0 has other values when it is read again")
    with said if is_drawn else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*it is left out")  # those of another shape
        source(data, BatchOptions(8), "train_data()")


def test_a_run_names_the_example_that_fails_in_a_graph(quiet, tmp_path):
    labels = tf.function(lambda example: (example[0], tf.cast(0 * _not_17(example[1]), tf.int64)))
    with pytest.raises(TrainingError, match=r"^example 17 can't be read"):
        _trained(quiet, loop.IndexedData((INPUTS, np.arange(len(INPUTS))), map=labels), run_dir=tmp_path / "run")


def test_a_map_in_a_graph_trains_the_same_model_also_after_a_resume(expected, quiet, tmp_path):
    data = loop.IndexedData(Items(), map=tf.function(lambda example: (example[0], example[1])))
    _trained(quiet, data, data, run_dir=tmp_path / "run", epochs=None, steps=10)
    found = _trained(quiet, data, data, run_dir=tmp_path / "run", resume="auto")
    assert found.weights_sha256 == expected.weights_sha256
    assert found.metrics == expected.metrics


@tf.function
def _noisy_in_graph(example, seed):
    return example[0] + tf.random.stateless_normal([6], seed), example[1]


def _noisy(example, seed):
    return tuple(tensor.numpy() for tensor in _noisy_in_graph(example, seed))


@pytest.mark.parametrize("options", [{"replicas": 2}, {"accumulate": 3}, {"precision": "float64"}, {"compile": "xla"}])
def test_a_map_in_a_graph_trains_what_python_trains_with_other_options(options, quiet, tmp_path):
    replicas = options.get("replicas", 1)
    given = {name: option for name, option in options.items() if name != "replicas"}
    sha = []
    for map in (_noisy_in_graph, _noisy):
        backend = create("mirrored", replicas) if replicas > 1 else "single"
        data = loop.IndexedData((INPUTS, LABELS), map=map)
        held_out = data if map is _noisy_in_graph else None
        found = _trained(quiet, data, held_out, backend=backend, run_dir=tmp_path / map.__name__, **given)
        sha.append(found.weights_sha256)
    assert sha[0] == sha[1]


@tf.function
def _not_17(index):
    with tf.control_dependencies([tf.debugging.assert_none_equal(index, tf.constant(17, tf.int64))]):
        return tf.cast(index, tf.float32)


@tf.function
def _longer_17(index):
    return tf.fill([tf.where(index == 17, 3, 2)], index)


@pytest.mark.parametrize(
    ("map", "error", "said"),
    [
        (_not_17, TrainingError, r"^example 17 can't be read: InvalidArgumentError: .*y \(Const:0\) = \] \[17\]$"),
        (_longer_17, UsageError, r"^example 17: array 0: shape \[3\] instead of \[2\], which"),
    ],
)
def test_an_example_that_fails_in_a_graph_is_named(map, error, said):
    third = tf.constant(0, tf.int64), tf.constant(2, tf.int64)
    made = source(loop.IndexedData(np.arange(48), map=map), BatchOptions(8), "train_data()")
    with pytest.raises(tf.errors.OpError):
        made.read_batch((), *third)
    with pytest.raises(error, match=said):
        raise made.take_failure()
    made = source(loop.IndexedData(np.arange(48), map=map, on_bad_example="skip"), BatchOptions(8), "train_data()")
    with (
        pytest.warns(UserWarning, match="example 17.*left out"),
        pytest.warns(UserWarning, match=r"an example can't be read in a graph, .* takes longer"),
    ):
        index, _ = made.read_batch((), *third)
    assert index.numpy().tolist() == [16, -1, 18, 19, 20, 21, 22, 23]


def test_examples_that_a_graph_cannot_read_are_said():
    """They are mapped one by one, which takes longer."""
    rows = [np.arange(number % 5 + 1) for number in range(16)]
    made = source(loop.IndexedData(rows, map=tf.function(tf.reduce_sum)), BatchOptions(8), "train_data()")
    with pytest.warns(UserWarning, match=r"examples differ in shape or dtype.*tf.function is called for one example"):
        _, sums = made.read_batch((), *(tf.constant(0, tf.int64),) * 2)
    assert sums.numpy().tolist() == [0, 1, 3, 6, 10, 0, 1, 3]
    made.close()


@pytest.mark.parametrize("map", [None, tf.function(lambda example: example)])
def test_lists_paths_and_bytes_are_arrays(map):
    examples = [{"path": Path("a"), "bytes": b"ab\0", "list": [[1.5, 2.5]], "texts": ["c", "d\0"]}] * 4
    _, [(_, read)] = _batches_at(loop.IndexedData(examples, map=map), [(0, 0)])
    assert {name: array.tolist() for name, array in read.items()} == {
        "path": [b"a"] * 2, "bytes": [b"ab\0"] * 2, "list": [[[1.5, 2.5]]] * 2, "texts": [[b"c", b"d\0"]] * 2,
    }  # fmt: skip


@pytest.mark.parametrize("held_out", [False, True])
def test_no_reader_outlives_a_run(held_out, quiet, tmp_path):
    before = set(_readers())
    data = loop.IndexedData(Items(bad=[50]))
    with pytest.raises(TrainingError, match="example 50"):
        _trained(quiet, data, run_dir=tmp_path / "failed")
    held = loop.IndexedData((INPUTS, LABELS))
    _trained(quiet, held, held if held_out else None, run_dir=tmp_path / "run")
    for thread in set(_readers()) - before:
        thread.join(240)  # it ends what it is reading
    assert not set(_readers()) - before


@pytest.mark.parametrize("kind", ["array", "items", "graph"])
def test_no_source_outlives_a_run(kind, quiet, tmp_path):
    """TensorFlow keeps the Python functions of all graphs: they must not hold the examples, and files with them."""
    inputs = INPUTS.copy()
    items = Items()
    freed = weakref.ref(items if kind == "items" else inputs)
    graph = tf.function(lambda pair: pair) if kind == "graph" else None
    data = [loop.IndexedData(items if kind == "items" else (inputs, LABELS), map=graph)]
    _trained(quiet, data[0], data.pop(), run_dir=tmp_path)
    del inputs, items
    deadline = time.monotonic() + 240
    while freed() is not None and time.monotonic() < deadline:  # threads, also those of tf.data, end what they read
        gc.collect()
    assert freed() is None


def _processes(made):
    [(_, filler)] = made._reader._ahead.values()
    return filler._processes


def _read_by(readers, data_of, steps=20):
    """The first batches, with processes once they are ready."""
    made = source(data_of(readers), BatchOptions(8, seed=1, shuffle=True), "train_data()")
    if readers:
        made.read_batch((), tf.constant(0, tf.int64), tf.constant(0, tf.int64))
        until(lambda: all(_processes(made).of_thread(thread) for thread in range(readers)))
    numbers = [(step // 13, step % 13) for step in range(steps)]
    read = [made.read_batch((), *(tf.constant(number, tf.int64) for number in position)) for position in numbers]
    return made, [tf.nest.map_structure(lambda tensor: tensor.numpy(), batch) for batch in read]


def _read_epoch(made):
    for step in range(made.steps_per_epoch):
        made.read_batch((), tf.constant(5, tf.int64), tf.constant(step, tf.int64))


def _by_index(example, seed):
    """What a module of the user's has: by value, it needs no import of this one."""
    return {"inputs": example[0] * np.float32(2), "text": f"number {example[1]}", "seed": seed}


@pytest.mark.parametrize("kind", ["arrays", "files", "text", "joined"])
def test_processes_read_what_threads_read(kind, tmp_path):
    np.save(tmp_path / "inputs.npy", INPUTS)

    def data_of(readers):
        if kind in ("arrays", "files"):
            inputs = INPUTS if kind == "arrays" else tmp_path / "inputs.npy"
            return loop.IndexedData((inputs, LABELS), map=_by_index, readers=readers)
        text = Text()
        if kind == "joined":
            lengths = np.arange(13).repeat(8)[1:]
            joined = loop.sequences(np.arange(lengths.sum()), lengths)
            return loop.IndexedData({"tokens": joined, "label": LABELS}, padding=0, readers=readers)
        return loop.IndexedData(text, padding=0, lengths={"tokens": text.lengths}, readers=readers)

    threads, expected = _read_by(0, data_of)
    processes, found = _read_by(2, data_of)
    try:
        tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
        started = [process._process for process in _processes(processes)._processes]
    finally:
        threads.close()
        processes.close()
    assert all(process.poll() is not None for process in started)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@settings(max_examples=40, deadline=None)
@given(offset=st.integers(0, 5000), start=st.integers(0, 40), stop=st.integers(41, 60))
def test_a_part_of_a_memory_map_is_sent_as_the_place_in_its_file(mode, offset, start, stop):
    rows = np.arange(60 * 31, dtype="float32").reshape(60, 31)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * offset + rows.tobytes())
        file.flush()
        mapped = np.memmap(file.name, "float32", mode, offset, rows.shape)
        sent = pickle.dumps(ArrayRows(mapped[start:stop]))
        assert len(sent) < 500 or mode == "c"  # which has what no file has
        read = pickle.loads(sent).read(np.arange(stop - start))
    np.testing.assert_array_equal(read, rows[start:stop])


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux says how much memory is of files")
@pytest.mark.parametrize("joined", [False, True])
def test_large_memory_maps_take_little_memory(joined, tmp_path, monkeypatch):
    for module in (mapped_memory, random_access):
        monkeypatch.setattr(module, "LARGE", 1 << 24)
    readers = []
    for name in ("first.npy", "second.npy"):
        rows = np.lib.format.open_memmap(tmp_path / name, "w+", "uint8", (300, 1 << 20))
        rows[:, 0] = np.arange(300) % 256
        del rows
        readers.append(random_access.reader_of(tmp_path / name))

    def of_files():
        return int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0]) / 1024

    before, most = of_files(), 0
    for index in np.random.default_rng(0).permutation(300):
        for reader in readers:
            indices = np.array([index])
            read = reader.stretches(indices, indices + 1) if joined else reader.read(indices)
            assert read[0, 0] == index % 256
            most = max(most, of_files())
    assert most - before < 200  # of 600 MB: 16 MB, and as much as the system maps around 64 places


def test_rows_of_a_memory_map_that_do_not_lie_together_are_not_sent(tmp_path):
    np.save(tmp_path / "inputs.npy", INPUTS)
    mapped = np.load(tmp_path / "inputs.npy", mmap_mode="r")
    with pytest.raises(TypeError, match="its rows lie one after the other"):
        pickle.dumps(ArrayRows(mapped[:, 1:]))


@given(data=st.data(), dtype=st.sampled_from(["int32", ">i4", "float64", "bool", "U2", "datetime64[s]"]))
@settings(max_examples=60, deadline=None)
def test_sequences_are_stretches_of_their_array(data, dtype):
    lengths = data.draw(st.lists(st.integers(0, 600), min_size=1, max_size=20))
    width = data.draw(st.integers(0, 2))
    values = np.arange(sum(lengths) * 4).reshape(-1, 4).astype(dtype)[:, :width]
    if data.draw(st.booleans()):
        values = np.ascontiguousarray(values)
    expected = np.split(values, np.cumsum(lengths)[:-1])
    source = loop.sequences(values, lengths)
    asked = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_access, "_JOINED_AT_ONCE", data.draw(st.integers(1, 30)))
        read = source.read(np.array(asked, np.int64))
    assert read.sizes.tolist() == [lengths[index] for index in asked]
    assert read.rows.dtype == np.dtype(dtype).newbyteorder("=")
    for index, found in zip(asked, read, strict=True):
        np.testing.assert_array_equal(found, expected[index])
        assert found.flags.writeable  # a `map` may change it


def test_sequences_can_be_mapped_mixed_and_made_float64():
    lengths = np.array([3, 0, 5])
    source_ = loop.sequences(np.arange(8, dtype="float32"), lengths)
    twice = loop.IndexedData(source_, map=lambda tokens: 2 * tokens, padding=-1, lengths=lengths)
    plain = loop.IndexedData(source_, padding=-1)
    expected = np.array([[0, 1, 2, -1, -1], [-1] * 5, [3, 4, 5, 6, 7]])
    half = loop.IndexedData(source_, padding=-1)
    for data in (plain, plain.in_float64(), twice, loop.mix({plain: 0.5, half: 0.5})):
        made = source(data, BatchOptions(3), "train_data()")
        index, batch = made.read_batch((), EPOCH, tf.constant(0, tf.int64))
        tokens = batch[0]
        if data.size == 3:
            scale = 2 if data is twice else 1
            np.testing.assert_array_equal(tokens, np.where(expected >= 0, scale * expected, -1)[index])
        else:
            shown = {tuple(row[row >= 0]) for row in expected}
            assert {tuple(row[row >= 0]) for row in tokens.numpy()} <= shown
        assert tokens.dtype == ("float64" if data.wide else "float32")
        made.close()


@pytest.mark.parametrize("lists", [[[1, 2], [], [3]], [["a"], [], ["b", "c"]], [[[1, 2]], [], [[3, 4], [5, 6]]]])
def test_an_empty_list_is_an_example_of_length_0(lists):
    """NumPy makes an array of float64 of it, unlike those of the other examples."""
    for examples in (lists, [{"list": example, "label": 0} for example in lists]):
        padding = loop.Padding(mask=False)
        lengths = list(map(len, lists))
        data = loop.IndexedData(examples, padding=padding, lengths=lengths if examples is lists else {"list": lengths})
        found = tf.nest.flatten(_opened(data).head(3))[-1].numpy()
        np.testing.assert_array_equal(found, _opened(loop.ArrayData(lists, padding=padding)).head(3).numpy())


def test_a_sequence_that_is_longer_than_its_length_says_is_named():
    data = loop.IndexedData(loop.sequences(np.arange(9), [4, 5]), padding=0, lengths=[4, 3])
    with pytest.raises(UsageError, match="example 1: array 0: length 5, more than lengths"):
        source(data, BatchOptions(2), "train_data()")


def test_what_was_sent_to_all_processes_is_kept_no_longer():
    made, _ = _read_by(2, lambda readers: loop.IndexedData(Items(), readers=readers), steps=0)
    assert not _processes(made)._payload
    made.close()


def test_a_process_that_is_starting_while_all_end_ends_too(monkeypatch):
    processes = reader_process.ReaderProcesses(b"", 1)
    started = []

    class Starting(reader_process.ReaderProcess):
        def __init__(self, payload, number):
            super().__init__(payload, number)
            started.append(self)
            processes.close()

    monkeypatch.setattr(reader_process, "ReaderProcess", Starting)
    assert processes.of_thread(0) is None
    assert started[0]._process.returncode is not None


def test_what_fails_in_a_process_is_named():
    made, _ = _read_by(1, lambda readers: loop.IndexedData(Items(bad=[3]), readers=readers), steps=0)
    try:
        with pytest.raises(TrainingError, match="example 3 can't be read: ValueError: broken file"):
            _read_epoch(made)
        assert "example 3 can't be read" in str(made.take_failure())
        assert made.take_failure() is None  # only the first call returns it
    finally:
        made.close()


def test_a_process_that_is_killed_is_named():
    made, _ = _read_by(1, lambda readers: loop.IndexedData(Items(), readers=readers), steps=0)
    _processes(made).of_thread(0)._process.kill()
    try:
        with pytest.raises(TrainingError, match="reader process 0 has ended by signal SIGKILL"):
            _read_epoch(made)
    finally:
        made.close()


@contextlib.contextmanager
def _process(data, example=None, start=lambda process: None):
    """A reader process that is ready; `start` is called while it starts."""
    specs = [] if example is None else specs_of(example, 0)
    process = reader_process.ReaderProcess(reader_process.pickled(data.reader, specs), 0)
    try:
        start(process)
        until(lambda: process.ready)
        yield process
    finally:
        process.close()


def _read_of(process, *indices):
    """The first array of some examples that a process has read."""
    return process.read(np.array(indices), np.zeros([len(indices), 2], np.int64))[0]


@pytest.mark.cold
def test_a_process_reads_on_when_its_whole_group_is_told_to_stop():
    """A closed terminal, Ctrl-C and `timeout` do that: the training finishes its step, for which it needs examples."""

    def stop(process):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process._process.send_signal(number)

    with _process(loop.IndexedData(INPUTS), start=stop) as process:
        stop(process)
        np.testing.assert_array_equal(_read_of(process, 3, 1), INPUTS[[3, 1]])
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])  # here they are heard


def test_a_process_reads_for_a_training_with_many_open_files(many_open_files):
    with _process(loop.IndexedData(INPUTS)) as process:
        np.testing.assert_array_equal(_read_of(process, 3, 1), INPUTS[[3, 1]])


def _waiting(example):
    Path("waits").touch()
    return threading.Event().wait()


def test_a_process_that_waits_for_code_of_the_user_ends_when_the_training_is_killed():
    with _process(loop.IndexedData(INPUTS, map=_waiting)) as process, ThreadPoolExecutor() as pool:
        answer = pool.submit(_read_of, process, 0)
        until(Path("waits").exists)
        process._requests.close()  # as the system does for a training that is killed
        assert process._process.wait(timeout=120) == 0
        with pytest.raises(TrainingError, match="has ended"):
            answer.result()


@pytest.mark.parametrize(("own", "expected"), [(None, "true"), ("false", "false")])
def test_tensorflow_in_a_process_takes_the_memory_of_a_gpu_that_it_needs(own, expected, monkeypatch):
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    if own is not None:
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", own)
    data = loop.IndexedData(INPUTS, map=lambda example: os.environ["TF_FORCE_GPU_ALLOW_GROWTH"])
    with _process(data, "text") as process:
        assert _read_of(process, 0) == [expected]


def _with_programs(example):
    """How a program and a fork end that are terminated, or 0 where they don't."""
    program = subprocess.Popen(["sleep", "600"])
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600])
    fork.start()
    ends = []
    for process, wait, code in ((program, program.wait, "returncode"), (fork, fork.join, "exitcode")):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            wait(timeout=30)
        ends.append(getattr(process, code) or 0)
        process.kill()
    return np.array(ends)


def test_what_a_map_starts_in_a_process_can_be_terminated():
    with _process(loop.IndexedData(INPUTS, map=_with_programs), np.zeros(2, int)) as process:
        assert _read_of(process, 0).tolist() == [[-signal.SIGTERM, -signal.SIGTERM]]


def _with_neighbor(example):
    import neighbor

    return example + neighbor.ADDED


@pytest.mark.cold
def test_a_process_imports_from_the_working_directory_as_a_prompt_does():
    Path("neighbor.py").write_text("ADDED = 1\n")
    sys.path.insert(0, "")
    made, read = _read_by(1, lambda readers: loop.IndexedData(INPUTS, map=_with_neighbor, readers=readers))
    made.close()
    for index, found in read:
        np.testing.assert_array_equal(found, INPUTS[index] + 1)


@pytest.mark.parametrize("sent", [4, 30, None])
def test_a_process_whose_training_is_killed_ends_without_a_word(sent):
    payload = reader_process.pickled(loop.IndexedData(INPUTS).reader, [])
    asked, requests = os.pipe()
    answers, answering = os.pipe()
    os.close(answers)  # as the system does for a training that is killed
    with os.fdopen(requests, "wb") as file:
        file.write((len(payload).to_bytes(8) + payload)[:sent])
    start = f"from loop.data.reader_process import serve; serve({asked}, {answering}, -1)"
    passed = (asked, answering)
    ended = subprocess.run([sys.executable, "-c", start], pass_fds=passed, capture_output=True, check=False)
    os.close(asked)
    os.close(answering)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_what_no_process_can_have_is_refused(quiet, tmp_path):
    lock = threading.Lock()
    with pytest.raises(UsageError, match="can't be sent to a process"):
        _trained(quiet, loop.IndexedData(Items(), map=lambda pair: lock and pair, readers=1), run_dir=tmp_path / "run")
    data = loop.IndexedData(list(range(9)), map=lambda example: lock and example, readers=1)
    made = source(data, BatchOptions(8), "train_data()")
    with pytest.raises(UsageError, match="can't be sent to a process"):
        made.read_batch((), tf.constant(0, tf.int64), tf.constant(0, tf.int64))
    made.close()


def _mixed(epochs, shuffle=True, sizes=(100, 40), shares=(0.5, 0.5)):
    first = loop.IndexedData(list(range(sizes[0])))
    second = loop.IndexedData(list(range(sizes[1])), map=lambda number: 1000 + number)
    data = loop.mix({first: shares[0], second: shares[1]})
    made = source(data, BatchOptions(10, seed=2, shuffle=shuffle), "train_data()")
    found = []
    for epoch in range(epochs):
        read = []
        for step in range(made.steps_per_epoch):
            read += made.read_batch((), tf.constant(epoch, tf.int64), tf.constant(step, tf.int64))[1].numpy().tolist()
        found.append(read)
    made.close()
    return data, found


def test_a_mixture_has_its_shares_and_uses_all_examples_in_turn():
    data, epochs = _mixed(5)
    assert data.size == 80
    for read in epochs:
        assert sum(number >= 1000 for number in read) == 40
    of_first = [number for read in epochs for number in read if number < 1000]
    # Five epochs take 200 of the first source: each of its 100 examples exactly twice.
    assert sorted(of_first) == sorted([*range(100)] * 2)


def test_each_source_of_a_mixture_has_an_order_of_its_own():
    """Sources of one size came in the same order, epoch by epoch."""
    _, [read] = _mixed(1, shuffle=False, sizes=(100, 100))
    of_first = [number for number in read if number < 1000]
    of_second = [number - 1000 for number in read if number >= 1000]
    assert sorted(of_first) == sorted(of_second) == list(range(100))
    assert sum(map(operator.eq, of_first, of_second)) < 10


@settings(max_examples=40, deadline=None)
@given(sizes=st.tuples(st.integers(1, 300), st.integers(1, 300)), share=st.floats(0.01, 0.99))
def test_no_example_of_a_mixture_comes_twice_in_an_epoch(sizes, share):
    try:
        data, [read] = _mixed(1, sizes=sizes, shares=(share, 1 - share))
    except UsageError as error:
        assert "less than one" in str(error) or "leaves nothing" in str(error)  # noqa: PT017
        return
    assert len(read) == data.size == len(set(read))
    of_first = sum(number < 1000 for number in read)
    assert abs(of_first - share * len(read)) <= 1 + len(read) / 1000


def test_the_first_examples_of_a_mixture_are_the_same_in_each_epoch():
    data, [expected] = _mixed(1, shuffle=False)
    made = source(fixed_head(data, 10), BatchOptions(10, seed=2), "train_data()")  # as for `overfit`
    for epoch in (0, 1, 2, EVALUATION_EPOCH):
        batch = made.read_batch((), tf.constant(epoch, tf.int64), tf.constant(0, tf.int64))[1]
        assert batch.numpy().tolist() == expected[:10]
    made.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_mixture_is_sorted_by_the_lengths_of_each_epoch(shuffle):
    padding = loop.Padding(bucket_by=True, buckets=4)
    sources = []
    for size in (40, 100):  # of the second one, other examples come in each epoch
        lengths = np.random.default_rng(size).integers(1, 60, size)
        values = np.arange(lengths.sum())
        sources.append(loop.IndexedData(loop.sequences(values, lengths), padding=padding))
    mixture = loop.mix({sources[0]: 1, sources[1]: 1})
    options = BatchOptions(5, seed=3, shuffle=shuffle)

    def lengths(made, epoch, step):
        _, (_, mask) = made.read_batch((), tf.constant(epoch, tf.int64), tf.constant(step, tf.int64))
        return mask.numpy().sum(1)

    made = source(mixture, options, "train_data()")
    for epoch in (0, 1, 2):
        read = [lengths(made, epoch, step) for step in range(made.steps_per_epoch)]
        assert max(map(np.ptp, read)) < 30
        if not shuffle:
            assert (np.diff(np.concatenate(read)) >= 0).all()
        resumed = source(mixture, options, "train_data()")
        assert lengths(resumed, epoch, 7).tolist() == read[7].tolist()
        resumed.close()
    made.close()


def test_the_lengths_of_a_mixture_are_those_of_its_first_example_with_any_seed():
    """They were compared to another example, which the seed 0 has in front."""
    items = []
    for index in range(40):
        items.append((np.full(1 + index % 5, index), np.zeros(3)))  # the zeros have the length of some by chance
    parts = [loop.IndexedData(items, padding=0, lengths=lambda index: 1 + index % 5) for _ in range(2)]
    for seed in range(8):
        made = source(loop.mix({parts[0]: 1, parts[1]: 1}), BatchOptions(4, seed), "train_data()")
        numbers, zeros, mask = made.whole(EPOCH, tf.constant(1, tf.int64)).batch
        made.close()
        np.testing.assert_array_equal(mask.numpy().sum(1), 1 + numbers.numpy()[:, 0] % 5)
        assert zeros.shape == (4, 3)


@pytest.mark.parametrize("method", ["split", "skip", "filter"])
def test_a_mixture_is_not_divided_by_index(method):
    # What is held out in one epoch would be trained on in another.
    mixture, _ = _mixed(0)
    for data in (mixture, mixture.take(50), loop.mix({mixture: 1, loop.IndexedData(list(range(9))): 1})):
        with pytest.raises(UsageError, match=f"IndexedData.{method} of a mixture: .* choose examples of the sources"):
            getattr(data, method)({"split": 0.2, "skip": 10, "filter": [True] * data.size}[method])


def test_an_unshuffled_mixture_alternates():
    _, [read] = _mixed(1, shuffle=False, sizes=(100, 100), shares=(3, 1))
    for start in range(0, 40, 4):
        assert sum(number >= 1000 for number in read[start : start + 4]) == 1


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        (lambda data: {data: 1}, "at least two sources"),
        (lambda data: {data: 1, INPUTS.tobytes(): 1}, "a source is of type bytes: give IndexedData"),
        (lambda data: {loop.ArrayData(INPUTS): 1, data: 1}, "a source is of type ArrayData: give IndexedData"),
        (lambda data: [data, data], r"loop.mix\(list\): give a dict of at least two sources"),
        (lambda data: {data: 1, loop.IndexedData(INPUTS): "half"}, "shares of .*'half'.*: give positive numbers"),
        (lambda data: {data: 1, loop.IndexedData(INPUTS): -1}, "give positive numbers"),
        (lambda data: {data: 1, loop.IndexedData(INPUTS): 1e-9}, "less than one"),
        (lambda data: {data: 1, loop.IndexedData(Text(), padding=0, lengths=Text.lengths): 1}, "different padding"),
    ],
)
def test_bad_mixtures_are_refused(shares, said):
    with pytest.raises(UsageError, match=said):
        loop.mix(shares(loop.IndexedData(INPUTS)))


@pytest.mark.parametrize(
    ("examples", "filled"),
    [
        ([[], [1, 2], [3]], [[0, 0], [1, 2], [3, 0]]),
        ([[], [], ["a", "b"]], [[b"", b""], [b"", b""], [b"a", b"b"]]),
        ([[], [[1.5, 2]], []], [[[0, 0]], [[1.5, 2]], [[0, 0]]]),
        ([[], [], []], [[0], [0], [0]]),
    ],
)
def test_the_first_example_may_be_an_empty_list(examples, filled):
    """NumPy makes up its dtype and its shape: those of another example count."""
    data = loop.IndexedData(examples, padding=loop.Padding(), lengths=list(map(len, examples)))
    made = source(data, BatchOptions(3), "train_data()")
    zero = tf.constant(0, tf.int64)
    _, (values, mask) = made.read_batch((), zero, zero)
    assert values.numpy().tolist() == filled
    assert tf.reduce_sum(tf.cast(mask, tf.int32), 1).numpy().tolist() == list(map(len, examples))
    made.close()


def test_sequences_in_a_dict_within_another_one_tell_their_lengths():
    tokens = loop.sequences(np.arange(6), [1, 2, 3])
    data = loop.IndexedData(({"tokens": tokens, "label": np.arange(3)}, np.arange(3)), padding=0)
    made = source(data, BatchOptions(3), "train_data()")
    zero = tf.constant(0, tf.int64)
    _, (inputs, _, mask) = made.read_batch((), zero, zero)
    assert inputs["tokens"].numpy().tolist() == [[0, 0, 0], [1, 2, 0], [3, 4, 5]]
    assert tf.reduce_sum(tf.cast(mask, tf.int32), 1).numpy().tolist() == [1, 2, 3]
    made.close()


class NoBatches(KerasBatches):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


class AsTables(Items):
    """As a data set of Hugging Face with the format "arrow"."""

    format = {"type": "arrow"}


def test_sources_without_examples_and_of_tables_are_refused():
    with pytest.raises(UsageError, match=r"train_data\(\) has no examples"):
        source(loop.IndexedData(NoBatches()), BatchOptions(3), "train_data()")
    with pytest.raises(UsageError, match=r"AsTables.* gives tables, and no examples: give dataset.with_format"):
        loop.IndexedData(AsTables())


class Pair(typing.NamedTuple):
    inputs: object
    labels: object


@pytest.mark.parametrize("inputs", [INPUTS, {"x": INPUTS}, list(INPUTS)])
def test_a_named_tuple_of_sources_stays_one(inputs):
    made = source(loop.IndexedData(Pair(inputs, LABELS)), BatchOptions(3), "train_data()")
    zero = tf.constant(0, tf.int64)
    _, batch = made.read_batch((), zero, zero)
    assert isinstance(batch, Pair)
    assert isinstance(made.example, Pair)
    assert batch.labels.numpy().tolist() == LABELS[:3].tolist()
    made.close()


class Panic(BaseException):
    """As of a library in Rust: its class isn't one of `Exception`."""


def _failing_at_17(failure):
    def read(index):
        if index == 17:
            raise failure
        return index

    return read


@pytest.mark.parametrize("in_source", [False, True])
@pytest.mark.parametrize(
    ("failure", "said"),
    [(SystemExit(3), r"sys.exit\(3\)"), (Panic("no buffer"), "Panic: no buffer")],
    ids=["exit", "panic"],
)
def test_what_would_end_a_thread_is_an_error_of_the_example(failure, said, in_source):
    read = _failing_at_17(failure)

    class Failing(Items):
        def __getitem__(self, index):
            return read(index)

    data = loop.IndexedData(Failing()) if in_source else loop.IndexedData(np.arange(48), map=read)
    made = source(data, BatchOptions(8), "train_data()")
    with pytest.raises(TrainingError, match=f"^example 17 can't be read: RuntimeError: {said}$"):
        made.read_batch((), tf.constant(0, tf.int64), tf.constant(2, tf.int64))
    made.close()


def test_an_interrupt_is_no_error_of_an_example():
    data = loop.IndexedData(np.arange(48), map=_failing_at_17(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        data.reader.read(np.array([17]), np.zeros([1, 2], np.int64))
