"""Parts of what a task returned as its data: the first examples, in memory or as they are, and in 64 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from loop.data.arrays import Array, ArrayData
from loop.data.batched import check_unbatched
from loop.data.indexed import IndexedData
from loop.data.padded_streams import open_axes
from loop.data.pipelines import check_spec, map_examples, stacking_problem
from loop.data.sequence_arrays import as_sequences
from loop.data.streams import StreamData
from loop.errors import UsageError
from loop.task import Dataset


def head(data: Dataset, examples: int) -> Dataset:
    """The first examples of what a task returned, of the same type. What isn't data stays as it is."""
    if isinstance(data, ArrayData | IndexedData):
        return data.head(examples)
    if isinstance(data, StreamData):
        return data.replaced(data.dataset.take(examples))
    return data.take(examples) if isinstance(data, tf.data.Dataset) else data


def in_float64(data: Dataset) -> Dataset:
    """What a task returned, with floating-point numbers of 64 bits. What isn't data stays as it is."""
    if isinstance(data, ArrayData | IndexedData):
        return data.in_float64()
    if isinstance(data, StreamData):
        return data.replaced(in_float64(data.dataset))
    if not isinstance(data, tf.data.Dataset):
        return data
    return map_examples(data, lambda example: tf.nest.map_structure(_wide, example))


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float64) if tensor.dtype.is_floating else tensor


def contents(data: Dataset, examples: int) -> Iterator[np.ndarray]:
    """The arrays of what a task returned: whole arrays in memory; of other data, the first examples."""
    if isinstance(data, ArrayData):
        for array in tf.nest.flatten(data.arrays):
            if isinstance(array, np.ndarray):
                yield array
            else:
                yield array.rows
                yield array.shapes  # the same rows may be cut into other examples
    if isinstance(data, IndexedData):
        yield from data.first_arrays(examples)
    stream = data.dataset if isinstance(data, StreamData) else data
    if isinstance(stream, tf.data.Dataset):
        for example in stream.take(examples).as_numpy_iterator():
            yield from map(np.asarray, tf.nest.flatten(example))


def fixed_head(data: Dataset, size: int) -> Dataset:
    """The first examples of what a task returned, the same ones each time that they are read; of a stream in memory."""
    if isinstance(data, ArrayData | IndexedData):
        return data.head(size)
    stream = StreamData(data) if isinstance(data, tf.data.Dataset) else data
    if not isinstance(stream, StreamData):
        return data  # `source` says what is wrong with it
    # Checked here as in training: `ArrayData`, which is made of the stream, doesn't show batches any more.
    check_spec(stream.dataset)
    if stream.check_batched:
        check_unbatched(stream.dataset, "train_data()", stream.padding is not None)
    examples = list(map(tf.nest.flatten, stream.dataset.take(size).as_numpy_iterator()))
    if not examples:
        raise no_examples("train_data()")

    specs = tf.nest.flatten(stream.dataset.element_spec)
    arrays: list[Array] = []
    for index, (spec, column) in enumerate(zip(specs, zip(*examples, strict=True), strict=True)):
        # Axes that the stream calls open are padded, also where these few examples have one length.
        axes = 0 if stream.padding is None else open_axes(spec)
        if axes:
            arrays.append(as_sequences(column, index, axes))
        else:
            arrays.append(_stacked(column, spec))
    return ArrayData.of_structure(tf.nest.pack_sequence_as(stream.dataset.element_spec, arrays), stream.padding)


def _stacked(column: Sequence[np.ndarray], spec: tf.TensorSpec) -> np.ndarray:
    """The examples of one array, stacked."""
    # The dtype is said: of numbers without axes, TensorFlow would make 32 bits out of 64.
    tensors = [tf.convert_to_tensor(example, spec.dtype) for example in column]
    try:
        return tf.stack(tensors).numpy()
    except tf.errors.InvalidArgumentError as error:
        raise stacking_problem(error) or error from None


def no_examples(what: str) -> UsageError:
    """The error for a source without examples."""
    return UsageError(f"{what} has no examples: nothing can be trained or evaluated on it")
