"""Options that trade exact numbers for speed: reported at the start of a run, and refused where they can't work."""

from __future__ import annotations

from callbacks.run_record.redaction import tell
from loop.backends.base import Backend
from loop.data import Source, StreamSource
from loop.errors import UsageError
from loop.options import Options

OFF = {"local_steps": 1, "reduction": "sum"}
"""The values of these options with which training is exact."""


def check(backend: Backend, options: Options, source: Source, summed: bool = False) -> None:
    """Refuses an inexact option that can't work in this run; reports one that can.

    Args:
        backend: the backend.
        options: the options of `fit`.
        source: the training data.
        summed: whether the task's loss is a sum over the batch.

    Raises:
        UsageError: the backend, the data or another option can't be combined with it.
    """
    # One replica averages and combines nothing: it is exact with any of these options.
    if backend.replicas == 1:
        return
    if options["local_steps"] > 1:
        chosen = f"local_steps={options['local_steps']}"
    elif options["reduction"] == "adasum":
        chosen = "reduction='adasum'"
    else:
        return
    if summed:
        raise UsageError(
            f"{chosen} with loss_reduction='sum': replicas average steps that each makes with its own rows, so the "
            "gradient would be that of a smaller sum; use loss_reduction='mean' with a larger learning rate"
        )
    if options["local_steps"] > 1:
        _check_local_steps(chosen, backend, options, source)
    else:
        _refuse_others(chosen, options, compression="none")
        if missing := backend.no_adasum():
            raise UsageError(f"{chosen} with backend={backend.name!r}: {missing}")
    if backend.is_chief:
        tell(f"note: {chosen} is inexact: the weights depend on the number of replicas")


def _check_local_steps(chosen: str, backend: Backend, options: Options, source: Source) -> None:
    """Refuses local steps with a backend, data or options that need communication in each step."""
    if backend.local_replicas > 1:
        raise UsageError(
            f"{chosen} with backend={backend.name!r}: the replicas of one process make their steps together; use "
            "horovod, or multiworker, with one device for each process"
        )
    if isinstance(source, StreamSource):
        raise UsageError(
            f"{chosen} with a tf.data.Dataset: workers couldn't know when all are at its end; use ArrayData"
        )
    # No gradients are sent; and a skipped step would have to be skipped by all.
    _refuse_others(chosen, options, compression="none", reduction="sum", on_nonfinite="stop")
    if options["precision"] == "mixed_float16":
        raise UsageError(f"{chosen} with precision='mixed_float16': replicas can't agree on a loss scale; use bfloat16")


def _refuse_others(chosen: str, options: Options, **required: str) -> None:
    """Refuses options that have another value than the required one."""
    for name, value in required.items():
        if options[name] != value:
            raise UsageError(f"{chosen} with {name}={options[name]!r}: give one of the two")


def to_average(steps: int, step_in_epoch: int, local_steps: int) -> int:
    """The least number of steps, at least `steps`, after which the replicas average their weights."""
    # The averages are at multiples of `local_steps` within the epoch: see `LocalStepsLoop`. In Python, -a % b >= 0.
    return steps + -(step_in_epoch + steps) % local_steps
