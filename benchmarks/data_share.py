"""Measures how much of a step reading takes while the model trains: `python -m benchmarks.data_share [ROUNDS]`.

A small and a larger convolutional network train on the same 32 x 32 images: in memory (`ArrayData`), from a memory map
(`IndexedData`), and from it by a `tf.function`. In turns; the median time of a step, and the median of its ratios to
that of `ArrayData` in the same round; and the same of the CPU time of a step, which other processes disturb less.

These times include the cores that reading takes from training. How long a step waits for its batch is another number.
It comes from the profile of `fit`: each round trains once more on each kind of data, with `profile`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import callbacks
from loop import ArrayData, IndexedData, TrainTask, fit

BATCH = 64
EPOCHS = 7
NEVER = "1000000:1000001"
"""Steps of which TensorFlow's profiler makes a trace: there are none, so that it disturbs nothing."""


class Convolutional(TrainTask):
    """Two convolutions and a dense layer."""

    def __init__(self, data: Any, strides: int) -> None:
        self.data = data
        self.strides = strides

    def build_model(self) -> keras.Model:
        layers = [keras.layers.Conv2D(width, 3, self.strides, activation="relu") for width in (32, 64)]
        return keras.Sequential([keras.Input((32, 32, 3)), *layers, keras.layers.Flatten(), keras.layers.Dense(10)])

    def build_optimizer(self) -> keras.Optimizer:
        return keras.optimizers.SGD(0.01)

    def train_data(self) -> Any:
        return self.data

    def compute(self, model: keras.Model, batch: tuple, training: bool) -> dict:
        images, labels = batch
        logits = model(images, training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)}


class Clock(callbacks.Callback):
    """Notes when each epoch ends, in seconds and in seconds of the CPU."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_epoch_end(self, run: Any, metrics: Any) -> None:
        self.times.append((time.perf_counter(), time.process_time()))


class Waiting(callbacks.Callback):
    """Notes which share of compiled calls waits for data."""

    def __init__(self) -> None:
        self.share = 0.0

    def on_profile(self, run: Any, kind: str, entry: Any) -> None:
        if kind == "summary":
            seconds = entry["seconds"][0]
            self.share = seconds["data"] / (seconds["data"] + seconds["compute"])


def train(data: Any, strides: int, run_dir: Path, callback: callbacks.Callback, profile: str | None = None) -> None:
    """Trains on the data."""
    fit(
        Convolutional(data, strides),
        epochs=EPOCHS,
        batch_size=BATCH,
        backend="single",
        callbacks=[callback],
        run_dir=run_dir,
        profile=profile,
    )


def step_time(data: Any, strides: int, steps: int, run_dir: Path) -> np.ndarray:
    """The median time of a step, and that of the CPU, in milliseconds, without the first epoch: float64 [2]."""
    clock = Clock()
    train(data, strides, run_dir, clock)
    taken: np.ndarray = np.median(np.diff(clock.times, axis=0)[1:], axis=0)
    return taken / steps * 1000


def waiting(data: Any, strides: int, run_dir: Path) -> float:
    """The share of the time of compiled calls, but for the first, in which a step waits for its batch."""
    noted = Waiting()
    train(data, strides, run_dir, noted, profile=NEVER)
    return noted.share


def measure(rounds: int, directory: Path) -> None:
    """Prints the medians."""
    random = np.random.default_rng(0)
    for strides, steps in ((2, 64), (1, 16)):
        images = random.normal(size=(steps * BATCH, 32, 32, 3)).astype("float32")
        labels = random.integers(0, 10, steps * BATCH)
        path = directory / f"images-{strides}.npy"
        np.save(path, images)
        datas: dict[str, Any] = {
            "ArrayData": ArrayData(images, labels),
            "IndexedData": IndexedData((path, labels)),
            "IndexedData, tf.function": IndexedData((path, labels), map=tf.function(lambda example: example)),
        }
        times: dict[str, list[np.ndarray]] = {kind: [] for kind in datas}
        waits: dict[str, list[float]] = {kind: [] for kind in datas}
        for number in range(rounds):
            for kind, data in datas.items():
                run_dir = directory / f"{strides} {kind} {number}"
                times[kind].append(step_time(data, strides, steps, run_dir / "timed"))
                waits[kind].append(waiting(data, strides, run_dir / "profiled"))
        for kind, found in times.items():
            taken, of_cpu = np.median(found, axis=0)
            ratio, ratio_of_cpu = np.median(np.divide(found, times["ArrayData"]), axis=0)
            said = f"{taken:>6.2f} ms a step  {ratio:.3f}  {of_cpu:>6.2f} ms of the CPU  {ratio_of_cpu:.3f}"
            print(f"{kind:<25} {said}  {np.median(waits[kind]):.1%} of it waiting", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5, Path(name))
