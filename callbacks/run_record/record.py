"""Record: what a run directory tells of a run. Reads `run.json` and the journal, whatever state they are in."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
from calendar import timegm
from collections.abc import Iterator
from pathlib import Path
from time import strptime
from typing import Any

from callbacks import files
from callbacks.metric_direction import lower_is_better
from callbacks.run_record import journal
from callbacks.run_record.redaction import mask, printable, redact

ABOUT, LOCK = "run.json", "lock"
STATUSES = ("finished", "stopped", "preempted", "failed", "running", "killed")
SPEED = "examples_per_second"
STEP = "step/"
"""The names of curves of means within an epoch begin with this, as in MLflow."""

_DEEPEST = 20  # levels of what is in it
_LARGEST = 2.0**53
_PLAIN = re.compile(rb"[ -\[\]-~]*\n?")  # what can be printed as it is
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
class Fault:
    """Something that went wrong, or was borne: when, at which step, what."""

    time: float
    step: int
    text: str


@dataclasses.dataclass(frozen=True)
class Record:
    """A run as its directory tells it. All texts can be printed: what could control a terminal is escaped.

    Attributes:
        path: the run directory.
        name: its name.
        task: the task's class; "" where nobody knows, as for all texts.
        target: where the task is: file.py:Class.
        backend: the engine.
        replicas: how many there were.
        workers: on how many processes.
        status: one of `STATUSES`; `running` only while somebody holds the run's lock, else `killed`; or "".
        reason: why it was stopped; "" if it wasn't.
        started: seconds since the epoch, UTC; None where nobody knows, as for all numbers that may be None.
        seconds: how long it was under way, all its lives together.
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
        clock: (step, seconds under way until then), as it went: where a life goes on from before, steps go back.
        checkpoints: those that are there, oldest first.
        split: the chief's seconds by part, of lives that have told it: see `loop.monitor.stopwatch.PARTS`; and
            `starting`, `compiling`. Without a profile, `training` stands for data, compute, all-reduce and the rest.
        ranks: of a run that was profiled: the seconds by part of each rank, in its last life.
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
        """What runs are told apart by, if nobody says otherwise: the loss, of the evaluation if there is one."""
        names = ["eval_loss", "loss", STEP + "loss", *self.curves]
        return next((name for name in names if name in self.curves), "")


def is_run(path: Path) -> bool:
    """Whether a directory is one of a run, from its first moment on."""
    return any(files.is_plain(path / name) for name in (ABOUT, journal.NAME, LOCK))


def under_way(path: Path) -> bool:
    """Whether somebody holds the lock of a run directory."""
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
    story = _Story(whole, about.get("options"))
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
    progress = _dict(about.get("progress"))
    status = _text(about.get("status")) or story.status
    if under_way(path):
        status = "running"
    elif status == "running" or (not status and story.lives):
        status = "killed"
        story.fault(f"killed at step {story.step:,}: nobody holds its lock, and it has not said how it ended")
    return Record(
        path=path,
        name=printable(path.absolute().name),
        task=_text(about.get("task")),
        target=_text(about.get("target")),
        backend=_text(about.get("backend")),
        replicas=_count(about.get("replicas")),
        workers=_count(about.get("workers")),
        status=status if status in STATUSES else "",
        reason=mask(story.reason),
        started=story.started if story.started is not None else _stamp(about.get("updated")),
        seconds=story.seconds,
        lives=story.lives,
        steps=max(story.step, _count(progress.get("step")) or 0),
        epochs=max(story.epoch, _count(progress.get("epoch")) or 0),
        examples=_count(progress.get("examples")) or 0,
        total_steps=story.total_steps,
        parameters=_count(about.get("parameters")),
        hyperparameters=_dict(about.get("hyperparameters")),
        options=_dict(about.get("options")),
        versions=_dict(about.get("versions")),
        machine=_dict(about.get("machine")),
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
    """When a run began, or was begun with, at little cost; 0.0 where nobody knows."""
    for entry, _ in entries(path):
        if (time := _number(entry.get("time"))) is not None:
            return time
    with contextlib.suppress(OSError):
        return (path / LOCK).lstat().st_mtime
    return _stamp(read_about(path).get("updated")) or 0.0


def read_about(path: Path) -> dict[str, Any]:
    """The `run.json` of a run directory, fit to be printed; an empty one where there is none that can be read."""
    file = path / ABOUT
    try:
        return _dict(_clean(files.read_json(file)))
    except RecursionError:
        return {}


class _Story:
    """What the lines of a journal tell, one after the other."""

    def __init__(self, whole: bool, options: Any) -> None:
        self.whole = whole
        self.patience = _number(_dict(options).get("stall_timeout")) or math.inf
        self.about: dict[str, Any] = {}
        self.started: float | None = None
        self.seconds, self.lives, self.step, self.epoch = 0.0, 0, 0, 0
        self.total_steps: int | None = None
        self.status = self.reason = ""
        self.curves: dict[str, dict[int, float]] = {}
        self.speed: dict[int, float] = {}
        self.clock: list[tuple[int, float]] = []
        self.saved: dict[str, tuple[str, float]] = {}
        self.split: dict[str, float] = {}
        self.ranks: list[dict[str, float]] = []
        self.verdict: list[str] = []
        self.faults: list[Fault] = []
        self.passed = b""  # the last line that wasn't looked into
        self._begun = self._time = 0.0  # of this life: its first line's time, and the last one's
        self._explained = True  # whether it is known why the life before ended
        self._calls = False  # whether this life told where the time of each call went

    def take(self, line: bytes) -> None:
        """The next line."""
        entry = parsed(line)
        if entry.get("event") == "restore":
            self._catch_up()
        self._take(entry)

    def end(self) -> None:
        """There are no more lines."""
        self._catch_up()
        self._close()

    def fault(self, text: str) -> None:
        """Something that wasn't meant to be."""
        self.faults.append(Fault(self._time, self.step, printable(mask(text))))

    def pass_time(self, time: float) -> None:
        """Something happened then."""
        if self.whole and self._time and time - self._time >= self.patience:
            self.fault(f"nothing ended for {time - self._time:.0f} s")
        self._time = max(self._time, time)

    def _catch_up(self) -> None:
        if self.passed:
            self._take(parsed(self.passed))
            self.passed = b""

    def _close(self) -> None:
        self.seconds += max(self._time - self._begun, 0.0)

    def _take(self, entry: dict[str, Any]) -> None:
        event, time = entry.get("event"), _number(entry.get("time"))
        if not isinstance(event, str) or time is None or not 0 <= time < 1e11:
            return
        if event == "restore":
            if not self._explained:
                self.fault(f"killed at step {self.step:,}")
            self._close()
            self._begun = self._time = time
            self.lives += 1
            self.status, self._explained, self._calls = "", False, False
        self.pass_time(time)
        self.started = time if self.started is None else self.started
        self._begun = self._begun or time
        self.epoch = _count(entry.get("epoch")) or 0
        self.step = step = _count(entry.get("step")) or 0
        metrics = _dict(entry.get("metrics"))
        if event in ("steps_end", "eval_end", "epoch_end"):
            self._points(event, step, metrics)
            self.clock.append((step, self.seconds + self._time - self._begun))
        known = getattr(self, f"_{event}", None) if event in _TELLING else None
        if known is not None:
            known(entry)

    def _points(self, event: str, step: int, metrics: dict[str, Any]) -> None:
        prefix = STEP if event == "steps_end" else ""
        for name, value in metrics.items():
            number = _number(value, finite=False)
            if number is None:
                continue
            if name == SPEED:
                self.speed[step] = number
            elif event != "epoch_end" or not name.startswith("eval_") or name not in self.curves:
                self.curves.setdefault(prefix + name, {})[step] = number
        if event == "epoch_end" and (_number(metrics.get("skipped_steps")) or 0) > 0:
            self.fault(f"{metrics['skipped_steps']:g} steps of the epoch were skipped: a loss or gradient not finite")

    def _restore(self, entry: dict[str, Any]) -> None:
        if self.lives > 1 or entry.get("checkpoint"):
            self.fault(f"went on from {_text(entry.get('checkpoint')) or 'the start'}")

    def _fit_start(self, entry: dict[str, Any]) -> None:
        self.about = _dict(entry.get("about"))
        self.total_steps = _count(entry.get("total_steps"))
        self._add({"starting": self._time - self._begun})

    def _phase_start(self, entry: dict[str, Any]) -> None:
        self.total_steps = _count(entry.get("total_steps"))

    def _call(self, entry: dict[str, Any]) -> None:
        self._calls = True
        self._add(_dict(entry.get("seconds")))

    def _summary(self, entry: dict[str, Any]) -> None:
        ranks, text = entry.get("seconds"), entry.get("text")
        self.ranks = [_seconds(_dict(each)) for each in ranks] if isinstance(ranks, list) else []
        self.verdict = [_text(each) for each in text] if isinstance(text, list) else []

    def _checkpoint(self, entry: dict[str, Any]) -> None:
        self.saved[_text(entry.get("checkpoint"))] = _text(entry.get("reason")), self._time

    def _exception(self, entry: dict[str, Any]) -> None:
        self.fault(_text(entry.get("error")))

    def _worker_gone(self, entry: dict[str, Any]) -> None:
        self.fault(f"worker {_text(entry.get('worker'))} gone: {_text(entry.get('how'))}")
        self._explained = True

    def _worker_joined(self, entry: dict[str, Any]) -> None:
        self.fault(f"worker {_text(entry.get('worker'))} joined")
        self._explained = True

    def _fit_end(self, entry: dict[str, Any]) -> None:
        self._explained = True
        self.status, self.reason = _text(entry.get("status")), _text(entry.get("reason"))
        if self.status == "preempted":
            self.fault("stopped by a signal")
        if (speed := _number(entry.get(SPEED))) is not None and speed > 0:
            self.speed[self.step] = speed
        if not self._calls:  # else they have told it already
            seconds = _dict(entry.get("seconds"))
            self._add({"training" if part == "other" else part: some for part, some in seconds.items()})

    def _add(self, seconds: dict[str, Any]) -> None:
        for part, some in _seconds(seconds).items():
            self.split[part] = self.split.get(part, 0.0) + some


_TELLING = (
    "restore", "fit_start", "phase_start", "call", "summary", "checkpoint", "exception", "worker_gone", "worker_joined",
    "fit_end",
)  # fmt: skip


def parsed(line: bytes) -> dict[str, Any]:
    """A line of a journal, fit to be printed; an empty one if it is none."""
    flat = line.count(b"{") + line.count(b"[") < _DEEPEST
    try:
        value = json.loads(line)
        return _dict(value if flat and _PLAIN.fullmatch(line) else _clean(value))
    except (ValueError, RecursionError):
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


def _clean(value: Any, depth: int = _DEEPEST) -> Any:
    """JSON values whose texts can be printed."""
    if not depth:
        raise RecursionError
    if isinstance(value, dict):
        return {printable(name): _clean(item, depth - 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_clean(item, depth - 1) for item in value]
    return printable(value) if isinstance(value, str) else value


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else printable(str(value))


def _number(value: Any, finite: bool = True) -> float | None:
    """A number, as the journal writes it: "nan" and its like are texts there."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) or not finite else None


def _count(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < _LARGEST else None


def _seconds(parts: dict[str, Any]) -> dict[str, float]:
    found = {name: _number(value) for name, value in parts.items()}
    return {name: value for name, value in found.items() if value is not None and 0 <= value < _LARGEST}


def _stamp(value: Any) -> float | None:
    """The time of an ISO text such as `run.json` has."""
    try:
        return float(timegm(strptime(str(value), "%Y-%m-%dT%H:%M:%SZ")))
    except (ValueError, OverflowError):
        return None
