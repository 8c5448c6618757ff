"""Callbacks: what happens between the compiled calls of a run. `standard()` is the set that every run has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from callbacks.base import EVENTS, Callback, Metrics, Run, Schedule, SettingsError
from callbacks.broadcast import BroadcastVariables
from callbacks.checkpoint import Checkpoint
from callbacks.csv_logger import CSVLogger
from callbacks.early_stopping import EarlyStopping
from callbacks.ema import EMA
from callbacks.evaluate_beside import EvaluateBeside
from callbacks.from_keras import FromKeras
from callbacks.lambda_callback import LambdaCallback
from callbacks.learning_rate import LearningRateScaling
from callbacks.learning_rate_monitor import LearningRateMonitor
from callbacks.mlflow.tracker import MLflowTracker
from callbacks.model_summary import ModelSummary
from callbacks.notify import Notify
from callbacks.profiler import Profiler
from callbacks.progress import Progress
from callbacks.reduce_on_plateau import ReduceOnPlateau
from callbacks.run_record.journal import Journal
from callbacks.run_record.report import Report
from callbacks.samples import SamplePredictions
from callbacks.sentinel import Sentinel
from callbacks.shard import ShardData
from callbacks.system import SystemMetrics
from callbacks.tensorboard import TensorBoard
from callbacks.timer import Timer
from callbacks.trainer_status import TrainerStatus

__all__ = [
    "EMA", "EVENTS", "BroadcastVariables", "CSVLogger", "Callback", "Checkpoint", "EarlyStopping", "EvaluateBeside",
    "FromKeras", "Journal", "LambdaCallback", "LearningRateMonitor", "LearningRateScaling", "MLflowTracker", "Metrics",
    "ModelSummary", "Notify", "Profiler", "Progress", "ReduceOnPlateau", "Report", "Run", "SamplePredictions",
    "Schedule", "Sentinel", "SettingsError", "ShardData", "StandardSet", "SystemMetrics", "TensorBoard", "Timer",
    "TrainerStatus", "complete", "standard",
]  # fmt: skip


class StandardSet(list[Callback]):
    """A complete set of callbacks, as `standard` returns it: `fit` adds nothing to it. `+` adds your own callbacks."""

    named: tuple[type[Callback], ...] = ()
    """The classes that `standard` was given a callback or None for, which wins over the task's own callbacks."""

    def __add__(self, other: Iterable[Callback]) -> StandardSet:  # type: ignore[override]
        more = StandardSet([*self, *other])
        more.named = self.named
        return more

    def left_of(self, own: Iterable[Callback]) -> list[Callback]:
        """Those of a task's own callbacks that are added to this set."""
        return [callback for callback in own if not isinstance(callback, self.named)]


_KINDS: dict[str, type[Callback]] = {
    "broadcast": BroadcastVariables,
    "shard": ShardData,
    "sentinel": Sentinel,
    "checkpoint": Checkpoint,
    "system": SystemMetrics,  # before the journal, whose last line is the end of the run
    "journal": Journal,
    "report": Report,
    "mlflow": MLflowTracker,
    "progress": Progress,
    "trainer_status": TrainerStatus,
}
"""The classes of the standard set by their names for `standard`, in the order in which hooks are called.

The report reads the journal's last line, and MLflow delivers the report.
"""

STANDARD = tuple(_KINDS.values())
"""The classes of the standard set."""

_MADE_OTHERWISE: dict[type[Callback], Callable[[], Callback | None]] = {
    SystemMetrics: partial(SystemMetrics, runs_on="chief"),
    TrainerStatus: TrainerStatus.injected,
}


def standard(**changes: Callback | None) -> StandardSet:
    """The standard set of callbacks, with changes by name.

    `standard(progress=None)` drops one, `standard(checkpoint=Checkpoint(every=100))` changes one, and
    `standard(mlflow=None) + [Mine()]` adds one.

    Args:
        **changes: any of `broadcast`, `shard`, `sentinel`, `checkpoint`, `system`, `journal`, `report`, `mlflow`,
            `progress`, and `trainer_status`, which only a TrainJob of Kubeflow Trainer has.

    Raises:
        TypeError: for another name.
    """
    if unknown := set(changes) - set(_KINDS):
        raise TypeError(f"standard() has no {', '.join(sorted(unknown))}: its callbacks are {', '.join(_KINDS)}")
    callbacks = StandardSet()
    for name, kind in _KINDS.items():
        # A callback that is changed or dropped isn't even made: its constructor may read the environment.
        callback = changes[name] if name in changes else _MADE_OTHERWISE.get(kind, kind)()
        if callback is not None:
            callbacks.append(callback)
    callbacks.named = tuple(_KINDS[name] for name in changes)
    return callbacks


def complete(callbacks: Iterable[Callback] | None, own: Iterable[Callback] = ()) -> list[Callback]:
    """The callbacks of a run, from those given to `fit` and the task's own.

    None is the standard set, and a `StandardSet` is used unchanged. Other callbacks are added to the standard set, in
    which each replaces the callback of its own class. The task's own do the same, in either set; a callback given to
    `fit` wins, and so does one that `standard` was given, or None in its place. `MLflowTracker` comes last, since it
    delivers what the others write at the end. `EvaluateBeside` comes first: at the end it waits for results, which must
    be in the journal before its last line.
    """
    # `sorted` keeps the order of those for which `_order` is the same.
    if isinstance(callbacks, StandardSet):
        return sorted(_with(callbacks, callbacks.left_of(own)), key=_order)
    return sorted(_with(_with(standard(), own), callbacks or ()), key=_order)


def _with(present: Iterable[Callback], added: Iterable[Callback]) -> list[Callback]:
    """The callbacks in `present`, each replaced by those in `added` of the same standard class; then the others."""
    added = list(added)
    callbacks: list[Callback] = []
    for callback in present:
        kinds = tuple(kind for kind in STANDARD if isinstance(callback, kind))  # none of a callback of the user's own
        # In its place, since the order of the standard set matters.
        _add(callbacks, [other for other in added if isinstance(other, kinds)] or [callback])
    _add(callbacks, added)
    return callbacks


def _add(callbacks: list[Callback], more: Iterable[Callback]) -> None:
    """Appends callbacks, each once: one that replaces two standard callbacks must not be called twice."""
    for callback in more:
        # By identity: two of the user's that are equal, as dataclasses can be, are two.
        if not any(callback is other for other in callbacks):
            callbacks.append(callback)


def _order(callback: Callback) -> int:
    """-1: before the others; 1: after them."""
    if isinstance(callback, EvaluateBeside):
        return -1
    return 1 if isinstance(callback, MLflowTracker) else 0
