"""Warns of what a callback changes in the task or the model too late: the compiled step keeps what it had before."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Iterable, Iterator

from loop.errors import UsageError
from loop.model.variables import as_tf, layers, optimizers_of, trainable_variables, variable_names
from loop.step.build import BuiltModel
from loop.task import Model, TrainTask


class LateChanges:
    """Compares numbers of the task, its layers and its optimizers, and what is trained, with those of the traced step.

    Args:
        task: the task.
        built: what it has just built.
    """

    def __init__(self, task: TrainTask, built: BuiltModel) -> None:
        self._task = task
        self._built = built
        self._trained = _trained(built.model)
        self._names = _read_by_steps(type(task))
        self._numbers: dict[str, float] = {}
        self._settings: list[tuple[object, str, float]] = []

    def check_setup(self) -> None:
        """Refuses layers that a callback has unfrozen in on_setup: the optimizer doesn't know their variables."""
        trained = _trained(self._built.model)
        if unknown := trained.keys() - self._trained.keys():
            names = ", ".join(sorted(trained[key] for key in unknown))
            raise UsageError(
                f"a callback has made {names} trainable in on_setup, after the optimizer was built: set trainable in "
                "build_model(), or in begin_phase() of a task with phases"
            )
        self._trained = trained  # what is frozen there isn't trained

    def note(self) -> None:
        """Notes the numbers that the step has just been traced with."""
        self._numbers = self._current(self._names)
        self._settings = list(_settings(self._built))

    def warn(self, of_model: bool) -> None:
        """Warns of numbers of the task that have changed since, once of each; `of_model`: of the model's, too."""
        for name, number in self._current(self._numbers).items():
            before = self._numbers[name]
            if number != before and number == number:  # nan isn't equal to itself
                del self._numbers[name]
                warnings.warn(
                    f"{type(self._task).__name__}.{name} was changed from {before!r} to {number!r}, but the compiled "
                    f"steps keep {before!r}: keep what changes in a variable of the model, such as model.{name} = "
                    "model.add_weight(trainable=False), and assign that",
                    stacklevel=2,
                )

        if of_model:
            self._warn_of_settings()
            self._warn_of_trained()

    def _warn_of_settings(self) -> None:
        """Warns of numbers that layers and optimizers were made with, and that have changed since; once of each."""
        for setting in self._settings.copy():
            owner, name, before = setting
            number = vars(owner).get(name)
            if number != before:
                self._settings.remove(setting)
                warnings.warn(
                    f"{name} of {getattr(owner, 'name', owner)} was changed from {before!r} to {number!r}, but the "
                    f"compiled steps keep {before!r}: change it in begin_phase() of a task with phases",
                    stacklevel=2,
                )

    def _warn_of_trained(self) -> None:
        """Warns if other variables are trainable now; once."""
        trained = _trained(self._built.model)
        if changed := trained.keys() ^ self._trained.keys():
            names = ", ".join(sorted((trained | self._trained)[key] for key in changed))
            self._trained = trained
            warnings.warn(
                f"whether {names} is trainable was changed, but the compiled steps train the same variables as before: "
                "freeze and unfreeze in begin_phase() of a task with phases",
                stacklevel=2,
            )

    def _current(self, names: Iterable[str]) -> dict[str, float]:
        """Those of the task's attributes of these names that are numbers."""
        own = getattr(self._task, "__dict__", {})
        numbers = {}
        for name in names:
            value = own.get(name, getattr(type(self._task), name, None))
            if isinstance(value, int | float):
                numbers[name] = value
        return numbers


def _trained(model: Model) -> dict[int, str]:
    """The names of the trainable variables, by the identity of the variable."""
    variables = trainable_variables(model)
    return dict(zip(map(id, as_tf(variables)), variable_names(variables), strict=True))


def _settings(built: BuiltModel) -> Iterator[tuple[object, str, float]]:
    """The numbers that layers and optimizers were made with, such as a Dropout's `rate`: (owner, name, number)."""
    for owner in [*layers(built.model), *optimizers_of(built.optimizer)]:
        # Other attributes may count, while functions are traced, how often a layer was called.
        for name in inspect.signature(type(owner)).parameters:
            number = vars(owner).get(name)
            if isinstance(number, int | float):
                yield owner, name, number


def _read_by_steps(kind: type[TrainTask]) -> set[str]:
    """The names that the code of a training step uses: in `compute`, `train_step`, and the methods that they call."""
    names: set[str] = set()
    to_read = ["compute", "train_step"]
    while to_read:
        name = to_read.pop()
        if name not in names:
            names.add(name)
            to_read += _names_in(getattr(getattr(kind, name, None), "__code__", None))
    return names


def _names_in(code: object) -> list[str]:
    """The names in the code of a function, and in that of the functions within it."""
    if not isinstance(code, types.CodeType):
        return []
    names = list(code.co_names)
    for constant in code.co_consts:
        names += _names_in(constant)
    return names
