"""Ours: `fit`, as `tfloop train` calls it."""

from __future__ import annotations

import time
from typing import Any

import callbacks as standard
from benchmarks.worker import Port
from benchmarks.workloads import Workload
from loop import ArrayData, TrainTask, fit
from loop.backends import devices


class Trained(TrainTask):
    """A workload as a task.

    Attributes:
        loss: the name of the metric that is compared with other contenders'.
    """

    loss = "loss"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def build_model(self) -> Any:
        return self.workload.build()

    def build_optimizer(self) -> Any:
        return self.workload.keras_optimizer()

    def train_data(self) -> ArrayData:
        return ArrayData(*self.workload.arrays())

    def compute(self, model: Any, batch: Any, training: bool) -> dict[str, Any]:
        inputs, labels = batch
        return self.workload.values(labels, model(inputs, training=training))


class Clock(standard.Callback):
    """Times the run from call to call, and holds it between two calls until the next command.

    So it is one run, as everybody's is, with all that happens in it between calls: only the time in which this hook
    waits isn't counted. A segment ends with the call that is under way when its time is up, and has all of its steps.
    """

    def __init__(self, port: Port, loss: str) -> None:
        self.port = port
        self.loss = loss
        self.command = port.next()
        # Where an exact number of steps is asked for, the losses are compared and nothing is timed.
        self.every = (self.command or {}).get("steps", "call")
        self.begun, self.first, self.last, self.sum = 0.0, 0, 0, 0.0

    def on_fit_start(self, run: standard.Run) -> None:
        self.begun = time.perf_counter()

    def on_steps_end(self, run: standard.Run, metrics: standard.Metrics) -> None:
        now, step = time.perf_counter(), run.progress.step
        assert self.command is not None
        self.sum += metrics[self.loss] * (step - self.last)
        self.last = step
        made = step - self.first
        if now - self.begun < self.command.get("seconds", 0) or made < self.command.get("steps", 0):
            return
        self.port.answer(made, now - self.begun, self.sum / made)
        self.command = self.port.next()
        if self.command is None:
            run.stop("no more commands")
        self.first, self.sum = step, 0.0
        self.begun = time.perf_counter()


class Idle(standard.Callback):
    """One more callback, which wants the host and the metrics, and does nothing."""

    def __init__(self, number: int, every: int) -> None:
        self.key, self.every = f"idle {number}", every

    def on_steps_end(self, run: standard.Run, metrics: standard.Metrics) -> None:
        dict(metrics)


def serve(
    workload: Workload, port: Port, callbacks: str = "standard", more: int = 0, every: int = 1, **options: Any
) -> None:
    """Trains with `fit` until the commands end.

    Args:
        workload: what to train.
        port: where commands come from.
        callbacks: `standard`, `no mlflow`, or `off`: none at all.
        more: how many callbacks more, each of which wants the host every so many steps.
        every: how many.
        **options: of `fit`.
    """
    devices.prepare(options.get("backend", "single"))  # as `tfloop train` does
    if workload.kind == "gan":
        from benchmarks.contenders import gan

        task: Trained = gan.Trained(workload)
    else:
        task = Trained(workload)
    clock = Clock(port, task.loss)
    chosen: list[standard.Callback] = [clock, *(Idle(number, every) for number in range(more))]
    if callbacks == "off":
        # What shares out the data and the weights stays: it acts before the first step alone.
        names = ("sentinel", "checkpoint", "journal", "mlflow", "progress")
        chosen = standard.standard(**dict.fromkeys(names)) + chosen
    elif callbacks == "no mlflow":
        chosen = standard.standard(mlflow=None) + chosen
    options = {"batch_size": workload.batch_size, "precision": workload.precision} | options
    fit(task, epochs=10**6, callbacks=chosen, run_dir="run", **options)
