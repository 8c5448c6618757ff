"""Phases: the parts of a training, one after the other; in which of them a run is, and where it ends.

A run without phases has one, as long as `epochs` or `steps` say. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math

from loop.checkpoint.array_files import Json
from loop.options import Options, Phase
from loop.run.progress import Progress

PER_PHASE = ("epochs", "steps", "seed", "batch_size")
"""The options that a phase may have of its own."""

_SEED_STRIDE = 1_000_003  # large: the seeds of one run's phases are hardly those of another run


@dataclasses.dataclass
class Place:
    """Where a run is among its phases.

    Attributes:
        index: of the phase.
        step: of the run, at its start.
        epoch: of the run, at its start.
        ended: whether a callback has ended the phase.
    """

    index: int = 0
    step: int = 0
    epoch: int = 0
    ended: bool = False


class Plan:
    """The phases of a run, and its place among them.

    Where the task has none, there is one without a name, as long as the options say.
    """

    def __init__(self, phases: list[Phase], options: Options, progress: Progress) -> None:
        epochs = options["epochs"] if options["steps"] is None else None  # steps win: `epochs` has a default
        self.named = phases
        self.phases = phases or [Phase("", epochs, options["steps"])]
        self.place = Place()
        self._progress = progress

    def restore(self, stored: Json) -> None:
        """Takes the place within the phase from a checkpoint. The phase itself must have been entered before."""
        # Not the index: the phases are entered one by one, and the task may have fewer of them now.
        self.place = Place(**{**stored, "index": self.place.index})

    @property
    def phase(self) -> Phase:
        """The phase that the run is in."""
        return self.phases[self.place.index]

    @property
    def is_last(self) -> bool:
        """Whether the run is in its last phase."""
        return self.place.index + 1 == len(self.phases)

    @property
    def begins(self) -> bool:
        """Whether no step of the phase has been made."""
        return self._progress.step == self.place.step

    @property
    def steps_left(self) -> float:
        """How many steps are left of a phase whose length is a number of steps; of another one, infinitely many."""
        return math.inf if self.phase.steps is None else self.place.step + self.phase.steps - self._progress.step

    @property
    def epochs_left(self) -> float:
        """How many epochs are left of a phase whose length is a number of epochs; of another one, infinitely many."""
        return math.inf if self.phase.epochs is None else self.place.epoch + self.phase.epochs - self._progress.epoch

    @property
    def at_last_step(self) -> bool:
        """Whether all steps of a phase whose length is a number of steps have been made."""
        return self.steps_left <= 0

    @property
    def over(self) -> bool:
        """Whether the phase is at its end."""
        return self.place.ended or self.at_last_step or self.epochs_left <= 0

    def advance(self) -> None:
        """Goes to the next phase, from here on."""
        self.place = Place(self.place.index + 1, self._progress.step, self._progress.epoch)

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """The step at which the run ends, where that is known: the data of a later phase isn't opened yet."""
        total = self.place.step
        for phase in self.phases[self.place.index :]:
            if phase.steps is not None:
                total += phase.steps
            elif phase is self.phase and steps_per_epoch is not None:
                total += (phase.epochs or 0) * steps_per_epoch
            else:
                return None
        return total


def as_json(phases: list[Phase]) -> list[Json]:
    """The phases as JSON values."""
    return list(map(dataclasses.asdict, phases))


def options_of(options: Options, index: int, phase: Phase) -> Options:
    """The options of `fit` in a phase: with its length, its batch, and random numbers of its own."""
    length = {"steps": phase.steps, "epochs": phase.epochs or options["epochs"]}  # `steps` wins where it is given
    seed = (options["seed"] + index * _SEED_STRIDE) % 2**31
    return {**options, **length, "seed": seed, "batch_size": phase.batch_size or options["batch_size"]}


def recorded_batch_size(manifest: Json) -> int:
    """The batch size with which the steps of an epoch were counted in a checkpoint, by its manifest."""
    about = manifest["run"]
    own = about["phases"][manifest["phase"]["index"]]["batch_size"] if "phase" in manifest else None
    size: int = own or about["options"]["batch_size"]
    return size
