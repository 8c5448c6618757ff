"""The callback interface: the events of a run, what a hook is handed, and how often it may ask for the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

EVENTS = (
    "setup",
    "data",
    "restore",
    "fit_start",
    "phase_start",
    "epoch_start",
    "steps_end",
    "eval_end",
    "epoch_end",
    "checkpoint",
    "profile",
    "exception",
    "fit_end",
)
"""Every event of a run, in the order of its first occurrence. Hooks and dispatch are derived from this tuple alone."""

Metrics = Mapping[str, float]
Every = int | str | tuple[int, ...]


class Progress(Protocol):
    """Where the run stands; see `loop.run.progress.Progress`."""

    step: int
    epoch: int
    step_in_epoch: int
    examples: int


class Run(Protocol):
    """What every hook is handed: the run as a callback sees it. `loop.run.run.Run` is the real one.

    Attributes:
        task: the user's task.
        model: its model, built.
        optimizer: its optimizer, with all its slots; or a dict of them.
        backend: the engine: `name`, `rank`, `workers`, `replicas`, `is_chief`, `broadcast_variables`, ...
        progress: counters of steps, epochs and examples done.
        directory: the run directory.
        options: the options of `fit`, by name.
        phase: the task's phase under way, with its `name`; None for a task without phases.
        total_steps: the step at which the run ends, or None where the data has no known length.
        history: one dict of floats for each finished epoch.
        saved_path: the checkpoint that was last completed in this process, or None.
        best: the step whose weights are the result of the run, with the metric and its value, or None; see `keep_best`.
        stop_reason: why this worker asked for an end, or "".
        gauges: functions by name whose values are added to the metrics of steps and epochs; set them in `on_setup`, on
            all ranks.
        weights: the model's variables: the name, the variable, and whether it is trained.
        graph: the graph of the compiled training, once steps have been made, or None.
        save_on_stop: whether a stop, and the end of the run, writes a checkpoint; `Checkpoint` asks for it.
        best_is_judged: whether another callback than `Checkpoint` says whose weights are the result.
        history_in_journal: whether the journal is the record of the history, so that checkpoints needn't hold it;
            `Journal` says so.
        save_in_background: whether training goes on while a checkpoint is written.
        save_must_succeed: whether the run fails when a checkpoint can't be written; the last one always must.
        check_on_save: whether replicas are compared before a checkpoint is written; `Sentinel` asks for it.
        examples_per_second: the speed of training since the start of this process, compiled calls only.
        seconds: where the time since then went, by part: see `loop.monitor.stopwatch`.
    """

    task: Any
    model: Any
    optimizer: Any
    backend: Any
    progress: Any
    directory: Path
    options: dict[str, Any]
    total_steps: int | None
    history: list[dict[str, float]]
    save_on_stop: bool
    history_in_journal: bool
    best_is_judged: bool
    save_in_background: bool
    save_must_succeed: bool
    check_on_save: bool
    saved_path: Path | None
    best: dict[str, Any] | None
    stop_reason: str
    gauges: dict[str, Callable[[], float]]

    @property
    def phase(self) -> Any: ...
    @property
    def weights(self) -> list[tuple[str, Any, bool]]: ...
    @property
    def graph(self) -> Any: ...
    @property
    def examples_per_second(self) -> float: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def variables(self) -> list[Any]: ...
    @property
    def info(self) -> dict[str, Any]: ...
    def stop(self, reason: str) -> None: ...
    def save(self, reason: str, later: bool = False) -> None: ...
    def keep_best(self, metric: str, value: float, step: int) -> None: ...
    def checkpoints(self) -> list[Path]: ...
    def discard(self, paths: list[Path]) -> None: ...
    def fingerprints(self) -> dict[int, list[str]]: ...
    def check_replicas(self) -> None: ...
    def check_directory(self) -> None: ...
    def export(self, out: Path) -> tuple[Any, Any]: ...


class Callback:
    """Base class of all callbacks: override the hooks that you need; the others cost nothing.

    Hooks run on the host, between compiled calls. `every` says how often `on_steps_end` wants to be called:

    - `"epoch"`: at the end of each epoch (the default),
    - an int `n`: after each n-th step (the loop cuts its compiled calls there),
    - a tuple of ints: after these steps,
    - `"10s"`, `"2m"`: at the first end of a call after so much time, by this rank's own clock (a hook that runs on all
      ranks must then hold nothing for which the others are needed),
    - `"call"`: at the end of each compiled call, whenever that is.

    The metrics that `on_steps_end` receives are the means over all examples since it was last called in this process.

    Class attributes:
        runs_on: `"chief"` (rank 0 only) or `"all"`; enforced when the callback is registered.
        every: see above; may be set on the class or on the instance.
        key: the name under which the callback's state is kept in a checkpoint; unique within a run.
        watches: the metrics that the callback needs, each by the name of the argument that gives it. A run that has no
            such metric is refused before its first step.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "chief"
    every: Every = "epoch"
    key: str = ""
    watches: Mapping[str, str] = MappingProxyType({})

    def on_setup(self, run: Run) -> None:
        """The model and the optimizer exist; nothing has been restored, no data has been read."""

    def on_data(self, run: Run, data: Any) -> Any:
        """The data sources (`data.train`, `data.eval`) of a phase are known. Returns them, changed or as they are."""
        return data

    def on_restore(self, run: Run, path: Path | None) -> None:
        """The run goes on from the checkpoint at `path`, or starts afresh (None)."""

    def on_fit_start(self, run: Run) -> None:
        """Everything is in place; no step has been made in this process."""

    def on_phase_start(self, run: Run) -> None:
        """A phase of the task starts, `run.phase`, with an optimizer of its own; a task without phases has one."""

    def on_epoch_start(self, run: Run) -> None:
        """An epoch starts, or goes on after a restore."""

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        """One or more steps have been made: see `every`."""

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        """The evaluation data has been seen, whole; metrics are named `eval_...`."""

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        """An epoch is complete, or the training has reached its last step within one."""

    def on_checkpoint(self, run: Run, reason: str) -> None:
        """A checkpoint is complete on disk: `run.saved_path`. The run may have gone on meanwhile."""

    def on_profile(self, run: Run, kind: str, entry: dict[str, Any]) -> None:
        """Only with `profile`: where the time went, of a "call" and what followed it, or of the run ("summary")."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """The run is about to end with `error`."""

    def on_fit_end(self, run: Run, status: str) -> None:
        """The run ends: "finished", "stopped", "preempted" or "failed". Always called."""

    def state_dict(self) -> dict[str, Any]:
        """What the callback must remember across a restart, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""


class Schedule:
    """When a callback wants the host: one parsed `every`.

    Args:
        every: `"epoch"`, `"call"`, a number of steps, a tuple of steps, or a time such as `"10s"`, `"2m"`, `"1h"`.

    Raises:
        ValueError: `every` is none of these.
    """

    def __init__(self, every: Every) -> None:
        self.steps: int | None = None
        self.seconds: float | None = None
        self.call = every == "call"
        self.epoch = every == "epoch"
        self.at = every if isinstance(every, tuple) else ()
        if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
            self.steps = every
        elif isinstance(every, str) and (time := re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", every)):
            self.seconds = float(time[1]) * {"s": 1, "m": 60, "h": 3600}[time[2]]
        elif not (self.call or self.epoch or self.at):
            raise ValueError(
                f'every={every!r} is no schedule: give "epoch", "call", a number of steps >= 1, or a time like "10s"'
            )
        self._last = 0.0

    def start(self, now: float) -> None:
        """Starts the clock of a time schedule. `now` is in seconds, monotonic."""
        self._last = now

    def steps_left(self, step: int) -> int | None:
        """How many steps may be made from `step` before this schedule wants the host; None: it doesn't say."""
        if self.steps is not None:
            return self.steps - step % self.steps
        return min((at - step for at in self.at if at > step), default=None)

    def due(self, step: int, now: float, epoch_ended: bool) -> bool:
        """Whether the host is wanted now, after `step` steps, at `now` seconds."""
        if self.seconds is not None and now - self._last >= self.seconds:
            self._last = now
            return True
        if self.steps is not None:
            return step % self.steps == 0
        return self.call or (self.epoch and epoch_ended) or step in self.at


def shown_status(status: str) -> str:
    """How a run ended, as people read it: records and results keep the name `preempted`."""
    return "interrupted" if status == "preempted" else status
