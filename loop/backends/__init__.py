"""Engines: `create` makes the one that is named."""

from __future__ import annotations

import os
from collections.abc import Sequence

from loop import fault, launch, plugins
from loop.backends.base import Backend
from loop.errors import UsageError


def create(
    name: str, workers: int | None = None, devices: Sequence[str] | None = None, min_shard_bytes: int | None = None
) -> Backend:
    """The engine of this name.

    Args:
        name: `single`, `mirrored`, `central`, `multiworker`, `horovod`, `parameter_server`, `tpu`, or a plug-in's;
            `loop.launch.choose` decides what `auto` is.
        workers: for `mirrored` and `central`: the number of replicas; None: all devices.
        devices: for `mirrored` and `central`: a replica on each of these instead, such as `["gpu:0", "gpu:2"]`; of
            CPUs, as many logical devices are made as are named.
        min_shard_bytes: for `parameter_server`: see there.

    Raises:
        UsageError: there is no such engine, or no such device.
    """
    fault.reached("start", launch.job_rank())
    launch.mark("arrived")
    made = _create(name, workers, devices, min_shard_bytes)
    launch.mark("started")
    return made


def _create(name: str, workers: int | None, devices: Sequence[str] | None, min_shard_bytes: int | None) -> Backend:
    # Each engine is imported when it is asked for: Horovod may not be there.
    if name == "single":
        from loop.backends.base import use_gpus

        single = Backend()
        single.device = "GPU:0" if use_gpus() else ""
        return single
    if name in ("mirrored", "central"):
        from loop.backends.strategy import Central, Mirrored

        return (Mirrored if name == "mirrored" else Central)(workers, devices)
    if name == "multiworker":
        from loop.backends.strategy import MultiWorker

        return MultiWorker()
    if name == "horovod":
        from loop.backends.horovod import ElasticHorovod, Horovod

        return ElasticHorovod() if launch.WORKER in os.environ else Horovod()
    if name == "parameter_server":
        from loop.backends.parameter_server import ParameterServer

        return ParameterServer(min_shard_bytes)
    if name == "tpu":
        from loop.backends.strategy import TPU

        return TPU()
    if name in plugins.found():
        made: Backend = plugins.load(name).create(workers)
        return made
    raise UsageError(f"there is no backend {name!r}")
