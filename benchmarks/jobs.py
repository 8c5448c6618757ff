"""Runs a benchmark in several processes that join one Horovod job after the other, so that settings take turns.

Loading TensorFlow takes most of the time of a process. So each is started once, and leaves one job for the next.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Job = tuple[str, int, Mapping[str, str]]
"""A name, how many processes, and the environment variables of each."""


def run(module: str, jobs: Sequence[Job]) -> Any:
    """Starts `python -m MODULE --worker PLAN RANK` in as many processes as the largest job has.

    Returns:
        What the worker of rank 0 wrote to the file that `joined` told it.
    """
    from loop.launch.horovodrun import rendezvous

    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        plan, out = Path(directory) / "plan.json", Path(directory) / "out.json"
        places = [
            {"name": name, "variables": dict(variables), "places": stack.enter_context(rendezvous(size))}
            for name, size, variables in jobs
        ]
        plan.write_text(json.dumps({"jobs": places, "out": str(out)}))
        command = [sys.executable, "-m", module, "--worker", str(plan)]
        environment = {**os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS": "600", "TF_CPP_MIN_LOG_LEVEL": "3"}
        size = max(size for _, size, _ in jobs)
        finish([subprocess.Popen([*command, str(rank)], env=environment) for rank in range(size)])
        return json.loads(out.read_text())


def tf_places(workers: int) -> list[dict[str, str]]:
    """The environment variables of each worker of a job of `multiworker` on this machine."""
    from loop.launch.machine import free_ports

    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(workers)]}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})}
        for rank in range(workers)
    ]


def finish(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits for all; when one fails, ends the others."""
    try:
        for process in processes:
            if process.wait():
                raise SystemExit(f"a worker ended with {process.returncode}")
    finally:
        for process in processes:
            process.kill()


def joined(plan: str, rank: int) -> Iterator[str]:
    """In a worker: joins each job that it has a place in, and gives its name."""
    import horovod.tensorflow as hvd

    before = dict(os.environ)
    for job in json.loads(Path(plan).read_text())["jobs"]:
        if rank < len(job["places"]):
            for name in [name for name in os.environ if name not in before]:
                del os.environ[name]
            os.environ.update({**before, **job["places"][rank], **job["variables"]})
            hvd.init()
            yield job["name"]
            hvd.shutdown()


def leave(plan: str, result: Any) -> None:
    """In the worker of rank 0: leaves the result for the launcher."""
    Path(json.loads(Path(plan).read_text())["out"]).write_text(json.dumps(result))


def machine() -> dict[str, Any]:
    """When and on what something was measured."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    load = round(os.getloadavg()[0], 1)
    return {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "cpu": cpu, "load": load}
