"""Where `compute` is traced: with which rows, who must take part, and once more if the trace turns out to need it."""

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
from loop.step.replica import CollectiveNeededError, Replica, within


class RetraceError(Exception):
    """Raised while tracing: something has turned out by which the graph must be another one."""


class Computing:
    """What is known of the task's `compute`, by the source of its batches, from tracing it.

    Args:
        backend: the engine.
        data: the sources, sharded.
        seed: the seed of the run.
        compiled: the source whose batches XLA is to compute, if any.
        fixed_rows: how many rows a batch must have; None: any number.

    Attributes:
        everyone: the sources whose batches all replicas must compute, with rows or without.
        uncompiled: those that XLA can't compile.
        isolated: whether forward and backward pass of a step are a graph of their own; see `ForwardPass`.
    """

    def __init__(
        self, backend: Backend, data: Data, seed: int, compiled: Source | None, fixed_rows: int | None = None
    ) -> None:
        self._backend, self._seed, self._fixed_rows = backend, seed, fixed_rows
        self._data = data
        self._compiled = compiled
        self.everyone: set[Any] = set()
        self.uncompiled: set[Any] = set()
        self.isolated = False
        self._problem: Exception | None = None

    def compiles(self, source: Source) -> bool:
        """Whether XLA computes the batches of a source."""
        return source is self._compiled and source not in self.uncompiled

    def fail(self, problem: UsageError) -> UsageError:
        """Notes an error that is raised while tracing, which TensorFlow wraps in a text of its own."""
        self._problem = problem
        return problem

    def call(self, function: Callable[[], Any], iterator: Any, *numbers: int, compile: Callable[[], None]) -> Any:
        """Calls a compiled function on the engine; makes it anew where tracing it has found that it must be.

        Args:
            function: gives the function.
            iterator: of the data.
            *numbers: its other arguments.
            compile: makes the function anew.
        """
        try:
            return self._backend.call(function(), iterator, *numbers)
        except Exception as error:
            problem, self._problem = self._problem or self._reading_problem() or stacking_problem(error), None
            if problem is None:
                raise
            if not isinstance(problem, CollectiveNeededError | RetraceError):
                raise problem from None
        compile()
        return self.call(function, iterator, *numbers, compile=compile)

    def _reading_problem(self) -> Exception | None:
        """Why a source could not be read on the host, which TensorFlow wraps in a text of its own."""
        failures = [
            source.failure for source in (self._data.train, self._data.eval) if isinstance(source, IndexedSource)
        ]
        return next((failure for failure in failures if isinstance(failure, Exception)), None)

    def of_rows(self, source: Source, rows: Rows, parts: int, some: Any, nothing: Any) -> Any:
        """What `some` makes of the replica's rows; `nothing` where it has none and needn't take part."""
        if not source.leaves_some_without(self._backend.replicas * parts):
            return some(None)
        if source in self.everyone:
            first = tf.nest.map_structure(lambda tensor: tensor[:1], source.example)
            return some(first if self._fixed_rows is None else of_size(first, self._fixed_rows))
        # Which variables are connected is known when `nothing` is traced: `some` is traced first.
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
            own = replica.problem or (error if isinstance(error, UsageError) else None)
            self._problem = own or self._problem  # another replica's error may be what has ended this one
            if not isinstance(self._problem, CollectiveNeededError):
                raise
            self.everyone.add(source)
            if compiled:
                self.uncompiled.add(source)
                warnings.warn(
                    "compute() needs other replicas, which XLA can't compile: as compile='graph'", stacklevel=2
                )
            raise
