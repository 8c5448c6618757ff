"""`tfloop memory`: what memory a training needs with settings that save some, and which of them fits.

A few small batches are measured, each in a process of its own. The peak grows in a line with the batch: its slope is
what the activations of an example take. What variables take is counted. Two workers show what each of several takes
beyond a process that is alone. The rest doesn't depend on the settings.
Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.formats import size
from loop.commands import command_line, terminal
from loop.commands.memory_measurements import Curve, Prober
from loop.errors import UsageError
from loop.options import size_in_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

MICRO_BATCHES = 4
"""The micro-batches of the settings that accumulate."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A combination of the options that save memory.

    Attributes:
        remat: whether `remat="full"` is on; else it is as the task has it.
        accumulate: the micro-batches.
        shard: whether `shard_optimizer` is on.
    """

    remat: bool = False
    accumulate: int = 1
    shard: bool = False


SETTINGS = (
    Setting(),
    Setting(accumulate=MICRO_BATCHES),
    Setting(shard=True),
    Setting(remat=True),
    Setting(remat=True, shard=True),
    Setting(remat=True, accumulate=MICRO_BATCHES),
)
"""What the table shows: first what costs the least time."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What a replica needs with a setting, in bytes.

    Attributes:
        name: of the setting, for people.
        options: what is typed for it.
        weights: all variables of the model.
        gradients: those of the trainable variables, and the copies of them that a step holds.
        optimizer: slots and moving averages.
        activations: what goes with the batch.
        rest: TensorFlow itself, the data, what the step holds beside the above, and a checkpoint that is written.
        fits: whether the total fits; None: it isn't asked.
    """

    name: str
    options: list[str]
    weights: int
    gradients: int
    optimizer: int
    activations: int
    rest: int
    fits: bool | None = None

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.rest


@dataclasses.dataclass
class Report:
    """What `memory` found.

    Attributes:
        command: the training, as it is typed without a setting.
        task: the name of the task's class.
        workers: the number of replicas.
        batch_size: the global batch.
        on_gpu: whether it is the memory of a GPU, and not that of the host.
        limit: the memory to fit in, in bytes; None: it isn't asked.
        rows: the settings; first what costs the least time.
        measured: the peaks in bytes by the size of the batch, without and with `remat="full"`.
    """

    command: list[str]
    task: str
    workers: int
    batch_size: int
    on_gpu: bool
    limit: float | None
    rows: list[Row]
    measured: dict[str, dict[int, int]]

    @property
    def smallest(self) -> Row:
        """The row that needs the least memory."""
        return min(self.rows, key=lambda row: row.total)

    @property
    def best(self) -> Row | None:
        """The row that fits and costs the least time; None: none fits, or it isn't asked."""
        return next((row for row in self.rows if row.fits), None)


def parse_size(text: str) -> float:
    """The bytes of a size that was typed as `--memory`.

    Raises:
        UsageError: it is no size.
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
    """Measures small batches without and with `remat="full"`, and works out what each setting needs.

    Args:
        target: of `tfloop train`.
        assignments: the fields of the task, as typed.
        batch_size: the global batch; None: the task's own.
        workers: the number of replicas.
        limit: the memory that a replica has, in bytes; None: it isn't asked what fits.
        progress: is called with what is being measured.
        options: more of what is typed for `tfloop train`, by name.

    Raises:
        UsageError: the task can't be trained at all, or not with such a batch.
        TrainingError: it fails.
    """
    options = dict(options or {})
    arguments = [target, *command_line.arguments(options, assignments)]
    with tempfile.TemporaryDirectory(prefix="tfloop-memory-", ignore_cleanup_errors=True) as directory:
        prober = Prober(arguments, workers, batch_size, Path(directory), progress)
        plain = prober.curve(remat=False)
        own = plain.about["own"]
        full = plain if own["remat"] == "full" else prober.curve(remat=True)
        settings = [setting for setting in SETTINGS if _is_offered(setting, own, workers)]
        extras = {shard: prober.worker_extra(plain, shard) for shard in sorted({setting.shard for setting in settings})}
    batch_size = own["batch_size"] if batch_size is None else batch_size
    rows = []
    for setting in settings:
        curve = full if setting.remat else plain
        rows.append(_row(setting, curve, extras[setting.shard], batch_size, workers, limit))
    typed = {"batch_size": batch_size if batch_size != own["batch_size"] else None}
    typed["workers"] = workers if workers > 1 else None
    command = ["tfloop", "train", target, *command_line.arguments(typed | options, assignments)]
    measured = {"plain": plain.peaks, "remat": full.peaks}
    return Report(command, plain.about["task"], workers, batch_size, plain.on_gpu, limit, rows, measured)


def _is_offered(setting: Setting, own: Mapping[str, Any], workers: int) -> bool:
    """Whether a setting is another one than the task's own, and can be typed for it."""
    if own["remat"] == "full" and not setting.remat:
        return False
    if setting.shard:
        return workers > 1
    return workers == 1 or not own["shard_optimizer"]


def _row(
    setting: Setting, curve: Curve, extra: float | None, batch_size: int, workers: int, limit: float | None
) -> Row:
    """What a replica needs with a setting.

    Args:
        setting: the setting.
        curve: of a process that is alone.
        extra: what each of several workers takes beyond that, in bytes; None: it isn't measured.
        batch_size: the global batch.
        workers: the number of replicas.
        limit: what a replica has, in bytes; None: it isn't asked whether it fits.
    """
    about = curve.about
    own = about["own"]
    rows = math.ceil(batch_size / workers)
    micro_batch = math.ceil(rows / setting.accumulate)
    state = about["optimizer"] + about["averages"]
    # All rows of the batch are there, of whose activations only those of a micro-batch are.
    activations = curve.slope * micro_batch + about["example"] * (rows - micro_batch)
    # Micro-batches hold a sum of gradients, and what is added to it; replicas what they send, and what they get.
    copies = 2 if setting.accumulate > 1 or (workers > 1 and extra is None) else 1
    share = math.ceil(state / workers) if setting.shard else state
    # A checkpoint holds what it writes, while the next steps change the variables.
    checkpoint = about["weights"] + share
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


def _name(setting: Setting, own: Mapping[str, Any]) -> str:
    """A setting, for people."""
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


def _options(setting: Setting, own: Mapping[str, Any]) -> list[str]:
    """What is typed for a setting, where the task itself has it otherwise."""
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
    each = f"{math.ceil(report.batch_size / report.workers):,} on each of {report.workers:,} replicas"
    batch = f"a batch of {report.batch_size:,}" + (f", {each}" if report.workers > 1 else "")
    where = "a GPU" if report.on_gpu else "a process"
    yield f"{report.task}, {batch}: peak memory of {where}, in MB"
    head = ["", "weights", "gradients", "optimizer", "activations", "rest", "total"]
    yield terminal.table([_cells(report, row) for row in report.rows], head, right=range(1, len(head)))
    yield from _verdict(report)


def _cells(report: Report, row: Row) -> list[str]:
    parts = [row.weights, row.gradients, row.optimizer, row.activations, row.rest]
    cells = [row.name, *(f"{part / 1e6:,.0f}" for part in parts)]
    # What doesn't fit is marked without colors, too.
    mark = "" if report.limit is None else "  " if row.fits else " !"
    cells.append(f"{row.total / 1e6:,.0f}{mark}")
    if row is report.best:
        return [terminal.colored(cell, "green") for cell in cells]
    return [terminal.colored(cell, "red") for cell in cells] if row.fits is False else cells


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


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs."""
    rows = [dataclasses.asdict(row) | {"total": row.total} for row in report.rows]
    best = report.best
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
