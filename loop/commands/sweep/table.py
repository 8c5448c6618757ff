"""Table: shows the trials of a sweep, in a log or on a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from callbacks.run_record.redaction import shown, tell
from loop.commands.sweep.plan import Range
from loop.commands.sweep.report import Row
from loop.commands.terminal import shown_path

if TYPE_CHECKING:
    from tqdm import tqdm

_LOG_SECONDS = 60.0  # between two lines of a log about the trials that run


class Table:
    """Shows a line for each trial that has ended; on a terminal, also a bar with the trials that run."""

    def __init__(self, fields: Mapping[str, list[str] | Range], metric: str, trials: int, stream: TextIO) -> None:
        self._widths = {}
        for name, values in fields.items():
            listed = map(_short, values) if isinstance(values, list) else ()
            self._widths[name] = _width(name, *listed)
        self._metric = metric
        self._trials = trials
        self._stream = stream
        self._bar: tqdm | None = None
        self._ended = 0
        self._last = time.monotonic()  # when the last line was shown

    def begin(self, directory: Path, rows: Sequence[Row]) -> None:
        """Shows the head of the table, and the trials that had ended before this start of the sweep."""
        ended = [row for row in rows if row.has_ended]
        self.line(f"directory of the sweep: {shown_path(directory)}")
        if ended or any(row.state == "running" for row in rows):
            self.line(f"going on: {len(ended)} of {self._trials} trials have ended")
        if self._stream.isatty():
            from tqdm import tqdm

            form = "{n_fmt}/{total_fmt}|{bar:20}| {desc} [{elapsed}]"
            self._bar = tqdm(total=self._trials, file=self._stream, bar_format=form, dynamic_ncols=True, leave=False)
        names = ""
        for name, width in self._widths.items():
            names += f"{name:>{width}}"
        self.line(f"trial{names}{self._metric:>{_width(self._metric)}}   time")
        for row in ended:
            self.row(row)

    def row(self, row: Row) -> None:
        """Shows a trial that has ended."""
        self._ended += 1
        values = ""
        for name, width in self._widths.items():
            values += f"{_short(row.params.get(name, '')):>{width}}"
        value = "" if row.value is None else f"{row.value:.4g}"
        note = ""
        if row.state != "complete":
            note = f"  {row.state}: {row.problem}" if row.problem else f"  {row.state}"
        seconds = "" if row.seconds is None else f"{row.seconds:.0f} s"
        self.line(f"{row.number:>5}{values}{value:>{_width(self._metric)}}{seconds:>7}{note}")
        if self._bar is not None:
            self._bar.update()

    def doing(self, what: Sequence[object]) -> None:
        """Shows the trials that run; in a log, every `_LOG_SECONDS`."""
        text = ", ".join(map(str, what))
        # A bar is drawn over itself; in a log, each state would be one more line.
        if self._bar is not None:
            self._bar.set_description_str(text)
        elif time.monotonic() - self._last >= _LOG_SECONDS:
            self.line(f"{self._ended} of {self._trials} trials have ended; {text}")

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        text = shown(text)
        self._last = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            tell(text, self._stream)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _width(*texts: str) -> int:
    """The width of a column that has these texts, and numbers."""
    return max(9, *map(len, texts)) + 2  # 9: the longest number that `_short` leaves as it is


def _short(text: str) -> str:
    with contextlib.suppress(ValueError):
        return f"{float(text):.4g}" if len(text) > 9 else text
    return text
