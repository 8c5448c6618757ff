"""Streams whose examples differ in length: each global batch is padded to its own longest example."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from loop.data.padding import Padding, Scalar, Structure, along_axes, call_with, in_order, inside, leaf_names
from loop.errors import UsageError
from loop.task import Batch

Measured: TypeAlias = tuple[Structure, tuple[tf.Tensor, ...], tf.Tensor]
"""An example, the sizes of the open axes of each padded tensor, int64 [axes], and the length to sort by, int64 []."""


class PaddedBatches:
    """Cuts a `tf.data.Dataset` of examples, all of dense tensors of known rank, into padded batches.

    `seed` is that of the order in which batches of similar lengths come.

    Raises:
        UsageError: all shapes are known, so that nothing can be padded.
    """

    def __init__(self, dataset: tf.data.Dataset, padding: Padding, seed: int) -> None:
        self._dataset = dataset
        self._padding = padding
        self._seed = seed
        self._spec = dataset.element_spec
        self._names = leaf_names(self._spec)
        padding.check_values(self._names)
        self.axes = list(map(open_axes, tf.nest.flatten(self._spec)))
        padded = [name for name, axes in zip(self._names, self.axes, strict=True) if axes]
        if not padded:
            raise UsageError(
                "StreamData(padding=...): the data set's examples have one known shape, so that there is nothing to "
                "pad: leave padding out"
            )
        self._masked = padding.masked(padded)
        self._values: list[Scalar] = []
        for name, spec, axes in zip(self._names, tf.nest.flatten(self._spec), self.axes, strict=True):
            # Tensors that aren't padded need a value, too, but not one of the user's.
            values = padding if axes else Padding()
            self._values.append(values.value(name, np.dtype(spec.dtype.as_numpy_dtype)))

    def of(self, size: int, drop_remainder: bool = False, bucketed: bool = True) -> tf.data.Dataset:
        """Batches of `size` examples; of similar lengths, if the padding asks for it, and `bucketed` allows it."""
        measured = self._dataset.map(self._measured)
        if not (bucketed and self._padding.bucket_by):
            return self._stacked(measured, size, drop_remainder).map(self._finished)

        # Sorted within windows of many batches. A short last window stays: only its short last batch may be dropped.
        windows = self._stacked(measured, size * self._padding.buckets, False)

        @tf.autograph.experimental.do_not_convert
        def batches(number: tf.Tensor, window: Measured) -> tf.data.Dataset:
            order = self._order(window[-1], size, number)
            examples = tf.size(order, tf.int64)

            @tf.autograph.experimental.do_not_convert
            def batch(position: tf.Tensor) -> Batch:
                indices = order[position * size : (position + 1) * size]
                rows = tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), window)
                return self._finished(*rows)

            count = examples // size if drop_remainder else -(-examples // size)
            return tf.data.Dataset.range(count).map(batch)

        return windows.enumerate().flat_map(batches)

    def _stacked(self, measured: tf.data.Dataset, size: int, drop_remainder: bool) -> tf.data.Dataset:
        """Batches of measured examples, padded by tf.data, which knows no multiples and no masks."""
        # Nothing is padded in what `_measured` has added, but `padded_batch` wants a value for each tensor.
        values = tf.nest.pack_sequence_as(self._spec, self._values)
        of_shapes = tuple(tf.constant(0, tf.int64) for axes in self.axes if axes)
        padding_values = (values, of_shapes, tf.constant(0, tf.int64))
        return measured.padded_batch(size, padding_values=padding_values, drop_remainder=drop_remainder)

    @tf.autograph.experimental.do_not_convert
    def _measured(self, *example: Structure) -> Measured:
        """An example with its sizes, and the length by which it is sorted."""
        structure = example if type(self._spec) is tuple else example[0]
        leaves = tf.nest.flatten(structure)
        shapes = []
        for leaf, axes in zip(leaves, self.axes, strict=True):
            if axes:
                shapes.append(tf.shape(leaf, tf.int64)[:axes])
        checks = []
        if self._padding.mask is True:
            checks = [_same_lengths(shapes[0], shape) for shape in shapes[1:]]
        with tf.control_dependencies(checks):  # so that the checks come before all that uses the sizes
            shapes = list(map(tf.identity, shapes))
        if callable(self._padding.bucket_by):
            length = _length(call_with(self._padding.bucket_by, structure))
        else:
            length = tf.reduce_max(list(map(tf.reduce_prod, shapes)))
        return structure, tuple(shapes), length

    def _order(self, lengths: tf.Tensor, size: int, number: tf.Tensor) -> tf.Tensor:
        """The order in which the examples of a window make batches of similar lengths: int64 [examples].

        `lengths` has the length of each example, int64 [examples]; `size` is that of a batch.
        """
        # A short batch comes last, and has the last examples of the window, whatever their lengths: so none are left
        # out by `drop_remainder` more often than others.
        whole = tf.size(lengths, tf.int64) // size
        by_length = tf.argsort(lengths[: whole * size], stable=True)
        # Drawn from the seed and the window's number alone, so that a resume draws the same.
        draws = tf.random.stateless_uniform([whole], tf.stack([tf.constant(self._seed, tf.int64), number]))
        batches = tf.gather(tf.reshape(by_length, [whole, size]), tf.argsort(draws, stable=True))
        left = tf.range(whole * size, tf.size(lengths, tf.int64))
        return tf.concat([tf.cast(tf.reshape(batches, [-1]), tf.int64), left], 0)

    @tf.autograph.experimental.do_not_convert
    def _finished(self, structure: Structure, shapes: Sequence[tf.Tensor], lengths: tf.Tensor) -> Batch:
        """A batch of exactly the padded lengths, with its masks."""
        shapes_left = iter(shapes)  # of the padded tensors alone
        tensors: list[tf.Tensor] = []
        masks: dict[str | int, tf.Tensor] = {}
        leaves = zip(self._names, tf.nest.flatten(structure), self.axes, self._values, strict=True)
        for name, leaf, axes, value in leaves:
            if axes:
                sizes = next(shapes_left)
                padded = self._padding.length(sizes)
                for axis in range(axes):
                    leaf = _of_size(leaf, axis + 1, padded[axis], value)
                if name in self._masked:
                    masks[name] = inside(sizes, along_axes(padded, axes))
            tensors.append(leaf)
        batch = tf.nest.pack_sequence_as(self._spec, tensors)
        return self._padding.with_masks(batch, in_order(masks, self._masked))


def open_axes(spec: tf.TensorSpec) -> int:
    """The number of axes of an example that are padded: all up to the last one of unknown size."""
    axes = 0
    for axis, size in enumerate(spec.shape):
        if size is None:
            axes = axis + 1
    return axes


def _length(given: object) -> tf.Tensor:
    """The length that a function of the user has returned for an example: int64 []."""
    shown = repr(given)
    with contextlib.suppress(TypeError, ValueError):  # no tensor can be made of it
        length = tf.convert_to_tensor(given)
        shown = f"{length.dtype.name}{length.shape}"
        if length.dtype.is_integer and length.shape.num_elements() in (None, 1):
            return tf.reshape(tf.cast(length, tf.int64), [])
    raise UsageError(f"Padding(bucket_by=...) gave {shown:.80}: return the length of an example as an integer")


def _same_lengths(one: tf.Tensor, other: tf.Tensor) -> tf.Operation:
    """An operation that fails if two tensors of an example have different lengths."""
    return tf.debugging.assert_equal(
        one, other, "the arrays of an example have different lengths: say whose masks you want, as Padding(mask=0)"
    )


def _of_size(tensor: tf.Tensor, axis: int, size: tf.Tensor, value: Scalar) -> tf.Tensor:
    """A tensor that has `size` elements along an axis: cut, or filled up with `value`."""
    # tf.data has padded to the longest example of a window; the batch may be shorter, and rounding makes it longer.
    static = tensor.shape
    tensor = tf.gather(tensor, tf.range(tf.minimum(size, tf.shape(tensor, tf.int64)[axis])), axis=axis)
    shape = tf.shape(tensor, tf.int64)
    gap = tf.concat([shape[:axis], [size - shape[axis]], shape[axis + 1 :]], 0)
    tensor = tf.concat([tensor, tf.fill(gap, tf.constant(value, tensor.dtype))], axis)
    return tf.ensure_shape(tensor, [*static[:axis], None, *static[axis + 1 :]])
