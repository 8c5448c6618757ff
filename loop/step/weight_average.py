"""Moving averages of the weights: updated in each step, and swapped with the weights for an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from loop.backends import devices
from loop.backends.base import Backend
from loop.model.variables import Variable, as_tf
from loop.step.sharding import Shards
from loop.step.tracing import compiled
from loop.step.variable_values import read_values


class Averages:
    """Exponential moving averages of a model's trainable variables; without a decay there are none.

    Args:
        variables: the trainable variables.
        decay: the weight of the old average at each step, in (0, 1); None: no averages.
        backend: the backend.
    """

    def __init__(self, variables: Sequence[Variable], decay: float | None, backend: Backend) -> None:
        self._weights = as_tf(variables) if decay else []
        self._decay = decay or 0.0
        self._backend = backend
        self.variables: list[tf.Variable] = []
        # They start as copies of the weights: from zeros, the first averages would be too small.
        with backend.scope():
            for weight in self._weights:
                # On the device of the weight: a model may be spread over several devices.
                device = weight.device if devices.per_replica() > 1 else None
                with tf.device(device):
                    average = tf.Variable(weight.numpy(), trainable=False, name="average", dtype=weight.dtype)
                self.variables.append(average)

    def follow(self, indices: Sequence[int]) -> None:
        """While tracing, in each replica: average += (1 - decay) * (weight - average), for those at `indices`."""
        for index in indices if self.variables else ():
            average = self.variables[index]
            average.assign_add((1 - self._decay) * (self._weights[index] - average))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the weights of the model are the averages. With slices, all workers must enter it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def take(self) -> None:
        """Gives the weights of the model the values of the averages, for good."""
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight.assign(self._backend.local_values(average)[0])

    def restart(self) -> None:
        """Starts sliced averages anew, from the weights: a broadcast can't give each replica the slice of its own."""

    def settle(self) -> None:
        """Gives the weights the values of sliced averages, for good. All workers must call it."""

    def forget(self) -> None:
        """Drops the averages: the model has been given other weights for good."""
        self.variables = []
        self._weights = []

    def _swap(self) -> None:
        # Twice gives the old state again, to the bit: values are exchanged, and nothing is computed.
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight_value = self._backend.local_values(weight)[0]
            weight.assign(self._backend.local_values(average)[0])
            average.assign(weight_value)


class SlicedAverages(Averages):
    """Averages of which each replica has a slice. To gather them is a collective, which all workers must enter.

    Args:
        variables: the trainable variables.
        decay: the weight of the old average at each step, in (0, 1).
        backend: the backend.
        shards: how the variables are cut into slices.
    """

    def __init__(self, variables: Sequence[Variable], decay: float, backend: Backend, shards: Shards) -> None:
        super().__init__((), decay, backend)  # without variables: whole averages are what slices save
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
        """The replica's slice of a weight."""
        # TensorFlow cuts a slice without copying it. An average that kept such a slice would hold the whole weight's
        # buffer.
        return tf.raw_ops.DeepCopy(x=self._shards.own(index))

    def _exchange_in_replica(self) -> None:
        """Swaps the weights with the averages."""
        # The order matters: each is read before it is assigned.
        averages = read_values(self.variables)
        for index, average in enumerate(self.variables):
            average.assign(self._copy_of_own(index))
        self._shards.assign(range(len(averages)), averages)

    def _restart_in_replica(self) -> None:
        for index, average in enumerate(self.variables):
            average.assign(self._copy_of_own(index))


def make_averages(
    variables: Sequence[Variable], decay: float | None, backend: Backend, shards: Shards | None
) -> Averages:
    """Makes the moving averages of trainable variables; see `Averages` and `SlicedAverages` for the arguments."""
    if decay is None or shards is None:
        return Averages(variables, decay, backend)
    return SlicedAverages(variables, decay, backend, shards)
