"""Comparison: what several runs differ in, what came out, and the page that shows both with the curves of all."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from callbacks.base import shown_status
from callbacks.formats import lasting, moment, number
from callbacks.metric_direction import lower_is_better
from callbacks.run_record import page
from callbacks.run_record.charts import Chart, Line, charts
from callbacks.run_record.record import STEP, Record

MOST = 12
"""The most runs on a page: so many colors can be told apart."""
_CHARTS = 24  # on a page
_LONGEST = 120  # characters of a value
_COMPARED = (
    "task", "target", "status", "backend", "replicas", "workers", "parameters", "steps", "epochs", "examples",
)  # fmt: skip
_LABELS = {"hyperparameters": "", "options": "option ", "versions": "version ", "machine": ""}
"""The groups of values that are compared, and what stands before the names of each."""


@dataclasses.dataclass(frozen=True)
class _Compared:
    """A run in the legend of a page: its name, its class in the style sheet, and how it ended."""

    name: str
    kind: str
    status: str
    status_text: str
    facts: str


def html(records: Sequence[Record], live: bool = False) -> str:
    """The page of several runs; a live one asks the server that it comes from for what is new."""
    names = [record.name for record in records]
    return page.rendered(
        "comparison.html",
        live,
        title=f"{len(records)} runs",
        now=time.time(),
        runs=list(_compared(records)),
        curves=_curves(records),
        curves_left_out=len(_charted(records)) - _CHARTS,
        results=page.table(("best", *names), results(records)),
        settings=page.table(("differs", *names), differences(records)),
    )


def differences(records: Sequence[Record]) -> list[list[str]]:
    """A row for each value that isn't the same in all runs: its name, and what each run has."""
    rows = _differing("", list(map(_facts, records)))
    for group, label in _LABELS.items():
        rows += _differing(label, [getattr(record, group) for record in records])
    return rows


def metrics(records: Iterable[Record]) -> list[str]:
    """The metrics that these runs have, each once."""
    names: dict[str, None] = {}  # a set in the order of the first occurrence
    for record in records:
        names |= dict.fromkeys(record.curves)
    return list(names)


def best_or_last(record: Record, metric: str) -> float | None:
    """The best value of a metric, or the last one where its name doesn't say what is best."""
    point = record.best(metric)
    return point[1] if point else record.last(metric)


def best_of_all(metric: str, values: Iterable[float | None]) -> float | None:
    """The best of these values; None where the metric's name doesn't say what that is."""
    less = lower_is_better(metric)
    if less is None:
        return None
    finite = [value for value in values if value is not None and math.isfinite(value)]
    best_of = min if less else max
    return best_of(finite, default=None)


def _facts(record: Record) -> dict[str, object]:
    facts: dict[str, object] = {}
    for name in _COMPARED:
        value = shown_status(record.status) if name == "status" else getattr(record, name)
        if value not in (None, ""):  # unknown: the cell is "-"
            facts[name] = value
    return facts | {"time": lasting(record.seconds)}


def _differing(label: str, runs: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """The rows of one group of values, of which `runs` has those of each run."""
    rows = []
    for name in dict.fromkeys(itertools.chain.from_iterable(runs)):  # each once, in order
        # Compared as they are shown: no row has cells that all look the same.
        cells = [_cell(values, name) for values in runs]
        if len(set(cells)) > 1:
            rows.append([label + name, *cells])
    return rows


def _cell(values: Mapping[str, object], name: str) -> str:
    """A value as a text that isn't too long; "-" if the run doesn't have it."""
    if name not in values:
        return "-"
    text = f"{values[name]}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 2] + ".."


def _compared(records: Sequence[Record]) -> Iterator[_Compared]:
    for index, record in enumerate(records):
        began = "" if record.started is None else moment(record.started)
        facts = [record.task, began, f"{record.steps:,} steps"]
        status = record.status or "unknown"
        shown = " · ".join(filter(None, facts))
        yield _Compared(record.name, f"run{index}", status, shown_status(status), shown)


def _curves(records: Sequence[Record]) -> list[Chart]:
    """A chart for each metric with a line for each run."""
    titles: dict[str, list[Line]] = {}
    for name in _charted(records)[:_CHARTS]:
        titles[name] = []
        for index, record in enumerate(records):
            # By its index, not its name: the style sheet has a color for each of run0 to run11.
            titles[name].append(Line(record.name, f"run{index}", record.curves.get(name, [])))
    return charts(titles)


def _charted(records: Sequence[Record]) -> list[str]:
    """The metrics that have a chart; the loss first, and evaluations before training."""
    known = metrics(records)
    names = []
    for name in known:
        # Means within epochs have a chart only where there are none over epochs.
        if name.startswith(STEP) and name.removeprefix(STEP) in known:
            continue
        names.append(name)
    return sorted(names, key=lambda name: (name.removeprefix("eval_") != "loss", not name.startswith("eval_")))


def results(records: Sequence[Record]) -> list[list[str]]:
    """A row for each metric: the best value of each run with its step, the best of all with a star."""
    rows = []
    for name in metrics(records):
        if name.startswith(STEP):  # means within epochs aren't results
            continue
        top = best_of_all(name, [best_or_last(record, name) for record in records])
        rows.append([name, *(_result(record, name, top) for record in records)])
    return rows


def _result(record: Record, metric: str, top: float | None) -> str:
    value = best_or_last(record, metric)
    if value is None:
        return "-"
    star = " *" if value == top else ""  # several runs have one if their values are equal
    best = record.best(metric)
    when = f"\nat step {best[0]:,}" if best else ""
    return f"{number(value)}{star}{when}"
