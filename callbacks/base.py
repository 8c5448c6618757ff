"""The callback interface: the events of a run, what a hook receives, and how often it is called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol

from callbacks.arguments import is_whole
from callbacks.types import (
    Backend,
    Data,
    Foreign,
    Json,
    JsonObject,
    Model,
    Optimizer,
    Phase,
    Progress,
    Task,
    Tensors,
    Variable,
)

# A new event needs its name here, a hook in `Callback`, and a place in the loop that fires it.
EVENTS = (
    "setup", "data", "restore", "fit_start", "phase_start", "epoch_start", "steps_end", "eval_end", "epoch_end",
    "checkpoint", "profile", "exception", "fit_end",
)  # fmt: skip
"""Every event of a run, in the order of its first occurrence. Hooks and dispatch are derived from this tuple."""

Metrics = Mapping[str, float]
Every = int | str | tuple[int, ...]


class SettingsError(ValueError):
    """Settings of a run contradict those of a callback. Hooks raise it, and `fit` ends in a `loop.UsageError`.

    The message names the setting, its value and the fix.
    """


# A protocol, since callbacks import nothing of `loop/`, where the class is.
class Run(Protocol):
    """The run as callbacks see it; every hook receives it. `loop.run.callback_view.CallbackView` is the real one.

    Attributes:
        task: the user's task.
        model: the task's model, built.
        optimizer: the task's optimizer, with all its slots; or a dict of optimizers.
        backend: the backend: `name`, `rank`, `workers`, `replicas`, `is_chief`, `broadcast_variables`, ...
        progress: counters of steps, epochs and examples done.
        directory: the run directory.
        options: the options of `fit`, by name.
        phase: the task's phase under way, with its `name`; None for a task without phases.
        total_steps: the step at which the run ends; None if the data has no known length.
        history: one dict of floats for each finished epoch.
        saved_path: the last checkpoint that this process has completed, or None.
        best: the step whose weights are the result of the run, with the metric and its value, or None; see `keep_best`.
        stop_reason: why this worker has requested the end of the run, or "".
        signalled: whether a signal has asked for the end of the run.
        gauges: functions by name whose values are added to the metrics of steps and epochs; set them in `on_setup`, on
            all ranks.
        weights: the model's variables: the name, the variable, and whether it is trained.
        graph: the graph of the compiled training, after the first steps; else None.
        save_on_stop: whether a stop, and the end of the run, writes a checkpoint; set by `Checkpoint`.
        best_is_judged: whether a callback other than `Checkpoint` decides which weights are the result.
        history_in_journal: whether the journal records the history, so that checkpoints needn't hold it; set by
            `Journal`.
        save_in_background: whether training goes on while a checkpoint is written.
        save_must_succeed: whether the run fails when a checkpoint can't be written; the last one always must.
        check_on_save: whether replicas are compared before a checkpoint is written; set by `Sentinel`.
        examples_per_second: the speed of training since the start of this process, by the time of compiled calls.
        seconds: the time since the start of this process, by part: see `loop.monitor.stopwatch`.
    """

    task: Task
    model: Model
    optimizer: Optimizer | dict[str, Optimizer]
    backend: Backend
    progress: Progress
    directory: Path
    options: JsonObject
    total_steps: int | None
    history: list[dict[str, float]]
    save_on_stop: bool
    history_in_journal: bool
    best_is_judged: bool
    save_in_background: bool
    save_must_succeed: bool
    check_on_save: bool
    saved_path: Path | None
    best: JsonObject | None
    stop_reason: str
    signalled: bool
    gauges: dict[str, Callable[[], float]]

    @property
    def phase(self) -> Phase | None: ...
    @property
    def weights(self) -> list[tuple[str, Variable, bool]]: ...
    @property
    def graph(self) -> Foreign: ...
    @property
    def examples_per_second(self) -> float: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def variables(self) -> list[Variable]: ...
    @property
    def sliced_variables(self) -> list[Variable]: ...
    @property
    def info(self) -> JsonObject: ...
    def stop(self, reason: str) -> None: ...
    def save(self, reason: str, later: bool = False) -> None: ...
    def keep_best(self, metric: str, value: float, step: int) -> None: ...
    def checkpoints(self) -> list[Path]: ...
    def discard(self, paths: list[Path]) -> None: ...
    def fingerprints(self) -> dict[int, list[str]]: ...
    def check_replicas(self) -> None: ...
    def check_directory(self) -> None: ...
    def metric_names(self) -> list[str]: ...
    def export(self, out: Path) -> tuple[Tensors, Tensors]: ...


class Callback:
    """Base class of all callbacks: override the hooks that you need; the others cost nothing.

    Hooks run on the host, between compiled calls. `every` says when `on_steps_end` is called:

    - `"epoch"`: at the end of each epoch (the default),
    - an int `n`: after each n-th step (the loop cuts its compiled calls there),
    - a tuple of ints: after these steps,
    - `"10s"`, `"2m"`: at the end of the first call after this time, by this rank's own clock (a hook that runs on all
      ranks must then not use collectives: other ranks may call it at another step),
    - `"call"`: at the end of each compiled call.

    The metrics that `on_steps_end` receives are the means over all examples since it was last called in this process.

    Class attributes:
        runs_on: `"chief"` (rank 0 only) or `"all"`; enforced when the callback is registered.
        every: see above; may be set on the class or on the instance.
        key: the name under which the callback's state is kept in a checkpoint; unique within a run.
        watches: the metrics that the callback needs, each by the name of the argument that gives it. A run without such
            a metric is refused before its first step.
        typed: the text of `--callback` from which the callback was made; "" for one that wasn't typed. Commands that
            make a run again type it again.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "chief"
    every: Every = "epoch"
    key: str = ""
    watches: Mapping[str, str] = MappingProxyType({})
    typed: str = ""

    def on_setup(self, run: Run) -> None:
        """Model and optimizer exist. Nothing has been restored, and no data has been read."""

    def on_data(self, run: Run, data: Data) -> Data:
        """The data sources (`data.train`, `data.eval`) of a phase are known. Returns them, changed or unchanged."""
        return data

    def on_restore(self, run: Run, path: Path | None) -> None:
        """The run continues from the checkpoint at `path`, or starts at step 0 (None)."""

    def on_fit_start(self, run: Run) -> None:
        """Everything is ready; no step has been made in this process."""

    def on_phase_start(self, run: Run) -> None:
        """A phase of the task starts, `run.phase`, with an optimizer of its own; a task without phases has one."""

    def on_epoch_start(self, run: Run) -> None:
        """An epoch starts; or it continues after a restore, and `run.progress.step_in_epoch` isn't 0."""

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        """One or more steps have been made: see `every`."""

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        """An evaluation has ended; its metrics are named `eval_...`.

        With several evaluation sets, they are those of the sets that were due, named `eval_<set>_...`.
        """

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        """An epoch has ended, or the training has, within an epoch."""

    def on_checkpoint(self, run: Run, reason: str) -> None:
        """A checkpoint is complete on disk: `run.saved_path`. Training may have made further steps meanwhile."""

    def on_profile(self, run: Run, kind: str, entry: JsonObject) -> None:
        """Only with `profile`: the time of a "call" and what followed it, or of the whole run ("summary"), by part."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """The run ends with `error`."""

    def on_fit_end(self, run: Run, status: str) -> None:
        """The run ends: "finished", "stopped", "preempted" or "failed". Always called."""

    def state_dict(self) -> JsonObject:
        """The state that the callback must keep across a restart, as JSON values."""
        return {}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restores the state that `state_dict` returned."""


class Schedule:
    """When a callback is called: a parsed `every`.

    Args:
        every: `"epoch"`, `"call"`, a number of steps, a tuple of steps, or a time such as `"10s"`, `"2m"`, `"1h"`.

    Raises:
        ValueError: `every` has another form.
    """

    def __init__(self, every: Every) -> None:
        self.steps: int | None = None
        self.seconds: float | None = None
        self.call = every == "call"
        self.epoch = every == "epoch"
        self.at: tuple[int, ...] = ()
        if isinstance(every, tuple) and all(is_whole(step, 0) for step in every):
            self.at = every
        if is_whole(every, 1):
            self.steps = int(every)
        elif isinstance(every, str) and (time := re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", every)):
            self.seconds = float(time[1]) * {"s": 1, "m": 60, "h": 3600}[time[2]]
        if not (self.call or self.epoch or self.at or self.steps or self.seconds):
            raise ValueError(
                f"every={every!r} isn't a schedule: "
                'give "epoch", "call", a number of steps >= 1, a tuple of steps, or a time like "10s"'
            )
        self._last = 0.0

    def start(self, now: float) -> None:
        """Starts the clock of a schedule by time. `now` is in seconds, monotonic."""
        self._last = now

    def steps_left(self, step: int) -> int | None:
        """The steps from `step` to the next call that depends on the number of steps; None if there is none."""
        if self.steps is not None:
            return self.steps - step % self.steps
        later = [at for at in self.at if at > step]
        return min(later) - step if later else None

    def due(self, step: int, now: float, epoch_ended: bool) -> bool:
        """Whether the callback is called now, after `step` steps, at `now` seconds."""
        # Asked at each call of the loop, which ends its calls where `steps_left` says; so no step is passed over.
        # Only a schedule by time has state. The others depend on the step alone, so a resumed run makes the same calls.
        if self.seconds is not None and now - self._last >= self.seconds:
            self._last = now  # not `_last + seconds`: after a long evaluation there is one call, not several
            return True
        if self.steps is not None:
            return step % self.steps == 0
        return self.call or (self.epoch and epoch_ended) or step in self.at


def as_floats(metrics: Metrics) -> dict[str, float]:
    """The metrics as plain floats: a hook may be handed numbers of NumPy, which JSON doesn't take."""
    return {name: float(value) for name, value in metrics.items()}


def of_training(metrics: Mapping[str, Json]) -> dict[str, Json]:
    """The metrics without those of the evaluation."""
    return {name: value for name, value in metrics.items() if not name.startswith("eval_")}


def shown_status(status: str) -> str:
    """The status of a run as people read it: records and results keep the name `preempted`."""
    return "interrupted" if status == "preempted" else status
