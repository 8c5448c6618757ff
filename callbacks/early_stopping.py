"""EarlyStopping: stops when a metric has stopped getting better."""

from __future__ import annotations

import math
from typing import Any

from callbacks.base import Callback, Metrics, Run
from callbacks.checkpoint import lower_is_better


class EarlyStopping(Callback):
    """Stops the run when `metric` has not improved for `patience` of its measurements.

    Args:
        metric: a metric of the evaluation (`eval_...`) or of the training epoch.
        patience: how many measurements without improvement are borne, >= 1.
        min_delta: the least change that counts as an improvement, >= 0.
        mode: `"min"`, `"max"` or `"auto"` (min for a name with "loss", "error" or "perplexity").

    Raises:
        ValueError: when the metric is first due, if the run has no such metric.
    """

    def __init__(
        self, metric: str = "eval_loss", patience: int = 3, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        if patience < 1 or min_delta < 0 or mode not in ("auto", "min", "max"):
            raise ValueError(
                f"EarlyStopping(patience={patience}, min_delta={min_delta}, mode={mode!r}): patience must be >= 1, "
                "min_delta >= 0, mode auto, min or max"
            )
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.sign = 1 if mode == "min" or (mode == "auto" and lower_is_better(metric)) else -1
        self.best: float | None = None
        self.waited = 0

    def on_setup(self, run: Run) -> None:
        self.best, self.waited = None, 0

    def on_data(self, run: Run, data: Any) -> Any:
        if self.metric.startswith("eval_") and data.eval is None:
            raise ValueError(f"EarlyStopping(metric={self.metric!r}): this run makes no evaluation")
        return data

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        if self.metric.startswith("eval_"):
            self._judge(run, metrics)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        if not self.metric.startswith("eval_"):
            self._judge(run, metrics)

    def _judge(self, run: Run, metrics: Metrics) -> None:
        if self.metric not in metrics:
            raise ValueError(f"EarlyStopping(metric={self.metric!r}): this run has only {', '.join(metrics)}")
        value = metrics[self.metric]
        if math.isfinite(value) and (self.best is None or self.sign * (value - self.best) < -self.min_delta):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            run.stop(f"{self.metric} has not improved on {self.best} for {self.waited} measurements")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]
