"""The bus: fires events at the callbacks. Only overridden hooks, each on its ranks, and one policy for errors."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from callbacks import EVENTS, Callback, Schedule
from callbacks.nearest import nearest
from loop.errors import UsageError, no_exit
from loop.monitor import fault_injection
from loop.run.run import Run


class Bus:
    """The callbacks of one worker of a run.

    A hook that raises doesn't end this worker at once: other workers would wait for it in the next collective. The
    error is kept, and all workers end with it when they next agree. Until then hooks that run on all ranks go on being
    called, since they may hold collectives; those of the chief alone are not.

    Args:
        callbacks: all callbacks of the run, the same on each rank.
        run: the run.

    Raises:
        UsageError: something is no callback, or two share a key.
    """

    def __init__(self, callbacks: list[Callback], run: Run) -> None:
        self._run = run
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UsageError(f"callbacks has {callback!r} of type {type(callback).__name__}: give Callback objects")
        here = [callback for callback in callbacks if callback.runs_on == "all" or run.backend.is_chief]
        names = [callback.key or type(callback).__name__ for callback in callbacks]
        for place, callback in enumerate(callbacks):
            if callback.key and names.count(callback.key) > 1:
                raise UsageError(
                    f"two callbacks have the key {callback.key!r}: their states are kept by it; give others"
                )
            nth = names[: place + 1].count(names[place])
            if callback in here:
                run.callbacks[names[place] if nth == 1 else f"{names[place]}-{nth}"] = callback
        self._hooks = {
            event: [callback for callback in here if _overrides(callback, f"on_{event}")] for event in EVENTS
        }
        self._clocks_run = False
        self._listeners = [_Listener(callback) for callback in self._hooks["steps_end"]]

    def check_metrics(self) -> None:
        """Refuses callbacks that wait for a metric that the run doesn't have; `Run.synchronize` raises the error.

        A callback of the user's may add to the metrics that later ones are handed: then it isn't known before.
        """
        with self._run.defer_errors():
            asked = [(each, *pair) for each in self._run.callbacks.values() for pair in each.watches.items()]
            known = self._run.metric_names() if asked else []
            for callback, argument, metric in asked:
                of_keras = f"eval_{metric.removeprefix('val_')}" in known and metric.startswith("val_")
                if metric in known or (self._may_be_added(metric) and not of_keras):
                    continue
                what = f"{type(callback).__name__}({argument}={metric!r})"
                if metric.startswith("eval_") and not any(name.startswith("eval_") for name in known):
                    raise UsageError(
                        f"{what}: this run makes no evaluation: define eval_data(), and leave eval_every='never' out; "
                        f"or watch {known[0]!r}"
                    )
                raise UsageError(f"{what}: this run has no such metric{nearest(metric, known)}")

    def _may_be_added(self, metric: str) -> bool:
        """Whether a callback that isn't ours hears of the metrics of the event at which this one is due."""
        event = "eval_end" if metric.startswith("eval_") else "epoch_end"
        return any(not type(each).__module__.startswith("callbacks.") for each in self._hooks[event])

    def fire(self, event: str, *args: Any) -> None:
        """Calls the hooks of an event; an error is kept for `Run.synchronize`."""
        for callback in self._hooks[event]:
            self._call(callback, event, *args)

    def fire_data(self, data: Any) -> Any:
        """Hands the data from hook to hook."""
        for callback in self._hooks["data"]:
            data = self._call(callback, "data", data) or data
        return data

    def fire_steps_end(self, totals: np.ndarray, epoch_ended: bool) -> None:
        """Calls those who want the host now, each with the means since it was last called."""
        now = time.monotonic()
        if not self._clocks_run:  # the first call was traced and compiled: no clock of a schedule counts that
            for listener in self._listeners:
                listener.schedule.start(now)
            self._clocks_run = True
        for listener in self._listeners:
            listener.totals = listener.totals + totals
            if np.any(listener.totals) and listener.schedule.due(self._run.progress.step, now, epoch_ended):
                metrics = self._run.means(listener.totals)
                listener.totals = np.zeros(())
                self._call(listener.callback, "steps_end", metrics)

    def fire_last(self, event: str, *args: Any) -> None:
        """Calls the hooks of an event of the end, each whatever the others do; the first error is raised after all."""
        first: BaseException | None = None
        for callback in self._hooks[event]:
            try:
                with no_exit():
                    getattr(callback, f"on_{event}")(self._run, *args)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def forget(self) -> None:
        """Forgets what was counted since callbacks were last called: another phase has other values."""
        for listener in self._listeners:
            listener.totals = np.zeros(())

    def steps_left(self) -> int | None:
        """How many steps may be made before a callback wants the host."""
        left = [listener.schedule.steps_left(self._run.progress.step) for listener in self._listeners]
        return min((steps for steps in left if steps is not None), default=None)

    def _call(self, callback: Callback, event: str, *args: Any) -> Any:
        if self._run.errors.pending and callback.runs_on == "chief":
            return None
        run, kind = self._run, type(callback).__name__
        phase = run.watchdog.phase(f"callback on_{event} of {kind}")
        with run.defer_errors(), phase, run.stopwatch.at("callbacks", kind):
            fault_injection.reached(f"callback-{event}", run.backend.rank, run.progress.step)
            return getattr(callback, f"on_{event}")(run, *args)


def _overrides(callback: Callback, hook: str) -> bool:
    """Whether the callback's class, or this object alone, has a hook of its own."""
    own = getattr(callback, hook)
    return getattr(own, "__func__", own) is not getattr(Callback, hook)


class _Listener:
    """A callback that wants `on_steps_end`, its schedule, and the totals since it was last called."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        try:
            self.schedule = Schedule(callback.every)
        except ValueError as error:
            raise UsageError(f"{type(callback).__name__}: {error}") from None
        self.totals = np.zeros(())
