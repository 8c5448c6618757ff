"""How examples of different lengths become one batch: the padding, its mask, and which lengths meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loop.errors import UsageError


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

    values: Any = None
    mask: bool | str | int | Sequence[str | int] = True
    multiple: int = 1
    bucket_by: bool | Callable[..., Any] = False
    buckets: int = 16

    def __post_init__(self) -> None:
        for name in ("multiple", "buckets"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"Padding({name}={value!r}): give an integer of at least 1")
        if not isinstance(self.bucket_by, bool) and not callable(self.bucket_by):
            raise UsageError(
                f"Padding(bucket_by={self.bucket_by!r}): give True, or a function of an example that returns its length"
            )

    def value(self, name: str | int, dtype: np.dtype) -> Any:
        """What fills the gaps of the array of this name; see `leaf_names`.

        Raises:
            UsageError: a value that the array's dtype can't hold.
        """
        text = dtype.kind in "SUO"
        given = self.values
        if isinstance(given, Mapping | tuple | list):
            given = dict(zip(leaf_names(given), tf.nest.flatten(given), strict=True)).get(name)
        if given is None:
            return "" if text else np.zeros([], dtype)[()]
        fits = text == isinstance(given, str | bytes) and np.ndim(given) == 0
        if fits and text:
            return given
        with np.errstate(invalid="ignore", over="ignore"):
            value = np.asarray(given).astype(dtype) if fits else None
        if value is None or (dtype.kind in "iub" and value != given):
            raise UsageError(
                f"Padding(values={self.values!r}): {given!r} is no value of dtype {dtype}, of array {name!r}"
            )
        return value[()]

    def length(self, lengths: tf.Tensor) -> tf.Tensor:
        """The padded lengths of a batch: at least one, so that no layer meets an empty axis; int64 [axes].

        Args:
            lengths: of each example of the batch, int64 [examples, axes].
        """
        return self.rounded(tf.maximum(tf.reduce_max(lengths, 0), 1))

    def rounded(self, length: Any) -> Any:
        """A length, or a tensor of lengths, to which a batch is padded: a multiple of `multiple`."""
        return length if self.multiple == 1 else (length + self.multiple - 1) // self.multiple * self.multiple

    def masked(self, names: Sequence[str | int]) -> list[str | int]:
        """Of which arrays there are masks.

        Args:
            names: the arrays whose examples differ in length.

        Raises:
            UsageError: a mask of an array that isn't padded.
        """
        if isinstance(self.mask, bool):
            return list(names[:1]) if self.mask else []
        wanted = [self.mask] if isinstance(self.mask, str | int) else list(self.mask)
        for name in wanted:
            if name not in names:
                padded = ", ".join(map(repr, names))
                raise UsageError(f"Padding(mask={self.mask!r}): {name!r} is not padded; these are: {padded}")
        return wanted

    def with_masks(self, batch: Any, masks: Mapping[str | int, tf.Tensor]) -> Any:
        """A batch and its masks, in one structure; see `Padding`."""
        if not masks:
            return batch
        if isinstance(batch, Mapping):
            named = {"mask" if self.mask is True else f"{name}_mask": mask for name, mask in masks.items()}
            if taken := sorted(set(named) & set(batch)):
                raise UsageError(
                    f"Padding(mask=...) adds {taken[0]!r}, but the examples have a {taken[0]!r}: rename it"
                )
            return {**batch, **named}
        parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        return (*parts, *masks.values())


def as_padding(padding: Any) -> Padding | None:
    """`padding` as it was handed in: None, a `Padding`, or the value that fills the gaps."""
    if padding is None or isinstance(padding, Padding):
        return padding
    if isinstance(padding, bool):
        raise UsageError(f"padding={padding}: give what fills the gaps, such as 0, or loop.Padding(...)")
    return Padding(padding)


def call_with(function: Callable[..., Any], example: Any) -> Any:
    """Calls a function of an example as `tf.data` does: with the parts of a tuple as arguments."""
    return function(*example) if isinstance(example, tuple) else function(example)


def leaf_names(structure: Any) -> list[str | int]:
    """What the arrays of an example are called, in the order of `tf.nest.flatten`.

    The key in a dict, the place in a tuple, 0 for a bare array; of those further down the way there, as `"0/tokens"`.
    """
    paths = list(_paths(structure, ()))
    return [path[0] if len(path) == 1 else "/".join(map(str, path)) or 0 for path in paths]


def _paths(structure: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from _paths(structure[key], (*path, key))
    elif isinstance(structure, tuple | list):
        for place, each in enumerate(structure):
            yield from _paths(each, (*path, place))
    else:
        yield path


def lengthened(batch: Any, specs: Any) -> Any:
    """A batch whose padded axes, those that `specs` leaves open, are longer by one."""

    def longer(tensor: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        gaps = [[0, int(axis > 0 and size is None)] for axis, size in enumerate(spec.shape)]
        return tf.pad(tensor, gaps, constant_values=tf.zeros([], tensor.dtype))

    return tf.nest.map_structure(longer, batch, specs)
