"""The bus: fires events at the callbacks. Only overridden hooks, each on its ranks, and one policy for errors."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from callbacks import (
    EVENTS,
    STANDARD,
    BroadcastVariables,
    Callback,
    Checkpoint,
    EvaluateBeside,
    LambdaCallback,
    MLflowTracker,
    Profiler,
    Progress,
    Schedule,
    Sentinel,
    SettingsError,
    ShardData,
    StandardSet,
    TrainerStatus,
    complete,
)
from callbacks.nearest import nearest
from callbacks.run_record.redaction import tell
from loop.data import Data
from loop.errors import UsageError, no_exit
from loop.monitor import fault_injection
from loop.options import Options
from loop.run.run import Run
from loop.task import TrainTask

_CHANGEABLE = ("eval_end", "epoch_end")
"""The events whose metrics a hook may change, for those that are called after it."""
_INTERNAL = {BroadcastVariables, ShardData, Sentinel}
"""Callbacks of the standard set that a user has no reason to list, all three, by hand."""


def callbacks_of(task: TrainTask, given: Iterable[Callback] | None, options: Options) -> list[Callback]:
    """All callbacks of a run: the standard set, those that were given, the task's own, and what the options add."""
    own = task.build_callbacks()
    if given is not None:
        _check_list(given, "callbacks is an object")
    _check_list(own, "build_callbacks() returned an object")
    given = _check_unpacked(given)
    callbacks = complete(given, own)
    if options["profile"]:
        callbacks.append(Profiler(*map(int, options["profile"].split(":"))))
    saving = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if len(saving) > 1:
        raise UsageError(
            "callbacks has two Checkpoints, and each would remove what the other keeps: give one, such as "
            "callbacks.standard(checkpoint=Checkpoint(...))"
        )
    if options["keep"] == "best" and not saving:
        raise UsageError("keep='best' takes the weights of the best checkpoint: leave callbacks.Checkpoint in the set")
    # A run that a command tries or measures goes without these, also without the user's own: they take time, and they
    # would keep its results.
    left_out = (Checkpoint, MLflowTracker, Progress)
    if goes_alone(callbacks):
        callbacks = [callback for callback in callbacks if not isinstance(callback, left_out)]
    return callbacks


def goes_alone(callbacks: Iterable[Callback]) -> bool:
    """Whether a command only tries or measures a task in this run, whose directory it removes at the end."""
    return any(getattr(callback, "alone", False) for callback in callbacks)


def _check_list(callbacks: object, what: str) -> None:
    if not isinstance(callbacks, Iterable):
        raise UsageError(f"{what} of type {type(callbacks).__name__}: give a list of Callback objects")


def _check_unpacked(given: Iterable[Callback] | None) -> Iterable[Callback] | None:
    """Refuses a plain list of the callbacks of `standard(...)`. It is added to the set: what was dropped would be back.

    Returns the callbacks: `given`, which may be an iterator, is read here.
    """
    if given is None or isinstance(given, StandardSet):
        return given
    given = list(given)
    classes = {type(callback) for callback in given}
    dropped = []
    for kind in STANDARD:
        # Only a TrainJob of Kubeflow Trainer has a `TrainerStatus`.
        if kind is not TrainerStatus and kind not in classes:
            dropped.append(kind.__name__)
    if dropped and classes.issuperset(_INTERNAL):
        raise UsageError(
            f"callbacks is a list of the standard set without {', '.join(dropped)}, and a list is added to the "
            "standard set: write callbacks.standard(...) + [Mine()], or callbacks.StandardSet([...])"
        )
    return given


class Bus:
    """The callbacks of one worker of a run; all are given, the same on each rank.

    A hook that raises doesn't end this worker at once: other workers would wait for it in the next collective. The
    error is kept, and all workers end with it when they next agree. Until then, hooks that run on all ranks are still
    called, since they may hold collectives; those of the chief alone are not.

    Raises:
        UsageError: an object isn't a callback, or has a wrong `runs_on`; or two share a key.
    """

    def __init__(self, callbacks: list[Callback], run: Run) -> None:
        self._run = run
        self._all = callbacks  # also those that are called on the chief alone
        for key, callback in _by_key(callbacks).items():
            if callback.runs_on == "all" or run.backend.is_chief:
                run.callbacks[key] = callback
            if run.backend.is_chief:
                _warn_of_no_hooks(callback)
        # Once, here: an event that no callback listens to costs nothing in the loop.
        self._hooks: dict[str, list[Callback]] = {}
        for event in EVENTS:
            hook = f"on_{event}"
            self._hooks[event] = [callback for callback in run.callbacks.values() if _overrides(callback, hook)]
        self._clocks_run = False
        self._listeners = list(map(_Listener, self._hooks["steps_end"]))

    def check_metrics(self) -> None:
        """Refuses callbacks that watch a metric that the run doesn't have; `Run.synchronize` raises the error."""
        with self._run.defer_errors():
            for callback in self._run.callbacks.values():
                for argument, metric in callback.watches.items():
                    # Only if one is watched: the names of a phase's metrics are found by tracing its step.
                    known = self._run.metric_names()
                    if metric not in known:
                        self._check_unknown(callback, argument, metric, known)

    def _check_unknown(self, callback: Callback, argument: str, metric: str, known: list[str]) -> None:
        """Refuses a metric that the run doesn't have, unless a callback may add it."""
        what = f"{type(callback).__name__}({argument}={metric!r})"
        unknown = f"{what}: this run has no such metric{nearest(metric, known)}"
        adding = self._adding(metric)
        # `val_loss` is Keras's name of `eval_loss`: certainly a mistake, and no metric that a callback adds.
        is_keras_name = metric.startswith("val_") and f"eval_{metric.removeprefix('val_')}" in known
        if adding and not is_keras_name:
            if self._all.index(adding[0]) < self._all.index(callback):
                return
            kind = type(adding[0]).__name__
            raise UsageError(
                f"{unknown}; if {kind} adds it, list it before "
                f"{type(callback).__name__}: callbacks.StandardSet([...]) takes a list as it is"
            )
        if metric.startswith("eval_") and not any(name.startswith("eval_") for name in known):
            is_beside = any(isinstance(callback, EvaluateBeside) for callback in self._run.callbacks.values())
            reason = (
                "EvaluateBeside (--eval-beside) evaluates in another process, and no callback sees that: leave it out"
                if is_beside
                else "this run makes no evaluation: define eval_data(), and leave eval_every='never' out"
            )
            raise UsageError(f"{what}: {reason}; or watch {known[0]!r}")
        raise UsageError(unknown)

    def _adding(self, metric: str) -> list[Callback]:
        """The user's own callbacks, on any rank, that may add this metric for the callbacks after them.

        These are all whose hook receives the metrics of its kind.
        """
        hook = "on_eval_end" if metric.startswith("eval_") else "on_epoch_end"
        adding = []
        for callback in self._all:
            is_own = isinstance(callback, LambdaCallback) or not type(callback).__module__.startswith("callbacks.")
            if is_own and _overrides(callback, hook):
                adding.append(callback)
        return adding

    def fire(self, event: str, *args: Any) -> None:
        """Calls the hooks of an event; `Run.synchronize` raises their first error."""
        for callback in self._hooks[event]:
            self._call(callback, event, *args)
            if event in _CHANGEABLE:
                with self._run.defer_errors():
                    _as_numbers(f"{type(callback).__name__}.on_{event}", args[0])

    def fire_data(self, data: Data) -> Data:
        """Passes the data from hook to hook: each may return other data, or None to leave it as it is."""
        for callback in self._hooks["data"]:
            changed = self._call(callback, "data", data)
            if isinstance(changed, Data):
                data = changed
            elif changed is not None:
                with self._run.defer_errors():
                    raise UsageError(
                        f"{type(callback).__name__}.on_data returned an object of type {type(changed).__name__}: "
                        "return the Data that it was given, with other sources, or None"
                    )
        return data

    def fire_profile(self) -> None:
        """With `profile`, reports to callbacks where the time of the last call, and of what followed it, went."""
        entry = self._run.stopwatch.split()
        if entry is not None and self._run.options["profile"]:
            self.fire("profile", "call", entry)

    def fire_steps_end(self, totals: np.ndarray, epoch_ended: bool) -> None:
        """Calls the callbacks whose schedule is due, each with the means since it was last called."""
        now = time.monotonic()
        if not self._clocks_run:
            # Only now: the first compiled call was traced and compiled, which a schedule by time must not count.
            for listener in self._listeners:
                listener.schedule.start(now)
            self._clocks_run = True
        for listener in self._listeners:
            # Not in place: `totals` is shared by all listeners, and by the epoch.
            listener.totals = listener.totals + totals
            # All zero: no step was made since it was last called, so there are no means.
            if np.any(listener.totals) and listener.schedule.due(self._run.progress.step, now, epoch_ended):
                metrics = self._run.means(listener.totals)
                listener.totals = np.zeros(())
                self._call(listener.callback, "steps_end", metrics)

    def fire_last(self, event: str, *args: Any) -> None:
        """Calls the hooks of an event at the end of a run. All are called, also after an error; the first is raised."""
        first: BaseException | None = None
        for callback in self._hooks[event]:
            # Not by `_call`: after a failure the workers don't agree any more, and a deferred error would be lost.
            try:
                with no_exit():
                    getattr(callback, f"on_{event}")(self._run, *args)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def forget(self) -> None:
        """Drops the totals since callbacks were last called: another phase has other values."""
        for listener in self._listeners:
            listener.totals = np.zeros(())

    def steps_left(self) -> float:
        """How many steps may be made before a callback is due; if none will be, infinitely many."""
        left = []
        for listener in self._listeners:
            steps = listener.schedule.steps_left(self._run.progress.step)
            if steps is not None:
                left.append(steps)
        return min(left, default=math.inf)

    def _call(self, callback: Callback, event: str, *args: Any) -> Any:
        # After an error, hooks of all ranks are still called: other workers' calls of them may hold collectives.
        if self._run.errors.pending and callback.runs_on == "chief":
            return None
        run = self._run
        kind = type(callback).__name__
        phase = run.watchdog.phase(f"callback on_{event} of {kind}")
        with run.defer_errors(), phase, run.stopwatch.at("callbacks", kind):
            fault_injection.reached(f"callback-{event}", run.backend.rank, run.progress.step)
            try:
                return getattr(callback, f"on_{event}")(run, *args)
            except SettingsError as error:
                raise UsageError(str(error)) from error


def _as_numbers(hook: str, metrics: dict[str, float]) -> None:
    """Makes plain floats of the metrics that a hook has set: of NumPy's numbers and tensors, for example."""
    for name, value in list(metrics.items()):
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError):
            del metrics[name]
            raise UsageError(f"{hook} has set the metric {name!r} to {value!r:.60}: give a number") from None


def _by_key(callbacks: list[Callback]) -> dict[str, Callback]:
    """The callbacks by the keys of their states in checkpoints: `Callback.key`, else the name of the class."""
    by_key: dict[str, Callback] = {}
    counts: Counter[str] = Counter()
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UsageError(
                f"callbacks has {callback!r} of type {type(callback).__name__}: give Callback objects; those of Keras "
                "within callbacks.FromKeras(...)"
            )
        if callback.runs_on not in ("chief", "all"):
            raise UsageError(f"{type(callback).__name__}: runs_on={callback.runs_on!r}: give chief or all")
        # Two of one class get a number, by their order.
        name = callback.key or type(callback).__name__
        counts[name] += 1
        by_key[name if counts[name] == 1 else f"{name}-{counts[name]}"] = callback
    for callback in callbacks:
        if callback.key and counts[callback.key] > 1:
            raise UsageError(f"two callbacks have the key {callback.key!r}: their states are kept by it; give others")
    return by_key


def _warn_of_no_hooks(callback: Callback) -> None:
    """Warns of methods that are named as hooks, such as those of Keras's callbacks, and would silently do nothing."""
    hooks = [f"on_{event}" for event in EVENTS]
    others = []
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in hooks:
            others.append(name)
    if others:
        # All hooks, not the nearest one: that of `on_epoch_begin` would be `on_epoch_end`.
        tell(
            f"warning: the loop calls no {', '.join(others)} of {type(callback).__name__}; the hooks of a callback are "
            f"{', '.join(hooks)}"
        )


def _overrides(callback: Callback, hook: str) -> bool:
    """Whether the callback's class, or this object itself, overrides a hook."""
    own = getattr(callback, hook)
    # A function that was set on the object has no `__func__`.
    return getattr(own, "__func__", own) is not getattr(Callback, hook)


class _Listener:
    """A callback with the hook `on_steps_end`, its schedule, and the totals since it was last called."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        try:
            self.schedule = Schedule(callback.every)
        except ValueError as error:
            raise UsageError(f"{type(callback).__name__}: {error}") from None
        self.totals = np.zeros(())
