"""How gradients travel between replicas: in how many collectives, and in how many bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from loop.backends.base import Backend
from loop.errors import UsageError
from loop.step.variable_values import read_values

ConcreteFunction: TypeAlias = "tf.types.experimental.ConcreteFunction"
"""A compiled function after it has been traced."""

WIRE = {"fp16": tf.float16, "bf16": tf.bfloat16}
"""The type in which gradients are sent, by the value of the option `compression`."""


def check(backend: Backend, compression: str) -> None:
    """Refuses a compression that the backend can't send.

    Raises:
        UsageError: the backend's collectives don't support the type.
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

    The sums are never compressed. They travel with the first group: in the same collective, if the types are the same.

    Args:
        backend: the backend.
        gradients: the gradients of this replica.
        sums: the sums of this replica.
        compression: the type in which gradients are sent: a key of `WIRE`, or "none".
        groups: the number of collectives in which they are sent.
        headroom: the number by which gradients are divided before they are sent in 16 bits, and multiplied afterwards;
            rounded up to a power of 2, which costs no digits. The size of the global batch makes gradients of a sum as
            small as those of a mean, which float16 can hold. With loss scaling it is 1: if a reduced gradient
            overflows, the scale is halved.
    """
    # One replica sends nothing, so nothing is rounded.
    wire = WIRE.get(compression) if backend.replicas > 1 else None
    if wire is None:
        return _all_reduced(backend, list(gradients), sums, groups)
    factor = 2.0 ** (headroom - 1).bit_length()
    # Divided in the gradient's own type: in 16 bits it may overflow before.
    sent = []
    for gradient in gradients:
        # A complex number isn't compressed: there is no complex type of 16 bits.
        sent.append(gradient if gradient.dtype.is_complex else tf.cast(gradient / factor, wire))
    received, sums = _all_reduced(backend, sent, sums, groups)
    # In the order in which they arrive, the last one first.
    for index in reversed(range(len(received))):
        if not gradients[index].dtype.is_complex:
            received[index] = tf.cast(received[index], gradients[index].dtype) * factor
    return received, sums


def _all_reduced(
    backend: Backend, sent: Sequence[tf.Tensor], sums: tf.Tensor, groups: int
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Tensors and sums, added up over all replicas."""
    received = list(sent)
    # All workers must enter the collectives in the same order: the groups depend on sizes alone.
    sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in sent]
    # Sums without gradients are a group, too: gradients by lookup travel elsewhere, and a model may have no others.
    for number, indices in enumerate(split(sizes, groups) or [[]]):
        group = [sent[index] for index in indices]
        # The sums are computed before any gradient, so they go with the first group.
        if number == 0:
            *reduced_group, sums = backend.all_reduce([*group, sums])
        else:
            reduced_group = backend.all_reduce(group)
        for index, tensor in zip(indices, reduced_group, strict=True):
            received[index] = tensor
    return received, sums


def average(backend: Backend, variables: Sequence[tf.Variable]) -> None:
    """Within `run`: gives all replicas the chief's value plus the mean distance of all values to it.

    So variables that are equal stay as they are, to the bit. Integers, such as an optimizer's counter, and truth values
    get the chief's value.
    """
    is_chief = backend.replica() == 0
    values = read_values(variables)

    # The chief's values: all others contribute zeros to the sum.
    contributions = [tf.where(is_chief, value, tf.zeros_like(value)) for value in values]
    chief_values = backend.all_reduce(contributions)

    # Distances instead of values: those of equal variables are 0, and their sum isn't rounded.
    own_distances = {}
    for index, (value, chief_value) in enumerate(zip(values, chief_values, strict=True)):
        if value.dtype.is_floating or value.dtype.is_complex:
            # The difference of two equal infinities would be nan.
            own_distances[index] = tf.where(value == chief_value, tf.zeros_like(value), value - chief_value)
    distances = dict(zip(own_distances, backend.all_reduce(list(own_distances.values())), strict=True))
    for index, (variable, chief_value) in enumerate(zip(variables, chief_values, strict=True)):
        if index in distances:
            variable.assign(chief_value + distances[index] / backend.replicas)
        else:
            variable.assign(chief_value)


def split(sizes: Sequence[int], groups: int) -> list[list[int]]:
    """Splits tensors into up to `groups` groups of about the same size, from the last tensor to the first.

    A tensor belongs to the group in which its middle lies, so that a large tensor doesn't pull others into its group.

    Args:
        sizes: the sizes of the tensors, in bytes.
        groups: the greatest number of groups.

    Returns:
        The indices of the tensors in each group.
    """
    total = max(sum(sizes), 1)
    before = 0
    indices: dict[int, list[int]] = {}
    for index in reversed(range(len(sizes))):
        # A tensor without elements has its middle at the end: it belongs to the last group.
        group = min((2 * before + sizes[index]) * groups // (2 * total), groups - 1)
        indices.setdefault(group, []).append(index)
        before += sizes[index]
    return list(indices.values())


def collectives(function: ConcreteFunction) -> list[int]:
    """How many bytes each all-reduce in a compiled function sends; for tests and benchmarks."""
    graph = function.graph.as_graph_def(add_shapes=True)
    nodes = list(graph.node)
    for inner in graph.library.function:
        nodes += inner.node_def
    sizes = []
    for node in nodes:
        if node.op in ("HorovodAllreduce", "HorovodGroupedAllreduce", "CollectiveReduceV2"):
            # A grouped collective has an output for each of its tensors.
            elements = 0
            for shape in node.attr["_output_shapes"].list.shape:
                elements += tf.TensorShape(shape).num_elements()
            sizes.append(elements * tf.as_dtype(node.attr["T"].type).size)
    return sizes
