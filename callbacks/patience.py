"""Patience: waits for a metric to improve; the base of EarlyStopping and ReduceOnPlateau."""

from __future__ import annotations

import math

from callbacks import metric_direction
from callbacks.arguments import check, is_number, is_text, is_whole, stored_number
from callbacks.base import Callback, Metrics, Run
from callbacks.formats import number, plural
from callbacks.types import JsonObject


class Patience(Callback):
    """Watches `metric`, and acts when it has not improved for `patience` of its measurements.

    Args:
        metric: a metric of the evaluation (`eval_...`) or of the training epoch.
        patience: the number of measurements without improvement after which it acts, >= 1.
        min_delta: the least change that counts as an improvement, >= 0.
        mode: `"min"`, `"max"`, or `"auto"`: by the name of the metric.

    Raises:
        ValueError: before the first step, if the run has no such metric.
    """

    def __init__(self, metric: str, patience: int, min_delta: float, mode: str) -> None:
        check(self, is_text(metric), "give the name of a metric", metric=metric)
        check(self, is_whole(patience, 1), "give a whole number >= 1", patience=patience)
        check(self, is_number(min_delta, 0), "give a number >= 0", min_delta=min_delta)
        self.metric = metric
        self.watches = {"metric": metric}
        self.patience = patience
        self.min_delta = min_delta
        self.sign = metric_direction.sign(self, "metric", metric, mode)
        self.best: float | None = None
        self.waited = 0

    def act(self, run: Run) -> None:
        """Called at each measurement when the patience is exhausted."""
        raise NotImplementedError

    def improved(self, run: Run, value: float) -> None:
        """Called at each measurement that is better than all before."""

    def on_setup(self, run: Run) -> None:
        # The callback may serve several runs; `load_state_dict` comes afterwards.
        self.best = None
        self.waited = 0

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        if not self.metric.startswith("eval_"):
            return
        # With several evaluation sets, this evaluation may not have been of the one that has the metric.
        is_of_other_set = self.metric not in metrics and self.metric in run.metric_names()
        if not is_of_other_set:
            self.judge(run, metrics)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        if not self.metric.startswith("eval_"):
            self.judge(run, metrics)

    def judge(self, run: Run, metrics: Metrics) -> None:
        """Compares a measurement with the best one so far."""
        # A run without the metric is refused earlier, unless a callback might have added it.
        if self.metric not in metrics:
            raise ValueError(f"{type(self).__name__}(metric={self.metric!r}): this run has only {', '.join(metrics)}")
        value = metrics[self.metric]
        # A value that is not finite isn't an improvement: no later value could be compared with it.
        if math.isfinite(value) and (self.best is None or self.sign * (value - self.best) < -self.min_delta):
            self.best = value
            self.waited = 0
            self.improved(run, value)
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.act(run)

    def waited_for(self) -> str:
        """What it has waited for in vain, in words."""
        measurements = plural(self.waited, "measurement")
        if self.best is None:
            return f"{self.metric} has not been finite for {measurements}"
        return f"{self.metric} has not improved on {number(self.best)} for {measurements}"

    def state_dict(self) -> JsonObject:
        return {"metric": self.metric, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: JsonObject) -> None:
        # The earlier attempt may have watched another metric, whose values can't be compared with this one's. Older
        # checkpoints don't name the metric.
        if state.get("metric", self.metric) == self.metric:
            self.best = stored_number(state, "best", optional=True)
            self.waited = stored_number(state, "waited", whole=True)
