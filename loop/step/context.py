"""The objects that all traces of a step share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property

import tensorflow as tf

from loop.backends.base import Backend
from loop.data import Rows, Source, StreamSource, no_rows
from loop.model.variables import Variable, as_tf, optimizer_variables, trainable_variables, variable_names
from loop.monitor.phase_marker import PhaseMarker
from loop.step.build import BuiltModel
from loop.step.computing import Computing
from loop.step.loss_scale import LossScale
from loop.step.observer import StepObserver
from loop.step.plan import StepPlan
from loop.step.remat import Remat
from loop.step.totals import TotalsLayout
from loop.step.variable_values import assign_values, read_values
from loop.step.weight_average import Averages
from loop.task import Batch, TrainTask


@dataclasses.dataclass(frozen=True, eq=False)
class StepContext:
    """What all traces of a step share. A trace reads it, and notes in `computing` and `remat` what it has shown."""

    plan: StepPlan  # the decisions that hold for every step
    task: TrainTask
    built: BuiltModel  # the model and the optimizers of the task
    backend: Backend
    source: Source  # the training data
    computing: Computing  # what tracing `compute` has shown so far
    layout: TotalsLayout  # the layout of the totals
    marker: PhaseMarker  # notes what this worker does within a call
    scale: LossScale | None  # the loss scale, with float16; else None
    averages: Averages  # the moving averages of the weights
    state: list[tf.Variable]  # the variables that the forward pass changes, such as BatchNorm's statistics
    statistics: list[tf.Variable]  # those of them that may differ between replicas
    kept_batch: KeptBatch | None  # keeps the last batch of a stream that wasn't finite; None: the data isn't a stream
    observer: StepObserver | None  # is called with what a step computes, if anything is to observe it
    remat: Remat  # the layers that are computed again in the backward pass

    @cached_property
    def variables(self) -> list[Variable]:
        """The trainable variables of the model, as the optimizers take them."""
        return trainable_variables(self.built.model)

    @cached_property
    def names(self) -> list[str]:
        """The names of the trainable variables."""
        return variable_names(self.variables)

    def variables_at(self, indices: Iterable[int]) -> list[Variable]:
        """The trainable variables with these indices, in the order of the indices."""
        return [self.variables[index] for index in indices]

    def trained_by(self, optimizer: str) -> list[int]:
        """The indices of the variables that a `minimize` trains; "" is a `minimize` of all optimizers."""
        return self.built.optimizers[optimizer][1] if optimizer else list(range(len(self.variables)))

    def changed_by(self, optimizer: str) -> list[tf.Variable]:
        """The variables that a `minimize` changes when its gradients are applied; "" is one of all optimizers."""
        slots: list[tf.Variable] = []
        # In the same order on all workers: local steps average these variables in collectives.
        for name, (instance, _) in self.built.optimizers.items():
            if optimizer in ("", name):
                slots += as_tf(optimizer_variables(instance))
        trained = as_tf(self.variables_at(self.trained_by(optimizer)))
        # Not the values that the forward pass changes: these are `state`, and are put back by themselves.
        return slots + trained + self.averages.variables

    def checked(self) -> list[str]:
        """What is checked to be finite in each step, in words for messages; in the order of `are_finite`."""
        descriptions: list[str] = []
        for optimizer in self.layout.minimized:
            descriptions.append("the loss")
            descriptions += [f"the gradient of {self.names[index]}" for index in self.trained_by(optimizer)]
        return descriptions


class KeptBatch:
    """Keeps the last batch of this worker that led to a bad step, because a stream can't be read again.

    Args:
        source: the stream.
    """

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._variables: list[tf.Variable] = []
        with tf.device("CPU:0"):
            for tensor in tf.nest.flatten(no_rows(source.batch_spec)):
                # Without a fixed shape: the last batch of an epoch is shorter.
                self._variables.append(tf.Variable(tensor, trainable=False, shape=tf.TensorShape(None)))

    def keep(self, batch: Batch) -> tf.Tensor:
        """While tracing: keeps a batch, as it was read from the stream. Returns True, as the branch of a `tf.cond`."""
        # Assigned in the compiled call, because the host never sees the batches of a stream.
        assign_values(self._variables, tf.nest.flatten(batch))
        return tf.constant(True)

    def rows(self, epoch: tf.Tensor, step: tf.Tensor) -> Rows:
        """The kept batch."""
        leaves = read_values(self._variables)
        return self._source.whole(epoch, step, tf.nest.pack_sequence_as(self._source.batch_spec, leaves))
