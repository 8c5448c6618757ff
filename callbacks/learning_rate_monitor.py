"""LearningRateMonitor: makes the learning rate a metric."""

from __future__ import annotations

import functools
from typing import ClassVar, Literal

from callbacks.base import Callback, Run
from callbacks.learning_rate import optimizers_of, rate_of


class LearningRateMonitor(Callback):
    """Adds the learning rate to the metrics of steps and epochs: to journal, MLflow, TensorBoard, tables, history.

    It is the rate of the step that comes next, whether it is a number or a schedule says it: `learning_rate`; where
    there are several optimizers, `NAME_learning_rate`.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def on_setup(self, run: Run) -> None:
        for name, optimizer in optimizers_of(run).items():
            run.gauges[f"{name}_learning_rate" if name else "learning_rate"] = functools.partial(rate_of, optimizer)
