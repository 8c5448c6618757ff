"""LearningRateMonitor: reports the learning rate as a metric."""

from __future__ import annotations

import functools
from typing import ClassVar, Literal

from callbacks.base import Callback, Run
from callbacks.learning_rate import optimizers_of, rate_of

_RATE = "learning_rate"


class LearningRateMonitor(Callback):
    """Adds the learning rate to the metrics of steps and epochs: to journal, MLflow, TensorBoard, tables, history.

    It is the rate of the next step, whether a number or a schedule gives it. Its name is `learning_rate`; with several
    optimizers, `NAME_learning_rate`.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self) -> None:
        self._names: list[str] = []

    def on_setup(self, run: Run) -> None:
        self._names = []
        self.on_phase_start(run)

    def on_phase_start(self, run: Run) -> None:
        # The gauges of the phase before: its optimizers are gone, and may have had other names.
        for name in self._names:
            del run.gauges[name]
        optimizers = optimizers_of(run)
        self._names = [f"{name}_{_RATE}" if name else _RATE for name in optimizers]
        for name, optimizer in zip(self._names, optimizers.values(), strict=True):
            run.gauges[name] = functools.partial(rate_of, optimizer)

    on_fit_start = on_phase_start  # a resumed run may be in a later phase, with other optimizers
