"""Collectives within a compiled step, between replicas; and those that not every backend has."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import ClassVar

import tensorflow as tf

from loop.backends.host_collectives import HostCollectives

ALONE = 1 << 20
"""The size in bytes from which a tensor is gathered by a collective of its own."""
COLLECTIVE = frozenset((tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64))
"""The types that TensorFlow's collectives add up. They gather all of these but bfloat16."""
_WIDER = {
    tf.bfloat16: tf.float32, tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
    tf.uint32: tf.int64, tf.bool: tf.int32,
}  # fmt: skip
"""For types that a collective may not take: the type in which they are sent instead, which has all their values."""


class StepCollectives(HostCollectives):
    """What the replicas of a job exchange within `Backend.run`. Here it is the case of a single replica.

    Attributes:
        gathers_rows: whether it has `gather_rows`.
    """

    gathers_rows: ClassVar[bool] = False

    def replica(self) -> tf.Tensor | int:
        """Within `run`: the index of this replica among those of all workers."""
        return self.rank

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Within `run`: the sum over all replicas of each tensor, in one fused collective."""
        return list(tensors)

    def no_adasum(self) -> str:
        """Why this backend can't do `adasum`, and what to do instead; "" if it can."""
        return "only Horovod can; use backend='horovod', or reduction='sum'"

    def adasum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Within `run`: the adaptive sum over all replicas of each tensor (Maleki et al. 2020)."""
        return list(tensors)

    def no_sharding(self) -> str:
        """Why this backend can't shard the optimizer's state, and what to do instead; "" if it can."""
        return ""

    def all_gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Within `run`: of each flat tensor [n], the values of all replicas [replicas, n]. Small tensors are fused."""
        # Each replica adds its values in its own row, and zeros in the others. The sum has all rows without rounding;
        # zeros are negative, because -0.0 + 0.0 is 0.0.
        replicas = tf.range(self.replicas, dtype=tf.int64)
        is_own_row = tf.equal(replicas, tf.cast(self.replica(), tf.int64))[:, None]
        # `where`, not a product: zero times infinity or NaN would be NaN in the rows of the other replicas.
        tables = []
        for tensor in tensors:
            zeros = tf.zeros_like(tensor)
            if not tensor.dtype.is_integer:
                zeros = -zeros
            tables.append(tf.where(is_own_row, tensor, zeros))
        return self.all_reduce(tables)

    def gather_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Within `run`: the rows of all replicas, in the order of replicas. The number of rows may differ."""
        return rows

    def assign(self, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
        """Within `run`: gives variables values that are the same in all replicas."""
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def gathered_flat(gather: Callable[[tf.Tensor], tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gathers flat tensors of one dtype, the small ones in one collective; see `Backend.all_gather`.

    Args:
        gather: gathers one tensor [n] from all replicas; returns [replicas * n], in the order of replicas.
        tensors: those of this replica.
    """
    gathered: dict[int, tf.Tensor] = {}
    small: dict[int, tf.Tensor] = {}
    lengths: list[int] = []  # of the small ones
    # The sizes are the same on all workers, and so are the collectives and their order.
    for index, tensor in enumerate(tensors):
        length = tensor.shape.num_elements()
        if length * tensor.dtype.size < ALONE:
            small[index] = tensor
            lengths.append(length)
        else:
            # Copying it into a tensor with others, and out again, would take longer than sending it.
            gathered[index] = tf.reshape(gather(tensor), [-1, length])

    if small:
        together = tf.concat(list(small.values()), 0)
        # One row for each replica; the columns are then cut into the tensors again.
        rows = tf.reshape(gather(together), [-1, sum(lengths)])
        gathered |= zip(small, tf.split(rows, lengths, axis=1), strict=True)
    return _in_order(gathered)


def of_one_dtype(reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls `reduce` once for the tensors of each dtype, usually the only one; results in the order of `tensors`."""
    # In the order of `tensors`, not of a set: all workers must enter the collectives in the same order.
    groups: dict[tf.DType, dict[int, tf.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, {})[index] = tensor
    reduced: dict[int, tf.Tensor] = {}
    for group in groups.values():
        reduced |= zip(group, reduce(list(group.values())), strict=True)
    return _in_order(reduced)


def in_types(
    reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]], tensors: Sequence[tf.Tensor], types: Set[tf.DType]
) -> list[tf.Tensor]:
    """Calls `reduce` as `of_one_dtype` does, with tensors of the types that a collective takes.

    Args:
        reduce: a collective, which adds up or gathers.
        tensors: the tensors, of any types of numbers.
        types: the types that the collective takes. A tensor of another type is sent in one of these.
    """
    sent = []
    for tensor in tensors:
        if tensor.dtype in types:
            sent.append(tensor)
        else:
            sent.append(_sendable(tensor))
    return list(map(_received, of_one_dtype(reduce, sent), tensors))


def _sendable(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_complex:
        parts = [tf.math.real(tensor), tf.math.imag(tensor)]
        return tf.concat(parts, -1) if tensor.shape.rank else tf.stack(parts)
    # The sum of the same bits as signed numbers has the same bits.
    return tf.bitcast(tensor, tf.int64) if tensor.dtype == tf.uint64 else tf.cast(tensor, _WIDER[tensor.dtype])


def _received(tensor: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    """What a collective has made of `_sendable(sent)`, in the type of `sent`."""
    if tensor.dtype == sent.dtype:
        return tensor
    if sent.dtype.is_complex:
        number = tf.complex(*tf.split(tensor, 2, axis=-1))
        return number if sent.shape.rank else tf.reshape(number, [])
    return tf.bitcast(tensor, sent.dtype) if sent.dtype == tf.uint64 else tf.cast(tensor, sent.dtype)


def _in_order(by_index: dict[int, tf.Tensor]) -> list[tf.Tensor]:
    """The values of a dict whose keys are their places in a list."""
    return [by_index[index] for index in sorted(by_index)]
