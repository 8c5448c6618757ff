"""How examples of different lengths become one batch: the padding, its mask, and the batches by length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from callbacks.nearest import nearest
from loop.data.example_parts import flatten, name_of, sorted_keys
from loop.errors import UsageError
from loop.task import Batch

FillValues: TypeAlias = Any
"""What fills the gaps: one value for all arrays; a dict or tuple with a value for each; None: 0, and "" for text."""
Structure: TypeAlias = Any
"""A value, or dicts, tuples and lists of values."""
Scalar: TypeAlias = Any
"""A NumPy scalar, or a text."""
Length = TypeVar("Length", int, tf.Tensor)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Padding:
    """How examples of different lengths are padded: each global batch to its own longest example.

    All replicas pad to the same length, so that the numbers don't depend on how many replicas there are. A mask tells
    data from padding: bool, True where there is data, of shape [n, length] (of pictures [n, height, width]). It is
    appended to a tuple, put into a dict as `"mask"`, and makes a pair of a bare example. As `"weight"` of the values
    that `compute` returns, it keeps the padding out of loss, gradient and metrics.

    Args:
        values: what fills the gaps: one value for all arrays, or a dict or tuple with one for each; None: 0, and ""
            for text.
        mask: True: one mask, where all sequences of an example have the same length. A name (of a dict) or place (of a
            tuple), or a list of them: the masks of these arrays, appended in this order, or put into a dict as
            `"<name>_mask"`. False: no mask.
        multiple: padded lengths are rounded up to a multiple of this. Fewer different shapes help XLA.
        bucket_by: True, or a function of an example that returns its length as an integer (called with the parts of a
            tuple as arguments): examples of similar length meet in a batch, so that less is padded. False: they meet
            as they come.
        buckets: with `bucket_by`, into how many classes of equal size examples are divided by length. Of arrays at
            most so many that each class has four batches; of a stream, so many batches are read at a time, and dealt
            out anew.

    Raises:
        UsageError: an argument has no such meaning.
    """

    values: FillValues = None
    mask: bool | str | int | Sequence[str | int] = True
    multiple: int = 1
    bucket_by: bool | Callable[..., Any] = False
    buckets: int = 16

    def __post_init__(self) -> None:
        for name in ("multiple", "buckets"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"Padding({name}={value!r}): give an integer of at least 1")
        if not isinstance(self.bucket_by, bool) and not callable(self.bucket_by):
            raise UsageError(
                f"Padding(bucket_by={self.bucket_by!r}): give True, or a function of an example that returns its length"
            )
        if not isinstance(self.mask, bool | str | int | Iterable):
            raise UsageError(
                f"Padding(mask={self.mask!r}): give True, False, the name or place of an array, or a list of these"
            )

    def check_values(self, names: Sequence[str | int]) -> None:
        """Refuses values for arrays that there aren't, whose gaps would be filled with the usual ones.

        `names` are those of all arrays of an example; see `leaf_names`.
        """
        if not isinstance(self.values, Mapping | tuple | list):
            return
        for name in leaf_names(self.values):
            if name not in names:
                near = nearest(str(name), list(map(str, names)))
                raise UsageError(f"Padding(values={self.values!r}): the examples have no array {name!r}{near}")

    def value(self, name: str | int, dtype: np.dtype) -> Scalar:
        """What fills the gaps of the array of this name; see `leaf_names`.

        Raises:
            UsageError: a value that the array's dtype can't hold.
        """
        is_text = dtype.kind in "SUO"
        given = self.values
        if isinstance(given, Mapping | tuple | list):
            # Values may be nested as the example is; an array that they leave out has the usual one.
            given = dict(zip(leaf_names(given), tf.nest.flatten(given), strict=True)).get(name)
        if given is None:
            return "" if is_text else np.zeros([], dtype)[()]
        if is_text == isinstance(given, str | bytes) and np.ndim(given) == 0:
            if is_text:
                return given
            with np.errstate(invalid="ignore", over="ignore"):  # the error below names the value
                value = np.asarray(given).astype(dtype)
            # Also refused if an integer type changes it, such as 0.5 or 300 in 8 bits; floats may round.
            if dtype.kind not in "iub" or value == given:
                return value[()]
        kind = "text" if is_text else f"a value of dtype {dtype}"
        raise UsageError(f"Padding(values={self.values!r}): {given!r} isn't {kind}, of array {name!r}: give one")

    def length(self, lengths: tf.Tensor) -> tf.Tensor:
        """The padded lengths of a batch: at least one, so that no layer meets an empty axis; int64 [..., axes].

        `lengths` are those of each example of the batch, int64 [..., examples, axes].
        """
        return self.rounded(tf.maximum(tf.reduce_max(lengths, -2), 1))

    def rounded(self, length: Length) -> Length:
        """A length, or a tensor of lengths, rounded up to a multiple of `multiple`."""
        if self.multiple == 1:
            return length  # as it is: in a graph, the arithmetic would be three operations of each step
        return (length + self.multiple - 1) // self.multiple * self.multiple

    def masked(self, names: Sequence[str | int]) -> list[str | int]:
        """The names of the arrays that have a mask, out of those whose examples differ in length.

        Raises:
            UsageError: a mask of an array that isn't padded.
        """
        if isinstance(self.mask, bool):
            return list(names[:1]) if self.mask else []  # one mask serves all: the arrays have the same lengths
        wanted = [self.mask] if isinstance(self.mask, str | int) else list(self.mask)
        for name in wanted:
            if name not in names:
                padded = ", ".join(map(repr, names))
                raise UsageError(f"Padding(mask={self.mask!r}): {name!r} is not padded; these are: {padded}")
        return wanted

    def with_masks(self, batch: Structure, masks: Mapping[str | int, T]) -> Structure:
        """A batch and its masks, in one structure; see `Padding`."""
        if not masks:
            return batch
        if isinstance(batch, Mapping):
            named = {}
            for name, mask in masks.items():
                named["mask" if self.mask is True else f"{name}_mask"] = mask
            for name in sorted(named.keys() & batch.keys()):
                raise UsageError(f"Padding(mask=...) adds {name!r}, but the examples have a {name!r}: rename it")
            with_masks = {**batch, **named}
            sorted_keys(with_masks)  # refuses names of masks and keys of the batch that can't be sorted together
            return with_masks
        parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        return (*parts, *masks.values())


def in_order(masks: Mapping[str | int, T], names: Sequence[str | int]) -> dict[str | int, T]:
    """The masks of these arrays, in this order, in which they are appended to a batch."""
    return {name: masks[name] for name in names}


def as_padding(padding: Padding | FillValues) -> Padding | None:
    """The `Padding` for what a user passed as `padding`: one already, the values that fill the gaps, or None."""
    if padding is None or isinstance(padding, Padding):
        return padding
    if isinstance(padding, bool):
        raise UsageError(f"padding={padding}: give what fills the gaps, such as 0, or loop.Padding(...)")
    return Padding(padding)


def along_axes(lengths: tf.Tensor, axes: int) -> list[tf.Tensor]:
    """For each padded axis of a batch, the positions along it: int64 [1, 1.., length, 1..]."""
    positions = []
    for axis in range(axes):
        shape = [1] * (1 + axes)
        shape[1 + axis] = -1
        positions.append(tf.reshape(tf.range(lengths[axis]), shape))
    return positions


def by_axis(shapes: tf.Tensor) -> list[tf.Tensor]:
    """The sizes of examples, int64 [n, axes]: for each axis, int64 [n, 1, ..]."""
    axes = shapes.shape[1]
    return [tf.reshape(shapes[:, axis], [-1] + [1] * axes) for axis in range(axes)]


def inside(shapes: tf.Tensor, along: list[tf.Tensor]) -> tf.Tensor:
    """Where examples of these shapes, int64 [n, axes], have data in a batch padded to `along`: bool [n, lengths...]."""
    where = tf.constant(True)
    for size, positions in zip(by_axis(shapes), along, strict=True):
        where &= positions < size
    return where


def call_with(function: Callable[..., T], example: Structure) -> T:
    """Calls a function of an example as `tf.data` does: with the parts of a tuple as arguments, if it isn't named."""
    return function(*example) if type(example) is tuple else function(example)


def leaf_names(structure: Structure) -> list[str | int]:
    """The names of the arrays of a structure, in the order of `tf.nest.flatten`; see `name_of`."""
    return [name_of(path) for path, _ in flatten(structure, (), (tuple, list))]


def lengthened(batch: Batch, specs: Structure) -> Batch:
    """A batch whose padded axes are longer by one; `specs` is its structure of `tf.TensorSpec`s, open in these axes."""

    def longer(tensor: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        # The first axis counts the examples. It is open, too, but isn't padded.
        gaps = [[0, int(axis > 0 and size is None)] for axis, size in enumerate(spec.shape)]
        return tf.pad(tensor, gaps, constant_values=tf.zeros([], tensor.dtype))

    return tf.nest.map_structure(longer, batch, specs)
