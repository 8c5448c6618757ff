"""The batches of indexed data, read on the host: which examples each has, and the threads that read ahead."""

from __future__ import annotations

import functools
import threading

import numpy as np
import tensorflow as tf

from loop.data.batch import EVALUATION_EPOCH, BatchOptions
from loop.data.batch_filler import BatchFiller
from loop.data.batch_layout import BatchLayout
from loop.data.buckets import LengthBuckets
from loop.data.graph_ahead import GraphReadAhead
from loop.data.indexed import IndexedData, usable_cpus
from loop.data.read_ahead import PendingBatch, Position, ReadAhead, array_of_own
from loop.data.row_shares import RowShares
from loop.errors import UsageError

_BLOCK = 64
"""Of how many batches the order is worked out at once: a call of TensorFlow takes as long as reading a small batch."""

_AHEAD = 4
"""How many batches are read ahead with `prefetch="auto"`."""


class HostReader:
    """Reads the batches of indexed data, each by its position, and those that follow ahead.

    Args:
        data: the data.
        options: how it is cut into batches.
        layout: of a batch.
        steps_per_epoch: how many batches an epoch has.
    """

    def __init__(self, data: IndexedData, options: BatchOptions, layout: BatchLayout, steps_per_epoch: int) -> None:
        self._data = data
        self._options = options
        self._layout = layout
        self._steps_per_epoch = steps_per_epoch
        self._source_size = len(data.reader)
        self._block = functools.lru_cache(maxsize=4)(self._order_of_block)
        self._buckets: LengthBuckets | None = None
        if data.padding is not None and data.padding.bucket_by:
            lengths = self._lengths(np.arange(data.size, dtype=np.int64), 0)
            self._buckets = LengthBuckets(np.max(list(lengths.values()), axis=0), options, data.padding.buckets)
        self._opening = threading.Lock()
        self._ahead: dict[tuple[RowShares, int], tuple[ReadAhead | GraphReadAhead, BatchFiller | None]] = {}
        self._in_graph = data.maps_in_graph and not layout.padded
        self._failure: BaseException | None = None

    def batch(self, shares: RowShares, parts: int, position: Position) -> PendingBatch:
        """A worker's rows of a global batch, filled. Behind the end of the data it has none.

        Args:
            shares: of the worker.
            parts: into how many micro-batches the global batch is cut; their rows follow each other.
            position: of the global batch.

        Raises:
            BaseException: what reading an example has raised; see `take_failure`.
        """
        try:
            if position.step >= self._steps_per_epoch:
                # A compiled call reads one batch more than it makes steps.
                return self.empty_batch(np.zeros([0], np.int64), np.zeros([1], np.int64), position.epoch)
            ahead = self._reader(shares, parts)
            try:
                return ahead.get(position)
            except Exception:
                if isinstance(ahead, ReadAhead):
                    raise
                self._in_graph = False  # which example it was is found by mapping them one by one
                self.close()
                return self._reader(shares, parts).get(position)
        except BaseException as error:
            self._failure = error
            raise

    def batch_if_ready(self, shares: RowShares, parts: int, position: Position) -> PendingBatch | None:
        """See `batch`; None: it isn't filled yet, or has to be waited for."""
        if position.step >= self._steps_per_epoch:
            return self.batch(shares, parts, position)
        ahead = self._reader(shares, parts)
        try:
            return ahead.get_if_ready(position) if isinstance(ahead, ReadAhead) else None
        except BaseException as error:
            self._failure = error
            raise

    def take_failure(self) -> BaseException | None:
        """Why the last batch could not be read, once: TensorFlow wraps it in a text of its own."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Ends the threads and processes that read ahead. A batch that is asked for later starts new ones."""
        with self._opening:
            for ahead, filler in self._ahead.values():
                ahead.close()
                if filler is not None:
                    filler.close()
            self._ahead.clear()

    def empty_batch(self, own: np.ndarray, whole: np.ndarray, epoch: int) -> PendingBatch:
        """A batch, to be filled, of the examples `own`, padded as the global batch `whole` is."""
        lengths: dict[str | int, int] = {}
        if self._layout.padded:
            assert self._data.padding is not None
            for name, known in self._lengths(whole, epoch).items():
                lengths[name] = self._data.padding.rounded(max(int(known.max()), 1))
        return PendingBatch(_copied(own), epoch, self._layout.new(len(own), lengths))

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
        filler = BatchFiller(data, self._layout, seed)
        threads = data.readers or (1 if data.reader.by_column else usable_cpus())
        plan = functools.partial(self._plan, shares, parts, filler.whole_batches)
        # Code of the user may run graphs, which need another of TensorFlow's threads than the one that reads.
        at_once = not data.readers and (filler.whole_batches or _graph_threads() > 1)
        return ReadAhead(plan, filler.fill, self._following, depth, threads, at_once), filler

    def _following(self, position: Position) -> Position | None:
        following = position.after(1, self._steps_per_epoch)
        # An evaluation has one epoch, and the next one begins at its start.
        return None if following.epoch == EVALUATION_EPOCH + 1 else following

    def _plan(self, shares: RowShares, parts: int, whole_batches: bool, position: Position) -> PendingBatch:
        whole = self._global_batch(position)
        own = _own(shares, parts, whole)
        if whole_batches:
            leaves = [] if len(own) else self._layout.new(0, {})
            return PendingBatch(_copied(own), position.epoch, leaves)
        return self.empty_batch(own, whole, position.epoch)

    def _rows(self, shares: RowShares, parts: int, position: Position) -> np.ndarray:
        """The indices of a worker's rows of a global batch: int64 [n]."""
        return _own(shares, parts, self._global_batch(position))

    def _global_batch(self, position: Position) -> np.ndarray:
        """The indices of the examples of a global batch: int64 [n]."""
        size = len(self._data.reader)
        if size != self._source_size:
            raise UsageError(
                f"IndexedData: the source has {size} examples, and had {self._source_size} when the run began: leave "
                "it as it is while a run reads it"
            )
        epoch, step = position
        if self._buckets is not None:
            with tf.device("CPU:0"):
                return np.asarray(self._buckets.batch(tf.constant(epoch, tf.int64), tf.constant(step, tf.int64)))
        block, place = divmod(step, _BLOCK)
        first = place * self._options.batch_size
        return self._block(epoch, block)[first : first + self._options.batch_size]

    def _order_of_block(self, epoch: int, block: int) -> np.ndarray:
        """The indices of the examples of `_BLOCK` global batches: int64 [n]."""
        size = self._data.size
        start = block * _BLOCK * self._options.batch_size
        places = np.arange(start, min(start + _BLOCK * self._options.batch_size, size), dtype=np.int64)
        if not self._options.shuffle:
            return places
        with tf.device("CPU:0"):
            seed = np.array([self._options.seed, epoch], np.int64)
            return np.asarray(tf.random.experimental.index_shuffle(places, seed=seed, max_index=size - 1))

    def _lengths(self, indices: np.ndarray, epoch: int) -> dict[str | int, np.ndarray]:
        """How long each example is, by the names of the padded arrays."""
        ids = self._data.resolve(indices, epoch, self._options.seed)
        return {name: self._data.lengths(ids, name) for name in self._layout.padded}


def _own(shares: RowShares, parts: int, whole: np.ndarray) -> np.ndarray:
    """A worker's rows of a global batch that is cut into micro-batches."""
    return whole if shares.replicas == 1 else whole[shares.on_host(len(whole), parts)]


def _copied(index: np.ndarray) -> np.ndarray:
    """The indices of a batch, as an array that no operation of the graph writes to."""
    copy = array_of_own([len(index)], index.dtype)
    copy[...] = index
    return copy


def _graph_threads() -> int:
    """How many operations of a graph TensorFlow runs at a time."""
    return int(tf.config.threading.get_inter_op_parallelism_threads()) or usable_cpus()
