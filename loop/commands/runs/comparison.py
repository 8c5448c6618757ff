"""`tfloop runs compare`: what several runs differ in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from callbacks.formats import plural
from callbacks.run_record.comparison import best_of_all, best_or_last, differences, metrics
from callbacks.run_record.record import STEP, Record
from loop.commands import terminal
from loop.commands.runs.fields import check_metric
from loop.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def compare(records: Sequence[Record], metric: str | None = None) -> list[RenderableType]:
    """What runs differ in, their best values, and one curve of each in one plot.

    Raises:
        UsageError: fewer than two, or more than there are letters; no run has the metric.
    """
    if not 2 <= len(records) <= len(LETTERS):
        raise UsageError(f"{plural(len(records), 'run')} to compare: give 2 to {len(LETTERS)}")
    check_metric(metric, records)
    # By letters, because whole names would leave no room for the values.
    by_letter = dict(zip(LETTERS, records, strict=False))
    parts: list[RenderableType] = [f"{letter}  {record.name}" for letter, record in by_letter.items()]

    different = differences(records)
    if different:
        parts += ["", *terminal.tables(different, ["differs", *by_letter])]
    else:
        parts += ["", "they differ in nothing"]
    best_values = _best_values(records, metric)
    parts += ["", *terminal.tables(best_values, ["best", *by_letter], right=range(1, len(records) + 1))]

    # The metric that was asked for, else that of the first run that has one.
    name = metric or ""
    for record in records:
        name = name or record.metric
    if name:
        curves = {letter: record.curves.get(name, []) for letter, record in by_letter.items()}
        parts += ["", *terminal.plot(name, curves)]
    return parts


def _best_values(records: Sequence[Record], metric: str | None) -> list[list[str]]:
    """A row for each metric: its name, and the best value of each run, the best of all with a star."""
    rows = []
    for name in metrics(records):
        # Points within epochs are of metrics that have a row of their own; they get one only if they were asked for.
        if name.startswith(STEP) and name != metric:
            continue
        values = [best_or_last(record, name) for record in records]
        top = best_of_all(name, values)
        rows.append([name, *(_cell(value, top) for value in values)])
    return rows


def _cell(value: float | None, top: float | None) -> str:
    if value is None:
        return "-"
    star = "*" if value == top else " "  # a blank, so that the numbers end flush
    return f"{value:.6g}{star}"
