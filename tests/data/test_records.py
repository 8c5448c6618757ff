"""TFRecord files and other formats as indexed data: the same examples, and damaged files that are named."""

from __future__ import annotations

import os

import datasets
import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from array_record.python import array_record_module

import loop
from loop.data import BatchOptions, source
from loop.errors import UsageError

_RANDOM = np.random.default_rng(3)
IMAGES = _RANDOM.normal(size=(50, 4)).astype("float32")
LABELS = np.arange(50)
FEATURES = {"image": tf.io.FixedLenFeature([4], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TFLOOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _example(image, label):
    return tf.train.Example(
        features=tf.train.Features(
            feature={
                "image": tf.train.Feature(float_list=tf.train.FloatList(value=image)),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
        )
    ).SerializeToString()


def _write(directory, options=None, name="train"):
    for number, start in enumerate(range(0, 50, 20)):
        with tf.io.TFRecordWriter(str(directory / f"{name}-{number}.tfrecord"), options) as writer:
            for image, label in zip(IMAGES[start : start + 20], LABELS[start : start + 20], strict=True):
                writer.write(_example(image, label))
    return str(directory / f"{name}-*.tfrecord")


def _batches(data):
    made = source(data, BatchOptions(16, seed=2, shuffle=True), "train_data()")
    read = []
    for step in range(made.steps_per_epoch):
        _, batch = made.read_batch((), tf.constant(1, tf.int64), tf.constant(step, tf.int64))
        read.append(tf.nest.map_structure(lambda tensor: tensor.numpy(), batch))
    return read


def _parsed(record):
    example = tf.train.Example.FromString(record)
    return {
        "image": np.array(example.features.feature["image"].float_list.value, np.float32),
        "label": np.int64(example.features.feature["label"].int64_list.value[0]),
    }


@pytest.mark.parametrize("how", ["features", "map"])
def test_records_are_the_examples_of_arrays(how, tmp_path):
    pattern = _write(tmp_path)
    expected = _batches(loop.ArrayData({"image": IMAGES, "label": LABELS}))
    if how == "features":
        data = loop.IndexedData(loop.records(pattern, FEATURES))
    else:
        data = loop.IndexedData(loop.records(pattern), map=_parsed)
    for ours, theirs in zip(_batches(data), expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, ours, theirs)


def test_records_are_found_once_and_anew_when_a_file_changes(tmp_path, cache):
    pattern = _write(tmp_path)
    assert len(loop.records(pattern)) == 50
    kept = {file: file.stat().st_mtime_ns for file in (cache / "records").iterdir()}
    assert len(kept) == 3
    assert len(loop.records(pattern)) == 50
    assert {file: file.stat().st_mtime_ns for file in (cache / "records").iterdir()} == kept
    with tf.io.TFRecordWriter(str(tmp_path / "train-0.tfrecord")) as writer:
        writer.write(b"one")
    changed = loop.records(pattern)
    assert len(changed) == 31
    assert changed[0] == b"one"


@pytest.mark.parametrize("damaged", [b"", b"no array"])
def test_a_damaged_cache_is_made_anew(damaged, tmp_path, cache):
    pattern = _write(tmp_path)
    expected = [*loop.records(pattern)]
    for file in (cache / "records").iterdir():
        file.write_bytes(damaged)  # as after a power failure
    assert [*loop.records(pattern)] == expected
    assert all(file.stat().st_size > 100 for file in (cache / "records").iterdir())


def test_zeros_in_the_cache_are_not_believed(tmp_path, cache):
    """All examples were then the first record of its file, without a word."""
    pattern = _write(tmp_path)
    expected = [*loop.records(pattern)]
    for file in (cache / "records").iterdir():
        header = file.read_bytes()[:128]
        file.write_bytes(header.ljust(file.stat().st_size, b"\0"))
    assert [*loop.records(pattern)] == expected


@pytest.mark.parametrize("kept", [0, 300])
def test_a_parquet_file_in_the_cache_that_is_cut_off_is_made_anew(kept, tmp_path, cache):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"label": LABELS}), path)
    loop.IndexedData(path)
    [file] = (cache / "parquet").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    loop.IndexedData(path)
    assert file.read_bytes() == whole


def test_the_cache_is_durable(tmp_path, cache, monkeypatch):
    """Else a power failure leaves zeros there, and offsets that are 0 are those of the first record."""
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    loop.records(_write(tmp_path))
    pyarrow.parquet.write_table(pyarrow.table({"label": LABELS}), tmp_path / "data.parquet")
    loop.IndexedData(tmp_path / "data.parquet")
    for folder in ("records", "parquet"):
        assert any(path.startswith(f"{cache / folder}/") for path in synced)


def test_records_need_no_cache_and_a_parquet_file_says_that_it_does(tmp_path, cache):
    pattern = _write(tmp_path)
    cache.write_text("a file, in which nothing can be made")
    with pytest.warns(UserWarning, match=r"cache/records can't be written \(Not a directory\)"):
        assert len([*loop.records(pattern)]) == 50
    pyarrow.parquet.write_table(pyarrow.table({"label": LABELS}), tmp_path / "data.parquet")
    with pytest.raises(UsageError, match=r"cache/parquet can't be written .* TFLOOP_CACHE="):
        loop.IndexedData(tmp_path / "data.parquet")


def test_a_file_that_changes_under_a_run_is_named(tmp_path):
    records = loop.records(_write(tmp_path))
    with (tmp_path / "train-1.tfrecord").open("ab") as file:
        file.write(b"more")
    assert records[3]
    with pytest.raises(UsageError, match=r"train-1.tfrecord has changed since the run began"):
        records[25]


def test_examples_of_a_changed_file_are_no_bad_examples(tmp_path):
    paths = [tmp_path / "data.npy", tmp_path / "train-1.tfrecord"]
    np.save(paths[0], IMAGES)
    sources = [paths[0], loop.records(_write(tmp_path))]
    for path, data_source in zip(paths, sources, strict=True):
        data = loop.IndexedData(data_source, on_bad_example="skip")
        made = source(data, BatchOptions(50), "train_data()")
        with path.open("ab") as file:
            file.write(b"more")
        with pytest.raises(UsageError, match=f"{path.name} has changed since the run began"):
            made.read_batch((), tf.constant(0, tf.int64), tf.constant(0, tf.int64))
        made.close()


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_compressed_files_are_refused_with_what_to_do(kind, tmp_path):
    with pytest.raises(UsageError, match="is compressed, so that no record can be read by itself"):
        loop.records(_write(tmp_path, kind))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("map", [None, dict])
def test_parsed_records_that_are_bad_are_left_out(map, batch_size, tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as file:
        for number in range(6):
            numbers = tf.train.Int64List(value=[number] * (number != 4))
            features = tf.train.Features(feature={"x": tf.train.Feature(int64_list=numbers)})
            file.write(tf.train.Example(features=features).SerializeToString())
    parsed = loop.records(tmp_path / "x.tfrecord", {"x": tf.io.FixedLenFeature([], tf.int64)})

    def read(on_bad_example):
        data = loop.IndexedData(parsed, map=map, on_bad_example=on_bad_example)
        made = source(data, BatchOptions(batch_size), "train_data()")
        steps = [made.whole(tf.constant(0, tf.int64), tf.constant(step, tf.int64)) for step in range(6 // batch_size)]
        made.close()
        return [number for rows in steps for number in rows.batch["x"].numpy().tolist()]

    with pytest.warns(UserWarning, match="record 4 can't be parsed"):
        assert read("skip") == [0, 1, 2, 3, 5]
    with pytest.raises(UsageError, match=r"record 4 can't be parsed .*Key: x.*: give the features that records have"):
        read("stop")


def test_damaged_records_are_named(tmp_path):
    pattern = _write(tmp_path)
    path = tmp_path / "train-1.tfrecord"
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    records = loop.records(pattern)
    with pytest.raises(UsageError, match=r"train-1.tfrecord: record \d, at byte \d+, is damaged"):
        [records[index] for index in range(50)]
    path.write_bytes(damaged[:-7])
    with pytest.raises(UsageError, match="would end after the end of the file"):
        loop.records(pattern)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda directory: loop.records(directory / "nothing-*"), "there is no such file"),
        (
            lambda directory: loop.records([_write(directory), directory / "other.tfrecord"]),
            r"other.tfrecord'\): there is no such file",
        ),
        (lambda _: loop.records("gs://bucket/*.tfrecord"), r"only files of this machine .* tf.data.TFRecordDataset"),
        (lambda directory: loop.records([]), "give the path of at least one file"),
        (loop.records, "it is a directory: give its files"),
        (lambda directory: loop.records(__file__), "isn't a TFRecord file"),
        (
            lambda directory: loop.records(_write(directory), {"x": tf.io.VarLenFeature(tf.int64)}),
            "give tf.io.FixedLenFeature",
        ),
    ],
)
def test_what_is_no_records_is_refused(make, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        make(tmp_path)


def test_a_file_whose_name_could_be_a_pattern_is_that_file(tmp_path):
    for name, record in (("part[1].tfrecord", b"brackets"), ("part1.tfrecord", b"plain"), ("part*.tfrecord", b"star")):
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            writer.write(record)
    assert loop.records(tmp_path / "part[1].tfrecord")[0] == b"brackets"
    assert loop.records([str(tmp_path / "part*.tfrecord")])[0] == b"star"
    assert len(loop.records(tmp_path / "part?.tfrecord")) == 2


def test_array_records_of_grain_are_the_same_examples(tmp_path):
    path = str(tmp_path / "train.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for image, label in zip(IMAGES, LABELS, strict=True):
        writer.write(_example(image, label))
    writer.close()
    data = loop.IndexedData(grain.sources.ArrayRecordDataSource([path]), map=_parsed)
    expected = _batches(loop.ArrayData({"image": IMAGES, "label": LABELS}))
    for ours, theirs in zip(_batches(data), expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, ours, theirs)


def test_hugging_face_data_sets_are_the_same_examples():
    rows = datasets.Dataset.from_dict({"image": list(IMAGES), "label": LABELS}).with_format("numpy")
    data = loop.IndexedData(rows)
    expected = _batches(loop.ArrayData({"image": IMAGES, "label": LABELS}))
    for ours, theirs in zip(_batches(data), expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, ours, theirs)


def test_a_file_that_several_patterns_name_is_said(tmp_path):
    """An epoch has its records as often, and a split may train on what it evaluates."""
    for name in ("train-1", "train-2", "other"):
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            writer.write(name.encode())
    with pytest.warns(UserWarning, match="3 files are 2, of which .*train-1 is named 2 times"):
        records = loop.records([tmp_path / "train-*", tmp_path / ".." / tmp_path.name / "train-1"])
    assert records.__getitems__([0, 1, 2]) == [b"train-1", b"train-2", b"train-1"]
    assert len(loop.records([tmp_path / "train-*", tmp_path / "other"])) == 3
