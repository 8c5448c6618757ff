"""The state that evaluations and predictions have of their own, so that they leave that of the training alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from loop.backends.base import Backend
from loop.model.variables import carried_variables, handles, model_variables
from loop.step.batch_norm import global_seeds
from loop.step.tracing import changed
from loop.step.variable_values import read_values
from loop.task import Model


class OwnState:
    """The variables that a compiled function changes, such as seeds, counters and statistics, with values of its own.

    States of stateful layers begin with zeros, other variables with the values of the training.

    Args:
        model: the model.
        backend: the backend.
    """

    def __init__(self, model: Model, backend: Backend) -> None:
        self._carried = carried_variables(model)
        self._changed = list(self._carried)  # the variables that the function is known to change so far
        # Those that parameter servers hold in shards can't be read as one tensor.
        self._others = []
        for variable in [*model_variables(model), *global_seeds()]:
            if isinstance(variable, tf.Variable) and backend.can_read(variable):
                self._others.append(variable)
        self._training_values: dict[int, tf.Tensor] = {}
        self._own_values: dict[int, tf.Tensor] = {}

    def begin(self) -> None:
        """Begins anew: the values of its own so far are forgotten."""
        self._own_values = dict(zip(map(id, self._carried), map(tf.zeros_like, self._carried), strict=True))

    def note_changes(self) -> None:
        """While tracing the function, at its end: notes the variables that it changes."""
        written = changed(tf.compat.v1.get_default_graph())
        known = set(map(id, self._changed))
        for variable in self._others:
            if id(variable) not in known and not written.isdisjoint(map(id, handles([variable]))):
                self._changed.append(variable)
                # The first call is being traced, and the function hasn't run yet.
                with tf.init_scope():
                    self._training_values[id(variable)] = variable.read_value()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the variables have the values of the function's own, for a call of it."""
        self._training_values = dict(zip(map(id, self._changed), read_values(self._changed), strict=True))
        for variable in self._changed:
            if id(variable) in self._own_values:
                variable.assign(self._own_values[id(variable)])
        try:
            yield
        finally:
            # Also after an error: training may go on, and must find its own state.
            for variable in self._changed:
                self._own_values[id(variable)] = variable.read_value()
                variable.assign(self._training_values[id(variable)])
            self._training_values = {}
