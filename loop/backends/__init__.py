"""Backends: `create` makes the one that is named."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from loop.backends import devices as devices_
from loop.backends.base import Backend
from loop.errors import UsageError
from loop.launch import plugins
from loop.launch.environment import WORKER, check_place, forget_inherited_job, job_rank, own_job
from loop.launch.worker import mark_state
from loop.monitor import fault_injection
from loop.options import check_communication

if TYPE_CHECKING:
    from loop.backends.parameter_server import Partitioner

Loaded = TypeVar("Loaded")
_BEFORE_THE_TASK = ("multiworker", "parameter_server", "tpu")
"""Backends that TensorFlow lets start only before anything else uses it, or that undo what was made before."""


def with_task(
    load: Callable[[], Loaded], name: str, workers: int | None = None, threads: int | None = None, **options: Any
) -> tuple[Loaded, Backend]:
    """Loads a task and makes the backend of this name, in the order that TensorFlow needs.

    The task's module, and the task when it is made, may use TensorFlow: devices and threads must be set before.

    Args:
        load: loads the task.
        name: see `create`.
        workers: see `create`.
        threads: TensorFlow's threads for an operation; None: see `devices.prepare`.
        **options: the other arguments of `create`.

    Returns:
        What `load` returned, and the backend.
    """
    devices_.prepare(name, workers, options.get("devices"), threads, options.get("devices_per_replica"))
    if name in _BEFORE_THE_TASK:
        backend = create(name, workers, **options)
        return load(), backend
    loaded = load()
    return loaded, create(name, workers, **options)


def create(
    name: str,
    workers: int | None = None,
    devices: Sequence[str] | None = None,
    min_shard_bytes: int | None = None,
    devices_per_replica: int | None = None,
    partition: str | Partitioner | None = None,
    communication: str = "auto",
) -> Backend:
    """The backend of this name.

    Args:
        name: `single`, `mirrored`, `central`, `multiworker`, `horovod`, `parameter_server`, `tpu`, or a plug-in's;
            `loop.launch.backend_choice.choose_backend` decides what `auto` is.
        workers: for `mirrored` and `central`: the number of replicas; None: all devices.
        devices: for `mirrored` and `central`: a replica on each of these instead, such as `["gpu:0", "gpu:2"]`; of
            CPUs, as many logical devices are made as are named.
        min_shard_bytes: for `parameter_server`: as `partition=f"min:{min_shard_bytes}"`.
        devices_per_replica: for `single` and `horovod`: how many devices a replica owns, over which the task spreads
            its model by `loop.device`; None: one.
        partition: for `parameter_server`: see `loop.backends.parameter_server.ParameterServer`.
        communication: how replicas exchange gradients: "auto"; for `multiworker` "ring" or "nccl"; for `mirrored`
            "nccl", "hierarchical" or "one-device".

    Raises:
        UsageError: there is no such backend, no such device, no `TF_CONFIG` for a backend that needs it, or the backend
            can't communicate in that way, or eager execution is off.
    """
    # A script has no other beginning than this: it is a worker here, or one that a worker has started.
    forget_inherited_job()
    own_job()
    # Checks first: they need no other worker.
    check_communication(name, communication)
    check_place(name, os.environ)
    devices_.check_is_eager()
    devices_.own_several(name, devices_per_replica)
    devices_.check_several()
    fault_injection.reached("start", job_rank())
    # Before the backend waits for the other workers: the launcher names those that have not even arrived.
    mark_state("arrived")
    if min_shard_bytes is not None:
        partition = f"min:{min_shard_bytes}"
    made = _create(name, workers, devices, partition, communication)
    chosen: dict[str, object] = {}
    if communication != "auto":
        chosen["communication"] = communication
    if devices_per_replica not in (None, 1):
        chosen["devices_per_replica"] = devices_per_replica
    made.chosen = chosen
    # Only now: the launcher takes it that a SIGTERM can't be lost any more, and stops repeating it.
    mark_state("started")
    return made


def _create(
    name: str,
    workers: int | None,
    devices: Sequence[str] | None,
    partition: str | Partitioner | None,
    communication: str,
) -> Backend:
    # Each backend is imported only when it is asked for: Horovod may not be installed.
    if name == "single":
        single = Backend()
        single.device = "GPU:0" if devices_.use_gpus() else ""  # in the CPU's memory, nothing need be copied ahead
        return single
    if name in ("mirrored", "central"):
        from loop.backends.strategy import Central, Mirrored

        return Central(workers, devices) if name == "central" else Mirrored(workers, devices, communication)
    if name == "multiworker":
        from loop.backends.strategy import MultiWorker

        return MultiWorker(communication)
    if name == "horovod":
        from loop.backends.horovod import ElasticHorovod, Horovod

        return ElasticHorovod() if WORKER in os.environ else Horovod()  # only workers of elastic jobs have names
    if name == "parameter_server":
        from loop.backends.parameter_server import ParameterServer

        return ParameterServer(partition)
    if name == "tpu":
        from loop.backends.strategy import TPU

        return TPU()
    if name in plugins.entry_points():
        # Last: a plug-in can't replace one of tfloop's own backends.
        made: Backend = plugins.load(name).create(workers)
        return made
    raise UsageError(f"there is no backend {name!r}")
