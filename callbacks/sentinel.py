"""Sentinel: stops the run when replicas differ."""

from __future__ import annotations

from typing import ClassVar, Literal

from callbacks.arguments import check, is_whole
from callbacks.base import Callback, Metrics, Run


class Sentinel(Callback):
    """Compares a hash of every variable across all replicas, before each checkpoint is written.

    Replicas that make the same updates to the same values are equal to the bit. If they aren't, the cause is the
    hardware, a backend, or code that depends on the rank, and further training is worthless: the run fails, and names
    the first variable that differs and the replicas. The last checkpoint is then one from before.

    Args:
        every: `"checkpoint"`, or a number of steps after which replicas are compared, too.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, every: int | str = "checkpoint") -> None:
        is_schedule = every == "checkpoint" or is_whole(every, 1)
        check(self, is_schedule, 'give "checkpoint" or a number of steps >= 1', every=every)
        self.steps = None if every == "checkpoint" else every
        self.every = self.steps or "epoch"  # without steps, the hook does nothing

    def on_setup(self, run: Run) -> None:
        run.check_on_save = True

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        if self.steps is not None:
            run.check_replicas()
