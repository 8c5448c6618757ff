"""What a job asks of a Ray cluster: `--launcher ray`, and the options that belong to it."""

from __future__ import annotations

import os
import re
import socket
from typing import Any, NamedTuple

from loop.errors import UsageError

PLACEMENTS = ("pack", "spread")
"""The strategies of `--placement`, the default first: few nodes, or as many as there are."""
MOST_CPUS = 1024
"""The most CPUs of a worker."""
_LOOPBACK = ("localhost", "127.0.0.1")


class Request(NamedTuple):
    """What a job asks of a Ray cluster.

    Attributes:
        address: `host:port` of its head, or `auto`.
        workers: how many there are to be.
        cpus: how many CPUs Ray counts for each.
        gpus: how many GPUs each has, where the cluster has any.
        placement: one of `PLACEMENTS`.
        backend: the one that was asked for; of a single worker `single`, whatever devices this machine has.
    """

    address: str
    workers: int
    cpus: int
    gpus: int
    placement: str
    backend: str


def read_request(typed: Any) -> Request | None:
    """What a job asks of a Ray cluster by its options; None without `--launcher ray`.

    Args:
        typed: what was typed, by the names of the command's parameters.

    Raises:
        UsageError: a value that can't be, or options that contradict each other.
    """
    if typed.launcher is None:
        _check_unused(typed)
        return None
    _check_others(typed)
    cpus = 1 if typed.cpus_per_worker is None else typed.cpus_per_worker
    if not 1 <= cpus <= MOST_CPUS:
        raise UsageError(f"--cpus-per-worker {cpus}: give a whole number of 1 to {MOST_CPUS}")
    placement = typed.placement or PLACEMENTS[0]
    if placement not in PLACEMENTS:
        raise UsageError(f"--placement {placement}: give {' or '.join(PLACEMENTS)}")
    devices = getattr(typed, "devices_per_replica", None) or 1
    gpus = 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "-1" else devices
    workers = typed.workers or 1
    backend = typed.backend or ("single" if workers == 1 else "auto")
    return Request(typed.address or "auto", workers, cpus, gpus, placement, backend)


def _check_unused(typed: Any) -> None:
    """Refuses options that are for Ray alone."""
    for option in ("address", "cpus_per_worker", "placement"):
        if getattr(typed, option) is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} {getattr(typed, option)} is of use with --launcher ray alone")


def _check_others(typed: Any) -> None:
    """Refuses other launchers, and options that mean nothing on a Ray cluster."""
    if typed.launcher != "ray":
        raise UsageError(f"--launcher {typed.launcher}: give ray; without it, tfloop starts the workers itself")
    alone = (typed.workers or 1) == 1
    if typed.backend not in (None, "auto", "horovod", "multiworker", *["single"] * alone):
        raise UsageError(f"--launcher ray with --backend {typed.backend}: use horovod or multiworker")
    for option in ("hosts", "elastic"):
        value = getattr(typed, f"{option}_", None)  # a command may not have it
        if value is not None:
            raise UsageError(f"--launcher ray with --{option} {value}: leave one of them out")


def check_address(address: str) -> None:
    """Checks the address of a Ray cluster: Ray itself would try for minutes.

    Raises:
        UsageError: it can't be read, or nothing listens there.
    """
    if address == "auto":
        return
    found = re.fullmatch(r"([^\s/]+):(\d{1,5})", address, re.ASCII)
    if found is None:
        raise UsageError(
            f"--address {address}: give HOST:PORT of the cluster's head, or auto, on a machine that is one of its nodes"
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--address {address}: no Ray cluster there ({error}): start one with `ray start`, which prints its address"
        ) from None
    if found[1] in _LOOPBACK:
        # A cluster that is bound to loopback: without this, Ray would connect to the machine's own address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
