"""Callbacks: what happens between the compiled calls of a run. `standard()` is the set that every run has."""

from __future__ import annotations

from collections.abc import Iterable

from callbacks.base import EVENTS, Callback, Metrics, Run, Schedule
from callbacks.broadcast import BroadcastVariables
from callbacks.checkpoint import Checkpoint
from callbacks.csv_logger import CSVLogger
from callbacks.early_stopping import EarlyStopping
from callbacks.journal import Journal
from callbacks.learning_rate import LearningRateScaling
from callbacks.mlflow import MLflowTracker
from callbacks.profiler import Profiler
from callbacks.progress import Progress
from callbacks.samples import SamplePredictions
from callbacks.sentinel import Sentinel
from callbacks.shard import ShardData
from callbacks.system import SystemMetrics

__all__ = [
    "EVENTS",
    "BroadcastVariables",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "Journal",
    "LearningRateScaling",
    "MLflowTracker",
    "Metrics",
    "Profiler",
    "Progress",
    "Run",
    "SamplePredictions",
    "Schedule",
    "Sentinel",
    "ShardData",
    "StandardSet",
    "SystemMetrics",
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
        **changes: any of `broadcast`, `shard`, `sentinel`, `checkpoint`, `journal`, `mlflow`, `progress`.

    Raises:
        TypeError: for another name.
    """
    names = ("broadcast", "shard", "sentinel", "checkpoint", "journal", "mlflow", "progress")
    if unknown := set(changes) - set(names):
        raise TypeError(f"standard() has no {', '.join(sorted(unknown))}: its callbacks are {', '.join(names)}")
    kinds = (BroadcastVariables, ShardData, Sentinel, Checkpoint, Journal, MLflowTracker, Progress)
    made = [changes[name] if name in changes else kind() for name, kind in zip(names, kinds, strict=True)]
    return StandardSet([callback for callback in made if callback is not None])


def complete(callbacks: Iterable[Callback] | None) -> list[Callback]:
    """The callbacks of a run, from what was handed to `fit`.

    None is the standard set; a `StandardSet` is taken as it is; other callbacks are added to the standard set, in which
    each takes the place of the callback of its own kind. MLflow comes last: what others write at the end is delivered.
    """
    if isinstance(callbacks, StandardSet):
        return sorted(callbacks, key=_last)
    added = list(callbacks or ())
    replaced = tuple(kind for kind in map(type, standard()) if any(isinstance(callback, kind) for callback in added))
    chosen = [callback for callback in standard() if not isinstance(callback, replaced)] + added
    return sorted(chosen, key=_last)


def _last(callback: Callback) -> bool:
    return isinstance(callback, MLflowTracker)
