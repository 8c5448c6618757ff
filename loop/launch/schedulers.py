"""Joins the job of an outside launcher, such as `mpirun`, `srun` or Kubernetes: sets the variables of this process."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping

from loop.errors import UsageError
from loop.launch import machine, places
from loop.launch.environment import forget_inherited_job
from loop.launch.places import PORTS, Place

HOSTS = "TFLOOP_HOROVOD_HOSTS"
"""Environment variable: the hosts of such a job, and how many workers each has; rank 0 serves Horovod's rendezvous."""
# Each job gets a block of ports, by its number. The blocks lie below the ports that systems hand out by themselves.
_FIRST_PORT = 10_000
_BLOCK = 256
_BLOCKS = 88


def join(backend: str) -> None:
    """Sets the variables that tell this process its place in the job, unless they are set already.

    A script that a worker has started isn't a worker: the variables that it has inherited are removed.

    Raises:
        UsageError: see `place`.
    """
    forget_inherited_job()
    if backend in ("auto", "multiworker", "horovod") and not {"TF_CONFIG", "HOROVOD_RANK"} & os.environ.keys():
        os.environ.update(place(backend, os.environ))


def place(backend: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell this process its place in the job of a launcher; empty outside of such a job.

    Under `mpirun`, a Horovod that is built with MPI finds its place by MPI. Otherwise workers of `horovod` meet where
    rank 0 serves Horovod's rendezvous, and all others by `TF_CONFIG`.

    Raises:
        UsageError: the job can't be joined; with what to do instead.
    """
    if by_mpi := _by_mpi(backend, environment):
        return by_mpi
    launcher_and_place = places.find(environment)
    if launcher_and_place is None:
        return {}
    launcher, own = launcher_and_place
    if backend == "horovod" and launcher == "mpirun":
        raise UsageError(
            f"backend='horovod' under mpirun, but {places.horovod_lacks_mpi()}: build it with MPI (docs/scale-out.md), "
            "or use multiworker"
        )
    base = _port_base(own.number, environment)
    # Horovod's rendezvous has the last port of the block; the workers of a host count from the first.
    return _horovod(own, base + _BLOCK - 1) if backend == "horovod" else _tf_config(own, base)


def _by_mpi(backend: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The place under `mpirun`, for a Horovod with MPI; empty: it has none, or another backend is better."""
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") == "1":
        return {}
    # With all workers on one host, TF_CONFIG can be made. `auto` prefers it to a Horovod that would send gradients of
    # GPUs through the CPU.
    on_one_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment["OMPI_COMM_WORLD_SIZE"]
    is_slow = backend == "auto" and on_one_host and not machine.horovod_knows_gpus()
    if backend == "multiworker" or is_slow or not horovod_has_mpi():
        return {}
    variables = {}
    for name in ("RANK", "SIZE", "LOCAL_RANK"):
        variables[f"HOROVOD_{name}"] = str(places.number(environment, f"OMPI_COMM_WORLD_{name}"))
    return variables


def _tf_config(own: Place, base: int) -> dict[str, str]:
    hosts = _reachable(own)
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    # Every worker computes the same list: nothing is asked of the others.
    addresses = []
    for host, local_rank in zip(hosts, local_ranks):
        name = f"[{host}]" if ":" in host else host  # IPv6 in brackets
        addresses.append(f"{name}:{base + local_rank}")
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": own.rank}}
    # Without a local rank, a worker takes all GPUs of its host.
    rank_here = {} if own.owns_host else {"TFLOOP_LOCAL_RANK": str(local_ranks[own.rank])}
    return {"TF_CONFIG": json.dumps(config), **rank_here}


def _horovod(own: Place, port: int) -> dict[str, str]:
    hosts = _reachable(own)
    if any(":" in name for name in hosts):
        raise UsageError(f"backend='horovod' with {hosts[0]}: Horovod takes no IPv6 addresses: use multiworker")
    host = hosts[own.rank]
    local_rank = hosts[: own.rank].count(host)
    slots = Counter(hosts)
    # Horovod's "cross" group: one worker of each host, all with the same local rank.
    across = [other for other, count in slots.items() if count > local_rank]
    return {
        "HOROVOD_RANK": str(own.rank),
        "HOROVOD_SIZE": str(len(hosts)),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(slots[host]),
        "HOROVOD_CROSS_RANK": str(across.index(host)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0],
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        HOSTS: ",".join(f"{name}:{count}" for name, count in slots.items()),
    }


def _reachable(own: Place) -> list[str]:
    """The host of each worker, by the name at which the others reach it: on a single host, loopback."""
    return own.hosts if len(set(own.hosts)) > 1 else ["127.0.0.1"] * len(own.hosts)


def _port_base(job: int, environment: Mapping[str, str]) -> int:
    """The first port on each host, the same for all workers of a job. Another job most probably has other ports."""
    if PORTS not in environment:
        return _FIRST_PORT + _BLOCK * (job % _BLOCKS)
    text = environment[PORTS]
    if not re.fullmatch(r"\d{1,5}", text) or not 1024 <= int(text) < 65536 - _BLOCK:
        raise UsageError(f"{PORTS}={text}: give a port of 1024 to {65535 - _BLOCK}, the same for all workers")
    return int(text)


def horovod_has_mpi() -> bool:
    """Whether Horovod is installed, and was built with MPI."""
    return machine.horovod_built_with(machine.MPI)
