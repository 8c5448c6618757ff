"""Report: the results of a sweep."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from callbacks.run_record.redaction import mask
from loop.commands.sweep.plan import Plan
from loop.commands.terminal import shown_path


@dataclasses.dataclass(frozen=True)
class Row:
    """A trial, as tables and JSON show it."""

    number: int  # its number, from 0
    state: str  # `complete`, `pruned`, `failed`, `running` or `waiting`
    params: dict[str, str]  # the values of its fields, as texts for `--set`
    value: float | None  # the last value of the metric; None: there is none
    seconds: float | None  # the time from its start to its end; None: it has not ended
    problem: str  # why it has failed; "": it hasn't
    run_dir: str  # its run directory

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state not in ("running", "waiting")


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a sweep, as far as it has come."""

    plan: Plan  # the plan of the sweep
    directory: Path  # the directory of the sweep
    rows: list[Row]  # all trials

    @property
    def stopped(self) -> bool:
        """Whether some trials have not ended."""
        return any(not row.has_ended for row in self.rows)

    @property
    def best(self) -> Row | None:
        """The trial with the best value; None if none is complete."""
        sign = 1 if self.plan.direction == "minimize" else -1
        complete = [row for row in self.rows if row.state == "complete" and row.value is not None]
        # `min` for both directions: of equal values, the earliest trial counts. No value is None here: the `or` is for
        # the type checker.
        return min(complete, key=lambda row: sign * (row.value or 0.0), default=None)

    def command(self, row: Row) -> list[str]:
        """The command that trains a trial again."""
        return ["tfloop", "train", self.plan.target, *self.plan.arguments, *set_options(row.params)]

    def lines(self) -> Iterator[str]:
        """The best trial, in lines for the terminal."""
        if (best := self.best) is None:
            yield "no trial has come to its end" if self.stopped else "no trial has come to an end that counts"
            return
        where = f"in {shown_path(Path(best.run_dir))}"
        if not Path(best.run_dir).exists():  # it was removed; the database still has its result
            where = f"{shown_path(Path(best.run_dir))} is gone; to train it again:"
        yield f"best: trial {best.number}, {self.plan.metric} {best.value:.6g}, {where}"
        # Masked: the plan's own arguments may hold secrets that were typed.
        yield mask(shlex.join(self.command(best)))

    def as_json(self) -> dict[str, object]:
        """The trials and the best of them, for `--json`."""
        best = None
        if self.best is not None:
            best = dataclasses.asdict(self.best)
            best["command"] = list(map(mask, self.command(self.best)))
        return {
            "sweep_dir": str(self.directory), "metric": self.plan.metric, "direction": self.plan.direction,
            "trials": list(map(dataclasses.asdict, self.rows)), "best": best,
        }  # fmt: skip


def set_options(params: Mapping[str, str]) -> list[str]:
    """The options that set the fields of a trial."""
    return [f"--set={name}={value}" for name, value in params.items()]
