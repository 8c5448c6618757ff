"""Measures how long MLflowTracker holds training up: without a tracker, and with a server that works, hangs or dies.

Run it as `python -m benchmarks.tracker_pause [SECONDS [ROUNDS]]`. The scenarios train a small task, in turns. For every
two consecutive calls of `on_steps_end` it takes the time between them beyond the median; the table has the longest of
these. The machine's own noise is in the first row.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np

import callbacks
from loop import ArrayData, TrainTask, fit
from loop.launch.machine import free_ports

CALL = 20  # steps in a compiled call: short ones, so that a pause shows


class Small(TrainTask):
    """Two dense layers on random numbers: calls of some milliseconds."""

    def build_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])

    def build_optimizer(self) -> keras.Optimizer:
        return keras.optimizers.Adam(1e-3)

    def train_data(self) -> ArrayData:
        inputs = np.random.default_rng(0).normal(size=(2_000_000, 16)).astype("float32")
        return ArrayData(inputs, inputs.sum(-1, keepdims=True))

    def compute(self, model: keras.Model, batch: tuple, training: bool) -> dict:
        inputs, labels = batch
        return {"loss": keras.ops.sum((model(inputs, training=training) - labels) ** 2, -1)}


class Clock(callbacks.Callback):
    """Notes when `on_steps_end` is called, and ends the run after some time."""

    every = "call"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.times: list[float] = []

    def on_steps_end(self, run: callbacks.Run, metrics: callbacks.Metrics) -> None:
        self.times.append(time.perf_counter())
        if self.times[-1] - self.times[0] > self.seconds:
            run.stop("time")

    def excess(self) -> list[float]:
        """Milliseconds beyond the median, of each time between two calls; the first two calls are left out."""
        gaps = np.diff(self.times[2:]) * 1000
        return sorted(gaps - statistics.median(gaps))


class Server:
    """A real `mlflow server` on sqlite, which can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_ports(1)[0]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.start()
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health"):  # noqa: S310
                return
            time.sleep(0.2)

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.directory / 'mlflow.db'}", "--workers", "1"]
        lean = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(
            command, cwd=self.directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=lean,
        )  # fmt: skip

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def working(directory: Path, seconds: float) -> Iterator[str]:
    """A server that works."""
    server = Server(directory)
    yield server.uri
    server.kill()


@contextlib.contextmanager
def hanging(directory: Path, seconds: float) -> Iterator[str]:
    """A server that accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def dying(directory: Path, seconds: float) -> Iterator[str]:
    """A server that is killed after a third of the time, and started again after another third."""
    server = Server(directory)
    timers = [threading.Timer(seconds / 3, server.kill), threading.Timer(2 * seconds / 3, server.start)]
    for timer in timers:
        timer.start()
    yield server.uri
    for timer in timers:
        timer.join()
    server.kill()


SCENARIOS = {"no tracker": None, "works": working, "hangs": hanging, "dies, comes back": dying}


def measure(scenario: str, seconds: float) -> list[float]:
    """Trains once; returns the excess times in milliseconds, ascending."""
    clock = Clock(seconds)
    quiet = {"checkpoint": None, "sentinel": None, "progress": None}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        tracker, serve = None, SCENARIOS[scenario]
        if serve is not None:
            tracker = callbacks.MLflowTracker(
                stack.enter_context(serve(Path(name), seconds)), wait=0 if serve is hanging else 60
            )
        chosen = callbacks.standard(mlflow=tracker, **quiet) + [clock]
        fit(Small(), epochs=9, steps_per_call=CALL, backend="single", run_dir=Path(name) / "run", callbacks=chosen)
    return clock.excess()


def main() -> None:
    """Prints the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    measure("no tracker", 3.0)  # warms TensorFlow up
    print(f"time beyond the median between two calls of on_steps_end, in ms; {rounds} x {seconds:.0f} s each\n")
    print(f"{'tracking server':<20}{'round':>6}{'longest':>10}{'99.9 %':>10}{'99 %':>8}{'calls':>9}", flush=True)
    for turn in range(rounds):
        for scenario in SCENARIOS:
            excess = measure(scenario, seconds)
            shares = [excess[min(int(len(excess) * share), len(excess) - 1)] for share in (1, 0.999, 0.99)]
            print(
                f"{scenario:<20}{turn + 1:>6}{shares[0]:>10.1f}{shares[1]:>10.1f}{shares[2]:>8.1f}{len(excess):>9,}",
                flush=True,
            )


if __name__ == "__main__":
    main()
