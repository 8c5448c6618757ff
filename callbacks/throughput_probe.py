"""ThroughputProbe: measures for some seconds how fast training is, and ends it; for `tfloop tune`."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any, ClassVar, Literal

from callbacks.base import Callback, Metrics, Run
from callbacks.files import write_text

CALLS = 3
"""So many compiled calls at least aren't counted: the first is traced and compiled, then their length is found."""


class ThroughputProbe(Callback):
    """Measures by the clock on the wall, so that what is between the calls counts, too.

    At the end each worker writes `trial-<rank>.json` in the run directory: examples per second (the chief), the most
    memory that it had, in bytes, on the host and on a GPU, how many examples there are, and whether they are a stream.

    Args:
        seconds: how long it measures, when it has trained for half of that.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"
    every = "call"
    alone = True  # what is saved, shown or delivered would be measured, too

    def __init__(self, seconds: float | str) -> None:
        self.seconds = float(seconds)
        self.about: dict[str, Any] = {"examples_per_second": None}
        self._calls = self._examples = 0
        self._warm = self._begun = float("inf")

    def on_data(self, run: Run, data: Any) -> Any:
        train = data.train
        self.about |= {"stream": train.steps_per_epoch is None, "examples": getattr(train, "size", None)}
        return data

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        if not run.backend.is_chief:
            return
        now = time.monotonic()
        self._calls += 1
        if self._calls == 1:
            self._warm = now + self.seconds / 2
        elif self._calls >= CALLS and self._begun > now >= self._warm:
            self._begun, self._examples = now, run.progress.examples
        elif now >= self._begun + self.seconds and self.about["examples_per_second"] is None:
            self.about["examples_per_second"] = (run.progress.examples - self._examples) / (now - self._begun)
            run.stop("measured")

    def on_fit_end(self, run: Run, status: str) -> None:
        memory, gpu_memory = peak_memory()
        about = self.about | {"memory": memory, "gpu_memory": gpu_memory}
        write_text(run.directory / f"trial-{run.backend.rank}.json", json.dumps(about))


def peak_memory() -> tuple[int, int]:
    """The most memory that this process has had, in bytes: on the host, and on one GPU."""
    import tensorflow as tf

    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    gpus = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices("GPU")]
    return own, max((tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in gpus), default=0)
