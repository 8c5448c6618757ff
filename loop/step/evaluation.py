"""The compiled evaluation: the values of every example of the evaluation data, each once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from loop.data import Rows, Source, StreamSource, count
from loop.errors import UsageError
from loop.model.variables import carried_variables
from loop.monitor.phase_marker import ALL_REDUCE, COMPUTE, DATA, HOST
from loop.step.metric_sums import SKIPPED, SUMS, MetricSums
from loop.step.tracing import as_written, repeated

if TYPE_CHECKING:
    from loop.step.train_step import TrainStep

EPOCH = 1 << 31
"""Stands for the epoch in an evaluation, whose examples have other seeds than those of training."""


class Evaluation:
    """The compiled evaluation of what a `TrainStep` trains.

    Args:
        step: the model, the engine, and what is known of `compute` are its own.
    """

    def __init__(self, step: TrainStep) -> None:
        self._task, self._model, self._backend, self.source = step.task, step.model, step.backend, step.data.eval
        self._computing, self._phase_marker, self._averages = step.computing, step.phase_marker, step.averages
        self._average_statistics = step.average_statistics
        if self.source is not None and not step.built.values:
            raise UsageError(
                f"{type(step.task).__name__} has eval_data(), but no compute(): define it, and return what is to be "
                "evaluated; or use eval_every='never'"
            )
        self._fill_up_to = self._fixed_rows(step.built.fixed_rows)
        self._carried = carried_variables(step.model)
        self._carries: list[Any] = []
        self._summed = step.task.loss_reduction == "sum"
        self._values, self._dtype = MetricSums(step.built.values, step.built.metrics), step.dtype
        self._compile()

    def _fixed_rows(self, rows: int | None) -> int | None:
        """How many rows each batch is to be filled up to, where it must have so many."""
        if rows is None or self.source is None:
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
        self._evaluate = tf.function(self._steps, autograph=False)

    def whole(self) -> np.ndarray:
        """The totals (see `TrainStep.train`) of the whole evaluation data."""
        iterator, totals = self.start(), np.zeros(())
        step: int | None = 0
        while step is not None:
            step, some = self.steps(iterator, step, np.iinfo(np.int64).max)
            totals = totals + some
        return totals

    def start(self) -> Any:
        """The iterator of the evaluation data, at its start. All workers must call it."""
        assert self.source is not None
        self._carries = [tf.zeros_like(variable.read_value()) for variable in self._carried]
        self._average_statistics()
        return self.source.start(0, 0)

    def steps(self, iterator: Any, step: int, steps: int) -> tuple[int | None, np.ndarray]:
        """Evaluates up to `steps` batches, from the one at `step` on, in one compiled call.

        Returns:
            At which step to go on, None at the end; and the totals of these, to be added up.
        """
        assert self.source is not None
        left = (self.source.steps_per_epoch or np.iinfo(np.int64).max) - step
        steps = min(steps, left)
        with self._averages.in_place(), self._own_state():
            parts = self._computing.call(lambda: self._evaluate, iterator, EPOCH, step, steps, compile=self._compile)
            totals = np.sum([some for _, some in parts], 0)
        going, totals[SKIPPED] = totals[SKIPPED] > 0, 0
        return step + steps if going and steps < left else None, totals

    @contextlib.contextmanager
    def _own_state(self) -> Iterator[None]:
        """What a stateful layer carries from batch to batch begins with zeros, and training keeps its own.

        A run that goes on from within an evaluation begins that one anew: it must find what training carries.
        """
        training = [variable.read_value() for variable in self._carried]
        for variable, value in zip(self._carried, self._carries, strict=True):
            variable.assign(value)
        try:
            yield
        finally:
            self._carries = [variable.read_value() for variable in self._carried]
            for variable, value in zip(self._carried, training, strict=True):
                variable.assign(value)

    def means(self, totals: np.ndarray) -> dict[str, float]:
        """The means and metrics of totals, named `eval_...`."""
        sums, states = np.split(totals[SUMS:], [self._values.width])
        return {f"eval_{name}": value for name, value in self._values.means(sums, states).items()}

    def metric_names(self) -> list[str]:
        """The names that `means` will give."""
        return list(self.means(np.zeros(SUMS + self._values.width + self._values.state_width)))

    def _steps(self, iterator: Any, epoch: tf.Tensor, step: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        source, backend, values = self.source, self._backend, self._values
        assert source is not None
        width = SUMS + values.width + values.state_width

        def of_rows(rows: Rows, stand_in: Any, feed: Any) -> tf.Tensor:
            with self._computing.replica(source, rows, stand_in, 1) as replica:
                if self._fill_up_to is not None:
                    replica.fill_up(self._fill_up_to)
                found = as_written(self._task.compute)(self._model, replica.batch, training=False)
                if self._fill_up_to is not None:
                    found = self._without_filling(found, tf.maximum(count(rows.batch), 1))
                loss, sums = values.sums(found, self._dtype)
                if self._summed:  # a mean over batches, each weighed by its rows, as in training
                    batch_rows = tf.cast(source.batch_rows(feed), self._dtype)
                    sums[:2] = [loss * batch_rows, tf.cast(count(rows.batch), self._dtype)]
                counted = tf.concat([tf.cast(tf.stack(sums), tf.float64), values.states(found)], 0)
                if replica.counts_something is not None:
                    counted = tf.where(replica.counts_something, counted, 0)
            return tf.concat([tf.cast(tf.stack([count(rows.batch), 0]), tf.float64), counted], 0)

        def add(totals: tf.Tensor, feed: Any) -> tf.Tensor:
            rows = source.replica_rows(feed, backend.replica())
            return totals + self._computing.of_rows(
                source, rows, 1, lambda stand_in: of_rows(rows, stand_in, feed), lambda: tf.zeros([width], tf.float64)
            )

        totals = backend.run(lambda: tf.zeros([width], tf.float64))
        end = step + steps

        def more(number: tf.Tensor, following: Any, going: tf.Tensor, totals: Any) -> tf.Tensor:
            return (number < end) & going

        def one(number: tf.Tensor, following: Any, going: tf.Tensor, totals: Any) -> tuple[Any, ...]:
            if source.reads_ahead:
                taken, following = following, source.read_batch(iterator, epoch, number + 1)
            else:
                with tf.control_dependencies(self._phase_marker.at(DATA)):
                    taken = source.read_batch(iterator, epoch, number)
            self._phase_marker.at(COMPUTE, taken)
            totals = backend.run(add, totals, (epoch, number, taken))
            return number + 1, following, self._more(source, taken), totals

        following = source.read_batch(iterator, epoch, step) if source.reads_ahead else ()
        _, _, going, totals = repeated(more, one, step, following, tf.constant(True), totals)

        def summed(totals: tf.Tensor) -> tf.Tensor:
            # With whether this worker has more, in a place that an evaluation has no use for.
            return backend.all_reduce([totals + tf.one_hot(SKIPPED, width, tf.cast(going, tf.float64))])[0]

        self._phase_marker.at(ALL_REDUCE, backend.first(totals))
        packed = backend.first(backend.run(summed, totals))
        self._phase_marker.lap(HOST, packed)
        return packed

    def _without_filling(self, found: Any, n: tf.Tensor) -> Any:
        """The values of the first n rows, which are those of examples."""

        def own(tensor: Any) -> tf.Tensor:
            tensor = tf.convert_to_tensor(tensor)
            if tensor.shape.rank == 0 or tensor.shape[0] != self._fill_up_to:
                raise UsageError(
                    f"the last batch of the evaluation is filled up to {self._fill_up_to} rows, which the model asks "
                    f"for, but compute() returned a tensor of shape {tensor.shape}, of which nobody knows what belongs "
                    "to which row: give each tensor the shape [n, ...], or use a number of examples without remainder"
                )
            return tensor[:n]

        return tf.nest.map_structure(own, found)

    def _more(self, source: Source, taken: Any) -> tf.Tensor:
        """Whether there is anything: for this worker; or for any, where all must enter a collective."""
        more = source.more(taken)
        if isinstance(source, StreamSource) and source in self._computing.everyone:
            table = self._backend.run(lambda: self._backend.all_reduce([tf.cast(more, tf.int64)])[0])
            return self._backend.first(table) > 0
        return more
