"""Journal: every metric point and event of a run as one line of JSON in `journal.jsonl`, append-only."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from callbacks import files
from callbacks.base import Callback, Every, Metrics, Run
from callbacks.run_record import history
from callbacks.run_record.redaction import redact
from callbacks.types import Json, JsonObject

NAME = "journal.jsonl"


class Journal(Callback):
    """Writes the journal of a run, from which trackers, reports and tables are made.

    Each line has `time` (seconds since the epoch, UTC), `event`, `step`, `epoch` and what belongs to the event, mostly
    `metrics`. Floats that JSON has no number for are the strings "nan", "inf" and "-inf". Each line is flushed at once.
    The journal is also the record of the run's history: a checkpoint only notes how many bytes of it belong to it.

    Args:
        every: how often metrics within an epoch are written; see `Callback`. A mean over the end of one epoch and the
            start of the next is left out: the means of the epochs say more.
    """

    def __init__(self, every: Every = "1s") -> None:
        self.every = every
        self._file: IO[bytes] | None = None
        self._is_silent = False  # nothing is written yet
        self._last = 0  # the step at which `on_steps_end` was last called

    def on_setup(self, run: Run) -> None:
        path = run.directory / NAME
        if self._file:  # the workers of an elastic job form anew
            self._file.close()
        # Appended, and each line in one write: lines of other writers, such as `append`, don't mix with it.
        self._file = files.appending(path)
        self._is_silent = path.stat().st_size > 0  # an attempt that ends before `on_restore` leaves no line
        run.history_in_journal = True

    def on_restore(self, run: Run, path: Path | None) -> None:
        self._is_silent = False
        if run.backend.member:
            for event in run.backend.member.events:
                self._write(run, event["event"], worker=event["worker"], how=event.get("how", ""))
        # Compared as JSON, in which nan is a text: as a float, nan equals nothing, not even itself.
        recorded = jsonable(history.until(read_history(run.directory / NAME), run.progress.step))
        rows = jsonable(run.history)
        # They differ where the run goes on from another directory, an older version, or an attempt without a journal.
        extra = {} if recorded == rows else {"history": rows}
        name = path.name if path else None
        self._write(run, "restore", checkpoint=name, **extra)

    def on_fit_start(self, run: Run) -> None:
        self._last = run.progress.step
        self._write(run, "fit_start", about=run.info, total_steps=run.total_steps)

    def on_phase_start(self, run: Run) -> None:
        if run.phase:
            self._last = run.progress.step
            self._write(run, "phase_start", total_steps=run.total_steps)

    def on_epoch_start(self, run: Run) -> None:
        self._write(run, "epoch_start")

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        last = self._last
        self._last = run.progress.step
        epoch_start = run.progress.step - run.progress.step_in_epoch
        if last >= epoch_start:  # else it is a mean over two epochs
            metrics = {**metrics, "examples_per_second": run.examples_per_second}
            self._write(run, "steps_end", examples=run.progress.examples, metrics=metrics)

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self._write(run, "eval_end", metrics=metrics)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        self._write(run, "epoch_end", examples=run.progress.examples, metrics=metrics)

    def on_checkpoint(self, run: Run, reason: str) -> None:
        self._write(run, "checkpoint", reason=reason, checkpoint=run.saved_path and run.saved_path.name)

    def on_profile(self, run: Run, kind: str, entry: JsonObject) -> None:
        self._write(run, kind, **entry)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._write(run, "exception", error=f"{type(error).__name__}: {error}")

    def on_fit_end(self, run: Run, status: str) -> None:
        speed = run.examples_per_second
        try:
            self._write(
                run, "fit_end", status=status, reason=run.stop_reason, seconds=run.seconds, examples_per_second=speed
            )
        finally:
            if self._file:
                self._file.close()

    def _write(self, run: Run, event: str, **more: Json) -> None:
        if self._file is None or self._is_silent:  # without a file, the run ended before `on_setup`
            return
        path = run.directory / NAME
        if not files.is_same(path, self._file.fileno()):
            text = "it was moved or deleted while the run was writing it; start again with the run directory's path"
            raise files.MovedError(errno.ENOENT, text, str(path))
        _append(path, self._file, _line(run, event, more))


def append(run: Run, event: str, **more: Json) -> None:
    """Adds a line to the journal of a run, if it has one. Any thread of the chief may call it."""
    path = run.directory / NAME
    if path.exists():
        # A descriptor of its own, and unbuffered: the line can't mix with one that `Journal` writes.
        with files.appending(path) as file:
            _append(path, file, _line(run, event, more))


def _append(path: Path, file: IO[bytes], line: bytes) -> None:
    """Adds a line to a journal that is open."""
    # Checked each time: a full disk or a kill may have torn the last line of any writer. A torn line is ended first, so
    # that it spoils no other.
    if _ends_torn(file.fileno()):
        line = b"\n" + line
    with files.naming(path):
        while line:  # a disk that is nearly full takes a part of it
            line = line[file.write(line) :]


def artifact(run: Run, path: Path, to: str | None = None, register: str | None = None) -> None:
    """Notes a complete file or directory that MLflow is to store as an artifact. The chief alone calls it.

    Without `to`, the directory of the artifact, it is stored as it lies in the run directory. A model may be registered
    by a name.
    """
    more = {}
    if to is not None:
        more["to"] = to
    if register is not None:
        more["register"] = register
    append(run, "artifact", path=path.relative_to(run.directory).as_posix(), **more)


def _line(run: Run, event: str, more: Mapping[str, Json]) -> bytes:
    # `time` and `event` come first: `record` relies on it to read long journals fast.
    phase = {"phase": run.phase.name} if run.phase else {}
    position = {"step": run.progress.step, "epoch": run.progress.epoch, **phase}
    line = jsonable({"time": time.time(), "event": event, **position, **redact(more)})
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def is_torn(path: Path) -> bool:
    """Whether a file ends in the middle of a line."""
    with files.reading(path) as file:
        return _ends_torn(file.fileno())


def _ends_torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def jsonable(value: object) -> Json:
    """A value, or a structure of values, that JSON can hold: nan and infinities become strings."""
    if isinstance(value, Mapping):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_history(path: Path, end: int | None = None) -> list[history.Row]:
    """The history in the first `end` bytes of a journal; see `history.of_entries`."""
    return history.of_entries(read(path, events=history.EVENTS), end)


def read(path: Path, offset: int = 0, events: Sequence[str] = ()) -> Iterator[tuple[JsonObject, int]]:
    """The complete lines of a journal from byte `offset` on, of all or these events, each with the offset of its end.

    A last line that is incomplete, because it is being written or a kill has torn it, is not read. A line that is no
    JSON object is passed over.
    """
    wanted = [f'"event": "{event}"'.encode() for event in events]  # as `_line` writes it
    for line, end in lines(path, offset) if path.exists() else ():
        if wanted and not any(event in line for event in wanted):  # parsing every line would be slow
            continue
        with contextlib.suppress(ValueError, RecursionError):  # no JSON, or nested too deeply
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry, end


def lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """The complete lines of a journal from byte `offset` on, unread, each with the offset of its end."""
    with files.reading(path) as file:
        file.seek(offset)
        for line in files.lines(file):
            # The last one may still be under way, or have been torn by a kill.
            if line.endswith(b"\n"):
                offset += len(line)
                yield line, offset
