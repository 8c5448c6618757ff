"""Report: a run as one self-contained HTML page, `report.html`.

The templates in `templates/` make the page; this file prepares its content.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping

from callbacks import files, formats
from callbacks.base import Callback, Run, shown_status
from callbacks.formats import lasting, moment, number, part_name, plural
from callbacks.run_record import page, record
from callbacks.run_record.charts import Chart, Line, charts, pace
from callbacks.run_record.page import newest, pairs, table
from callbacks.run_record.record import STEP, Record
from callbacks.run_record.redaction import mask, tell
from callbacks.types import JsonObject

NAME = "report.html"

# The most of each on a page, so that a browser can show the page of any run:
_CHARTS = 24  # the curves of other metrics are rows of the table alone
_MARKS = 40  # dashed lines in a chart
_RANKS = 64  # whose time is shown
_PARTS = (
    "data", "compute", "training", "all_reduce", "evaluation", "callbacks", "saving", "waiting", "other", "starting",
    "compiling",
)  # fmt: skip


class Report(Callback):
    """Writes `report.html` into the run directory at the end of the run, however it ends.

    It must come after `Journal`, whose last line it reads, and before `MLflowTracker`, which delivers it. If it can't
    be written, there is a warning.
    """

    def on_fit_end(self, run: Run, status: str) -> None:
        try:
            run.check_directory()  # another run may have its path by now, whose report this must not replace
            # If this attempt failed before training started, `run.json` has the status of the attempt before.
            written = record.read_about(run.directory).get("status")
            status = status if written == "running" else written or status
            # The lock is still held, so `record` takes the run for a running one.
            ended = dataclasses.replace(record.read(run.directory), status=status)
            files.write_text(run.directory / NAME, html(ended))
        except files.MovedError:  # the run itself has reported that its directory is gone
            return
        except Exception as error:  # a report that can't be made must not fail the run
            tell(f"warning: {NAME} could not be written ({type(error).__name__}: {error})")


def html(of: Record, live: bool = False) -> str:
    """The page of a run; a live one asks the server that it comes from for what is new."""
    status = of.status or "unknown"
    return page.rendered(
        "report.html",
        live,
        title=f"{of.task or 'Run'} · {of.name}",
        now=time.time(),
        run=of,
        status=status,
        status_text=shown_status(status),
        facts=" · ".join(filter(None, _facts(of))),
        reason=f" ({mask(of.reason)})" if of.reason else "",
        trouble=mask(of.faults[-1].text) if of.status == "failed" and of.faults else None,
        tiles=list(_tiles(of)),
        curves=_curves(of),
        curves_left_out=len(_bases(of)) - _CHARTS,
        has_marks=bool(_marks(of)),
        metrics=table(("metric", "first", "last", "best", "at step"), list(_metric_rows(of))),
        times=_times(of),
        speeds=_speeds(of),
        faults=newest(("when", "step", "what"), _fault_rows(of)),
        checkpoints=newest(("checkpoint", "step", "saved for", "size", "when", ""), _checkpoint_rows(of)),
        hyperparameters=pairs(of.hyperparameters),
        options=pairs(of.options),
        topology=pairs(_topology(of)),
    )


@dataclasses.dataclass(frozen=True)
class _Tile:
    """One of the main numbers."""

    name: str
    value: str
    remark: str


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a bar: its class, its position and size in percent, and what the pointer shows."""

    kind: str
    at: float
    share: float
    label: str


@dataclasses.dataclass(frozen=True)
class _Bar:
    """Seconds by part, as a bar."""

    title: str
    total: float
    parts: list[_Part]
    shares: str


@dataclasses.dataclass(frozen=True)
class _Times:
    """The section about the time."""

    parts: list[str]  # the parts that took any time
    bars: list[_Bar]  # of the chief, and of each rank of a profiled run
    verdict: list[str]  # what holds a profiled run back, in lines
    can_be_split: bool  # whether a profile would show more parts


def _facts(of: Record) -> Iterator[str]:
    """The facts about the run, for one line."""
    yield of.backend
    if of.replicas:
        workers = f" on {of.workers} workers" if (of.workers or 1) > 1 else ""
        yield f"{plural(of.replicas, 'replica')}{workers}"
    if batch := of.options.get("batch_size"):
        yield f"global batch {batch}"
    if of.parameters is not None:
        yield f"{of.parameters:,} parameters"
    if of.started is not None:
        yield moment(of.started)


def _tiles(of: Record) -> Iterator[_Tile]:
    """The main numbers: progress, duration, speed, and three metrics."""
    notes = []
    if of.total_steps not in (None, of.steps):
        notes.append(f"of {of.total_steps:,}")
    if of.epochs:
        notes.append(plural(of.epochs, "epoch"))
    yield _Tile("steps", f"{of.steps:,}", ", ".join(notes))
    note = f"in {of.attempts} attempts" if of.attempts > 1 else "in one attempt"
    yield _Tile("duration", lasting(of.seconds), note)
    if of.speed:
        yield _Tile("examples/s", f"{of.speed[-1][1]:,.0f}", "while training")

    for name in _main_metrics(of):
        yield _metric_tile(of, name)


def _main_metrics(of: Record) -> list[str]:
    """At most three metrics: of the evaluation, or of the epochs where there is none; the one that ranks runs first."""
    names = [name for name in of.curves if name.startswith("eval_")]
    names = names or [name for name in of.curves if not name.startswith(STEP)]
    return sorted(names, key=lambda name: name != of.metric)[:3]


def _metric_tile(of: Record, name: str) -> _Tile:
    """A metric's best value; its last one if the name doesn't say which values are better."""
    best = of.best(name)
    last = of.last(name)
    if best is None:
        return _Tile(name, number(last), "last")
    remark = f"at step {best[0]:,}"
    if best[1] != last:
        remark += f"; last {number(last)}"
    return _Tile(f"best {name}", number(best[1]), remark)


def _curves(of: Record) -> list[Chart]:
    """A chart for each metric: in training, within epochs and over them, and in evaluations."""
    titles = {base: _lines(of, base) for base in _bases(of)[:_CHARTS]}
    return charts(titles, _marks(of))


def _bases(of: Record) -> list[str]:
    """The metrics that have a chart of their own, the loss first."""
    bases: dict[str, None] = {}  # a set in the order of the first occurrence
    for name in of.curves:
        bases.setdefault(name.removeprefix(STEP).removeprefix("eval_"))
    return sorted(bases, key=lambda base: base != "loss")


def _metric_rows(of: Record) -> Iterator[tuple[str, ...]]:
    """A row for each metric: its first, last and best value. Those within epochs count where there are no others."""
    # Sorted so that a metric of the evaluation stands beside the same one of the training.
    for name, points in sorted(of.curves.items(), key=lambda item: item[0].removeprefix("eval_")):
        if not points or (name.startswith(STEP) and name.removeprefix(STEP) in of.curves):
            continue
        first = number(points[0][1])
        last = number(points[-1][1])
        best = of.best(name)
        if best is None:
            yield name, first, last, "", ""
        else:
            step, value = best
            yield name, first, last, number(value), f"{step:,}"


def _lines(of: Record, base: str) -> list[Line]:
    """The lines of a metric's chart."""
    within = of.curves.get(STEP + base, [])
    train = of.curves.get(base, [])
    if not train:  # a run without epochs has only means within them
        train = within
        within = []
    held_out = of.curves.get("eval_" + base, [])
    return [
        Line("training", "train", train),
        Line("within epochs", "within", within),
        Line("evaluation", "held", held_out),
    ]


def _marks(of: Record) -> list[int]:
    """The steps of the dashed lines in charts."""
    return sorted({fault.step for fault in of.faults})[:_MARKS]


def _speeds(of: Record) -> list[Chart]:
    """The charts of the speed: while it trained, and in wall-clock time."""
    lines = {
        "examples per second, while training": Line("mean since its process began", "train", of.speed),
        "steps per second, by the clock": Line("evaluation and all else included", "train", list(pace(of.clock))),
    }
    titles = {title: [line] for title, line in lines.items() if len(line.points) > 1}
    return charts(titles, _marks(of))


def _times(of: Record) -> _Times:
    """The time of the chief by part, and that of each rank of a profiled run."""
    rows = [("the chief, all attempts" if of.attempts > 1 else "the chief", of.split)]
    for rank, seconds in enumerate(of.ranks[:_RANKS]):
        rows.append((f"rank {rank}, without its start and compiling", seconds))
    bars = []
    for title, seconds in rows:
        if 0 < sum(seconds.values()) < math.inf:  # the journal may hold any number
            bars.append(_bar(title, seconds))

    times = (of.split, *of.ranks)
    # The lines before the last two are a table of the times, which the bars show.
    has_verdict = len(of.verdict) > 2
    return _Times(
        parts=[part for part in _PARTS if any(seconds.get(part, 0.0) > 0 for seconds in times)],
        bars=bars,
        verdict=list(map(mask, of.verdict[-2:])) if has_verdict else [],
        can_be_split="training" in of.split and not of.ranks,
    )


def _bar(title: str, seconds: Mapping[str, float]) -> _Bar:
    """Seconds by part, as a bar with the shares below."""
    total = sum(seconds.values())
    parts: list[_Part] = []
    at = 0.0
    for name in _PARTS:
        share = 100 * (seconds.get(name, 0.0) / total)
        if share > 0:
            label = f"{part_name(name)}: {lasting(seconds[name])}, {share:.0f}%"
            parts.append(_Part(name, at, share, label))
            at += share
    shares = []
    for part in sorted(parts, key=lambda part: -part.share):
        if part.share >= 0.5:  # less would read 0%
            shares.append(f"{part_name(part.kind)} {part.share:.0f}%")
    return _Bar(title, total, parts, " · ".join(shares))


def _fault_rows(of: Record) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for fault in of.faults:
        rows.append((moment(fault.time), f"{fault.step:,}", mask(fault.text)))
    return rows


def _checkpoint_rows(of: Record) -> list[tuple[str, ...]]:
    best = of.best(of.metric)
    rows: list[tuple[str, ...]] = []
    for saved in of.checkpoints:
        remark = f"best {of.metric}" if best and saved.step == best[0] else ""
        size = formats.size(saved.bytes)
        rows.append((saved.name, f"{saved.step:,}", saved.reason, size, moment(saved.time), remark))
    return rows


def _topology(of: Record) -> JsonObject:
    topology = {"backend": of.backend, "replicas": of.replicas, "workers": of.workers, "target": of.target}
    return topology | of.versions | of.machine
