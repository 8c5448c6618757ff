"""Calls: makes the compiled calls of training, each of as many steps as its pace allows, and measures them."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from loop.data import evaluation_sets
from loop.monitor import fault_injection
from loop.monitor.stopwatch import COMPILING
from loop.run.late_changes import LateChanges
from loop.run.pace import Pace
from loop.run.state import whole_variables
from loop.step import approximations
from loop.step.totals import EXAMPLES
from loop.step.unsaved import warn_of_unsaved

if TYPE_CHECKING:
    from loop.run.run import Run


class Calls:
    """The calls of a phase: each phase has a step of its own, whose first call is traced and compiled.

    Attributes:
        pace: how many steps a call of training makes.
        eval_paces: how many batches a call of the evaluation of each set reads.
        made: how many calls of training this phase has made.
        late_changes: of the task and the model, after the step of the phase was traced.
    """

    def __init__(self, steps_per_call: int | str, late_changes: LateChanges) -> None:
        # Without the first call of each phase, which is traced and compiled.
        self._examples = 0
        self._seconds = 0.0
        self._first_speed = 0.0
        self.start_phase(steps_per_call, late_changes)

    def start_phase(self, steps_per_call: int | str, late_changes: LateChanges) -> None:
        """Finds the pace anew, for the step of another phase."""
        self.late_changes = late_changes
        self.pace = Pace(steps_per_call)
        self.eval_paces: defaultdict[str, Pace] = defaultdict(lambda: Pace(steps_per_call))
        self.made = 0

    def make(self, run: Run) -> tuple[int, int, np.ndarray]:
        """Makes the next call: as many steps as the workers have agreed on.

        Returns:
            How many steps it has made, why it ended (see `loop.step.train_step`), and the totals of its steps.
        """
        marker = run.step.phase_marker
        doing = marker.doing if self.made else "the first call: tracing, compiling and running it"
        part = "other" if self.made else COMPILING
        laps_before = marker.laps()
        begun = time.perf_counter()
        # "other" here: the marks in the graph say afterwards what of it was data, computing and all-reduce.
        with run.watchdog.phase(doing), run.stopwatch.at(part):
            fault_injection.reached("call", run.backend.rank, run.progress.step)
            position = run.progress.epoch, run.progress.step_in_epoch
            run.data.start_call(run)
            steps, ending, totals = run.step.train(run.data.iterator, *position, run.decision.steps)
        seconds = time.perf_counter() - begun

        if self.made:
            # Not of the first call, whose time is all counted as compiling.
            laps = marker.laps()
            run.stopwatch.give({part: laps[part] - laps_before[part] for part in laps})
        elif run.backend.is_chief and not run.backend.asynchronous:
            built = run.step.built
            saved = [*whole_variables(run).values(), *built.sliced_variables]
            example = run.step.data.train.example
            warn_of_unsaved(run.task, built, run.backend, saved, run.step.graph(run.data.iterator), example)
        examples = int(totals[EXAMPLES])
        run.stopwatch.count(steps, examples)
        self._record(steps, examples, seconds)
        return steps, ending, totals

    def steps_to_boundary(self, run: Run, steps_to_callback: float) -> int:
        """How many steps the next call makes: as many as fit the pace, up to the next boundary or callback."""
        progress = run.progress
        steps_per_epoch = run.step.data.train.steps_per_epoch  # None: a stream, which ends the call at its end
        pace = approximations.to_average(self.pace.steps, progress.step_in_epoch, run.options["local_steps"])
        left = [pace, steps_to_callback, run.plan.steps_left]
        if steps_per_epoch is not None:
            left.append(steps_per_epoch - progress.step_in_epoch)
        for name in run.step.evaluations:
            every = evaluation_sets.pace(run.options, name)
            if isinstance(every, int):
                left.append(every - progress.step % every)
        return int(min(left))

    def _record(self, steps: int, examples: int, seconds: float) -> None:
        self.pace.record(steps, seconds)
        if self.made:
            self._examples += examples
            self._seconds += seconds
        else:
            self._first_speed = examples / max(seconds, 1e-9)  # a coarse clock may show no time at all
        self.made += 1

    @property
    def examples_per_second(self) -> float:
        """The speed of training in this process. The first call of each phase counts only while there is no other."""
        return self._examples / self._seconds if self._seconds else self._first_speed
