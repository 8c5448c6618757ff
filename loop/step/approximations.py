"""Options that give up the same numbers for speed: named at the start, and refused where they can't work."""

from __future__ import annotations

from typing import Any

from callbacks.run_record.redaction import tell
from loop.backends.base import Backend
from loop.data import Source, StreamSource
from loop.errors import UsageError

OFF = {"local_steps": 1, "reduction": "sum"}


def check(backend: Backend, options: dict[str, Any], source: Source, summed: bool = False) -> None:
    """Refuses what can't work, and says what is inexact in this run.

    Args:
        backend: the engine.
        options: those of `fit`.
        source: of the training data.
        summed: whether the task's loss is a sum over the batch.

    Raises:
        UsageError: the engine, the data or another option doesn't go with it.
    """
    if backend.replicas == 1:
        return
    local, adasum = options["local_steps"] > 1, options["reduction"] == "adasum"
    chosen = f"local_steps={options['local_steps']}" if local else f"reduction={options['reduction']!r}"
    if summed and (local or adasum):
        raise UsageError(
            f"{chosen} with loss_reduction='sum': replicas average steps that each makes with its own rows, so the "
            "gradient would be that of a smaller sum; use loss_reduction='mean' with a larger learning rate"
        )
    if local:
        if backend.local_replicas > 1:
            raise UsageError(
                f"{chosen} with backend={backend.name!r}: the replicas of one process make their steps together; use "
                "horovod, or multiworker, with one device for each process"
            )
        if isinstance(source, StreamSource):
            raise UsageError(
                f"{chosen} with a tf.data.Dataset: workers couldn't know when all are at its end; use ArrayData"
            )
    for name, usual in (("compression", "none"), ("reduction", "sum"), ("on_nonfinite", "stop")):
        if (local or (adasum and name == "compression")) and options[name] != usual:
            raise UsageError(f"{chosen} with {name}={options[name]!r}: give one of the two")
    if local and options["precision"] == "mixed_float16":
        raise UsageError(f"{chosen} with precision='mixed_float16': replicas can't agree on a loss scale; use bfloat16")
    if adasum and (missing := backend.no_adasum()):
        raise UsageError(f"{chosen} with backend={backend.name!r}: {missing}")
    if (local or adasum) and backend.is_chief:
        text = f"note: {chosen} is inexact: the weights depend on the number of replicas"
        tell(text)


def to_average(steps: int, step_in_epoch: int, local_steps: int) -> int:
    """The least number of steps >= `steps` after which replicas average anyway."""
    return steps + -(step_in_epoch + steps) % local_steps
