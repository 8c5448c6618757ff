"""Reading ahead with a map that is a `tf.function`: tf.data runs it, on examples in the order of the batches."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from loop.data.batch import EVALUATION_EPOCH
from loop.data.batch_layout import BatchLayout, tensor_dtype
from loop.data.example_parts import structure_of
from loop.data.examples import (
    ArraySpec,
    BadExampleError,
    ExampleReader,
    example_seeds,
    named_parts,
    names_of,
    specs_of,
    stacked,
)
from loop.data.indexed import IndexedData
from loop.data.pending_batches import PendingBatches, Position
from loop.launch.machine import usable_cpus

_KEPT = 3
"""How many batches are kept: a graph may ask for one again, and for neighbors in any order."""

_MOST_STEPS = 1 << 62
"""More than any run makes."""

_NOWHERE = Position(-_MOST_STEPS, 0)
"""A position before all batches, and so far from them that none counts as read ahead of it."""


class GraphReadAhead:
    """Batches, in order, whose examples tf.data maps before they are asked for: on all cores, without Python.

    An error of tf.data names no example. So after any error `ReadAhead` takes over, and finds the example.

    `rows` returns the indices of a worker's rows of the global batch at a position: int64 [n]; `depth` is the number of
    batches that are read before they are asked for.

    Attributes:
        unlike: whether the source has given an example of another shape or dtype, which can't be stacked.
    """

    def __init__(
        self,
        data: IndexedData,
        layout: BatchLayout,
        seed: int,
        rows: Callable[[Position], np.ndarray],
        steps_per_epoch: int,
        depth: int,
    ) -> None:
        self._data = data
        self._layout = layout
        self._seed = seed
        self._rows = rows
        self._steps_per_epoch = steps_per_epoch
        self._depth = depth
        self.unlike = False
        self._lock = threading.Lock()
        self._begun = _NOWHERE
        self._taken = 0
        self._mapped: Iterator[list[tf.Tensor]] = iter(())
        self._rest: list[tf.Tensor] = []
        self._kept: deque[PendingBatches] = deque(maxlen=_KEPT)

    def get(self, position: Position) -> PendingBatches:
        """The batch at a position, filled; see `ReadAhead.get`.

        Raises:
            tf.errors.OpError: an example can't be read or mapped, or is unlike the first one.
        """
        # The lock is held while tf.data computes: batches come in one order, whichever thread takes the next one.
        with self._lock, tf.device("CPU:0"):
            for batch in self._kept:
                if batch.first == position:
                    return batch

            # A position that is neither kept nor about to come, as after a resume or in an evaluation: begin anew.
            if position not in map(self._after, range(self._depth + 1)):
                rows = self._rows(position)
                if not len(rows):  # a worker may have no rows of a short batch
                    return self._filled_by(position, rows)
                self._begun = position
                self._taken = 0
                self._rest = []
                self._mapped = self._mapped_from(position)

            # Batches before the one that is asked for are kept, too: another operation may ask for them later.
            while True:
                following = self._after(0)
                batch = self._filled(following)
                self._taken += 1
                self._kept.append(batch)
                if following == position:
                    return batch

    def close(self) -> None:
        """Ends the reading."""
        with self._lock:
            self._begun = _NOWHERE
            self._mapped = iter(())
            self._kept.clear()

    def _after(self, steps: int) -> Position:
        """The position this many steps after the one that is filled next."""
        return self._begun.after(self._taken + steps, self._steps_per_epoch)

    def _filled(self, position: Position) -> PendingBatches:
        """The batch at a position, from the examples that come next."""
        rows = self._rows(position)

        # A wide batch must be copied, into arrays of 64 bits. Without rows nothing is read: there may be no more.
        if len(rows) and not self._rest and not self._layout.wide:
            self._rest = list(next(self._mapped))
            if len(self._rest[0]) == len(rows):  # as it nearly always is: the tensors are the batch
                tensors, self._rest = self._rest, []
                return PendingBatches(position, rows.copy(), tensors)
        return self._filled_by(position, rows)

    def _filled_by(self, position: Position, rows: np.ndarray) -> PendingBatches:
        """A batch of some rows, copied from the examples that come next."""
        # The blocks of tf.data have one number of rows, and a worker's batches may differ by a row: what is left of a
        # block begins the next batch.
        batch = PendingBatches(position, rows.copy(), self._layout.new(len(rows)))
        filled = 0
        while filled < len(rows):
            if not self._rest:
                self._rest = list(next(self._mapped))
            count = min(len(rows) - filled, len(self._rest[0]))
            for leaf, examples in zip(batch.leaves, self._rest, strict=True):
                leaf[filled : filled + count] = examples[:count]
            left = [examples[count:] for examples in self._rest]
            self._rest = left if len(left[0]) else []
            filled += count
        return batch

    def _mapped_from(self, begin: Position) -> Iterator[list[tf.Tensor]]:
        """The arrays of the mapped examples from a position on, some examples at once."""
        reader = self._data.reader
        assert isinstance(reader, ExampleReader)  # a mixture isn't mapped in a graph

        # What the source gives, before the map: its types must be known to the graph.
        [example] = reader.unmapped(self._examples(begin)[0][:1])
        structure = structure_of(example)
        specs = specs_of(example, 0)

        # A weak reference, for the reason that `IndexedSource._of_python` gives.
        held = weakref.ref(self)

        def read(number: np.ndarray) -> list[np.ndarray]:
            ahead = held()
            assert ahead is not None
            return ahead._stacked(begin.after(int(number), ahead._steps_per_epoch), specs)

        def examples_of(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
            dtypes = [tensor_dtype(spec.dtype) for spec in specs]
            seeds, *columns = tf.numpy_function(read, [number], [tf.int64, *dtypes])
            seeds.set_shape([None, 2])  # what Python returns has no static shape
            for spec, column in zip(specs, columns, strict=True):
                column.set_shape([None, *spec.shape])
            return seeds, *columns

        def mapped(seed: tf.Tensor, *parts: tf.Tensor) -> tuple[tf.Tensor, ...]:
            made = reader.mapped(tf.nest.pack_sequence_as(structure, parts), seed)
            return self._checked(made)

        # An evaluation ends with its epoch; training goes on into the next one.
        threads = usable_cpus()
        steps = self._steps_per_epoch - begin.step if begin.epoch == EVALUATION_EPOCH else _MOST_STEPS

        # Read by batches, which a source may do at once, and mapped one by one, which spreads them over the cores.
        batches = tf.data.Dataset.range(steps).map(examples_of, num_parallel_calls=threads)
        examples = batches.unbatch().map(mapped, num_parallel_calls=tf.data.AUTOTUNE)
        rows = max(1, len(self._rows(begin)))  # a worker may have none of a batch
        options = tf.data.Options()
        # The source may run graphs of its own: they need the threads that TensorFlow has for all.
        options.threading.private_threadpool_size = 2 * threads
        return iter(examples.batch(rows).prefetch(self._depth).with_options(options))

    def _stacked(self, position: Position, specs: list[ArraySpec]) -> list[np.ndarray]:
        """The seeds of the examples of a batch, and their arrays as the source gives them, stacked."""
        assert isinstance(self._data.reader, ExampleReader)
        ids, seeds = self._examples(position)
        examples = self._data.reader.unmapped(ids)
        try:
            return [seeds, *stacked(examples, specs)]
        except BadExampleError:
            self.unlike = True
            raise

    def _examples(self, position: Position) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the examples of a batch, int64 [n], and their seeds, int64 [n, 2]."""
        rows = self._rows(position)
        ids = self._data.resolve(rows, position.epoch, self._seed)
        return ids, example_seeds(rows, position.epoch, self._seed)

    def _checked(self, made: object) -> tuple[tf.Tensor, ...]:
        """The arrays of a mapped example, in a graph. A ValueError if they are unlike those of the first example."""
        names, parts = named_parts(made)
        if names != names_of(self._layout.specs):
            raise ValueError("other arrays than those of the first example")
        tensors = []
        for spec, part in zip(self._layout.specs, parts, strict=True):
            tensor = tf.convert_to_tensor(part)
            if tensor.dtype != tensor_dtype(spec.dtype):
                raise ValueError(f"{spec.label}dtype {tensor.dtype.name} instead of {spec.dtype}")
            tensors.append(tf.ensure_shape(tensor, spec.shape))
        return tuple(tensors)
