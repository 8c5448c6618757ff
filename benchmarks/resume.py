"""Measures how long a run takes to go on from step 1,000,000 of its data, and from step 10.

Run it as `python -m benchmarks.resume [ROUNDS] [indexed]`; `indexed` reads by `IndexedData`. Two checkpoints differ in
their position alone; from each, in turns, the time of a `fit` that makes one step. The goal: a ratio of at most 1.2.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np

import callbacks
from loop import ArrayData, IndexedData, TrainTask, fit
from loop.checkpoint import checkpoint_files

EXAMPLES = 2_000_000
POSITIONS = (10, 1_000_000)


class Long(TrainTask):
    """An epoch of two million steps."""

    def build_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def build_optimizer(self) -> keras.Optimizer:
        return keras.optimizers.Adam(1e-3)

    def train_data(self) -> ArrayData | IndexedData:
        kind = IndexedData if "indexed" in sys.argv else ArrayData
        return kind(np.zeros((EXAMPLES, 4), "float32"))

    def compute(self, model: keras.Model, batch: np.ndarray, training: bool) -> dict:
        return {"loss": keras.ops.sum(model(batch, training=training) ** 2, -1)}


def train(directory: Path, steps: int) -> float:
    """Trains up to a step; the seconds that it took."""
    keras.backend.clear_session()
    chosen = callbacks.standard(mlflow=None, progress=None)
    begun = time.perf_counter()
    fit(Long(), steps=steps, batch_size=1, run_dir=directory, callbacks=chosen, backend="single")
    return time.perf_counter() - begun


def main(rounds: int) -> None:
    """Prints the medians and their ratio."""
    with tempfile.TemporaryDirectory() as temporary:
        first = Path(temporary) / "first"
        train(first, POSITIONS[0])
        path = first / "checkpoints" / f"step-{POSITIONS[0]:08d}"
        manifest = checkpoint_files.verify(path)
        tensors = checkpoint_files.read(path, manifest)
        state = {name: each for name, each in manifest.items() if name not in ("format", "step", "files", "tensors")}
        seconds: dict[int, list[float]] = {position: [] for position in POSITIONS}
        for number in range(rounds):
            for position in POSITIONS:
                directory = Path(temporary) / f"{number}-{position}"
                (directory / "checkpoints").mkdir(parents=True)
                progress = {"step": position, "epoch": 0, "step_in_epoch": position, "examples": position}
                checkpoint_files.write(directory / "checkpoints", position, tensors, state | {"progress": progress})
                seconds[position].append(train(directory, position + 1))
                shutil.rmtree(directory)
        near, far = (statistics.median(seconds[position]) for position in POSITIONS)
        print(f"to go on and make one step, {rounds} rounds: from step {POSITIONS[0]:,} {near:.2f} s")
        print(f"from step {POSITIONS[1]:,} {far:.2f} s; ratio {far / near:.2f} (goal: at most 1.2)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 5)
