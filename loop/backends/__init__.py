"""Engines: `create` makes the one that is named."""

from __future__ import annotations

import os

from loop import fault, launch
from loop.backends.base import Backend
from loop.errors import UsageError


def create(name: str, workers: int | None = None) -> Backend:
    """The engine of this name.

    Args:
        name: `single`, `mirrored`, `multiworker` or `horovod`; `loop.launch.choose` decides what `auto` is.
        workers: for `mirrored`: the number of replicas; None: all devices.

    Raises:
        UsageError: there is no such engine.
    """
    fault.reached("start", launch.job_rank())
    launch.mark("arrived")
    made = _create(name, workers)
    launch.mark("started")
    return made


def _create(name: str, workers: int | None) -> Backend:
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
        from loop.backends.horovod import ElasticHorovod, Horovod

        return ElasticHorovod() if launch.WORKER in os.environ else Horovod()
    raise UsageError(f"there is no backend {name!r}")
