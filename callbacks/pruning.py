"""Pruning: ends a run that `tfloop sweep` has found not worth going on with."""

from __future__ import annotations

from callbacks.base import Callback, Metrics, Run

NAME = "prune"
"""The file in the run directory that asks for the end. How good the run is, its journal says."""


class Pruning(Callback):
    """Stops the run when the file `prune` is in its directory; it ends as after any stop, with a checkpoint."""

    every = "1s"

    def on_fit_start(self, run: Run) -> None:
        if (run.directory / NAME).exists():
            run.stop("pruned")

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self.on_fit_start(run)

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self.on_fit_start(run)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        self.on_fit_start(run)
