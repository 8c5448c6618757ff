"""Profiler: traces some steps on each worker, for TensorBoard."""

from __future__ import annotations

from typing import ClassVar, Literal

from callbacks.arguments import check, is_whole
from callbacks.base import Callback, Metrics, Run
from callbacks.run_record.redaction import tell
from callbacks.types import JsonObject


class Profiler(Callback):
    """Traces steps `first` to `last` on each worker, into `profile/rank-N` in the run directory.

    The trace holds everything between the two, also callbacks and evaluations. A run that ends earlier is traced up to
    its end; one that is resumed in between, from there. `fit(profile="first:last")` adds this callback, and has the
    loop report where the time of the whole run goes; the callback prints that at the end.

    Args:
        first: the first step, from 1. The first call of a process is compiled, which takes seconds.
        last: the last step.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, first: int, last: int) -> None:
        is_range = is_whole(first, 1) and is_whole(last, first)
        check(self, is_range, "give the first and the last step, from 1", first=first, last=last)
        self.first = first
        self.last = last
        self.every = (first - 1, last)  # a trace starts after the step before `first`
        self._first_traced = 0
        self._last_traced = 0
        self._lines: list[str] = []

    def on_setup(self, run: Run) -> None:
        # The callback may serve several runs; an attempt of an elastic job may have been cut off within its trace.
        self._end_trace(run)
        self._first_traced = self._last_traced = 0
        self._lines = []

    def on_fit_start(self, run: Run) -> None:
        step = run.progress.step
        end = run.total_steps
        if step >= self.last:
            self._say(run, f"the run goes on from step {step}, past {self.last}: nothing is traced")
        elif end is not None and end < self.first:
            self._say(run, f"the run ends at step {end}, before {self.first}: nothing will be traced")
        elif step >= self.first - 1:  # also with `first` 1, before which no step ends
            self._start(run)

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        if self._first_traced and run.progress.step == self.last:
            self._stop(run)
        elif run.progress.step == self.first - 1 and run.progress.step != run.total_steps:
            self._start(run)

    def on_profile(self, run: Run, kind: str, entry: JsonObject) -> None:
        self._lines = entry.get("text", [])  # the summary has them, and comes last

    def on_fit_end(self, run: Run, status: str) -> None:
        # TensorFlow has one profiler in a process: one left running would refuse the next run's.
        self._end_trace(run)
        if run.backend.is_chief and self._lines:
            tell("\n".join(self._lines))
        if self._last_traced:
            command = f"tensorboard --logdir {run.directory / 'profile'} (pip install tensorboard xprof)"
            self._say(run, f"steps {self._first_traced} to {self._last_traced}: {command}")

    def _start(self, run: Run) -> None:
        import tensorflow as tf

        tf.profiler.experimental.start(str(run.directory / "profile" / f"rank-{run.backend.rank}"))
        self._first_traced = run.progress.step + 1

    def _stop(self, run: Run) -> None:
        import tensorflow as tf

        self._last_traced = run.progress.step
        tf.profiler.experimental.stop()

    def _end_trace(self, run: Run) -> None:
        """Ends the trace, if it is still going on."""
        if self._first_traced and not self._last_traced:
            self._stop(run)

    def _say(self, run: Run, text: str) -> None:
        if run.backend.is_chief:
            tell(f"profile: {text}")
