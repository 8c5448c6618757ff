"""Arrays in a certain order: a batch is a pure function of seed, epoch and step, so each can be read at once."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data.batch import BatchOptions, RowCounts, Rows, row_counts, rows
from loop.errors import UsageError


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
