"""Arrays whose examples differ in length: each global batch is padded to its own longest example."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loop.data.array_source import ArraySource, constant
from loop.data.arrays import ArrayData, Structure
from loop.data.batch import BatchOptions, ReadBatch
from loop.data.buckets import LengthBuckets
from loop.data.joined import Sequences
from loop.data.padding import Padding, Scalar, along_axis, call_with, in_order, leaf_names, lengthened
from loop.errors import UsageError
from loop.task import Batch

_PIECES = 6
"""Into at least how many pieces a sequence of mean length is cut. Gaps in last pieces then take about 1/16 more memory."""


class _Padded(NamedTuple):
    """`Sequences` as tensors; see there.

    Attributes:
        rows: the rows of all examples, and after them one row that fills gaps. Of sequences, a row is a piece of
            `piece` positions; the last piece of each is filled up.
        shapes: the sizes of each example that may differ: int64 [examples, axes].
        firsts: the index of the first row of each example: int64 [examples].
        piece: the positions of a row; 0: a row is one position, and has no axis for it.
    """

    rows: tf.Tensor
    shapes: tf.Tensor
    firsts: tf.Tensor
    piece: int = 0


class PaddedArraySource(ArraySource):
    """`ArrayData` with `padding`, in a certain order.

    Which examples are in a global batch, and how long the longest of them is, are pure functions of seed, epoch and
    step. Each worker computes both for the whole global batch, and reads only its own rows.
    """

    uniform = False

    def __init__(self, data: ArrayData, options: BatchOptions) -> None:
        # Before `super().__init__`, which loads the arrays and reads the first examples.
        assert data.padding is not None
        self._padding: Padding = data.padding
        self._names = leaf_names(data.arrays)
        self._padding.check_values(self._names)
        self._structure = tf.nest.map_structure(lambda _: 0, data.arrays)
        self._buckets: LengthBuckets | None = None
        if self._padding.bucket_by:
            self._buckets = LengthBuckets(lengths(data), options, self._padding.buckets)
        super().__init__(data, options)

    def _load(self, arrays: Structure) -> Batch:
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
        # One row more fills all gaps: `_gathered` takes data and gaps out of one tensor, by one operation.
        value = self._padding.value(name, array.dtype)
        if array.dtype.kind == "S" and isinstance(value, str):
            value = value.encode()  # beside a text, NumPy would decode the bytes of all rows, as ASCII
        piece = _piece(array)
        if piece > 1:
            pieces, firsts = _in_pieces(array, piece, value)
            with tf.device("CPU:0"):
                return _Padded(constant(pieces), tf.constant(array.shapes), tf.constant(firsts), piece)
        fill = np.full([1, *array.rows.shape[1:]], value)
        if array.dtype.kind not in "SUO":  # text may be longer than the dtype of the array holds
            fill = fill.astype(array.dtype)
        with tf.device("CPU:0"):
            rows = constant(np.concatenate([array.rows, fill]))
            return _Padded(rows, tf.constant(array.shapes), tf.constant(array.firsts))

    def head(self, count: int) -> Batch:
        index = tf.range(min(count, self.size), dtype=tf.int64)
        return self._examples(index, index)

    def longer_example(self) -> Batch:
        specs: dict[str | int, tf.TensorSpec] = {}
        masks: dict[str | int, tf.TensorSpec] = {}
        for name in self._names:
            if name not in self._padded:
                tensor = self._tensors[name]
                specs[name] = tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
                continue
            padded = self._padded[name]
            open_shape = [None] * (padded.shapes.shape[1] + 1)  # the rows, and the axes that differ
            row_shape = padded.rows.shape[2:] if padded.piece else padded.rows.shape[1:]
            specs[name] = tf.TensorSpec([*open_shape, *row_shape], padded.rows.dtype)
            masks[name] = tf.TensorSpec(open_shape, tf.bool)
        structure = tf.nest.pack_sequence_as(self._structure, list(specs.values()))
        with_masks = self._with_masks(structure, masks)
        return lengthened(self.example, with_masks)

    def _read_rows(self, epoch: tf.Tensor, step: tf.Tensor, parts: int) -> ReadBatch:
        # The whole batch decides how long it is padded: all replicas pad to the same length.
        start, n = self._shares.extent(step)
        if self._buckets is None:
            whole = self._examples_at(epoch, tf.range(start, start + n))
        else:
            whole = self._buckets.batch(epoch, step)
        own = whole if self._shares.replicas == 1 else tf.gather(whole, self._shares.places(step, parts) - start)
        return own, self._examples(own, whole)

    def _examples(self, index: tf.Tensor, whole: tf.Tensor) -> Batch:
        """Some examples of a global batch, padded to the longest example of that batch.

        Args:
            index: the indices of the examples, int64 [n].
            whole: the indices of all examples of the global batch, int64 [batch size].
        """
        tensors: list[tf.Tensor] = []
        masks: dict[str | int, tf.Tensor] = {}
        for name in self._names:  # the order of `tf.nest.flatten`, which `pack_sequence_as` expects
            if name in self._padded:
                tensor, masks[name] = self._gathered(self._padded[name], index, whole)
            else:
                tensor = tf.gather(self._tensors[name], index)
            tensors.append(tensor)
        batch = tf.nest.pack_sequence_as(self._structure, tensors)
        return self._with_masks(batch, masks)

    def _with_masks(self, batch: Structure, masks: dict[str | int, Structure]) -> Structure:
        """A batch, or its specs, with the masks that the padding asks for, in the order in which it names them."""
        return self._padding.with_masks(batch, in_order(masks, self._masked))

    def _gathered(self, array: _Padded, index: tf.Tensor, whole: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Some examples of a padded array, [n, lengths..., ...]; and where there is data, bool [n, lengths...]."""
        padded = self._padding.length(tf.gather(array.shapes, whole))
        shapes = tf.gather(array.shapes, index)
        axes = array.shapes.shape[1]
        if array.piece:
            return _joined_pieces(array, index, shapes[:, 0], padded[0])
        # The index of each element's row: first among the rows of its example, then among all rows.
        row = tf.zeros([1] * (axes + 1), tf.int64)
        inside = tf.constant(True)
        for axis in range(axes):
            along = tf.reshape(tf.range(padded[axis]), along_axis(axis, axes))
            size = tf.reshape(shapes[:, axis], [-1] + [1] * axes)
            # Row-major, as `Sequences` lays the rows of an example out.
            row = row * size + along
            inside &= along < size
        row += tf.reshape(tf.gather(array.firsts, index), [-1] + [1] * axes)
        filling = tf.shape(array.rows, tf.int64)[0] - 1  # the last row is the one that fills gaps
        return tf.gather(array.rows, tf.where(inside, row, filling)), inside


def _piece(array: Sequences) -> int:
    """How many positions a piece of each sequence has: a power of 2. It is 1 for text, and for several axes."""
    if array.axes > 1 or array.dtype.kind in "SUO" or not len(array):
        return 1
    piece = 1
    while piece * 2 * _PIECES * len(array) <= len(array.rows):
        piece *= 2
    return piece


def _in_pieces(array: Sequences, piece: int, value: Scalar) -> tuple[np.ndarray, np.ndarray]:
    """Sequences cut into pieces of equal size.

    Args:
        array: the sequences.
        piece: the positions of a piece.
        value: what fills the gaps.

    Returns:
        The pieces of all sequences, and after them one that fills gaps, [pieces + 1, piece, ...]; and the index of the
        first piece of each sequence: int64 [examples].
    """
    counts = -(-array.sizes // piece)
    ends = np.cumsum(counts)
    firsts = ends - counts
    pieces = np.full([counts.sum() + 1, piece, *array.rows.shape[1:]], value, array.dtype)

    # All positions but those behind the end of a sequence, in its last piece, have data.
    gaps = counts * piece - array.sizes
    behind = ends * piece - np.cumsum(gaps)
    has_data = np.ones([len(pieces) * piece], bool)
    has_data[np.repeat(behind, gaps) + np.arange(gaps.sum())] = False
    has_data[-piece:] = False
    pieces.reshape([-1, *array.rows.shape[1:]])[has_data] = array.rows
    return pieces, firsts


def _joined_pieces(
    array: _Padded, index: tf.Tensor, sizes: tf.Tensor, length: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Some sequences, padded to a length; see `PaddedArraySource._gathered`.

    An index for each piece, and not for each position, makes this several times as fast.
    """
    piece = array.piece
    along = tf.range((length + piece - 1) // piece)
    rows = tf.gather(array.firsts, index)[:, tf.newaxis] + along
    filling = tf.shape(array.rows, tf.int64)[0] - 1  # the last row is the one that fills gaps
    inside = along * piece < sizes[:, tf.newaxis]
    pieces = tf.gather(array.rows, tf.where(inside, rows, filling))
    whole = tf.reshape(pieces, tf.stack([tf.size(sizes), tf.size(along) * piece, *array.rows.shape[2:]]))
    return whole[:, :length], tf.sequence_mask(sizes, length)


def lengths(data: ArrayData) -> np.ndarray:
    """The length of each example, by which it finds its bucket: int64 [examples]."""
    assert data.padding is not None
    measure = data.padding.bucket_by
    if not callable(measure):
        # Of several padded arrays, an example is sorted by the largest one.
        sizes = [array.sizes for array in tf.nest.flatten(data.arrays) if isinstance(array, Sequences)]
        return np.max(sizes, axis=0)
    measured = np.zeros([data.size], np.int64)
    for index in range(data.size):
        length = np.asarray(call_with(measure, data.example(index)))
        if length.shape or length.dtype.kind not in "iu":
            raise UsageError(
                f"Padding(bucket_by=...) gave {length.dtype}{list(length.shape)} for example {index}: return its "
                "length as an integer"
            )
        measured[index] = length
    return measured
