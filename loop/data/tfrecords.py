"""TFRecord files as examples that are read by index: where each record begins is found once, and kept in a cache."""

from __future__ import annotations

import glob
import os
import struct
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.lib.io import tf_record  # its random reader has no public name
from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

from callbacks.files import hidden_name, replacing
from loop.data.data_files import DataFile, cached
from loop.data.example_parts import Columns, by_source
from loop.errors import UsageError

TFReader: TypeAlias = Any
"""TensorFlow's random reader of a file of records; its class has no public name."""

_LENGTH = struct.Struct("<Q")
"""The first field of a record. A checksum of it, the data, and a checksum of the data follow; 4 bytes each checksum."""

_AROUND = 8 + 4 + 4
"""The bytes of a record beside its data."""

_BUFFER = 1 << 20
"""Bytes that are read at a time while lengths are searched."""


class RecordSource:
    """The records of TFRecord files, by index; made by `loop.records`.

    Attributes:
        by_column: whether `read` returns stacked arrays: those of parsed features.
    """

    def __init__(self, paths: Sequence[Path], features: Mapping[str, tf.io.FixedLenFeature] | None) -> None:
        self.by_column = features is not None
        self._features = features
        self._files = list(map(DataFile, paths))
        self._offsets = _offsets_of_all(paths)
        self._ends = np.cumsum(list(map(len, self._offsets)))
        self._local = threading.local()  # two threads must not share a reader of TensorFlow's

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> bytes:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[bytes]:
        """The bytes of these records."""
        numbers = np.asarray(indices, np.int64)
        records = [b""] * len(numbers)
        for number, positions, own_numbers in by_source(self._ends, numbers):
            self._files[number].check()  # with another size, the offsets would be those of other bytes
            path = self._files[number].path
            reader = self._reader(number)
            for position, own_number in zip(positions.tolist(), own_numbers.tolist(), strict=True):
                offset = int(self._offsets[number][own_number])
                try:
                    records[position] = reader.read(offset)[0]
                except (tf.errors.OpError, IndexError) as error:
                    raise UsageError(
                        f"{path}: record {own_number}, at byte {offset}, is damaged ({_message(error)}): "
                        "write the file anew, or leave such records out with on_bad_example='skip'"
                    ) from None
        return records

    def read(self, indices: np.ndarray) -> Columns | list[bytes]:
        """Reads the records of these indices: a list of bytes, or the arrays of their features."""
        records = self.__getitems__(indices.tolist())
        if self._features is None:
            return records
        with tf.device("CPU:0"):
            try:
                parsed = tf.io.parse_example(records, dict(self._features))
            except tf.errors.OpError as error:
                # If several were asked for, each is then read by itself.
                reason = _message(error).split("}} ")[-1]  # without TensorFlow's name of the operation
                raise UsageError(
                    f"loop.records(features=...): record {indices[0]} can't be parsed ({reason}): give the "
                    "features that records have, or leave such records out with on_bad_example='skip'"
                ) from None
        return {name: tensor.numpy() for name, tensor in parsed.items()}

    def _reader(self, number: int) -> TFReader:
        """The reader of a file, of the current thread."""
        readers: dict[int, TFReader] = self._local.__dict__.setdefault("readers", {})
        if number not in readers:
            readers[number] = tf_record.tf_record_random_reader(str(self._files[number].path))
        return readers[number]

    def __getstate__(self) -> dict[str, Any]:
        """Without the open readers: a process that reads opens its own."""
        state = self.__dict__.copy()
        del state["_local"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()


def records(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    features: Mapping[str, tf.io.FixedLenFeature] | None = None,
) -> RecordSource:
    """TFRecord files as a source for `IndexedData`: with a global shuffle, and the same on any number of workers.

    Where each record begins is found when files are opened for the first time, and kept in the cache directory
    (`TFLOOP_CACHE`, or `tfloop` in the user's cache) for as long as their sizes and times stay. Checksums are checked
    when a record is read.

    Args:
        pattern: a path, a pattern such as `data/train-*.tfrecord`, or several of them, in order; the files of a pattern
            are taken in the order of their names. What is the name of a file is that file, and no pattern.
        features: if records are `tf.train.Example`: what to take from each, as for `tf.io.parse_example`; examples are
            then dicts of arrays. None: examples are bytes, for the `map` of `IndexedData`.

    Raises:
        UsageError: no such file, a compressed or damaged one, or features of no fixed length.
    """
    patterns = [pattern] if isinstance(pattern, str | os.PathLike) else list(pattern)
    paths: list[Path] = []
    for one_pattern in patterns:
        paths += _files_of(os.fspath(one_pattern))
    if not paths:
        raise UsageError("loop.records([]): give the path of at least one file, or a pattern")
    for path in paths:
        if path.is_dir():
            raise UsageError(f"loop.records({str(path)!r}): it is a directory: give its files, as {path}/*.tfrecord")
    _warn_of_repeated(paths)
    for name, feature in (features or {}).items():
        if not isinstance(feature, tf.io.FixedLenFeature):
            raise UsageError(
                f"loop.records(features=...): {name!r} is a {type(feature).__name__}: give tf.io.FixedLenFeature, or "
                "leave features out and parse the bytes in the map of IndexedData"
            )
    return RecordSource(paths, features)


def _warn_of_repeated(paths: Sequence[Path]) -> None:
    """Warns if a file is named more than once, as by patterns that overlap."""
    counts = Counter(map(Path.resolve, paths))
    [(path, count)] = counts.most_common(1)
    if count > 1:
        warnings.warn(
            f"loop.records: {len(paths)} files are {len(counts)}, of which {path} is named {count} times, so that an "
            "epoch has its records as often: give patterns that don't overlap, if that isn't meant",
            stacklevel=3,
        )


def _files_of(pattern: str) -> list[Path]:
    """The files of a path or pattern."""
    path = Path(pattern)
    # A file of this very name is meant, also where the name has brackets or stars in it.
    if path.exists():
        return [path]
    # Each pattern must have a file: a missing one would leave examples out without a word.
    if paths := sorted(glob.glob(pattern)):  # noqa: PTH207
        return list(map(Path, paths))
    if "://" in pattern:
        raise UsageError(
            f"loop.records({pattern!r}): only files of this machine are read by index: mount or copy them; or read "
            "them as a stream, with tf.data.TFRecordDataset"
        )
    raise UsageError(f"loop.records({pattern!r}): there is no such file: give the path of one, or a pattern")


def _offsets_of_all(paths: Sequence[Path]) -> list[np.ndarray]:
    """The offsets of the records in each file, in bytes: int64 [records] each. They are kept in files of a cache."""
    # By the file in the cache: two threads must not write that of a file that is named twice.
    offsets: dict[Path, np.ndarray] = {}
    missing: dict[Path, Path] = {}
    caches = [cached("records", path) for path in paths]
    for path, cache in zip(paths, caches, strict=True):
        try:
            offsets[cache] = _mapped(cache)
        except (OSError, ValueError, EOFError):  # not there, or damaged, as by a power failure
            missing[cache] = path
    if missing:
        found_offsets = thread_map(
            _searched, missing.values(), missing, desc="finding records", unit="file", disable=None, tqdm_class=tqdm
        )
        offsets.update(zip(missing, found_offsets, strict=True))
    return [offsets[cache] for cache in caches]


def _mapped(cache: Path) -> np.ndarray:
    """Offsets from a file of the cache."""
    # Mapped: the workers of a machine share these pages, and only those that are used are in memory.
    offsets: np.ndarray = np.load(cache, mmap_mode="r", allow_pickle=False)
    # Offsets grow, so the last of several isn't 0: a power failure has left zeros, which earlier versions allowed.
    if len(offsets) > 1 and offsets[-1] == 0:
        raise ValueError("its end is zeros")
    return offsets


def _searched(path: Path, cache: Path) -> np.ndarray:
    """Finds the offsets of the records in a file, and keeps them in one of the cache, mapped, if it can be written."""
    offsets = _offsets(path)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        # Several workers may do this at once: each writes a file of its own, and the last one stays.
        # Durable: after a power failure, zeros in place of offsets would all be those of the first record.
        with replacing(cache, durable=True, aside=hidden_name(cache)) as file:
            np.save(file, offsets)
    except OSError as error:  # a full disk, or a home directory that is read-only, as in containers
        warnings.warn(
            f"{cache.parent} can't be written ({error.strerror}): where records begin is searched anew at each start; "
            "TFLOOP_CACHE=DIRECTORY keeps it in another directory",
            stacklevel=2,
        )
        return offsets
    return _mapped(cache)


def _offsets(path: Path) -> np.ndarray:
    """The offsets of the records in a file, from the length at the beginning of each record."""
    # Only lengths are read, and no checksum: those are checked when a record is read.
    size = path.stat().st_size
    if size:
        _check_first(path)
    offsets: list[int] = []
    offset = 0
    with path.open("rb", buffering=_BUFFER) as file:
        while offset < size:
            header = file.read(_LENGTH.size)
            # Without a whole header, the file ends within it: any end past that of the file is refused below.
            data_bytes = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else size
            end = offset + _AROUND + data_bytes
            if end > size:
                raise UsageError(
                    f"{path}: damaged at byte {offset}: record {len(offsets)} would end after the end of the file: "
                    "write the file anew"
                )
            offsets.append(offset)
            file.seek(end)
            offset = end
    return np.array(offsets, np.int64)


def _check_first(path: Path) -> None:
    """Refuses a compressed file, and a file that isn't one of records."""
    try:
        tf_record.tf_record_random_reader(str(path)).read(0)
    except (tf.errors.OpError, IndexError) as error:
        with path.open("rb") as file:
            magic = file.read(2)
        # The first bytes of GZIP (RFC 1952) and of ZLIB (RFC 1950, whose first two bytes are a multiple of 31).
        if magic == b"\x1f\x8b" or (magic[:1] == b"\x78" and int.from_bytes(magic) % 31 == 0):
            raise UsageError(
                f"{path} is compressed, so that no record can be read by itself: write it without compression, as "
                "tf.io.TFRecordWriter(path) does, or read it as a stream, with tf.data.TFRecordDataset"
            ) from None
        raise UsageError(f"{path} isn't a TFRecord file, or its first record is damaged ({_message(error)})") from None


def _message(error: Exception) -> str:
    return str(getattr(error, "message", error)).split("\n")[0]
