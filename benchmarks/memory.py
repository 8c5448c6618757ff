"""Measures the memory and the time of settings that save memory: `python -m benchmarks.memory [ROUNDS]`.

The tasks of `examples/bigger.py`. Each measurement is a process of its own, which makes a few steps; those of a round
come one after the other. The peak is the greatest resident memory of the process; activations are how much of it goes
with the size of the batch: the peak less that with a batch of one example.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

STEPS = 4

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "Transformer": {
        "plain": {},
        "remat='full'": {"remat": "full"},
        "remat='block_*'": {"remat": "block_*"},
        "accumulate=4": {"accumulate": 4},
        "remat='full', accumulate=4": {"remat": "full", "accumulate": 4},
    },
    "Dense": {
        "plain": {},
        "remat='full'": {"remat": "full"},
        "accumulate=4": {"accumulate": 4},
    },
}


def measure_one(task_name: str, options: dict[str, Any], assignments: Sequence[str] = ()) -> dict[str, float]:
    """The peak of this process in MB, and the median time of a step in seconds."""
    import callbacks
    from callbacks.throughput_probe import peak_memory
    from loop import fit
    from loop.target import task_loader

    class Clock(callbacks.Callback):
        """Notes when each step ends."""

        every = 1

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_steps_end(self, run: Any, metrics: Any) -> None:
            self.times.append(time.perf_counter())

    task = task_loader.load(f"{task_loader.shipped_path('bigger')}:{task_name}", assignments)
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        fit(task, steps=STEPS, steps_per_call=1, eval_every="never", callbacks=[clock], run_dir=directory, **options)
    waits = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {"peak": peak_memory()[0] / 1e6, "step": statistics.median(waits)}


def in_a_process(task_name: str, options: dict[str, Any]) -> dict[str, float]:
    """`measure_one` in a new process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--one", task_name, json.dumps(options)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def measure(rounds: int) -> None:
    """Prints the medians."""
    for task_name, settings in SETTINGS.items():
        found: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
        for _ in range(rounds):
            for name, options in settings.items():
                found[name].append(in_a_process(task_name, options))
        print(f"{task_name}: peak in MB, activations in MB and of plain, time of a step in s and of plain", flush=True)
        plain: dict[str, float] = {}
        for name, options in settings.items():
            smallest = {key: value for key, value in options.items() if key != "accumulate"} | {"batch_size": 1}
            floor = in_a_process(task_name, smallest)["peak"]
            peak = statistics.median(one["peak"] for one in found[name])
            step = statistics.median(one["step"] for one in found[name])
            ratio = statistics.median(a["step"] / b["step"] for a, b in zip(found[name], found["plain"], strict=True))
            plain = plain or {"activations": peak - floor}
            share = (peak - floor) / plain["activations"]
            print(f"  {name:28} {peak:8,.0f} {peak - floor:8,.0f} {share:5.2f} {step:8.2f} {ratio:5.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure_one(sys.argv[2], json.loads(sys.argv[3]))))
    else:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
