"""Puts many examples into the arrays of a batch by a few calls of NumPy, where all examples are alike."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from loop.data.examples import ArraySpec

_dtype_of = operator.attrgetter("dtype")
_axes_of = operator.attrgetter("ndim")


def columns_of(examples: Sequence[Any], specs: Sequence[ArraySpec]) -> list[Sequence[Any]] | None:
    """The values of each array, a column with one value for each example; None: examples must be checked one by one."""
    # Sets of maps throughout: one pass in C over all examples takes less than a look at each in Python.
    names = [spec.name for spec in specs]
    kinds = list(set(map(type, examples)))
    is_tuple = len(kinds) == 1 and issubclass(kinds[0], tuple)  # also a named one
    if not is_tuple and kinds != [dict]:
        # Bare arrays or numbers. If they are anything else, `fill_column` refuses them.
        return [examples] if names == [0] else None
    if set(map(len, examples)) != {len(specs)}:  # together with the names below: no part is left over
        return None
    if is_tuple:
        return list(zip(*examples, strict=True)) if names == list(range(len(specs))) else None
    try:
        return [list(map(operator.itemgetter(name), examples)) for name in names]
    except KeyError:  # another part, or a name that is the path of a part in a dict of dicts
        return None


def fill_column(column: Sequence[Any], out: np.ndarray) -> bool:
    """Writes values into a contiguous array [values, ...]; False: one of them has another shape or dtype."""
    if out.ndim == 1:
        return _fill_numbers(column, out)
    count, size, *rest = out.shape
    if set(map(type, column)) != {np.ndarray}:
        return False
    # `casting` refuses another dtype, and the shape of `out` another shape.
    with contextlib.suppress(TypeError, ValueError):
        if set(map(len, column)) == {size}:
            # Joined along their first axis, which is where they lie in the batch.
            np.concatenate(column, out=out.reshape(count * size, *rest), casting="no")
            return True
    return False


def lengths_of(column: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
    """The lengths of arrays that differ in length, int64 [arrays]; None: one of them is unlike the others.

    `shape` and `dtype` are those of an array; its first axis may have any length.
    """
    if set(map(type, column)) != {np.ndarray} or set(map(_dtype_of, column)) != {dtype}:
        return None
    if set(map(_axes_of, column)) != {len(shape)}:
        return None
    if len(shape) > 1 and {array.shape[1:] for array in column} != {shape[1:]}:
        return None
    return np.fromiter(map(len, column), np.int64, len(column))


def _fill_numbers(column: Sequence[Any], out: np.ndarray) -> bool:
    # For several types, NumPy would find a common one, which not all of them have.
    kinds = set(map(type, column))
    if len(kinds) != 1 or not issubclass(kinds.pop(), int | float | np.number | np.bool_):
        return False
    numbers = np.array(column)
    if (numbers.dtype, numbers.shape) != (out.dtype, out.shape):
        return False
    out[...] = numbers
    return True
