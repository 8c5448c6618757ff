"""What a `fit` of one epoch costs in a warm process, as in a notebook; and whether memory grows from fit to fit.

`python -m benchmarks.fit_overhead` trains a small task again and again, without MLflow and with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time

import keras
import numpy as np
import psutil

import callbacks
from benchmarks import report
from loop import ArrayData, TrainTask, fit

WARM = 5
"""So many fits come first and aren't counted, unless told otherwise: what they load and cache stays."""


@dataclasses.dataclass
class Small(TrainTask):
    """A task whose training takes next to no time, so that all else shows."""

    def build_model(self) -> keras.Model:
        layers = [keras.Input((20,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        return keras.Sequential(layers)

    def build_optimizer(self) -> keras.Optimizer:
        return keras.optimizers.Adam(1e-3)

    def train_data(self) -> ArrayData:
        random = np.random.default_rng(0)
        return ArrayData(random.normal(size=(640, 20)).astype("float32"), random.integers(0, 10, 640))

    def eval_data(self) -> ArrayData:
        return self.train_data()

    def compute(self, model, batch, training):  # type: ignore[no-untyped-def]
        inputs, labels = batch
        logits = model(inputs, training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)}


@dataclasses.dataclass(frozen=True)
class Fits:
    """What was measured.

    Attributes:
        seconds: of each fit.
        cpu_seconds: of each fit, of all threads of the process: a busy machine doesn't lengthen them.
        bytes: the memory of the process after each.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    bytes: list[int]

    @property
    def bytes_per_fit(self) -> float:
        """The slope of a line through the memory after each fit: one fit that is larger doesn't count for much."""
        return float(np.polyfit(range(len(self.bytes)), self.bytes, 1)[0])


def measure(fits: int, tracked: bool, warm: int = WARM) -> Fits:
    """Trains for one epoch, again and again.

    Args:
        fits: how often.
        tracked: whether MLflow gets the runs.
        warm: so many fits come first and aren't counted.
    """
    process = psutil.Process()
    seconds = []
    cpu_seconds = []
    memory = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(warm + fits):
            tracker = {} if tracked else {"mlflow": None}
            chosen = callbacks.standard(progress=None, **tracker)
            begun = time.perf_counter()
            cpu_begun = time.process_time()
            fit(Small(), epochs=1, batch_size=64, callbacks=chosen, run_dir=f"{directory}/{number}")
            seconds.append(time.perf_counter() - begun)
            cpu_seconds.append(time.process_time() - cpu_begun)
            gc.collect()
            memory.append(process.memory_info().rss)
    return Fits(seconds[warm:], cpu_seconds[warm:], memory[warm:])


def row(name: str, found: Fits) -> dict[str, str]:
    """A row of the table: what one kind of fit costs."""
    low, *_, high = sorted(found.seconds)
    return {
        "": name,
        "wall time of a fit, s": f"{statistics.median(found.seconds):.2f} ({low:.2f} to {high:.2f})",
        "CPU time of a fit, s": f"{statistics.median(found.cpu_seconds):.2f}",
        "memory after the first": f"{found.bytes[0] / 1e6:.0f} MB",
        "after the last": f"{found.bytes[-1] / 1e6:.0f} MB after {len(found.bytes)}",
        "more with each": f"{found.bytes_per_fit / 1e3:.0f} kB",
    }


def main() -> None:
    """Measures, prints, and writes the table into docs/performance if told to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=50, help="How many fits without MLflow.")
    parser.add_argument("--tracked", type=int, default=50, help="How many fits with MLflow.")
    parser.add_argument("--write", action="store_true", help="Write the table into docs/performance.")
    given = parser.parse_args()
    rows = []
    for name, fits in (("without MLflow", given.fits), ("with MLflow", given.tracked)):
        rows.append(row(name, measure(fits, name == "with MLflow")))
        print(rows[-1], flush=True)
    if given.write:
        about = (
            "The cost of a `fit` of one epoch in a warm process, as in a notebook: an MLP on 640 examples; everything "
            f"except its 10 steps is overhead. The first {WARM} fits aren't counted, because the first one with MLflow "
            "waits for its import. Median (least to greatest); CPU time is that of all threads of the process. Goals: "
            "0.5 s, and 1 s with MLflow. "
            f"`python -m benchmarks.fit_overhead --fits {given.fits} --tracked {given.tracked} --write`."
        )
        found = {"about": about, "rows": rows}
        report.write(report.merged(report.load(), "more", "fit-overhead", found))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main())
