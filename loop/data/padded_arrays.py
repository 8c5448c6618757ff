"""Arrays whose examples differ in length: each global batch is padded to its own longest example."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

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

_UPCOMING = 32
"""The number of batches that are looked up at once. An operation takes hardly longer for many than for one."""

_UPCOMING_PIECES = 1 << 17
"""The greatest number of pieces that are looked up at once: 1 MB of indices."""

Shapes = TypeVar("Shapes", np.ndarray, tf.Tensor)


class _Lookup(NamedTuple):
    """Where a padded array has the examples of `UpcomingBatches`, and how they become batches."""

    pieces: tf.Tensor  # the index of each piece: int64 [batches, most rows, most pieces...]
    counts: tf.Tensor  # how many pieces each batch has along each axis, after its rows: int64 [batches, 1 + axes]
    joined: tf.Tensor  # the shape of each batch with the pieces of the last axis joined: int64 [batches, 1 + axes, ...]
    shapes: tf.Tensor  # the rows of each batch, and the lengths it is padded to: int64 [batches, 1 + axes]


class _Padded(NamedTuple):
    """`Sequences` as tensors; see there.

    Along the last axis that differs, examples are cut into pieces. To look up whole pieces is several times as fast as
    to look up each position.
    """

    pieces: tf.Tensor  # the pieces of all examples, and after them one that fills gaps: [pieces + 1, positions, ...]
    shapes: tf.Tensor  # the sizes of each example that may differ: int64 [examples, axes]
    counts: tf.Tensor  # the same with the number of pieces as the size of the last axis
    firsts: tf.Tensor  # the index of the first piece of each example: int64 [examples]

    @property
    def axes(self) -> int:
        """The number of axes that may differ."""
        return int(self.shapes.shape[1])

    @property
    def positions(self) -> int:
        """The number of positions of a piece."""
        return int(self.pieces.shape[1])

    @property
    def most_pieces(self) -> int:
        """The number of pieces of an example that is the longest along each axis."""
        return int(tf.reduce_prod(tf.reduce_max(self.counts, 0)))

    def lookup(self, index: tf.Tensor, rows: tf.Tensor, lengths: tf.Tensor) -> _Lookup:
        """Where the examples of some batches are.

        Args:
            index: the indices of the examples: int64 [batches, most rows].
            rows: how many of these each batch has: int64 [batches].
            lengths: to which lengths each batch is padded: int64 [batches, axes].
        """
        # The index of each piece: first among those of its example, then among all.
        examples = tf.reshape(index, [-1])
        counts = _in_pieces(lengths, self.positions)
        own_counts = tf.gather(self.counts, examples)
        most = tf.reduce_max(counts, 0)
        along = along_axes(most, self.axes)
        piece = along[0]
        for size, positions in zip(by_axis(own_counts)[1:], along[1:], strict=True):
            # Row-major, as `Sequences` lays the rows of an example out.
            piece = piece * size + positions
        piece += tf.reshape(tf.gather(self.firsts, examples), [-1] + [1] * self.axes)
        filling = tf.shape(self.pieces, tf.int64)[0] - 1  # the last piece is the one that fills gaps
        piece = tf.where(inside(own_counts, along), piece, filling)

        # A row of each table for each batch, so that `batch` has one operation to get it.
        rows = rows[:, tf.newaxis]
        tail = tf.tile(tf.constant([self.pieces.shape[2:].as_list()], tf.int64), [tf.size(rows), 1])
        return _Lookup(
            tf.reshape(piece, tf.concat([tf.shape(index, tf.int64), most], 0)),
            tf.concat([rows, counts], 1),
            tf.concat([rows, counts[:, :-1], counts[:, -1:] * self.positions, tail], 1),
            tf.concat([rows, lengths], 1),
        )

    def batch(self, lookup: _Lookup, number: tf.Tensor) -> tf.Tensor:
        """The examples of a batch, by its number among those that were looked up: [rows, lengths..., ...]."""
        begin = np.zeros([1 + self.axes], np.int64)
        pieces = tf.strided_slice(tf.gather(lookup.pieces, number), begin, tf.gather(lookup.counts, number))
        joined = tf.reshape(tf.gather(self.pieces, pieces), tf.gather(lookup.joined, number))
        # The last axis ends where the longest example does.
        cut = tf.strided_slice(joined, begin, tf.gather(lookup.shapes, number))
        cut.set_shape([None] * (1 + self.axes) + self.pieces.shape[2:])
        return cut


class UpcomingBatches(NamedTuple):
    """Batches in a graph, of which is known which examples they have, and where these are."""

    first: tf.Tensor  # the step of the first one within the epoch: int64 []
    end: tf.Tensor  # the step after the last one: int64 []
    rows: tf.Tensor  # how many rows the worker has of each: int64 [batches]
    index: tf.Tensor  # the indices of the examples of these rows: int64 [batches, most rows]
    lookups: list[_Lookup]  # of the padded arrays, in the order of their names


class PaddedArraySource(ArraySource):
    """`ArrayData` with `padding`, in a certain order.

    Which examples are in a global batch, and how long the longest of them is, are pure functions of seed, epoch and
    step. Each worker computes both for the whole global batch, and reads only its own rows.

    A loop over steps asks for several batches at once with `read_from`, which works out where their examples are. Then
    `batch_at` reads one of them.
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
        pieces = options.batch_size * sum(array.most_pieces for array in self._padded.values())
        self._at_once = max(1, min(_UPCOMING, _UPCOMING_PIECES // max(1, pieces)))

    def _load(self, arrays: Structure) -> Batch:
        self._padded: dict[str | int, _Padded] = {}
        tensors: dict[str | int, tf.Tensor] = {}
        for name, array in zip(self._names, tf.nest.flatten(arrays), strict=True):
            if isinstance(array, Sequences):
                self._padded[name] = self._tensors_of(name, array)
            else:
                tensors[name] = constant(array, name)
        self._masked = self._padding.masked(list(self._padded))
        return tensors

    def _tensors_of(self, name: str | int, array: Sequences) -> _Padded:
        value = self._padding.value(name, array.dtype)
        pieces, firsts = _cut(array, _positions(array), value)
        with tf.device("CPU:0"):
            counts = _in_pieces(array.shapes, pieces.shape[1])
            return _Padded(constant(pieces, name), tf.constant(array.shapes), tf.constant(counts), tf.constant(firsts))

    def head(self, count: int) -> Batch:
        size = min(count, self.size)
        with tf.device("CPU:0"):
            step = tf.constant(0, tf.int64)
            index = tf.range(size, dtype=tf.int64)[tf.newaxis]
            upcoming = self._looked_up(step[tf.newaxis], index, index, tf.constant([size], tf.int64))
            return self._batch_at(upcoming, step)[1]

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

    def read_from(self, epoch: tf.Tensor, step: tf.Tensor, end: tf.Tensor, parts: int = 1) -> UpcomingBatches:
        """Works out which examples the next batches have, up to that at step `end`, and where these are.

        See `read_batch` for the other arguments.
        """
        with tf.device("CPU:0"):
            return self._upcoming(epoch, tf.range(step, tf.minimum(step + self._at_once, end + 1)), parts)

    def batch_at(self, upcoming: UpcomingBatches, step: tf.Tensor) -> ReadBatch:
        """Reads the batch at a step of the epoch, one of those that are worked out; see `read_batch`."""
        with tf.device("CPU:0"):
            read = self._batch_at(upcoming, step)
        return self._copied(read)

    def _read_rows(self, epoch: tf.Tensor, step: tf.Tensor, parts: int) -> ReadBatch:
        return self._batch_at(self._upcoming(epoch, step[tf.newaxis], parts), step)

    def _upcoming(self, epoch: tf.Tensor, steps: tf.Tensor, parts: int) -> UpcomingBatches:
        """See `read_from`; `steps` are those of the batches."""
        whole = self._whole_batches(epoch, steps)
        rows, own_rows = self._shares.rows_of(steps, parts)
        own = whole if self._shares.replicas == 1 else tf.gather(whole, own_rows, batch_dims=1)
        return self._looked_up(steps, whole, own, rows)

    def _whole_batches(self, epoch: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """The indices of the examples of global batches: int64 [batches, batch size].

        After the end of the data, the last example is repeated, which doesn't change how long a batch is padded.
        """
        if self._buckets is not None:
            return self._buckets.batches(epoch, steps)
        size = self.options.batch_size
        positions = tf.minimum(steps[:, tf.newaxis] * size + np.arange(size), self.size - 1)
        return tf.reshape(self._examples_at(epoch, tf.reshape(positions, [-1])), [-1, size])

    def _looked_up(self, steps: tf.Tensor, whole: tf.Tensor, own: tf.Tensor, rows: tf.Tensor) -> UpcomingBatches:
        """Batches whose examples are looked up.

        Args:
            steps: their steps within the epoch: int64 [batches].
            whole: the indices of all examples of the global batches, which say how long they are padded: int64
                [batches, batch size].
            own: the indices of the worker's examples: int64 [batches, most rows].
            rows: how many rows it has of each: int64 [batches].
        """
        lookups = []
        for array in self._padded.values():
            lengths = self._padding.length(tf.gather(array.shapes, whole))
            lookups.append(array.lookup(own, rows, lengths))
        return UpcomingBatches(steps[0], steps[-1] + 1, rows, own, lookups)

    def _batch_at(self, upcoming: UpcomingBatches, step: tf.Tensor) -> ReadBatch:
        """See `batch_at`."""
        number = step - upcoming.first
        index = tf.gather(upcoming.index, number)
        if self._shares.remainder:  # else, all batches have as many rows
            index = index[: tf.gather(upcoming.rows, number)]
        lookups = iter(upcoming.lookups)
        tensors: list[tf.Tensor] = []
        masks: dict[str | int, tf.Tensor] = {}
        for name in self._names:  # the order of `tf.nest.flatten`, which `pack_sequence_as` expects
            if name not in self._padded:
                tensors.append(tf.gather(self._tensors[name], index))
                continue
            array = self._padded[name]
            lookup = next(lookups)
            tensors.append(array.batch(lookup, number))
            if name in self._masked:
                lengths = tf.gather(lookup.shapes, number)[1:]
                masks[name] = inside(tf.gather(array.shapes, index), along_axes(lengths, array.axes))
        return index, self._with_masks(tf.nest.pack_sequence_as(self._structure, tensors), masks)

    def _with_masks(self, batch: Structure, masks: dict[str | int, Structure]) -> Structure:
        """A batch, or its specs, with the masks that the padding asks for, in the order in which it names them."""
        return self._padding.with_masks(batch, in_order(masks, self._masked))


def _positions(array: Sequences) -> int:
    """How many positions a piece has: a power of 2; 1 for text."""
    if array.dtype.kind in "SUO" or not len(array.rows):
        return 1
    lines = int(array.shapes[:, :-1].prod(1).sum())
    most = max(1, len(array.rows) // (_PIECES * lines))
    return 1 << (most.bit_length() - 1)  # the greatest power of 2 up to it


def _in_pieces(shapes: Shapes, positions: int) -> Shapes:
    """Shapes, int64 [..., axes], with the number of pieces as the size of the last axis."""
    rounding = np.zeros([shapes.shape[-1]], np.int64)
    rounding[-1] = positions - 1
    return (shapes + rounding) // (rounding + 1)


def _cut(array: Sequences, positions: int, value: Scalar) -> tuple[np.ndarray, np.ndarray]:
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

    # All positions but those after the end of a line, in its last piece, have data.
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
