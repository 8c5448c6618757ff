"""Lists of examples of different shapes, and a `tf.RaggedTensor`, as `Sequences`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from loop.data.example_parts import refuse_masked
from loop.data.examples import as_array
from loop.data.joined import Sequences
from loop.errors import UsageError

Given: TypeAlias = Any
"""A list, an array of objects, or a `tf.RaggedTensor`, with the examples as its elements."""


def as_sequences(given: Given, name: str | int, axes: int = 1) -> Sequences:
    """Examples of different shapes as `Sequences`. At least so many axes count as different, even if they aren't.

    Raises:
        UsageError: examples that differ in more than lengths; names the array.
    """
    if isinstance(given, tf.RaggedTensor):
        if given.ragged_rank != 1:
            raise UsageError(
                f"ArrayData: array {name!r} is a RaggedTensor of ragged_rank {given.ragged_rank}: within an example, "
                "all rows must have one length; ragged_rank 1 has that"
            )
        lengths = given.row_lengths().numpy().astype(np.int64)
        return Sequences(given.values.numpy(), lengths[:, np.newaxis])  # its values lie one after the other already
    for example in given:
        refuse_masked(example, f"ArrayData: array {name!r}: ")
    try:
        examples = list(map(as_array, given))
    except ValueError:
        raise UsageError(
            f"ArrayData: array {name!r} has an example whose own parts have different lengths: make each example an "
            "array of one shape"
        ) from None
    return _stacked(examples, name, axes)


def _stacked(examples: Sequence[np.ndarray], name: str | int, axes: int) -> Sequences:
    """The examples of one array, one after the other."""
    # An empty list has a dtype and a shape that NumPy has made up.
    filled = [example for example in examples if example.size]
    ranks = set(map(np.ndim, filled))
    if len(ranks) > 1 or ranks == {0}:
        raise UsageError(
            f"ArrayData: array {name!r} has examples of {', '.join(map(str, sorted(ranks)))} dimensions: give all the "
            "same number, at least one"
        )
    shapes = _shapes(examples, filled, max(ranks, default=1))
    # All axes up to the last one that differs count as different; the rows have those after it.
    differing = np.flatnonzero((shapes != shapes[:1]).any(0))
    axes = max(axes, int(differing.max(initial=0)) + 1)
    tail = shapes[:1, axes:].ravel().tolist()
    if not filled:
        return Sequences(np.zeros([0, *tail], np.dtype("float32")), shapes[:, :axes])
    dtype = np.result_type(*{example.dtype for example in filled})
    rows = [example.reshape([-1, *tail]) for example in filled]
    return Sequences(np.concatenate(rows).astype(dtype), shapes[:, :axes])


def _shapes(examples: Sequence[np.ndarray], filled: Sequence[np.ndarray], rank: int) -> np.ndarray:
    """The shape of each example: int64 [examples, rank]. An empty list has the trailing axes of the other examples."""
    shapes = np.zeros([len(examples), rank], np.int64)
    for index, example in enumerate(examples):
        if example.ndim == rank:
            shapes[index] = example.shape  # also of an empty array: it has a shape of its own
        elif filled:
            shapes[index, 1:] = filled[0].shape[1:]
    return shapes


def is_list_of_examples(given: Given) -> bool:
    """Whether examples are given one by one, rather than as one array."""
    if isinstance(given, tf.RaggedTensor | list | tuple):
        return True
    # An array of objects may also hold texts, or other things that aren't examples with an axis.
    of_objects = isinstance(given, np.ndarray) and given.dtype == object and given.ndim == 1
    return of_objects and isinstance(next(iter(given), None), np.ndarray | list | tuple)


def range_of_lengths(examples: Sequences) -> str:
    """The range of lengths, for errors: `3 to 17`."""
    return f"{examples.sizes.min()} to {examples.sizes.max()}"
