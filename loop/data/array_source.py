"""Arrays in a certain order: a batch is a pure function of seed, epoch and step, so each can be read at once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data import shared_arrays
from loop.data.batch import BatchOptions, Feed, ReadBatch, RowCounts, Rows
from loop.data.host_random import RandomState
from loop.data.order import shuffled
from loop.data.padding import leaf_names
from loop.data.row_shares import RowShares
from loop.errors import UsageError
from loop.task import Batch


class PositionSource:
    """Data whose batches are read by position. It has no iterator, and so a checkpoint needs no state of one.

    Attributes:
        endless: whether the data is known to have no end.
        layout: None, since a position means the same with any number of workers.
    """

    endless = False
    layout: list[str | int] | None = None

    def start(
        self,
        epoch: int,
        step_in_epoch: int,
        state: np.ndarray | None = None,
        draws: RandomState | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[()]:
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

    def more(self, read: ReadBatch) -> tf.Tensor:
        """True: the number of steps in an epoch is known, so that each step has rows."""
        return tf.constant(True)


class ArraySource(PositionSource):
    """`ArrayData` in a certain order: global batch s of epoch e holds examples perm(seed, e)[s*B : (s+1)*B].

    Attributes:
        size: the number of examples.
        steps_per_epoch: the number of global batches in an epoch.
        batch_bytes: the size of a global batch, in bytes.
        uniform: whether all batches have one shape, except a short last one.
        leaves_out: whether some examples may be left out.
        on_host: whether Python reads the batches, in the process that computes.
    """

    uniform = True
    leaves_out = False
    on_host = False

    def __init__(self, data: Any, options: BatchOptions) -> None:
        size = data.size
        batch = options.batch_size
        self.options = options
        self.size = size
        self.steps_per_epoch: int | None = size // batch if options.drop_remainder else -(-size // batch)

        # For one replica, until `sharded` says how many there are, and which of them this worker has.
        self._shares = RowShares(size, batch, options.drop_remainder)
        self._device = ""

        # In this order: `head` reads what `_open` has made ready.
        self.batch_bytes = max(1, self._open(data) * batch // size)
        self.example = self.head(3)

    def _open(self, data: Any) -> int:
        """Makes the data ready to be read; returns how many bytes all examples have.

        Args:
            data: what the task returned: `ArrayData`, or for a subclass another type. It isn't kept, since its arrays
                would be in memory beside the tensors.
        """
        # In host memory, and captured by reference: a graph never holds a copy of the data.
        with tf.device("CPU:0"):
            self._tensors = self._load(data.arrays)
        return sum(array.nbytes for array in tf.nest.flatten(data.arrays))

    def _load(self, arrays: Any) -> Batch:
        """The arrays as tensors."""
        tensors = list(map(constant, tf.nest.flatten(arrays), leaf_names(arrays)))
        return tf.nest.pack_sequence_as(arrays, tensors)

    def head(self, count: int) -> Batch:
        """The first examples, as a batch."""
        return tf.nest.map_structure(lambda tensor: tensor[:count], self._tensors)

    def longer_example(self) -> Batch | None:
        """`example` with longer padding; None if nothing is padded."""
        return None

    def sharded(self, backend: Backend, policy: str) -> ArraySource:
        """Each replica gets its rows of each global batch, whatever the policy."""
        shared = self._for_replicas(backend.rank * backend.local_replicas, backend.local_replicas, backend.replicas)
        shared._device = backend.device
        return shared

    def _for_replicas(self, first: int, local: int, replicas: int) -> Self:
        """The same data, of which this worker reads the rows of `local` replicas out of all, from the `first` on."""
        shared = copy.copy(self)  # a shallow copy: the tensors are the same
        shared._shares = dataclasses.replace(self._shares, first=first, local=local, replicas=replicas)
        return shared

    def read_batch(self, iterator: tuple[()], epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> ReadBatch:
        """Reads the worker's rows of a global batch. Rows past the end of the data are undefined; callers discard them.

        Args:
            iterator: what `start` returned.
            epoch: the epoch, int64 [].
            step: the step within the epoch, int64 [].
            parts: the number of micro-batches. The rows of one stand after those of the other.
        """
        with tf.device("CPU:0"):
            read = self._read_rows(epoch, step, parts)
        return self._copied(read)

    def read_batches(self, epoch: tf.Tensor, step: tf.Tensor, steps: int) -> ReadBatch:
        """Reads `steps` whole batches from `step` on, on one replica: shapes [steps, batch size, ...].

        Rows past the end of the data are undefined; callers discard them.
        """
        batch = self.options.batch_size

        def in_batches(tensor: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tensor, [steps, batch, *tensor.shape[1:]])

        with tf.device("CPU:0"):
            positions = tf.minimum(step * batch + tf.range(steps * batch, dtype=tf.int64), self.size - 1)
            read = tf.nest.map_structure(in_batches, self._read(epoch, positions))
        return self._copied(read)

    def _copied(self, read: ReadBatch) -> ReadBatch:
        """Copies what was read to the device that computes; text stays in host memory, where its operations run."""
        if not self._device:
            return read
        with tf.device(self._device):
            return tf.nest.map_structure(
                lambda tensor: tensor if tensor.dtype == tf.string else tf.identity(tensor), read
            )

    def _read_rows(self, epoch: tf.Tensor, step: tf.Tensor, parts: int) -> ReadBatch:
        """See `read_batch`."""
        return self._read(epoch, self._shares.places(step, parts))

    def _read(self, epoch: tf.Tensor, positions: tf.Tensor) -> ReadBatch:
        """The indices of the examples at some positions in the order of an epoch, and their tensors."""
        index = self._examples_at(epoch, positions)
        return index, tf.nest.map_structure(lambda tensor: tf.gather(tensor, index), self._tensors)

    def _examples_at(self, epoch: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """The indices of the examples at some positions in the order of an epoch: int64 [n]."""
        if not self.options.shuffle:
            return positions

        if self._shares.replicas == 1:
            return shuffled(positions, self.options.seed, epoch, self.size)
        # A permutation of no positions fails, and a worker may have none: so one is added.
        positions = tf.concat([positions, [0]], 0)
        return shuffled(positions, self.options.seed, epoch, self.size)[:-1]

    def whole(self, epoch: tf.Tensor, step: tf.Tensor) -> Rows:
        """The whole global batch at `step` of `epoch`."""
        # As one replica that has all rows. What `read_batch` returned to this worker are its own rows alone.
        alone = self._for_replicas(0, 1, 1)
        return alone.replica_rows((epoch, step, alone.read_batch((), epoch, step)), 0)

    def batch_rows(self, feed: Feed) -> tf.Tensor:
        """The number of rows of the global batch of this step, with those that are left out: int64 []."""
        return self._shares.extent(feed[1])[1]

    def row_counts(self, replicas: int, parts: int = 1) -> RowCounts:
        """The numbers of rows that each of so many replicas gets of a micro-batch."""
        return self._shares.counts(replicas, parts)

    def leaves_some_without(self, parts: int) -> bool:
        """Whether a batch may have an empty part, if it is cut into so many parts."""
        return self._shares.leave_some_without(parts)

    def most_rows(self, parts: int) -> int:
        """The greatest number of rows of a micro-batch, over all replicas, if a batch is cut into so many."""
        return -(-self.options.batch_size // parts)

    def replica_rows(self, feed: Feed, replica: tf.Tensor | int, part: tf.Tensor | int = 0, parts: int = 1) -> Rows:
        """The rows of a replica in micro-batch `part` of `parts`, from what `read_batch` returned."""
        epoch, step, (index, batch) = feed
        number = step * parts + part
        # One replica with one part has all that was read: no operation cuts it.
        if parts == 1 and self._shares.replicas == 1:
            first = tf.constant(0, tf.int64)
        else:
            begin, end, first = self._shares.of_replica(step, replica, part, parts)
            batch = tf.nest.map_structure(lambda tensor: tensor[begin:end], batch)
            index = index[begin:end]
        # With a known number of rows, TensorFlow works out the shapes of means and broadcasts once, when it traces, and
        # not in each step.
        return Rows(batch, first, epoch, number, index).of_count(self._shares.known_count(parts))

    def even_count(self, parts: int) -> int | None:
        """The number of rows that each replica has of each micro-batch, if it is always the same; else None."""
        return None if self.leaves_out else self._shares.even_count(parts)


def constant(array: np.ndarray, name: str | int) -> tf.Tensor:
    """The examples of the array of this name as a tensor: a copy, but of an array that workers share."""
    try:
        tensor = shared_arrays.as_tensor(array)
        return tf.constant(array) if tensor is None else tensor
    except (TypeError, ValueError) as error:
        # A table of pandas whose columns have several types is such an array.
        columns = ", or the columns of a table as dict(table)" if array.dtype == object and array.ndim == 2 else ""
        raise UsageError(
            f"ArrayData: array {name!r} of dtype {array.dtype}, shape {list(array.shape)}, isn't a tensor ({error}): "
            f"give numbers or text, all examples of one shape{columns}"
        ) from None
