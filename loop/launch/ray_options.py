"""What a job asks of a Ray cluster: `--launcher ray`, and the options that belong to it."""

from __future__ import annotations

import os
import re
import socket
from types import SimpleNamespace
from typing import NamedTuple

from loop.errors import UsageError
from loop.launch.elastic_limits import Limits

PLACEMENTS = ("pack", "spread")
"""The strategies of `--placement`, the default first: few nodes, or as many as there are."""
MOST_CPUS = 1024
"""The greatest number of CPUs that a worker can ask for."""
_LOOPBACK = ("localhost", "127.0.0.1")


class Request(NamedTuple):
    """What a job asks of a Ray cluster."""

    address: str  # `host:port` of its head, or `auto`
    workers: int  # the number of workers; of an elastic job, the greatest number
    fewest: int | None  # the number of workers with which an elastic job begins; None: the job isn't elastic
    cpus: int  # how many CPUs Ray reserves for each worker
    gpus: int  # how many GPUs Ray reserves for each worker, if the cluster has any
    placement: str  # one of `PLACEMENTS`
    # The backend that was asked for. The default of a single worker is `single`: the devices of this machine, from
    # which `auto` would be chosen, aren't those of the cluster.
    backend: str


def read_request(typed: SimpleNamespace, limits: Limits | None = None) -> Request | None:
    """What a job asks of a Ray cluster by its options; None without `--launcher ray`.

    Args:
        typed: what was typed, by the names of the command's parameters.
        limits: how many workers an elastic job may have; None: the job isn't elastic.

    Raises:
        UsageError: a value is out of range, or options contradict each other.
    """
    if typed.launcher is None:
        _check_unused(typed)
        return None
    _check_others(typed)
    # An elastic job asks for room for all that it may have; it begins when there is room for `fewest`.
    workers = typed.workers or (limits.high if limits else 1)
    return Request(
        address=typed.address or "auto",
        workers=workers,
        fewest=limits.low if limits else None,
        cpus=_read_cpus(typed),
        gpus=_read_gpus(typed),
        placement=_read_placement(typed),
        backend=typed.backend or ("single" if workers == 1 else "auto"),
    )


def _read_cpus(typed: SimpleNamespace) -> int:
    """How many CPUs Ray reserves for each worker."""
    if typed.cpus_per_worker is None:
        return 1
    if not 1 <= typed.cpus_per_worker <= MOST_CPUS:
        raise UsageError(f"--cpus-per-worker {typed.cpus_per_worker}: give a whole number of 1 to {MOST_CPUS}")
    return int(typed.cpus_per_worker)


def _read_gpus(typed: SimpleNamespace) -> int:
    """How many GPUs Ray reserves for each worker, if the cluster has any: one for each device of a replica."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "-1":
        return 0
    return getattr(typed, "devices_per_replica", None) or 1  # some commands don't have this option


def _read_placement(typed: SimpleNamespace) -> str:
    """The strategy by which Ray spreads the workers over the nodes."""
    placement = typed.placement or PLACEMENTS[0]
    if placement not in PLACEMENTS:
        raise UsageError(f"--placement {placement}: give {' or '.join(PLACEMENTS)}")
    return str(placement)


def _check_unused(typed: SimpleNamespace) -> None:
    """Refuses the options that need `--launcher ray`, which isn't given."""
    for option in ("address", "cpus_per_worker", "placement"):
        if getattr(typed, option) is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} {getattr(typed, option)} is of use with --launcher ray alone")


def _check_others(typed: SimpleNamespace) -> None:
    """Refuses other launchers, and options that can't be used on a Ray cluster."""
    if typed.launcher != "ray":
        raise UsageError(f"--launcher {typed.launcher}: give ray; without it, tfloop starts the workers itself")
    is_single = typed.backend == "single" and (typed.workers or 1) == 1
    if typed.backend not in (None, "auto", "horovod", "multiworker") and not is_single:
        raise UsageError(f"--launcher ray with --backend {typed.backend}: use horovod or multiworker")
    for option in ("hosts_", "discovery"):
        value = getattr(typed, option, None)  # some commands don't have these options
        if value is not None:
            raise UsageError(f"--launcher ray with --{option.rstrip('_')} {value}: leave one of them out")


def check_address(address: str) -> None:
    """Refuses an address without a cluster at once; Ray itself would try to connect for minutes.

    Raises:
        UsageError: the address can't be read, or no process listens there.
    """
    if address == "auto":
        return
    parts = re.fullmatch(r"([^\s/]+):(\d{1,5})", address, re.ASCII)
    if parts is None:
        raise UsageError(
            f"--address {address}: give HOST:PORT of the cluster's head, or auto, on a machine that is one of its nodes"
        )
    try:
        socket.create_connection((parts[1].strip("[]"), int(parts[2])), timeout=5.0).close()
    except (OSError, OverflowError, UnicodeError) as error:  # a UnicodeError: the host isn't a host name
        raise UsageError(
            f"--address {address}: no Ray cluster there ({error}): start one with `ray start`, which prints its address"
        ) from None
    if parts[1] in _LOOPBACK:
        # The cluster is bound to loopback. Without this variable, Ray would connect to an external address instead.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
