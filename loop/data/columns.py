"""Many examples put into the arrays of a batch at once, where all are as most are: a few calls for a whole batch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from loop.data.examples import ArraySpec

_dtype_of = operator.attrgetter("dtype")


def columns_of(examples: Sequence[Any], specs: Sequence[ArraySpec]) -> list[Sequence[Any]] | None:
    """The values of each array, one for each example; None: the examples have to be looked at one by one.

    Args:
        examples: as they were read and mapped.
        specs: what the arrays of an example are like.
    """
    names = [spec.name for spec in specs]
    kinds = set(map(type, examples))
    if kinds not in ({tuple}, {dict}):
        # A bare array or number; what is anything else is no value of an array, which filling finds.
        return [examples] if names == [0] else None
    if set(map(len, examples)) != {len(specs)}:
        return None
    if kinds == {tuple}:
        return list(zip(*examples, strict=True)) if names == list(range(len(specs))) else None
    try:
        return [list(map(operator.itemgetter(name), examples)) for name in names]
    except KeyError:
        return None


def fill_column(column: Sequence[Any], out: np.ndarray) -> bool:
    """Writes values of one shape and dtype into an array; False: one of them is unlike it.

    Args:
        column: the values.
        out: contiguous, [values, ...].
    """
    if out.ndim == 1:
        return _fill_numbers(column, out)
    count, size, *rest = out.shape
    if set(map(type, column)) != {np.ndarray}:
        return False
    try:
        # Behind each other along their first axis, which is where they lie in the batch.
        same = set(map(len, column)) == {size}
        if same:
            np.concatenate(column, out=out.reshape(count * size, *rest), casting="no")
    except (TypeError, ValueError):
        return False
    return same


def fill_padded_column(column: Sequence[Any], out: np.ndarray, mask: np.ndarray | None) -> bool:
    """Writes arrays of one dtype and different lengths into the rows of an array; False: one of them is unlike it.

    Args:
        column: the arrays.
        out: [arrays, length, ...], already filled with what stands behind the arrays.
        mask: bool [arrays, length], which becomes true where there is data; None: none is wanted.
    """
    if set(map(type, column)) != {np.ndarray} or set(map(_dtype_of, column)) != {out.dtype}:
        return False
    if {array.shape[1:] for array in column} != {out.shape[2:]} or not all(array.ndim for array in column):
        return False
    try:
        for row, array in zip(out, column, strict=True):
            row[: len(array)] = array
    except ValueError:  # longer than the row
        return False
    if mask is not None:
        lengths = np.fromiter(map(len, column), np.int64, len(column))
        mask[...] = np.arange(mask.shape[1]) < lengths[:, None]
    return True


def _fill_numbers(column: Sequence[Any], out: np.ndarray) -> bool:
    kinds = set(map(type, column))
    if len(kinds) != 1 or not issubclass(kinds.pop(), int | float | np.number | np.bool_):
        return False
    numbers = np.array(column)
    if numbers.dtype != out.dtype or numbers.shape != out.shape:
        return False
    out[...] = numbers
    return True
