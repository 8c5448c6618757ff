"""Examples of indexed data: read, mapped, checked, and stacked into the arrays of a batch."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from loop.data.data_files import ChangedFileError
from loop.data.example_parts import Example, Part, by_source, flatten, name_of, refuse_masked, row_of
from loop.data.random_access import Reader
from loop.errors import TrainingError, UsageError, named

Read: TypeAlias = Example | Exception
"""An example that was read, or the error that reading it has raised."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """What an array of the examples is like."""

    name: str | int  # the name of the array; see `name_of`
    shape: tuple[int, ...]  # the shape of the array in one example
    dtype: np.dtype  # the dtype of the array in a batch; `object` for text
    padded: int = 0  # the number of axes, from the first on, that differ in size from example to example

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of an example may have this shape."""
        return len(shape) == len(self.shape) and shape[self.padded :] == self.shape[self.padded :]

    @property
    def label(self) -> str:
        """The name of the array, for messages."""
        return f"array {self.name!r}: "


def names_of(specs: Sequence[ArraySpec]) -> list[str | int]:
    """The names of the arrays of an example, in order."""
    return [spec.name for spec in specs]


class BadExampleError(UsageError):
    """An example can't be used; the message names it."""


class ExampleReader:
    """Reads examples of one source by index, and makes others of them by `map`; see `IndexedData`."""

    def __init__(self, reader: Reader, map: Callable[..., Example] | None) -> None:
        self._reader = reader
        self._map = map
        self._draws = map is not None and _takes_seed(map)
        self.by_column = reader.by_column and map is None

    def __len__(self) -> int:
        return len(self._reader)

    def columns(self, ids: np.ndarray) -> list[np.ndarray]:
        """The arrays of these examples of the source, stacked; only with `by_column`."""
        return [column for _, column in flatten(self._reader.read(ids))]

    def unmapped(self, ids: np.ndarray) -> list[Example]:
        """These examples as the source gives them."""
        read = self._reader.read(ids)
        if self._reader.by_column:
            return [row_of(read, row) for row in range(len(ids))]
        return list(read)  # a copy: `read` below puts what the map makes in place of each example

    def mapped(self, example: Example, seed: np.ndarray) -> Example:
        """What the map makes of an example; only with a map."""
        assert self._map is not None
        return self._map(example, seed=seed) if self._draws else self._map(example)

    def read(self, ids: np.ndarray, seeds: np.ndarray) -> list[Read]:
        """Reads examples; returns each one, or the error that reading it has raised.

        `ids` are their numbers in the source, int64 [n], and `seeds` their seeds, int64 [n, 2].
        """
        try:
            examples = self.unmapped(ids)
        except KeyboardInterrupt:
            raise
        except BaseException:  # not `Exception` alone: see `_failure`
            return self.attempts(ids, seeds)
        if self._map is None:
            return examples
        for row, example in enumerate(examples):
            try:
                examples[row] = self.mapped(example, seeds[row])
            except BaseException as error:
                examples[row] = _failure(error)
        return examples

    def attempts(self, ids: np.ndarray, seeds: np.ndarray) -> list[Read]:
        """See `read`; one by one, to find which of them can't be read."""
        return [self._attempt(ids[row : row + 1], seeds[row]) for row in range(len(ids))]

    def _attempt(self, ids: np.ndarray, seed: np.ndarray) -> Read:
        """Reads one example; returns it, or the error."""
        try:
            [example] = self.unmapped(ids)
            return example if self._map is None else self.mapped(example, seed)
        except BaseException as error:
            return _failure(error)


def _failure(error: BaseException) -> Exception:
    """The error of an example that can't be read.

    What would end a thread or a process is one, too: an exit, a panic of a library in Rust, a cancelled task of
    asyncio. `KeyboardInterrupt` isn't about an example, and is raised again.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, Exception):
        return error
    text = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else named(error)
    return RuntimeError(text).with_traceback(error.__traceback__)


class MixedReader:
    """Reads examples of several sources. Those of one source are numbered after those of the source before it."""

    by_column = False

    def __init__(self, readers: Sequence[ExampleReader | MixedReader]) -> None:
        self._readers = readers
        self._ends = np.cumsum(list(map(len, readers)))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, ids: np.ndarray, seeds: np.ndarray) -> list[Read]:
        """See `ExampleReader.read`."""
        examples: list[Read] = [None] * len(ids)
        # One call for each source: a source may read many examples faster at once.
        for number, rows, own_ids in by_source(self._ends, ids):
            from_source = self._readers[number].read(own_ids, seeds[rows])
            for row, example in zip(rows, from_source, strict=True):
                examples[row] = example
        return examples


def _takes_seed(function: Callable[..., Example]) -> bool:
    """Whether a map has a second argument named `seed`. Refuses a map that needs other arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C has no signature
        return False
    draws = "seed" in signature.parameters
    # Checked here, so that a map with other arguments is refused when the data is made, and not in a thread of the run.
    try:
        if draws:
            signature.bind(None, seed=None)
        else:
            signature.bind(None)
    except TypeError as error:
        raise UsageError(
            f"IndexedData(map=...): a function of {signature} ({error}): it is called as map(example), or as "
            "map(example, seed) where an argument is named seed"
        ) from None
    return draws


Leaves: TypeAlias = list[np.ndarray] | Exception
"""The arrays of an example, in the order of their specs; or the error for an example that can't be used."""
Arrays: TypeAlias = tuple[np.ndarray, ...] | list[Leaves]
"""Examples that were read: a tuple of stacked arrays, [n, ...] each; or a list with the arrays of each example."""


def arrays_of(
    reader: ExampleReader | MixedReader, specs: list[ArraySpec], ids: np.ndarray, seeds: np.ndarray
) -> Arrays:
    """Reads and checks examples; see `ExampleReader.read`."""
    if isinstance(reader, ExampleReader) and reader.by_column:
        try:
            return tuple(reader.columns(ids))
        except Exception:  # one by one, to find which of them can't be read
            return checked(reader.attempts(ids, seeds), specs, ids)
    return checked(reader.read(ids, seeds), specs, ids)


def checked(examples: Sequence[Read], specs: list[ArraySpec], ids: np.ndarray) -> list[Leaves]:
    """The arrays of each example that was read, or why it can't be used."""
    # Errors are handed on as values: the caller stops at the first one, or leaves these examples out.
    return [_checked(example, specs, index) for example, index in zip(examples, ids.tolist(), strict=True)]


def _checked(example: Read, specs: list[ArraySpec], index: int) -> Leaves:
    """The arrays of an example, or the error that names it."""
    if isinstance(example, Exception):
        return unusable(index, example)
    try:
        return leaves_of(example, specs, index)
    except UsageError as error:
        return unusable(index, error)


def unusable(index: int, error: Exception) -> Exception:
    """The error for an example that can't be read or mapped."""
    if isinstance(error, ChangedFileError):
        return error  # it is about the whole file
    if isinstance(error, UsageError):
        return BadExampleError(str(error))  # its text is complete: it names what is wrong, and what to do
    failed = TrainingError(f"example {index} can't be read: {named(error)}")
    failed.__cause__ = error
    return failed


def specs_of(example: Example, index: int) -> list[ArraySpec]:
    """What the arrays of all examples are like, according to one of them.

    Raises:
        UsageError: it has a part that isn't an array of numbers or text.
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


def named_parts(example: Example) -> tuple[list[str | int], list[Part]]:
    """The names of the arrays of an example, and its parts, both in the order of `tf.nest.flatten`."""
    names = []
    parts = []
    for path, part in flatten(example):
        names.append(name_of(path))
        parts.append(part)
    return names, parts


def array_of(part: Part, name: str | int, index: int) -> np.ndarray:
    """A part of an example as an array.

    Raises:
        BadExampleError: it isn't an array of numbers or text.
    """
    label = f"array {name!r}: "
    if part is None:
        raise BadExampleError(f"example {index}: {label}None instead of an array")
    refuse_masked(part, f"example {index}: {label}")
    try:
        array = as_array(part)
    except ValueError as error:
        raise BadExampleError(f"example {index}: {label}it isn't an array ({error})") from None
    kind = array.dtype.kind
    # An array of objects may hold anything: each of its values must be looked at.
    is_text = kind in "SUO" and all(isinstance(value, str | bytes) for value in array.reshape(-1).tolist())
    # V: types of other packages, such as bfloat16; but also NumPy's structured ones.
    if array.dtype.char in "gG" or issubclass(array.dtype.type, np.void):
        raise BadExampleError(f"example {index}: {label}dtype {array.dtype}, which no tensor has: convert it in map")
    if kind in "biufcV" or is_text:
        return array
    raise BadExampleError(f"example {index}: {label}{type(part).__name__} isn't an array of numbers or text")


def as_array(part: Part) -> np.ndarray:
    """A part of an example as an array, of any dtype TensorFlow may know; the array of a path is its text.

    Raises:
        ValueError: it can't be an array, such as a list of lists of different lengths.
    """
    plain = os.fspath(part) if isinstance(part, os.PathLike) else part
    array = np.asarray(plain)
    if array.dtype.kind in "SU" and not isinstance(plain, np.ndarray | np.generic):
        return np.asarray(plain, object)  # NumPy's own text types would drop zero bytes at the end
    # NumPy's text of any length (StringDType), which TensorFlow doesn't know.
    return array.astype(object) if array.dtype.kind == "T" else array


def _batch_dtype(array: np.ndarray) -> np.dtype:
    """The dtype that an array of examples has in a batch: in the machine's byte order; `object` for text."""
    return np.dtype(object) if array.dtype.kind in "SUO" else array.dtype.newbyteorder("=")


def _plain_arrays(example: Example, specs: list[ArraySpec]) -> list[np.ndarray] | None:
    """The arrays of a usual example: one level of NumPy arrays like those of the first example.

    None: the example must be checked part by part. An example that takes microseconds to read must not take longer to
    check.
    """
    parts: list[Part] = []
    if type(example) is np.ndarray and specs[0].name == 0:
        parts = [example]
    elif isinstance(example, tuple) and specs[-1].name == len(example) - 1:
        parts = list(example)
    elif type(example) is dict and len(example) == len(specs):
        parts = [example.get(spec.name) for spec in specs]
    if len(parts) != len(specs) or not all(map(_is_like, parts, specs)):
        return None
    return parts


def _is_like(part: Part, spec: ArraySpec) -> bool:
    """Whether a part is a NumPy array of numbers, as the spec says."""
    # Objects are texts, whose values have to be looked at one by one.
    if not isinstance(part, np.ndarray | np.generic) or isinstance(part, np.ma.MaskedArray):
        return False
    return part.dtype == spec.dtype and not part.dtype.hasobject and spec.fits(part.shape)


def leaves_of(example: Example, specs: list[ArraySpec], index: int) -> list[np.ndarray]:
    """The arrays of an example, checked against the arrays of the first example.

    Raises:
        BadExampleError: other arrays, or one of another shape or dtype.
    """
    if (arrays := _plain_arrays(example, specs)) is not None:
        return arrays

    # Grain's `filter` leaves such a gap in the place of each example that it drops.
    if example is None:
        raise BadExampleError(
            f"example {index} is None: return an example; or leave it out, by IndexedData(...).filter or with "
            "on_bad_example='skip'"
        )
    # All other examples are checked in full: for parts that aren't arrays yet, and for an error that names the part.
    names, parts = named_parts(example)
    expected = names_of(specs)
    if names != expected:
        raise BadExampleError(f"example {index} has the arrays {names}, the first example {expected}: return the same")
    leaves = []
    for spec, part in zip(specs, parts, strict=True):
        # NumPy makes up dtype and shape of an empty list.
        is_empty = spec.padded and isinstance(part, list) and not part
        array = np.zeros([0, *spec.shape[1:]], spec.dtype) if is_empty else array_of(part, spec.name, index)
        if _batch_dtype(array) != spec.dtype:
            raise BadExampleError(
                f"example {index}: {spec.label}dtype {array.dtype} instead of {spec.dtype}, which the first example "
                "has: convert it in map"
            )
        if not spec.fits(array.shape):
            raise BadExampleError(
                f"example {index}: {spec.label}shape {list(array.shape)} instead of {list(spec.shape)}, which the "
                "first example has: make all of one shape in map, or give padding=loop.Padding() and lengths=..."
            )
        leaves.append(array)
    return leaves


def stacked(examples: list[Example], specs: list[ArraySpec]) -> list[np.ndarray]:
    """The arrays of examples of one shape: [n, ...] each.

    Raises:
        BadExampleError: an example is unlike the others.
    """
    leaves = [leaves_of(example, specs, number) for number, example in enumerate(examples)]
    columns = []
    for index, spec in enumerate(specs):
        column = np.empty([len(examples), *spec.shape], spec.dtype)
        for row, arrays in enumerate(leaves):
            column[row] = arrays[index][()]  # of an array without axes, its element, such as a text
        columns.append(column)
    return columns


def example_seeds(indices: np.ndarray, epoch: int, seed: int) -> np.ndarray:
    """The seeds that the maps of examples get: int64 [n, 2]; the same as those of `loop.example_seed`."""
    # The same numbers as `loop.example_seed` with the salt 0, which has the low 16 bits of the second one. A run that
    # is resumed relies on them, too.
    seeds = np.empty([len(indices), 2], np.int64)
    seeds[:, 0] = (seed << 32) + epoch
    seeds[:, 1] = indices << 16
    return seeds
