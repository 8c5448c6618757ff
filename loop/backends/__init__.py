"""Engines: `create` makes the one that is named."""

from __future__ import annotations

from loop import fault, launch
from loop.backends.base import Backend
from loop.errors import UsageError


def create(name: str, workers: int | None = None, min_shard_bytes: int | None = None) -> Backend:
    """The engine of this name.

    Args:
        name: `single`, `mirrored`, `multiworker`, `horovod` or `parameter_server`; `loop.launch.choose` decides what
            `auto` is.
        workers: for `mirrored`: the number of replicas; None: all devices.
        min_shard_bytes: for `parameter_server`: see there.

    Raises:
        UsageError: there is no such engine.
    """
    fault.reached("start", launch.job_rank())
    launch.mark("arrived")
    made = _create(name, workers, min_shard_bytes)
    launch.mark("started")
    return made


def _create(name: str, workers: int | None, min_shard_bytes: int | None) -> Backend:
    # Each engine is imported when it is asked for: Horovod may not be there.
    if name == "single":
        from loop.backends.base import use_gpus

        single = Backend()
        single.device = "GPU:0" if use_gpus() else ""
        return single
    if name == "mirrored":
        from loop.backends.strategy import Mirrored

        return Mirrored(workers)
    if name == "multiworker":
        from loop.backends.strategy import MultiWorker

        return MultiWorker()
    if name == "horovod":
        from loop.backends.horovod import Horovod

        return Horovod()
    if name == "parameter_server":
        from loop.backends.parameter_server import ParameterServer

        return ParameterServer(min_shard_bytes)
    raise UsageError(f"there is no backend {name!r}")
