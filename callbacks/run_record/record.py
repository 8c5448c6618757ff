"""Record: what a run directory says about a run. Reads `run.json` and the journal, whatever state they are in."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import re
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path

from callbacks import files
from callbacks.checkpoint import step_of
from callbacks.metric_direction import lower_is_better
from callbacks.run_record import journal
from callbacks.run_record.redaction import mask, printable, redact
from callbacks.run_record.story import STEP, Fault, Story
from callbacks.run_record.values import as_count, as_counter, as_dict, as_number, as_stamp, as_text, clean, parsed
from callbacks.types import JsonObject

ABOUT = "run.json"
LOCK = "lock"
STATUSES = ("finished", "stopped", "preempted", "failed", "running", "killed")

# It relies on how `journal` writes a line: first the time, then the event. Other lines are parsed, which takes longer.
_SKIPPED = re.compile(rb'\{"time": [^"{]*"event": "(?:steps_end|call|epoch_start|checkpoint)"')


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a run directory. Its files are counted and not opened."""

    name: str  # of its directory
    step: int  # the number of steps made
    reason: str  # why it was saved; "" where the journal doesn't say
    bytes: int  # the size of its files
    time: float  # when it was complete, in seconds since the epoch, UTC


@dataclasses.dataclass(frozen=True)
class Record:
    """A run as its directory describes it. All texts can be printed: terminal control characters are escaped."""

    path: Path  # the run directory
    name: str  # its name
    task: str = ""  # the task's class; "" where it isn't known, as for all texts
    target: str = ""  # where the task is: file.py:Class
    backend: str = ""  # the name of the backend
    replicas: int | None = None  # how many there were
    workers: int | None = None  # on how many processes
    status: str = ""  # one of `STATUSES`; `running` only while a process holds the run's lock, else `killed`; or ""
    reason: str = ""  # why it was stopped; "" if it wasn't
    # Seconds since the epoch, UTC; None where it isn't known, as for all numbers that may be None.
    started: float | None = None
    seconds: float = 0.0  # how long it ran, all attempts together
    attempts: int = 0  # how often the run was started
    steps: int = 0  # optimizer steps made
    epochs: int = 0  # epochs completed
    examples: int = 0  # examples used
    total_steps: int | None = None  # the step at which it was to end
    parameters: int | None = None  # the number of the model's parameters
    hyperparameters: JsonObject = dataclasses.field(default_factory=dict)  # the task's fields
    options: JsonObject = dataclasses.field(default_factory=dict)  # those of `fit`
    versions: JsonObject = dataclasses.field(default_factory=dict)  # of Python and packages
    machine: JsonObject = dataclasses.field(default_factory=dict)  # what else may change bits
    # Where the code comes from: see `callbacks.run_record.provenance`.
    provenance: JsonObject = dataclasses.field(default_factory=dict)
    # Of `train` and `eval`: `examples`, how many there are, and `sha256` of the first ones.
    data: JsonObject = dataclasses.field(default_factory=dict)
    # Points (step, value) of each metric, by step. Training has one point for each epoch; the names of points within an
    # epoch begin with `step/`, those of evaluations with `eval_`. Values may be nan or infinite.
    curves: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    speed: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # points (step, examples per second)
    # Points (step, seconds of all attempts until then), in the order of time: where an attempt goes on from an earlier
    # step, steps go back.
    clock: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    checkpoints: list[Checkpoint] = dataclasses.field(default_factory=list)  # those in the directory, oldest first
    # The chief's seconds by part, of attempts that have recorded it: see `loop.monitor.stopwatch.PARTS`; and
    # `starting`, `compiling`. Without a profile, `training` stands for data, compute, all-reduce and the rest.
    split: dict[str, float] = dataclasses.field(default_factory=dict)
    # If the run was profiled: the seconds by part of each rank, in its last attempt.
    ranks: list[dict[str, float]] = dataclasses.field(default_factory=list)
    verdict: list[str] = dataclasses.field(default_factory=list)  # of such a run: what holds it back, in lines
    # Exceptions, kills, resumes, skipped steps, workers that came and went, stalls.
    faults: list[Fault] = dataclasses.field(default_factory=list)

    def best(self, metric: str) -> tuple[int, float] | None:
        """The step at which a metric was best, and its value; None where its name doesn't say which way is better."""
        less = lower_is_better(metric)
        if less is None:
            return None
        finite = [point for point in self.curves.get(metric, ()) if math.isfinite(point[1])]
        best_of = min if less else max  # of equal values, both take the first one
        return best_of(finite, key=itemgetter(1), default=None)

    def last(self, metric: str) -> float | None:
        """The last value of a metric, whatever it is."""
        points = self.curves.get(metric)
        return points[-1][1] if points else None

    @property
    def metric(self) -> str:
        """The metric by which runs are compared by default: the loss, of the evaluation if there is one."""
        for name in ("eval_loss", "loss", STEP + "loss", *self.curves):
            if name in self.curves:
                return name
        return ""


def is_run(path: Path) -> bool:
    """Whether a directory is a run directory; also of a run that has just started."""
    return any(files.is_plain(path / name) for name in (ABOUT, journal.NAME, LOCK))


def under_way(path: Path) -> bool:
    """Whether a process holds the lock of a run directory."""
    try:
        file = files.opened(path / LOCK)
    except OSError:
        return False
    try:
        # Shared: two commands that look at the same moment must not take each other for the run.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is held; or a file system without locks: its owner has left the file, or not yet removed it
        return True
    finally:
        os.close(file)  # which gives up this look's own lock, too
    return False


def read(path: Path, whole: bool = True) -> Record:
    """What a run directory says about its run. Nothing in it is an error: what can't be read is left out.

    Where the whole isn't wanted, what is slow to read is left out, too: points within epochs but the last, checkpoints,
    split, stalls.
    """
    return Reader(path, whole).read()


class Reader:
    """Reads a run directory repeatedly: each time only what is new in its journal; see `read`.

    Args:
        path: the run directory.
        whole: see `read`.
        elsewhere: the bytes of each checkpoint by name, if the directory is a copy without checkpoints.
    """

    def __init__(self, path: Path, whole: bool = True, elsewhere: Mapping[str, int] | None = None) -> None:
        self._path = path
        self._whole = whole
        self._elsewhere = elsewhere
        self._story = Story(whole, read_about(path).get("options"))
        self._offset = 0  # bytes of the journal that have been read

    def read(self) -> Record:
        """What the run directory says now."""
        self._read_lines()
        path = self._path
        story = self._story
        # `run.json` wins: it is written again at the end. An older version may have written secrets down.
        about = redact({**story.about, **read_about(path)})
        status = _status(path, as_text(about.get("status")) or story.status, story)
        started = story.timeline.started
        progress = as_dict(about.get("progress"))
        return Record(
            path=path,
            name=printable(path.absolute().name),
            task=as_text(about.get("task")),
            target=as_text(about.get("target")),
            backend=as_text(about.get("backend")),
            replicas=as_count(about.get("replicas")),
            workers=as_count(about.get("workers")),
            status=status,
            reason=mask(story.reason),
            started=as_stamp(about.get("updated")) if started is None else started,
            seconds=story.timeline.seconds,
            attempts=story.timeline.attempts,
            # Either may be behind: `run.json` while the run trains, the journal where the run has none.
            steps=max(story.step, as_counter(progress.get("step"))),
            epochs=max(story.epoch, as_counter(progress.get("epoch"))),
            examples=max(story.examples, as_counter(progress.get("examples"))),
            total_steps=story.total_steps,
            parameters=as_count(about.get("parameters")),
            hyperparameters=as_dict(about.get("hyperparameters")),
            options=as_dict(about.get("options")),
            versions=as_dict(about.get("versions")),
            machine=as_dict(about.get("machine")),
            provenance=as_dict(about.get("provenance")),
            data=as_dict(about.get("data")),
            curves={name: sorted(points.items()) for name, points in story.curves.metrics.items()},
            speed=sorted(story.curves.speed.items()),
            clock=story.timeline.points,
            checkpoints=list(self._checkpoints()) if self._whole else [],
            split=story.split.seconds,
            ranks=story.split.ranks,
            verdict=story.split.verdict,
            faults=[*story.faults, *_killed(status, story)],
        )

    def _checkpoints(self) -> Iterator[Checkpoint]:
        """The checkpoints of the run, oldest first."""
        saved = self._story.saved
        if self._elsewhere is None:
            yield from _checkpoints(self._path / "checkpoints", saved)
            return
        for path in sorted(map(Path, self._elsewhere), key=step_of):
            # A kill may have come before the line that says when it was complete.
            reason, time = saved.get(path.name) or ("", self._story.timeline.now)
            yield Checkpoint(path.name, step_of(path), reason, self._elsewhere[path.name], time)

    def _read_lines(self) -> None:
        """Reads the lines of the journal that came since the last look."""
        for line, end in _lines(self._path / journal.NAME, self._offset):
            self._offset = end
            if not self._whole and _SKIPPED.match(line):
                # Only the last of them matters: it tells how far the attempt came, and when.
                self._story.skipped = line
                continue
            self._story.take(line)
        self._story.end()  # reads the line that was skipped last


def _status(path: Path, recorded: str, story: Story) -> str:
    """The status of a run, one of `STATUSES` or "": a killed run could not record its own."""
    if under_way(path):  # first: what is recorded may be the end of the attempt before
        return "running"
    if recorded == "running" or (not recorded and story.timeline.attempts):
        return "killed"
    return recorded if recorded in STATUSES else ""


def _killed(status: str, story: Story) -> Iterator[Fault]:
    """The last fault of a killed run, which could not record it."""
    if status == "killed":
        text = f"killed at step {story.step:,}: no process holds its lock, and it has not recorded how it ended"
        yield Fault(story.timeline.now, story.step, text)


def entries(path: Path, offset: int = 0) -> Iterator[tuple[JsonObject, int]]:
    """The complete lines of a run's journal from byte `offset` on, parsed, each with the offset of its end."""
    for line, end in _lines(path / journal.NAME, offset):
        yield parsed(line), end


def begun(path: Path) -> float:
    """When a run started, found without reading much; 0.0 where it isn't known."""
    for entry, _ in entries(path):
        if (time := as_number(entry.get("time"))) is not None:
            return time
    # A run that has just started has no line yet, but a lock.
    with contextlib.suppress(OSError):
        return (path / LOCK).lstat().st_mtime
    return as_stamp(read_about(path).get("updated")) or 0.0


def read_about(path: Path) -> JsonObject:
    """The `run.json` of a run directory, fit to be printed; an empty one where there is none that can be read."""
    try:
        return as_dict(clean(files.read_json(path / ABOUT)))
    except RecursionError:  # nested too deeply: it isn't a run's
        return {}


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """The complete lines of a file from byte `offset` on, each with the offset of its end."""
    with contextlib.suppress(OSError):
        yield from journal.lines(path, offset)


def _checkpoints(directory: Path, saved: Mapping[str, tuple[str, float]]) -> Iterator[Checkpoint]:
    """The checkpoints in a directory, oldest first; `saved` has reason and time of those in the journal."""
    try:
        paths = list(filter(is_checkpoint, directory.iterdir()))
    except OSError:
        return
    for path in sorted(paths, key=step_of):
        try:
            with os.scandir(path) as content:
                size = sum(file.stat(follow_symlinks=False).st_size for file in content)
            # The journal's time first: after a copy, that of the directory is the time of the copy.
            reason, time = saved.get(path.name) or ("", path.stat().st_mtime)
        except OSError:  # it is being removed
            continue
        yield Checkpoint(path.name, step_of(path), reason, size, time)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is that of a checkpoint's directory."""
    # One that is still being written has another name. A link could lead anywhere.
    return re.fullmatch(r"step-[0-9]{8,15}", path.name) is not None and path.is_dir() and not path.is_symlink()
