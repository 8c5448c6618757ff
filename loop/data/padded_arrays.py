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
from loop.data.padding import Padding, Scalar, along_axes, by_axis, call_with, in_order, inside, leaf_names, lengthened
from loop.errors import UsageError
from loop.task import Batch

_PIECES = 6
"""Into at least how many pieces a sequence of mean length is cut: gaps then take about a sixteenth more memory."""


class _Padded(NamedTuple):
    """`Sequences` as tensors; see there.

    Along the last axis that differs, examples are cut into pieces. To look up whole pieces is several times as fast as
    to look up each position.
    """

    pieces: tf.Tensor  # the pieces of all examples, and after them one that fills gaps: [pieces + 1, positions, ...]
    shapes: tf.Tensor  # the sizes of each example that may differ: int64 [examples, axes]
    firsts: tf.Tensor  # the index of the first piece of each example: int64 [examples]

    @property
    def axes(self) -> int:
        """The number of axes that may differ."""
        return int(self.shapes.shape[1])

    @property
    def positions(self) -> int:
        """The number of positions of a piece."""
        return int(self.pieces.shape[1])

    def counts(self, shapes: tf.Tensor) -> tf.Tensor:
        """Shapes, int64 [..., axes], with the number of pieces as the size of the last axis."""
        rounding = np.zeros([self.axes], np.int64)
        rounding[-1] = self.positions - 1
        return (shapes + rounding) // (rounding + 1)


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
        value = self._padding.value(name, array.dtype)
        pieces, firsts = _in_pieces(array, _positions(array), value)
        with tf.device("CPU:0"):
            return _Padded(constant(pieces), tf.constant(array.shapes), tf.constant(firsts))

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
            open_shape = [None] * (padded.axes + 1)  # the rows, and the axes that differ
            specs[name] = tf.TensorSpec([*open_shape, *padded.pieces.shape[2:]], padded.pieces.dtype)
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

        `index` and `whole` are the indices of these examples, int64 [n], and of the whole batch, int64 [batch size].
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
        lengths = self._padding.length(tf.gather(array.shapes, whole))
        shapes = tf.gather(array.shapes, index)
        # The index of each piece: first among those of its example, then among all.
        counts = array.counts(shapes)
        along = along_axes(array.counts(lengths), array.axes)
        piece = tf.zeros([], tf.int64)
        for size, positions in zip(by_axis(counts), along, strict=True):
            # Row-major, as `Sequences` lays the rows of an example out.
            piece = piece * size + positions
        piece += tf.reshape(tf.gather(array.firsts, index), [-1] + [1] * array.axes)
        filling = tf.shape(array.pieces, tf.int64)[0] - 1  # the last piece is the one that fills gaps
        pieces = tf.gather(array.pieces, tf.where(inside(counts, along), piece, filling))

        # The pieces of the last axis become one, which ends where the longest example does.
        before = tf.shape(pieces, tf.int64)[: array.axes]
        width = tf.size(along[-1], tf.int64) * array.positions
        joined = tf.reshape(pieces, tf.concat([before, [width], array.pieces.shape[2:]], 0))
        cut = joined[(*[slice(None)] * array.axes, slice(lengths[-1]))]
        return cut, inside(shapes, along_axes(lengths, array.axes))


def _positions(array: Sequences) -> int:
    """How many positions a piece has: a power of 2; 1 for text."""
    if array.dtype.kind in "SUO" or not len(array.rows):
        return 1
    lines = int(array.shapes[:, :-1].prod(1).sum())
    most = max(1, len(array.rows) // (_PIECES * lines))
    return 1 << (most.bit_length() - 1)  # the greatest power of 2 up to it


def _in_pieces(array: Sequences, positions: int, value: Scalar) -> tuple[np.ndarray, np.ndarray]:
    """Examples cut into pieces of so many positions along the last axis that differs; `value` fills the gaps.

    Returns:
        The pieces of all examples, and after them one that fills gaps, [pieces + 1, positions, ...]; and the index of
        the first piece of each example: int64 [examples].
    """
    # The axes before the last one cut an example into lines, such as those of a picture.
    lines = array.shapes[:, :-1].prod(1)
    counts = -(-array.shapes[:, -1] // positions)
    firsts = np.cumsum(lines * counts) - lines * counts
    if positions == 1:
        return _with_filling(array, value)[:, np.newaxis], firsts
    pieces = np.full([(lines * counts).sum() + 1, positions, *array.rows.shape[1:]], value, array.dtype)

    # All positions but those behind the end of a line, in its last piece, have data.
    widths = np.repeat(array.shapes[:, -1], lines)
    ends = np.cumsum(np.repeat(counts, lines)) * positions
    gaps = -widths % positions
    has_data = np.ones([len(pieces) * positions], bool)
    has_data[np.repeat(ends - np.cumsum(gaps), gaps) + np.arange(gaps.sum())] = False
    has_data[-positions:] = False
    pieces.reshape([-1, *array.rows.shape[1:]])[has_data] = array.rows
    return pieces, firsts


def _with_filling(array: Sequences, value: Scalar) -> np.ndarray:
    """The rows of all examples, and after them one that fills gaps: [rows + 1, ...]."""
    if array.dtype.kind == "S" and isinstance(value, str):
        value = value.encode()  # beside a text, NumPy would decode the bytes of all rows, as ASCII
    fill = np.full([1, *array.rows.shape[1:]], value)
    if array.dtype.kind not in "SUO":  # text may be longer than the dtype of the array holds
        fill = fill.astype(array.dtype)
    return np.concatenate([array.rows, fill])


def lengths(data: ArrayData) -> np.ndarray:
    """The length of each example, by which it finds its bucket: int64 [examples]."""
    assert data.padding is not None
    measure = data.padding.bucket_by
    if not callable(measure):
        # With several padded arrays, an example is sorted by the largest one.
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
