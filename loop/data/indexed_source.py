"""`IndexedData` in a certain order: a graph asks the host for batches by their position."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from loop.data.array_source import ArraySource
from loop.data.batch import BatchOptions, ReadBatch, Rows
from loop.data.batch_filler import BatchFiller
from loop.data.batch_layout import BatchLayout, HandedOver
from loop.data.example_parts import Example, Part, flatten
from loop.data.examples import BadExampleError, as_array, example_seeds, leaves_of, specs_of, unusable
from loop.data.host_reader import HostReader
from loop.data.indexed import IndexedData
from loop.data.padding import lengthened
from loop.data.pending_batches import Position
from loop.data.row_shares import RowShares
from loop.errors import UsageError

Fetch = Callable[..., list[Any]]
"""A function of the host that returns arrays from a `HostReader` and a position."""

_TRIED = 64
"""The number of examples, from the first one on, among which one is looked for that says what all are like."""


class IndexedSource(ArraySource):
    """`IndexedData` in a certain order.

    Which examples are in a global batch is what `ArraySource` says, and a position is all it takes to read one.
    """

    on_host = True

    def __init__(self, data: IndexedData, options: BatchOptions) -> None:
        super().__init__(data, options)  # calls `_open`, which makes the layout, and `head`, which reads more examples
        if self.size > 1:  # by itself: what reads several at once may write another example in the place of the first
            data.reader.read(
                data.resolve(np.array([1]), 0, options.seed), example_seeds(np.array([1]), 0, options.seed)
            )
        _check_unchanged(self._first)
        del self._first
        self.leaves_out = data.skips
        self.endless = self.size == sys.maxsize  # Grain's length of a data set that repeats without an end
        self.uniform = not (self._layout.padded or data.skips)

    def _open(self, data: IndexedData) -> int:
        self.data = data
        # The first example says what all others are like.
        index, first, seeds = _first_example(data, self.options.seed)
        if data.calls_user:
            _warn_of_draws(data, index, first, seeds)
        self._first = _parts_and_copies(first)
        self._layout = BatchLayout(data, first, index)
        self._reader = HostReader(data, self.options, self._layout, self.steps_per_epoch or 0)
        return self._layout.example_bytes * self.size

    def head(self, count: int) -> Any:
        index = np.arange(min(count, self.size), dtype=np.int64)
        batch = self._reader.empty_batch(index)
        # Read here: processes take seconds to start.
        filler = BatchFiller(self.data.replaced(readers=0), self._layout, self.options.seed)
        filler.fill(batch, slice(0, len(index)), 0)
        with tf.device("CPU:0"):
            tensors = list(map(tf.convert_to_tensor, self._layout.handed_over(batch)))
            held = self._layout.from_host(tensors)
            return self._layout.batch_at(held, tf.constant(0, tf.int64))[1]

    def longer_example(self) -> Any:
        return lengthened(self.example, self._layout.batch_spec()) if self._layout.padded else None

    def take_failure(self) -> BaseException | None:
        """Why the last batch could not be read, once: TensorFlow wraps it in a text of its own."""
        return self._reader.take_failure()

    def close(self) -> None:
        """Ends the threads and processes that read ahead. A batch that is asked for later starts new ones."""
        self._reader.close()

    def read_batch(self, iterator: tuple[()], epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> ReadBatch:
        return self.batch_at(self.read_from(epoch, step, parts), step)

    def read_from(self, epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> HandedOver:
        """Reads a batch, and where that is fast, others around it; see `batch_at`, and `read_batch` for the arguments.

        A loop over steps reads them with `batch_at`, and asks again at their end.
        """
        fetch = functools.partial(_fetch, self._layout, self._shares, parts)
        poll = functools.partial(_poll, self._layout, self._shares, parts)
        with tf.device("CPU:0"):
            tensors = self._from_host(fetch, self._layout.handed_over_specs(), epoch, step, poll)
            return self._layout.from_host(tensors)

    def batch_at(self, handed_over: HandedOver, step: tf.Tensor) -> ReadBatch:
        """The batch at a step of the epoch, out of those that were handed over; see `read_batch`."""
        with tf.device("CPU:0"):
            batch = self._layout.batch_at(handed_over, step)
        return self._copied(batch)

    def read_batches(self, epoch: tf.Tensor, step: tf.Tensor, steps: int) -> Any:
        specs = [tf.TensorSpec([None], tf.int64), *self._layout.tensor_specs()]
        shape = [steps, self.options.batch_size]
        fetch = functools.partial(_fetch_block, self._shares, self.options.batch_size, steps)
        with tf.device("CPU:0"):
            read = self._from_host(fetch, specs, epoch, step)
            index, *arrays = [tf.reshape(tensor, shape + tensor.shape[1:]) for tensor in read]
        return self._copied((index, self._layout.pack(arrays)))

    def _from_host(
        self, fetch: Fetch, specs: list[tf.TensorSpec], epoch: tf.Tensor, step: tf.Tensor, poll: Fetch | None = None
    ) -> list[tf.Tensor]:
        """The arrays that a function of the host reads.

        Args:
            fetch: returns them from epoch and step.
            specs: the specs of these arrays.
            epoch: the epoch: int64.
            step: the step in it: int64.
            poll: returns whether the arrays are there already, and then the arrays; None: never asked.
        """
        dtypes = [spec.dtype for spec in specs]
        position = [epoch, step]

        def call(epoch: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
            if self.data.maps_in_graph:
                # It hands tensors over without a copy.
                return tf.py_function(self._of_python(fetch), [epoch, step], dtypes)
            # Not stateful, so that it isn't put in order with other operations; see `_of_python`.
            return tf.numpy_function(self._of_python(fetch), [epoch, step], dtypes, stateful=False)

        # Code of the user may run graphs: see `_in_thread_of_its_own`. Polling first spares that for batches that are
        # there already.
        if not self.data.calls_user or tf.executing_eagerly():
            tensors = call(epoch, step)
        elif self.data.maps_in_graph or poll is None:
            tensors = _in_thread_of_its_own(call, position, specs)
        else:
            ready, *there = tf.numpy_function(self._of_python(poll), position, [tf.bool, *dtypes], stateful=False)
            ready.set_shape([])
            tensors = tf.cond(ready, lambda: there, lambda: _in_thread_of_its_own(call, position, specs))
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return list(tensors)

    def leaves_some_without(self, parts: int) -> bool:
        return self.data.skips or super().leaves_some_without(parts)

    def replica_rows(self, feed: Any, replica: Any, part: Any = 0, parts: int = 1) -> Rows:
        rows = super().replica_rows(feed, replica, part, parts)
        return rows.without_skipped() if self.data.skips else rows

    def _of_python(self, fetch: Fetch) -> Fetch:
        """A function that is Python's, and isn't to be made a graph. What it returns depends on the position alone."""
        # TensorFlow keeps the Python functions of a graph until the process ends. With a weak reference, examples are
        # freed when the run has ended. Until then, this source holds the reader.
        held = weakref.ref(self._reader)

        def call(epoch: np.ndarray, step: np.ndarray) -> list[Any]:
            reader = held()
            assert reader is not None
            return fetch(reader, Position(int(epoch), int(step)))

        made: Fetch = tf.autograph.experimental.do_not_convert(call)
        return made


def _fetch(
    layout: BatchLayout, shares: RowShares, parts: int, reader: HostReader, position: Position
) -> list[np.ndarray]:
    """On the host: the worker's rows of a global batch and of others around it, as they are handed over."""
    return layout.handed_over(reader.batches(shares, parts, position))


def _poll(layout: BatchLayout, shares: RowShares, parts: int, reader: HostReader, position: Position) -> list[Any]:
    """On the host: whether the worker's rows of a global batch are there; and if so, see `_fetch`."""
    batches = reader.batches_if_ready(shares, parts, position)
    # The graph needs tensors of the right types in any case, though it doesn't use them if the batch isn't there.
    there = reader.nothing(position) if batches is None else batches
    return [batches is not None, *layout.handed_over(there)]


def _fetch_block(
    shares: RowShares, batch_size: int, steps: int, reader: HostReader, first: Position
) -> list[np.ndarray]:
    """On the host: the rows of whole batches, one after the other; rows past the end of the data are undefined."""
    read = []
    for number in range(steps):
        # The reader may have other batches around it, of which only this one's rows are taken.
        position = first._replace(step=first.step + number)
        batches = reader.batches(shares, 1, position)
        rows = batches.rows_at(position)
        arrays_of_batches = [batches.index, *batches.leaves]
        read.append([array[rows] for array in arrays_of_batches])

    # Filled up at the end of the data: the graph gives a block the shape [steps, batch size, ...].
    rows_of_block = steps * batch_size
    blocks = []
    for arrays in zip(*read, strict=True):
        joined = np.concatenate(arrays)
        if len(joined) < rows_of_block:
            joined = np.pad(joined, [(0, rows_of_block - len(joined))] + [(0, 0)] * (joined.ndim - 1))
        blocks.append(joined)
    return blocks


def _first_example(data: IndexedData, seed: int) -> tuple[int, Example, np.ndarray]:
    """The number in the source of the first example of epoch 0, the example, and its seeds: int64 [1, 2].

    Where bad examples are left out, it is the first of a few that can be read; where arrays are padded, the first of a
    few that says what all are like.

    Raises:
        TrainingError: it can't be read; of several, why the first one can't.
    """
    tried = _TRIED if data.skips or data.padding is not None else 1
    indices = np.arange(min(tried, data.size), dtype=np.int64)
    seeds = example_seeds(indices, 0, seed)
    failures = []
    vague = []
    for row, index in enumerate(data.resolve(indices, 0, seed).tolist()):
        own_seeds = seeds[row : row + 1]
        try:
            [first] = data.reader.read(np.array([index]), own_seeds)
            if not isinstance(first, Exception):
                specs_of(first, index)  # which refuses what isn't an array, such as a null of a table
                if data.padding is None or not _has_empty_list(first):
                    return index, first, own_seeds
                vague.append((index, first, own_seeds))
                continue
        except Exception as error:
            first = error
        failures.append(unusable(index, first))
        if not data.skips:
            break
    if vague:
        return vague[0]
    raise failures[0]


def _has_empty_list(example: Example) -> bool:
    """Whether a part of an example is a list without elements, whose dtype and shape NumPy makes up."""
    return any(isinstance(part, list) and not part for _, part in flatten(example))


def _warn_of_draws(data: IndexedData, index: int, example: Example, seeds: np.ndarray) -> None:
    """Warns if an example is another one when it is read again: which draws it gets depends on threads and replicas.

    Args:
        data: the data.
        index: the number of the example in the source.
        example: what was read first.
        seeds: its seeds: int64 [1, 2].
    """
    specs = specs_of(example, index)
    [again] = data.reader.read(np.array([index]), seeds)
    if isinstance(again, Exception):
        return  # training tells of it, or leaves it out
    try:
        pairs = zip(leaves_of(example, specs, index), leaves_of(again, specs, index), strict=True)
        # Texts are objects, whose bytes are those of their addresses.
        if all(one.tobytes() == other.tobytes() or one.tolist() == other.tolist() for one, other in pairs):
            return
    except BadExampleError:  # such as another shape
        pass
    warnings.warn(
        f"IndexedData: example {index} has other values when it is read again, so that a resumed run, or one on other "
        "replicas, has other numbers: draw random numbers in a map(example, seed), from its seed",
        stacklevel=2,
    )


def _parts_and_copies(example: Example) -> list[tuple[Part, np.ndarray]]:
    """The parts of an example that are numbers, each with a copy."""
    pairs = []
    for _, part in flatten(example):
        array = as_array(part)
        if not array.dtype.hasobject:
            pairs.append((part, array.copy()))
    return pairs


def _check_unchanged(parts: list[tuple[Part, np.ndarray]]) -> None:
    """Refuses examples that change when others are read: a batch would have the last one in place of each."""
    for part, copied in parts:
        # Unlike numbers, the bytes of a NaN are equal to themselves.
        if as_array(part).tobytes() != copied.tobytes():
            raise UsageError(
                "IndexedData: the arrays of example 0 have changed while others were read: return new arrays for each "
                "example, as by array.copy(), and let map change none in place"
            )


def _in_thread_of_its_own(
    call: Callable[..., list[tf.Tensor]], position: list[tf.Tensor], specs: list[tf.TensorSpec]
) -> list[tf.Tensor]:
    """The tensors of a call that waits for code of the user, in a graph.

    A graph's operations share a few threads, one for each core, and a call of Python holds one of them while it waits.
    Where all of them wait, a `tf.function` that the user's code calls never runs, and both wait forever. An operation
    of tf.data waits in a thread of its own instead, which takes about 0.1 ms more.

    Args:
        call: returns the tensors from a position.
        position: epoch and step: int64 [] each.
        specs: of the tensors.
    """
    scalar = tf.TensorSpec([], tf.int64)
    # Raw operations, since `tf.data.Dataset.map` doesn't let `use_inter_op_parallelism` be set.
    dtypes = [spec.dtype for spec in specs]
    shapes = [spec.shape for spec in specs]
    outputs = {"output_types": dtypes, "output_shapes": shapes}
    positions = tf.raw_ops.TensorDataset(components=position, output_shapes=[scalar.shape, scalar.shape])
    called = tf.raw_ops.MapDataset(
        input_dataset=positions,
        other_arguments=[],
        f=tf.function(call, input_signature=[scalar, scalar]).get_concrete_function(),
        use_inter_op_parallelism=False,
        preserve_cardinality=True,
        **outputs,
    )
    return list(tf.raw_ops.DatasetToSingleElement(dataset=called, **outputs))
