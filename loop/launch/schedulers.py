"""Finds this process's place in a job that Slurm's `srun` or Open MPI's `mpirun` has started."""

from __future__ import annotations

import itertools
import json
import os
import re
import zlib
from collections.abc import Mapping

from loop.errors import UsageError
from loop.launch import machine

PORTS = "TFLOOP_PORT_BASE"
"""Environment variable: the first of the ports at which the workers of such a job meet on each host."""

# Each job gets a block of ports, by its number. The blocks lie below the ports that systems hand out by themselves.
_FIRST_PORT = 10_000
_BLOCK = 256
_BLOCKS = 88


def join(backend: str) -> None:
    """Sets the variables that tell this process its place in the job, unless they are set already.

    Raises:
        UsageError: see `place`.
    """
    if backend in ("auto", "multiworker", "horovod") and not {"TF_CONFIG", "HOROVOD_RANK"} & os.environ.keys():
        os.environ.update(place(backend, os.environ))


def place(backend: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell this process its place in a job of `mpirun` or `srun`; empty outside of such a job.

    Under `mpirun`, a Horovod that is built with MPI finds its place by MPI. In all other cases workers meet by
    `TF_CONFIG`.

    Raises:
        UsageError: the job can't be joined; with what to do instead.
    """
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") != "1":  # asked first, because mpirun may use srun itself
        return _open_mpi(backend, environment)
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _slurm(backend, environment)
    return {}


def _open_mpi(backend: str, environment: Mapping[str, str]) -> dict[str, str]:
    rank, size, local_rank, local_size = (
        _number(environment, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    # With all workers on one host, TF_CONFIG can be made. `auto` prefers it to a Horovod that would send gradients of
    # GPUs through the CPU.
    is_slow = backend == "auto" and local_size == size and not machine.horovod_knows_gpus()
    if backend != "multiworker" and not is_slow and horovod_has_mpi():
        return {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size), "HOROVOD_LOCAL_RANK": str(local_rank)}
    _check_without_mpi(backend, size, local_size)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    if job is None and PORTS not in environment:
        raise UsageError(f"mpirun has set no PMIX_NAMESPACE, which ports are derived from: set {PORTS} for all workers")
    base = _port_base(zlib.crc32((job or "").encode()), environment)
    return _tf_config(rank, local_rank, [("127.0.0.1", local) for local in range(size)], base)


def _check_without_mpi(backend: str, size: int, local_size: int) -> None:
    """Refuses a job of `mpirun` that workers can't join by `TF_CONFIG`."""
    missing = "Horovod is built without MPI" if machine.horovod_missing() is None else "Horovod is not installed"
    if backend == "horovod":
        raise UsageError(
            f"backend='horovod' under mpirun, but {missing}: build it with MPI (docs/scale-out.md), or use multiworker"
        )
    if local_size != size:
        raise UsageError(
            f"mpirun has started {size} workers on several hosts, of which {local_size} are here; {missing}, and "
            "mpirun doesn't tell multiworker which hosts they are: start with --hosts or srun, give each TF_CONFIG, "
            "or build Horovod with MPI (docs/scale-out.md)"
        )


def _slurm(backend: str, environment: Mapping[str, str]) -> dict[str, str]:
    if backend == "horovod":
        raise UsageError(
            "backend='horovod' under srun: Horovod can't be joined there; use multiworker, or start with mpirun within "
            "the job, with a Horovod that is built with MPI (docs/scale-out.md)"
        )
    rank, size, node, local_rank, job, step = (
        _number(environment, f"SLURM_{name}")
        for name in ("PROCID", "STEP_NUM_TASKS", "NODEID", "LOCALID", "JOB_ID", "STEP_ID")
    )
    nodes = node_list(_text(environment, "SLURM_STEP_NODELIST"))
    tasks = task_counts(_text(environment, "SLURM_STEP_TASKS_PER_NODE"))
    if len(nodes) != len(tasks) or sum(tasks) != size:
        raise UsageError(
            f"Slurm's variables contradict each other: {len(nodes)} nodes in SLURM_STEP_NODELIST, "
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']}, SLURM_STEP_NUM_TASKS={size}"
        )
    # A block distribution fills the nodes one after the other: the ranks of a node follow each other.
    places: list[tuple[int, int]] = []
    for index, count in enumerate(tasks):
        places += [(index, local) for local in range(count)]
    if not 0 <= rank < size or places[rank] != (node, local_rank):
        raise UsageError(
            f"Slurm's task {rank} is not where a block distribution puts it (SLURM_NODEID={node}, SLURM_LOCALID="
            f"{local_rank}): start with srun --distribution=block"
        )
    names = nodes if len(nodes) > 1 else ["127.0.0.1"]
    base = _port_base(job + step, environment)
    return _tf_config(rank, local_rank, [(names[index], local) for index, local in places], base)


def _tf_config(rank: int, local_rank: int, places: list[tuple[str, int]], base: int) -> dict[str, str]:
    cluster = {"worker": [f"{host}:{base + local}" for host, local in places]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": rank}}
    return {"TF_CONFIG": json.dumps(config), "TFLOOP_LOCAL_RANK": str(local_rank)}


def _port_base(job: int, environment: Mapping[str, str]) -> int:
    """The first port on each host: the same for all workers of a job, and hardly that of another job."""
    if PORTS not in environment:
        return _FIRST_PORT + _BLOCK * (job % _BLOCKS)
    text = environment[PORTS]
    if not re.fullmatch(r"\d{1,5}", text) or not 1024 <= int(text) < 65536 - _BLOCK:
        raise UsageError(f"{PORTS}={text}: give a port of 1024 to {65535 - _BLOCK}, the same for all workers")
    return int(text)


def node_list(text: str) -> list[str]:
    """The nodes of Slurm's compressed list: `rack[1-2]n[08-10],login` are `rack1n08`, ..., `rack2n10`, `login`.

    Raises:
        UsageError: it is no such list.
    """
    # Commas within brackets belong to the ranges.
    names = re.findall(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", text)
    if not names or ",".join(names) != text:
        raise UsageError(f"the node list {text!r} can't be read: it must be like node[01-03,7],login")
    nodes = []
    for name in names:
        parts = [_values(part) for part in re.split(r"(\[.*?\])", name)]
        nodes += ["".join(values) for values in itertools.product(*parts)]
    return nodes


def _values(part: str) -> list[str]:
    """The values of one part of a name: the part itself, or the numbers of its ranges, with leading zeros."""
    if not part.startswith("["):
        return [part]
    values = []
    for text in part[1:-1].split(","):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
        first = numbers[1] if numbers else "1"
        last = numbers[2] or first if numbers else "0"
        if int(last) < int(first) or int(last) - int(first) >= 1_000_000:
            raise UsageError(f"the node list has {part}, which can't be read: it must be like [01-03,7]")
        values += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return values


def task_counts(text: str) -> list[int]:
    """How many tasks each node has: `2(x3),1` are 2, 2, 2, 1.

    Raises:
        UsageError: it is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)
        if match is None:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text}: it must be like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def horovod_has_mpi() -> bool:
    """Whether Horovod is there, and was built with MPI."""
    return machine.horovod_built_with(machine.MPI)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise UsageError(f"{name}={text}: the launcher should have set a number")
    return int(text)


def _text(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise UsageError(f"this job was started by srun or mpirun, but {name} isn't set: give each worker a TF_CONFIG")
    return environment[name]
