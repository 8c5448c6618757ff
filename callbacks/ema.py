"""EMA: turns on the moving average of the weights."""

from __future__ import annotations

from typing import ClassVar, Literal

from callbacks.arguments import check, is_fraction
from callbacks.base import Callback, Run, SettingsError


class EMA(Callback):
    """The same as `fit(ema=decay)`: what is evaluated, exported and returned is the moving average of the weights.

    Training continues with the weights themselves. The compiled step computes the average; each checkpoint holds it.

    Args:
        decay: how much of the average each step keeps, between 0 and 1.

    Raises:
        ValueError: at the start, if `fit` has another `ema`.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, decay: float = 0.999) -> None:
        check(self, is_fraction(decay), "give a number between 0 and 1, such as 0.999", decay=decay)
        self.decay = decay

    def on_setup(self, run: Run) -> None:
        if run.options["ema"] not in (None, self.decay):
            raise SettingsError(f"EMA(decay={self.decay}), but fit has ema={run.options['ema']}: give one of the two")
        run.options["ema"] = self.decay
