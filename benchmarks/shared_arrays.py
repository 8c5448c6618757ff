"""Measures how much memory workers have that read the same arrays: `python -m benchmarks.shared_arrays [MB]`.

A task trains on so many megabytes of arrays with 1, 2 and 3 workers of this machine, which share them; and once more on
arrays in an order that isn't shared. The memory of a worker is its proportional share: what n processes map is counted
as 1/n in each of them. So the sum is what the machine has to have. (Linux only.)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import keras
import numpy as np

import callbacks
from loop import ArrayData, TrainTask

WIDTH = 1024


class Large(TrainTask):
    """A dense layer on many numbers."""

    def build_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])

    def build_optimizer(self) -> keras.Optimizer:
        return keras.optimizers.SGD(1e-4)

    def train_data(self) -> ArrayData:
        megabytes, order = os.environ["ARRAYS"].split()
        examples = int(megabytes) * 2**20 // WIDTH // 4
        random = np.random.default_rng(0)
        inputs = np.empty((examples, WIDTH), "float32", "F" if order == "apart" else "C")
        for row in inputs:
            row[...] = random.random(WIDTH, "float32")
        return ArrayData(inputs, random.random((examples, 1), "float32"))

    def compute(self, model: keras.Model, batch: tuple, training: bool) -> dict[str, Any]:
        inputs, labels = batch
        return {"loss": keras.losses.mean_squared_error(labels, model(inputs, training=training))}

    def build_callbacks(self) -> list[callbacks.Callback]:
        return [Memory()]


class Memory(callbacks.Callback):
    """Prints how much memory each worker has at the end, in kB."""

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def on_fit_end(self, run: callbacks.Run, status: str) -> None:
        [line] = re.findall(r"^Pss: .*", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
        print(line, file=sys.stderr)


def measure(workers: int, megabytes: int, order: str) -> float:
    """The memory of all workers together, in MB."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "cli",
            "train",
            f"{__file__}:Large",
            "--workers",
            str(workers),
            "--steps",
            "50",
        ]
        done = subprocess.run(
            [*command, "--steps", "50", "--batch-size", "60", "--track", "off", "--run-dir", f"{directory}/run"],
            env={**os.environ, "ARRAYS": f"{megabytes} {order}"},
            capture_output=True,
            text=True,
            check=True,
        )
    found = re.findall(r"Pss: +(\d+) kB", done.stderr)
    assert len(found) == workers, done.stderr
    return sum(map(int, found)) / 1024


def main(megabytes: int) -> None:
    """Prints the table."""
    print(f"MB of all workers together, with {megabytes} MB of arrays\nworkers  shared  each its own")
    for workers in (1, 2, 3):
        kept = [measure(workers, megabytes, order) for order in ("shared", "apart")]
        print(f"{workers:>7}  {kept[0]:>6,.0f}  {kept[1]:>12,.0f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
