"""ThroughputProbe: measures the speed of training for some seconds, and ends it; for `tfloop tune` and `bench`."""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import sys
import time
from pathlib import Path
from typing import ClassVar, Literal

from callbacks.base import Callback, Metrics, Run
from callbacks.files import write_text
from callbacks.types import Data, JsonObject

CALLS = 3
"""The calls that aren't measured: the first one is compiled, and then the loop finds the length of calls."""


class ThroughputProbe(Callback):
    """Measures wall-clock time, so that the time between calls counts, too.

    At the end, each worker writes `trial-<rank>.json` in the run directory: examples per second (the chief), its peak
    memory in bytes, on the host and on a GPU, the number of examples, and whether they are a stream.

    Args:
        seconds: how long it measures, after a warm-up of half that time.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"
    every = "call"
    alone = True  # other callbacks would be measured, too

    def __init__(self, seconds: float | str) -> None:
        self.seconds = float(seconds)
        self.about: JsonObject = {"examples_per_second": None}
        self._calls = 0
        self._warm_at = math.inf
        self._measured_from = math.inf
        self._examples_before = 0

    def on_data(self, run: Run, data: Data) -> Data:
        train = data.train
        self.about |= {"stream": train.steps_per_epoch is None, "examples": getattr(train, "size", None)}
        return data

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        # A stop by the chief ends all workers at the same step; their own clocks would disagree.
        if not run.backend.is_chief:
            return
        # Three stages, by the clock: warm-up, measuring, and then the stop, which takes effect at a later call.
        now = time.monotonic()
        self._calls += 1
        if self._calls == 1:
            self._warm_at = now + self.seconds / 2
        elif self._calls >= CALLS and self._measured_from > now >= self._warm_at:
            self._measured_from = now
            self._examples_before = run.progress.examples
        elif now >= self._measured_from + self.seconds and self.about["examples_per_second"] is None:
            examples = run.progress.examples - self._examples_before
            self.about["examples_per_second"] = examples / (now - self._measured_from)
            run.stop("measured")

    def on_fit_end(self, run: Run, status: str) -> None:
        memory, gpu_memory = peak_memory()
        about = self.about | {"memory": memory, "gpu_memory": gpu_memory}
        write_text(run.directory / f"trial-{run.backend.rank}.json", json.dumps(about))


def peak_memory() -> tuple[int, int]:
    """The peak memory of this process, in bytes: on the host, and on one GPU."""
    import tensorflow as tf

    gpu_peak = 0
    # The fullest one, not the sum: each GPU has to hold its part.
    for device in tf.config.list_logical_devices("GPU"):
        memory = tf.config.experimental.get_memory_info(device.name.removeprefix("/device:"))
        gpu_peak = max(gpu_peak, memory["peak"])
    return _host_peak(), gpu_peak


def _host_peak() -> int:
    """The greatest resident memory that this process had, in bytes."""
    # Where there is no /proc, ask the system, which counts what the parent process had at the start, too.
    with contextlib.suppress(OSError):
        [kilobytes] = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        return 1024 * int(kilobytes)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
