"""Losses that layers add in their calls: what they are of the rows of a batch, of which each replica has its own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import tensorflow as tf

from loop.backends.base import Backend
from loop.errors import ReplicaWarning, UsageError, named
from loop.model.variables import layers, losses
from loop.step.example_trace import Trial
from loop.step.mistakes import ERRORS
from loop.step.replica import as_in_replica, probing
from loop.step.shares import ORDERS, ShareTrial
from loop.task import Batch, Model, Values

_ORDER = (0, 2, 2, 1, 0, 1, 1, 0)
"""Which of a few examples are tried first. The two shares have different ones: else the mean over the examples that a
mask leaves would be the same in both."""


class Penalties(NamedTuple):
    """What a trial has shown of the losses that layers add."""

    vary: bool = False  # whether they depend on the rows of a batch, as penalties of activations do
    grow: bool = False  # whether one of them is a sum over the rows instead of a mean


class PenaltyTrial:
    """Calls `compute` while it is tried, and notes what layers add to the loss in each call.

    Args:
        compute: the task's function of a batch and of `training`.
        model: the model that it calls.
        backend: the backend, in whose scope it is called.
    """

    def __init__(self, compute: Callable[..., Values], model: Model, backend: Backend) -> None:
        self._given = compute
        self._compute = as_in_replica(backend, compute)
        self._model = model
        self._backend = backend
        self._noted: list[list[float]] = []
        self._in_inference: list[float] = []
        self._names: list[str] = []
        self._values: Values = {}

    def __call__(self, batch: Batch, training: bool = False) -> Values:
        """What `compute` returns."""
        self._values = self._compute(batch, training=training)
        numbers = []
        self._names = []
        owners = _owners(self._model)
        try:
            penalties = losses(self._model)
        except ERRORS as error:
            raise UsageError(f"a regularizer of the model can't be computed: {named(error)}") from error
        for penalty in penalties:
            # A penalty in the symbolic graph of a Keras model has no value.
            if not tf.is_symbolic_tensor(penalty):
                numbers.append(float(tf.reduce_sum(penalty)))
                self._names.append(owners.get(id(penalty), "the model"))
        self._noted.append(numbers)
        return self._values

    def in_training(self, batch: Batch) -> Values:
        """What `compute` returns in training."""
        return self(batch, True)

    def found(self, trial: Trial) -> Penalties:
        """What the calls so far have shown: the first one had all rows, the last one fewer."""
        self._in_inference = self._noted[0]
        # Only penalties that differ from call to call can be sums over rows, and are worth another call.
        if self._noted[0] == self._noted[-1]:
            return Penalties()
        grow = trial.grow(self, self._noted)
        if not grow:
            self._warn(trial)
        return Penalties(True, grow)

    def found_in_training(self, trial: Trial, found: Penalties) -> Penalties:
        """What training shows beside what `found` has: a layer may add a loss in training alone."""
        self._noted.clear()
        with probing(trial.example):
            self.in_training(trial.example)
        if self._noted[0] == self._in_inference:
            return found
        grow = trial.grow(self.in_training, self._noted)
        if not found.vary and not grow:
            self._warn(trial)
        return Penalties(True, grow)

    def _warn(self, trial: Trial) -> None:
        """Warns of means over rows that replicas or micro-batches can't put together from those of their own rows."""
        if not trial.shares_batches or trial.fixed_rows is not None:
            return
        with contextlib.suppress(Exception):  # a mistake in it shows when the step is traced
            layer = self._not_by_rows(trial)
            if layer is not None:
                warnings.warn(
                    f"{layer} adds a loss that isn't a mean over the rows of a batch, such as a mean over the "
                    f"positions that a mask leaves, but of {trial.replicas} replica(s) with accumulate={trial.parts} "
                    "each knows its own rows alone: the numbers depend on both. On several replicas, take the rows of "
                    "all from loop.all_gather(...) in the layer; or add a value of each example to the loss of "
                    "compute()",
                    ReplicaWarning,
                    stacklevel=2,
                )
        if trial.parts > 1 and is_uneven(self._values):
            warnings.warn(
                f"{', '.join(dict.fromkeys(self._names))}: with accumulate={trial.parts}, a penalty of activations "
                "counts by the weights of each micro-batch, and not by its rows, so that the numbers depend on "
                'accumulate. Train without accumulate, or add a value of each example to the "loss" of compute()',
                stacklevel=2,
            )

    def _not_by_rows(self, trial: Trial) -> str | None:
        """The name of a layer whose penalty isn't the mean of those of its rows; None: there is none."""
        names: list[str] = []

        def times_rows(values: Values, rows: tf.Tensor) -> list[tf.Tensor]:
            owners = _owners(self._model)
            names.clear()
            numbers = []
            for penalty in losses(self._model):
                numbers.append(tf.cast(tf.reduce_sum(penalty), tf.float64) * tf.cast(rows, tf.float64))
                names.append(owners.get(id(penalty), "the model"))
            return numbers

        assert trial.rows is not None  # replicas or micro-batches share a batch
        shares = ShareTrial(
            lambda batch: self._given(batch, training=True),
            _with_padding(trial.example),
            self._model,
            times_rows,
            trial.rows,
            # In one order alone, both shares might have examples that the same experts of a mixture take, by chance.
            [_ORDER, *ORDERS],
        )
        wrong = as_in_replica(self._backend, shares.first_wrong)()
        return None if wrong is None else names[wrong]


def is_uneven(values: Mapping[str, object]) -> bool:
    """Whether rows may count differently for the loss."""
    return "weight" in values or "loss_count" in values


def _with_padding(example: Batch) -> Batch:
    """Examples of which the last is all zeros, as padding is: a few examples may have masks of one length by chance."""

    def padded(tensor: tf.Tensor) -> tf.Tensor:
        return tf.concat([tensor[:-1], tf.zeros_like(tensor[-1:])], 0)

    return tf.nest.map_structure(padded, example)


def _owners(model: Model) -> dict[int, str]:
    """The names of the layers, by the ids of the losses that they have added."""
    owners = {}
    for layer in layers(model):
        for attribute in ("_losses", "_eager_losses"):  # the second one is that of tf_keras
            for penalty in getattr(layer, attribute, ()):
                owners[id(penalty)] = layer.name
    return owners
