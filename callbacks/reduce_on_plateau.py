"""ReduceOnPlateau: lowers the learning rate when a metric no longer improves."""

from __future__ import annotations

from typing import ClassVar, Literal

from callbacks.arguments import check, is_fraction, is_number, is_whole, stored_number
from callbacks.base import Metrics, Run, SettingsError, as_floats
from callbacks.formats import number
from callbacks.learning_rate import optimizers_of, own_rate, rate_of
from callbacks.patience import Patience
from callbacks.run_record.redaction import tell
from callbacks.types import JsonObject


class ReduceOnPlateau(Patience):
    """Multiplies the learning rate by `factor` when `metric` has not improved for `patience` of its measurements.

    This is done for all optimizers of the task. The chief's metric decides, and all replicas get the new rate at the
    same step. The rate is a variable of the optimizer, so that a resumed run has it.

    Args:
        metric: a metric of the evaluation (`eval_...`) or of the training epoch.
        factor: what the rate is multiplied by, between 0 and 1.
        patience: the number of measurements without improvement after which the rate is lowered, >= 1.
        min_delta: the least change that counts as an improvement, >= 0.
        cooldown: how many measurements after a reduction don't count against the patience, >= 0.
        min_lr: the lowest rate, >= 0.
        mode: `"min"`, `"max"`, or `"auto"`: by the name of the metric.

    Raises:
        ValueError: before the first step, if an optimizer has a schedule, or the run has no such metric.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(
        self,
        metric: str = "eval_loss",
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        mode: str = "auto",
    ) -> None:
        super().__init__(metric, patience, min_delta, mode)
        check(self, is_fraction(factor), "give a number between 0 and 1", factor=factor)
        check(self, is_whole(cooldown, 0), "give a whole number >= 0 of measurements", cooldown=cooldown)
        check(self, is_number(min_lr, 0), "give a learning rate >= 0", min_lr=min_lr)
        self.factor = factor
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._cooling = 0

    def on_setup(self, run: Run) -> None:
        super().on_setup(run)
        self._cooling = 0

    def on_fit_start(self, run: Run) -> None:
        for name, optimizer in optimizers_of(run).items():
            rate = own_rate(optimizer)
            if callable(rate):
                which = f"{type(optimizer).__name__} ({name!r})" if name else type(optimizer).__name__
                raise SettingsError(
                    f"ReduceOnPlateau: the learning rate of {which} is "
                    f"a schedule, {type(rate).__name__}, which says at each step what it is: leave one of the two out "
                    "(LearningRateScaling makes a schedule, too)"
                )

    on_phase_start = on_fit_start  # a phase has optimizers of its own

    def judge(self, run: Run, metrics: Metrics) -> None:
        # The chief's, so that all ranks act alike: a callback that runs only there may have changed them.
        metrics = run.backend.broadcast_json(as_floats(metrics))
        if self._cooling:
            self._cooling -= 1
            self.waited = -1  # 0 after this measurement
        super().judge(run, metrics)

    def act(self, run: Run) -> None:
        rates = []
        for optimizer in optimizers_of(run).values():
            before = rate_of(optimizer)
            # A rate that is below `min_lr` from the start stays: the callback never raises one.
            rates.append(min(before, max(before * self.factor, self.min_lr)))
            optimizer.learning_rate = rates[-1]
        if run.backend.is_chief:
            now = ", ".join(map(number, rates))
            tell(f"step {run.progress.step:,}: {self.waited_for()}: the learning rate is now {now}")
        self.waited = 0
        self._cooling = self.cooldown

    def state_dict(self) -> JsonObject:
        return super().state_dict() | {"cooling": self._cooling}

    def load_state_dict(self, state: JsonObject) -> None:
        super().load_state_dict(state)
        self._cooling = stored_number(state, "cooling", whole=True, least=0)
