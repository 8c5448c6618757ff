"""`tfloop tune`: trains a task with other settings for a while each, and finds those that are fastest on this machine.

Each trial is `tfloop train` in a process of its own, one at a time: it has the machine, and its memory, to itself.
Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.files import read_json
from callbacks.formats import plural, size
from callbacks.run_record.redaction import mask
from callbacks.throughput_probe import ThroughputProbe
from callbacks.types import JsonObject
from loop.commands import command_line, terminal, trial
from loop.launch import machine, signals

if TYPE_CHECKING:
    from rich.console import RenderableType

TUNED = ("backend", "compile", "steps-per-call", "prefetch", "threads", "batch-size")
"""The settings that can be tried, in this order: each together with the best of those before it."""
# A trial trains until the probe has measured it, and does nothing else that takes time.
_ALWAYS = ["--track=off", "--keep=last", "--eval-every=never", "--resume=auto", f"--steps={trial.ENDLESS}"]

_OF_A_MACHINE = ("horovod", "multiworker", "mirrored")
"""The synchronous backends of several replicas on one machine."""
_GAIN = 1.02
"""A setting must be this many times as fast to be taken."""
_CLOSE = 0.9
"""A setting that is slower than this in its first trial, relative to the best, isn't measured again."""


@dataclasses.dataclass
class Row:
    """A combination of settings, and what was measured with it."""

    changes: dict[str, object]  # the settings that differ from those of the command, by the names of options
    speeds: list[float] = dataclasses.field(default_factory=list)  # the examples per second in each trial
    against: float | None = None  # the ratio of its speed to the speed without changes
    memory: int = 0  # the greatest memory of a trial, in bytes, in all of its workers
    gpu_memory: int = 0  # the greatest memory of a trial on a GPU, in bytes
    problem: str = ""  # why it can't be measured, or ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.changes.items()) or "as it is"

    @property
    def speed(self) -> float:
        """The median of its trials; 0 if there is none."""
        return statistics.median(self.speeds or [0.0])


@dataclasses.dataclass
class Report:
    """The result of `tune`."""

    arguments: list[str]  # the arguments of `tfloop train`: the target and options
    about: JsonObject  # the content of `run.json` of the run without changes
    rows: list[Row]  # all combinations that were measured; the one without changes comes first
    best: Row  # the combination to take
    # All settings of the best combination that were tried, by the names of options; also unchanged ones.
    settings: dict[str, object]
    notes: list[str]  # further remarks


def tune(
    arguments: Sequence[str],
    only: Collection[str] = TUNED,
    seconds: float = 2.0,
    rounds: int = 3,
    batch_size: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Tries one setting after the other, each with the best of those before it.

    The arguments are those of `tfloop train`. Only these settings are tried, out of `TUNED`. Combinations that are
    close are tried in turns, so many rounds. The fastest batch size is taken only if asked for, since it changes what
    is learned. `progress` is called with a text that says what is being measured.
    """
    with signals.temporary_directory("tfloop-tune-") as directory:
        return _Tuner(arguments, seconds, rounds, Path(directory), progress).tune(only, batch_size)


class _Tuner:
    """The trials of a task, one after the other."""

    def __init__(
        self, arguments: Sequence[str], seconds: float, rounds: int, directory: Path, progress: Callable[[str], None]
    ) -> None:
        self._arguments = list(arguments)
        self._seconds = seconds
        self._rounds = rounds
        self._directory = directory
        self._progress = progress
        self._about: JsonObject = {}
        self._rows: list[Row] = []
        self._notes: list[str] = []

    def tune(self, only: Collection[str], batch_size: bool) -> Report:
        """See the function of this name."""
        best = default = self._measured({})
        if default.problem:
            raise trial.failure(self._code, default.problem)
        default.against = 1.0
        about = self._about
        now = _settings(about)
        others = _others(now, about)
        for name, values in others.items():
            if name in only:
                rows = [self._measured(best.changes | {name: value}) for value in values]
                best = self._best(best, rows)
        # Last, with the best of all other settings: the memory that a batch needs depends on them.
        if "batch-size" in only:
            rows = self._batch_sizes(best, about["options"]["batch_size"])
            if batch_size and rows:
                best = self._best(best, [max(rows, key=attrgetter("speed"))])
        if len(best.changes) > 1:
            best = self._confirmed(best, default)

        # Unchanged settings are written, too: what was measured holds for all of them together.
        settings = {name: now[name] for name in others if name in now} | best.changes
        return Report(self._arguments, about, self._rows, best, settings, self._notes)

    def _confirmed(self, best: Row, default: Row) -> Row:
        """The best combination, or the default if that is no slower."""
        # Until now, each setting was compared only with the best of those before it.
        for _ in range(self._rounds):
            self._measure(default)
            self._measure(best)
        best.against = self._recent(best) / self._recent(default)
        if best.against >= _GAIN:
            return best
        self._notes.append(f"{best}: all in all no faster than as it is")
        return default

    def _measured(self, changes: Mapping[str, object]) -> Row:
        """A new row, after its first trial."""
        self._rows.append(Row(dict(changes)))
        self._measure(self._rows[-1])
        return self._rows[-1]

    def _recent(self, row: Row) -> float:
        """The median speed of the last trials of a row, in which it took turns with others."""
        return statistics.median(row.speeds[-self._rounds :])

    def _noise(self, row: Row) -> float:
        """The range of speeds in the last trials of a row."""
        recent = row.speeds[-self._rounds :]
        return max(recent) - min(recent)

    def _best(self, best: Row, rows: Sequence[Row]) -> Row:
        """The fastest row, if it is faster than the best so far by more than the noise; else the best so far."""
        assert best.against is not None
        close = [row for row in rows if row.speed >= _CLOSE * best.speeds[-1]]
        # In turns: a machine may become slower or faster with time. Each row has had its first trial already.
        further_rounds = self._rounds - 1 if close else 0
        for _ in range(further_rounds):
            for row in (best, *close):
                self._measure(row)

        fastest = best
        gain = _GAIN if self._rounds > 1 else 1 / _CLOSE  # a single trial doesn't show the noise
        for row in rows:
            if not row.speeds:
                continue
            # By way of the best row, which took turns with this one: the default may have been measured long before.
            row.against = best.against * self._recent(row) / self._recent(best)
            noise = max(self._noise(row), self._noise(best))
            is_faster = self._recent(row) - self._recent(best) > noise and row.against >= gain * best.against
            if is_faster and self._recent(row) > self._recent(fastest):
                fastest = row
        return fastest

    def _batch_sizes(self, best: Row, batch: int) -> list[Row]:
        """Doubles the batch size while memory and examples suffice, and training becomes faster; returns the rows."""
        assert best.against is not None
        rows = [best]
        growth = best.memory  # before the first doubling: at most, all of it grows with the batch
        slower = 0  # sizes in a row that were no faster
        while slower < 2:
            batch *= 2
            if self._examples is not None and batch > self._examples:
                self._notes.append(f"batch-size {batch}: there are only {self._examples} examples")
                break
            # Not tried where memory may not suffice: running out of it could end another process, too.
            needed = rows[-1].memory + growth
            free = available()
            if needed > free:
                self._notes.append(
                    f"batch-size {batch}: would need about {size(needed)} of memory, {size(free)} are free"
                )
                break
            row = self._measured(best.changes | {"batch-size": batch})
            if row.problem:
                break
            row.against = best.against * row.speed / best.speed
            # Memory grows linearly with the batch, so each doubling adds twice as much as the one before.
            growth = 2 * max(0, row.memory - rows[-1].memory)
            fastest_before = max(before.speed for before in rows)
            slower = 0 if row.speed >= _GAIN * fastest_before else slower + 1
            rows.append(row)
        return rows[1:]

    def _measure(self, row: Row) -> None:
        """Makes a trial, and notes its outcome."""
        text = f"{row}, trial {len(row.speeds) + 1}" if row.speeds else f"{row}"
        self._progress(text)
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        self._train(row, directory)
        # The chief's file is the first, and the only one with a speed; each worker has its own memory.
        workers = [read_json(path) for path in sorted((directory / "run").glob("trial-*.json"))]
        if self._code == 0 and workers and (speed := workers[0]["examples_per_second"]):
            row.speeds.append(speed)
            # On the host, workers share one memory; each has a GPU to itself.
            memory = 0
            for worker in workers:
                memory += worker["memory"]
                row.gpu_memory = max(row.gpu_memory, worker["gpu_memory"])
            row.memory = max(row.memory, memory)
            # The first trial is that of the training as it is.
            if not self._about:
                self._about = read_json(directory / "run" / "run.json") | {"stream": workers[0]["stream"]}
                self._examples = workers[0]["examples"]
        elif not row.speeds:  # else it has worked before, and what was measured then counts
            row.problem = trial.problem(self._code, directory)
        shutil.rmtree(directory, ignore_errors=True)

    def _train(self, row: Row, directory: Path) -> None:
        """Trains in a process of its own, until the trial has been measured."""
        # Behind the user's arguments: if an option is given twice, the last one counts.
        changes = [f"--{name}={value}" for name, value in row.changes.items()]
        own = [command_line.callback_option(ThroughputProbe, self._seconds), f"--run-dir={directory / 'run'}"]
        self._code = trial.run([*self._arguments, *changes, *_ALWAYS, *own], directory)


def _settings(about: JsonObject) -> dict[str, object]:
    """The settings of the run without changes, by the names of options. Threads aren't an option of `fit`."""
    settings = {"backend": about["backend"]}  # the option may be `auto`
    for name in TUNED:
        if name not in ("backend", "threads"):
            settings[name] = about["options"][name.replace("-", "_")]
    return settings


def _others(now: Mapping[str, object], about: JsonObject) -> dict[str, list[object]]:
    """The values to try of each setting beside its own, by the name of the option; without the batch size."""
    cpus = about["machine"]["cpus"]
    settings: dict[str, list[object]] = {}
    if about["workers"] > 1:
        # Which one is the fastest depends on the machine and on the size of the gradients. The numbers are the same.
        settings["backend"] = ["multiworker", "mirrored"] if machine.horovod_missing() else list(_OF_A_MACHINE)
    settings |= {"compile": ["graph", "xla"], "steps-per-call": [1, "auto"]}
    if about["stream"]:  # the only data that `prefetch` means something to
        settings["prefetch"] = [1, 2, 8, "auto"]
    settings["threads"] = sorted({1, max(1, cpus // 2), cpus, max(1, cpus // about["workers"])})
    # 0 threads means that TensorFlow decides, which takes all cores.
    used = {**now, "threads": about["machine"]["intra_op_threads"] or cpus}
    for name, values in settings.items():
        if used[name] in values:
            values.remove(used[name])
    return settings


def available() -> int:
    """The memory that is free on this machine, or left to this container, in bytes."""
    import psutil

    free = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    return min(free)


def lines(report: Report) -> list[RenderableType]:
    """The report for people: a table, its best row in color, and notes."""
    on_gpu = any(row.gpu_memory for row in report.rows)
    memory_head = ["peak memory", "on the GPU"] if on_gpu else ["peak memory"]
    head = ["", "examples/s", "as it is = 1", *memory_head, ""]
    rows = []
    problems = []
    for row in report.rows:
        if row.problem:
            rows.append([str(row), *[""] * (len(head) - 2), "failed"])
            problems.append(f"{row}: failed: {row.problem}")
            continue
        memory = [size(row.memory), size(row.gpu_memory)] if on_gpu else [size(row.memory)]
        cells = [str(row), f"{row.speed:,.0f}", f"{row.against:.2f}", *memory, ""]
        if row is report.best:
            cells[-1] = "best"
            cells = [terminal.colored(cell, "green") for cell in cells]
        rows.append(cells)
    return [terminal.table(rows, head, right=range(1, len(head) - 1)), *problems, *report.notes]


def as_json(report: Report) -> dict[str, object]:
    """The report for programs."""
    rows = [dataclasses.asdict(row) | {"examples_per_second": row.speed} for row in report.rows]
    return {"settings": report.settings, "ratio": report.best.against, "rows": rows, "notes": report.notes}


def command(path: Path, report: Report) -> str:
    """The command that trains with the settings in a file."""
    # Without the options that are in the file: what is typed would win over it.
    words = [word for word in report.arguments if word.partition("=")[0].removeprefix("--") not in report.settings]
    return mask(shlex.join(["tfloop", "train", *words, f"--config={path}"]))


def write(path: Path, report: Report) -> None:
    """Writes the best settings, for `--config`: whole, or not at all."""
    about = report.about
    default = report.rows[0]
    gain = f"nothing was faster than as it is, {default.speed:,.0f} examples/s"
    if report.best.changes:
        speeds = f"{report.best.speed:,.0f} examples/s instead of {default.speed:,.0f}"
        gain = f"{report.best.against:.2f} times as fast as it was: {speeds}"
    backend = report.best.changes.get("backend", about["backend"])
    measured_on = f"{about['machine']['cpus']} CPUs, {backend}, {plural(about['replicas'], 'replica')}"
    comments = [
        f"tfloop tune {' '.join(report.arguments)}",
        f"{time.strftime('%Y-%m-%d')}, {measured_on}, TensorFlow {about['versions']['tensorflow']}",
        gain,
    ]
    if "batch-size" in report.best.changes:
        comments.append("with another batch size something else is learned: look at the learning rate")
    # A command may hold secrets, and line breaks, with which a comment would end.
    written = [f"# {' '.join(mask(text).split())}" for text in comments]
    # Numbers and texts are the same in TOML as in JSON.
    written += [f"{name} = {json.dumps(value)}" for name, value in report.settings.items()]
    with command_line.written_out(path) as file:
        file.write(("\n".join(written) + "\n").encode())
