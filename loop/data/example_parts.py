"""What an example is made of: parts, in dicts and tuples; and several examples as stacked arrays of that structure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from loop.errors import UsageError

Part: TypeAlias = Any
"""A part of an example that isn't a dict or tuple: an array, or what NumPy can make one of."""
Example: TypeAlias = Any
"""An example: a part, or dicts and tuples of parts."""
Columns: TypeAlias = Any
"""Several examples, stacked: an array [n, ...], or dicts and tuples of such arrays."""
Name = TypeVar("Name", bound=str | int)
"""The key of a part in a dict, or its position in a tuple."""
PartPath: TypeAlias = tuple[str | int, ...]
"""Where a part is in an example: the keys of dicts, and the positions in tuples."""


def flatten(
    example: Example, path: PartPath = (), sequences: tuple[type[Sequence[Part]], ...] = (tuple,)
) -> Iterator[tuple[PartPath, Part]]:
    """The parts of an example, each with its path, which begins with `path`; in the order of `tf.nest.flatten`.

    `sequences` are the types, beside dicts, that have parts: a list within an example is an array.
    """
    if isinstance(example, Mapping):
        # Sorted, since `tf.nest` orders dicts by key: names and tensors of one example must meet in the same order.
        for name in sorted_keys(example):
            yield from flatten(example[name], (*path, name), sequences)
    elif isinstance(example, sequences):
        for position, part in enumerate(example):
            yield from flatten(part, (*path, position), sequences)
    else:
        yield path, example


def name_of(path: PartPath) -> str | int:
    """The name of the array at the end of a path.

    It is the key in a dict, the position in a tuple, and 0 for a bare array. For an array further down it is the path
    to it, such as `"0/tokens"`.
    """
    if len(path) == 1:
        return path[0]
    return "/".join(map(str, path)) or 0  # 0: a bare array has an empty path


def sorted_keys(parts: Mapping[Name, Any]) -> list[Name]:
    """The keys of a dict in the order in which `tf.nest` takes its parts.

    Raises:
        UsageError: they have no order.
    """
    try:
        return sorted(parts)
    except TypeError:
        raise UsageError(
            f"a dict has the keys {list(parts)}, which can't be sorted: give all keys of one type, such as str"
        ) from None


def refuse_masked(array: Part, label: str) -> None:
    """Refuses a masked array that has masked values: what lies under the mask would be trained on.

    The message begins with `label`.
    """
    if np.ma.is_masked(array):
        raise UsageError(
            f"{label}some values are masked, which training doesn't see: fill them, as by array.filled(0), and give "
            "the mask as an array of its own"
        )


def map_parts(change: Callable[[Part], Part], example: Example) -> Example:
    """The dicts and tuples of an example, with each of its parts changed."""
    if isinstance(example, Mapping):
        return {name: map_parts(change, part) for name, part in example.items()}
    if isinstance(example, tuple):
        return tuple_of(type(example), [map_parts(change, part) for part in example])
    return change(example)


def structure_of(example: Example) -> Example:
    """The dicts and tuples of an example, with 0 in place of each of its parts."""
    return map_parts(lambda part: 0, example)


def tuple_of(kind: type[tuple[Part, ...]], parts: Iterable[Part]) -> tuple[Part, ...]:
    """A tuple of the same type as another one, if that is a named tuple; else a plain one."""
    # A named tuple takes its fields as separate arguments, a plain tuple takes them as one iterable.
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)


def row_of(columns: Columns, row: int) -> Example:
    """One example of stacked arrays."""
    return map_parts(lambda column: column[row], columns)


def rows_of(columns: Columns, count: int) -> list[Example]:
    """The examples of stacked arrays."""
    if isinstance(columns, Mapping):
        parts = {name: rows_of(part, count) for name, part in columns.items()}
        return dicts_of(parts, count)
    if isinstance(columns, tuple):
        parts_of_rows = [rows_of(part, count) for part in columns]
        return list(zip(*parts_of_rows, strict=True))
    return list(columns)


def dicts_of(columns: Mapping[Name, Sequence[Part]], count: int) -> list[dict[Name, Part]]:
    """The rows of named columns, a dict each."""
    rows = []
    for row in range(count):
        rows.append({name: column[row] for name, column in columns.items()})
    return rows


def by_source(ends: np.ndarray, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Finds the sources of some examples. The examples of each source are numbered after those of the source before.

    Args:
        ends: the number after the last example of each source: int64 [sources].
        indices: the numbers of some examples: int64 [n].

    Yields:
        The number of a source; which of the examples it has; and their numbers in it: int64 both.
    """
    starts = np.append(0, ends)
    # "right": the first number after a source belongs to the next one.
    sources = np.searchsorted(ends, indices, "right")
    for number in np.unique(sources).tolist():
        places = np.flatnonzero(sources == number)
        yield number, places, indices[places] - starts[number]


def count_of(batch: Columns) -> int:
    """The number of rows of a batch."""
    _, first = next(flatten(batch))  # all parts have the same first axis, so any of them tells
    return len(first)


def without_lists(batch: Columns) -> Columns:
    """A batch with tuples in place of lists of arrays, which are several inputs for Keras, and no examples."""
    if isinstance(batch, Mapping):
        return dict(zip(batch, map(without_lists, batch.values()), strict=True))
    if isinstance(batch, tuple) or (isinstance(batch, list) and _has_arrays(batch)):
        return tuple(map(without_lists, batch))
    return batch


def _has_arrays(part: Columns) -> bool:
    # A list of numbers, or of lists of numbers, is an array itself.
    if isinstance(part, list | tuple):
        return any(map(_has_arrays, part))
    return getattr(part, "ndim", 0) > 0
