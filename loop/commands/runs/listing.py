"""`tfloop runs`: the table of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.formats import lasting
from callbacks.nearest import nearest
from callbacks.run_record.comparison import best_or_last
from callbacks.run_record.journal import jsonable
from callbacks.run_record.record import Record, printable, read
from loop.commands import terminal
from loop.commands.runs.directories import find
from loop.commands.runs.fields import FIELDS, as_float, attribute_of, check_metric, field_of, names, value
from loop.commands.runs.filters import Filter
from loop.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

_IN_JSON = (*FIELDS, "reason", "total_steps", "hyperparameters", "options", "versions", "machine")


def listed(root: Path, filters: Sequence[str], sort: str | None, metric: str | None) -> list[Record]:
    """The runs below `root` that pass all filters (see `Filter`), sorted by a field, metric or hyperparameter.

    A `-` before the column reverses the order; without one, it is that of the start. The metric, which `table` is to
    show, is only checked here.

    Raises:
        UsageError: a filter, column, metric or value that makes no sense for these runs.
    """
    conditions = list(map(Filter, filters))  # before runs are read, which takes longer than finding a mistake
    # Without the points within epochs: reading all journals whole would take long.
    records = [read(path, whole=False) for path in find(root)]
    if not records:
        return []
    # Checked against all runs: another filter may leave out those that have the name.
    check_metric(metric, records)
    known = names(records)
    for condition in conditions:
        condition.check(records, known)
    order = sort or "started"
    column = field_of(order.removeprefix("-"))
    if column not in known:
        raise UsageError(f"--sort {printable(order)}: the runs have nothing of that name{nearest(column, known)}")

    for condition in conditions:
        records = list(filter(condition, records))
    return _sorted(records, column, reverse=order.startswith("-"))


def _sorted(records: Sequence[Record], column: str, reverse: bool) -> list[Record]:
    """Runs sorted by a column. Those without a value stand last in both directions."""
    having: list[Record] = []
    lacking: list[Record] = []
    for record in records:
        group = lacking if value(record, column) is None else having
        group.append(record)
    having.sort(key=lambda record: _order(value(record, column)), reverse=reverse)
    return having + lacking


def _order(field: object) -> tuple[bool, float, str]:
    """A key for sorting values of all types: numbers come before NaN and texts."""
    if isinstance(field, int | float):
        is_nan = field != field
        return is_nan, as_float(field), ""
    return True, 0.0, str(field)


def table(records: Sequence[Record], metric: str | None) -> Table:
    """The table of runs."""
    head = ["run", "status", "backend", "steps", f"best {metric}" if metric else "best", "duration", "started (UTC)"]
    rows = [list(_cells(record, metric)) for record in records]
    # Columns that a narrow terminal leaves out, in this order. Name and status always stay.
    return terminal.table(rows, head, right=(3, 5), spare=(6, 2, 5, 3, 4))


def _cells(record: Record, metric: str | None) -> Iterator[str]:
    name = metric or record.metric
    best_value = best_or_last(record, name)
    replicas = "" if record.replicas is None else f" x{record.replicas}"
    # A finished run has made all its steps: one number says both.
    of = f"/{record.total_steps:,}" if record.status != "finished" and record.total_steps else ""
    # If a metric was asked for, the head of the column has its name. Otherwise each run may show another one.
    label = "" if metric else f" {name}"

    yield terminal.cut(record.name, 60)
    yield terminal.status(record.status)
    yield f"{record.backend}{replicas}"
    yield f"{record.steps:,}{of}"
    yield "" if best_value is None else f"{best_value:.4g}{label}"
    yield lasting(record.seconds)
    yield terminal.when(record.started)[:16]


def as_json(records: Iterable[Record]) -> str:
    """The runs as a JSON list, without their curves."""
    return json.dumps([jsonable(_fields(record)) for record in records])


def _fields(record: Record) -> dict[str, object]:
    best: dict[str, object] = {}
    last: dict[str, object] = {}
    for name in record.curves:
        last[name] = record.last(name)
        point = record.best(name)
        if point:  # the name says which way the metric gets better
            best[name] = {"step": point[0], "value": point[1]}
    fields = {name: getattr(record, attribute_of(name)) for name in _IN_JSON}
    return {**fields, "path": printable(str(record.path.absolute())), "best": best, "last": last}
