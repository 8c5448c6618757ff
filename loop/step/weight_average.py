"""Moving averages of the weights: updated in each step, and swapped with the weights for an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from loop.backends.base import Backend
from loop.model.variables import as_tf


class Averages:
    """Exponential moving averages of a model's trainable variables; without a decay there are none.

    Args:
        variables: the trainable variables.
        decay: the weight of the old average at each step, in (0, 1); None: no averages.
        backend: the backend.
    """

    def __init__(self, variables: Sequence[Any], decay: float | None, backend: Backend) -> None:
        self._weights = as_tf(variables) if decay else []
        self._decay = decay or 0.0
        self._backend = backend
        self.variables: list[tf.Variable] = []
        with backend.scope():
            for weight in self._weights:
                average = tf.Variable(weight.numpy(), trainable=False, name="average", dtype=weight.dtype)
                self.variables.append(average)

    def follow(self, indices: Sequence[int]) -> None:
        """In a step, in each replica: average += (1 - decay) * (weight - average), of the variables at `indices`."""
        for index in indices if self.variables else ():
            average = self.variables[index]
            average.assign_add((1 - self._decay) * (self._weights[index] - average))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the weights of the model are the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def take(self) -> None:
        """Makes the averages the weights of the model, for good."""
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight.assign(self._backend.local_values(average)[0])

    def forget(self) -> None:
        """Drops the averages: the model has been given other weights for good."""
        self.variables = []
        self._weights = []

    def _swap(self) -> None:
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight_value = self._backend.local_values(weight)[0]
            weight.assign(self._backend.local_values(average)[0])
            average.assign(weight_value)
