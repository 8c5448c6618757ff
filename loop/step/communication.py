"""How gradients travel between replicas: in how many collectives, and in how many bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from loop.backends.base import Backend
from loop.errors import UsageError

WIRE = {"fp16": tf.float16, "bf16": tf.bfloat16}
"""What gradients are sent as, by the option `compression`."""


def check(backend: Backend, compression: str) -> None:
    """Refuses a compression that the engine can't send.

    Raises:
        UsageError: the engine's collectives don't know the type.
    """
    if backend.replicas > 1 and compression in backend.cannot_send:
        raise UsageError(
            f"compression={compression!r} with backend={backend.name!r}: {backend.cannot_send[compression]}"
        )


def reduced(
    backend: Backend,
    gradients: Sequence[tf.Tensor],
    sums: tf.Tensor,
    *,
    compression: str = "none",
    groups: int = 1,
    headroom: int = 1,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Within `run`: gradients and sums, added up over all replicas.

    The sums are never compressed. They travel with the first group, which is one collective with them where the types
    are the same.

    Args:
        backend: the backend.
        gradients: of this replica.
        sums: of this replica.
        compression: the type in which gradients are sent: a key of `WIRE`, or "none".
        groups: the number of collectives in which they are sent.
        headroom: in 16 bits, gradients are divided by this number, rounded up to a power of 2 (which costs no digits),
            and multiplied afterwards. Gradients of a sum over the global batch, divided by its size, are in float16
            what a mean's gradients would be. Loss scaling needs none: if the reduced gradient has overflowed, it halves
            the scale.
    """
    wire = WIRE.get(compression) if backend.replicas > 1 else None
    factor = 2.0 ** (headroom - 1).bit_length() if wire else 1.0
    sent = [tf.cast(gradient / factor, wire) for gradient in gradients] if wire else list(gradients)
    reduced_at: dict[int, tf.Tensor] = {}
    for places in split([tensor.shape.num_elements() * tensor.dtype.size for tensor in sent], groups):
        # The sums wait for no gradient: they go with the first group.
        with_sums = [] if reduced_at else [sums]
        group = backend.all_reduce([*(sent[place] for place in places), *with_sums])
        if with_sums:
            sums = group.pop()
        reduced_at |= zip(places, group, strict=True)
    if wire:
        for place, tensor in reduced_at.items():
            reduced_at[place] = tf.cast(tensor, gradients[place].dtype) * factor
    return [reduced_at[place] for place in range(len(gradients))], sums


def average(backend: Backend, variables: Sequence[tf.Variable]) -> None:
    """Within `run`: gives all replicas the chief's value plus the mean distance to it.

    So variables that are equal stay as they are, to the bit. Of integers, such as an optimizer's counter, it is the
    chief's value.
    """
    chief = backend.replica() == 0
    values = [variable.read_value() for variable in variables]
    firsts = backend.all_reduce([tf.where(chief, value, tf.zeros_like(value)) for value in values])
    distances = backend.all_reduce(
        [
            tf.where(value == first, tf.zeros_like(value), value - first)  # of infinite ones too
            for value, first in zip(values, firsts, strict=True)
        ]
    )
    for variable, first, distance in zip(variables, firsts, distances, strict=True):
        variable.assign(first + distance / backend.replicas if first.dtype.is_floating else first)


def split(sizes: Sequence[int], groups: int) -> list[list[int]]:
    """The places of tensors of these sizes, from the last to the first, in up to so many groups of about one size.

    A tensor belongs to the group in which its middle lies, so that a large one doesn't draw in those before it.
    """
    total, before = max(sum(sizes), 1), 0
    found: dict[int, list[int]] = {}
    for place in reversed(range(len(sizes))):
        found.setdefault((2 * before + sizes[place]) * groups // (2 * total), []).append(place)
        before += sizes[place]
    return list(found.values())


def collectives(function: Any) -> list[int]:
    """How many bytes each all-reduce in a compiled function sends, wherever in it: for tests and benchmarks."""
    graph = function.graph.as_graph_def(add_shapes=True)
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    return [
        sum(tf.TensorShape(shape).num_elements() for shape in node.attr["_output_shapes"].list.shape)
        * tf.as_dtype(node.attr["T"].type).size
        for node in nodes
        if node.op in ("HorovodAllreduce", "HorovodGroupedAllreduce", "CollectiveReduceV2")
    ]
