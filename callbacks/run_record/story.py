"""Story: what the lines of a journal say about a run, read one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from callbacks.error_text import recorded
from callbacks.run_record.redaction import mask, printable
from callbacks.run_record.values import as_count, as_counter, as_dict, as_list, as_number, as_seconds, as_text, parsed
from callbacks.types import Json, JsonObject

SPEED = "examples_per_second"
STEP = "step/"
"""The names of curves of means within an epoch begin with this, as in MLflow."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that went wrong, or that the run survived: when, at which step, and what."""

    time: float
    step: int
    text: str


class Timeline:
    """How long the attempts of a run took, by the times of its journal lines.

    Attributes:
        attempts: how often the run was started.
        started: the time of the first line; None before it.
        now: the latest time so far.
        points: pairs (step, seconds of all attempts until then).
    """

    def __init__(self) -> None:
        self.attempts = 0
        self.started: float | None = None
        self.now = 0.0
        self.points: list[tuple[int, float]] = []
        self._attempt_began = 0.0
        self._earlier_attempts = 0.0

    @property
    def seconds(self) -> float:
        """The time of all attempts together, without the pauses between them."""
        return self._earlier_attempts + self.seconds_of_attempt

    @property
    def seconds_of_attempt(self) -> float:
        """The time of the attempt that the lines are in."""
        return self.now - self._attempt_began

    def begin_attempt(self, time: float) -> None:
        """Takes in that another attempt began at `time`."""
        # Before `now` moves: the pause between two attempts isn't a time of the run.
        self._earlier_attempts = self.seconds
        self._attempt_began = time
        self.now = time
        self.attempts += 1

    def begin_with(self, time: float) -> None:
        """Takes in the time of the first line; does nothing at later ones."""
        if self.started is None:
            self.started = time
        if not self._attempt_began:  # the journal does not begin with a `restore` line
            self._attempt_began = time


@dataclasses.dataclass
class Curves:
    """The measured values of a run, by step."""

    metrics: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)  # the values of each metric
    speed: dict[int, float] = dataclasses.field(default_factory=dict)  # examples per second

    def add(self, event: str, step: int, values: Mapping[str, Json]) -> None:
        """Takes in the metrics of a line."""
        prefix = STEP if event == "steps_end" else ""
        for name, value in values.items():
            number = as_number(value, finite=False)  # nan and infinities are shown as gaps
            if number is None:
                continue
            if name == SPEED:
                self.speed[step] = number
                continue
            # An evaluation has a line of its own, which names the step at which it was made.
            repeated = event == "epoch_end" and name.startswith("eval_") and name in self.metrics
            if not repeated:
                # By step: an attempt that makes steps again replaces their values.
                self.metrics.setdefault(prefix + name, {})[step] = number


@dataclasses.dataclass
class TimeSplit:
    """Where the time of a run went."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # the chief's seconds by part, of all attempts
    # The seconds by part of each rank, in the last attempt that was profiled.
    ranks: list[dict[str, float]] = dataclasses.field(default_factory=list)
    verdict: list[str] = dataclasses.field(default_factory=list)  # what holds such a run back, in lines
    has_calls: bool = False  # whether the current attempt records where the time of each call went
    # How long the current attempt took until it began to train, if that isn't counted in `seconds` yet.
    starting: float = 0.0

    def begin_attempt(self) -> None:
        """Takes in that another attempt begins."""
        self.has_calls = False
        self.starting = 0.0

    def add(self, seconds: Mapping[str, Json]) -> None:
        """Adds the seconds of a line."""
        parts = as_seconds(seconds)
        # Added with the attempt's first line of times: a killed attempt without one would seem to have only started.
        if self.starting:
            parts = {"starting": self.starting, **parts}
        self.starting = 0.0
        for part, duration in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + duration

    def add_total(self, seconds: Mapping[str, Json]) -> None:
        """Adds the seconds of a whole attempt, unless the lines of its calls have given them already."""
        if not self.has_calls:
            # Without lines of calls, the time of training isn't split, and `other` is the whole of it.
            renamed = {}
            for part, duration in seconds.items():
                renamed["training" if part == "other" else part] = duration
            self.add(renamed)


class Story:
    """What the lines of a journal say, one after the other. `end` must be called after the last one.

    Args:
        whole: whether stalls are looked for; they need the time of every line.
        options: the options of the run, of any JSON type.

    Attributes:
        skipped: the last line that was passed over unread; it is read if the attempt ends with it.
        about: what the run recorded of itself at its start.
        step: the steps made, of the current attempt.
        epoch: the epoch under way.
        examples: those that the current attempt has noted last, counted from the start of the run.
        total_steps: the step at which the run was to end.
        status: how the last attempt ended; "" if that isn't recorded.
        reason: why it was stopped.
        saved: reason and time of each checkpoint, by its name.
        faults: what went wrong.
        timeline: how long it took.
        curves: what was measured.
        split: where the time went.
    """

    def __init__(self, whole: bool, options: Json) -> None:
        self.skipped = b""
        self.about: JsonObject = {}
        self.step = 0
        self.epoch = 0
        self.examples = 0
        self.total_steps: int | None = None
        self.status = ""
        self.reason = ""
        self.saved: dict[str, tuple[str, float]] = {}
        self.faults: list[Fault] = []
        self.timeline = Timeline()
        self.curves = Curves()
        self.split = TimeSplit()
        stall_timeout = as_number(as_dict(options).get("stall_timeout")) if whole else None
        self._patience = stall_timeout or math.inf  # without a time-out, no silence is a stall
        self._end_is_known = True  # of the attempt before: a kill leaves no line

    def take(self, line: bytes) -> None:
        """Reads the next line."""
        entry = parsed(line)
        if entry.get("event") == "restore":
            self._read_skipped()  # the attempt before ended at that line
        self.skipped = b""  # the new line is of a later step than the skipped one
        self._read(entry)

    def end(self) -> None:
        """There are no more lines."""
        self._read_skipped()

    def fault(self, text: str) -> None:
        """Notes that something went wrong."""
        self.faults.append(Fault(self.timeline.now, self.step, printable(mask(text))))

    def pass_time(self, time: float) -> None:
        """Takes in that something happened at `time`."""
        silence = time - self.timeline.now
        # Before the first line `now` is 0, which isn't a time.
        if self.timeline.now and silence >= self._patience:
            self.fault(f"nothing ended for {silence:.0f} s")
        self.timeline.now = max(self.timeline.now, time)  # a clock may be set back

    def _read_skipped(self) -> None:
        if self.skipped:  # its time and step are those at which the attempt ended
            self._read(parsed(self.skipped))
            self.skipped = b""

    def _read(self, entry: JsonObject) -> None:
        event = entry.get("event")
        time = as_number(entry.get("time"))
        # Anyone can write a journal: a time in the far future would make the run last for ages.
        if not isinstance(event, str) or time is None or not 0 <= time < 1e11:
            return
        if event == "system":  # written by a thread: it says neither that training moves, nor where it is
            return
        # First, so that the pause before the attempt isn't a stall.
        if event == "restore":
            self._begin_attempt(time)
        self.pass_time(time)
        self.timeline.begin_with(time)
        if entry.get("beside"):  # of an earlier step: another process has evaluated a checkpoint
            self.curves.add(event, as_counter(entry.get("step")), as_dict(entry.get("metrics")))
            return
        self.epoch = as_counter(entry.get("epoch"))
        self.step = as_counter(entry.get("step"))
        if event in ("steps_end", "eval_end", "epoch_end"):
            self._measured(event, entry)
        # Lines of other events have nothing but a time, a step and metrics.
        reader: Callable[[JsonObject], None] | None = getattr(self, f"_on_{event}", None)
        if reader is not None:
            reader(entry)

    def _begin_attempt(self, time: float) -> None:
        # Noted at the time and the step of the attempt before, at which it was last seen.
        if not self._end_is_known:
            self.fault(f"killed at step {self.step:,}")
        self.timeline.begin_attempt(time)
        self.split.begin_attempt()
        self.status = ""  # that of the attempt before says nothing about this one
        self.examples = 0  # it may go on from an earlier step
        self._end_is_known = False

    def _measured(self, event: str, entry: JsonObject) -> None:
        metrics = as_dict(entry.get("metrics"))
        self.examples = as_count(entry.get("examples")) or self.examples  # an evaluation has none
        self.curves.add(event, self.step, metrics)
        self.timeline.points.append((self.step, self.timeline.seconds))
        skipped_steps = as_number(metrics.get("skipped_steps")) or 0
        if event == "epoch_end" and skipped_steps > 0:
            self.fault(f"{skipped_steps:g} steps of the epoch were skipped: a loss or gradient not finite")

    # What the lines of each event add. A line may be damaged or a stranger's, so each value is checked.

    def _on_restore(self, entry: JsonObject) -> None:
        checkpoint = as_text(entry.get("checkpoint"))
        if self.timeline.attempts > 1 or checkpoint:
            self.fault(f"went on from {checkpoint or 'the start'}")

    def _on_fit_start(self, entry: JsonObject) -> None:
        self.about = as_dict(entry.get("about"))
        self.total_steps = as_count(entry.get("total_steps"))
        # From the `restore` line, the first one of an attempt, to this one.
        self.split.starting = self.timeline.seconds_of_attempt

    def _on_phase_start(self, entry: JsonObject) -> None:
        self.total_steps = as_count(entry.get("total_steps"))

    def _on_call(self, entry: JsonObject) -> None:
        self.split.has_calls = True
        self.split.add(as_dict(entry.get("seconds")))

    def _on_summary(self, entry: JsonObject) -> None:
        self.split.ranks = [as_seconds(as_dict(seconds)) for seconds in as_list(entry.get("seconds"))]
        self.split.verdict = list(map(as_text, as_list(entry.get("text"))))

    def _on_checkpoint(self, entry: JsonObject) -> None:
        self.saved[as_text(entry.get("checkpoint"))] = (as_text(entry.get("reason")), self.timeline.now)

    def _on_exception(self, entry: JsonObject) -> None:
        self.fault(recorded(mask(as_text(entry.get("error")))))

    def _on_worker_gone(self, entry: JsonObject) -> None:
        self.fault(f"worker {as_text(entry.get('worker'))} gone: {as_text(entry.get('how'))}")
        self._end_is_known = True  # the `restore` line of the next attempt follows: the run was not killed

    def _on_worker_joined(self, entry: JsonObject) -> None:
        self.fault(f"worker {as_text(entry.get('worker'))} joined")
        self._end_is_known = True

    def _on_fit_end(self, entry: JsonObject) -> None:
        self._end_is_known = True
        self.status = as_text(entry.get("status"))
        self.reason = as_text(entry.get("reason"))
        if self.status == "preempted":
            self.fault("stopped by a signal")
        speed = as_number(entry.get(SPEED))
        if speed is not None and speed > 0:
            self.curves.speed[self.step] = speed
        self.split.add_total(as_dict(entry.get("seconds")))
