"""Sources whose examples are read by index: arrays, memory maps, files, and objects with a length and `[index]`."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from loop.data.arrow_tables import ParquetRows, Table
from loop.data.data_files import DataFile
from loop.data.example_parts import (
    Columns,
    Example,
    count_of,
    dicts_of,
    refuse_masked,
    rows_of,
    tuple_of,
    without_lists,
)
from loop.data.mapped_memory import AT_ONCE, LARGE, MAPPED_MEMORY
from loop.errors import UsageError

Source: TypeAlias = Any
"""What `IndexedData` reads from; see there."""
Foreign: TypeAlias = Any
"""An object of a library that is loaded only when a user passes one, such as an Arrow table."""
_JOINED_AT_ONCE = 256
"""The number of stretches that are joined at once: they stay in a core's cache until they are written to the result."""


class Reader(Protocol):
    """Reads examples of one type of source.

    Attributes:
        by_column: whether `read` returns stacked arrays, [n, ...] each, rather than a list of n examples.
    """

    by_column: bool

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> Columns | list[Example]:
        """Reads the examples of these indices, int64 [n]; in this order."""


def reader_of(source: Source) -> Reader:
    """The reader for a source.

    Args:
        source: a NumPy array or memory map, the path of an `.npy` or `.parquet` file, an object with a length and
            `[index]`, or a dict or tuple of such sources.

    Raises:
        UsageError: none of these; sources of unequal length.
    """
    # From the most specific type to the most general one: an array, too, has a length and can be indexed.
    if isinstance(source, Mapping | tuple):
        return Structure(source)
    if isinstance(source, str | Path):
        return _of_file(Path(source))
    if isinstance(source, np.ndarray):
        return ArrayRows(source)
    if hasattr(source, "by_column"):  # a reader already, such as `loop.records` and `loop.sequences` return
        return source
    # An Arrow table is recognized by its interface, so that pyarrow isn't imported for other sources.
    if hasattr(source, "__arrow_c_stream__") and hasattr(source, "num_rows"):
        return Table(source)
    kind = type(source)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(kind, name)]
    if missing:
        raise UsageError(
            f"IndexedData({kind.__name__}): it has no {' and '.join(missing)}: give an array, a memory map, an .npy or "
            ".parquet file, or an object with a length whose examples can be read by index"
        )
    _refuse_other_items(source)
    try:
        len(source)
    except TypeError as error:
        raise UsageError(f"IndexedData({kind.__name__}): {error}: give an array or a list of examples") from None
    return _Batches(source) if _is_keras_batches(kind) else _Items(source)


def _refuse_other_items(source: Source) -> None:
    """Refuses objects whose `[index]` gives something else than the example at that position."""
    kind = type(source).__name__
    # In a pandas Series, [index] would be the example with this label, beside other examples' labels.
    if hasattr(source, "iloc"):
        raise UsageError(
            f"IndexedData({kind}): a {kind} has [label], and no [index]: give its .to_numpy(), or a dict of columns, "
            "or ArrayData(...)"
        )
    # In a Hugging Face data set of this format, [index] would be a table.
    how = getattr(source, "format", None)
    if isinstance(how, Mapping) and how.get("type") == "arrow":
        raise UsageError(
            f'IndexedData({kind}): its format "arrow" gives tables, and no examples: give dataset.with_format("numpy")'
        )


class ArrayRows:
    """An array [n, ...] in memory or in a file, whose rows are examples."""

    by_column = True

    def __init__(self, array: np.ndarray) -> None:
        if not array.ndim:
            raise UsageError("IndexedData: a scalar has no examples: give an array of shape [n, ...]")
        if array.dtype == object:
            raise UsageError(
                "IndexedData: an array of objects isn't an array of numbers or text: give a list of examples"
            )
        refuse_masked(array, "IndexedData: ")
        self._array = array  # kept beside the view: a memory map's own attributes say where it is in its file
        self._rows = array.view(np.ndarray)  # whose rows are plain arrays: a memory map's take longer to make
        # `take` first copies the whole array if its rows aren't contiguous, or not in the machine's byte order.
        self._can_take = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
        self._row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
        self._map = _shared_map(array)
        self._file = _file_of(array)
        self._is_large = False
        if self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)  # rows are read in a shuffled order, so reading ahead is of no use
            self._is_large = len(self._map) > LARGE
            if self._is_large:
                MAPPED_MEMORY.add(self._map)

    def __len__(self) -> int:
        return len(self._array)

    def read(self, indices: np.ndarray) -> np.ndarray:
        return self._in_parts(self._taken, indices)

    def stretches(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Several stretches of rows, joined: each from its start up to its end, int64 [n] both."""
        return self._in_parts(self._joined, starts, ends)

    def _in_parts(self, read: Callable[..., np.ndarray], *places: np.ndarray) -> np.ndarray:
        """Reads some places by a function. A large map is read in parts, so that few of its pages are in memory."""
        if self._file is not None:
            self._file.check()  # the system kills a process that reads past the end of a mapped file
        if not self._is_large:
            return read(*places)
        parts = []
        # At least once, also without places: the result has the dtype and the shape of the rows.
        for first in range(0, max(1, len(places[0])), AT_ONCE):
            some_places = [numbers[first : first + AT_ONCE] for numbers in places]
            part = read(*some_places)
            parts.append(part)
            MAPPED_MEMORY.release(len(some_places[0]), part.nbytes)
        return np.concatenate(parts)

    def _taken(self, indices: np.ndarray) -> np.ndarray:
        return self._rows.take(indices, axis=0) if self._can_take else self._rows[indices]

    def _joined(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        if not self._can_take or not self._row_bytes:
            bounds = zip(starts.tolist(), ends.tolist(), strict=True)
            # The empty first part gives the result its dtype and shape where there are no stretches.
            return np.concatenate([self._rows[:0], *(self._rows[start:end] for start, end in bounds)])

        # As bytes, whose slices take less time than those of an array; see `_bytes_of`.
        rows = np.empty([int((ends - starts).sum()), *self._rows.shape[1:]], self._rows.dtype)
        out = _bytes_of(rows)
        filled = 0
        for first in range(0, len(starts), _JOINED_AT_ONCE):
            chunk = slice(first, first + _JOINED_AT_ONCE)
            first_bytes = (starts[chunk] * self._row_bytes).tolist()
            end_bytes = (ends[chunk] * self._row_bytes).tolist()
            bounds = zip(first_bytes, end_bytes, strict=True)
            joined = b"".join([self._bytes[start:end] for start, end in bounds])
            out[filled : filled + len(joined)] = joined
            filled += len(joined)
        return rows

    @functools.cached_property
    def _bytes(self) -> memoryview:
        return _bytes_of(self._rows)

    def __reduce__(self) -> tuple[Callable[..., ArrayRows], tuple[Any, ...]]:
        """A process that reads maps the file, too: it may be larger than memory."""
        array = self._array
        if self._map is None:
            return ArrayRows, (self._rows,)
        assert isinstance(array, np.memmap)  # nothing else has such a map
        if array.filename is None or not array.flags.c_contiguous:
            raise TypeError("a memory map can be sent if it has a file, and its rows lie one after the other")

        # The array may be a slice of the map: `offset` is that of the map, and the addresses tell the rest.
        memory = np.frombuffer(self._map, np.uint8)
        before = array.offset % mmap.ALLOCATIONGRANULARITY  # a map begins at a whole page of the file
        start = array.offset - before + array.ctypes.data - memory.ctypes.data
        return _mapped_rows, (Path(array.filename).resolve(), array.dtype, start, array.shape)


def _mapped_rows(path: Path, dtype: np.dtype, start: int, shape: tuple[int, ...]) -> ArrayRows:
    """An array in a file, mapped into memory from a byte on."""
    return ArrayRows(np.memmap(path, dtype, "r", start, shape))


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array. A slice of it takes a third of the time that one of an array takes."""
    return array.reshape(-1).view(np.uint8).data


def _shared_map(array: np.ndarray) -> mmap.mmap | None:
    """The memory map of an array, if its pages can be given back. Those of a copy-on-write map can't."""
    mapped = getattr(array, "_mmap", None)
    gives_back = getattr(array, "mode", "c") in ("r", "r+", "w+")
    return mapped if isinstance(mapped, mmap.mmap) and gives_back else None


def _file_of(array: np.ndarray) -> DataFile | None:
    """The file of a read-only memory map; else None."""
    # A map that is written to during the run changes the time of its file itself.
    if not isinstance(array, np.memmap) or array.mode != "r" or array.filename is None:
        return None
    path = Path(array.filename)
    return DataFile(path) if path.is_file() else None


class _Items:
    """An object whose examples are read one by one, or many at once if it has `__getitems__`."""

    by_column = False

    def __init__(self, source: Source) -> None:
        self._source = source
        many = getattr(source, "__getitems__", None)
        self._many: Callable[[list[int]], Sequence[Example]] | None = many if callable(many) else None

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: np.ndarray) -> list[Example]:
        numbers = indices.tolist()  # Python's own integers: not every `__getitem__` takes NumPy's
        if self._many is None:
            return [self._source[number] for number in numbers]
        given = self._many(numbers)
        if isinstance(given, Mapping):  # else its keys would be the examples
            raise UsageError(
                f"{type(self._source).__name__}.__getitems__ returned one {type(given).__name__} for all indices: "
                "return a list with the example of each index"
            )
        examples = list(given)
        if len(examples) != len(numbers):
            raise UsageError(
                f"{type(self._source).__name__}.__getitems__ returned {len(examples)} examples for {len(numbers)} "
                "indices: return one for each"
            )
        return examples


class Structure:
    """A dict or tuple of sources, each of which gives a part of an example.

    Attributes:
        readers: the readers of the sources, by their names or positions.
    """

    def __init__(self, sources: Mapping[str | int, Source] | tuple[Source, ...]) -> None:
        if not sources:
            raise UsageError("IndexedData: a dict or tuple without sources: give at least one source")
        self._tuple: type[tuple[Example, ...]] | None = None
        if isinstance(sources, tuple):
            self._tuple = type(sources)  # a named tuple keeps its type, in which `compute` gets it
            sources = dict(enumerate(sources))
        self.readers: dict[str | int, Reader] = dict(zip(sources, map(reader_of, sources.values()), strict=True))
        self.by_column = all(reader.by_column for reader in self.readers.values())
        if len(set(map(len, self.readers.values()))) != 1:
            listed = ", ".join(f"{name!r}: {len(reader)}" for name, reader in self.readers.items())
            raise UsageError(f"IndexedData: sources of unequal length ({listed}): give all the same number of examples")

    def __len__(self) -> int:
        return len(next(iter(self.readers.values())))

    def read(self, indices: np.ndarray) -> Columns | list[Example]:
        read = {name: reader.read(indices) for name, reader in self.readers.items()}
        if self.by_column:
            return self._packed(read)

        # One source gives a list of examples, so that the stacked arrays of the others become lists, too.
        for name, reader in self.readers.items():
            if reader.by_column:
                read[name] = rows_of(read[name], len(indices))
        return list(map(self._packed, dicts_of(read, len(indices))))

    def _packed(self, named: dict[str | int, Example]) -> Example:
        return named if self._tuple is None else tuple_of(self._tuple, named.values())


class _Batches:
    """A Keras `PyDataset`: batches by index, whose rows are the examples."""

    by_column = False
    _KEPT = 8

    def __init__(self, source: Foreign) -> None:
        self._source = source
        self._last = len(source) - 1
        # The first batch tells the size of all but the last one, so that the number of examples takes two batches.
        self._size = count_of(without_lists(source[0])) if self._last >= 0 else 0
        last_size = count_of(without_lists(source[self._last])) if self._last > 0 else self._size
        self._length = self._last * self._size + last_size
        self._batches: dict[int, list[Example]] = {}

    def __len__(self) -> int:
        return self._length

    def read(self, indices: np.ndarray) -> list[Example]:
        examples = []
        for index in indices.tolist():
            number, row = divmod(index, self._size)
            examples.append(self._batch(number)[row])
        return examples

    def _batch(self, number: int) -> list[Example]:
        """The examples of a batch. The last few batches are kept."""
        batches = self._batches
        if number not in batches:
            batch = without_lists(self._source[number])
            rows = rows_of(batch, count_of(batch))
            expected = self._size if number < self._last else self._length - self._last * self._size
            if len(rows) != expected:
                raise UsageError(
                    f"{type(self._source).__name__}[{number}] has {len(rows)} examples instead of {expected}: all "
                    "batches but the last must have one size"
                )
            # A new dict, and no change of the old one, in which another thread may be looking a batch up.
            newest = dict(list(batches.items())[1 - self._KEPT :])
            batches = {**newest, number: rows}
            self._batches = batches
        return batches[number]


def _is_keras_batches(kind: type) -> bool:
    """Whether sources of a class are `PyDataset`s of Keras, or `Sequence`s, as older versions call it."""
    # By name, since both families of Keras have such a class, and neither is to be imported for this.
    return any(base.__name__ in ("PyDataset", "Sequence") and "keras" in base.__module__ for base in kind.mro())


def _of_file(path: Path) -> Reader:
    """The reader for a file."""
    if not path.is_file():
        raise UsageError(f"IndexedData({str(path)!r}): there is no such file")
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:  # EOFError: the file is empty
            raise UsageError(f"IndexedData({str(path)!r}): it can't be read as an .npy file ({error})") from None
        return ArrayRows(array)  # not within `try`: what it refuses was read well
    if path.suffix == ".parquet":
        return ParquetRows(path)
    raise UsageError(
        f"IndexedData({str(path)!r}): only .npy and .parquet files are read by name: for TFRecord files use "
        "loop.records(...), for others an object with a length and [index]"
    )
