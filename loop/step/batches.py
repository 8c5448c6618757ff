"""The batches of a compiled call, each read while the step before it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from loop.data import ArraySource, DataIterator, IndexedSource, PaddedArraySource, ReadBatch, Source
from loop.monitor.phase_marker import COMPUTE, DATA, PhaseMarker
from loop.step.tracing import repeated

State: TypeAlias = Any
"""What steps compute: tensors in any structure."""
Following: TypeAlias = Any
"""What was read ahead: the batch of the next step; several batches, if the host reads them; (), if it is a stream."""
More: TypeAlias = Callable[[tf.Tensor, State], tf.Tensor]
"""Takes the step within the epoch and the state; returns whether there is another step: bool []."""
Step: TypeAlias = Callable[[tf.Tensor, ReadBatch, State], State]
"""Makes a step: takes the step within the epoch, what was read for it and the state, and returns the new state."""
Body: TypeAlias = Callable[[tf.Tensor, Following, State], tuple[tf.Tensor, Following, State]]
"""An iteration of the loop: from the next step, what was read ahead for it and the state, to the same after it."""


class Batches:
    """The batches of an epoch, in order, for a loop of the graph.

    Nothing in a step depends on the next batch, so TensorFlow reads it while the step is computed.

    Args:
        source: the data.
        iterator: what the `start` of the source returned.
        epoch: the epoch, int64 [].
        end: the step within the epoch before which the call ends at the latest, int64 [].
        marker: marks in the graph where a step waits for data, and where it computes.
        parts: the number of micro-batches.
    """

    def __init__(
        self,
        source: Source,
        iterator: DataIterator,
        epoch: tf.Tensor,
        end: tf.Tensor,
        marker: PhaseMarker,
        parts: int = 1,
    ) -> None:
        self._source = source
        self._iterator = iterator
        self._epoch = epoch
        self._end = end
        self._marker = marker
        self._parts = parts

    def first(self, step: tf.Tensor) -> Following:
        """What is read before the first step."""
        if isinstance(self._source, IndexedSource):
            return self._source.read_from(self._epoch, step, self._parts)
        if isinstance(self._source, PaddedArraySource):
            upcoming = self._source.read_from(self._epoch, step, self._end, self._parts)
            return upcoming, self._source.batch_at(upcoming, step)
        if isinstance(self._source, ArraySource):
            return self._source.read_batch(self._iterator, self._epoch, step, self._parts)
        return ()

    def each(
        self, more: More, make: Step, step: tf.Tensor, following: Following, state: State
    ) -> tuple[tf.Tensor, Following, State]:
        """Makes steps, one batch after the other.

        Args:
            more: whether there is another step.
            make: makes a step.
            step: the first step within the epoch, int64 [].
            following: what was read ahead for it.
            state: the state before it.

        Returns:
            The step after the last one, what was read ahead for it, and the state.
        """
        if isinstance(self._source, IndexedSource):
            body = self._from_host(self._source, more, make)
        elif isinstance(self._source, PaddedArraySource):
            body = self._looked_up(self._source, more, make)
        else:
            body = self._one_by_one(make)
        made: tuple[tf.Tensor, Following, State] = repeated(
            lambda step, following, state: more(step, state), body, step, following, state
        )
        return made

    def _one_by_one(self, make: Step) -> Body:
        """Makes one step in each iteration."""

        def body(step: tf.Tensor, following: Following, state: State) -> tuple[tf.Tensor, Following, State]:
            # Arrays: this batch is there already, and the next one is read now. One too many at the end does no harm.
            if isinstance(self._source, ArraySource):
                read = following
                following = self._source.read_batch(self._iterator, self._epoch, step + 1, self._parts)
            else:
                # A stream would lose a batch that is read too early. Its pipeline reads ahead by itself.
                with tf.control_dependencies(self._marker.at(DATA)):
                    read = self._source.read_batch(self._iterator, self._epoch, step)
            self._marker.at(COMPUTE, read)
            return step + 1, following, make(step, read, state)

        return body

    def _looked_up(self, source: PaddedArraySource, more: More, make: Step) -> Body:
        """Makes the steps of several batches in each iteration, whose examples are looked up together."""

        # The outer loop looks up the next batches; the inner loop makes steps while they last.
        def body(step: tf.Tensor, following: Following, state: State) -> tuple[tf.Tensor, Following, State]:
            upcoming, read = following
            with tf.device("CPU:0"):  # else TensorFlow would put what a branch returns on a GPU
                upcoming = tf.cond(
                    step + 1 < upcoming.end,
                    lambda: upcoming,
                    lambda: source.read_from(self._epoch, step + 1, self._end, self._parts),
                )

            def one(step: tf.Tensor, read: ReadBatch, state: State) -> tuple[tf.Tensor, ReadBatch, State]:
                # This batch is there already, and the next one is read now. One too many at the end does no harm.
                following = source.batch_at(upcoming, step + 1)
                self._marker.at(COMPUTE, read)
                return step + 1, following, make(step, read, state)

            step, read, state = repeated(
                lambda step, read, state: (step + 1 < upcoming.end) & more(step, state), one, step, read, state
            )
            return step, (upcoming, read), state

        return body

    def _from_host(self, source: IndexedSource, more: More, make: Step) -> Body:
        """Makes the steps of the batches that the host has handed over at once, in each iteration."""

        # The outer loop asks for the next batches; the inner loop makes the steps of those that are held.
        def body(step: tf.Tensor, held: Following, state: State) -> tuple[tf.Tensor, Following, State]:
            with tf.device("CPU:0"):  # else TensorFlow would put what a branch returns on a GPU
                # Not after the last step: the next call would ask for the same batches once more.
                following = tf.cond(
                    more(held.end, state), lambda: source.read_from(self._epoch, held.end, self._parts), lambda: held
                )

            def one(step: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
                read = source.batch_at(held, step)
                self._marker.at(COMPUTE, read)
                return step + 1, make(step, read, state)

            step, state = repeated(lambda step, state: (step < held.end) & more(step, state), one, step, state)
            with tf.device("CPU:0"):
                # If the call ends before all held batches are used, they still have the next batch.
                rest = tf.cond(step < held.end, lambda: held, lambda: following)
            return step, rest, state

        return body
