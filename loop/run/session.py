"""Assembly: the one place where data, model, optimizer, backend and compiled step of a task are put together."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from callbacks import ShardData
from loop import backends
from loop.backends.base import Backend
from loop.backends.devices import check_is_eager
from loop.checkpoint.array_files import Json
from loop.data import ArrayData, Change, Data, RowCounts, evaluation_sets, likely_rows, open_data, unchanged
from loop.data.host_random import random_state, seed_generators, set_random_state
from loop.data.shared_arrays import shared
from loop.errors import UsageError
from loop.launch.backend_choice import choose_backend
from loop.model.precision import keras_precision
from loop.model.variables import learning_rates, model_variables
from loop.options import Options, phases_of, with_defaults
from loop.run.phases import PER_PHASE, options_of
from loop.step import approximations, sharding
from loop.step.build import BuiltModel, build, try_evaluation
from loop.step.observer import StepObserver
from loop.step.train_step import EPOCH_ENDED, NOT_FINITE, TrainStep
from loop.task import Dataset, Model, TrainTask

NOT_TRAINED = approximations.OFF | {
    "steps": 1, "drop_remainder": False, "overfit": None, "ema": None, "shard_optimizer": False,
}  # fmt: skip
"""Options for a model that isn't trained here: what only a training, or several replicas, need is off.

The moving averages of a checkpoint are loaded as the weights.
"""


class Session:
    """What a task is trained or used with, in the phase that it is in: data, model, optimizer and compiled step.

    Args:
        options: those of `fit`, the same in all phases.
        index: the index of the phase that is entered. The phases before it are entered, too, in order.
        trained_on: for a model that isn't trained here, the number of replicas on which it was trained.
        change: replaces the data that the task returns, for example by a part of it.

    Attributes:
        options: those of `fit`, which callbacks may change in `on_setup`.
        index: the index of the phase.
        phase_options: the same, with what the phase has of its own.
        data: the sources, not sharded yet.
        built: model and optimizer.
        learning_rates: the learning rates of the optimizers, as the task has set them.
        model_variables: the model's variables in each phase so far.
        step: the compiled step, once `make_step` has made it.

    Raises:
        UsageError: an object that the task returned can't be trained.
    """

    phase_options: Options
    data: Data
    built: BuiltModel
    learning_rates: list[float | None]
    step: TrainStep

    def __init__(
        self,
        task: TrainTask,
        backend: Backend,
        options: Options,
        index: int = 0,
        *,
        trained_on: int | None = None,
        change: Change = unchanged,
    ) -> None:
        self.task = task
        self.backend = backend
        self.options = options
        self.model_variables: list[list[tf.Variable]] = []
        self._trained_on = trained_on
        self._change = change
        self._enter(0, None)
        while self.index < index:
            self.enter_next_phase()

    def enter_next_phase(self) -> None:
        """Enters the next phase: the model goes on; data and optimizer are made anew."""
        self.close()
        before = self.built
        self._enter(self.index + 1, before.model)
        _check_optimizers_are_new(self.task, before, self.built)

    def _enter(self, index: int, model: Model | None) -> None:
        self.index = index
        self.phase_options = enter(self.task, self.options, index)
        self.data = open_data(self.task, self.phase_options, self._changed)

        # The data first: the model is built with its examples.
        precision = self.options["precision"]
        sharded = sharding.is_on(self.options, self.backend)
        example = self.data.train.example
        self.built = build(self.task, self.backend, precision, example, self._row_counts(), model, sharded)
        for name, source in self.data.evaluated.items():
            what = evaluation_sets.described(name)
            with keras_precision(precision):
                try_evaluation(self.task, self.built, self.backend, example, source.example, what)
        self.learning_rates = learning_rates(self.built.optimizer)
        # For each phase: the order of a model's variables may depend on which of them are trained.
        self.model_variables.append(model_variables(self.built.model))

    def _changed(self, data: Dataset, options: Options) -> Dataset:
        """What the task has returned, changed; and arrays in memory that the workers of a machine share."""
        data = self._change(data, options)  # first, so that only the part that is used is shared
        several = self.backend.workers > 1 and not self.backend.asynchronous
        return shared(data, self.backend) if several and isinstance(data, ArrayData) else data

    def _row_counts(self) -> RowCounts:
        replicas = self.backend.replicas
        if self._trained_on is None:
            return self.data.train.row_counts(replicas, self.phase_options["accumulate"])
        return likely_rows(self.phase_options, self._trained_on, replicas)

    def make_step(self, data: Data | None = None, observer: StepObserver | None = None) -> TrainStep:
        """Makes the compiled step of the phase; `observer` is called with what each step computes.

        `data` are sharded sources; None: those of the task, sharded as in a run by default.
        """
        if data is None:
            data = self.data.sharded(self.backend, ShardData().policy)
        # Not `phase_options` alone: callbacks may have changed `options` in on_setup.
        own = {name: self.phase_options[name] for name in PER_PHASE}
        self.step = TrainStep(self.task, self.built, self.backend, data, {**self.options, **own}, observer)
        return self.step

    def steps(self, epochs: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Makes one step after the other, from the start of the data on: how each ended, and its totals.

        It makes so many passes over the data; None: without end.
        """
        source = self.step.data.train
        iterator = source.start(0, 0)
        for epoch in itertools.count() if epochs is None else range(epochs):
            step = 0
            while step != source.steps_per_epoch:
                made, ending, totals = self.step.train(iterator, epoch, step, 1)
                # The end of a stream is found by a call that makes no step.
                if made or ending == NOT_FINITE:
                    yield ending, totals
                step += made
                if ending == EPOCH_ENDED:
                    break
            if not step:
                raise UsageError("train_data() has no examples: there is nothing to train on")
            iterator = source.next_epoch(iterator)

    def close(self) -> None:
        """Ends what reads the data ahead."""
        if self.has_step:
            self.step.data.close()

    @property
    def has_step(self) -> bool:
        """Whether the step has been made."""
        return hasattr(self, "step")

    def build_again(self) -> BuiltModel:
        """Builds the model of the phase once more, on one device, with new weights. Random states stay as they are."""
        before = random_state()
        replicas = self.backend.replicas
        try:
            # A later phase needs those before it: what they freeze and add is part of its model.
            if self.index:
                return Session(self.task, Backend(), self.options, self.index, trained_on=replicas).built
            # The data isn't opened again, which may take long.
            example = self.step.data.train.example
            return build(
                self.task, Backend(), self.options["precision"], example, likely_rows(self.phase_options, replicas)
            )
        finally:
            set_random_state(before)


def _check_optimizers_are_new(task: TrainTask, before: BuiltModel, now: BuiltModel) -> None:
    """Refuses an optimizer of the phase before, which would go on with its slots and its count of steps."""
    old = [id(optimizer) for optimizer, _ in before.optimizers.values()]
    for optimizer, _ in now.optimizers.values():
        if id(optimizer) in old:
            raise UsageError(
                f"build_optimizer() of {type(task).__name__} returned the {type(optimizer).__name__} of the phase "
                f"before again in the phase {task.phase and task.phase.name!r}, where an optimizer begins afresh: make "
                "a new one in each call"
            )


def options_and_backend(task: TrainTask, given: Mapping[str, object]) -> tuple[Options, Backend]:
    """The options of a task, checked, and the backend, which `given["backend"]` names or is.

    Raises:
        UsageError: see `with_defaults` and `backends.create`.
    """
    backend = given["backend"]
    if isinstance(backend, Backend):
        check_is_eager()  # the task's file may be loaded later than the backend, and turn eager execution off
        options = with_defaults(task, {**given, "backend": None})
    else:
        options = with_defaults(task, given)
        # After the options are checked: creating a backend starts TensorFlow, and may wait for other workers.
        backend = backends.create(choose_backend(options["backend"])[0])
    options["backend"] = backend.name
    return options, backend


def enter(task: TrainTask, options: Options, index: int) -> Options:
    """Sets the task's phase, and the random seeds of that phase; returns the options of the phase."""
    phases = phases_of(task)
    if phases:
        object.__setattr__(task, "phase", phases[index])  # a frozen dataclass would refuse `task.phase = ...`
        options = options_of(options, index, phases[index])
    # Before data and model of the phase are made, so that they don't depend on what was drawn before.
    seed_generators(options["seed"])
    return options


def index_of(manifest: Json, task: TrainTask) -> int:
    """The index of the phase in which a checkpoint was taken, by its manifest."""
    # The task may have fewer phases than it had. Then `_compare` in `run_directory` refuses it, and says why.
    index = operator.index(manifest.get("phase", {}).get("index", 0))  # which refuses what isn't an integer
    return max(0, min(index, len(phases_of(task)) - 1))
