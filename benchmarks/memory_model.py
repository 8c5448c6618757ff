"""Compares what `tfloop memory` says with the peaks of trainings: `python -m benchmarks.memory_model [TASK ...]`.

The tasks of `examples/bigger.py`, plain, with `remat="full"`, with a sharded optimizer, and with both; on 1, 2 and 3
workers that share the global batch. Each training is `tfloop train` with a checkpoint at its end, each peak the
greatest resident memory of any of its workers. The goal: within 15 %.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import callbacks
from callbacks.throughput_probe import peak_memory
from loop.target import task_loader

STEPS = 6
WORKERS = (1, 2, 3)
TASKS = ("Transformer", "Dense")
ROOT = Path(__file__).resolve().parent.parent


class PeakAtExit(callbacks.Callback):
    """Writes the peak of each worker into a directory when its process ends, after all else."""

    runs_on = "all"

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_fit_start(self, run: Any) -> None:
        path = self.directory / f"peak-{run.backend.rank}"
        atexit.register(lambda: path.write_text(str(peak_memory()[0])))


def said(target: str, workers: int) -> dict[str, dict[str, Any]]:
    """The rows of `tfloop memory` that don't accumulate, by the name of the setting."""
    command = ["memory", target, "--workers", str(workers), "--json"]
    rows = json.loads(_tfloop(command, Path.cwd()).stdout)["rows"]
    return {row["name"]: row for row in rows if "accumulate" not in row["name"]}


def measured(target: str, workers: int, options: list[str]) -> int:
    """The greatest peak of a worker, in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        own = ["--steps", str(STEPS), "--track", "off", "--run-dir", f"{directory}/run"]
        own += ["--workers", str(workers), f"--callback=@benchmarks.memory_model:PeakAtExit={directory}"]
        _tfloop(["train", target, *options, *own], Path(directory))
        peaks = [int(path.read_text()) for path in Path(directory).glob("peak-*")]
    if len(peaks) != workers:
        sys.exit(f"{len(peaks)} of {workers} workers told their peak")
    return max(peaks)


def _tfloop(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.PIPE, text=True)


def compared(target: str) -> Iterator[Mapping[str, Any]]:
    """For each setting and number of workers: what was said, what was measured, and the ratio."""
    for workers in WORKERS:
        for name, row in said(target, workers).items():
            peak = measured(target, workers, row["options"])
            ratio = round(row["total"] / peak, 3)
            yield {"workers": workers, "setting": name, "said": row["total"], "measured": peak, "ratio": ratio}


def main(tasks: list[str]) -> None:
    """Prints a line for each."""
    for task in tasks or TASKS:
        print(f"{task}: peak in MB as it was said, as it was measured, and said by measured", flush=True)
        for found in compared(f"{task_loader.shipped_path('bigger')}:{task}"):
            said_mb, measured_mb = found["said"] / 1e6, found["measured"] / 1e6
            line = f"  {found['workers']} workers  {found['setting']:16} {said_mb:8,.0f} {measured_mb:8,.0f}"
            print(f"{line} {found['ratio']:6.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
