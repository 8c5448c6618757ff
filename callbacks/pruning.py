"""Pruning: ends a run of `tfloop sweep` that is too bad to continue."""

from __future__ import annotations

from callbacks.base import Callback, Metrics, Run

NAME = "prune"
"""The file in the run directory that requests the end. The sweep reads the run's metrics from its journal."""


class Pruning(Callback):
    """Stops the run when its directory has a file `prune`. It ends with a checkpoint, as after any stop."""

    every = "1s"

    def on_fit_start(self, run: Run) -> None:
        if (run.directory / NAME).exists():
            run.stop("pruned")

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self.on_fit_start(run)

    on_eval_end = on_epoch_end = on_steps_end
