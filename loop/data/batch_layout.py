"""The arrays of a batch of indexed data: shapes, dtypes, padding and masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loop.data.columns import columns_of, fill_column, fill_padded_column
from loop.data.examples import ArraySpec, BadExampleError, specs_of
from loop.data.indexed import IndexedData
from loop.data.padding import Padding, Scalar
from loop.data.random_access import Example, structure_of
from loop.data.read_ahead import array_of_own, array_of_own_of
from loop.task import Batch


class BatchLayout:
    """The arrays of a batch of indexed data: their names, shapes and dtypes, and how they are padded.

    Args:
        data: the data.
        example: the first example.

    Attributes:
        wide: whether floating-point numbers have 64 bits in a batch.
        specs: what the arrays of an example are like.
    """

    def __init__(self, data: IndexedData, example: Example) -> None:
        specs = specs_of(example, 0)
        padded = data.padded_names(specs)
        self._padding = data.padding or Padding(mask=False)
        self._masked = self._padding.masked(padded) if padded else []
        self._structure = structure_of(example)
        self.wide = data.wide
        self.specs: list[ArraySpec] = []
        self._gaps: list[Scalar] = []  # what fills the gaps of each array
        for spec in specs:
            is_padded = spec.name in padded
            self.specs.append(dataclasses.replace(spec, padded=int(is_padded)))
            self._gaps.append(self._padding.value(spec.name, spec.dtype) if is_padded else None)

    @property
    def padded(self) -> list[str | int]:
        """The names of the arrays whose examples differ in length."""
        return [spec.name for spec in self.specs if spec.padded]

    @property
    def example_bytes(self) -> int:
        """About how many bytes an example has."""
        return sum(int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in self.specs)

    def dtype(self, spec: ArraySpec) -> np.dtype:
        """The dtype that an array has in a batch."""
        return np.dtype("float64") if self.wide and spec.dtype.kind == "f" else spec.dtype

    def new(self, count: int, lengths: dict[str | int, int]) -> list[np.ndarray]:
        """The arrays of a batch of `count` examples, not yet filled; and the masks.

        Args:
            count: the number of examples.
            lengths: the lengths that arrays are padded to, by name.
        """
        leaves = []
        for spec, gap in zip(self.specs, self._gaps, strict=True):
            shape = (lengths[spec.name], *spec.shape[1:]) if spec.padded else spec.shape
            leaf = array_of_own([count, *shape], self.dtype(spec))
            if spec.padded:
                leaf[...] = gap
            leaves.append(leaf)
        masks = [np.zeros([count, lengths[name]], bool) for name in self._masked]
        return leaves + masks

    def leaves_of(self, columns: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays of a batch that isn't padded, from its stacked examples."""
        return [array_of_own_of(column, self.dtype(spec)) for column, spec in zip(columns, self.specs, strict=True)]

    def fill_all(self, batch: Sequence[np.ndarray], examples: Sequence[Any]) -> bool:
        """Writes examples into the rows of a batch at once; False: they have to be looked at one by one.

        Args:
            batch: the arrays, [examples, ...], and the masks.
            examples: as they were read and mapped.
        """
        columns = columns_of(examples, self.specs)
        if columns is None or any(
            leaf.dtype != spec.dtype or leaf.dtype.hasobject for leaf, spec in self._pairs(batch)
        ):
            return False
        for (leaf, spec), column in zip(self._pairs(batch), columns, strict=True):
            if not spec.padded:
                filled = fill_column(column, leaf)
            else:
                filled = fill_padded_column(column, leaf, self._mask_of(batch, spec))
            if not filled:
                return False
        return True

    def fill(self, batch: Sequence[np.ndarray], row: int, arrays: Sequence[np.ndarray] | Exception, index: int) -> None:
        """Writes the arrays of an example into a row of a batch.

        Raises:
            BadExampleError: an array is longer than the arrays of the batch.
            Exception: the error that is there in place of the arrays.
        """
        if isinstance(arrays, Exception):
            raise arrays
        for (leaf, spec), array in zip(self._pairs(batch), arrays, strict=True):
            if not spec.padded:
                leaf[row] = array[()]  # of an array without axes, its element, such as a text
                continue
            if len(array) > leaf.shape[1]:
                raise BadExampleError(
                    f"example {index}: {spec.label}length {len(array)}, more than lengths=... say of any example of "
                    f"its batch, {leaf.shape[1]}: give the lengths that examples have after map"
                )
            leaf[row, : len(array)] = array
            mask = self._mask_of(batch, spec)
            if mask is not None:
                mask[row, : len(array)] = True

    def _pairs(self, batch: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, ArraySpec]]:
        return zip(batch, self.specs, strict=False)  # masks follow the arrays

    def _mask_of(self, batch: Sequence[np.ndarray], spec: ArraySpec) -> np.ndarray | None:
        return batch[len(self.specs) + self._masked.index(spec.name)] if spec.name in self._masked else None

    def clear(self, batch: Sequence[np.ndarray], row: int) -> None:
        """Empties a row whose example is left out."""
        for leaf in batch:
            leaf[row] = "" if leaf.dtype == object else np.zeros([], leaf.dtype)

    def tensor_specs(self) -> list[tf.TensorSpec]:
        """The specs of a batch's arrays and masks; padded axes are open."""
        specs = []
        for spec in self.specs:
            shape = (None, *spec.shape[1:]) if spec.padded else spec.shape
            specs.append(tf.TensorSpec([None, *shape], tensor_dtype(self.dtype(spec))))
        return specs + [tf.TensorSpec([None, None], tf.bool) for _ in self._masked]

    def pack(self, tensors: Sequence[tf.Tensor]) -> Batch:
        """The batch with its masks, in the structure of an example, from the tensors of `tensor_specs`."""
        batch = tf.nest.pack_sequence_as(self._structure, list(tensors[: len(self.specs)]))
        return self._padding.with_masks(batch, dict(zip(self._masked, tensors[len(self.specs) :], strict=True)))


def tensor_dtype(dtype: np.dtype) -> tf.DType:
    """The dtype of the tensor for an array of a batch."""
    return tf.string if dtype.hasobject else tf.as_dtype(dtype)
