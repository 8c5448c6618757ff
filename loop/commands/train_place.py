"""Where `tfloop train` trains: the backend, its workers, hosts and devices, by what was typed. Loads no TensorFlow."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import NamedTuple

from loop.errors import UsageError
from loop.launch import host_slots, machine, ray_options
from loop.launch.backend_choice import check_servers, choose_backend, choose_for_command
from loop.launch.elastic_limits import Limits, read_limits
from loop.options import check_communication, read_partition

_BACKENDS_OF = {"tpu": ("tpu",), "devices": ("mirrored", "central"), "devices_per_replica": ("single", "horovod")}
"""The backends to which an option means something, by its name."""


class Place(NamedTuple):
    """Where a task is trained: the backend, why that one, and what it is to have."""

    backend: str
    why: str
    workers: int | None
    hosts: dict[str, int]
    ray: ray_options.Request | None
    limits: Limits | None
    devices: list[str] | None


def read_place(typed: SimpleNamespace) -> Place:
    """Where the task is to be trained; refuses what doesn't fit together."""
    asked = typed.backend
    if typed.tpu is not None:
        os.environ["TPU_NAME"] = typed.tpu  # where TensorFlow looks for it
        asked = asked or "tpu"
    # The hosts say how many workers there are, the limits depend on that, and what is asked of Ray on the limits.
    typed_or_auto = asked or "auto"
    by_host = host_slots.read_hosts(typed.hosts_, typed.workers, typed_or_auto, typed.interface, typed.remote_python)
    workers = sum(by_host.values()) or typed.workers
    limits = _limits(typed, typed_or_auto, workers)
    ray = ray_options.read_request(typed, limits)
    devices = None if typed.devices is None else machine.device_names(typed.devices.split(","))
    if limits is not None:  # the only backend that an elastic job can have
        asked = "horovod"
    elif ray is not None:
        asked = ray.backend
    asked = asked or ("mirrored" if devices else "auto")

    backend = choose_for_command(asked, workers, asynchronous=True)
    why = choose_backend(asked, workers)[1] if typed.dry_run_ else ""
    place = Place(backend, why, workers, by_host, ray, limits, devices)
    _check_fits(typed, place)
    return place


def _limits(typed: SimpleNamespace, backend: str, workers: int | None) -> Limits | None:
    """How many workers an elastic job may have; None if none was asked for."""
    limits = read_limits(typed.elastic_, typed.discovery, backend, workers, typed.hosts_)
    if limits is not None:
        for option in ("profile", "devices", "tpu"):
            value = getattr(typed, option)
            if value is not None:
                raise UsageError(f"--elastic {typed.elastic_} with --{option} {value}: leave one of them out")
    return limits


def _check_fits(typed: SimpleNamespace, place: Place) -> None:
    """Refuses options that mean nothing to the backend, or contradict each other."""
    _check_servers(typed, place.backend)
    check_communication(place.backend, typed.communication)
    if place.ray is not None and place.backend not in ("horovod", "multiworker", "single"):
        raise UsageError(f"--launcher ray with the backend {place.backend}: give --backend horovod or multiworker")
    for option, allowed in _BACKENDS_OF.items():
        value = getattr(typed, option)
        if value not in (None, 1) and place.backend not in allowed:  # one device in a replica is what all have
            name = option.replace("_", "-")
            use = " or ".join(allowed)
            raise UsageError(f"--{name} {value} with --backend {place.backend}: leave one out, or use {use}")
    if place.devices and place.workers not in (None, len(place.devices)):
        raise UsageError(f"--workers {place.workers} with {len(place.devices)} devices: leave --workers out")


def _check_servers(typed: SimpleNamespace, backend: str) -> None:
    """Refuses a number of parameter servers, or a partition of variables, that the backend can't use."""
    if typed.ps is not None:
        check_servers(backend, typed.ps)
    least = typed.min_shard_bytes
    if least is not None and (backend != "parameter_server" or least < 1):
        raise UsageError(f"--min-shard-bytes {least}: give a number >= 1, with --backend parameter_server")
    if typed.partition is None:
        return
    if backend != "parameter_server" or least is not None:
        raise UsageError(
            f"--partition {typed.partition}: give it with --backend parameter_server, and without --min-shard-bytes"
        )
    read_partition(typed.partition)
