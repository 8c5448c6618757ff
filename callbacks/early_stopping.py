"""EarlyStopping: stops the run when a metric no longer improves."""

from __future__ import annotations

from pathlib import Path

from callbacks.arguments import check, stored_number
from callbacks.base import Run, SettingsError
from callbacks.checkpoint import step_of, tell_lost_best
from callbacks.patience import Patience
from callbacks.types import Data, JsonObject


class EarlyStopping(Patience):
    """Stops the run when `metric` has not improved for `patience` of its measurements.

    Args:
        metric: a metric of the evaluation (`eval_...`) or of the training epoch.
        patience: the number of measurements without improvement after which it stops, >= 1.
        min_delta: the least change that counts as an improvement, >= 0.
        mode: `"min"`, `"max"`, or `"auto"`: by the name of the metric.
        restore_best: whether the run returns the weights of the best measurement, however it ends; `export` and
            `evaluate` of the run use them, too. They come from a checkpoint, so `Checkpoint` is needed.

    Raises:
        ValueError: before the first step, if the run has no such metric.
    """

    def __init__(
        self,
        metric: str = "eval_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "auto",
        restore_best: bool = False,
    ) -> None:
        super().__init__(metric, patience, min_delta, mode)
        check(self, isinstance(restore_best, bool), "give True or False", restore_best=restore_best)
        self.restore_best = restore_best
        self.best_step: int | None = None

    def on_setup(self, run: Run) -> None:
        super().on_setup(run)
        self.best_step = None
        if self.restore_best and run.best_is_judged:
            raise SettingsError(
                "two EarlyStopping(restore_best=True): only one says which weights are the result: leave "
                "restore_best out of the other one"
            )
        run.best_is_judged |= self.restore_best  # else `Checkpoint` would choose the result by its own metric

    def on_data(self, run: Run, data: Data) -> Data:
        if self.restore_best and run.options["keep"] == "best":
            raise SettingsError("EarlyStopping(restore_best=True) with keep='best': give one of the two")
        if self.restore_best and not run.save_on_stop:
            raise SettingsError(
                "EarlyStopping(restore_best=True) takes the weights of the best checkpoint: leave callbacks.Checkpoint "
                "in the set"
            )
        return super().on_data(run, data)

    def on_restore(self, run: Run, path: Path | None) -> None:
        if not self.restore_best or self.best is None or self.best_step is None:
            return
        # A resumed run goes on with the best of the attempts before, if its checkpoint is still here.
        steps_on_disk = list(map(step_of, run.checkpoints()))
        if self.best_step in steps_on_disk:
            run.keep_best(self.metric, self.best, self.best_step)
            return
        tell_lost_best(self.best_step)
        self.best = self.best_step = None

    def improved(self, run: Run, value: float) -> None:
        self.best_step = run.progress.step
        if self.restore_best:
            run.keep_best(self.metric, value, run.progress.step)
            # In memory until the next checkpoint is written: a file at each improvement would slow a fast run down.
            run.save("best", later=True)

    def act(self, run: Run) -> None:
        run.stop(self.waited_for())

    def state_dict(self) -> JsonObject:
        return super().state_dict() | {"best_step": self.best_step}

    def load_state_dict(self, state: JsonObject) -> None:
        super().load_state_dict(state)
        # `best` is None, too, if the earlier attempt watched another metric. Older checkpoints don't have this entry.
        has_step = self.best is not None and "best_step" in state
        self.best_step = stored_number(state, "best_step", whole=True, optional=True) if has_step else None
