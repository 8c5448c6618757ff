"""Arrays in memory: every batch is a pure function of seed, epoch and step, so that each one can be read at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data.batch import BatchOptions, RowCounts, Rows, row_counts, rows
from loop.data.padding import Padding, as_padding
from loop.data.sequences import Sequences, is_list_of_examples, lengths_of, sequences
from loop.errors import UsageError


class ArrayData:
    """Examples in memory: arrays with an equal first axis.

    One array gives bare examples, several give tuples, a dict of arrays gives dicts.

    Args:
        *arrays: NumPy arrays of shape [examples, ...] and of any dtype, or what NumPy can make one of; or a dict of
            them. With `padding` also lists of arrays of different lengths, or a `tf.RaggedTensor`.
        padding: how examples of different lengths become one batch: a `loop.Padding`, or the value that fills the
            gaps.

    Raises:
        UsageError: no array, an array without a first axis, first axes of unequal length; examples of different
            lengths without `padding`, or `padding` with none.
    """

    def __init__(self, *arrays: Any, padding: Any = None) -> None:
        if not arrays:
            raise UsageError("ArrayData() without arrays: give at least one")
        named = len(arrays) == 1 and isinstance(arrays[0], dict)
        if any(isinstance(each, dict) for each in (arrays[0].values() if named else arrays)):
            raise UsageError("ArrayData: a dict within a dict, or beside other arrays: put all arrays into one dict")
        self.padding = as_padding(padding)
        found = _converted(dict(arrays[0]) if named else dict(enumerate(arrays)), self.padding)
        self.arrays: Any = found if named else tuple(found.values()) if len(arrays) > 1 else found[0]
        self.size = self._checked_size()
        _check_one_mask(found, self.padding)

    @classmethod
    def of(cls, data: Any) -> ArrayData:
        """Examples of any structure, such as (inputs, labels) where the inputs are a dict, a tuple or a list of arrays.

        Args:
            data: arrays in tuples, lists and dicts, as Keras's `fit` takes them. A list or tuple of anything but arrays
                is an array itself.
        """

        def nested(each: Any) -> Any:
            if isinstance(each, dict):
                return {name: nested(value) for name, value in each.items()}
            return tuple(map(nested, each)) if holds_arrays(each) else np.asarray(each)

        def holds_arrays(each: Any) -> bool:
            if not isinstance(each, list | tuple):
                return False
            return all(isinstance(one, dict) or bool(getattr(one, "shape", ())) or holds_arrays(one) for one in each)

        return cls.of_structure(tuple(map(nested, data)) if isinstance(data, list | tuple) else nested(data))

    @classmethod
    def of_structure(cls, arrays: Any, padding: Padding | None = None) -> ArrayData:
        """Arrays and `Sequences` in any structure of dicts and tuples."""
        made = cls.__new__(cls)
        made.arrays, made.padding = arrays, padding
        made.size = made._checked_size()
        return made

    def _checked_size(self) -> int:
        """How many examples all arrays have."""
        arrays = tf.nest.flatten(self.arrays)
        shapes = [array.shape for array in arrays if isinstance(array, np.ndarray)]
        if any(not shape for shape in shapes):
            raise UsageError("ArrayData: a scalar has no examples: give arrays of shape [n, ...]")
        sizes = [len(array) for array in arrays]
        if len(set(sizes)) != 1:
            raise UsageError(
                f"ArrayData: arrays of unequal length ({', '.join(map(str, sizes))} examples; shapes "
                f"{', '.join(map(str, shapes))}): cut them to the same first axis"
            )
        return int(sizes[0])

    def head(self, count: int) -> ArrayData:
        """The first examples."""
        return self._with(lambda array: array.head(count) if isinstance(array, Sequences) else array[:count])

    def in_float64(self) -> ArrayData:
        """The same examples, whose floating-point numbers have 64 bits."""
        return self._with(lambda array: array.astype("float64") if array.dtype.kind == "f" else array)

    def example(self, index: int) -> Any:
        """One example: NumPy arrays and scalars."""
        return tf.nest.map_structure(lambda array: array[index], self.arrays)

    def _with(self, change: Callable[[Any], Any]) -> ArrayData:
        return self.of_structure(tf.nest.map_structure(change, self.arrays), self.padding)


def _converted(arrays: dict[Any, Any], padding: Padding | None) -> dict[Any, np.ndarray | Sequences]:
    """Arrays as they were handed in as NumPy arrays, and as `Sequences` where examples differ in length."""
    found = {name: _array_or_sequences(given, name) for name, given in arrays.items()}
    differing = {name: each for name, each in found.items() if isinstance(each, Sequences)}
    if differing and padding is None:
        name, first = next(iter(differing.items()))
        of = f"array {name!r}: " if len(found) > 1 else ""
        raise UsageError(
            f"ArrayData: {of}examples of different lengths ({lengths_of(first)}): give "
            "padding=loop.Padding(), which pads each batch to its longest example and adds a mask; or cut all examples "
            "to one length"
        )
    if differing or padding is None:
        return found
    # Lengths may be equal by chance, as those of a few examples: what comes as a list is padded nevertheless.
    several = {name for name, each in found.items() if isinstance(each, np.ndarray) and each.ndim > 1}
    lists = [name for name, given in arrays.items() if name in several and is_list_of_examples(given)]
    if not lists:
        raise UsageError(
            "ArrayData(padding=...): all examples have one shape, so that there is nothing to pad: leave padding out, "
            "or give lists of arrays"
        )
    return found | {name: sequences(arrays[name], name) for name in lists}


def _array_or_sequences(given: Any, name: Any) -> np.ndarray | Sequences:
    one_by_one = isinstance(given, tf.RaggedTensor)
    if isinstance(given, np.ndarray) and given.dtype == object:
        one_by_one = is_list_of_examples(given)
    if not one_by_one:
        try:
            return np.asarray(given)
        except ValueError:  # a list of lists of different lengths
            pass
    found = sequences(given, name)
    if len(found) and (found.shapes == found.shapes[0]).all():
        return found.rows.reshape([len(found), *found.shapes[0], *found.rows.shape[1:]])
    return found


def _check_one_mask(found: dict[Any, np.ndarray | Sequences], padding: Padding | None) -> None:
    padded = {name: each for name, each in found.items() if isinstance(each, Sequences)}
    first = next(iter(padded.values()), None)
    if first is None or padding is None or padding.mask is not True:
        return
    if any(not np.array_equal(first.shapes, each.shapes) for each in padded.values()):
        names = list(padded)
        raise UsageError(
            f"ArrayData: the arrays {', '.join(map(repr, names))} have different lengths, so that one mask can't serve "
            f"all: say whose masks you want, as Padding(mask={names[-1]!r}) or Padding(mask={names!r})"
        )


class ArraySource:
    """`ArrayData` in a certain order: global batch s of epoch e holds examples perm(seed, e)[s*B : (s+1)*B].

    Attributes:
        steps_per_epoch: the number of global batches in an epoch.
        endless: False: it has an end.
        layout: None: a position means the same with any number of workers.
        reads_ahead: True: a batch can be read while the one before it is computed on.
        batch_bytes: how much memory a global batch needs.
        uniform: whether all batches have one shape, but for a short last one.
    """

    uniform = True
    layout: list[Any] | None = None
    reads_ahead = True

    def __init__(self, data: ArrayData, options: BatchOptions) -> None:
        size, batch = data.size, options.batch_size
        self.data, self.options, self.size, self.endless = data, options, size, False
        self.steps_per_epoch: int | None = size // batch if options.drop_remainder else -(-size // batch)
        self._replicas, self._first, self._local, self._device = 1, 0, 1, ""
        # Host memory, captured by reference: never copied into a graph.
        with tf.device("CPU:0"):
            self._tensors = self._load(data.arrays)
        self.example = self.head(3)
        self.batch_bytes = max(1, sum(array.nbytes for array in tf.nest.flatten(data.arrays)) * batch // size)

    def _load(self, arrays: Any) -> Any:
        """The arrays as tensors."""
        return tf.nest.map_structure(constant, arrays)

    def head(self, count: int) -> Any:
        """The first examples, as a batch."""
        return tf.nest.map_structure(lambda tensor: tensor[:count], self._tensors)

    def sharded(self, backend: Backend, policy: str) -> ArraySource:
        """Each replica gets its rows of each global batch, whatever the policy."""
        shared = copy.copy(self)  # the same tensors, not others
        shared._replicas, shared._local = backend.replicas, backend.local_replicas
        shared._first, shared._device = backend.rank * backend.local_replicas, backend.device
        return shared

    def start(self, epoch: int, step_in_epoch: int, state: np.ndarray | None = None) -> tuple[()]:
        """Nothing to do: every position can be read at once."""
        return ()

    def next_epoch(self, iterator: tuple[()]) -> tuple[()]:
        """Nothing to do."""
        return ()

    def state(self, iterator: tuple[()]) -> np.ndarray | None:
        """None: the position is all there is."""
        return None

    def unsaved(self, iterator: tuple[()]) -> str:
        """Nothing stands in the way of going on from where it was."""
        return ""

    def read_batch(self, iterator: tuple[()], epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> Any:
        """The worker's rows of the global batch at `step` of `epoch` (int64), one of its `parts` after the other.

        What it gives behind the end of the data is nobody's.
        """
        with tf.device("CPU:0"):
            taken = self._read_rows(epoch, step, parts)
        return self._copied(taken)

    def read_batches(self, iterator: tuple[()], epoch: tf.Tensor, step: tf.Tensor, steps: int) -> Any:
        """The rows of `steps` whole batches from `step` on, on one replica: shapes [steps, batch size, ...].

        Behind the end of the data they are filled up with whatever there is.
        """
        batch = self.options.batch_size
        with tf.device("CPU:0"):
            places = tf.minimum(step * batch + tf.range(steps * batch, dtype=tf.int64), self.size - 1)
            taken = tf.nest.map_structure(
                lambda tensor: tf.reshape(tensor, [steps, batch, *tensor.shape[1:]]), self._read(epoch, places)
            )
        return self._copied(taken)

    def _copied(self, taken: Any) -> Any:
        """What was taken, on the device that computes; text stays where it is."""
        if not self._device:
            return taken
        with tf.device(self._device):
            return tf.nest.map_structure(
                lambda tensor: tensor if tensor.dtype == tf.string else tf.identity(tensor), taken
            )

    def _extent(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Where the global batch at `step` begins in the order of the epoch, and how many rows it has."""
        start = tf.minimum(step * self.options.batch_size, self.size - 1)
        return start, tf.minimum(tf.constant(self.options.batch_size, tf.int64), self.size - start)

    def _read_rows(self, epoch: tf.Tensor, step: tf.Tensor, parts: int) -> Any:
        return self._read(epoch, self._places(step, parts))

    def _places(self, step: tf.Tensor, parts: int) -> tf.Tensor:
        """The worker's places in the order of the epoch, one of the `parts` of the global batch after the other."""
        start, n = self._extent(step)
        low, high = self._own(n, parts)
        if self._replicas == 1:
            return tf.range(start, start + n)
        return tf.ragged.range(start + low, start + high).flat_values

    def _own(self, n: tf.Tensor, parts: int) -> tuple[tf.Tensor, tf.Tensor]:
        """From where and up to where the worker's rows go in each micro-batch of n rows: int64 [parts]."""
        low, high = rows(n, tf.range(parts, dtype=tf.int64), parts)
        first, _ = rows(high - low, self._first, self._replicas)
        _, last = rows(high - low, self._first + self._local - 1, self._replicas)
        return low + first, low + last

    def _read(self, epoch: tf.Tensor, places: tf.Tensor) -> Any:
        """The examples at some places of the order of an epoch: their indices, and themselves."""
        index = self._examples_at(epoch, places)
        return index, tf.nest.map_structure(lambda tensor: tf.gather(tensor, index), self._tensors)

    def _examples_at(self, epoch: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Which examples are at some places of the order of an epoch."""
        index = places
        if self.options.shuffle:
            # A permutation that can be read from any position, in constant memory. It can't be asked for no position
            # at all: where a worker may have none, one more is asked for, and dropped.
            seed = tf.stack([tf.constant(self.options.seed, tf.int64), epoch])
            asked = tf.concat([places, [0]], 0) if self._replicas > 1 else places
            index = tf.random.experimental.index_shuffle(asked, seed=seed, max_index=self.size - 1)
            index = index[:-1] if self._replicas > 1 else index
        return index

    def more(self, taken: Any) -> Any:
        """Whether there is anything: the number of steps is known, so yes."""
        return tf.constant(True)

    def whole(self, epoch: tf.Tensor, step: tf.Tensor) -> Rows:
        """The whole global batch at `step` of `epoch`."""
        alone = copy.copy(self)
        alone._replicas, alone._first, alone._local = 1, 0, 1
        return alone.replica_rows((epoch, step, alone.read_batch((), epoch, step)), 0)

    def batch_rows(self, feed: Any) -> tf.Tensor:
        """How many rows the global batch has that `feed` is taken from: int64."""
        return self._extent(feed[1])[1]

    def row_counts(self, replicas: int, parts: int = 1) -> RowCounts:
        """How many rows each of so many replicas gets of a micro-batch."""
        batch = min(self.options.batch_size, self.size)
        return row_counts(batch, 0 if self.options.drop_remainder else self.size % batch, replicas, parts)

    def leaves_some_without(self, parts: int) -> bool:
        """Whether one of so many parts of some batch is empty."""
        smallest = self.size % self.options.batch_size or self.options.batch_size
        return parts > (self.options.batch_size if self.options.drop_remainder else smallest)

    def most(self, parts: int) -> int:
        """How many rows one of so many parts of a batch has at most, over all replicas."""
        return -(-self.options.batch_size // parts)

    def replica_rows(self, feed: Any, replica: Any, part: Any = 0, parts: int = 1) -> Rows:
        """The replica's rows of micro-batch `part` of `parts` of what `read_batch` gave."""
        epoch, step, (index, batch) = feed
        number, first = step * parts + part, tf.constant(0, tf.int64)
        if parts == 1 and self._replicas == 1:
            index, batch = self._of_known_size((index, batch), parts)
            return Rows(batch, first, epoch, number, index)
        _, n = self._extent(step)
        low, high = rows(n, part, parts)
        first, last = rows(high - low, tf.cast(replica, tf.int64), self._replicas)
        own_low, own_high = self._own(n, parts)
        # What the worker has of the micro-batches before; of the rows of this one, those of workers before it are away.
        ahead = tf.reduce_sum((own_high - own_low)[: tf.cast(part, tf.int32)]) - (own_low[part] - low)
        begin, end = ahead + first, ahead + last
        own = tf.nest.map_structure(lambda tensor: tensor[begin:end], batch)
        index, own = self._of_known_size((index[begin:end], own), parts)
        return Rows(own, first, epoch, number, index)

    def _of_known_size(self, tensors: Any, parts: int) -> Any:
        """Tells the graph how many rows these are, where each (micro-)batch of one replica has as many.

        TensorFlow then works out once, and not in each step, what follows from it: over how much a mean is taken, and
        what is to be broadcast. On several replicas a known shape would be taken for one without rows: see `random`.
        """
        batch, whole = self.options.batch_size, self.options.drop_remainder or self.size % self.options.batch_size == 0
        if self._replicas > 1 or not whole or batch % parts:
            return tensors
        return tf.nest.map_structure(
            lambda tensor: tf.ensure_shape(tensor, [batch // parts, *tensor.shape[1:]]), tensors
        )


def constant(array: np.ndarray) -> tf.Tensor:
    """The examples of an array as a tensor."""
    try:
        return tf.constant(array)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"ArrayData: an array of dtype {array.dtype}, shape {list(array.shape)}, is no tensor ({error}): give "
            "numbers or text, all examples of one shape"
        ) from None
