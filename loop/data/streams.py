"""Streams: a `tf.data.Dataset` with an iterator for each epoch, and empty batches after the last one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data.batch import BatchOptions, Feed, RowCounts, Rows, count, part_bounds, row_counts
from loop.data.generators import check_made_anew, open_generators
from loop.data.host_random import RandomState, set_random_state
from loop.data.padded_streams import PaddedBatches
from loop.data.padding import Padding, as_padding, lengthened
from loop.data.pipelines import dense, one_order, one_order_an_epoch, shard_files, stacking_problem
from loop.errors import UsageError
from loop.task import Batch


class StreamData:
    """A `tf.data.Dataset` of examples, with settings that the data set itself doesn't have.

    Args:
        dataset: unbatched examples.
        padding: how examples of different lengths become one batch: a `loop.Padding`, or the value that fills the
            gaps.
        check_batched: whether a pipeline that seems to yield batches is refused; False where its examples are groups,
            such as windows of a time series, that look like batches.

    Raises:
        UsageError: something that is no `tf.data.Dataset`.
    """

    def __init__(self, dataset: tf.data.Dataset, padding: Any = None, check_batched: bool = True) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise UsageError(f"StreamData({type(dataset).__name__}): give a tf.data.Dataset of examples")
        self.dataset = dense(dataset)
        self.padding = as_padding(padding)
        self.check_batched = check_batched

    def replaced(self, dataset: tf.data.Dataset) -> StreamData:
        """Another pipeline with the same settings."""
        return StreamData(dataset, self.padding, self.check_batched)


class StreamSource:
    """A `tf.data.Dataset` of examples, batched, with an iterator for each epoch; after its end, batches are empty.

    Args:
        dataset: the unbatched examples that this worker reads.
        options: how they are cut into batches; the batch size is that of this worker.
        first: the index of the worker's first replica among the replicas of all workers with the same data.
        replicas: the number of replicas that share the worker's batch.
        workers: the number of workers that read other parts of the stream; 1: all read the same.
        padding: how examples of different lengths become one batch.

    Attributes:
        again: makes the same stream once more, from the same seeds; None, or a result of None: that isn't possible.
        steps_per_epoch: None: not known before the stream has been read.
        endless: whether the stream is known to have no end.
        uniform: whether all batches have one shape, except a short last one.
        leaves_out: False: all examples are used.
        layout: how the stream is split over workers, if a position means something else with another split; else None.
    """

    steps_per_epoch: int | None = None
    layout: list[str | int] | None = None
    leaves_out = False

    def __init__(
        self,
        dataset: tf.data.Dataset,
        options: BatchOptions,
        first: int = 0,
        replicas: int = 1,
        workers: int = 1,
        padding: Padding | None = None,
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        self.uniform = all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec))
        self._first = first
        self._replicas = replicas
        self._batch_size = options.batch_size * workers
        ahead = tf.data.AUTOTUNE if options.prefetch == "auto" else options.prefetch
        self._padding = padding
        self._padded = None if padding is None else PaddedBatches(dataset, padding, options.seed)

        # One pipeline for all epochs, so that a data set that reshuffles in each iteration does so here.
        self._batches = batches(dataset, self._padded, options.batch_size, options.drop_remainder).prefetch(ahead)
        self._following = self._batches
        self.again: Callable[[], StreamSource | None] | None = None
        self._unsaved = ""

    @functools.cached_property
    def example(self) -> Batch:
        """The first few examples, as a batch; a batch without rows if the stream is empty."""
        with tf.init_scope():  # to get values also while a graph is traced
            options = tf.data.Options()
            # Reading ahead, which these add, would draw an unknown number of seeds from a data set that shuffles, and
            # of random numbers from a generator in a map.
            options.experimental_optimization.apply_default_optimizations = False
            few = batches(self.dataset, self._padded, 3, bucketed=False).with_options(options)
            iterator = iter(few)
            try:
                example = next(iterator, no_rows(few.element_spec))
            except tf.errors.InvalidArgumentError as error:
                raise stacking_problem(error) or error from None
            generators = open_generators(self.dataset)
            del iterator  # else it holds the generators
            check_made_anew(generators)
            return example

    def head(self, count: int) -> Batch:
        """The first examples, as a batch; at most those of `example`."""
        # Another iterator, beside that of the training, would draw from the seeds of a data set that shuffles.
        return tf.nest.map_structure(lambda tensor: tensor[:count], self.example)

    def longer_example(self) -> Batch | None:
        """`example` with longer padding; None if nothing is padded."""
        return None if self._padded is None else lengthened(self.example, self.batch_spec)

    def sharded(self, backend: Backend, policy: str) -> StreamSource:
        """Shares the stream out over the workers by `policy`, and over the replicas of each by rows."""
        check_policy(self.dataset, self.options.batch_size, backend, policy)
        if policy == "example":
            split = StreamSource(self.dataset, self.options, 0, backend.replicas, padding=self._padding)
        else:
            split = self._split_by_worker(backend, policy)

        # Read once: another iterator would draw from the seeds of a data set that shuffles.
        split.__dict__["example"] = self.example

        # What is made again must be split in the same way, since its iterator takes the place of this one's.
        again = self.again
        if again is not None:

            def split_again() -> StreamSource | None:
                remade = again()
                return None if remade is None else remade.sharded(backend, policy)

            split.again = split_again
        return split

    def _split_by_worker(self, backend: Backend, policy: str) -> StreamSource:
        """The worker's own part of the stream: every n-th file, or all of it if the task has split it already."""
        dataset = self.dataset
        options = dataclasses.replace(self.options, batch_size=self.options.batch_size // backend.workers)
        if policy == "file" and backend.workers > 1:
            dataset = shard_files(dataset, backend.workers, backend.rank)
        first = backend.rank * backend.local_replicas
        split = StreamSource(dataset, options, first, backend.local_replicas, backend.workers, padding=self._padding)
        split.layout = [policy, backend.workers]
        return split

    def most_rows(self, parts: int) -> int:
        """The greatest number of rows of a micro-batch, over all replicas, if a batch is cut into so many."""
        # Each worker cuts its own batch, and rounds up by itself.
        workers = self._batch_size // self.options.batch_size
        return workers * -(-self.options.batch_size // parts)

    def start(
        self,
        epoch: int,
        step_in_epoch: int,
        state: np.ndarray | None = None,
        draws: RandomState | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tf.data.Iterator:
        """Opens the stream at a position: by the state of the iterator there, or by reading up to it.

        Args:
            epoch: the epoch.
            step_in_epoch: the step within the epoch.
            state: what `state` returned there; None: unknown.
            draws: the `random_state` at the beginning of the epoch, if the stream is read up to a step within it.
            stopped: whether the run is to end, so that nothing will be read at the position.

        Raises:
            tf.errors.OpError: the state belongs to an iterator of another pipeline.
        """
        if state is not None and self.again is not None:
            again = self.again()
            if again is not None:
                return self._restored(again, epoch, step_in_epoch, state, stopped)

        # Whole epochs are read to their end: what draws random numbers or keeps a state on the way must come to where
        # it was.
        reached = True
        for _ in range(epoch):
            if reached:
                reached = _read_to_end(iter(self._batches), stopped)
        if draws is not None:
            set_random_state(draws)
        iterator = iter(self._batches)
        self.state(iterator)  # asked for before anything is read: see there
        if reached:
            reached = _read_to_end(itertools.islice(iterator, step_in_epoch), stopped)
        if not reached:
            # A checkpoint must not have the state of an iterator that isn't where the run is.
            self._unsaved = "the run was stopped before it was reached"
        return iterator

    def _restored(
        self, again: StreamSource, epoch: int, step_in_epoch: int, state: np.ndarray, stopped: Callable[[], bool]
    ) -> tf.data.Iterator:
        """The iterator at a position, restored from its state there; `again` is the same stream, made once more."""
        # The state holds the rest of the iterator's epoch, but not always the seeds from which the next epoch's order
        # is drawn. So later epochs come from the pipeline that was made again. It has drawn as many seeds as the first
        # one had, once as many iterators have begun.
        self._following = again._batches
        begun = epoch + 1 if step_in_epoch > 0 else epoch
        for _ in range(begun):
            if not stopped():
                next(iter(self._following), None)
        if not step_in_epoch:
            return iter(self._following)  # between two epochs, there is no rest of an epoch to restore
        iterator = iter(self._batches)
        variant = tf.io.parse_tensor(state.tobytes(), tf.variant)
        tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=variant)
        return iterator

    def next_epoch(self, iterator: tf.data.Iterator) -> tf.data.Iterator:
        """The iterator of the epoch after that of `iterator`."""
        return iter(self._following)

    def state(self, iterator: tf.data.Iterator) -> np.ndarray | None:
        """The iterator's state, with its shuffle buffers: uint8 [n]; None if it doesn't determine what follows."""
        # Once all examples of an epoch are read ahead, TensorFlow saves the state of a pipeline that it refused at the
        # start of the epoch: Python's part of it has ended. It begins again in the next epoch, with what it remembers.
        if self._unsaved:
            return None
        if self.again is None or not one_order_an_epoch(self.dataset):
            # Shown to the user by `unsaved`: a resume then reads up to the position, which takes longer.
            self._unsaved = (
                "it shuffles within a repeat, below a cache or within one of several parts, or can't be made again"
            )
            return None
        policy = self.dataset.options().experimental_external_state_policy
        try:
            variant = tf.raw_ops.SerializeIterator(
                resource_handle=iterator._iterator_resource,
                external_state_policy=2 if policy is None else policy.value,  # 2: fail where something has state
            )
            return np.frombuffer(tf.io.serialize_tensor(variant).numpy(), np.uint8)
        except tf.errors.OpError as error:
            # Without TensorFlow's names of the operation and its node, which the user has never seen.
            self._unsaved = str(error.message).split(" [Op:")[0].split("}} ")[-1]
            return None

    def unsaved(self, iterator: tf.data.Iterator) -> str:
        """Why `state` is None; "" if it isn't."""
        return self._unsaved if self.state(iterator) is None else ""

    def read_batch(self, iterator: tf.data.Iterator, epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> Batch:
        """Reads the worker's next batch; an empty one at the end of its epoch, until all workers are at the end."""
        # An optional, since the error at the end of an iterator would end the whole compiled call.
        following = iterator.get_next_as_optional()
        return tf.cond(following.has_value(), following.get_value, lambda: no_rows(self.batch_spec))

    def more(self, read: Batch) -> tf.Tensor:
        """Whether the worker's batch has examples: bool []."""
        return count(read) > 0

    def whole(self, epoch: tf.Tensor, step: tf.Tensor, batch: Batch) -> Rows:
        """The worker's whole batch, as the rows of one replica; `batch` is what `read_batch` returned for it."""
        # One replica has all rows. As in `replica_rows`, positions count from the start of the global batch.
        alone = copy.copy(self)  # a shallow copy: the pipeline is the same
        alone._replicas = 1
        alone._first = 0
        rows = alone.replica_rows((epoch, step, batch), 0)
        ahead = self._first // self._replicas * self.options.batch_size
        return rows._replace(first=rows.first + ahead, index=rows.index + ahead)

    def batch_rows(self, feed: Feed) -> tf.Tensor:
        """The number of rows of the global batch: int64 [].

        If each worker reads a part of its own, this is the size of a whole batch: a worker doesn't know how many rows
        the others have.
        """
        return count(feed[-1]) if self.layout is None else tf.constant(self._batch_size, tf.int64)

    def row_counts(self, replicas: int, parts: int = 1) -> RowCounts:
        """The numbers of rows that each of so many replicas gets of a micro-batch."""
        size = int(self.dataset.cardinality())  # negative: not known, or endless
        remainder = size % self._batch_size if size >= 0 else None
        if self.options.drop_remainder or self.endless:
            remainder = 0
        return row_counts(self._batch_size, remainder, replicas, parts)

    def leaves_some_without(self, parts: int) -> bool:
        """True: the batch after the end of each epoch is empty."""
        return True

    def replica_rows(self, feed: Feed, replica: tf.Tensor | int, part: tf.Tensor | int = 0, parts: int = 1) -> Rows:
        """The rows of a replica in micro-batch `part` of `parts` of its worker's batch."""
        epoch, step, batch = feed
        start = tf.constant(0, tf.int64)
        stop = count(batch)
        if parts > 1:
            start, stop = part_bounds(stop, part, parts)
        # `replica` counts the replicas of all workers; this batch is shared by those from `_first` on.
        first, end = part_bounds(stop - start, tf.cast(replica, tf.int64) - self._first, self._replicas)
        low = start + first
        high = start + end
        # If each worker reads a part of its own, its rows come after those of the workers of lower rank.
        ahead = self._first // self._replicas * self.options.batch_size
        index = step * self._batch_size + ahead + tf.range(low, high)
        own = tf.nest.map_structure(lambda tensor: tensor[low:high], batch)
        return Rows(own, first + ahead, epoch, step * parts + part, index)

    @property
    def batch_spec(self) -> Any:
        """The `tf.TensorSpec`s of a batch, in its structure."""
        return self._batches.element_spec


def _read_to_end(batches: Iterator[Batch], stopped: Callable[[], bool]) -> bool:
    """Reads batches up to their end; False: up to where the run is to end."""
    while not stopped():
        if next(batches, None) is None:
            return True
    return False


def batches(
    dataset: tf.data.Dataset,
    padded: PaddedBatches | None,
    size: int,
    drop_remainder: bool = False,
    bucketed: bool = True,
) -> tf.data.Dataset:
    """A stream in batches of `size`."""
    if padded is None:
        return dataset.batch(size, drop_remainder=drop_remainder)
    return padded.of(size, drop_remainder, bucketed)


def no_rows(specs: Any) -> Batch:
    """A batch without rows, from the `tf.TensorSpec`s of a batch."""

    def empty(spec: tf.TensorSpec) -> tf.Tensor:
        sizes = [size or 0 for size in spec.shape[1:]]  # an open axis may have any size: no row has it
        return tf.zeros([0, *sizes], spec.dtype)

    return tf.nest.map_structure(empty, specs)


def check_policy(dataset: tf.data.Dataset, batch_size: int, backend: Backend, policy: str) -> None:
    """Refuses a policy of sharing a stream out that would use an example twice, or not at all.

    Raises:
        UsageError: the reason, and what to use instead.
    """
    if policy == "example":
        if backend.workers > 1 and not one_order(dataset):
            raise UsageError(
                "the data set says that its order doesn't matter (deterministic=False): each of "
                f"{backend.workers} workers would read another one, so that some examples are used twice and others "
                'not at all; leave that out, or use ShardData("file")'
            )
        return
    # The number of workers of an elastic job changes while it runs.
    if backend.member:
        raise UsageError(
            f"ShardData({policy!r}) in an elastic job: a position in such a stream means something else with other "
            'workers; use ShardData("example"), or ArrayData'
        )
    if batch_size % backend.workers:
        raise UsageError(
            f"ShardData({policy!r}): batch_size={batch_size} can't be divided over {backend.workers} "
            f"workers: give a multiple of {backend.workers}"
        )
