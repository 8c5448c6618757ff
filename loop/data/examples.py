"""Examples of indexed data: read, mapped, checked, and stacked into the arrays of a batch."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from loop.data.random_access import Reader, flatten
from loop.errors import TrainingError, UsageError, message_of


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """What one array of each example is like.

    Attributes:
        name: what it is called; see `padding.leaf_names`.
        shape: of one example.
        dtype: its dtype; `object` for text.
        padded: how many axes, from the first on, differ in size from example to example.
    """

    name: str | int
    shape: tuple[int, ...]
    dtype: np.dtype
    padded: int = 0

    @property
    def label(self) -> str:
        """For messages: which array it is."""
        return f"array {self.name!r}: "


class BadExampleError(UsageError):
    """An example can't be used; the message names it."""


class ExampleReader:
    """Reads examples of one source by index.

    Args:
        reader: of the source.
        map: makes an example of what the source gives; a second argument named `seed` is int64 [2], see
            `loop.example_seed`.
    """

    def __init__(self, reader: Reader, map: Callable[..., Any] | None) -> None:
        self._reader = reader
        self._map = map
        self._draws = map is not None and _takes_seed(map)
        self.by_column = reader.by_column and map is None

    def __len__(self) -> int:
        return len(self._reader)

    def columns(self, ids: np.ndarray) -> list[np.ndarray]:
        """The arrays of these examples of the source, stacked; only with `by_column`."""
        return [column for _, column in flatten(self._reader.read(ids))]

    def unmapped(self, ids: np.ndarray) -> list[Any]:
        """These examples as the source gives them."""
        read = self._reader.read(ids)
        return [row_of(read, row) for row in range(len(ids))] if self._reader.by_column else list(read)

    def mapped(self, example: Any, seed: Any) -> Any:
        """What the map makes of an example; only with a map."""
        assert self._map is not None
        return self._map(example, seed=seed) if self._draws else self._map(example)

    def read(self, ids: np.ndarray, seeds: np.ndarray) -> list[Any]:
        """These examples: the structure of each, or the error that reading it has raised.

        Args:
            ids: of examples of the source: int64 [n].
            seeds: those of the examples: int64 [n, 2].
        """
        try:
            examples = self.unmapped(ids)
        except Exception:  # which of them it was is found by reading them one by one
            if len(ids) == 1:
                raise
            return [self._attempt(ids[row : row + 1], seeds[row : row + 1]) for row in range(len(ids))]
        if self._map is None:
            return examples
        for row, example in enumerate(examples):
            try:
                examples[row] = self.mapped(example, seeds[row])
            except Exception as error:
                examples[row] = error
        return examples

    def _attempt(self, ids: np.ndarray, seeds: np.ndarray) -> Any:
        try:
            [example] = self.read(ids, seeds)
        except Exception as error:
            return error
        return example


class MixedReader:
    """Reads examples of several sources, which are numbered one behind the other.

    Args:
        readers: of the sources.
    """

    by_column = False

    def __init__(self, readers: Sequence[ExampleReader | MixedReader]) -> None:
        self._readers = readers
        self._ends = np.cumsum([len(reader) for reader in readers])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, ids: np.ndarray, seeds: np.ndarray) -> list[Any]:
        """See `ExampleReader.read`."""
        examples: list[Any] = [None] * len(ids)
        which = np.searchsorted(self._ends, ids, "right")
        for number in np.unique(which):
            rows = np.flatnonzero(which == number)
            first = self._ends[number - 1] if number else 0
            some = self._readers[number].read(ids[rows] - first, seeds[rows])
            for row, example in zip(rows, some, strict=True):
                examples[row] = example
        return examples


def _takes_seed(function: Callable[..., Any]) -> bool:
    """Whether a map has a second argument named `seed`.

    Raises:
        UsageError: it needs other arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C
        return False
    draws = "seed" in signature.parameters
    try:
        signature.bind(None, seed=None) if draws else signature.bind(None)
    except TypeError as error:
        raise UsageError(
            f"IndexedData(map=...): a function of {signature} ({error}): it is called as map(example), or as "
            "map(example, seed) where an argument is named seed"
        ) from None
    return draws


Arrays = tuple[np.ndarray, ...] | list[Any]
"""Examples that were read: their arrays stacked, [n, ...] each; or of each one a list of its arrays, or an error."""


def arrays_of(
    reader: ExampleReader | MixedReader, specs: list[ArraySpec], ids: np.ndarray, seeds: np.ndarray
) -> Arrays:
    """Reads and checks examples.

    Args:
        reader: of the source.
        specs: what the arrays of an example are like.
        ids: of examples of the source: int64 [n].
        seeds: those of the examples: int64 [n, 2].
    """
    if isinstance(reader, ExampleReader) and reader.by_column:
        return tuple(reader.columns(ids))
    return checked(reader.read(ids, seeds), specs, ids)


def checked(examples: Sequence[Any], specs: list[ArraySpec], ids: np.ndarray) -> list[Any]:
    """Of each example, as it was read, a list of its arrays, or why it can't be used."""
    return [_checked(example, specs, index) for example, index in zip(examples, ids.tolist(), strict=True)]


def _checked(example: Any, specs: list[ArraySpec], index: int) -> list[np.ndarray] | Exception:
    if isinstance(example, Exception):
        return unusable(index, example)
    try:
        return leaves_of(example, specs, index)
    except BadExampleError as error:
        return error


def unusable(index: int, error: Exception) -> Exception:
    """The error for an example that can't be read or mapped."""
    if isinstance(error, UsageError):
        return BadExampleError(str(error))
    failed = TrainingError(f"example {index} can't be read: {type(error).__name__}: {message_of(error)}")
    failed.__cause__ = error
    return failed


def row_of(columns: Any, row: int) -> Any:
    """One example of stacked arrays."""
    if isinstance(columns, Mapping):
        return {name: row_of(column, row) for name, column in columns.items()}
    if isinstance(columns, tuple):
        return tuple(row_of(column, row) for column in columns)
    return columns[row]


def specs_of(example: Any, index: int) -> list[ArraySpec]:
    """What the arrays of all examples are like, from one of them.

    Raises:
        UsageError: it has a part that is no array of numbers or text.
    """
    specs = []
    for path, part in flatten(example):
        name = name_of(path)
        array = array_of(part, name, index)
        specs.append(ArraySpec(name, array.shape, _batch_dtype(array)))
    if not specs:
        raise BadExampleError(
            f"IndexedData: example {index} has no arrays: return an array, or a dict or tuple of them"
        )
    return specs


def name_of(path: tuple[Any, ...]) -> str | int:
    """What the array at the end of a path is called; see `padding.leaf_names`."""
    return path[0] if len(path) == 1 else "/".join(map(str, path)) or 0


def array_of(part: Any, name: str | int, index: int) -> np.ndarray:
    """A part of an example as an array.

    Raises:
        BadExampleError: it is none.
    """
    said = f"array {name!r}: "
    if part is None:
        raise BadExampleError(f"example {index}: {said}None instead of an array")
    try:
        array = as_array(part)
    except ValueError as error:
        raise BadExampleError(f"example {index}: {said}it is no array ({error})") from None
    text = array.dtype.kind in "SUO" and all(isinstance(value, str | bytes) for value in array.reshape(-1).tolist())
    if array.dtype.kind in "biufc" or text or array.dtype.kind == "V":  # V: such as bfloat16
        return array
    raise BadExampleError(f"example {index}: {said}{type(part).__name__} is no array of numbers or text")


def as_array(part: Any) -> np.ndarray:
    """A part of an example as an array, which may be no array of numbers or text; that of a path is its text.

    Raises:
        ValueError: it is none, such as a list of lists of different lengths.
    """
    plain = os.fspath(part) if isinstance(part, os.PathLike) else part
    array = np.asarray(plain)
    if array.dtype.kind in "SU" and not isinstance(plain, np.ndarray | np.generic):
        return np.asarray(plain, object)  # NumPy's texts have no zeros at their end
    return array


def _batch_dtype(array: np.ndarray) -> np.dtype:
    """The dtype that an array of examples has in a batch: in the machine's byte order; `object` for text."""
    return np.dtype(object) if array.dtype.kind in "SUO" else array.dtype.newbyteorder("=")


def _plain_arrays(example: Any, specs: list[ArraySpec]) -> list[np.ndarray] | None:
    """The arrays of an example that is as most are: one level of NumPy arrays like those of the first one.

    None: it has to be looked at closer. An example that takes microseconds to read must not take more to check.
    """
    parts: list[Any] = []
    if type(example) is np.ndarray and specs[0].name == 0:
        parts = [example]
    elif type(example) is tuple and specs[-1].name == len(example) - 1:
        parts = list(example)
    elif type(example) is dict and len(example) == len(specs):
        parts = [example.get(spec.name) for spec in specs]
    if len(parts) != len(specs) or not all(map(_is_like, parts, specs)):
        return None
    return parts


def _is_like(part: Any, spec: ArraySpec) -> bool:
    if not isinstance(part, np.ndarray | np.generic) or part.dtype != spec.dtype or part.dtype.hasobject:
        return False
    return part.ndim == len(spec.shape) and part.shape[spec.padded :] == spec.shape[spec.padded :]


def leaves_of(example: Any, specs: list[ArraySpec], index: int) -> list[np.ndarray]:
    """The arrays of an example, checked against what those of the first one are like.

    Raises:
        BadExampleError: other arrays, or one of another shape or dtype.
    """
    if (arrays := _plain_arrays(example, specs)) is not None:
        return arrays
    parts = list(flatten(example))
    names = [name_of(path) for path, _ in parts]
    wanted = [spec.name for spec in specs]
    if names != wanted:
        raise BadExampleError(f"example {index} has the arrays {names}, the first example {wanted}: return the same")
    leaves = []
    for spec, (_, part) in zip(specs, parts, strict=True):
        array = array_of(part, spec.name, index)
        if _batch_dtype(array) != spec.dtype:
            raise BadExampleError(
                f"example {index}: {spec.label}dtype {array.dtype} instead of {spec.dtype}, which the first example "
                "has: convert it in map"
            )
        if array.ndim != len(spec.shape) or array.shape[spec.padded :] != spec.shape[spec.padded :]:
            raise BadExampleError(
                f"example {index}: {spec.label}shape {list(array.shape)} instead of {list(spec.shape)}, which the "
                "first example has: make all of one shape in map, or give padding=loop.Padding() and lengths=..."
            )
        leaves.append(array)
    return leaves


def stacked(examples: list[Any], specs: list[ArraySpec]) -> list[np.ndarray]:
    """The arrays of examples of one shape: [n, ...] each.

    Raises:
        BadExampleError: an example is unlike the others.
    """
    leaves = [leaves_of(example, specs, number) for number, example in enumerate(examples)]
    columns = []
    for place, spec in enumerate(specs):
        column = np.empty([len(examples), *spec.shape], spec.dtype)
        for row, arrays in enumerate(leaves):
            column[row] = arrays[place][()]  # a text, where it is one, and not an array of one
        columns.append(column)
    return columns


def example_seeds(indices: np.ndarray, epoch: int, seed: int) -> np.ndarray:
    """The seeds that examples draw from, the same numbers as those of `loop.example_seed`: int64 [n, 2]."""
    seeds = np.empty([len(indices), 2], np.int64)
    seeds[:, 0] = (seed << 32) + epoch
    seeds[:, 1] = indices << 16
    return seeds
