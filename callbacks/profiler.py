"""Profiler: a trace of some steps for TensorBoard, from each worker."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from callbacks.arguments import check, is_whole
from callbacks.base import Callback, Metrics, Run
from callbacks.run_record.redaction import tell


class Profiler(Callback):
    """Traces steps `first` to `last` on each worker, into `profile/rank-N` in the run directory.

    The trace holds all between the two: a callback and an evaluation there, too. A run that ends before is traced up to
    its end, and one that goes on in between from there. `fit(profile="first:last")` adds it, and has the loop tell
    where the time of the whole run goes, which this shows at the end.

    Args:
        first: the first step, from 1. The first call of a process is traced and compiled, which takes seconds.
        last: the last step.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, first: int, last: int) -> None:
        good = is_whole(first, 1) and is_whole(last, first)
        check(self, good, "give the first and the last step, from 1", first=first, last=last)
        self.first, self.last = first, last
        self.every = (first - 1, last)
        self._begun = self._ended = 0
        self._text: list[str] = []

    def on_fit_start(self, run: Run) -> None:
        step, end = run.progress.step, run.total_steps
        if step >= self.last:
            self._say(run, f"the run goes on from step {step}, past {self.last}: nothing is traced")
        elif end is not None and end < self.first:
            self._say(run, f"the run ends at step {end}, before {self.first}: nothing will be traced")
        elif step >= self.first - 1:
            self._start(run)

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        if self._begun and run.progress.step == self.last:
            self._stop(run)
        elif run.progress.step == self.first - 1:
            self._start(run)

    def on_profile(self, run: Run, kind: str, entry: dict[str, Any]) -> None:
        self._text = entry.get("text", [])

    def on_fit_end(self, run: Run, status: str) -> None:
        if self._begun and not self._ended:
            self._stop(run)
        if run.backend.is_chief and self._text:
            tell("\n".join(self._text))
        if self._ended:
            place = f"tensorboard --logdir {run.directory / 'profile'} (pip install tensorboard xprof)"
            self._say(run, f"steps {self._begun} to {self._ended}: {place}")

    def _start(self, run: Run) -> None:
        import tensorflow as tf

        tf.profiler.experimental.start(str(run.directory / "profile" / f"rank-{run.backend.rank}"))
        self._begun = run.progress.step + 1

    def _stop(self, run: Run) -> None:
        import tensorflow as tf

        self._ended = run.progress.step
        tf.profiler.experimental.stop()

    def _say(self, run: Run, text: str) -> None:
        if run.backend.is_chief:
            tell(f"profile: {text}")
