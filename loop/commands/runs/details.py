"""`tfloop runs show`: one run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from callbacks.formats import lasting, plural, size
from callbacks.run_record.journal import jsonable
from callbacks.run_record.record import STEP, Record, printable
from loop.commands import terminal
from loop.commands.runs.fields import check_metric
from loop.options import DEFAULTS

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MOST_PLOTS = 2  # metrics that are plotted where none is asked for


def shown_as_json(record: Record) -> str:
    """All of a run as JSON."""
    return json.dumps(jsonable(dataclasses.asdict(record) | {"path": printable(str(record.path.absolute()))}))


def show(record: Record, metric: str | None = None) -> list[RenderableType]:
    """An overview of a run: its settings, curves and checkpoints, where its time went, and what went wrong.

    Raises:
        UsageError: it has no such metric.
    """
    check_metric(metric, [record])
    parts = terminal.panel(record.name, [_outcome(record), *_facts(record)])
    for title, curves in _plotted(record, metric):
        parts += ["", *terminal.plot(title, curves)]
    if record.curves:
        parts += ["", _metrics(record)]
    if record.checkpoints:
        parts += ["", _checkpoints(record)]
    if record.split:
        parts += ["", terminal.title("where the time went"), terminal.bars(record.split)]
    if record.verdict:
        parts += ["", *record.verdict]
    if record.faults:
        parts += ["", terminal.title("what it went through"), _faults(record)]
    return parts


def _faults(record: Record) -> Table:
    """The table of what went wrong, and when."""
    rows = []
    for fault in record.faults:
        rows.append([terminal.when(fault.time), f"step {fault.step:,}", fault.text])
    return terminal.table(rows, right=(1,))


def _outcome(record: Record) -> str:
    """How the run ended, after how many steps, and when."""
    why = f" ({record.reason})" if record.reason else ""
    # A run that has made all its steps has one number.
    of = f" of {record.total_steps:,}" if record.total_steps and record.total_steps != record.steps else ""
    done = f"{record.steps:,}{of} steps, {plural(record.epochs, 'epoch')}, {record.examples:,} examples"
    attempts = f" in {record.attempts} attempts" if record.attempts > 1 else ""
    since = "" if record.started is None else f", from {terminal.when(record.started)} UTC"
    status = terminal.status(record.status or "?", bold=True)
    return f"{status}{why}: {done}; {lasting(record.seconds)}{attempts}{since}"


def _facts(record: Record) -> list[Table]:
    """The task, the backend and the settings of the run. Unknown entries are left out."""
    parameters = "" if record.parameters is None else f", {record.parameters:,} parameters"
    replicas = terminal.counted(record.replicas, "replica")
    workers = terminal.counted(record.workers, "worker")
    options = {}
    for name, value in record.options.items():
        if value != DEFAULTS.get(name) and name != "backend":  # the backend has a line of its own, with what was chosen
            options[name] = value
    facts = {
        "task": f"{record.target or record.task}{parameters}",
        "backend": record.backend and f"{record.backend}, {replicas} on {workers}",
        "fields": _pairs(record.hyperparameters),
        "options": _pairs(options),
        "versions": _pairs(record.versions),
    }
    rows = [(name, fact) for name, fact in facts.items() if fact]
    return [terminal.table(rows)] if rows else []


def _pairs(values: Mapping[str, object]) -> str:
    return "  ".join(f"{name}={value}" for name, value in values.items())


def _plotted(record: Record, metric: str | None) -> Iterator[tuple[str, dict[str, terminal.Points]]]:
    """The title and the curves of each plot: a metric within epochs, of whole epochs, and of the evaluation."""
    if metric:
        chosen = [_plain_name(metric)]
    else:
        names = dict.fromkeys(map(_plain_name, record.curves))
        # The loss first. The sort is stable: all others keep the order in which the run has them.
        chosen = sorted(names, key=lambda name: name != "loss")[:_MOST_PLOTS]
    for name in chosen:
        kinds = (STEP + name, name, "eval_" + name)
        yield name, {kind: record.curves[kind] for kind in kinds if kind in record.curves}


def _plain_name(metric: str) -> str:
    return metric.removeprefix(STEP).removeprefix("eval_")


def _metrics(record: Record) -> Table:
    """The table of metrics: their last and best values."""
    rows = []
    for name in record.curves:
        if name.startswith(STEP):  # points within epochs are only plotted
            continue
        # Where the name doesn't say which way is better, there is no best value, and no step.
        step, best = record.best(name) or ("", None)
        rows.append([name, _number(record.last(name)), _number(best), f"{step}"])
    return terminal.table(rows, ("metric", "last", "best", "at step"), right=(1, 2, 3))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _checkpoints(record: Record) -> Table:
    """The table of checkpoints."""
    rows = []
    for checkpoint in record.checkpoints:
        when = terminal.when(checkpoint.time)
        rows.append([checkpoint.name, checkpoint.reason, size(checkpoint.bytes), when])
    return terminal.table(rows, ("checkpoint", "saved for", "size", "time"), right=(2,))
