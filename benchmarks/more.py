"""What else is measured of ours: callbacks, metrics, the time to the first step, a long run."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure, operations, report

CALLBACKS = (
    "ours", "ours, MLflow off", "ours, callbacks off", "ours, 1 callback each 50 steps",
    "ours, 10 callbacks each 50 steps", "ours, 1 callback each step", "ours, 10 callbacks each step",
)  # fmt: skip
METRICS = (
    "ours", "ours, 10 metrics", "ours, 100 metrics", "by hand, in graph", "by hand, in graph, 10 metrics",
    "by hand, in graph, 100 metrics",
)  # fmt: skip
STARTS = ("ours", "ours, callbacks off", "by hand, a call a step", "by hand, in graph")
LONG, WINDOW = 1_000_000, 50_000  # steps


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One of them: how it is made, and what is said of it."""

    about: str
    make: Any


def against(*names: str) -> Any:
    """A measurement of speed, on the mlp."""

    def make(rounds: int, seconds: float, starts: int) -> dict[str, Any]:
        return {"starts": starts, "contenders": measure.measure("mlp", names, rounds, seconds, starts)}

    return make


def first_step(rounds: int, seconds: float, starts: int) -> dict[str, Any]:
    """The time to the end of the first step, in a process of its own for each."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    for number in range(rounds):
        for name in STARTS[number % len(STARTS) :] + STARTS[: number % len(STARTS)]:
            begun = time.perf_counter()
            with measure.working([name], "mlp") as workers:
                imported = time.perf_counter()
                workers[name].ask(steps=1)
                done = time.perf_counter()
            times[name].append((done - begun, done - imported))
            measure.say(f"first step: {name}: {done - begun:.1f} s, without imports {done - imported:.1f} s")
    rows = []
    for name, found in times.items():
        whole, own = (report.spread(each) for each in zip(*found, strict=True))
        shown = [f"{median:.2f} ({low:.2f} to {high:.2f})" for median, low, high in (whole, own)]
        rows.append({"": name, "from the process's start, s": shown[0], "imports left out, s": shown[1]})
    ratios = [ours[0] / hand[0] for ours, hand in zip(times["ours"], times["by hand, in graph"], strict=True)]
    return {"rows": rows, "figures": {"time to the first step, by that of the loop by hand": report.spread(ratios)}}


def long_run(rounds: int, seconds: float, starts: int) -> dict[str, Any]:
    """A million steps of a tiny model: the time of a step and the memory, near the start and at the end."""
    import keras
    import numpy as np

    import callbacks
    from loop import ArrayData, TrainTask, fit

    class Tiny(TrainTask):
        def build_model(self) -> Any:
            return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

        def build_optimizer(self) -> Any:
            return keras.optimizers.SGD(1e-3)

        def train_data(self) -> ArrayData:
            return ArrayData(np.ones((4 * LONG // 10, 4), "float32"))

        def compute(self, model: Any, batch: Any, training: bool) -> dict[str, Any]:
            return {"loss": keras.ops.sum(model(batch, training=training) ** 2, -1)}

    class Clock(callbacks.Callback):
        """Notes step, time and memory at the end of each call."""

        every = "call"
        found: list[tuple[int, float, float]] = []

        def on_steps_end(self, run: callbacks.Run, metrics: callbacks.Metrics) -> None:
            step = run.progress.step
            self.found.append((step, time.perf_counter(), resident()))

    clock = Clock()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        tracker = callbacks.MLflowTracker(f"sqlite:///{directory}/mlflow.db")
        fit(Tiny(), steps=LONG, batch_size=4, callbacks=[clock, tracker], run_dir=Path(directory) / "run")
    rows, times, held = [], [], []
    for at in (1_000, LONG - WINDOW):
        window = [each for each in clock.found if at <= each[0] <= at + WINDOW]
        (first, begun, _), (last, ended, memory) = window[0], window[-1]
        microseconds = (ended - begun) / (last - first) * 1e6
        times.append(microseconds)
        held.append(memory)
        rows.append(
            {"steps": f"{first:,} to {last:,}", "µs a step": f"{microseconds:.1f}", "memory, MB": f"{memory:,.0f}"}
        )
    return {
        "rows": rows,
        "figures": {
            "time of a step near step 1,000,000, by that near step 1,000": report.spread([times[1] / times[0]]),
            "growth of resident memory meanwhile, MB": report.spread([held[1] - held[0]]),
        },
    }


def resident() -> float:
    """The memory that this process holds at the moment, in MB (Linux)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


MORE = {
    "callbacks": Measurement(
        "The mlp with other sets of callbacks; each added callback reads the metrics.", against(*CALLBACKS)
    ),
    "metrics": Measurement("The mlp with 1, 10 and 100 values in `compute` besides the loss.", against(*METRICS)),
    "first-step": Measurement("The mlp: the time to the end of the first step.", first_step),
    "long-run": Measurement("A million steps of one dense layer of 4 weights, batch 4, standard callbacks.", long_run),
    "operations": Measurement(
        "Where a step's time goes, under TensorFlow's profiler, in one thread: ours without callbacks, and others. "
        "What differs by less than 1 % of a step is under the other operations. TensorFlow notes only operations that "
        "it takes for expensive; what is between them are the others, and the way from one to the next. The profiler "
        "takes memory of its own between two operations, so that those that fill new memory are slower than without "
        "it. The first row is without the profiler.",
        operations.measure_operations,
    ),
}
