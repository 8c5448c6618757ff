"""The compiled evaluation: computes the values of all evaluation examples, each exactly once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from loop.backends.base import PerReplica
from loop.data import EVALUATION_EPOCH, DataIterator, Feed, ReadBatch, Rows, Source, StreamSource, count
from loop.errors import UsageError
from loop.model.precision import keras_precision
from loop.monitor.phase_marker import ALL_REDUCE, HOST
from loop.step.batches import Batches
from loop.step.context import StepContext
from loop.step.metric_sums import MetricSums
from loop.step.own_state import OwnState
from loop.step.totals import EvaluationLayout
from loop.step.tracing import as_written, compiled
from loop.step.values import rows_of
from loop.task import Batch, Values


class Evaluation:
    """The compiled evaluation of the model that a `TrainStep` trains.

    Args:
        context: what all traces share.
        source: the evaluation data.
        average_statistics: gives all replicas the mean of their statistics.
        prefix: what the names of the metrics begin with.

    Attributes:
        source: the evaluation data.
    """

    def __init__(
        self, context: StepContext, source: Source, average_statistics: Callable[[], None], prefix: str
    ) -> None:
        self._context = context
        self._backend = context.backend
        self._marker = context.marker
        self.source = source
        self._average_statistics = average_statistics
        self._prefix = prefix
        if not context.built.values:
            raise UsageError(
                f"{type(context.task).__name__} has eval_data(), but no compute(): define it, and return what is to be "
                "evaluated; or use eval_every='never'"
            )
        self._fill_up_to = self._rows_to_fill(context.built.fixed_rows)
        self._own_state = OwnState(context.built.model, context.backend)
        self._values = MetricSums(context.built.values, context.built.metrics)
        self._layout = EvaluationLayout(self._values)
        self._compile()

    def _rows_to_fill(self, rows: int | None) -> int | None:
        """The number of rows that short batches are filled up to; None: no batch has to be filled up.

        Args:
            rows: the number of rows that a batch must have; None: any number.
        """
        if rows is None:
            return None
        counts = self.source.row_counts(self._backend.replicas)
        if counts.whole[-1] > rows:
            raise UsageError(
                f"the model takes batches of {rows} rows alone, but in an evaluation each replica gets "
                f"{counts.whole[-1]} of batch_size={counts.batch_size}: leave accumulate out, with batch_size={rows} "
                "for each replica; or use eval_every='never'"
            )
        return rows if {*counts.whole, *counts.short} != {rows} else None

    def _compile(self) -> None:
        self._evaluate = compiled(keras_precision(self._context.plan.precision)(self._steps))

    def whole(self) -> np.ndarray:
        """The totals of the whole evaluation data; see `EvaluationLayout`."""
        iterator = self.start()
        totals = np.zeros(())
        step: int | None = 0
        while step is not None:
            step, added = self.steps(iterator, step, np.iinfo(np.int64).max)
            totals = totals + added
        return totals

    def start(self) -> DataIterator:
        """Returns the iterator of the evaluation data, at its start. All workers must call it."""
        self._own_state.begin()
        # Before the first batch: replicas that gather statistics of their own would evaluate different models.
        self._average_statistics()
        return self.source.start(0, 0)

    def steps(self, iterator: DataIterator, step: int, steps: int) -> tuple[int | None, np.ndarray]:
        """Evaluates up to `steps` batches, from the one at `step` on, in one compiled call.

        Returns:
            The step to go on from, None at the end; and the totals of these batches.
        """
        # The length of a stream isn't known.
        left = (self.source.steps_per_epoch or np.iinfo(np.int64).max) - step
        steps = min(steps, left)
        # The training must not depend on how often it is evaluated. The state is exchanged at each call, and not once
        # for the evaluation: a run that is resumed from a checkpoint between two calls repeats the evaluation.
        with self._context.averages.in_place(), self._own_state.in_place():
            parts = self._context.computing.call(
                lambda: self._evaluate, iterator, EVALUATION_EPOCH, step, steps, self._compile
            )
        vectors = [vector for _, vector in parts]
        going, totals = self._layout.split_more(np.sum(vectors, 0))
        return step + steps if going and steps < left else None, totals

    def means(self, totals: np.ndarray) -> dict[str, float]:
        """The means and metrics of totals, named `eval_...`, or `eval_<set>_...` if there are several sets."""
        sums, states = self._layout.unpacked(totals)
        means = self._values.means(sums, states)
        return {f"{self._prefix}{name}": value for name, value in means.items()}

    def metric_names(self) -> list[str]:
        """The names that `means` returns."""
        return list(self.means(self._layout.nothing()))

    def _steps(self, iterator: DataIterator, epoch: tf.Tensor, step: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """Computes up to `steps` batches; returns their totals, and whether any worker has more."""
        source = self.source
        backend = self._backend
        marker = self._marker
        totals = backend.run(lambda: tf.zeros([self._layout.width], tf.float64))
        end = step + steps

        # The state of the loop: whether there is more data, and the totals of each replica.
        def more(step: tf.Tensor, state: tuple[tf.Tensor, PerReplica]) -> tf.Tensor:
            return (step < end) & state[0]

        def evaluate(
            step: tf.Tensor, read: ReadBatch, state: tuple[tf.Tensor, PerReplica]
        ) -> tuple[tf.Tensor, PerReplica]:
            totals = backend.run(self._add_batch, state[1], (epoch, step, read))
            return self._more(read), totals

        batches = Batches(source, iterator, epoch, end, marker)
        first = batches.first(step)
        _, _, (going, totals) = batches.each(more, evaluate, step, first, (tf.constant(True), totals))

        # One collective for the whole call: batches are added up in each replica, and replicas only here.
        def summed(totals: tf.Tensor) -> tf.Tensor:
            return backend.all_reduce([self._layout.with_more(totals, going)])[0]

        marker.at(ALL_REDUCE, backend.first(totals))
        packed = backend.first(backend.run(summed, totals))
        marker.lap(HOST, packed)
        self._own_state.note_changes()
        return packed

    def _add_batch(self, totals: tf.Tensor, feed: Feed) -> tf.Tensor:
        """In each replica: adds the totals of its rows of a batch."""
        source = self.source
        rows = source.replica_rows(feed, self._backend.replica())
        # Out here, since a replica without rows must enter the collective, too.
        batch_rows = self._batch_rows(feed) if self._context.plan.summed_loss else None
        return totals + self._context.computing.of_rows(
            source,
            rows,
            1,
            lambda stand_in: self._of_rows(rows, stand_in, batch_rows),
            lambda: tf.zeros([self._layout.width], tf.float64),
        )

    def _batch_rows(self, feed: Feed) -> tf.Tensor:
        """In each replica: the number of rows of the global batch, int64 []."""
        # Where each worker reads a stream of its own, one of them may have more batches, so there is no collective.
        source = self.source
        return self._context.computing.batch_rows(source, feed) if source.layout is None else source.batch_rows(feed)

    def _of_rows(self, rows: Rows, stand_in: Batch | None, batch_rows: tf.Tensor | None) -> tf.Tensor:
        """In each replica: the totals of its rows. For a summed loss, `batch_rows` are those of the global batch."""
        task = self._context.task
        plan = self._context.plan
        with self._context.computing.replica(self.source, rows, stand_in, 1) as replica:
            if self._fill_up_to is not None:
                replica.fill_up(self._fill_up_to)
            values = as_written(task.compute)(self._context.built.model, replica.batch, training=False)
            if self._fill_up_to is not None:
                # At least one row: that of a stand-in, where the replica has none.
                values = self._without_filling(values, tf.maximum(count(rows.batch), 1))
            loss, sums = self._values.sums(values, plan.dtype)
            if batch_rows is not None:  # the mean over batches weighs each batch by its rows, as in training
                sums[:2] = [loss * tf.cast(batch_rows, plan.dtype), tf.cast(count(rows.batch), plan.dtype)]
            counted = tf.concat([tf.cast(tf.stack(sums), tf.float64), self._values.states(values)], 0)
            if replica.counts_something is not None:
                counted = tf.where(replica.counts_something, counted, 0)
        return self._layout.of_replica(count(rows.batch), counted)

    def _without_filling(self, values: Values, n: tf.Tensor) -> Values:
        """The values of the first n rows. The other rows only fill the batch up."""

        def own(value: tf.types.experimental.TensorLike) -> tf.Tensor:
            tensor = tf.convert_to_tensor(value)
            # Only whole rows can be cut off, so each tensor must have one entry for each row.
            if tensor.shape.rank == 0 or tensor.shape[0] != self._fill_up_to:
                raise UsageError(
                    f"the last batch of the evaluation is filled up to {self._fill_up_to} rows, which the model asks "
                    f"for, but compute() returned a tensor of shape {tensor.shape}, in which rows can't be told "
                    "apart: give each tensor the shape [n, ...], or use a number of examples without remainder"
                )
            return rows_of(tensor, slice(n))

        return tf.nest.map_structure(own, values)

    def _more(self, read: ReadBatch) -> tf.Tensor:
        """Whether this worker has more data; or any worker, if all must enter the collectives of a batch."""
        source = self.source
        own_more = source.more(read)
        # If the batches have collectives, a worker at the end of its stream makes empty ones until all are at the end.
        if isinstance(source, StreamSource) and source in self._context.computing.computed_by_all:
            workers = self._backend.run(lambda: self._backend.all_reduce([tf.cast(own_more, tf.int64)])[0])
            return self._backend.first(workers) > 0
        return own_more
