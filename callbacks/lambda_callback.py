"""LambdaCallback: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable

from callbacks.base import EVENTS, Callback, Every, Schedule
from callbacks.nearest import nearest


class LambdaCallback(Callback):
    """Calls functions at the events for which they are given, with what the hook of the event receives.

    `LambdaCallback(epoch_end=lambda run, metrics: print(metrics))`.

    Args:
        runs_on: `"chief"` or `"all"`; see `Callback`.
        every: when `steps_end` is called; see `Callback`.
        **hooks: functions by event; see `EVENTS`.

    Raises:
        ValueError: there is no such event, something isn't a function, or another argument is wrong.
    """

    def __init__(self, *, runs_on: str = "chief", every: Every = "epoch", **hooks: Callable[..., object]) -> None:
        if runs_on not in ("chief", "all"):
            raise ValueError(f"LambdaCallback(runs_on={runs_on!r}): give chief or all")
        # Refused here: the run makes a schedule of it only when it starts.
        try:
            Schedule(every)
        except ValueError as error:
            raise ValueError(f"LambdaCallback: {error}") from None
        for event, hook in hooks.items():
            if event not in EVENTS:
                raise ValueError(f"LambdaCallback({event}=...): there is no such event{nearest(event, EVENTS)}")
            if not callable(hook):
                raise ValueError(f"LambdaCallback({event}={hook!r}): give a function, such as lambda run, *more: ...")
        if not hooks:
            raise ValueError("LambdaCallback(): give at least one event, such as epoch_end=lambda run, metrics: ...")
        self.every = every
        vars(self)["runs_on"] = runs_on
        for event, hook in hooks.items():
            vars(self)[f"on_{event}"] = hook  # hides the method of the class; the function gets no `self`
