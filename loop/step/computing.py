"""How `compute` is traced: with which rows, which replicas must take part, and whether it must be traced again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from loop.backends.base import Backend
from loop.data import Data, IndexedSource, Rows, Source, count, stacking_problem
from loop.errors import UsageError
from loop.step.example_trace import of_size
from loop.step.mistakes import explained
from loop.step.replica import CollectiveNeededError, Replica, within


class RetraceError(Exception):
    """Raised while tracing: the trace has shown that the graph must be built in another way."""


class Computing:
    """What tracing the task's `compute` has shown, for each source of batches.

    Args:
        backend: the backend.
        data: the sources, sharded.
        seed: the seed of the run.
        compiled: the source whose batches XLA computes, if any.
        fixed_rows: how many rows a batch must have; None: any number.

    Attributes:
        everyone: the sources whose batches all replicas must compute, also those without rows.
        uncompiled: the sources whose batches XLA can't compute after all.
        isolated: whether forward and backward pass of a step are a graph of their own; see `ForwardPass`.
    """

    def __init__(
        self, backend: Backend, data: Data, seed: int, compiled: Source | None, fixed_rows: int | None = None
    ) -> None:
        self._backend = backend
        self._data = data
        self._seed = seed
        self._fixed_rows = fixed_rows
        self._compiled = compiled
        self.everyone: set[Any] = set()
        self.uncompiled: set[Any] = set()
        self.isolated = False
        self._problem: Exception | None = None

    def compiles(self, source: Source) -> bool:
        """Whether XLA computes the batches of a source."""
        return source is self._compiled and source not in self.uncompiled

    def fail(self, problem: UsageError) -> UsageError:
        """Notes an error that is raised while tracing, since TensorFlow wraps it in one of its own; returns it."""
        self._problem = problem
        return problem

    def call(self, function: Callable[[], Any], iterator: Any, *numbers: int, compile: Callable[[], None]) -> Any:
        """Calls a compiled function on the backend. If it must be traced again, makes it anew and calls that.

        Args:
            function: returns the compiled function.
            iterator: of the data.
            *numbers: the other arguments of the compiled function.
            compile: makes the compiled function anew.
        """
        try:
            return self._backend.call(function(), iterator, *numbers)
        except Exception as error:
            reading = self._reading_problem()
            problem = self._problem or reading or stacking_problem(error)
            self._problem = None
            if problem is None:
                raise
            if not isinstance(problem, CollectiveNeededError | RetraceError):
                raise problem from problem.__cause__  # not from TensorFlow's error, which only wraps it
        compile()
        return self.call(function, iterator, *numbers, compile=compile)

    def _reading_problem(self) -> Exception | None:
        """Why a source could not be read on the host, which TensorFlow wraps in a text of its own."""
        sources = [source for source in self._data.sources if isinstance(source, IndexedSource)]
        failures = [source.take_failure() for source in sources]
        return next((failure for failure in failures if isinstance(failure, Exception)), None)

    def of_rows(self, source: Source, rows: Rows, parts: int, some: Any, nothing: Any) -> Any:
        """The result of `some` for the replica's rows; that of `nothing` if it has none, and needn't take part.

        Args:
            source: of the batch.
            rows: of the replica.
            parts: into how many micro-batches the batch is cut.
            some: computes the rows; its argument is a stand-in for a replica without rows, or None.
            nothing: returns the result without rows.
        """
        if not source.leaves_some_without(self._backend.replicas * parts):
            return some(None)
        if source in self.everyone:
            first = tf.nest.map_structure(lambda tensor: tensor[:1], source.example)
            return some(first if self._fixed_rows is None else of_size(first, self._fixed_rows))
        # `some` is traced first: `nothing` must know which variables it has found to be connected.
        return tf.cond(count(rows.batch) > 0, lambda: some(None), nothing)

    @contextlib.contextmanager
    def replica(self, source: Source, rows: Rows, stand_in: Any, parts: int, phase: int = 0) -> Iterator[Replica]:
        """The replica within which `compute` is traced; see `Replica`."""
        replica = Replica(self._backend, rows, self._seed, source.most(parts), phase, stand_in)
        replica.fixed_rows = self._fixed_rows
        # Within a branch, or within what XLA compiles, there can be no collective.
        branch = source not in self.everyone and source.leaves_some_without(self._backend.replicas * parts)
        compiled = self.compiles(source)
        replica.collective = not (branch or compiled)
        replica.compiled = source is self._compiled and self._backend.replicas > 1
        try:
            with within(replica):
                yield replica
        except Exception as error:
            own = replica.problem or (error if isinstance(error, UsageError) else explained(error))
            self._problem = own or self._problem  # this replica's error may be only an echo of another replica's
            if not isinstance(self._problem, CollectiveNeededError):
                raise
            self.everyone.add(source)
            if compiled:
                self.uncompiled.add(source)
                warnings.warn(
                    "compute() needs other replicas, which XLA can't compile: as compile='graph'", stacklevel=2
                )
            raise
