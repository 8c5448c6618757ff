"""`ArrayData`: examples in memory, as arrays with an equal first axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from loop.data.example_parts import flatten, refuse_masked
from loop.data.examples import as_array
from loop.data.joined import Sequences
from loop.data.padding import FillValues, Padding, as_padding
from loop.data.sequence_arrays import as_sequences, is_list_of_examples, range_of_lengths
from loop.errors import UsageError

Given: TypeAlias = Any
"""What a user passes as an array: a NumPy array, what NumPy can make one of, a list of examples, a `RaggedTensor`."""
Array: TypeAlias = np.ndarray | Sequences
"""All examples of one array."""
Structure: TypeAlias = Any
"""An array, or dicts and tuples of arrays."""


class ArrayData:
    """Examples in memory: arrays with an equal first axis.

    One array gives bare examples, several give tuples, a dict of arrays gives dicts; a dict may stand in place of an
    array, as in `ArrayData({"left": left, "right": right}, labels)`.

    Args:
        *arrays: NumPy arrays of shape [examples, ...] and of any dtype, or what NumPy can make one of; or dicts of
            them. With `padding` also lists of arrays of different lengths, or a `tf.RaggedTensor`, but no dicts within
            others or beside arrays.
        padding: how examples of different lengths become one batch: a `loop.Padding`, or the value that fills the
            gaps.

    Raises:
        UsageError: no array, an array without a first axis, first axes of unequal length; examples of different
            lengths without `padding`, or `padding` with none.
    """

    def __init__(self, *arrays: Given, padding: Padding | FillValues = None) -> None:
        if not arrays:
            raise UsageError("ArrayData() without arrays: give at least one")
        if len(arrays) == 1:
            _refuse_tuple_of_arrays(arrays[0])
        # Positions stand for names, so that all that follows is the same for dicts and tuples.
        is_dict = len(arrays) == 1 and isinstance(arrays[0], dict)
        named: dict[str | int, Given] = dict(arrays[0]) if is_dict else dict(enumerate(arrays))
        self.padding = as_padding(padding)
        is_nested = any(isinstance(array, dict) for array in named.values())
        if is_nested and self.padding is not None:
            raise UsageError(
                "ArrayData(padding=...): a dict within a dict, or beside other arrays: put all arrays into one dict"
            )
        converted = _nested(named) if is_nested else _converted(named, self.padding)
        self.arrays: Structure = converted
        if not is_dict:
            self.arrays = tuple(converted.values()) if len(arrays) > 1 else converted[0]
        self.size = self._checked_size()
        _check_one_mask(converted, self.padding)

    @classmethod
    def of(cls, data: Structure) -> ArrayData:
        """Examples of any structure, such as (inputs, labels) where the inputs are a dict, a tuple or a list of arrays.

        Args:
            data: arrays in tuples, lists and dicts, as Keras's `fit` takes them. A list or tuple of anything but arrays
                is an array itself.
        """
        if isinstance(data, list | tuple):  # the parts of an example, even if they are lists of numbers
            return cls.of_structure(tuple(map(_as_arrays, data)))
        return cls.of_structure(_as_arrays(data))

    @classmethod
    def of_structure(cls, arrays: Structure, padding: Padding | None = None) -> ArrayData:
        """Arrays and `Sequences` in any structure of dicts and tuples."""
        data = cls.__new__(cls)  # past `__init__`, which takes no nested structures, and would convert the arrays
        data.arrays = arrays
        data.padding = padding
        data.size = data._checked_size()
        return data

    def _checked_size(self) -> int:
        """The number of examples, which must be the same in all arrays."""
        arrays = [array for _, array in flatten(self.arrays)]
        if not arrays:
            raise UsageError("ArrayData: a dict without arrays: give at least one array")
        shapes = [array.shape for array in arrays if isinstance(array, np.ndarray)]
        if () in shapes:
            raise UsageError("ArrayData: a scalar has no examples: give arrays of shape [n, ...]")
        sizes = list(map(len, arrays))
        if len(set(sizes)) != 1:
            raise UsageError(
                f"ArrayData: arrays of unequal length ({', '.join(map(str, sizes))} examples; shapes "
                f"{', '.join(map(str, shapes))}): cut them to the same first axis"
            )
        return int(sizes[0])

    def head(self, count: int) -> ArrayData:
        """The first examples."""
        return self.map_arrays(lambda array: array.head(count) if isinstance(array, Sequences) else array[:count])

    def in_float64(self) -> ArrayData:
        """The same examples, with floating-point numbers of 64 bits."""
        return self.map_arrays(lambda array: array.astype("float64") if array.dtype.kind == "f" else array)

    def example(self, index: int) -> Structure:
        """One example: NumPy arrays and scalars."""
        return tf.nest.map_structure(lambda array: array[index], self.arrays)

    def map_arrays(self, change: Callable[[Array], Array]) -> ArrayData:
        """The data with each array changed."""
        return self.of_structure(tf.nest.map_structure(change, self.arrays), self.padding)


def _refuse_tuple_of_arrays(given: Given) -> None:
    """Refuses `ArrayData((inputs, labels))`, which would be two examples."""
    rows = _rows_of_each(given) if isinstance(given, tuple) else None
    if rows is not None:
        raise UsageError(
            f"ArrayData: a tuple of {len(given)} arrays with {rows} rows each: give the arrays one by one, as "
            "ArrayData(inputs, labels); or a list of arrays, if each is an example"
        )


def _rows_of_each(given: Given) -> int | None:
    """How many rows each of several arrays in a list or tuple has; None: they differ, or some aren't arrays."""
    if not isinstance(given, list | tuple) or len(given) < 2:
        return None
    rows = set()
    for part in given:
        if not isinstance(part, np.ndarray | tf.Tensor) or not part.ndim:
            return None
        rows.add(len(part))
    return rows.pop() if len(rows) == 1 else None


def _as_arrays(structure: Structure) -> Structure:
    """Dicts, lists and tuples of arrays as dicts and tuples of NumPy arrays."""
    if isinstance(structure, dict):
        return {name: _as_arrays(value) for name, value in structure.items()}
    if _holds_arrays(structure):
        return tuple(map(_as_arrays, structure))
    refuse_masked(structure, "ArrayData: ")
    return as_array(structure)


def _holds_arrays(structure: Structure) -> bool:
    """Whether a list or tuple has arrays or dicts in it. A list of numbers is an array itself."""
    if not isinstance(structure, list | tuple):
        return False
    return all(map(_is_array_or_holds_some, structure))


def _is_array_or_holds_some(value: Structure) -> bool:
    # A NumPy scalar has the shape (), and is a number of a list of numbers.
    return isinstance(value, dict) or bool(getattr(value, "shape", ())) or _holds_arrays(value)


def _nested(structure: Structure) -> Structure:
    """Dicts of dicts and arrays, with all arrays as NumPy arrays."""
    converted: dict[str | int, Structure] = {}
    for name, value in structure.items():
        if isinstance(value, dict):
            converted[name] = _nested(value)
        else:
            converted |= _converted({name: value}, None, "put all arrays into one dict, and ")
    return converted


def _converted(
    arrays: Mapping[str | int, Given], padding: Padding | None, before_padding: str = ""
) -> dict[str | int, Array]:
    """What was passed as NumPy arrays, or as `Sequences` if examples differ in length, which needs `padding`.

    `before_padding` is what `padding` itself needs first, for the message.
    """
    converted = {name: _array_or_sequences(given, name) for name, given in arrays.items()}
    for name, array in converted.items():
        if not isinstance(array, Sequences):
            continue
        if padding is not None:
            return converted  # lists of one length stay arrays here: another array has examples of different lengths
        _check_is_no_list_of_arrays(name, arrays)
        which = f"array {name!r}: " if len(converted) > 1 or before_padding else ""
        raise UsageError(
            f"ArrayData: {which}examples of different lengths ({range_of_lengths(array)}): {before_padding}give "
            "padding=loop.Padding(), which pads each batch to its longest example and adds a mask; or cut all examples "
            "to one length"
        )
    return converted if padding is None else _lists_as_sequences(arrays, converted)


def _check_is_no_list_of_arrays(name: str | int, arrays: Mapping[str | int, Given]) -> None:
    """Refuses several arrays in a list beside another array of as many examples, as Keras's `fit` takes them."""
    parts = arrays[name]
    rows = _rows_of_each(parts)
    others = [array for array in arrays.values() if isinstance(array, np.ndarray) and array.ndim]
    if rows is not None and set(map(len, others)) == {rows}:
        raise UsageError(
            f"ArrayData: array {name!r} is a {type(parts).__name__} of {len(parts)} arrays: give a dict of them, "
            'as ArrayData({"left": left, "right": right}, labels), or each as an array of its own'
        )


def _lists_as_sequences(arrays: Mapping[str | int, Given], converted: dict[str | int, Array]) -> dict[str | int, Array]:
    """Converts lists to `Sequences` although all examples have one length, because padding was asked for."""
    # A few examples may have equal lengths by chance. The model must get a mask all the same.
    padded: dict[str | int, Array] = {}
    for name, given in arrays.items():
        array = converted[name]
        if isinstance(array, np.ndarray) and array.ndim > 1 and is_list_of_examples(given):
            padded[name] = as_sequences(given, name)
    if not padded:
        raise UsageError(
            "ArrayData(padding=...): all examples have one shape, so that there is nothing to pad: leave padding out, "
            "or give lists of arrays"
        )
    return converted | padded


def _array_or_sequences(given: Given, name: str | int) -> Array:
    """One array, if NumPy can make one; else examples of different lengths."""
    refuse_masked(given, f"ArrayData: array {name!r}: ")
    # From a ragged tensor, or an array of arrays, NumPy would make an array of objects, or fail.
    if not (isinstance(given, tf.RaggedTensor | np.ndarray) and is_list_of_examples(given)):
        try:
            array = as_array(given)
        except ValueError:  # a list of lists of different lengths
            pass
        else:
            if not array.ndim and not isinstance(given, np.ndarray) and not np.isscalar(given):
                kind = type(given).__name__
                fix = "give an array or a list"
                if isinstance(given, tf.SparseTensor) or hasattr(given, "tocsr"):
                    fix = "give a dense array, or the columns of each row, as in docs/data.md#sparse-rows"
                raise UsageError(f"ArrayData: array {name!r} is a {kind}, which has no examples: {fix}")
            return array
    examples = as_sequences(given, name)
    # One shape after all, as of a ragged tensor with rows of one length: a plain array, which is read faster.
    if len(examples) and (examples.shapes == examples.shapes[0]).all():
        return examples.rows.reshape([len(examples), *examples.shapes[0], *examples.rows.shape[1:]])
    return examples


def _check_one_mask(arrays: Mapping[str | int, Array], padding: Padding | None) -> None:
    """Refuses a single mask for several arrays, if an example has another length in one array than in the other."""
    if padding is None or padding.mask is not True:
        return
    padded = {name: array for name, array in arrays.items() if isinstance(array, Sequences)}
    names = list(padded)
    # With one mask for all, data of the longer array would be taken for padding.
    if any(not np.array_equal(padded[names[0]].shapes, array.shapes) for array in padded.values()):
        raise UsageError(
            f"ArrayData: the arrays {', '.join(map(repr, names))} have different lengths, so that one mask can't serve "
            f"all: say whose masks you want, as Padding(mask={names[-1]!r}) or Padding(mask={names!r})"
        )
