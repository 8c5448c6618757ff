"""How `compute` is traced: for which rows, with which replicas, and whether it must be traced again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from loop.backends.base import Backend
from loop.data import (
    SKIPPED,
    ArraySource,
    Data,
    DataIterator,
    Feed,
    IndexedSource,
    Rows,
    Source,
    count,
    stacking_problem,
)
from loop.data.host_random import random_state
from loop.errors import UsageError
from loop.model.variables import handles
from loop.step.batch_norm import global_seeds
from loop.step.example_trace import of_size, recorded
from loop.step.mistakes import explained
from loop.step.replica import CollectiveNeededError, Replica, within
from loop.step.totals import Parts
from loop.step.tracing import changed
from loop.task import Batch

T = TypeVar("T")


class RetraceError(Exception):
    """Raised while tracing, if the trace shows that the graph must be built in another way."""


class Computing:
    """What tracing the task's `compute` has shown, for each source of batches.

    Args:
        backend: the backend.
        data: the sources, sharded.
        seed: the seed of the run.
        compiled: the source whose batches XLA is to compute, if any.
        weights: the trainable variables of the model.
        fixed_rows: the number of rows that a batch must have; None: any number.

    Attributes:
        computed_by_all: the sources whose batches all replicas must compute, even those without rows.
        uncompiled: why XLA can't compute the batches of a source after all, for each such source.
        isolated: the sources whose forward and backward pass is slow unless it is a graph of its own; see
            `ForwardPass._isolates`.
    """

    def __init__(
        self,
        backend: Backend,
        data: Data,
        seed: int,
        compiled: Source | None,
        weights: Sequence[tf.Variable],
        fixed_rows: int | None,
    ) -> None:
        self._backend = backend
        self._data = data
        self._seed = seed
        self._fixed_rows = fixed_rows
        self._compiled = compiled
        self._weights = set(map(id, handles(weights if backend.replicas > 1 else [])))
        self.computed_by_all: set[Source] = set()
        self.uncompiled: dict[Source, str] = {}
        self.isolated: set[Source] = set()
        self._problem: Exception | None = None

    def compiles(self, source: Source) -> bool:
        """Whether XLA computes the batches of a source."""
        return source is self._compiled and source not in self.uncompiled

    def leave_to_graph(self, source: Source, reason: str) -> None:
        """From the next trace on, XLA doesn't compute the batches of a source; warns of it."""
        if source not in self.uncompiled:  # replicas are traced in threads
            self.uncompiled[source] = reason
            warnings.warn(f"XLA can't compile this task ({reason}): as compile='graph'", stacklevel=2)

    def is_isolated(self, source: Source) -> bool:
        """Whether the forward and backward pass over a source's batches is a graph of its own, without collectives."""
        return source in self.isolated and source not in self.computed_by_all

    def fail(self, problem: UsageError) -> UsageError:
        """Notes an error that is raised while tracing, since TensorFlow wraps it in one of its own; returns it."""
        self._problem = problem
        return problem

    def call(
        self,
        function: Callable[[], Callable[..., tf.Tensor]],
        iterator: DataIterator,
        epoch: int,
        step: int,
        steps: int,
        compile: Callable[[], None],
    ) -> Parts:
        """Calls a compiled function on the backend. If it must be traced again, compiles it anew and calls that.

        Args:
            function: returns the current compiled function.
            iterator: what the `start` of the source returned.
            epoch: the epoch, from 0.
            step: the first step, within the epoch.
            steps: how many steps to make at most.
            compile: makes the compiled function anew.
        """
        try:
            return self._backend.call(function(), iterator, epoch, step, steps)
        except Exception as error:
            # Always asked for, also where it isn't raised: it belongs to this call, not to the next one.
            reading = self._reading_problem()
            problem = self._problem or reading or stacking_problem(error)
            self._problem = None
            if problem is None:
                raise
            if not isinstance(problem, CollectiveNeededError | RetraceError):
                raise problem from problem.__cause__  # not from TensorFlow's error, which only wraps it
        # As often as needed: the new trace may show one more thing that has to be built in another way.
        compile()
        return self.call(function, iterator, epoch, step, steps, compile)

    def _reading_problem(self) -> Exception | None:
        """Why a source could not be read on the host, which TensorFlow wraps in a text of its own."""
        problem: Exception | None = None
        # All sources are asked: a failure that is left there would be raised by a later call.
        for source in self._data.sources:
            failure = source.take_failure() if isinstance(source, IndexedSource) else None
            if problem is None and isinstance(failure, Exception):
                problem = failure
        return problem

    def batch_rows(self, source: Source, feed: Feed) -> tf.Tensor:
        """In each replica: the number of rows of the global batch, int64 []. May be a collective."""
        if source.layout is None and not source.leaves_out:
            return source.batch_rows(feed)
        # Each worker knows only the rows that it has read. Its first replica counts for all of its replicas.
        counts = self._backend.replica() % self._backend.local_replicas == 0
        own = _own_rows(source, feed)
        return self._backend.all_reduce([tf.where(counts, own, tf.zeros_like(own))])[0]

    def of_rows(
        self,
        source: Source,
        rows: Rows,
        parts: int,
        compute: Callable[[Batch | None], T],
        without_rows: Callable[[], T],
    ) -> T:
        """Computes a replica's rows of a (micro-)batch.

        Args:
            source: the source of the batch.
            rows: the replica's rows.
            parts: the number of micro-batches that the batch is cut into.
            compute: returns the result for `rows`. Its argument is the stand-in that is computed if there are no rows;
                None: there are some.
            without_rows: returns the result without rows, where a replica without them needn't take part.
        """
        if not source.leaves_some_without(self._backend.replicas * parts):
            return compute(None)
        # One example is enough: what is computed on it counts for nothing.
        if source in self.computed_by_all:
            stand_in = tf.nest.map_structure(lambda tensor: tensor[:1], source.example)
            if self._fixed_rows is not None:
                stand_in = of_size(stand_in, self._fixed_rows)
            return compute(stand_in)
        # `tf.cond` traces `compute` first. `without_rows` needs that: it must return zeros for the variables that
        # `compute` has found to be connected.
        return tf.cond(count(rows.batch) > 0, lambda: compute(None), without_rows)

    @contextlib.contextmanager
    def replica(
        self, source: Source, rows: Rows, stand_in: Batch | None, parts: int, phase: int = 0
    ) -> Iterator[Replica]:
        """The replica within which `compute` is traced; see `Replica` and `of_rows` for the arguments."""
        self._leave_texts_to_graph(source, rows.batch)
        replica = Replica(self._backend, rows, self._seed, source.most_rows(parts), phase)
        compiled = self.compiles(source)
        replica.use_stand_in(stand_in, compiled)
        replica.fixed_rows = self._fixed_rows
        # Within a branch, a graph of its own, or what XLA compiles, there can be no collective.
        in_branch = source not in self.computed_by_all and source.leaves_some_without(self._backend.replicas * parts)
        replica.collective = not (in_branch or compiled or self.is_isolated(source))
        replica.compiled = source is self._compiled and self._backend.replicas > 1
        try:
            with within(replica), _warning_of_draws(source):
                yield replica
                if in_branch:
                    self._check_weights(source, replica)
        except Exception as error:
            # The noted one first: TensorFlow may have wrapped it.
            own = replica.problem
            if own is None:
                own = error if isinstance(error, UsageError) else explained(error)
            self._problem = own or self._problem  # this replica's error may only follow from another replica's
            if not isinstance(self._problem, CollectiveNeededError):
                raise
            self.computed_by_all.add(source)
            if compiled:
                self.leave_to_graph(source, "compute() needs other replicas")
            raise

    def _leave_texts_to_graph(self, source: Source, batch: Batch) -> None:
        """Has the graph built in another way if a batch for XLA has texts."""
        if self.compiles(source) and any(tensor.dtype == tf.string for tensor in tf.nest.flatten(batch)):
            # TensorFlow may say so, but with some layers it ends the process.
            self.leave_to_graph(source, "its data has texts")
            self._problem = RetraceError()
            raise self._problem

    def _check_weights(self, source: Source, replica: Replica) -> None:
        """Checks, at the end of a trace, whether a layer changes its own weights, such as by a mask.

        A replica without rows would keep the old weights, so all replicas must compute.

        Raises:
            RetraceError: a layer does, and replicas without rows were traced to compute nothing.
        """
        if not self._weights.isdisjoint(changed(tf.compat.v1.get_default_graph())):
            self.computed_by_all.add(source)
            replica.problem = RetraceError()
            raise replica.problem


@contextlib.contextmanager
def _warning_of_draws(source: Source) -> Iterator[None]:
    """Warns if what is traced within it draws from the global generators of Python or NumPy."""
    before = random_state()
    seeds = len(global_seeds())
    made: list[tf.Variable] = []
    with recorded(made):
        yield
    # Keras draws there the seed of a generator or a layer that is made meanwhile.
    is_drawn = random_state() != before and len(global_seeds()) == seeds and not made
    # Other sources may call Python in threads of their own, which draw meanwhile.
    if isinstance(source, ArraySource) and is_drawn:
        warnings.warn(
            "compute(), or a layer that it calls, draws random numbers with Python's `random` or NumPy's `np.random`: "
            "that is Python, which runs while the step is traced, and not at each step. So all steps have the same "
            "numbers, and other replicas and a resumed run other ones. Draw with layers; or with keras.random and "
            "model.seed, where build_model() has set model.seed = keras.random.SeedGenerator(1)",
            stacklevel=2,
        )


def _own_rows(source: Source, feed: Feed) -> tf.Tensor:
    """The number of rows that this worker has read of the global batch, without those left out: int64 []."""
    if not isinstance(source, ArraySource):
        return count(feed[-1])
    index, _ = feed[-1]
    return tf.math.count_nonzero(index != SKIPPED)
