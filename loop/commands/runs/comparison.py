"""`tfloop runs compare`: what several runs differ in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from callbacks.base import shown_status
from callbacks.formats import lasting, plural
from callbacks.metric_direction import lower_is_better
from callbacks.run_record.record import STEP, Record
from loop.commands import terminal
from loop.commands.runs.fields import best, check_metric, metrics
from loop.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COMPARED = (
    "task", "target", "status", "backend", "replicas", "workers", "parameters", "steps", "epochs", "examples",
)  # fmt: skip
_LABELS = {"hyperparameters": "", "options": "option ", "versions": "version ", "machine": ""}
"""The groups of values that are compared, and what stands before the names of each."""
_LONGEST = 120  # characters of a value


def compare(records: Sequence[Record], metric: str | None = None) -> list[RenderableType]:
    """What runs differ in, what came out, and one curve of each in one plot.

    Raises:
        UsageError: fewer than two, or more than there are letters; no run has the metric.
    """
    if not 2 <= len(records) <= len(LETTERS):
        raise UsageError(f"{plural(len(records), 'run')} to compare: give 2 to {len(LETTERS)}")
    check_metric(metric, records)
    by_letter = dict(zip(LETTERS, records, strict=False))
    parts: list[RenderableType] = [f"{letter}  {record.name}" for letter, record in by_letter.items()]

    different = differences(records)
    if different:
        parts += ["", *terminal.tables(different, ["differs", *by_letter])]
    else:
        parts += ["", "they differ in nothing"]
    best_values = _best_values(records, metric)
    parts += ["", *terminal.tables(best_values, ["best", *by_letter], right=range(1, len(records) + 1))]

    name = metric or next((record.metric for record in records if record.metric), "")
    if name:
        parts += ["", *terminal.plot(name, {letter: run.curves.get(name, []) for letter, run in by_letter.items()})]
    return parts


def differences(records: Sequence[Record]) -> list[list[str]]:
    """A row for each value that isn't the same in all runs: its name, and what each run has."""
    rows = _differing("", [_facts(record) for record in records])
    for group, label in _LABELS.items():
        rows += _differing(label, [getattr(record, group) for record in records])
    return rows


def _facts(record: Record) -> dict[str, object]:
    facts = {name: getattr(record, name) for name in _COMPARED}
    facts["status"] = shown_status(record.status)
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    return known | {"time": lasting(record.seconds)}


def _differing(label: str, runs: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """The rows of one group of values, of which `runs` has those of each run."""
    names: dict[str, None] = {}
    for values in runs:
        names |= dict.fromkeys(values)
    rows = []
    for name in names:
        cells = [terminal.cut(f"{values[name]}", _LONGEST) if name in values else "-" for values in runs]
        if len(set(cells)) > 1:
            rows.append([label + name, *cells])
    return rows


def _best_values(records: Sequence[Record], metric: str | None) -> list[list[str]]:
    """A row for each metric: its name, and the best value of each run, the best of all with a star."""
    rows = []
    for name in metrics(records):
        if name.startswith(STEP) and name != metric:
            continue
        values = [best(record, name) for record in records]
        top = _best_of_all(name, values)
        # A blank stands where another cell has its star, so that the numbers end flush.
        cells = ["-" if value is None else f"{value:.6g}" + ("*" if value == top else " ") for value in values]
        rows.append([name, *cells])
    return rows


def _best_of_all(metric: str, values: Sequence[float | None]) -> float | None:
    """The best of these values; None where the metric's name doesn't tell what that is."""
    less = lower_is_better(metric)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return None if less is None else (min if less else max)(finite, default=None)
