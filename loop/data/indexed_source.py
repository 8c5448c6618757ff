"""`IndexedData` in a certain order: its batches are read on the host, ahead of the steps that compute on them."""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf

from loop.data.array_source import ArraySource
from loop.data.batch import EVALUATION_EPOCH, BatchOptions, Rows, rows
from loop.data.buckets import LengthBuckets
from loop.data.examples import Arrays, ArraySpec, BadExampleError, arrays_of, specs_of, unusable
from loop.data.indexed import IndexedData
from loop.data.padding import Padding, lengthened
from loop.data.read_ahead import Filling, Position, ReadAhead, array_of_own
from loop.data.reader_process import ReaderProcesses, pickled
from loop.errors import TrainingError

SKIPPED = -1
"""Stands for the index of an example that is left out."""

_BLOCK = 64
"""Of how many batches the order is worked out at once: a call of TensorFlow takes as long as reading a small batch."""

_AHEAD = 4
"""How many batches are read ahead with `prefetch="auto"`."""


class BatchLayout:
    """The arrays of a batch of indexed data: their names, shapes and dtypes, and how they are padded.

    Args:
        data: the data.
        example: its first example.
    """

    def __init__(self, data: IndexedData, example: Any) -> None:
        found = specs_of(example, 0)
        names = [spec.name for spec in found]
        padded = data.padded_names(names)
        self._padding = data.padding or Padding(mask=False)
        self._masked = self._padding.masked(padded) if padded else []
        self._structure = tf.nest.map_structure(lambda _: 0, example)
        self.wide = data.wide
        self.specs = [dataclasses.replace(spec, padded=int(spec.name in padded)) for spec in found]
        self._gaps = [self._padding.value(spec.name, spec.dtype) if spec.padded else None for spec in self.specs]

    @property
    def padded(self) -> list[str | int]:
        """The names of the arrays whose examples differ in length."""
        return [spec.name for spec in self.specs if spec.padded]

    @property
    def example_bytes(self) -> int:
        """About how many bytes an example has."""
        return sum(int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in self.specs)

    def dtype(self, spec: ArraySpec) -> np.dtype:
        """The dtype that an array has in a batch."""
        return np.dtype("float64") if self.wide and spec.dtype.kind == "f" else spec.dtype

    def new(self, count: int, lengths: dict[str | int, int]) -> list[np.ndarray]:
        """The arrays of a batch of `count` examples, not yet filled; and the masks.

        Args:
            count: the number of examples.
            lengths: to which the padded arrays are padded, by name.
        """
        leaves = []
        for spec, gap in zip(self.specs, self._gaps, strict=True):
            shape = (lengths[spec.name], *spec.shape[1:]) if spec.padded else spec.shape
            leaf = array_of_own([count, *shape], self.dtype(spec))
            if spec.padded:
                leaf[...] = gap
            leaves.append(leaf)
        masks = [np.zeros([count, lengths[name]], bool) for name in self._masked]
        return leaves + masks

    def fill(self, batch: Sequence[np.ndarray], row: int, arrays: Sequence[np.ndarray] | Exception, index: int) -> None:
        """Writes the arrays of an example into a row of a batch.

        Raises:
            BadExampleError: one is longer than its batch.
            Exception: the one that stands in the place of the arrays.
        """
        if isinstance(arrays, Exception):
            raise arrays
        for leaf, spec, array in zip(batch, self.specs, arrays, strict=False):
            if not spec.padded:
                leaf[row] = array[()]  # a text, where it is one, and not an array of one
                continue
            if len(array) > leaf.shape[1]:
                raise BadExampleError(
                    f"example {index}: {spec.said}length {len(array)}, more than lengths=... say of any example of its "
                    f"batch, {leaf.shape[1]}: give the lengths that examples have after map"
                )
            leaf[row, : len(array)] = array
            if spec.name in self._masked:
                mask = batch[len(self.specs) + self._masked.index(spec.name)]
                mask[row, : len(array)] = True

    def clear(self, batch: Sequence[np.ndarray], row: int) -> None:
        """Empties a row whose example is left out."""
        for leaf in batch:
            leaf[row] = "" if leaf.dtype == object else np.zeros([], leaf.dtype)

    def tensor_specs(self) -> list[tf.TensorSpec]:
        """Those of a batch's arrays and masks; what is padded is open."""
        specs = []
        for spec in self.specs:
            shape = (None, *spec.shape[1:]) if spec.padded else spec.shape
            dtype = tf.string if spec.dtype == object else tf.as_dtype(self.dtype(spec))
            specs.append(tf.TensorSpec([None, *shape], dtype))
        return specs + [tf.TensorSpec([None, None], tf.bool) for _ in self._masked]

    def pack(self, tensors: Sequence[Any]) -> Any:
        """The structure of a batch, with its masks."""
        batch = tf.nest.pack_sequence_as(self._structure, list(tensors[: len(self.specs)]))
        return self._padding.with_masks(batch, dict(zip(self._masked, tensors[len(self.specs) :], strict=True)))


class IndexedSource(ArraySource):
    """`IndexedData` in a certain order.

    Which examples are in a global batch is what `ArraySource` says, and a position is all it takes to read one.

    Attributes:
        failure: why a batch could not be read, if that has ended a call.
    """

    on_host = True

    def __init__(self, data: IndexedData, options: BatchOptions) -> None:
        self._ahead: dict[int, ReadAhead] = {}
        self._opening = threading.Lock()
        self._processes: ReaderProcesses | None = None
        self.failure: BaseException | None = None
        self._block = functools.lru_cache(maxsize=4)(self._order_of_block)
        super().__init__(data, options)
        self.uniform = not (self._layout.padded or data.skips)

    def _open(self) -> int:
        data = self.data
        zero = np.zeros([1], np.int64)
        try:
            [first] = data.reader.read(data.resolve(zero, 0, self.options.seed), self._seeds(zero, 0))
        except Exception as error:
            first = error
        if isinstance(first, Exception):
            raise unusable(0, first)
        self._layout = BatchLayout(data, first)
        self._buckets: LengthBuckets | None = None
        if data.padding is not None and data.padding.bucket_by:
            lengths = self._lengths(np.arange(self.size, dtype=np.int64), 0)
            self._buckets = LengthBuckets(np.max(list(lengths.values()), axis=0), self.options, data.padding.buckets)
        return self._layout.example_bytes * self.size

    def _for_replicas(self, first: int, local: int, replicas: int) -> Self:
        shared = super()._for_replicas(first, local, replicas)
        # These read the rows of other replicas.
        shared._ahead = {}
        shared._processes = None
        return shared

    def head(self, count: int) -> Any:
        index = np.arange(min(count, self.size), dtype=np.int64)
        batch = self._filling(index, index, 0)
        self._fill(batch, slice(0, len(index)), 0)
        with tf.device("CPU:0"):
            return self._layout.pack([tf.convert_to_tensor(leaf) for leaf in batch.leaves])

    def longer_example(self) -> Any:
        return lengthened(self.example, self._layout.pack(self._layout.tensor_specs())) if self._layout.padded else None

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        for ahead in self._ahead.values():
            ahead.close()
        self._ahead = {}
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    # In the graph

    def read_batches(self, iterator: tuple[()], epoch: tf.Tensor, step: tf.Tensor, steps: int) -> Any:
        with tf.device("CPU:0"):
            flat = self._from_host(functools.partial(self._fetch_block, steps), epoch, step)
            shape = [steps, self.options.batch_size]
            stacked = tf.nest.map_structure(lambda tensor: tf.reshape(tensor, shape + tensor.shape[1:]), flat)
        return self._copied(stacked)

    def _read_rows(self, epoch: tf.Tensor, step: tf.Tensor, parts: int) -> Any:
        return self._from_host(functools.partial(self._fetch, parts), epoch, step)

    def _from_host(self, fetch: Callable[..., list[np.ndarray]], epoch: tf.Tensor, step: tf.Tensor) -> Any:
        """The indices and the arrays that a function of the host reads."""
        specs = [tf.TensorSpec([None], tf.int64), *self._layout.tensor_specs()]
        # It has no state: what it returns depends on the position alone. It is Python's, not to be made a graph.
        on_host = tf.autograph.experimental.do_not_convert(fetch)
        tensors = tf.numpy_function(on_host, [epoch, step], [spec.dtype for spec in specs], stateful=False)
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tensors[0], self._layout.pack(tensors[1:])

    def leaves_some_without(self, parts: int) -> bool:
        return self.data.skips or super().leaves_some_without(parts)

    def replica_rows(self, feed: Any, replica: Any, part: Any = 0, parts: int = 1) -> Rows:
        own = super().replica_rows(feed, replica, part, parts)
        if not self.data.skips:
            return own
        kept = own.index != SKIPPED
        batch = tf.nest.map_structure(lambda tensor: tf.boolean_mask(tensor, kept), own.batch)
        return own._replace(batch=batch, index=tf.boolean_mask(own.index, kept))

    # On the host

    def _fetch(self, parts: int, epoch: np.ndarray, step: np.ndarray) -> list[np.ndarray]:
        """The worker's rows of a global batch: their indices, and the arrays."""
        position = Position(int(epoch), int(step))
        try:
            if position.step >= (self.steps_per_epoch or 0):  # read ahead at the end of the data: nobody computes on it
                nothing = self._filling(np.zeros([0], np.int64), np.zeros([1], np.int64), position.epoch)
                return [nothing.index, *nothing.leaves]
            batch = self._reader(parts).get(position)
        except BaseException as error:
            self.failure = error
            raise
        return [batch.index, *batch.leaves]

    def _fetch_block(self, steps: int, epoch: np.ndarray, step: np.ndarray) -> list[np.ndarray]:
        """The rows of whole batches, one behind the other; rows past the end of the data are undefined."""
        read = [self._fetch(1, epoch, step + number) for number in range(steps)]
        rows = steps * self.options.batch_size
        blocks = []
        for arrays in zip(*read, strict=True):
            joined = np.concatenate(arrays)
            missing = [(0, rows - len(joined))] + [(0, 0)] * (joined.ndim - 1)
            blocks.append(np.pad(joined, missing) if len(joined) < rows else joined)
        return blocks

    def _reader(self, parts: int) -> ReadAhead:
        with self._opening:  # two operations of a graph may ask at once
            if parts not in self._ahead:
                if self.data.readers and self._processes is None:
                    payload = pickled(self.data.reader, self._layout.specs)
                    self._processes = ReaderProcesses(payload, self.data.readers)
                depth = _AHEAD if self.options.prefetch == "auto" else int(self.options.prefetch)
                self._ahead[parts] = ReadAhead(
                    functools.partial(self._plan, parts), self._fill, self._following, depth, max(1, self.data.readers)
                )
            return self._ahead[parts]

    def _following(self, position: Position) -> Position | None:
        if position.step + 1 < (self.steps_per_epoch or 0):
            return Position(position.epoch, position.step + 1)
        # An evaluation has one epoch, and the next one begins at its start.
        return None if position.epoch == EVALUATION_EPOCH else Position(position.epoch + 1, 0)

    def _plan(self, parts: int, position: Position) -> Filling:
        whole = self._global_batch(position)
        own = whole if self._replicas == 1 else whole[self._own_rows(len(whole), parts)]
        return self._filling(own, whole, position.epoch)

    def _global_batch(self, position: Position) -> np.ndarray:
        """The indices of the examples of a global batch: int64 [n]."""
        epoch, step = position
        if self._buckets is not None:
            with tf.device("CPU:0"):
                return np.asarray(self._buckets.batch(tf.constant(epoch, tf.int64), tf.constant(step, tf.int64)))
        block, place = divmod(step, _BLOCK)
        first = place * self.options.batch_size
        return self._block(epoch, block)[first : first + self.options.batch_size]

    def _order_of_block(self, epoch: int, block: int) -> np.ndarray:
        """The indices of the examples of `_BLOCK` global batches: int64 [n]."""
        start = block * _BLOCK * self.options.batch_size
        places = np.arange(start, min(start + _BLOCK * self.options.batch_size, self.size), dtype=np.int64)
        if not self.options.shuffle:
            return places
        with tf.device("CPU:0"):
            seed = np.array([self.options.seed, epoch], np.int64)
            return np.asarray(tf.random.experimental.index_shuffle(places, seed=seed, max_index=self.size - 1))

    def _own_rows(self, count: int, parts: int) -> np.ndarray:
        """Which rows of a global batch this worker reads, one micro-batch after the other; see `ArraySource._own`."""
        stretches = []
        for part in range(parts):
            low, high = rows(count, part, parts)
            first, _ = rows(high - low, self._first, self._replicas)
            _, last = rows(high - low, self._first + self._local - 1, self._replicas)
            stretches.append(np.arange(low + first, low + last))
        return np.concatenate(stretches)

    def _filling(self, own: np.ndarray, whole: np.ndarray, epoch: int) -> Filling:
        """A batch of the examples `own`, padded as the global batch `whole` is."""
        lengths: dict[str | int, int] = {}
        if self._layout.padded:
            assert self.data.padding is not None
            for name, known in self._lengths(whole, epoch).items():
                lengths[name] = int(self.data.padding.length(known[:, np.newaxis])[0])
        return Filling(own.copy(), epoch, self._layout.new(len(own), lengths))

    def _lengths(self, indices: np.ndarray, epoch: int) -> dict[str | int, np.ndarray]:
        """How long each example is, by the names of the padded arrays."""
        ids = self.data.resolve(indices, epoch, self.options.seed)
        return {name: self.data.lengths(ids, name) for name in self._layout.padded}

    def _seeds(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        """The same numbers as those of `loop.example_seed`: int64 [n, 2]."""
        of_epoch = np.full_like(indices, (self.options.seed << 32) + epoch)
        return np.stack([of_epoch, indices << 16], 1)

    def _fill(self, batch: Filling, stretch: slice, thread: int) -> None:
        """Reads a stretch of the rows of a batch."""
        indices = batch.index[stretch]
        ids = self.data.resolve(indices, batch.epoch, self.options.seed)
        leaves = [leaf[stretch] for leaf in batch.leaves]
        read = self._read_examples(ids, self._seeds(indices, batch.epoch), thread)
        if isinstance(read, tuple) and not self._layout.padded:
            for leaf, column in zip(leaves, read, strict=True):
                leaf[...] = column
            return
        examples = list(zip(*read, strict=True)) if isinstance(read, tuple) else read
        for row, arrays in enumerate(examples):
            try:
                self._layout.fill(leaves, row, arrays, int(ids[row]))
            except (BadExampleError, TrainingError) as error:
                if not self.data.skips:
                    raise
                warnings.warn(f"{error}; it is left out (on_bad_example='skip')", stacklevel=2)
                self._layout.clear(leaves, row)
                batch.index[stretch.start + row] = SKIPPED

    def _read_examples(self, ids: np.ndarray, seeds: np.ndarray, thread: int) -> Arrays:
        """See `arrays_of`; by the process of this thread, once it is ready."""
        process = self._processes and self._processes.of_thread(thread)
        if process:
            return process.read(ids, seeds)
        return arrays_of(self.data.reader, self._layout.specs, ids, seeds)
