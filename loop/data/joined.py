"""Sequences that lie one behind the other in one array or file, as examples that are read by index."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from loop.data.random_access import ArrayRows, Reader, Structure, reader_of
from loop.errors import UsageError


class JoinedSequences:
    """Sequences in one array, one behind the other; made by `loop.sequences`.

    Args:
        values: the elements of all sequences.
        lengths: the length of each sequence: int64 [examples].
    """

    by_column = True

    def __init__(self, values: ArrayRows, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self._values = values
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, indices: np.ndarray) -> SequenceColumn:
        """The sequences of these indices, int64 [n]."""
        # A few array operations for all sequences, and none for each one: that makes reading them fast.
        lengths = self.lengths.take(indices)
        ends = self._ends.take(indices)
        return SequenceColumn(self._values.stretches(ends - lengths, ends), lengths)


class SequenceColumn:
    """The same array of several examples, which differ in length.

    Attributes:
        values: the elements of all examples, one behind the other: [elements of all, ...].
        lengths: the number of elements of each example: int64 [examples].
    """

    def __init__(self, values: np.ndarray, lengths: np.ndarray) -> None:
        self.values = values
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        end = self._ends[row]
        return self.values[end - self.lengths[row] : end]

    # Only when one example is asked for: a column that fills a batch at once needs no ends.
    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)


def sequences(values: np.ndarray | str | os.PathLike[str], lengths: Sequence[int] | np.ndarray) -> JoinedSequences:
    """Sequences that lie one behind the other in one array, as a source for `IndexedData`: tokens of documents, say.

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
            f"loop.sequences({type(values).__name__}): give one array with all sequences behind each other, a memory "
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


def known_lengths(reader: Reader) -> np.ndarray | dict[str | int, np.ndarray] | None:
    """The lengths of examples that a source knows: of the only array, or by names; None: it knows none."""
    if isinstance(reader, JoinedSequences):
        return reader.lengths
    if not isinstance(reader, Structure):
        return None
    named = {}
    for name, part in reader.readers.items():
        if isinstance(part, JoinedSequences):
            named[name] = part.lengths
    return named or None
