"""Assembly: what a task makes of itself in a phase, its data, its model and its optimizer, ready to be trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from loop.backends.base import Backend
from loop.data import Data, open_data
from loop.data.batch import RowCounts
from loop.model.variables import learning_rates, model_variables
from loop.options import phases_of
from loop.run.phases import PER_PHASE, options_of
from loop.step.build import BuiltModel, build
from loop.step.train_step import TrainStep
from loop.task import TrainTask


class Assembled(NamedTuple):
    """What there is of a task at the start of a phase.

    Attributes:
        options: those of `fit`, in this phase.
        data: the sources, not shared out.
        built: model and optimizer.
    """

    options: dict[str, Any]
    data: Data
    built: BuiltModel


RowsOf = Callable[[dict[str, Any], Data], RowCounts]
"""How many rows `compute` is handed in a phase, from its options and its data."""


def assemble(
    task: TrainTask, backend: Backend, options: dict[str, Any], index: int = 0, rows_of: RowsOf | None = None
) -> Assembled:
    """What a task makes of itself in phase `index`, from nothing: the phases before it are begun, too, in order.

    Args:
        task: the task; one without phases has one.
        backend: the engine.
        options: those of `fit`, the same in all phases.
        index: of the phase.
        rows_of: how many rows `compute` will be handed; None: as many as in a training.

    Raises:
        UsageError: something that the task returned can't be trained.
    """
    found = begin(task, backend, options, 0, None, rows_of)
    for each in range(1, index + 1):
        found = begin(task, backend, options, each, found.built.model, rows_of)
    return found


def begin(
    task: TrainTask,
    backend: Backend,
    options: dict[str, Any],
    index: int,
    model: Any,
    rows_of: RowsOf | None = None,
) -> Assembled:
    """Begins phase `index` of a task: with the model of the phase before, and with data and optimizer made anew.

    Args:
        task: see `assemble`, as for the others.
        backend: the engine.
        options: those of `fit`.
        index: of the phase.
        model: that of the phase before; None for the first.
        rows_of: how many rows `compute` will be handed.
    """
    options = enter(task, options, index)
    data = open_data(task, options)
    if rows_of is None:
        rows = data.train.row_counts(backend.replicas, options["accumulate"])
    else:
        rows = rows_of(options, data)
    return Assembled(options, data, build(task, backend, options["precision"], data.train.example, rows, model))


class Session:
    """What a run trains with in the phase under way: model, optimizer, data and compiled step.

    Attributes:
        task: the task.
        backend: the backend.
        options: those of `fit`, which callbacks may change in `on_setup`.
        phase_options: the same, with what the phase has of its own.
        built: model and optimizer.
        learning_rates: of the optimizers, as the task has set them.
        model_variables: those of the model, of each phase so far.
        step: the compiled step, once the data is shared out.
    """

    step: TrainStep

    def __init__(self, task: TrainTask, backend: Backend, options: dict[str, Any], found: Assembled) -> None:
        self.task = task
        self.backend = backend
        self.options = options
        self.model_variables: list[list[Any]] = []
        self._take(found)

    def _take(self, found: Assembled) -> None:
        self.phase_options = found.options
        self.built = found.built
        self.learning_rates = learning_rates(found.built.optimizer)
        # Their order may depend on which of them are trained, and so on the phase.
        self.model_variables.append(model_variables(found.built.model))

    def begin_phase(self, index: int) -> Data:
        """Begins a phase with the model of the one before; returns its data, not shared out."""
        found = begin(self.task, self.backend, self.options, index, self.built.model)
        self._take(found)
        return found.data

    def make_step(self, data: Data) -> None:
        """Makes the compiled step of the phase, for data that is shared out."""
        own = {name: self.phase_options[name] for name in PER_PHASE}
        self.step = TrainStep(self.task, self.built, self.backend, data, {**self.options, **own})

    @property
    def has_step(self) -> bool:
        """Whether the step has been made."""
        return hasattr(self, "step")


def enter(task: TrainTask, options: dict[str, Any], index: int) -> dict[str, Any]:
    """Tells the task which phase it is in; returns the options of that phase, whose random numbers start anew."""
    phases = phases_of(task)
    if phases:
        object.__setattr__(task, "phase", phases[index])  # which a frozen dataclass would refuse
        options = options_of(options, index, phases[index])
    keras.utils.set_random_seed(options["seed"])
    return options


def index_of(manifest: dict[str, Any], task: TrainTask) -> int:
    """The phase of the task of which a checkpoint is, by its manifest."""
    index = manifest.get("phase", {}).get("index", 0)
    return min(index, max(len(phases_of(task)) - 1, 0))
