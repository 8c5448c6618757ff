"""Record: what a run directory tells of a run. Reads `run.json` and the journal, whatever state they are in."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from callbacks import files
from callbacks.metric_direction import lower_is_better
from callbacks.run_record import journal
from callbacks.run_record.redaction import mask, printable, redact
from callbacks.run_record.story import STEP, Fault, Story
from callbacks.run_record.values import as_count, as_dict, as_number, as_stamp, as_text, clean, parsed

ABOUT, LOCK = "run.json", "lock"
STATUSES = ("finished", "stopped", "preempted", "failed", "running", "killed")

_FREQUENT = re.compile(rb'\{"time": (\d{1,11}(?:\.\d+)?), "event": "(steps_end|call)"')
_LONG = 1 << 19  # bytes of a journal that are read at once
_PASSED_OVER = re.compile(rb'\{"time": [^"{]*"event": "(?:steps_end|call|epoch_start|checkpoint)"')


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is there: not looked into.

    Attributes:
        name: of its directory.
        step: the number of steps done.
        reason: why it was saved; "" where the journal doesn't tell.
        bytes: the size of its files.
        time: when it was complete, in seconds since the epoch, UTC.
    """

    name: str
    step: int
    reason: str
    bytes: int
    time: float


@dataclasses.dataclass(frozen=True)
class Record:
    """A run as its directory tells it. All texts can be printed: what could control a terminal is escaped.

    Attributes:
        path: the run directory.
        name: its name.
        task: the task's class; "" where it isn't known, as for all texts.
        target: where the task is: file.py:Class.
        backend: the engine.
        replicas: how many there were.
        workers: on how many processes.
        status: one of `STATUSES`; `running` only while a process holds the run's lock, else `killed`; or "".
        reason: why it was stopped; "" if it wasn't.
        started: seconds since the epoch, UTC; None where it isn't known, as for all numbers that may be None.
        seconds: how long it was under way, in all attempts together.
        lives: how often it was started.
        steps: optimizer steps made.
        epochs: epochs completed.
        examples: examples used.
        total_steps: the step at which it was to end.
        parameters: of the model, how many.
        hyperparameters: the task's fields.
        options: those of `fit`.
        versions: of Python and packages.
        machine: what else may change bits.
        curves: points (step, value) by metric, by step. Training has a point an epoch; those within an epoch are named
            `step/...`; those of evaluations `eval_...`. Values may be nan or infinite.
        speed: examples per second, (step, value).
        clock: (step, seconds under way until then), as it went: where an attempt goes on from before, steps go back.
        checkpoints: those that are there, oldest first.
        split: the chief's seconds by part, of attempts that have recorded it: see `loop.monitor.stopwatch.PARTS`; and
            `starting`, `compiling`. Without a profile, `training` stands for data, compute, all-reduce and the rest.
        ranks: of a run that was profiled: the seconds by part of each rank, in its last attempt.
        verdict: of such a run: what holds it back, in lines.
        faults: exceptions, kills, resumes, skipped steps, workers that came and went, stalls.
    """

    path: Path
    name: str
    task: str = ""
    target: str = ""
    backend: str = ""
    replicas: int | None = None
    workers: int | None = None
    status: str = ""
    reason: str = ""
    started: float | None = None
    seconds: float = 0.0
    lives: int = 0
    steps: int = 0
    epochs: int = 0
    examples: int = 0
    total_steps: int | None = None
    parameters: int | None = None
    hyperparameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, Any] = dataclasses.field(default_factory=dict)
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    speed: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    clock: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    checkpoints: list[Checkpoint] = dataclasses.field(default_factory=list)
    split: dict[str, float] = dataclasses.field(default_factory=dict)
    ranks: list[dict[str, float]] = dataclasses.field(default_factory=list)
    verdict: list[str] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)

    def best(self, metric: str) -> tuple[int, float] | None:
        """The step and value at which a metric was best; None where its name doesn't tell what that is."""
        points = [(step, value) for step, value in self.curves.get(metric, ()) if math.isfinite(value)]
        less = lower_is_better(metric)
        sign = 1 if less else -1
        return None if less is None else min(points, key=lambda point: sign * point[1], default=None)

    def last(self, metric: str) -> float | None:
        """The last value of a metric, whatever it is."""
        points = self.curves.get(metric)
        return points[-1][1] if points else None

    @property
    def metric(self) -> str:
        """The metric by which runs are compared by default: the loss, of the evaluation if there is one."""
        names = ["eval_loss", "loss", STEP + "loss", *self.curves]
        return next((name for name in names if name in self.curves), "")


def is_run(path: Path) -> bool:
    """Whether a directory is one of a run, from its first moment on."""
    return any(files.is_plain(path / name) for name in (ABOUT, journal.NAME, LOCK))


def under_way(path: Path) -> bool:
    """Whether a process holds the lock of a run directory."""
    try:
        file = files.opened(path / LOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: its owner has left the file, or not yet removed it
        return True
    finally:
        os.close(file)
    return False


def read(path: Path, whole: bool = True, quick: bool = False) -> Record:
    """What a run directory tells. Nothing in it is an error: what can't be read is left out.

    Args:
        path: the run directory.
        whole: False leaves out what makes it slow: points within epochs but the last, checkpoints, split, stalls.
        quick: takes of a long journal only so many points within epochs as a picture has room for.
    """
    about = read_about(path)
    story = Story(whole, about.get("options"))
    every, frequent = 1 + (_size(path / journal.NAME) // _LONG if quick else 0), 0
    for line, _ in _lines(path / journal.NAME):
        if not whole and _PASSED_OVER.match(line):
            story.passed = line
            continue
        if every > 1 and (found := _FREQUENT.match(line)):
            frequent += 1
            if found[2] == b"call" or frequent % every:
                story.pass_time(float(found[1]))
                continue
        story.take(line)
    story.end()
    about = redact({**story.about, **about})  # a version before this one may have written secrets down
    progress = as_dict(about.get("progress"))
    status = as_text(about.get("status")) or story.status
    if under_way(path):
        status = "running"
    elif status == "running" or (not status and story.lives):
        status = "killed"
        story.fault(f"killed at step {story.step:,}: no process holds its lock, and it has not recorded how it ended")
    return Record(
        path=path,
        name=printable(path.absolute().name),
        task=as_text(about.get("task")),
        target=as_text(about.get("target")),
        backend=as_text(about.get("backend")),
        replicas=as_count(about.get("replicas")),
        workers=as_count(about.get("workers")),
        status=status if status in STATUSES else "",
        reason=mask(story.reason),
        started=story.started if story.started is not None else as_stamp(about.get("updated")),
        seconds=story.seconds,
        lives=story.lives,
        steps=max(story.step, as_count(progress.get("step")) or 0),
        epochs=max(story.epoch, as_count(progress.get("epoch")) or 0),
        examples=as_count(progress.get("examples")) or 0,
        total_steps=story.total_steps,
        parameters=as_count(about.get("parameters")),
        hyperparameters=as_dict(about.get("hyperparameters")),
        options=as_dict(about.get("options")),
        versions=as_dict(about.get("versions")),
        machine=as_dict(about.get("machine")),
        curves={name: sorted(points.items()) for name, points in story.curves.items()},
        speed=sorted(story.speed.items()),
        clock=story.clock,
        checkpoints=list(_checkpoints(path / "checkpoints", story.saved)) if whole else [],
        split=story.split,
        ranks=story.ranks,
        verdict=story.verdict,
        faults=story.faults,
    )


def entries(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """What the complete lines of a run's journal say from byte `offset` on, each with the offset behind it."""
    for line, behind in _lines(path / journal.NAME, offset):
        yield parsed(line), behind


def begun(path: Path) -> float:
    """When a run began, or was begun with, at little cost; 0.0 where it isn't known."""
    for entry, _ in entries(path):
        if (time := as_number(entry.get("time"))) is not None:
            return time
    with contextlib.suppress(OSError):
        return (path / LOCK).lstat().st_mtime
    return as_stamp(read_about(path).get("updated")) or 0.0


def read_about(path: Path) -> dict[str, Any]:
    """The `run.json` of a run directory, fit to be printed; an empty one where there is none that can be read."""
    file = path / ABOUT
    try:
        return as_dict(clean(files.read_json(file)))
    except RecursionError:
        return {}


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """The complete lines of a file from byte `offset` on, each with the offset behind it."""
    try:
        with files.reading(path) as file:
            file.seek(offset)
            for line in files.lines(file):
                if line.endswith(b"\n"):
                    offset += len(line)
                    yield line, offset
    except OSError:
        return


def _checkpoints(directory: Path, saved: dict[str, tuple[str, float]]) -> Iterator[Checkpoint]:
    try:
        found = sorted(
            (int(path.name.removeprefix("step-")), path)
            for path in directory.iterdir()
            if re.fullmatch(r"step-[0-9]{8,15}", path.name) and path.is_dir() and not path.is_symlink()
        )
    except OSError:
        return
    for step, path in found:
        try:
            with os.scandir(path) as files:
                size = sum(each.stat(follow_symlinks=False).st_size for each in files)
            reason, time = saved.get(path.name) or ("", path.stat().st_mtime)
        except OSError:  # it is being removed
            continue
        yield Checkpoint(path.name, step, reason, size, time)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
