"""MemoryProbe: measures what memory a few steps of training need; for `tfloop memory`."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from callbacks import Callback, Metrics, Run
from callbacks.files import write_text
from callbacks.throughput_probe import peak_memory
from loop.options import with_defaults

STEPS = 3
"""The number of steps: the first one traces, and the next ones find memory that the earlier ones have split up."""


class MemoryProbe(Callback):
    """Ends a run after a few steps.

    At the end, each worker writes `memory-<rank>.json` in the run directory: the bytes of variables and of an example,
    its peak memory in bytes, on the host and on a GPU, and the options that the task has by itself.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"
    every = tuple(range(1, STEPS + 1))
    alone = True  # what others hold would be measured, too

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}

    def on_data(self, run: Run, data: Any) -> Any:
        import tensorflow as tf

        from loop.data import count
        from loop.model.variables import bytes_of

        example = data.train.example
        tensors = list(map(tf.constant, tf.nest.flatten(example)))
        self.about["example"] = bytes_of(tensors) / int(count(example))  # it has a few rows
        return data

    def on_fit_start(self, run: Run) -> None:
        from loop.model.variables import as_tf, bytes_of, model_variables, optimizer_variables, trainable_variables

        trained = bytes_of(as_tf(trainable_variables(run.model)))
        self.about |= {
            "task": type(run.task).__name__,
            "own": with_defaults(run.task, {}),
            "weights": bytes_of(model_variables(run.model)),
            "gradients": trained,
            "optimizer": bytes_of(optimizer_variables(run.optimizer)),
            "averages": trained if run.options["ema"] is not None else 0,  # one for each trained variable
        }

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        if run.progress.step >= STEPS:
            run.stop("measured")

    def on_fit_end(self, run: Run, status: str) -> None:
        host, gpu = peak_memory()
        about = self.about | {"memory": host, "gpu_memory": gpu}
        write_text(run.directory / f"memory-{run.backend.rank}.json", json.dumps(about, default=str))
