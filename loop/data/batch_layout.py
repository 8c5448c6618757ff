"""The arrays of a batch of indexed data: shapes, dtypes, padding and masks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loop.data.columns import columns_of, fill_column, lengths_of
from loop.data.example_parts import Example, structure_of
from loop.data.examples import ArraySpec, BadExampleError, names_of, specs_of
from loop.data.indexed import IndexedData
from loop.data.joined import Sequences
from loop.data.own_arrays import array_of_own, array_of_own_of
from loop.data.padding import Padding, Scalar, in_order
from loop.data.pending_batches import PendingBatches
from loop.task import Batch


class HandedOver(NamedTuple):
    """Batches in a graph that the host has handed over."""

    first: tf.Tensor  # the step of the first one within the epoch: int64 []
    end: tf.Tensor  # the step after the last one: int64 []
    starts: tf.Tensor  # where the rows of each batch begin, and where those of the last one end: int64 [batches + 1, 1]
    index: tf.Tensor  # the indices of the examples: int64 [rows]
    columns: list[tf.Tensor]  # the arrays: [rows, ...]; those that are padded: [rows of all examples, ...]
    padded: list[_Padded]  # how each padded column becomes batches, in the order of the columns


class _Padded(NamedTuple):
    """How a padded array of `HandedOver` becomes batches."""

    # Where the rows of each example begin, and where those of the last one end: int64 [examples + 1].
    offsets: tf.Tensor
    starts: tf.Tensor  # the same of each batch: int64 [batches + 1, 1]
    widths: tf.Tensor  # the length to which each batch is padded: int64 [batches]


class BatchLayout:
    """The arrays of a batch of indexed data: their names, shapes and dtypes, and how they are padded.

    Args:
        data: the data.
        example: the first example.
        index: its number in the source.

    Attributes:
        wide: whether floating-point numbers have 64 bits in a batch.
        specs: what the arrays of an example are like.
    """

    def __init__(self, data: IndexedData, example: Example, index: int) -> None:
        specs = specs_of(example, index)
        padded = data.padded_names(specs, index)
        self._padding = data.padding or Padding(mask=False)
        self._padding.check_values(names_of(specs))
        self._masked = self._padding.masked(padded) if padded else []
        self._structure = structure_of(example)
        self.wide = data.wide
        self.specs: list[ArraySpec] = []
        self._gaps: list[Scalar] = []  # what fills the gaps of each array
        self._copies_all = True
        # Three lists of one order, that of `tf.nest.flatten`: specs, gaps, and the leaves of each `PendingBatches`.
        for spec in specs:
            is_padded = spec.name in padded
            gap = self._padding.value(spec.name, spec.dtype) if is_padded else None
            self.specs.append(dataclasses.replace(spec, padded=int(is_padded)))
            self._gaps.append(gap)
            # Texts, and numbers that are to be widened, can't be copied as they are.
            self._copies_all &= not spec.dtype.hasobject and self.dtype(spec) == spec.dtype

    @property
    def padded(self) -> list[str | int]:
        """The names of the arrays whose examples differ in length."""
        return [spec.name for spec in self.specs if spec.padded]

    @property
    def example_bytes(self) -> int:
        """About how many bytes an example has."""
        bytes_ = 0
        for spec in self.specs:
            bytes_ += int(np.prod(spec.shape)) * spec.dtype.itemsize
        return bytes_

    def bytes_of_rows(self, widths: np.ndarray) -> np.ndarray:
        """How many bytes a row of a batch has: int64 [batches].

        Args:
            widths: the lengths that its arrays are padded to: int64 [batches, padded arrays].
        """
        bytes_ = np.zeros([len(widths)], np.int64)
        padded = 0  # the column of `widths`, which has padded arrays alone
        for spec in self.specs:
            if spec.padded:
                bytes_ += widths[:, padded] * (math.prod(spec.shape[1:]) * spec.dtype.itemsize)
                padded += 1
            else:
                bytes_ += math.prod(spec.shape) * spec.dtype.itemsize
        return bytes_

    def dtype(self, spec: ArraySpec) -> np.dtype:
        """The dtype that an array has in a batch."""
        return np.dtype("float64") if self.wide and spec.dtype.kind == "f" else spec.dtype

    def new(self, count: int) -> list[Any]:
        """The leaves of `PendingBatches` of `count` rows, not yet filled."""
        leaves: list[Any] = []
        for spec in self.specs:
            empty = [None] * count if spec.padded else array_of_own([count, *spec.shape], self.dtype(spec))
            leaves.append(empty)
        return leaves

    def leaves_of(self, columns: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays of a batch that isn't padded, from its stacked examples."""
        return [array_of_own_of(column, self.dtype(spec)) for column, spec in zip(columns, self.specs, strict=True)]

    def fill_columns(self, batches: PendingBatches, stretch: slice, columns: Sequence[Any]) -> bool:
        """Writes stacked arrays into some rows; False: the examples must be checked one by one.

        Args:
            batches: the batches.
            stretch: the rows.
            columns: the arrays; those that are padded may be a `Sequences`.
        """
        padded = []
        for spec, column in zip(self.specs, columns, strict=True):
            if not spec.padded:
                continue
            if not isinstance(column, Sequences):
                return False
            padded.append(column)
        if padded:
            # A padded array holds all rows of the batches, and can't be filled by stretches.
            if len(columns[0]) < len(batches.index):
                return False
            lengths = np.concatenate([column.shapes for column in padded], 1)
            # Filled one by one, the example that is too long is found and named.
            if (lengths > batches.widths_of(stretch)).any():
                return False
            batches.lengths = lengths
        for number, (spec, column) in enumerate(zip(self.specs, columns, strict=True)):
            if spec.padded:
                batches.leaves[number] = array_of_own_of(column.rows, self.dtype(spec))
            else:
                batches.leaves[number][stretch] = column
        return True

    def fill_all(self, batches: PendingBatches, stretch: slice, examples: Sequence[Any]) -> bool:
        """Writes examples into some rows at once; False: they must be checked one by one.

        Args:
            batches: the batches.
            stretch: the rows.
            examples: as they were read and mapped.
        """
        columns = columns_of(examples, self.specs)
        if columns is None or not self._copies_all:
            return False

        # Rows that were written before an array was found unlike the others are written once more, one by one.
        widths = batches.widths_of(stretch)
        padded = 0
        for leaf, spec, column in zip(batches.leaves, self.specs, columns, strict=True):
            if not spec.padded:
                if not fill_column(column, leaf[stretch]):
                    return False
                continue
            lengths = lengths_of(column, spec.shape, spec.dtype)
            if lengths is None or (lengths > widths[:, padded]).any():
                return False
            leaf[stretch] = column
            batches.lengths[stretch, padded] = lengths
            padded += 1
        # Only the thread that has filled all rows may join them: of several threads, none knows that it is the last.
        if len(examples) == len(batches.index):
            _join(batches, self.specs)
        return True

    def fill(
        self,
        batches: PendingBatches,
        row: int,
        arrays: Sequence[np.ndarray] | Exception,
        index: int,
        widths: Sequence[int],
    ) -> None:
        """Writes the arrays of an example into a row.

        Args:
            batches: the batches.
            row: the row.
            arrays: the arrays, or the error that is there in place of them.
            index: the number of the example in the source, for messages.
            widths: the lengths that the arrays of the row's batch are padded to.

        Raises:
            BadExampleError: an array is longer than the arrays of its batch.
            Exception: the error that is there in place of the arrays.
        """
        if isinstance(arrays, Exception):
            raise arrays
        padded = 0
        for leaf, spec, array in zip(batches.leaves, self.specs, arrays, strict=True):
            if not spec.padded:
                leaf[row] = array[()]  # of an array without axes, its element, such as a text
                continue
            if len(array) > widths[padded]:
                raise BadExampleError(
                    f"example {index}: {spec.label}length {len(array)}, more than lengths=... say of any example of "
                    f"its batch, {widths[padded]}: give the lengths that examples have after map"
                )
            leaf[row] = np.array(array, self.dtype(spec))  # a copy: a reader process writes the next example there
            batches.lengths[row, padded] = len(array)
            padded += 1

    def clear(self, batches: PendingBatches, row: int) -> None:
        """Empties a row whose example is left out."""
        for leaf, spec in zip(batches.leaves, self.specs, strict=True):
            if spec.padded:
                leaf[row] = self._joined(spec, [])
            else:
                leaf[row] = "" if leaf.dtype == object else np.zeros([], leaf.dtype)
        batches.lengths[row] = 0  # of padded arrays, no element belongs to the row

    # How batches are handed over to a graph: which rows each of them has, the indices, and the arrays. A graph cuts a
    # batch out, and pads it: Python would take longer.

    def handed_over(self, batches: PendingBatches) -> list[Any]:
        """The arrays, or tensors, that a graph gets of some batches; see `handed_over_specs`."""
        # The order is that of `handed_over_specs` and `from_host`.
        first = batches.first.step
        steps = np.array([first, first + batches.count], np.int64)
        leaves = []
        for leaf, spec in zip(batches.leaves, self.specs, strict=True):
            if isinstance(leaf, list):
                leaves.append(self._joined(spec, leaf))
            else:
                leaves.append(leaf)
        return [steps, batches.starts[:, None], batches.index, *leaves, batches.widths, batches.lengths]

    def handed_over_specs(self) -> list[tf.TensorSpec]:
        """The specs of what `handed_over` returns.

        The step of the first batch, and that after the last one: int64 [2]. Where the rows of each batch begin, and
        where those of the last one end: int64 [batches + 1, 1]. The indices: int64 [rows]. The arrays: [rows, ...],
        those that are padded: [rows of all examples, ...]. The lengths that these are padded to: int64 [batches, padded
        arrays]; and their own: int64 [rows, padded arrays].
        """
        leaves = []
        for spec in self.specs:
            shape = spec.shape[1:] if spec.padded else spec.shape
            leaves.append(tf.TensorSpec([None, *shape], tensor_dtype(self.dtype(spec))))
        steps = tf.TensorSpec([2], tf.int64)
        starts = tf.TensorSpec([None, 1], tf.int64)
        index = tf.TensorSpec([None], tf.int64)
        lengths = tf.TensorSpec([None, len(self.padded)], tf.int64)  # widths and lengths are alike
        return [steps, starts, index, *leaves, lengths, lengths]

    def from_host(self, tensors: Sequence[tf.Tensor]) -> HandedOver:
        """In a graph: some batches, of which `batch_at` cuts out one, from the tensors of `handed_over`."""
        steps, starts, index, *leaves, widths, lengths = tensors
        # Computed once for all these batches; `batch_at` then only cuts.
        padded: list[_Padded] = []
        for number in range(len(self.padded)):
            offsets = tf.pad(tf.cumsum(lengths[:, number]), [[1, 0]])
            padded.append(_Padded(offsets, tf.gather(offsets, starts), widths[:, number]))
        return HandedOver(steps[0], steps[1], starts, index, leaves, padded)

    def batch_at(self, held: HandedOver, step: tf.Tensor) -> tuple[tf.Tensor, Batch]:
        """In a graph: the indices and the arrays of the batch at a step, padded to its own longest example."""
        number = step - held.first
        begin = tf.gather(held.starts, number)
        end = tf.gather(held.starts, number + 1)
        padded = iter(held.padded)
        arrays: list[tf.Tensor] = []
        masks: dict[str | int, tf.Tensor] = {}
        for column, spec, gap in zip(held.columns, self.specs, self._gaps, strict=True):
            if not spec.padded:
                arrays.append(_cut(column, begin, end))
                continue
            how = next(padded)
            start = tf.gather(how.starts, number)
            width = tf.gather(how.widths, number)
            # The offsets of the batch's own examples, counted from the batch's first row.
            offsets = _cut(how.offsets, begin, end + 1) - start
            rows = _cut(column, start, tf.gather(how.starts, number + 1))
            arrays.append(_filled_up(rows, offsets, width, gap))
            if spec.name in self._masked:
                masks[spec.name] = tf.sequence_mask(offsets[1:] - offsets[:-1], width)
        return _cut(held.index, begin, end), self._with_masks(arrays, masks)

    def _joined(self, spec: ArraySpec, arrays: list[np.ndarray]) -> np.ndarray:
        """The arrays of a padded array, joined: [rows of all examples, ...]."""
        return np.concatenate(arrays) if arrays else np.zeros([0, *spec.shape[1:]], self.dtype(spec))

    def _with_masks(self, arrays: Sequence[Any], masks: dict[str | int, Any]) -> Batch:
        """The batch with its masks, in the structure of an example."""
        batch = tf.nest.pack_sequence_as(self._structure, list(arrays))
        return self._padding.with_masks(batch, in_order(masks, self._masked))

    def tensor_specs(self) -> list[tf.TensorSpec]:
        """The specs of a batch's arrays; padded axes are open."""
        specs = []
        for spec in self.specs:
            # One axis of an example may differ in size: `padded` is 0 or 1 here.
            shape = (None, *spec.shape[1:]) if spec.padded else spec.shape
            specs.append(tf.TensorSpec([None, *shape], tensor_dtype(self.dtype(spec))))
        return specs

    def pack(self, arrays: Sequence[tf.Tensor]) -> Batch:
        """A batch without padding, in the structure of an example."""
        return self._with_masks(arrays, {})

    def batch_spec(self) -> Batch:
        """The specs of a batch and its masks, in its structure."""
        masks = {name: tf.TensorSpec([None, None], tf.bool) for name in self._masked}
        return self._with_masks(self.tensor_specs(), masks)


def _join(batches: PendingBatches, specs: Sequence[ArraySpec]) -> None:
    """Joins the arrays that are padded, which `handed_over` would do while the graph waits."""
    sizes = iter(batches.lengths.sum(0).tolist())
    for number, (leaf, spec) in enumerate(zip(batches.leaves, specs, strict=True)):
        if spec.padded:
            batches.leaves[number] = array_of_own([next(sizes), *spec.shape[1:]], spec.dtype)
            np.concatenate(leaf, out=batches.leaves[number])


def _filled_up(rows: tf.Tensor, offsets: tf.Tensor, width: tf.Tensor, gap: Scalar) -> tf.Tensor:
    """Examples of different lengths in one tensor: [examples, width, ...].

    Args:
        rows: the rows of all examples, [rows, ...].
        offsets: where those of each example begin, and where those of the last one end: int64 [examples + 1].
        width: the length to pad to: int64 [].
        gap: what fills the gaps.
    """
    # The raw operation: `RaggedTensor.to_tensor` adds others around it.
    return tf.raw_ops.RaggedTensorToTensor(
        shape=tf.stack([-1, width, *rows.shape[1:]]),
        values=rows,
        default_value=tf.constant(gap, rows.dtype),
        row_partition_tensors=[offsets],
        row_partition_types=["ROW_SPLITS"],
    )


def _cut(tensor: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    """A part of a tensor along its first axes; `begin` and `end` have a number for each of these."""
    # `tensor[begin:end]` would first put numbers together, which takes as long as the cut.
    return tf.strided_slice(tensor, begin, end)


def tensor_dtype(dtype: np.dtype) -> tf.DType:
    """The dtype of the tensor for an array of a batch."""
    return tf.string if dtype.hasobject else tf.as_dtype(dtype)
