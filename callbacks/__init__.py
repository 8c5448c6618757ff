"""Callbacks: what happens between the compiled calls of a run. `standard()` is the set that every run has."""

from __future__ import annotations

from collections.abc import Iterable

from callbacks.base import EVENTS, Callback, Metrics, Run, Schedule
from callbacks.broadcast import BroadcastVariables
from callbacks.checkpoint import Checkpoint
from callbacks.csv_logger import CSVLogger
from callbacks.early_stopping import EarlyStopping
from callbacks.ema import EMA
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

__all__ = [
    "EMA",
    "EVENTS",
    "BroadcastVariables",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "Journal",
    "LambdaCallback",
    "LearningRateMonitor",
    "LearningRateScaling",
    "MLflowTracker",
    "Metrics",
    "ModelSummary",
    "Notify",
    "Profiler",
    "Progress",
    "ReduceOnPlateau",
    "Report",
    "Run",
    "SamplePredictions",
    "Schedule",
    "Sentinel",
    "ShardData",
    "StandardSet",
    "SystemMetrics",
    "TensorBoard",
    "Timer",
    "complete",
    "standard",
]


class StandardSet(list[Callback]):
    """A whole set of callbacks, as `standard` builds it: `fit` adds nothing to it. `+` adds callbacks of your own."""

    def __add__(self, other: Iterable[Callback]) -> StandardSet:  # type: ignore[override]
        return StandardSet([*self, *other])


def standard(**changes: Callback | None) -> StandardSet:
    """The standard set of callbacks, with changes by name.

    `standard(progress=None)` drops one, `standard(checkpoint=Checkpoint(every=100))` changes one, and
    `standard(mlflow=None) + [Mine()]` adds one.

    Args:
        **changes: any of `broadcast`, `shard`, `sentinel`, `checkpoint`, `journal`, `report`, `mlflow`, `progress`.

    Raises:
        TypeError: for another name.
    """
    names = ("broadcast", "shard", "sentinel", "checkpoint", "journal", "report", "mlflow", "progress")
    if unknown := set(changes) - set(names):
        raise TypeError(f"standard() has no {', '.join(sorted(unknown))}: its callbacks are {', '.join(names)}")
    kinds = (BroadcastVariables, ShardData, Sentinel, Checkpoint, Journal, Report, MLflowTracker, Progress)
    made = [changes[name] if name in changes else kind() for name, kind in zip(names, kinds, strict=True)]
    return StandardSet([callback for callback in made if callback is not None])


def complete(callbacks: Iterable[Callback] | None, own: Iterable[Callback] = ()) -> list[Callback]:
    """The callbacks of a run, from what was handed to `fit`, and the task's own.

    None is the standard set; a `StandardSet` is taken as it is; other callbacks are added to the standard set, in which
    each takes the place of the callback of its own kind. So do the task's, in either; what was handed to `fit` wins.
    The report is made from the journal, and MLflow comes last: what others write at the end is delivered.
    """
    if isinstance(callbacks, StandardSet):
        return sorted(_with(callbacks, own), key=_last)
    return sorted(_with(_with(standard(), own), callbacks or ()), key=_last)


def _with(present: Iterable[Callback], added: Iterable[Callback]) -> list[Callback]:
    added, kinds, whole = list(added), [type(each) for each in standard()], list[Callback]()
    for each in present:
        kind = next((kind for kind in kinds if isinstance(each, kind)), ())
        instead = [callback for callback in added if isinstance(callback, kind)] or [each]
        whole += [callback for callback in instead if callback not in whole]
    return whole + [callback for callback in added if callback not in whole]


def _last(callback: Callback) -> bool:
    return isinstance(callback, MLflowTracker)
