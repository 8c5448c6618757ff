"""Moving averages of the weights: followed in each step, exchanged for the weights while they are evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from loop.backends.base import Backend
from loop.model.variables import as_tf


class Averages:
    """Exponential moving averages of a model's trainable variables; none of them without a decay.

    Args:
        variables: the trainable variables.
        decay: the weight of the past at each step, in (0, 1); None: no averages.
        backend: the engine.
    """

    def __init__(self, variables: Sequence[Any], decay: float | None, backend: Backend) -> None:
        self._weights, self._decay, self._backend = as_tf(variables) if decay else [], decay or 0.0, backend
        with backend.scope():
            self.variables = [
                tf.Variable(each.numpy(), trainable=False, name="average", dtype=each.dtype) for each in self._weights
            ]

    def follow(self, indices: Sequence[int]) -> None:
        """In a step, in each replica: average += (1 - decay) * (weight - average), of the variables at `indices`."""
        for index in indices if self.variables else ():
            average = self.variables[index]
            average.assign_add((1 - self._decay) * (self._weights[index] - average))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the model has the averages as its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def take(self) -> None:
        """Gives them to the model, for good."""
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight.assign(self._backend.local_values(average)[0])

    def forget(self) -> None:
        """There are none from now on: the model has been given other weights for good."""
        self.variables, self._weights = [], []

    def _swap(self) -> None:
        for weight, average in zip(self._weights, self.variables, strict=True):
            own, other = self._backend.local_values(weight)[0], self._backend.local_values(average)[0]
            weight.assign(other)
            average.assign(own)
