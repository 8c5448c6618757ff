"""What launchers set for each worker of a job, and jobs that are started so, by hand, on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("train", "digits", "--steps", "5", "--seed", "1", "--track", "off", "--run-dir", "run", "--json")
FLUX = '#!/bin/sh\n[ "$*" = "job taskmap --to=hosts ƒ2xQ" ] && cat "$(dirname "$0")/map"\n'
"""What answers instead of Flux, which no package registry has: its own tests show this form of answer."""


def environments(launcher, nodes, directory):
    """The variables of each worker, by rank, of a job with so many workers on each node."""
    hosts = [node for node, count in nodes.items() for _ in range(count)]
    locals_ = [local for count in nodes.values() for local in range(count)]
    slots = " ".join(f"{node} {count}" for node, count in nodes.items())
    (directory / "nodes").write_text("".join(f"{host}\n" for host in hosts))
    ranks = {node: [rank for rank, host in enumerate(hosts) if host == node] for node in nodes}
    (directory / "map").write_text("".join(f"{node}: {each[0]}-{each[-1]}\n" for node, each in ranks.items()))
    (directory / "flux").write_text(FLUX)
    (directory / "flux").chmod(0o755)
    for rank, (host, local) in enumerate(zip(hosts, locals_)):
        numbers = {"RANK": rank, "SIZE": len(hosts), "LOCAL_RANK": local, "LOCAL_SIZE": nodes[host]}
        yield {
            "Slurm": {
                **{f"SLURM_{name}": str(value) for name, value in (("PROCID", rank), ("LOCALID", local))},
                "SLURM_NODEID": str(list(nodes).index(host)), "SLURM_STEP_NUM_TASKS": str(len(hosts)),
                "SLURM_STEP_NODELIST": ",".join(nodes), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
                "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, nodes.values())),
            },
            "jsrun": {
                **{f"JSM_NAMESPACE_{name}": str(value) for name, value in numbers.items()},
                **{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()},
                "LSB_JOBID": "7", "LSB_MCPU_HOSTS": f"launch 1 {slots}",
            },
            "Flux": {
                "FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(local), "FLUX_JOB_SIZE": str(len(hosts)),
                "FLUX_JOB_NNODES": str(len(nodes)), "FLUX_JOB_ID": "ƒ2xQ",
            },
            "blaunch": {
                "LSF_PM_TASKID": str(rank + 1), "LSB_JOBID": "7", "LSB_MCPU_HOSTS": slots, "LSB_HOSTS": " ".join(hosts),
            },
            "mpiexec": {
                "PMI_RANK": str(rank), "PMI_SIZE": str(len(hosts)), "PBS_JOBID": "7.head",
                "PBS_NODEFILE": str(directory / "nodes"), "PBS_TASKNUM": "1",
            },
            "pbsdsh": {
                "PBS_VNODENUM": str(rank), "PBS_TASKNUM": str(rank + 2), "PBS_JOBID": "7.head",
                "PBS_NODEFILE": str(directory / "nodes"),
            },
            "OpenPBS": {
                "PBS_NODENUM": str(rank), "PBS_TASKNUM": str(rank + 2), "PBS_JOBID": "7.head",
                "PBS_NODEFILE": str(directory / "nodes"),
            },
            "SkyPilot": {
                "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NODE_IPS": "\n".join(hosts),
                "SKYPILOT_NUM_NODES": str(len(nodes)), "SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_TASK_ID": "sky-7",
            },
            "Kubernetes": {
                "JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": host, "TFLOOP_SERVICE": "digits",
                "TFLOOP_PODS": str(len(hosts)),
            },
        }[launcher]  # fmt: skip


SHARED = ("jsrun", "Flux", "blaunch", "mpiexec", "pbsdsh")
"""The launchers that may start several workers on a host."""
LAUNCHERS = (*SHARED, "OpenPBS", "SkyPilot", "Kubernetes")


def start(launcher, directory, *arguments, workers=2):
    """Starts workers on this machine, as the launcher would; gives their processes, by rank."""
    processes = []
    for environment in environments(launcher, {"localhost": workers}, directory):
        variables = {**os.environ, **environment, "PATH": f"{directory}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "cli", *arguments], cwd=directory, env=variables,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    return processes


def train(launcher, directory, backend, workers=2, arguments=STEPS):
    """Trains with such workers; gives the chief's result, and what the others print."""
    processes = start(launcher, directory, *arguments, "--backend", backend, workers=workers)
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:  # has no effect on those that have ended
            process.kill()
    assert [process.returncode for process in processes] == [0] * workers, outputs
    return json.loads(outputs[0][0]), [stdout for stdout, _ in outputs[1:]]
