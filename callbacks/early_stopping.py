"""EarlyStopping: stops when a metric has stopped getting better."""

from __future__ import annotations

from callbacks.base import Run
from callbacks.patience import Patience


class EarlyStopping(Patience):
    """Stops the run when `metric` has not improved for `patience` of its measurements.

    Args:
        metric: a metric of the evaluation (`eval_...`) or of the training epoch.
        patience: how many measurements without improvement are borne, >= 1.
        min_delta: the least change that counts as an improvement, >= 0.
        mode: `"min"`, `"max"`, or `"auto"`: by the name of the metric, where that tells.

    Raises:
        ValueError: before the first step, if the run has no such metric.
    """

    def __init__(
        self, metric: str = "eval_loss", patience: int = 3, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        super().__init__(metric, patience, min_delta, mode)

    def act(self, run: Run) -> None:
        run.stop(f"{self.metric} has not improved on {self.best} for {self.waited} measurements")
