"""Observers of a step, for `tfloop replay` and `tfloop verify`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from loop.backends.base import Backend
from loop.model.variables import as_tf, trainable_variables


class StepObserver:
    """Is called with what a step computes, in each replica while the step is traced."""

    def values(self, optimizer: str, values: Mapping[str, Any]) -> None:
        """Is called with the values of a batch, or of a micro-batch.

        Args:
            optimizer: the name that `step.minimize` was called with.
            values: what `compute` returned.
        """

    def gradients(self, gradients: Mapping[int, Any]) -> None:
        """Is called with gradients as the optimizer gets them: reduced, divided and clipped.

        Args:
            gradients: by the index of the variable among the trainable ones.
        """


class GradientObserver(StepObserver):
    """Keeps the last gradient of each trainable variable.

    Args:
        model: the model.
        backend: the backend.

    Attributes:
        last: the gradients, in the order of the trainable variables.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        with backend.scope():
            self.last = [
                tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                for variable in as_tf(trainable_variables(model))
            ]

    def gradients(self, gradients: Mapping[int, Any]) -> None:
        """See `StepObserver.gradients`."""
        for index, gradient in gradients.items():
            self.last[index].assign(tf.convert_to_tensor(gradient))
