"""Measures what `shard_optimizer` saves, and what it costs: the net 8000-4000-2000-500-300-1 with Adam and `ema`.

Run it as `python -m benchmarks.sharding [WORKERS] [BATCH] [ROUNDS]`. For each setting, workers of their own (Horovod)
print their resident memory after some steps, and its peak. oneDNN is off there: its allocator keeps what is free, in
pieces whose number depends on chance. Then the settings train in turns in one job, and the time of their steps is
compared. The goals: slots and averages at 1/WORKERS + 10 % of the memory, a step in 1.10 of the time.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import callbacks

STEPS = 8
SETTINGS = {"plain": False, "sharded": True}
ROOT = Path(__file__).resolve().parent.parent
_MB = 1e6


def resident(field: str) -> float:
    """A field of this process's status, such as VmRSS (now) or VmHWM (peak), in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / _MB
    raise KeyError(field)


class Look(callbacks.Callback):
    """Notes the resident memory and the time after each step."""

    runs_on = "all"
    every = 1

    def __init__(self) -> None:
        self.times: list[float] = []
        self.memory: list[float] = []

    def on_steps_end(self, run: Any, metrics: Any) -> None:
        self.times.append(time.perf_counter())
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free, but not given back, isn't held
        self.memory.append(resident("VmRSS"))

    @property
    def seconds(self) -> float:
        """The median time of a step, without the first two, which are traced and allocate."""
        steps = [end - begin for begin, end in zip(self.times[1:], self.times[2:], strict=False)]
        return statistics.median(steps)


def work(mode: str, batch: int, rounds: int) -> None:
    """In a worker: trains with one setting, or with all of them in turns; the chief prints what it has measured."""
    from loop import backends, fit
    from loop.target import task_loader

    def trained(setting: str) -> tuple[Look, str]:
        look = Look()
        quiet = callbacks.standard(mlflow=None, progress=None, checkpoint=None, journal=None)
        options = {"steps": STEPS, "batch_size": batch, "ema": 0.999, "eval_every": "never", "steps_per_call": 1}
        options |= {"shard_optimizer": SETTINGS[setting]}
        chosen = callbacks.StandardSet([*quiet, look])
        return look, fit(task, backend=backend, callbacks=chosen, **options).weights_sha256

    backend = backends.create("horovod")
    task = task_loader.load(f"{task_loader.shipped_path('bigger')}:Dense", [f"examples={batch}"])
    if mode in SETTINGS:
        look, digest = trained(mode)
        found = {"rank": backend.rank, "resident_mb": round(look.memory[-1]), "peak_mb": round(resident("VmHWM"))}
        print(json.dumps({"setting": mode, **found, "weights": digest[:12]}), flush=True)
    else:
        seconds: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
        for _ in range(rounds):
            for setting, taken in seconds.items():
                taken.append(trained(setting)[0].seconds)
        if backend.is_chief:
            ratio = statistics.median(seconds["sharded"]) / statistics.median(seconds["plain"])
            print(json.dumps({"seconds": seconds, "sharded_to_plain": round(ratio, 3)}), flush=True)
    backend.exchange(0)  # no worker leaves before all are done
    backend.close()


def run(mode: str, workers: int, *numbers: int) -> None:
    """Runs a job, and prints what its workers print."""
    from loop.launch.horovodrun import rendezvous

    command = [sys.executable, "-m", "benchmarks.sharding", "--worker", mode, *map(str, numbers)]
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    if mode in SETTINGS:
        shared["TF_ENABLE_ONEDNN_OPTS"] = "0"
    with tempfile.TemporaryDirectory() as directory, rendezvous(workers) as places:
        jobs = [subprocess.Popen(command, cwd=directory, env={**shared, **place}) for place in places]
        codes = [job.wait() for job in jobs]
        if any(codes):
            sys.exit("a worker has failed")


def main(arguments: Sequence[str]) -> None:
    """Runs all of it."""
    if arguments[:1] == ["--worker"]:
        work(arguments[1], *map(int, arguments[2:]))
        return
    workers, batch, rounds = [*map(int, arguments), *(2, 256, 5)[len(arguments) :]]
    for setting in SETTINGS:
        run(setting, workers, batch, 1)
    run("times", workers, batch, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
