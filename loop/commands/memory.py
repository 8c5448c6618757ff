"""`tfloop memory`: what memory a training needs with settings that save some, and which of them fits.

A few small batches are measured, each in a process of its own. The peak grows linearly with the batch: the slope is
the memory of one example's activations. The memory of variables is counted. A run of two workers shows how much more
each of several workers takes than a single process. The rest doesn't depend on the settings. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.formats import size
from callbacks.types import JsonObject
from loop.commands import command_line, terminal
from loop.commands.memory_measurements import Curve, Prober
from loop.errors import UsageError
from loop.launch import signals
from loop.options import size_in_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

MICRO_BATCHES = 4
"""The number of micro-batches in the settings that accumulate."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A combination of the options that save memory."""

    remat: bool = False  # whether `remat="full"` is on; otherwise `remat` is that of the task
    accumulate: int = 1  # the number of micro-batches
    shard: bool = False  # whether `shard_optimizer` is on


SETTINGS = (
    Setting(),
    Setting(accumulate=MICRO_BATCHES),
    Setting(shard=True),
    Setting(remat=True),
    Setting(remat=True, shard=True),
    Setting(remat=True, accumulate=MICRO_BATCHES),
)
"""The settings in the table: those that cost the least time come first."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The memory that a replica needs with a setting, in bytes."""

    name: str  # the name of the setting, for people
    options: list[str]  # the options to type for it
    weights: int  # the memory of all variables of the model
    gradients: int  # the memory of the gradients, and of the copies of them that a step holds
    optimizer: int  # the memory of slots and moving averages
    activations: int  # the memory that grows with the batch
    rest: int  # TensorFlow itself, the data, what else a step holds, and a checkpoint that is being written
    fits: bool | None = None  # whether the total fits; None: there is no limit

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.rest


@dataclasses.dataclass
class Report:
    """The result of `memory`."""

    command: list[str]  # the command of the training, without a setting
    task: str  # the name of the task's class
    workers: int  # the number of replicas
    batch_size: int  # the size of the global batch
    on_gpu: bool  # whether it is the memory of a GPU, and not that of the host
    limit: float | None  # the memory that a replica has, in bytes; None: there is no limit
    rows: list[Row]  # the settings; those that cost the least time come first
    # The measured peaks in bytes, by the size of the batch; without and with `remat="full"`.
    measured: dict[str, dict[int, int]]

    @property
    def smallest(self) -> Row:
        """The row that needs the least memory."""
        return min(self.rows, key=attrgetter("total"))

    @property
    def best(self) -> Row | None:
        """The row that fits and costs the least time; None: none fits, or there is no limit."""
        for row in self.rows:  # the fastest first
            if row.fits:
                return row
        return None


def parse_size(text: str) -> float:
    """The bytes of a size that was typed as `--memory`.

    Raises:
        UsageError: it isn't a size.
    """
    bytes_ = size_in_bytes(text)
    if bytes_ is None:
        raise UsageError(f"--memory {text}: give a size, such as 16GB or 800MB")
    return bytes_


def memory(
    target: str,
    assignments: Sequence[str] = (),
    batch_size: int | None = None,
    workers: int = 1,
    limit: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
    options: Mapping[str, object] | None = None,
) -> Report:
    """Measures small batches without and with `remat="full"`, and computes what each setting needs.

    Without a batch size, it is the task's own. The limit is what a replica has, in bytes. `progress` is called with a
    text that says what is being measured. `options` are further options of `tfloop train`, by name.

    Raises:
        UsageError: the task can't be trained at all, or not with such a batch.
        TrainingError: the training fails.
    """
    options = dict(options or {})
    arguments = [target, *command_line.arguments(options, assignments)]
    with signals.temporary_directory("tfloop-memory-") as directory:
        prober = Prober(arguments, workers, batch_size, Path(directory), progress)
        plain = prober.curve(remat=False)
        own = plain.about["own"]
        full = plain if own["remat"] == "full" else prober.curve(remat=True)
        settings = [setting for setting in SETTINGS if _is_offered(setting, own, workers)]
        # What a worker takes beyond a single process is measured once for each way to keep the optimizer's state.
        extras: dict[bool, float | None] = {}
        for shard in sorted({setting.shard for setting in settings}):
            extras[shard] = prober.worker_extra(plain, shard)

    batch_size = own["batch_size"] if batch_size is None else batch_size
    rows = []
    for setting in settings:
        curve = full if setting.remat else plain
        rows.append(_row(setting, curve, extras[setting.shard], batch_size, workers, limit))

    # The command without what the task has by itself, and what is the default.
    typed = {"batch_size": batch_size if batch_size != own["batch_size"] else None}
    typed["workers"] = workers if workers > 1 else None
    command = ["tfloop", "train", target, *command_line.arguments(typed | options, assignments)]
    measured = {"plain": plain.peaks, "remat": full.peaks}
    return Report(command, plain.about["task"], workers, batch_size, plain.on_gpu, limit, rows, measured)


def _is_offered(setting: Setting, own: JsonObject, workers: int) -> bool:
    """Whether a setting differs from the task's own options, and can be typed for the task."""
    if own["remat"] == "full" and not setting.remat:  # what the task has on can't be typed off
        return False
    if setting.shard:
        return workers > 1
    # Nor can this be typed off; with one worker, it changes nothing.
    return workers == 1 or not own["shard_optimizer"]


def _row(
    setting: Setting, curve: Curve, extra: float | None, batch_size: int, workers: int, limit: float | None
) -> Row:
    """The memory that a replica needs with a setting, by the measurements of a single process.

    `extra` is how much more each of several workers takes, in bytes; None: it wasn't measured.
    """
    about = curve.about
    own = about["own"]
    rows = math.ceil(batch_size / workers)  # of the replica that has the most
    micro_batch = math.ceil(rows / setting.accumulate)
    state = about["optimizer"] + about["averages"]  # what `shard_optimizer` shares out
    # All rows of the batch are in memory, but activations only of the rows of one micro-batch.
    activations = curve.slope * micro_batch + about["example"] * (rows - micro_batch)
    # With micro-batches, a step holds the sum of gradients and those to be added; with replicas, what is sent and
    # what is received.
    is_unmeasured = workers > 1 and extra is None  # where it was measured, it is in `extra`
    copies = 2 if setting.accumulate > 1 or is_unmeasured else 1
    share = math.ceil(state / workers) if setting.shard else state
    # While a checkpoint is being written, it holds a copy of the variables, which the next steps change.
    checkpoint = about["weights"] + share
    # A single process without micro-batches was measured: it has one copy of everything, and no checkpoint.
    rest = curve.fixed - about["weights"] - about["gradients"] - state + checkpoint + (extra or 0)
    row = Row(
        name=_name(setting, own),
        options=_options(setting, own),
        weights=about["weights"],
        gradients=copies * about["gradients"],
        optimizer=share,
        activations=round(activations),
        rest=max(0, round(rest)),
    )
    return row if limit is None else dataclasses.replace(row, fits=row.total <= limit)


def _name(setting: Setting, own: JsonObject) -> str:
    """The name of a setting, for people."""
    parts = []
    if setting.shard:
        parts.append("sharded")
    if setting.remat:
        parts.append("remat")
    elif own["remat"] is not None:
        parts.append("remat as it is")
    if setting.accumulate > 1:
        parts.append("accumulate")
    return ", ".join(parts) or "plain"


def _options(setting: Setting, own: JsonObject) -> list[str]:
    """The options to type for a setting, as far as the task's own options differ from it."""
    options = []
    if setting.shard and not own["shard_optimizer"]:
        options.append("--shard-optimizer")
    if setting.remat and own["remat"] != "full":
        options += ["--remat", "full"]
    if setting.accumulate != own["accumulate"]:
        options += ["--accumulate", str(setting.accumulate)]
    return options


def lines(report: Report) -> Iterator[RenderableType]:
    """The report for people: a table, and the setting to take."""
    batch = f"a batch of {report.batch_size:,}"
    if report.workers > 1:
        batch += f", {math.ceil(report.batch_size / report.workers):,} on each of {report.workers:,} replicas"
    where = "a GPU" if report.on_gpu else "a process"
    yield f"{report.task}, {batch}: peak memory of {where}, in MB"
    head = ["", "weights", "gradients", "optimizer", "activations", "rest", "total"]
    yield terminal.table([_cells(report, row) for row in report.rows], head, right=range(1, len(head)))
    yield from _verdict(report)


def _cells(report: Report, row: Row) -> list[str]:
    """A row of the table."""
    parts = [row.weights, row.gradients, row.optimizer, row.activations, row.rest]
    cells = [row.name, *(f"{part / 1e6:,.0f}" for part in parts)]
    # The mark shows also where there are no colors. Blanks in its place keep the numbers flush.
    mark = {None: "", True: "  ", False: " !"}[row.fits]
    cells.append(f"{row.total / 1e6:,.0f}{mark}")

    color = None
    if row is report.best:
        color = "green"
    elif row.fits is False:  # and not None, which means that there is no limit
        color = "red"
    return cells if color is None else [terminal.colored(cell, color) for cell in cells]


def _verdict(report: Report) -> Iterator[str]:
    """The setting to take, or why there is none."""
    smallest = report.smallest
    if report.limit is None:
        command = shlex.join(report.command + smallest.options)
        yield f"the smallest is {smallest.name}, {size(smallest.total)}: {command}"
        yield "--memory 16GB says which is the fastest that fits in so much"
        return
    limit = size(report.limit)
    if any(not row.fits for row in report.rows):
        yield f"! doesn't fit in {limit}"
    if report.best is None:
        yield f"none fits in {limit}: the smallest is {smallest.name}, {size(smallest.total)}"
        yield "take a smaller batch (--batch-size), or more workers"
        return
    yield f"the fastest that fits is {report.best.name}: {shlex.join(report.command + report.best.options)}"


def as_json(report: Report) -> JsonObject:
    """The report for programs."""
    rows = [dataclasses.asdict(row) | {"total": row.total} for row in report.rows]
    best = report.best  # without a limit, and where none fits, the smallest is the one to take
    return {
        "task": report.task,
        "batch_size": report.batch_size,
        "workers": report.workers,
        "device": "gpu" if report.on_gpu else "host",
        "memory": report.limit,
        "rows": rows,
        "best": best and best.name,
        "smallest": report.smallest.name,
        "command": report.command + (best or report.smallest).options,
        "measured": report.measured,
    }
