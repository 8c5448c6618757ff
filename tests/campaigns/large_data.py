"""Trains on a memory map that is larger than memory, on 1, 2 and 3 workers: `python -m tests.campaigns.large_data 20`.

Prints the greatest resident memory of a worker, the time from its start to its first step, beside that on small data,
and how far the weights are from those of one worker.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

_WIDTH = 1024
_TASK = """
import os, pathlib, time, dataclasses
import keras, numpy as np, psutil
import callbacks, loop

class Measured(callbacks.Callback):
    runs_on = "all"
    every = 50

    def on_steps_end(self, run, metrics):
        self.first = getattr(self, "first", None) or time.time() - psutil.Process().create_time()

    def on_fit_end(self, run, status):
        peak = pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        pathlib.Path(os.environ["MEASURED"] + f"-{run.backend.rank}").write_text(f"{int(peak) / 1024} {self.first}")

@dataclasses.dataclass
class Large(loop.TrainTask):
    path: str = ""
    width: int = 1024

    def build_model(self):
        return keras.Sequential([keras.Input([self.width]), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])

    def build_optimizer(self):
        return keras.optimizers.Adam(1e-3)

    def train_data(self):
        rows = np.memmap(self.path, "float32", "r").reshape(-1, self.width)
        return loop.IndexedData((rows, np.arange(len(rows)) % 10))

    def build_callbacks(self):
        return [Measured()]

    def compute(self, model, batch, training):
        rows, labels = batch
        logits = model(rows, training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)}
"""


def write(path: Path, size: int) -> None:
    """Writes `size` bytes of numbers that differ from row to row."""
    block = np.random.default_rng(0).normal(size=(1 << 16, _WIDTH)).astype("float32")
    with path.open("wb") as file:
        for number in range(max(1, size // block.nbytes)):
            block[:, 0] = number
            file.write(block.data)


def train(directory: Path, data: Path, workers: int, steps: int) -> tuple[list[list[float]], list[np.ndarray]]:
    """Trains in new processes; the memory (MiB) and the first step (s) of each worker, and the weights."""
    run = directory / f"{data.name}-{workers}"
    measured = directory / f"measured-{data.name}-{workers}"
    several = ["--workers", str(workers), "--backend", "horovod"] if workers > 1 else ["--backend", "single"]
    command = [
        sys.executable, "-m", "cli", "train", str(directory / "large.py") + ":Large", "--set", f"path={data}",
        "--steps", str(steps), "--batch-size", "96", "--run-dir", str(run), "--track", "off", "--json", *several,
    ]  # fmt: skip
    import os

    done = subprocess.run(
        command, env={**os.environ, "MEASURED": str(measured), "TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "finished"
    exported = directory / f"{data.name}-{workers}.npz"
    subprocess.run([sys.executable, "-m", "cli", "export", str(run), str(exported)], check=True, capture_output=True)
    numbers = [
        [float(number) for number in file.read_text().split()] for file in sorted(directory.glob(measured.name + "-*"))
    ]
    with np.load(exported) as weights:
        return numbers, [weights[name] for name in weights.files]


def main() -> None:
    """Runs the campaign."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gigabytes", type=float, nargs="?", default=20)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "large.py").write_text(_TASK)
        small = directory / "small"
        large = directory / "large"
        write(small, 1)
        write(large, int(given.gigabytes * 1e9))
        print(f"{large.stat().st_size / 1e9:.1f} GB", flush=True)
        expected = None
        for workers in (1, 2, 3):
            [_, first_small], *_ = train(directory, small, workers, given.steps)[0]
            measured, weights = train(directory, large, workers, given.steps)
            expected = expected or weights
            apart = max(float(np.abs(ours - one).max()) for ours, one in zip(weights, expected, strict=True))
            memory = max(numbers[0] for numbers in measured)
            first = measured[0][1]
            print(
                f"{workers} workers: at most {memory:.0f} MiB, first step after {first:.1f} s (small data: "
                f"{first_small:.1f} s), weights {apart:.1e} from those of one worker", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
