"""Arrays of the host that TensorFlow copies when they are handed over to a graph."""

from __future__ import annotations

import math

import numpy as np

_ALIGNMENT = 64
"""Bytes; see `array_of_own`."""


def array_of_own(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """An array that TensorFlow copies when it is handed over; its contents are undefined.

    An array at a multiple of 64 bytes becomes a tensor as it is, and an operation may write its result there, while the
    same batch may be asked for once more.
    """
    if dtype.hasobject:  # text, which TensorFlow always converts
        return np.empty(shape, object)
    # Half an alignment after a multiple: never at one, and still aligned for every dtype of numbers.
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 2 * _ALIGNMENT, np.uint8)
    offset = _ALIGNMENT // 2 - memory.ctypes.data % _ALIGNMENT
    return memory[offset % _ALIGNMENT :][:size].view(dtype).reshape(shape)


def array_of_own_of(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array itself, if it has this dtype and could have been made by `array_of_own`; else a copy that was."""
    # An array that doesn't own its memory may be a view of the source's.
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.owndata and array.ctypes.data % _ALIGNMENT:
        return array
    copy = array_of_own(list(array.shape), dtype)
    copy[...] = array
    return copy
