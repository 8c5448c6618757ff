"""Arrays whose examples differ in length: each global batch is padded to its own longest example."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loop.data.array_source import ArraySource, constant
from loop.data.arrays import ArrayData
from loop.data.batch import BatchOptions
from loop.data.buckets import LengthBuckets
from loop.data.padding import Padding, call_with, leaf_names, lengthened
from loop.data.sequences import Sequences
from loop.errors import UsageError


class _Padded(NamedTuple):
    """`Sequences` as tensors; see there.

    Attributes:
        rows: all rows, and behind them one that fills gaps.
        shapes: of each example.
        firsts: the place of its first row.
    """

    rows: tf.Tensor
    shapes: tf.Tensor
    firsts: tf.Tensor


class PaddedArraySource(ArraySource):
    """`ArrayData` with `padding`, in a certain order.

    Which examples are in a global batch, and how long the longest of them is, are pure functions of seed, epoch and
    step. Each worker works both out for the whole global batch, and reads its own rows alone.
    """

    uniform = False

    def __init__(self, data: ArrayData, options: BatchOptions) -> None:
        assert data.padding is not None
        self._padding: Padding = data.padding
        self._names = leaf_names(data.arrays)
        self._buckets: LengthBuckets | None = None
        if self._padding.bucket_by:
            self._buckets = LengthBuckets(lengths(data), options, self._padding.buckets)
        super().__init__(data, options)

    def _load(self, arrays: Any) -> Any:
        self._padded: dict[str | int, _Padded] = {}
        tensors: dict[str | int, tf.Tensor] = {}
        for name, array in zip(self._names, tf.nest.flatten(arrays), strict=True):
            if isinstance(array, Sequences):
                self._padded[name] = self._tensors_of(name, array)
            else:
                tensors[name] = constant(array)
        self._masked = self._padding.masked(list(self._padded))
        return tensors

    def _tensors_of(self, name: str | int, array: Sequences) -> _Padded:
        fill = np.full([1, *array.rows.shape[1:]], self._padding.value(name, array.dtype))
        if array.dtype.kind not in "SUO":
            fill = fill.astype(array.dtype)
        with tf.device("CPU:0"):
            rows = constant(np.concatenate([array.rows, fill]))
            return _Padded(rows, tf.constant(array.shapes), tf.constant(array.firsts))

    def head(self, count: int) -> Any:
        index = tf.range(min(count, self.size), dtype=tf.int64)
        return self._examples(index, index)

    def longer_example(self) -> Any:
        padded = self._padded
        shapes = {name: [None] * (array.shapes.shape[1] + 1) for name, array in padded.items()}
        masks = {name: tf.TensorSpec(shapes[name], tf.bool) for name in self._masked}
        specs = [
            tf.TensorSpec([*shapes[name], *padded[name].rows.shape[1:]], padded[name].rows.dtype)
            if name in padded
            else tf.TensorSpec([None, *self._tensors[name].shape[1:]], self._tensors[name].dtype)
            for name in self._names
        ]
        structure = tf.nest.pack_sequence_as(self.data.arrays, specs)
        return lengthened(self.example, self._padding.with_masks(structure, masks))

    def _read_rows(self, epoch: tf.Tensor, step: tf.Tensor, parts: int) -> Any:
        start, n = self._shares.extent(step)
        if self._buckets is None:
            whole = self._examples_at(epoch, tf.range(start, start + n))
        else:
            whole = self._buckets.batch(epoch, step)
        own = whole if self._shares.replicas == 1 else tf.gather(whole, self._shares.places(step, parts) - start)
        return own, self._examples(own, whole)

    def _examples(self, index: tf.Tensor, whole: tf.Tensor) -> Any:
        """Some examples of the global batch `whole`, padded as all of it is."""
        found: list[tf.Tensor] = []
        masks: dict[str | int, tf.Tensor] = {}
        for name in self._names:
            if name in self._padded:
                tensor, masks[name] = self._gathered(self._padded[name], index, whole)
            else:
                tensor = tf.gather(self._tensors[name], index)
            found.append(tensor)
        batch = tf.nest.pack_sequence_as(self.data.arrays, found)
        return self._padding.with_masks(batch, {name: masks[name] for name in self._masked})

    def _gathered(self, array: _Padded, index: tf.Tensor, whole: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Some examples of a padded array, [n, lengths..., ...]; and where there is data, [n, lengths...]."""
        padded = self._padding.length(tf.gather(array.shapes, whole))
        shapes = tf.gather(array.shapes, index)
        axes = array.shapes.shape[1]
        place = tf.zeros([1] * (axes + 1), tf.int64)
        inside = tf.constant(True)
        for axis in range(axes):
            along = tf.reshape(tf.range(padded[axis]), [1, *(-1 if each == axis else 1 for each in range(axes))])
            size = tf.reshape(shapes[:, axis], [-1] + [1] * axes)
            place = place * size + along
            inside &= along < size
        place += tf.reshape(tf.gather(array.firsts, index), [-1] + [1] * axes)
        filling = tf.shape(array.rows, tf.int64)[0] - 1
        return tf.gather(array.rows, tf.where(inside, place, filling)), inside


def lengths(data: ArrayData) -> np.ndarray:
    """By which length each example finds its bucket: int64 [examples]."""
    assert data.padding is not None
    measure = data.padding.bucket_by
    if not callable(measure):
        sizes = [each.sizes for each in tf.nest.flatten(data.arrays) if isinstance(each, Sequences)]
        return np.max(sizes, axis=0)
    found = np.zeros([data.size], np.int64)
    for place in range(data.size):
        length = np.asarray(call_with(measure, data.example(place)))
        if length.shape or length.dtype.kind not in "iu":
            raise UsageError(
                f"Padding(bucket_by=...) gave {length.dtype}{list(length.shape)} for example {place}: return its "
                "length as an integer"
            )
        found[place] = length
    return found
