"""Examples of different shapes that lie one after the other in one array or file."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence

import numpy as np

from loop.data.example_parts import PartPath, name_of
from loop.data.random_access import ArrayRows, Reader, Structure, reader_of
from loop.errors import UsageError


class Sequences:
    """Examples of different shapes, one after the other in one array.

    Attributes:
        rows: the rows of all examples, [rows of all examples, ...]. A row has the axes that don't differ: if examples
            differ in length alone, it is one position of a sequence; for pictures of different height and width, it is
            a pixel.
        shapes: the sizes of each example that differ: int64 [examples, axes].
    """

    def __init__(self, rows: np.ndarray, shapes: np.ndarray) -> None:
        self.rows = rows
        self.shapes = shapes

    @property
    def axes(self) -> int:
        """The number of axes of an example that differ in size, from the first one on."""
        return self.shapes.shape[1]

    # Computed when they are asked for: what fills a batch at once needs neither.
    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """The number of rows of each example: int64 [examples]."""
        # int64 in any case: the rows of all examples may be more than 32 bits count.
        return np.prod(self.shapes, axis=1, dtype=np.int64)

    @functools.cached_property
    def firsts(self) -> np.ndarray:
        """The index of the first row of each example: int64 [examples]."""
        return np.cumsum(self.sizes) - self.sizes

    @property
    def dtype(self) -> np.dtype:
        """The dtype of all examples."""
        return self.rows.dtype

    @property
    def nbytes(self) -> int:
        """The memory that the examples take, in bytes."""
        return self.rows.nbytes

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> np.ndarray:
        first = self.firsts[index]
        rows = self.rows[first : first + self.sizes[index]]
        return rows if self.axes == 1 else rows.reshape([*self.shapes[index], *self.rows.shape[1:]])

    def head(self, count: int) -> Sequences:
        """The first examples."""
        shapes = self.shapes[:count]
        return Sequences(self.rows[: np.prod(shapes, axis=1, dtype=np.int64).sum()], shapes)

    def astype(self, dtype: str) -> Sequences:
        """The same examples in another dtype."""
        return Sequences(self.rows.astype(dtype), self.shapes)


class JoinedSequences:
    """Sequences in one array, one after the other; made by `loop.sequences`.

    `values` has the elements of all sequences; `lengths` is the length of each: int64 [examples].
    """

    by_column = True

    def __init__(self, values: ArrayRows, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self._values = values
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, indices: np.ndarray) -> Sequences:
        """The sequences of these indices, int64 [n]."""
        # A few array operations for all sequences, and none for each one: that makes reading them fast.
        lengths = self.lengths.take(indices)
        ends = self._ends.take(indices)
        return Sequences(self._values.stretches(ends - lengths, ends), lengths[:, np.newaxis])


def sequences(values: np.ndarray | str | os.PathLike[str], lengths: Sequence[int] | np.ndarray) -> JoinedSequences:
    """Sequences that lie one after the other in one array, as a source for `IndexedData`: tokens of documents, say.

    The array may be larger than memory. Sequences of a batch are read at once, which is the fastest way to read
    examples that differ in length. `IndexedData` needs no `lengths` of its own then, unless there is a `map`.

    Args:
        values: the elements of all sequences, [elements of all, ...]: an array, a memory map, or the path of an `.npy`
            file.
        lengths: how many of them each sequence has, in order: integers [examples].

    Raises:
        UsageError: no array; lengths that aren't integers from 0 on, or that don't add up to the elements.
    """
    reader = reader_of(values)
    if not isinstance(reader, ArrayRows):
        raise UsageError(
            f"loop.sequences({type(values).__name__}): give one array with one sequence after the other, a memory "
            "map, or the path of an .npy file"
        )
    counts = np.asarray(lengths)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise UsageError(
            f"loop.sequences(lengths=...): {counts.dtype}{list(counts.shape)}: give the number of elements of each "
            "sequence, integers [examples]"
        )
    if (counts < 0).any():
        index = int(np.argmax(counts < 0))
        raise UsageError(f"loop.sequences(lengths=...): {counts[index]} for sequence {index}: give numbers from 0 on")
    if counts.sum() != len(reader):
        raise UsageError(
            f"loop.sequences: {len(counts):,} lengths add up to {counts.sum():,}, and there are {len(reader):,} "
            "elements: give the length of each sequence, in the order in which they lie in the array"
        )
    return JoinedSequences(reader, counts.astype(np.int64))


def known_lengths(reader: Reader, path: PartPath = ()) -> Iterator[tuple[str | int, np.ndarray]]:
    """The names of the arrays that are sequences, with their lengths; `path` is where the reader's part is."""
    if isinstance(reader, JoinedSequences):
        yield name_of(path), reader.lengths
    elif isinstance(reader, Structure):
        for name, part in reader.readers.items():
            yield from known_lengths(part, (*path, name))
