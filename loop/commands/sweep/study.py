"""Study: the trials of a sweep in Optuna's storage."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.files import sqlite_uri
from loop.commands.sweep.directory import STORAGE
from loop.commands.sweep.plan import Plan, Range
from loop.commands.sweep.process import in_use, trial_directory
from loop.commands.sweep.report import Row
from loop.errors import UsageError

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, Trial


class Study:
    """The queue of the trials, the values that they draw, and how they have ended.

    The queue is Optuna's, so that no trial is begun twice, at whatever moment a sweep is killed. `trials` counts those
    that have ended, too.

    Attributes:
        interrupted: the numbers of trials that ran when the sweep last ended, and have not been resumed yet.
    """

    def __init__(self, directory: Path, plan: Plan, fields: Mapping[str, list[str] | Range], trials: int) -> None:
        self._directory = directory
        self._plan = plan
        self._fields = fields
        self._trials = trials
        self._study = _open(directory, plan)
        # Only those that the storage doesn't have yet: a killed sweep may have put some into it.
        for number in range(len(self._study.get_trials(deepcopy=False)), trials):
            self._study.enqueue_trial(plan.combination(number))
        self.interrupted = [row.number for row in self.rows() if row.state == "running"]

    def rows(self) -> list[Row]:
        """All trials."""
        return [_row(trial, self._directory) for trial in self._study.get_trials(deepcopy=False)[: self._trials]]

    def next(self) -> Trial | None:
        """The trial to start next: an interrupted one, or else a new one; None: there is none now."""
        trial = self._next_interrupted() or self._next_waiting()
        if trial is not None:
            for name, values in self._fields.items():
                _draw(trial, name, values)
        return trial

    def end(self, number: int, value: float | None, pruned: bool) -> None:
        """Stores how a trial has ended: with a value, pruned, or failed."""
        from optuna.trial import TrialState

        if pruned:
            state = TrialState.PRUNED
        else:
            state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(number, value, state)

    def _next_interrupted(self) -> Trial | None:
        from optuna.trial import Trial

        # A trial that a killed sweep has left running saves and ends by itself. Only then can it be resumed.
        for number in self.interrupted:
            if not in_use(trial_directory(self._directory, number)):
                self.interrupted.remove(number)
                self._seed(number)
                # Not by `ask`, which would begin a new trial.
                known = self._study.get_trials(deepcopy=False)[number]
                return Trial(self._study, known._trial_id)
        return None

    def _next_waiting(self) -> Trial | None:
        from optuna.trial import TrialState

        waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        # An earlier start may have asked for more trials than this one: those stay in the queue.
        if not waiting or waiting[0].number >= self._trials:
            return None
        self._seed(waiting[0].number)  # the one that `ask` takes
        return self._study.ask()

    def _seed(self, number: int) -> None:
        """Makes the values that a trial draws depend on the plan's seed and its number, not on when it begins."""
        from optuna.samplers import RandomSampler, TPESampler

        digest = hashlib.sha256(f"{self._plan.seed} {number}".encode()).digest()
        kind = TPESampler if self._plan.sampler == "tpe" else RandomSampler
        self._study.sampler = kind(seed=int.from_bytes(digest[:4], "big"))  # NumPy takes seeds of 32 bits


@contextlib.contextmanager
def naming_full_disk(directory: Path) -> Iterator[None]:
    """Within it, an error of the storage on a full disk becomes the system's own, which names the file.

    Raises:
        OSError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / STORAGE)) from None


def _is_full(error: BaseException | None) -> bool:
    """Whether SQLite has found a full disk. Optuna says of its error that some value may be too long."""
    while error is not None and "database or disk is full" not in str(error):
        error = error.__cause__ or error.__context__
    return error is not None


def _open(directory: Path, plan: Plan) -> optuna.Study:
    """Opens the sweep in Optuna's storage, or creates it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner() if plan.pruner == "median" else optuna.pruners.NopPruner()
    try:
        return optuna.create_study(
            storage=sqlite_uri(directory / STORAGE), study_name="sweep", load_if_exists=True,
            direction=plan.direction, pruner=pruner,
        )  # fmt: skip
    except Exception as error:  # of the database or of Optuna: the file is damaged, or something else
        if _is_full(error):
            raise
        what = str(error).splitlines()[0]
        raise UsageError(f"{directory / STORAGE} can't be used ({what}): give another --sweep-dir") from None


def _draw(trial: Trial, name: str, values: list[str] | Range) -> None:
    """Draws the value of a field for a trial, unless the trial has one."""
    if isinstance(values, list):
        trial.suggest_categorical(name, values)
    else:
        suggest = trial.suggest_int if isinstance(values.low, int) else trial.suggest_float
        suggest(name, values.low, values.high, log=values.log)


def _row(trial: FrozenTrial, directory: Path) -> Row:
    state = "failed" if trial.state.name == "FAIL" else trial.state.name.lower()
    if state == "complete":
        value = trial.value
    else:
        # Only a complete trial has a value of its own: of any other, the last measurement is shown.
        values = trial.intermediate_values
        value = values[max(values)] if values else None
    return Row(
        number=trial.number,
        state=state,
        params=typed_values(trial.params),
        value=value,
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
        problem=trial.user_attrs.get("problem", ""),
        run_dir=str(trial_directory(directory, trial.number)),
    )


def typed_values(params: Mapping[str, object]) -> dict[str, str]:
    """The values of fields as texts for `--set`; a float has all its digits."""
    typed = {}
    for name, value in params.items():
        typed[name] = value if isinstance(value, str) else repr(value)  # `repr` of a float is read back as the same one
    return typed
