"""Story: what the lines of a journal say of a run, one after the other."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from callbacks.run_record.redaction import mask, printable
from callbacks.run_record.values import as_count, as_dict, as_number, as_seconds, as_text, parsed

SPEED = "examples_per_second"
STEP = "step/"
"""The names of curves of means within an epoch begin with this, as in MLflow."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that went wrong, or was borne: when, at which step, what."""

    time: float
    step: int
    text: str


class Story:
    """What the lines of a journal tell, one after the other."""

    def __init__(self, whole: bool, options: Any) -> None:
        self.whole = whole
        self.patience = as_number(as_dict(options).get("stall_timeout")) or math.inf
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
        self._begun = self._time = 0.0  # of this attempt: its first line's time, and the last one's
        self._explained = True  # whether it is known why the attempt before ended
        self._calls = False  # whether this attempt recorded where the time of each call went

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
        event, time = entry.get("event"), as_number(entry.get("time"))
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
        self.epoch = as_count(entry.get("epoch")) or 0
        self.step = step = as_count(entry.get("step")) or 0
        metrics = as_dict(entry.get("metrics"))
        if event in ("steps_end", "eval_end", "epoch_end"):
            self._points(event, step, metrics)
            self.clock.append((step, self.seconds + self._time - self._begun))
        known = getattr(self, f"_{event}", None) if event in _TELLING else None
        if known is not None:
            known(entry)

    def _points(self, event: str, step: int, metrics: dict[str, Any]) -> None:
        prefix = STEP if event == "steps_end" else ""
        for name, value in metrics.items():
            number = as_number(value, finite=False)
            if number is None:
                continue
            if name == SPEED:
                self.speed[step] = number
            elif event != "epoch_end" or not name.startswith("eval_") or name not in self.curves:
                self.curves.setdefault(prefix + name, {})[step] = number
        if event == "epoch_end" and (as_number(metrics.get("skipped_steps")) or 0) > 0:
            self.fault(f"{metrics['skipped_steps']:g} steps of the epoch were skipped: a loss or gradient not finite")

    def _restore(self, entry: dict[str, Any]) -> None:
        if self.lives > 1 or entry.get("checkpoint"):
            self.fault(f"went on from {as_text(entry.get('checkpoint')) or 'the start'}")

    def _fit_start(self, entry: dict[str, Any]) -> None:
        self.about = as_dict(entry.get("about"))
        self.total_steps = as_count(entry.get("total_steps"))
        self._add({"starting": self._time - self._begun})

    def _phase_start(self, entry: dict[str, Any]) -> None:
        self.total_steps = as_count(entry.get("total_steps"))

    def _call(self, entry: dict[str, Any]) -> None:
        self._calls = True
        self._add(as_dict(entry.get("seconds")))

    def _summary(self, entry: dict[str, Any]) -> None:
        ranks, text = entry.get("seconds"), entry.get("text")
        self.ranks = [as_seconds(as_dict(each)) for each in ranks] if isinstance(ranks, list) else []
        self.verdict = [as_text(each) for each in text] if isinstance(text, list) else []

    def _checkpoint(self, entry: dict[str, Any]) -> None:
        self.saved[as_text(entry.get("checkpoint"))] = as_text(entry.get("reason")), self._time

    def _exception(self, entry: dict[str, Any]) -> None:
        self.fault(as_text(entry.get("error")))

    def _worker_gone(self, entry: dict[str, Any]) -> None:
        self.fault(f"worker {as_text(entry.get('worker'))} gone: {as_text(entry.get('how'))}")
        self._explained = True

    def _worker_joined(self, entry: dict[str, Any]) -> None:
        self.fault(f"worker {as_text(entry.get('worker'))} joined")
        self._explained = True

    def _fit_end(self, entry: dict[str, Any]) -> None:
        self._explained = True
        self.status, self.reason = as_text(entry.get("status")), as_text(entry.get("reason"))
        if self.status == "preempted":
            self.fault("stopped by a signal")
        if (speed := as_number(entry.get(SPEED))) is not None and speed > 0:
            self.speed[self.step] = speed
        if not self._calls:  # else they have told it already
            seconds = as_dict(entry.get("seconds"))
            self._add({"training" if part == "other" else part: some for part, some in seconds.items()})

    def _add(self, seconds: dict[str, Any]) -> None:
        for part, some in as_seconds(seconds).items():
            self.split[part] = self.split.get(part, 0.0) + some


_TELLING = (
    "restore", "fit_start", "phase_start", "call", "summary", "checkpoint", "exception", "worker_gone", "worker_joined",
    "fit_end",
)  # fmt: skip  # fmt: skip
