"""Keras: `compile` and `fit`, as people call them."""

from __future__ import annotations

import keras

from benchmarks.worker import Port, Run, drive
from benchmarks.workloads import Workload


def serve(workload: Workload, port: Port, executions: list[int], jit_compile: bool | str = "auto") -> None:
    """Trains with `fit`, with the fastest of these `steps_per_execution`.

    A run is as few epochs as it takes, on as many of the examples. What the first epoch costs by itself is taken off:
    see `drive`.
    """
    inputs, labels = workload.arrays()
    model = workload.build()
    if workload.kind == "numbers":
        loss, metrics = keras.losses.MeanSquaredError(), []
    else:
        loss, metrics = keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"]

    compiled = at = 0

    def way(size: int) -> tuple[Run, int]:
        def run(steps: int) -> tuple[int, float]:
            nonlocal compiled, at
            if compiled != size:
                compiled = size
                model.compile(
                    workload.keras_optimizer(), loss, metrics=metrics, steps_per_execution=size, jit_compile=jit_compile
                )
            epochs = -(-steps * workload.batch_size // len(inputs))
            each = max(1, steps // epochs // size) * size if steps >= size else steps
            rows = each * workload.batch_size
            at = at if at + rows <= len(inputs) else 0  # each run has other examples than the one before
            x, y, at = inputs[at : at + rows], labels[at : at + rows], at + rows
            history = model.fit(x, y, batch_size=workload.batch_size, epochs=epochs)
            return each * epochs, history.history["loss"][-1]

        return run, size

    drive(port, {f"steps_per_execution={size}": way(size) for size in executions}, start_up=True)
