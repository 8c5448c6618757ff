"""Moving averages of the weights: updated in each step, and swapped with the weights for an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from loop.backends import devices
from loop.backends.base import Backend
from loop.model.variables import as_tf
from loop.step.sharding import Shards
from loop.step.tracing import compiled


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
                # On the same device: a model may be spread over several.
                with tf.device(weight.device if devices.per_replica() > 1 else None):
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

    def restart(self) -> None:
        """Begins sliced averages anew, at the weights: no broadcast can give the slices of the chief's averages."""

    def settle(self) -> None:
        """Takes the averages for good where they lie in slices. All workers must call it."""

    def forget(self) -> None:
        """Drops the averages: the model has been given other weights for good."""
        self.variables = []
        self._weights = []

    def _swap(self) -> None:
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight_value = self._backend.local_values(weight)[0]
            weight.assign(self._backend.local_values(average)[0])
            average.assign(weight_value)


class SlicedAverages(Averages):
    """Averages of which each replica has a slice. What gathers them is a collective: all workers must call it.

    Args:
        variables: the trainable variables.
        decay: as of `Averages`; not None.
        backend: the backend.
        shards: how the variables are cut.
    """

    def __init__(self, variables: Sequence[Any], decay: float, backend: Backend, shards: Shards) -> None:
        super().__init__((), decay, backend)
        self._weights = as_tf(variables)
        self._shards = shards
        self.variables = [shards.new_part(slicing, "average") for slicing in shards.slicings]
        self._exchange = compiled(lambda: backend.run(self._exchange_in_replica))
        self._restart = compiled(lambda: backend.run(self._restart_in_replica))
        self._restart()

    def follow(self, indices: Sequence[int]) -> None:
        for index in indices if self.variables else ():
            average = self.variables[index]
            average.assign_add((1 - self._decay) * (self._shards.own(index) - average))

    def restart(self) -> None:
        self._restart()

    def take(self) -> None:
        if self.variables:
            self._exchange()

    def settle(self) -> None:
        self.take()
        self.forget()

    def _swap(self) -> None:
        self.take()

    def _copy_of_own(self, index: int) -> tf.Tensor:
        # TensorFlow cuts a slice without copying it: an average that kept one would hold the buffer of a whole weight.
        return tf.raw_ops.DeepCopy(x=self._shards.own(index))

    def _exchange_in_replica(self) -> None:
        """Gives the weights the averages, and each slice of an average the weight's."""
        indices = range(len(self.variables))
        averages = [average.read_value() for average in self.variables]
        for index, average in zip(indices, self.variables, strict=True):
            average.assign(self._copy_of_own(index))
        self._shards.assign(indices, averages)

    def _restart_in_replica(self) -> None:
        for index, average in enumerate(self.variables):
            average.assign(self._copy_of_own(index))


def make_averages(variables: Sequence[Any], decay: float | None, backend: Backend, shards: Shards | None) -> Averages:
    """The moving averages of trainable variables; see `Averages`, `SlicedAverages`."""
    if decay is None or shards is None:
        return Averages(variables, decay, backend)
    return SlicedAverages(variables, decay, backend, shards)
