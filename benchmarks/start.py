"""Measures where the seconds go before the first step: `python -m benchmarks.start [ROUNDS] [TRIALS]`.

Processes start in turns, each from nothing but a warm disk: one that imports TensorFlow, one with a loop by hand over
scikit-learn's digits, and `tfloop train digits`, without MLflow and with it. The time is from the start of the process
to the end of its first compiled call. Then a sweep of `digits` is made: what a trial costs beyond its training.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callbacks import Callback

ROOT = Path(__file__).resolve().parent.parent
MARK = "TFLOOP_BENCHMARK_MARK"

IMPORT = """
import tensorflow
mark()
"""

BY_HAND = """
import tensorflow as tf
import keras
from sklearn.datasets import load_digits

digits = load_digits()
images, labels = (digits.data / 16.0).astype("float32"), digits.target
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(5e-3)
optimizer.build(model.trainable_variables)

@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
    optimizer.apply(tape.gradient(loss, model.trainable_variables))
    return loss

float(step(tf.constant(images[:32]), tf.constant(labels[:32])))
mark()
"""

MARKED = f"""
import os, pathlib, time
def mark():
    pathlib.Path(os.environ["{MARK}"]).write_text(str(time.time()))
"""


class FirstCall(Callback):
    """Notes when the first call of compiled steps has ended."""

    every = 1

    def on_steps_end(self, run: Any, metrics: Mapping[str, Any]) -> None:
        path = Path(os.environ[MARK])
        if not path.exists():
            path.write_text(str(time.time()))


def commands() -> dict[str, list[str]]:
    """What is measured."""
    train = [sys.executable, "-P", "-m", "cli", "train", "digits", f"--callback=@{__spec__.name}:FirstCall"]
    return {
        "import tensorflow": [sys.executable, "-c", MARKED + IMPORT],
        "a loop by hand": [sys.executable, "-c", MARKED + BY_HAND],
        "tfloop train digits --track off": [*train, "--track", "off"],
        "tfloop train digits": train,
    }


def seconds_to_mark(command: list[str], directory: Path) -> float:
    """From the start of a process to its mark."""
    mark = directory / "mark"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", MARK: str(mark)}
    begun = time.time()
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    return float(mark.read_text()) - begun


def measure_first_steps(rounds: int) -> None:
    """Prints the medians."""
    taken: dict[str, list[float]] = {name: [] for name in commands()}
    for number in range(-1, rounds):  # the first round warms the disk
        for name, command in commands().items():
            with tempfile.TemporaryDirectory() as directory:
                seconds = seconds_to_mark(command, Path(directory))
            if number >= 0:
                taken[name].append(seconds)
    by_hand = statistics.median(taken["a loop by hand"])
    print(f"{'seconds to the first step':<34} median  least  most  of the loop by hand")
    for name, seconds_ in taken.items():
        median = statistics.median(seconds_)
        print(f"{name:<34} {median:6.2f} {min(seconds_):6.2f} {max(seconds_):5.2f} {median / by_hand:6.2f}", flush=True)


def measure_trials(trials: int) -> None:
    """Prints what a trial of a sweep costs."""
    rates = ",".join(f"{0.001 + 0.0001 * number:.4f}" for number in range(trials))
    options = ["--grid", f"learning_rate={rates}", "--track", "off", "--sweep-dir", "sweep", "--json"]
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-P", "-m", "cli", "sweep", "digits", *options]
        subprocess.run(command, cwd=name, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        ends, trainings = [], []
        for trial in sorted(Path(name, "sweep").glob("trial-*")):
            lines = [json.loads(line) for line in (trial / "journal.jsonl").read_text().splitlines()]
            times = {line["event"]: line["time"] for line in lines}
            ends.append((trial / "report.html").stat().st_mtime)
            trainings.append(times["fit_end"] - times["fit_start"])
    between = [end - before for before, end in itertools.pairwise(ends)]
    beyond = [whole - training for whole, training in zip(between, trainings[1:], strict=True)]
    print(
        f"a trial of a sweep, the first excepted: {statistics.median(between):.2f} s, of which training takes "
        f"{statistics.median(trainings[1:]):.2f} s: {statistics.median(beyond):.2f} s beyond it "
        f"({min(beyond):.2f} to {max(beyond):.2f}); {60 / statistics.median(between):.0f} trials a minute"
    )


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    measure_first_steps(numbers[0] if numbers else 5)
    measure_trials(numbers[1] if len(numbers) > 1 else 8)
