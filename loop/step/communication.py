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
    backend: Backend, gradients: Sequence[tf.Tensor], sums: tf.Tensor, options: dict[str, Any], scaled: bool
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Within `run`: gradients and sums, added up over all replicas, as the options `compression` and `groups` ask.

    The sums are never compressed. They travel with the first group, which is one collective with them where the types
    are the same.

    In 16 bits there is less room. These are gradients of a sum over the global batch: divided by its size, rounded up
    to a power of 2 (which costs no digits), they are in float16 what a mean's gradients would be. Loss scaling sees to
    that itself (`scaled`): if the reduced gradient has overflowed, it halves the scale.
    """
    wire = WIRE.get(options["compression"]) if backend.replicas > 1 else None
    factor = 1.0 if scaled or wire is None else 2.0 ** (options["batch_size"] - 1).bit_length()
    sent = [tf.cast(gradient / factor, wire) for gradient in gradients] if wire else list(gradients)
    found: dict[int, tf.Tensor] = {}
    for places in split([each.shape.num_elements() * each.dtype.size for each in sent], options["groups"]):
        # The sums wait for no gradient: they go with the first.
        own = [] if found else [sums]
        group = backend.all_reduce([*(sent[place] for place in places), *own])
        sums = group.pop() if own else sums
        found |= zip(places, group, strict=True)
    if wire:
        found = {place: tf.cast(each, gradients[place].dtype) * factor for place, each in found.items()}
    return [found[place] for place in range(len(gradients))], sums


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
