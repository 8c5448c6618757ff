"""A process's place in a job, read from the variables of its launcher. There is one reader for each launcher."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from loop.errors import UsageError
from loop.launch import machine
from loop.launch.host_lists import host_counts, node_list, task_counts, task_hosts

PORTS = "TFLOOP_PORT_BASE"
"""Environment variable: the first of the ports at which the workers of such a job meet on each host."""
SERVICE = "TFLOOP_SERVICE"
"""Environment variable: the headless service of a job on Kubernetes, which gives each of its pods a host name."""
PODS = "TFLOOP_PODS"
"""Environment variable: how many pods a job on Kubernetes has."""

_MOST_STEPS = 13
"""The number of steps of a Slurm job whose ports differ from those of the next job."""


class Place(NamedTuple):
    """The place of a process in a job."""

    rank: int  # its rank
    hosts: list[str]  # the host of each worker, by rank
    number: int  # a number of the job. All its workers have the same; another job most probably has a different one.
    owns_host: bool = False  # whether each host has one worker, which then uses all GPUs of its host


def find(environment: Mapping[str, str]) -> tuple[str, Place] | None:
    """The launcher that has started this process as one of several workers, and its place; None: there is no launcher.

    Raises:
        UsageError: the variables of the launcher are missing, can't be read, or contradict each other.
    """
    for launcher, read in LAUNCHERS.items():
        place = read(environment)
        if place is None:
            continue
        if not 0 <= place.rank < len(place.hosts):
            raise UsageError(f"{launcher} has started {len(place.hosts)} workers, but this one has rank {place.rank}")
        return launcher, place
    # Each worker would train alone, as if there were no others.
    if environment.get("PMI_SIZE", "1") != "1" and "PBS_NODEFILE" not in environment:
        raise UsageError(
            f"PMI_SIZE={environment['PMI_SIZE']}: started by an mpiexec that doesn't say where the workers are (it is "
            "supported within a job of PBS): use --workers N or --hosts, or give each worker a TF_CONFIG; with "
            "--backend single, each trains alone"
        )
    return None


def _jsrun(environment: Mapping[str, str]) -> Place | None:
    if environment.get("JSM_NAMESPACE_SIZE", "1") == "1":
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = _numbers(environment, "JSM_NAMESPACE_", names)
    nodes = list(dict.fromkeys(_lsf_hosts(environment)))
    if size == local_size * (len(nodes) - 1):
        nodes = nodes[1:]  # the first one is the launch node, where the job's script runs, but no task
    if not 0 < local_size * len(nodes) == size or rank % local_size != local_rank:
        raise UsageError(
            f"jsrun's task {rank} of {size}, with JSM_NAMESPACE_LOCAL_RANK={local_rank} and JSM_NAMESPACE_LOCAL_SIZE="
            f"{local_size}, has no place on the {len(nodes)} hosts of LSB_MCPU_HOSTS: start as many tasks on each of "
            "them, with jsrun --launch_distribution packed"
        )
    # By `packed`, the ranks of a node follow each other.
    hosts: list[str] = []
    for node in nodes:
        hosts += [node] * local_size
    _check_here("jsrun", rank, hosts)
    return Place(rank, hosts, _hash(_text(environment, "LSB_JOBID")))


def _open_mpi(environment: Mapping[str, str]) -> Place | None:
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") == "1":
        return None
    rank, size, local_size = _numbers(environment, "OMPI_COMM_WORLD_", ("RANK", "SIZE", "LOCAL_SIZE"))
    if local_size != size:
        raise UsageError(
            f"mpirun has started {size} workers on several hosts, of which {local_size} are here; "
            f"{horovod_lacks_mpi()}, and mpirun doesn't tell multiworker which hosts they are: start with --hosts or "
            "srun, give each TF_CONFIG, or build Horovod with MPI (docs/scale-out.md)"
        )
    # Without a number of the job, two jobs on this machine would use the same ports.
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    if job is None and PORTS not in environment:
        raise UsageError(f"mpirun has set no PMIX_NAMESPACE, which ports are derived from: set {PORTS} for all workers")
    return Place(rank, ["localhost"] * size, _hash(job or ""))


def horovod_lacks_mpi() -> str:
    """Why a Horovod without MPI can't be used."""
    return "Horovod is built without MPI" if machine.horovod_missing() is None else "Horovod is not installed"


def _flux(environment: Mapping[str, str]) -> Place | None:
    if environment.get("FLUX_JOB_SIZE", "1") == "1":
        return None
    names = ("TASK_RANK", "TASK_LOCAL_ID", "JOB_SIZE", "JOB_NNODES")
    rank, local_rank, size, nodes = _numbers(environment, "FLUX_", names)
    job = _text(environment, "FLUX_JOB_ID")
    hosts = ["localhost"] * size if nodes == 1 else task_hosts(_flux_task_map(job))
    has_rank = len(hosts) == size > rank and len(set(hosts)) == nodes
    # `schedulers` numbers the workers of a host in the order of their ranks: Flux must have done so, too.
    if not has_rank or hosts[:rank].count(hosts[rank]) != local_rank:
        raise UsageError(
            f"Flux's variables and task map contradict each other: {len(set(hosts))} hosts with {len(hosts)} tasks, "
            f"but FLUX_JOB_NNODES={nodes}, FLUX_JOB_SIZE={size}, FLUX_TASK_RANK={rank}, FLUX_TASK_LOCAL_ID={local_rank}"
        )
    return Place(rank, hosts, _hash(job))


def _flux_task_map(job: str) -> str:
    """The tasks of each host, as Flux's command prints them. There is no variable that has them."""
    command = [shutil.which("flux") or "flux", "job", "taskmap", "--to=hosts", job]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        raise UsageError(
            f"`flux job taskmap --to=hosts {job}`, which says on which hosts the workers are, has failed ({reason}): "
            "put flux on PATH, or give each worker a TF_CONFIG"
        ) from None


def _slurm(environment: Mapping[str, str]) -> Place | None:
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    names = ("PROCID", "STEP_NUM_TASKS", "NODEID", "LOCALID", "JOB_ID", "STEP_ID")
    rank, size, node, local_rank, job, step = _numbers(environment, "SLURM_", names)
    nodes = node_list(_text(environment, "SLURM_STEP_NODELIST"))
    tasks = task_counts(_text(environment, "SLURM_STEP_TASKS_PER_NODE"))
    if len(nodes) != len(tasks) or sum(tasks) != size:
        raise UsageError(
            f"Slurm's variables contradict each other: {len(nodes)} nodes in SLURM_STEP_NODELIST, "
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']}, SLURM_STEP_NUM_TASKS={size}"
        )
    # A block distribution fills the nodes one after the other: the ranks of a node follow each other.
    places: list[tuple[int, int]] = []
    hosts: list[str] = []
    for index, count in enumerate(tasks):
        hosts += [nodes[index]] * count
        for local in range(count):
            places.append((index, local))
    if not 0 <= rank < size or places[rank] != (node, local_rank):
        raise UsageError(
            f"Slurm's task {rank} is not where a block distribution puts it (SLURM_NODEID={node}, SLURM_LOCALID="
            f"{local_rank}): start with srun --distribution=block"
        )
    # Steps may run at the same time, as may other jobs. Not their sum: step 1 would have the next job's ports.
    return Place(rank, hosts, _MOST_STEPS * job + step)


def _lsf(environment: Mapping[str, str]) -> Place | None:
    if "LSF_PM_TASKID" not in environment:  # a job's script has none, only what blaunch starts
        return None
    rank = number(environment, "LSF_PM_TASKID") - 1  # LSF counts tasks from 1
    hosts = _lsf_hosts(environment)
    if len(hosts) == 1:
        return None
    _check_here("blaunch", rank, hosts)
    return Place(rank, hosts, _hash(_text(environment, "LSB_JOBID")))


def _lsf_hosts(environment: Mapping[str, str]) -> list[str]:
    """The host of each slot of a job of LSF. `LSB_HOSTS` has them, too, but LSF doesn't set it for a long list."""
    hosts = host_counts(_text(environment, "LSB_MCPU_HOSTS"))
    others = environment.get("LSB_HOSTS", "").split()
    if others and sorted(others) != sorted(hosts):  # as many slots of each host, in any order
        raise UsageError(
            f"LSF's variables contradict each other: LSB_MCPU_HOSTS={environment['LSB_MCPU_HOSTS']}, LSB_HOSTS="
            f"{environment['LSB_HOSTS']}"
        )
    return hosts


def _pbs(environment: Mapping[str, str]) -> Place | None:
    if "PBS_NODEFILE" not in environment:
        return None
    by_mpiexec = environment.get("PMI_SIZE", "1") != "1"
    if not by_mpiexec and environment.get("PBS_TASKNUM", "1") == "1":  # the job's script is task 1
        return None
    path = environment["PBS_NODEFILE"]
    try:
        hosts = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"PBS_NODEFILE={path}, which says on which hosts the workers are, can't be read here ({error}): copy it to "
            "a directory that all hosts see, and set PBS_NODEFILE for all workers"
        ) from None
    if by_mpiexec:
        rank = number(environment, "PMI_RANK")
        if number(environment, "PMI_SIZE") != len(hosts):
            raise UsageError(
                f"PMI_SIZE={environment['PMI_SIZE']}, but PBS_NODEFILE has {len(hosts)} lines: start a worker for each"
            )
    else:
        rank = _pbsdsh_rank(environment, hosts)
    if len(hosts) == 1:
        return None
    _check_here("PBS", rank, hosts)
    return Place(rank, hosts, _hash(_text(environment, "PBS_JOBID")))


def _pbsdsh_rank(environment: Mapping[str, str], hosts: list[str]) -> int:
    """The rank of a task of `pbsdsh`. Torque gives the number of its slot, OpenPBS and PBS Professional of its host."""
    if "PBS_VNODENUM" in environment:
        return number(environment, "PBS_VNODENUM")
    if len(set(hosts)) != len(hosts):
        raise UsageError(
            f"PBS_NODEFILE has {len(hosts)} lines with {len(set(hosts))} hosts, and pbsdsh tells a worker its host "
            "alone: ask for one slot on each (select=N:mpiprocs=1), or start with mpiexec"
        )
    return number(environment, "PBS_NODENUM")


def _skypilot(environment: Mapping[str, str]) -> Place | None:
    if "SKYPILOT_NODE_RANK" not in environment:
        return None
    hosts = _text(environment, "SKYPILOT_NODE_IPS").split()  # in the order of the nodes' ranks
    nodes = environment.get("SKYPILOT_NUM_NODES", str(len(hosts)))
    if nodes != str(len(hosts)) or len(set(hosts)) != len(hosts):
        raise UsageError(
            f"SkyPilot's variables contradict each other: SKYPILOT_NUM_NODES={nodes}, and SKYPILOT_NODE_IPS has "
            f"{len(set(hosts))} addresses on {len(hosts)} lines"
        )
    if len(hosts) == 1:
        return None
    # Otherwise a node whose driver has failed would train on its CPU, and all others would wait for it.
    promised = environment.get("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    if promised.isdecimal() and int(promised) > machine.count_gpus() and "CUDA_VISIBLE_DEVICES" not in environment:
        raise UsageError(
            f"SKYPILOT_NUM_GPUS_PER_NODE={promised}, but this node shows {machine.count_gpus()} GPUs: look at its "
            "driver with nvidia-smi; or set CUDA_VISIBLE_DEVICES=-1 on all nodes, to train on CPUs"
        )
    task = environment.get("SKYPILOT_TASK_ID", ",".join(hosts))
    return Place(number(environment, "SKYPILOT_NODE_RANK"), hosts, _hash(task), owns_host=True)


def _kubernetes(environment: Mapping[str, str]) -> Place | None:
    if SERVICE not in environment:  # the pods of an indexed job may each train on their own
        return None
    counts = {}
    for name in (PODS, "JAX_NUM_PROCESSES"):
        if name in environment:
            counts[name] = number(environment, name)
    if len(set(counts.values())) != 1:
        raise UsageError(
            f"{SERVICE} is set, but the number of pods isn't clear ({counts or 'no variable has it'}): set {PODS} to "
            "the job's completions; a runtime of Kubeflow Trainer with mlPolicy jax sets JAX_NUM_PROCESSES"
        )
    index = number(environment, "JOB_COMPLETION_INDEX")
    pods = counts.popitem()[1]
    # The pods of an indexed job are named by the job and their index; so the names of all pods are known.
    name = _text(environment, "HOSTNAME")
    job = name.removesuffix(f"-{index}")
    if job == name or index >= pods or environment.get("JAX_PROCESS_ID", str(index)) != str(index):
        raise UsageError(
            f"Kubernetes' variables contradict each other: HOSTNAME={name}, JOB_COMPLETION_INDEX={index}, {pods} pods"
        )
    if pods == 1:
        return None
    service = environment[SERVICE]
    return Place(index, [f"{job}-{pod}.{service}" for pod in range(pods)], _hash(job), owns_host=True)


LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Place | None]] = {
    "jsrun": _jsrun,  # before mpirun, because it sets mpirun's variables, too
    "mpirun": _open_mpi,  # before srun, because it may use srun itself
    "Flux": _flux,
    "srun": _slurm,
    "blaunch": _lsf,
    "PBS": _pbs,
    "SkyPilot": _skypilot,
    "Kubernetes": _kubernetes,
}
"""For each launcher, the function that reads its variables; the first that finds a place counts."""


def _check_here(launcher: str, rank: int, hosts: list[str]) -> None:
    """Refuses a rank that the list has on another host: the launcher doesn't number ranks in the order of its list."""
    own = socket.gethostname().partition(".")[0]
    names = [host.partition(".")[0] for host in hosts]
    # Nothing can be checked if the list has this host by another name, or by its address.
    if own in names and 0 <= rank < len(hosts) and names[rank] != own:
        raise UsageError(
            f"{launcher}'s task {rank} runs on {own}, but its list of hosts has {hosts[rank]} there: start one worker "
            "for each slot, in the order of the list, or give each worker a TF_CONFIG"
        )


def _hash(job: str) -> int:
    return zlib.crc32(job.encode())  # not `hash`, which differs between processes


def _numbers(environment: Mapping[str, str], prefix: str, names: Sequence[str]) -> list[int]:
    """The whole numbers in variables whose names have a common prefix; see `number`."""
    return [number(environment, prefix + name) for name in names]


def number(environment: Mapping[str, str], name: str) -> int:
    """The whole number in a variable.

    Raises:
        UsageError: the variable isn't set, or its value isn't a whole number.
    """
    text = _text(environment, name)
    if not re.fullmatch(r"\d{1,10}", text, re.ASCII):  # Slurm's numbers of jobs have 32 bits
        raise UsageError(f"{name}={text}: the launcher should have set a number")
    return int(text)


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise UsageError(f"this process was started as a worker of a job, but {name} isn't set: give each a TF_CONFIG")
    return environment[name]
