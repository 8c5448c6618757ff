"""Sources whose examples are read by index: arrays, memory maps, files, and objects with a length and `[index]`."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from loop.data.data_files import DataFile
from loop.errors import UsageError

_AROUND = 1 << 16
"""Bytes around a page that Linux maps with it, if they are in its cache."""

_RELEASED = 1 << 27
"""Bytes that are read of a memory map before its pages are given back: they would count as memory of the process."""


@runtime_checkable
class RandomAccess(Protocol):
    """Examples that can be read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Reader(Protocol):
    """How examples of one kind of source are read.

    Attributes:
        by_column: whether `read` returns stacked arrays, [n, ...] each, rather than a list of n examples.
    """

    by_column: bool

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Any:
        """The examples of these indices, in this order: int64 [n]."""


def reader_of(source: Any) -> Reader:
    """How a source is read.

    Args:
        source: a NumPy array or memory map, the path of an `.npy` or `.parquet` file, an object with a length and
            `[index]`, or a dict or tuple of such sources.

    Raises:
        UsageError: none of these; sources of unequal length.
    """
    if isinstance(source, Mapping | tuple):
        return _Structure(source)
    if isinstance(source, str | Path):
        return _of_file(Path(source))
    if isinstance(source, np.ndarray):
        return _Array(source)
    if hasattr(source, "by_column"):
        return source
    if hasattr(source, "__arrow_c_stream__") and hasattr(source, "schema"):
        return _Table(source)
    if not isinstance(source, RandomAccess):
        missing = " and ".join(name for name in ("__len__", "__getitem__") if not hasattr(type(source), name))
        raise UsageError(
            f"IndexedData({type(source).__name__}): it has no {missing}: give an array, a memory map, an .npy or "
            ".parquet file, or an object with a length whose examples can be read by index"
        )
    if _is_keras_batches(source):
        return _Batches(source)
    return _Items(source)


class _Array:
    """An array in memory or in a file, whose rows are examples."""

    by_column = True

    def __init__(self, array: np.ndarray) -> None:
        if not array.ndim:
            raise UsageError("IndexedData: a scalar has no examples: give an array of shape [n, ...]")
        if array.dtype == object:
            raise UsageError("IndexedData: an array of objects is no array of numbers or text: give a list of examples")
        self._array = array
        self._rows = array.view(np.ndarray)  # whose rows are plain arrays: a memory map's take longer to make
        # `take` would first copy a whole array that doesn't lie row by row in memory, or in the machine's byte order.
        self._direct = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
        self._map = _shared_map(array)
        self._file = _file_of(array)
        self._touched = 0
        if self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)  # rows are read in a shuffled order: reading ahead would read in vain

    def __len__(self) -> int:
        return len(self._array)

    def read(self, indices: np.ndarray) -> np.ndarray:
        if self._file is not None:
            self._file.check()  # the system would kill a process that reads behind the end of a file
        rows = self._rows.take(indices, axis=0) if self._direct else self._rows[indices]
        if self._map is not None and len(self._map) > _RELEASED:
            self._touched += rows.nbytes + _AROUND * len(indices)
            if self._touched >= _RELEASED:
                self._touched = 0
                self._map.madvise(mmap.MADV_DONTNEED)
        return np.asarray(rows)


def _shared_map(array: np.ndarray) -> mmap.mmap | None:
    """The memory map of an array whose pages can be given back; None: it lies in memory, or has pages of its own."""
    mapped = getattr(array, "_mmap", None)
    return mapped if isinstance(mapped, mmap.mmap) and getattr(array, "mode", "c") in ("r", "r+", "w+") else None


def _file_of(array: np.ndarray) -> DataFile | None:
    """The file of a memory map that isn't written to; None: there is none."""
    if not isinstance(array, np.memmap) or array.mode != "r" or array.filename is None:
        return None
    path = Path(array.filename)
    return DataFile(path) if path.is_file() else None


class _Items:
    """An object whose examples are read one by one, or many at once where it has `__getitems__`."""

    by_column = False

    def __init__(self, source: RandomAccess) -> None:
        self._source = source
        many = getattr(source, "__getitems__", None)
        self._many: Callable[[list[int]], Sequence[Any]] | None = many if callable(many) else None

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: np.ndarray) -> list[Any]:
        wanted = indices.tolist()
        if self._many is None:
            return [self._source[index] for index in wanted]
        examples = list(self._many(wanted))
        if len(examples) != len(wanted):
            raise UsageError(
                f"{type(self._source).__name__}.__getitems__ returned {len(examples)} examples for {len(wanted)} "
                "indices: return one for each"
            )
        return examples


class _Structure:
    """A dict or tuple of sources, of which each gives a part of an example."""

    def __init__(self, parts: Mapping[str, Any] | tuple[Any, ...]) -> None:
        named = parts if isinstance(parts, Mapping) else dict(enumerate(parts))
        self._readers: dict[Any, Reader] = {name: reader_of(part) for name, part in named.items()}
        self._is_tuple = isinstance(parts, tuple)
        self.by_column = all(reader.by_column for reader in self._readers.values())
        lengths = {name: len(reader) for name, reader in self._readers.items()}
        if len(set(lengths.values())) != 1:
            said = ", ".join(f"{name!r}: {length}" for name, length in lengths.items()) or "none"
            raise UsageError(f"IndexedData: sources of unequal length ({said}): give all the same number of examples")

    def __len__(self) -> int:
        return len(next(iter(self._readers.values())))

    def read(self, indices: np.ndarray) -> Any:
        columns = {name: reader.read(indices) for name, reader in self._readers.items()}
        if self.by_column:
            return self._packed(columns)
        rows = {
            name: columns[name] if not reader.by_column else _rows(columns[name], len(indices))
            for name, reader in self._readers.items()
        }
        return [self._packed({name: rows[name][row] for name in rows}) for row in range(len(indices))]

    def _packed(self, named: dict[Any, Any]) -> Any:
        return tuple(named.values()) if self._is_tuple else named


def _rows(column: Any, count: int) -> list[Any]:
    """The examples of stacked arrays."""
    if isinstance(column, Mapping):
        parts = {name: _rows(part, count) for name, part in column.items()}
        return [{name: part[row] for name, part in parts.items()} for row in range(count)]
    if isinstance(column, tuple):
        return list(zip(*(_rows(part, count) for part in column), strict=True))
    return list(column)


class _Table:
    """An Arrow table, whose rows are dicts."""

    by_column = False

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        rows = self._table.take(indices)
        columns = {name: _column(rows[name]) for name in rows.column_names}
        return [{name: column[row] for name, column in columns.items()} for row in range(len(indices))]


def _column(column: Any) -> Any:
    """The values of an Arrow column, of the dtypes that they have there."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        return [value.values.to_numpy(zero_copy_only=False) for value in column]
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_binary(kind):
        return column.to_pylist()
    return column.to_numpy()


class _Batches:
    """A Keras `PyDataset`: batches by index, whose rows are the examples."""

    by_column = False
    _KEPT = 8

    def __init__(self, source: Any) -> None:
        self._source = source
        self._last = len(source) - 1
        self._size = _rows_of(source[0])
        self._length = self._last * self._size + (_rows_of(source[self._last]) if self._last > 0 else self._size)
        self._batches: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        return self._length

    def read(self, indices: np.ndarray) -> list[Any]:
        return [self._batch(int(index) // self._size)[int(index) % self._size] for index in indices]

    def _batch(self, number: int) -> list[Any]:
        batches = self._batches
        if number not in batches:
            batch = self._source[number]
            rows = _rows(batch, _rows_of(batch))
            expected = self._size if number < self._last else self._length - self._last * self._size
            if len(rows) != expected:
                raise UsageError(
                    f"{type(self._source).__name__}[{number}] has {len(rows)} examples instead of {expected}: all "
                    "batches but the last must have one size"
                )
            batches = {**dict(list(batches.items())[1 - self._KEPT :]), number: rows}
            self._batches = batches
        return batches[number]


def _rows_of(batch: Any) -> int:
    first = batch
    while isinstance(first, Mapping | tuple):
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    return len(first)


def _is_keras_batches(source: Any) -> bool:
    return any(base.__name__ in ("PyDataset", "Sequence") and "keras" in base.__module__ for base in type(source).mro())


def _of_file(path: Path) -> Reader:
    if not path.is_file():
        raise UsageError(f"IndexedData({str(path)!r}): there is no such file")
    if path.suffix == ".npy":
        try:
            return _Array(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError) as error:
            raise UsageError(f"IndexedData({str(path)!r}): it can't be read as an .npy file ({error})") from None
    if path.suffix == ".parquet":
        from loop.data.parquet import table_of

        return _Table(table_of(path))
    raise UsageError(
        f"IndexedData({str(path)!r}): only .npy and .parquet files are read by name: for TFRecord files use "
        "loop.records(...), for others an object with a length and [index]"
    )


def flatten(structure: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The parts of an example that aren't dicts or tuples, in the order of `tf.nest.flatten`, and the way to each."""
    if isinstance(structure, Mapping):
        for name in sorted(structure):
            yield from flatten(structure[name], (*path, name))
    elif isinstance(structure, tuple):
        for place, part in enumerate(structure):
            yield from flatten(part, (*path, place))
    else:
        yield path, structure


def structure_of(example: Any) -> Any:
    """The dicts and tuples of an example, with 0 for each of its parts."""
    if isinstance(example, Mapping):
        return {name: structure_of(part) for name, part in example.items()}
    if isinstance(example, tuple):
        parts = [structure_of(part) for part in example]
        return type(example)(*parts) if hasattr(example, "_fields") else tuple(parts)
    return 0
