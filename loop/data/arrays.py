"""Arrays in memory: every batch is a pure function of seed, epoch and step, so that each one can be read at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

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
        if isinstance(data, list | tuple):  # the parts of an example, also where they are lists of numbers
            return cls.of_structure(tuple(_as_arrays(part) for part in data))
        return cls.of_structure(_as_arrays(data))

    @classmethod
    def of_structure(cls, arrays: Any, padding: Padding | None = None) -> ArrayData:
        """Arrays and `Sequences` in any structure of dicts and tuples."""
        data = cls.__new__(cls)
        data.arrays = arrays
        data.padding = padding
        data.size = data._checked_size()
        return data

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


def _as_arrays(structure: Any) -> Any:
    """Dicts, lists and tuples of arrays as dicts and tuples of NumPy arrays."""
    if isinstance(structure, dict):
        return {name: _as_arrays(value) for name, value in structure.items()}
    if _holds_arrays(structure):
        return tuple(_as_arrays(value) for value in structure)
    return np.asarray(structure)


def _holds_arrays(structure: Any) -> bool:
    """Whether a list or tuple has arrays or dicts in it; one of numbers is an array itself."""
    if not isinstance(structure, list | tuple):
        return False
    return all(
        isinstance(value, dict) or bool(getattr(value, "shape", ())) or _holds_arrays(value) for value in structure
    )


def _converted(arrays: dict[Any, Any], padding: Padding | None) -> dict[Any, np.ndarray | Sequences]:
    """Converts what was passed to NumPy arrays, or to `Sequences` where examples differ in length."""
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

    # A few examples may have equal lengths by chance, so lists are padded all the same.
    several = {name for name, each in found.items() if isinstance(each, np.ndarray) and each.ndim > 1}
    lists = [name for name, given in arrays.items() if name in several and is_list_of_examples(given)]
    if not lists:
        raise UsageError(
            "ArrayData(padding=...): all examples have one shape, so that there is nothing to pad: leave padding out, "
            "or give lists of arrays"
        )
    return found | {name: sequences(arrays[name], name) for name in lists}


def _array_or_sequences(given: Any, name: Any) -> np.ndarray | Sequences:
    """One array, where NumPy can make one; else examples of different lengths."""
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
    """Refuses a single mask for arrays whose examples differ in length from each other."""
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
        on_host: whether Python reads the batches, in the process that computes.
    """

    uniform = True
    on_host = False
    layout: list[Any] | None = None
    reads_ahead = True

    data: Any
    """What the task returned."""

    def __init__(self, data: Any, options: BatchOptions) -> None:
        size = data.size
        batch = options.batch_size
        self.data = data
        self.options = options
        self.size = size
        self.endless = False
        self.steps_per_epoch: int | None = size // batch if options.drop_remainder else -(-size // batch)

        # One replica, until `sharded` says how many there are, and which of them this worker has.
        self._replicas = 1
        self._first = 0
        self._local = 1
        self._device = ""

        self.batch_bytes = max(1, self._open() * batch // size)
        self.example = self.head(3)

    def _open(self) -> int:
        """Makes the data ready to be read; returns how many bytes all examples have."""
        # In host memory, and captured by reference: a graph never holds a copy of the data.
        with tf.device("CPU:0"):
            self._tensors = self._load(self.data.arrays)
        return sum(array.nbytes for array in tf.nest.flatten(self.data.arrays))

    def _load(self, arrays: Any) -> Any:
        """The arrays as tensors."""
        return tf.nest.map_structure(constant, arrays)

    def head(self, count: int) -> Any:
        """The first examples, as a batch."""
        return tf.nest.map_structure(lambda tensor: tensor[:count], self._tensors)

    def longer_example(self) -> Any:
        """`example` with longer padding; None where nothing is padded."""
        return None

    def sharded(self, backend: Backend, policy: str) -> ArraySource:
        """Each replica gets its rows of each global batch, whatever the policy."""
        shared = self._for_replicas(backend.rank * backend.local_replicas, backend.local_replicas, backend.replicas)
        shared._device = backend.device
        return shared

    def _for_replicas(self, first: int, local: int, replicas: int) -> Self:
        """The same data, of which this worker reads the rows of `local` of all replicas, from the `first` on."""
        shared = copy.copy(self)  # which shares the tensors
        shared._first = first
        shared._local = local
        shared._replicas = replicas
        return shared

    def start(self, epoch: int, step_in_epoch: int, state: np.ndarray | None = None) -> tuple[()]:
        """Nothing to do: every position can be read at once."""
        return ()

    def next_epoch(self, iterator: tuple[()]) -> tuple[()]:
        """Nothing to do."""
        return ()

    def state(self, iterator: tuple[()]) -> np.ndarray | None:
        """None: a position in the order needs no state."""
        return None

    def unsaved(self, iterator: tuple[()]) -> str:
        """Empty: every position can be saved."""
        return ""

    def read_batch(self, iterator: tuple[()], epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> Any:
        """The worker's rows of the global batch at `step` of `epoch` (int64), one of its `parts` after the other.

        Rows past the end of the data are undefined; callers discard them.
        """
        with tf.device("CPU:0"):
            taken = self._read_rows(epoch, step, parts)
        return self._copied(taken)

    def read_batches(self, iterator: tuple[()], epoch: tf.Tensor, step: tf.Tensor, steps: int) -> Any:
        """The rows of `steps` whole batches from `step` on, on one replica: shapes [steps, batch size, ...].

        Rows past the end of the data are undefined; callers discard them.
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
        # Both are computed before the branch: the order of a graph's operations decides how fast it runs.
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
        """The indices of the examples at some places of an epoch's order, and their tensors."""
        index = self._examples_at(epoch, places)
        return index, tf.nest.map_structure(lambda tensor: tf.gather(tensor, index), self._tensors)

    def _examples_at(self, epoch: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Which examples are at some places of the order of an epoch."""
        if not self.options.shuffle:
            return places

        # A permutation that can be read at any position, in constant memory: a resume at step 1,000,000 costs what one
        # at step 10 costs. `index_shuffle` fails without positions, and a worker may have none, so that one is added.
        seed = tf.stack([tf.constant(self.options.seed, tf.int64), epoch])
        if self._replicas == 1:
            return tf.random.experimental.index_shuffle(places, seed=seed, max_index=self.size - 1)
        asked = tf.concat([places, [0]], 0)
        return tf.random.experimental.index_shuffle(asked, seed=seed, max_index=self.size - 1)[:-1]

    def more(self, taken: Any) -> Any:
        """True: the number of steps in an epoch is known, so that each step has rows."""
        return tf.constant(True)

    def whole(self, epoch: tf.Tensor, step: tf.Tensor) -> Rows:
        """The whole global batch at `step` of `epoch`."""
        alone = self._for_replicas(0, 1, 1)
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
        number = step * parts + part
        first = tf.constant(0, tf.int64)
        if parts == 1 and self._replicas == 1:
            index, batch = self._of_known_size((index, batch), parts)
            return Rows(batch, first, epoch, number, index)
        _, n = self._extent(step)
        low, high = rows(n, part, parts)
        first, last = rows(high - low, tf.cast(replica, tf.int64), self._replicas)
        own_low, own_high = self._own(n, parts)

        # The worker's rows start with those of the micro-batches before this one. Rows of this micro-batch that belong
        # to workers of lower rank were not read.
        ahead = tf.reduce_sum((own_high - own_low)[: tf.cast(part, tf.int32)]) - (own_low[part] - low)
        begin = ahead + first
        end = ahead + last
        own = tf.nest.map_structure(lambda tensor: tensor[begin:end], batch)
        index, own = self._of_known_size((index[begin:end], own), parts)
        return Rows(own, first, epoch, number, index)

    def _of_known_size(self, tensors: Any, parts: int) -> Any:
        """Gives tensors a static number of rows, where every (micro-)batch of one replica has the same.

        TensorFlow then derives sizes of means and broadcasts once, when it traces, and not in each step. With several
        replicas the number must stay open: `row_random` tells by it whether a replica may be without rows.
        """
        batch = self.options.batch_size
        whole = self.options.drop_remainder or self.size % batch == 0
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
