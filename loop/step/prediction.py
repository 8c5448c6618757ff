"""The compiled forward pass of predictions: whole blocks of examples, all in the same graph on any worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data import EVALUATION_EPOCH, Rows, Source, StreamSource, count
from loop.errors import UsageError
from loop.step.build import BuiltModel
from loop.step.own_state import OwnState
from loop.step.replica import Replica, within
from loop.step.tracing import compiled
from loop.task import Batch, Model

Columns: TypeAlias = dict[str, np.ndarray]
"""The arrays of a block by name, each with one row per example."""
Outputs: TypeAlias = tf.Tensor | tuple[tf.Tensor, ...] | list[tf.Tensor] | dict[str, tf.Tensor]
"""What `TrainTask.predict` returns."""


class Prediction:
    """What is predicted for each block of a source. A block is a whole batch of the source, computed on one device.

    Args:
        built: the model.
        source: the data, not sharded.
        predict: is called with the model and a batch while the forward pass is traced.
        seed: the seed of the run, for random numbers.

    Attributes:
        blocks_read: the number of blocks of the source, once all of them have been iterated over.
    """

    def __init__(
        self, built: BuiltModel, source: Source, predict: Callable[[Model, Batch], Outputs], seed: int
    ) -> None:
        self._model = built.model
        self._source = source
        self._predict = predict
        self._seed = seed
        self._fixed_rows = built.fixed_rows
        self._check_size()
        self.blocks_read = 0

        self._own_state = OwnState(self._model, Backend())

        # One graph for blocks of all sizes: another graph may round otherwise, and the last block is a short one.
        examples, longer_examples = self._examples()
        specs = [_open_spec(tensor, longer) for tensor, longer in zip(examples, longer_examples, strict=True)]
        index = tf.TensorSpec([None], tf.int64)
        signature = [specs, index, tf.TensorSpec([], tf.int64)]
        self._forward = compiled(self._of_block, input_signature=signature)

    def _check_size(self) -> None:
        """Refuses a batch size that the model doesn't take."""
        size = self._source.options.batch_size
        if self._fixed_rows not in (None, size):
            raise UsageError(
                f"batch_size={size}: the model takes batches of {self._fixed_rows} rows alone: give "
                f"batch_size={self._fixed_rows} (--batch-size {self._fixed_rows})"
            )

    def _examples(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors of a few examples; and the same with longer padding, where examples are padded."""
        example = self._source.example
        longer = self._source.longer_example()
        if longer is None:
            longer = example
        return tf.nest.flatten(example), tf.nest.flatten(longer)

    def names(self) -> list[str]:
        """The names of the arrays that are predicted. Traces the forward pass."""
        return list(self._forward.get_concrete_function().structured_outputs)

    def blocks(self, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, Columns]]:
        """Computes the blocks that are wanted, in order.

        Args:
            is_wanted: returns whether the block of this number is to be computed. A stream reads the others, too.

        Yields:
            The number of a block, and what is predicted for its examples.

        Raises:
            UsageError: an array has another number of rows than the block.
        """
        for number, rows in self._read(is_wanted):
            self.blocks_read = number + 1
            if rows is not None:
                yield number, self._computed(number, rows)

    def _read(self, is_wanted: Callable[[int], bool]) -> Iterator[tuple[int, Rows | None]]:
        """The number and the rows of each block; None for a block that isn't wanted."""
        source = self._source
        epoch = tf.constant(EVALUATION_EPOCH, tf.int64)
        if not isinstance(source, StreamSource):
            assert source.steps_per_epoch is not None
            for number in range(source.steps_per_epoch):
                yield number, source.whole(epoch, tf.constant(number, tf.int64)) if is_wanted(number) else None
            return

        # A stream can't be read from a position on, so blocks that aren't wanted are read and dropped.
        for number, batch in enumerate(source.start(0, 0)):
            yield number, source.whole(epoch, tf.constant(number, tf.int64), batch) if is_wanted(number) else None

    def _computed(self, number: int, rows: Rows) -> Columns:
        """What is predicted for the examples of a block."""
        n = int(count(rows.batch))
        # Each block begins with the same state, so that the order of the blocks doesn't matter.
        self._own_state.begin()
        with self._own_state.in_place():
            outputs = self._forward(tf.nest.flatten(rows.batch), rows.index, tf.constant(number, tf.int64))
        columns: Columns = {}
        for name, tensor in outputs.items():
            array = np.ascontiguousarray(tensor.numpy())
            if len(array) != n:
                raise UsageError(
                    f"predict() returned {len(array)} rows for {name!r} of {n} examples: return one row per example, "
                    "in their order"
                )
            columns[name] = array
        return columns

    def _of_block(self, leaves: list[tf.Tensor], index: tf.Tensor, number: tf.Tensor) -> dict[str, tf.Tensor]:
        """While tracing: what is predicted for the examples of a block, by name."""
        batch = tf.nest.pack_sequence_as(self._source.example, leaves)
        n = count(batch)
        zero = tf.constant(0, tf.int64)
        rows = Rows(batch, zero, tf.constant(EVALUATION_EPOCH, tf.int64), number, index)
        # Always one device and one replica: the whole block is the batch.
        replica = Replica(Backend(), rows, self._seed, self._source.options.batch_size)
        replica.fixed_rows = self._fixed_rows
        if self._fixed_rows is not None:
            replica.fill_up(self._fixed_rows)
        with within(replica):
            outputs = named_outputs(self._predict(self._model, replica.batch))
        self._own_state.note_changes()
        if self._fixed_rows is None:
            return outputs
        # Without the rows that only filled the block up.
        return {name: tensor[:n] for name, tensor in outputs.items()}


def named_outputs(outputs: Outputs) -> dict[str, tf.Tensor]:
    """What `predict` returned, by name: the keys of a dict, `output_0` and so on of a tuple, else `output`.

    Raises:
        UsageError: it has no arrays of numbers, or one without a row for each example.
    """
    if isinstance(outputs, dict):
        named = {str(name): value for name, value in outputs.items()}
    elif isinstance(outputs, tuple | list):
        named = {f"output_{index}": value for index, value in enumerate(outputs)}
    else:
        named = {"output": outputs}
    if not named:
        raise UsageError("predict() returned no array: return an array with a row per example, or a dict of them")
    return {name: _checked(name, value) for name, value in named.items()}


def _checked(name: str, value: object) -> tf.Tensor:
    """An output as a tensor, if it has real numbers with a row for each example."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"predict() returned {type(value).__name__} for {name!r}: return a tensor with a row per example; nested "
            "dicts and tuples must be made flat"
        ) from None
    if tensor.shape.rank == 0:
        raise UsageError(f"predict() returned a scalar for {name!r}: return one row per example, without a mean")
    if tensor.dtype == tf.bfloat16:  # few programs can read it
        return tf.cast(tensor, tf.float32)
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype == tf.bool):
        raise UsageError(f"predict() returned {tensor.dtype.name} for {name!r}: return real numbers or bool")
    return tensor


def _open_spec(tensor: tf.Tensor, longer: tf.Tensor) -> tf.TensorSpec:
    """The spec of any number of examples, of any padded length."""
    shape: list[int | None] = [None]
    # An axis that padding makes longer is open; all others are known to the graph.
    for size, longer_size in zip(tensor.shape[1:], longer.shape[1:], strict=True):
        shape.append(size if size == longer_size else None)
    return tf.TensorSpec(shape, tensor.dtype)
