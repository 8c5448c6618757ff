"""The batches of indexed data, read on the host: which examples each has, and the threads that read ahead."""

from __future__ import annotations

import functools
import threading
import warnings

import numpy as np
import tensorflow as tf

from loop.backends.devices import graph_threads
from loop.data.batch import EVALUATION_EPOCH, BatchOptions
from loop.data.batch_filler import BatchFiller
from loop.data.batch_layout import BatchLayout
from loop.data.buckets import LengthBuckets
from loop.data.graph_ahead import GraphReadAhead
from loop.data.indexed import IndexedData
from loop.data.order import shuffled
from loop.data.own_arrays import array_of_own_of
from loop.data.pending_batches import PendingBatches, Position
from loop.data.read_ahead import ReadAhead
from loop.data.row_shares import RowShares
from loop.errors import UsageError
from loop.launch.machine import usable_cpus

_ORDERED = 1 << 14
"""About how many examples are put in order at once: each such call waits for TensorFlow's busy threads."""

_AHEAD = 4
"""How many batches are read ahead with `prefetch="auto"`."""

_AT_ONCE = 32
"""How many batches are handed over to a graph at once, at most."""

_AT_ONCE_BYTES = 1 << 21
"""How many bytes they may have together: while a graph computes, they take a part of the cache that it needs itself."""


class HostReader:
    """Reads the batches of indexed data, each by its position, and those that follow ahead."""

    def __init__(self, data: IndexedData, options: BatchOptions, layout: BatchLayout, steps_per_epoch: int) -> None:
        self._data = data
        self._options = options
        self._layout = layout
        self._steps_per_epoch = steps_per_epoch
        self._source_size = len(data.reader)
        # Batches that are handed over together come from one block.
        self._block_steps = max(_AT_ONCE, _ORDERED // options.batch_size)
        # A few blocks are kept: where two meet, batches of both are asked for.
        self._block = functools.lru_cache(maxsize=4)(self._order_of_block)
        self._buckets = functools.lru_cache(maxsize=2)(self._buckets_of_epoch)
        self._is_bucketed = data.padding is not None and bool(data.padding.bucket_by)
        if self._is_bucketed:
            self._buckets(0)  # lengths that are wrong are refused before training
        self._opening = threading.Lock()
        self._ahead: dict[tuple[RowShares, int], tuple[ReadAhead | GraphReadAhead, BatchFiller | None]] = {}
        self._in_graph = data.maps_in_graph and not layout.padded  # tf.data stacks examples, which must have one shape
        self._failure: BaseException | None = None

    def batches(self, shares: RowShares, parts: int, position: Position) -> PendingBatches:
        """A worker's rows of a global batch, filled; perhaps together with those of batches around it.

        After the end of the data there are none.

        Args:
            shares: which rows the worker has.
            parts: into how many micro-batches the global batch is cut; their rows follow each other.
            position: of the global batch.

        Raises:
            BaseException: what reading an example has raised; see `take_failure`.
        """
        try:
            if position.step >= self._steps_per_epoch:
                return self.nothing(position)  # a compiled call reads one batch more than it makes steps
            ahead = self._reader(shares, parts)
            try:
                return ahead.get(position)
            except Exception:
                if isinstance(ahead, ReadAhead):
                    raise
                self._in_graph = False  # from now on examples are mapped one by one, which finds the one that failed
                self.close()
                batches = self._reader(shares, parts).get(position)
                _warn_of_python(ahead.unlike)
                return batches
        except BaseException as error:
            self._failure = error  # kept, since TensorFlow raises an error of its own with the text alone
            raise

    def batches_if_ready(self, shares: RowShares, parts: int, position: Position) -> PendingBatches | None:
        """See `batches`. None: they aren't filled yet."""
        if position.step >= self._steps_per_epoch:
            return self.nothing(position)
        try:
            ahead = self._reader(shares, parts)  # which fails for what can't be sent to a process
            return ahead.get_if_ready(position) if isinstance(ahead, ReadAhead) else None
        except BaseException as error:
            self._failure = error
            raise

    def nothing(self, position: Position) -> PendingBatches:
        """A batch without rows."""
        widths = np.ones([1, len(self._layout.padded)], np.int64)
        return PendingBatches(position, np.zeros([0], np.int64), self._layout.new(0), widths=widths)

    def take_failure(self) -> BaseException | None:
        """Why the last batch could not be read, once: TensorFlow wraps it in a text of its own."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Ends the threads and processes that read ahead. A batch that is asked for later starts new ones."""
        with self._opening:
            for ahead, filler in self._ahead.values():
                ahead.close()  # first, since its threads ask the processes
                if filler is not None:
                    filler.close()
            self._ahead.clear()

    def empty_batch(self, index: np.ndarray) -> PendingBatches:
        """A batch of some examples, to be filled; as in epoch 0."""
        widths = self._widths([index], 0)
        own = array_of_own_of(index, index.dtype)
        return PendingBatches(Position(0, 0), own, self._layout.new(len(index)), widths=widths)

    def _reader(self, shares: RowShares, parts: int) -> ReadAhead | GraphReadAhead:
        with self._opening:  # two operations of a graph may ask at once
            key = (shares, parts)
            if key not in self._ahead:
                self._ahead[key] = self._opened(shares, parts)
            return self._ahead[key][0]

    def _opened(self, shares: RowShares, parts: int) -> tuple[ReadAhead | GraphReadAhead, BatchFiller | None]:
        data = self._data
        seed = self._options.seed
        depth = _AHEAD if self._options.prefetch == "auto" else int(self._options.prefetch)
        if self._in_graph:
            rows = functools.partial(self._rows, shares, parts)
            return GraphReadAhead(data, self._layout, seed, rows, self._steps_per_epoch, depth), None

        # Processes have a thread each that asks them. One thread reads columns, which takes one call for many rows.
        filler = BatchFiller(data, self._layout, seed)
        threads = data.readers or (1 if data.reader.by_column else usable_cpus())
        plan = functools.partial(self._plan, shares, parts, filler.whole_batches)
        # Code of the user may run graphs, which need another of TensorFlow's threads than the one that reads.
        at_once = 0
        if not data.readers and (not data.calls_user or graph_threads() > 1):
            # About as many as fit. More would be planned for nothing; see `_fitting`.
            batch_bytes = max(1, self._layout.example_bytes * self._options.batch_size)
            at_once = min(_AT_ONCE, max(1, _AT_ONCE_BYTES // batch_bytes))
        return ReadAhead(plan, filler.fill, self._following, depth, threads, at_once), filler

    def _following(self, position: Position) -> Position | None:
        following = position.after(1, self._steps_per_epoch)
        # An evaluation has one epoch, and the next one begins at its start.
        return None if following.epoch == EVALUATION_EPOCH + 1 else following

    def _plan(
        self, shares: RowShares, parts: int, whole_batches: bool, position: Position, at_once: int
    ) -> PendingBatches:
        """A worker's rows of at most so many global batches from a position on, to be filled."""
        # Width and order are those of the global batches, so that they don't depend on which rows this worker has.
        wholes = self._global_batches(position, at_once)
        widths = self._widths(wholes, position.epoch)
        count = self._fitting(widths)
        own = [_own(shares, parts, whole) for whole in wholes[:count]]
        starts = np.zeros([count + 1], np.int64)
        np.cumsum(list(map(len, own)), out=starts[1:])

        # What is read as whole batches brings its own arrays, but where there are no rows to read.
        leaves = [] if whole_batches and starts[-1] else self._layout.new(starts[-1])
        index = np.concatenate(own)
        return PendingBatches(position, array_of_own_of(index, index.dtype), leaves, starts, widths[:count])

    def _fitting(self, widths: np.ndarray) -> int:
        """How many of some batches aren't too large to be handed over at once; at least one."""
        if len(widths) == 1:
            return 1
        # Each batch counts as much as the largest one so far: an upper bound.
        longest = np.maximum.accumulate(self._layout.bytes_of_rows(widths))
        bytes_ = longest * self._options.batch_size * np.arange(1, len(widths) + 1)
        return max(1, int(np.searchsorted(bytes_, _AT_ONCE_BYTES, "right")))

    def _rows(self, shares: RowShares, parts: int, position: Position) -> np.ndarray:
        """The indices of a worker's rows of a global batch: int64 [n]."""
        [whole] = self._global_batches(position, 1)
        return _own(shares, parts, whole)

    def _global_batches(self, position: Position, at_once: int) -> list[np.ndarray]:
        """The indices of the examples of global batches from a position on: int64 [n] each; at least of one."""
        # A user's source may grow while it is read: its order would change within an epoch.
        size = len(self._data.reader)
        if size != self._source_size:
            raise UsageError(
                f"IndexedData: the source has {size} examples, and had {self._source_size} when the run began: leave "
                "it as it is while a run reads it"
            )
        epoch, step = position
        block, step_in_block = divmod(step, self._block_steps)
        # Up to the end of the block, or of the epoch.
        count = min(at_once, self._block_steps - step_in_block, self._steps_per_epoch - step)
        if self._is_bucketed:
            epoch_of_order = epoch if self._data.mixes else 0
            with tf.device("CPU:0"):
                steps = tf.range(step, step + count, dtype=tf.int64)
                order = np.asarray(self._buckets(epoch_of_order).batches(tf.constant(epoch, tf.int64), steps))
            left = self._data.size - step * self._options.batch_size  # examples; the last batch may be short
            return [batch[: left - number * len(batch)] for number, batch in enumerate(order)]
        order = self._block(epoch, block)
        size = self._options.batch_size
        starts = range(step_in_block * size, (step_in_block + count) * size, size)
        return [order[start : start + size] for start in starts]

    def _buckets_of_epoch(self, epoch: int) -> LengthBuckets:
        """The order by length. A mixture has another one in each epoch, since its examples are others."""
        padding = self._data.padding
        assert padding is not None
        # With several padded arrays, an example is sorted by the longest one.
        lengths = self._lengths(np.arange(self._data.size, dtype=np.int64), epoch)
        return LengthBuckets(np.max(list(lengths.values()), axis=0), self._options, padding.buckets)

    def _order_of_block(self, epoch: int, block: int) -> np.ndarray:
        """The indices of the examples of `_block_steps` global batches: int64 [n]."""
        size = self._data.size
        count = self._block_steps * self._options.batch_size
        positions = np.arange(block * count, min((block + 1) * count, size), dtype=np.int64)
        if not self._options.shuffle:
            return positions
        with tf.device("CPU:0"):
            # The permutation of `ArraySource`, with the same seed: both kinds of data come in one order.
            return np.asarray(shuffled(positions, self._options.seed, epoch, size))

    def _widths(self, wholes: list[np.ndarray], epoch: int) -> np.ndarray:
        """The lengths that the arrays of some global batches are padded to: int64 [batches, padded arrays]."""
        names = self._layout.padded
        widths = np.zeros([len(wholes), len(names)], np.int64)
        if names:
            assert self._data.padding is not None
            # The lengths of all batches in one call, which takes NumPy hardly longer than those of one.
            firsts = np.cumsum([0, *map(len, wholes[:-1])])
            for column, lengths in enumerate(self._lengths(np.concatenate(wholes), epoch).values()):
                longest = np.maximum(np.maximum.reduceat(lengths, firsts), 1)  # no layer is to meet an empty axis
                widths[:, column] = self._data.padding.rounded(longest)
        return widths

    def _lengths(self, indices: np.ndarray, epoch: int) -> dict[str | int, np.ndarray]:
        """How long each example is, by the names of the padded arrays."""
        ids = self._data.resolve(indices, epoch, self._options.seed)
        return {name: self._data.lengths(ids, name) for name in self._layout.padded}


def _warn_of_python(unlike: bool) -> None:
    """Warns that a map that is a `tf.function` isn't run by tf.data any more.

    `unlike` says whether the reason is that the source gives examples of different shapes.
    """
    reason = "the source's examples differ in shape or dtype" if unlike else "an example can't be read in a graph"
    warnings.warn(
        f"IndexedData(map=...): {reason}, so that the tf.function is called for one example at a time from now on, "
        "which takes longer: a source of one shape, or of texts, such as paths or encoded pictures, is read by tf.data",
        stacklevel=2,
    )


def _own(shares: RowShares, parts: int, whole: np.ndarray) -> np.ndarray:
    """A worker's rows of a global batch that is cut into micro-batches."""
    return whole if shares.replicas == 1 else whole[shares.on_host(len(whole), parts)]
