"""Journal: every metric point and event of a run as one line of JSON in `journal.jsonl`, append-only."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from callbacks import files
from callbacks.base import Callback, Every, Metrics, Run
from callbacks.run_record import history
from callbacks.run_record.redaction import redact

NAME = "journal.jsonl"


class Journal(Callback):
    """Writes the journal of a run, the source from which trackers and tables are fed.

    Each line has `time` (seconds since the epoch, UTC), `event`, `step`, `epoch` and what belongs to the event, mostly
    `metrics`. Values that JSON has no number for are the strings "nan", "inf" and "-inf". Lines are flushed at once.
    It is the record of the run's history, too: checkpoints only say how much of the journal is theirs.

    Args:
        every: how often metrics within an epoch are written; see `Callback`. A mean over the end of one epoch and the
            start of the next is left out: those of the epochs say more.
    """

    def __init__(self, every: Every = "1s") -> None:
        self.every = every
        self._file: Any = None
        self._torn = self._silent = False  # the last line found no room; nothing is written yet
        self._last = 0  # the step at which metrics were last on offer

    def on_setup(self, run: Run) -> None:
        path = run.directory / NAME
        if self._file:  # the workers of an elastic job form anew
            self._file.close()
        self._file = files.appending(path)  # a line is one write: lines of other writers don't mix with it
        self._torn = torn(path)
        self._silent = path.stat().st_size > 0  # an attempt that ends before `on_restore` leaves no line
        run.history_in_journal = True

    def on_restore(self, run: Run, path: Path | None) -> None:
        self._silent = False
        for event in run.backend.member.events if run.backend.member else ():
            self._write(run, event["event"], worker=event["worker"], how=event.get("how", ""))
        told = history.until(read_history(run.directory / NAME), run.progress.step)
        # A run that goes on from elsewhere, from an older version, or from an attempt without a journal.
        carried = {} if jsonable(told) == jsonable(run.history) else {"history": jsonable(run.history)}
        self._write(run, "restore", checkpoint=path.name if path else None, **carried)

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
        last, self._last = self._last, run.progress.step
        if last < run.progress.step - run.progress.step_in_epoch:
            return
        speed = {"examples_per_second": run.examples_per_second}
        self._write(run, "steps_end", metrics={**metrics, **speed})

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self._write(run, "eval_end", metrics=metrics)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        self._write(run, "epoch_end", examples=run.progress.examples, metrics=metrics)

    def on_checkpoint(self, run: Run, reason: str) -> None:
        self._write(run, "checkpoint", reason=reason, checkpoint=run.saved_path and run.saved_path.name)

    def on_profile(self, run: Run, kind: str, entry: dict[str, Any]) -> None:
        self._write(run, kind, **entry)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._write(run, "exception", error=f"{type(error).__name__}: {error}")

    def on_fit_end(self, run: Run, status: str) -> None:
        told = {"reason": run.stop_reason, "seconds": run.seconds, "examples_per_second": run.examples_per_second}
        try:
            self._write(run, "fit_end", status=status, **told)
        finally:
            if self._file:
                self._file.close()

    def _write(self, run: Run, event: str, **more: Any) -> None:
        if self._file is None or self._silent:  # or the run ended before on_setup
            return
        path = run.directory / NAME
        if not files.is_same(path, self._file.fileno()):
            text = "it was moved or deleted while the run was writing it; start again with the run directory's path"
            raise files.MovedError(errno.ENOENT, text, str(path))
        line = b"\n" * self._torn + _line(run, event, more)
        self._torn = True
        try:
            while line:  # a disk that is nearly full takes a part of it
                line = line[self._file.write(line) :]
        except OSError as error:
            error.filename = str(path)
            raise
        self._torn = False


def append(run: Run, event: str, **more: Any) -> None:
    """Adds a line to the journal of a run, where it has one; any thread of the chief may do it."""
    path = run.directory / NAME
    if path.exists():
        with files.appending(path) as file:
            file.write(_line(run, event, more))


def artifact(run: Run, path: Path, to: str | None = None, register: str | None = None) -> None:
    """Notes that MLflow is to have a file or a directory, which is complete.

    Args:
        run: the run, on its chief.
        path: where it is, within the run directory.
        to: the directory among the artifacts into which it goes; None: as in the run directory.
        register: of a model, the name under which it is registered; None: it isn't.
    """
    more = {name: value for name, value in (("to", to), ("register", register)) if value is not None}
    append(run, "artifact", path=path.relative_to(run.directory).as_posix(), **more)


def _line(run: Run, event: str, more: Mapping[str, Any]) -> bytes:
    phase = {"phase": run.phase.name} if run.phase else {}
    where = {"step": run.progress.step, "epoch": run.progress.epoch, **phase}
    line = jsonable({"time": time.time(), "event": event, **where, **redact(more)})
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def torn(path: Path) -> bool:
    """Whether a file ends in the middle of a line."""
    with files.reading(path) as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def jsonable(value: Any) -> Any:
    """A value, or a structure of values, as JSON can hold it: floats that are not finite become strings."""
    if isinstance(value, Mapping):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_history(path: Path, end: int | None = None) -> list[history.Row]:
    """The history that the first `end` bytes of a journal tell; see `history.of_entries`."""
    return history.of_entries(read(path, events=history.EVENTS), end)


def read(path: Path, offset: int = 0, events: Sequence[str] = ()) -> Iterator[tuple[dict[str, Any], int]]:
    """The complete lines of a journal from byte `offset` on, each with the offset behind it.

    A last line that is still being written, or was torn by a kill, is left alone; a line that is no JSON is
    passed over.

    Args:
        path: the journal.
        offset: where to begin, in bytes.
        events: the events whose lines are wanted; none: all.
    """
    wanted = [f'"event": "{event}"'.encode() for event in events]
    if not path.exists():
        return
    with files.reading(path) as file:
        file.seek(offset)
        for line in files.lines(file):
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            if wanted and not any(event in line for event in wanted):  # most lines needn't be parsed
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                yield entry, offset
