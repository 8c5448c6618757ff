"""Observers of a step, for `tfloop replay` and `tfloop verify`."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from loop.backends.base import Backend
from loop.model.variables import as_tf, trainable_variables
from loop.step.gradients import Gradient
from loop.task import Model, Values


class StepObserver:
    """Is called with what a step computes, in each replica while the step is traced.

    Its methods may add operations to the graph, such as assignments to variables of the observer.
    """

    def values(self, optimizer: str, values: Values, part: tf.Tensor) -> None:
        """Is called with the values of a batch, or of a micro-batch.

        Args:
            optimizer: the name that `step.minimize` was called with.
            values: what `compute` returned.
            part: the number of the micro-batch. They may be computed in any order.
        """

    def gradients(self, gradients: Mapping[int, Gradient]) -> None:
        """Is called with gradients as the optimizer gets them: reduced, divided and clipped.

        Args:
            gradients: the gradients, by the index of the variable among the trainable ones.
        """


class GradientObserver(StepObserver):
    """Keeps the last gradient of each trainable variable.

    Args:
        model: the model.
        backend: the backend.

    Attributes:
        last: the gradients, in the order of the trainable variables.
    """

    def __init__(self, model: Model, backend: Backend) -> None:
        self.last: list[tf.Variable] = []
        with backend.scope():
            for variable in as_tf(trainable_variables(model)):
                zeros = tf.zeros(variable.shape, variable.dtype)
                self.last.append(tf.Variable(zeros, trainable=False))

    def gradients(self, gradients: Mapping[int, Gradient]) -> None:
        """See `StepObserver.gradients`."""
        for index, gradient in gradients.items():
            self.last[index].assign(tf.convert_to_tensor(gradient))
