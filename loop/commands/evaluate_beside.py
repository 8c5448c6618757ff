"""Evaluates checkpoints in a process beside a training. `callbacks.EvaluateBeside` starts it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from callbacks.run_record.journal import jsonable
from callbacks.run_record.redaction import mask
from callbacks.side_process import give_answer, orders
from callbacks.types import Json
from loop.backends import devices
from loop.commands.evaluate import Evaluator
from loop.errors import UsageError
from loop.launch import explain
from loop.options import phases_of
from loop.run.session import index_of
from loop.target import task_loader
from loop.task import TrainTask


def main() -> None:
    """Runs the process.

    The first order has the task (`target`, `fields`), the `device`, and the `options` of the run that count here.
    Each further one is the path of a checkpoint. The answer has that `path`, and `error`, or these: `step`, `epoch`,
    `phase` ("": the task has none) and `metrics`.
    """
    given = orders()
    about = next(given, None)
    if about is not None:
        os.environ[task_loader.STARTER] = str(os.getppid())
        devices.prepare()
        answer_all(given, about)
    os._exit(0)  # at once: threads that read data may still wait


def answer_all(paths: Iterator[str], about: Json) -> None:
    """Evaluates each checkpoint when its path arrives."""
    evaluator = None
    for path in paths:
        try:
            if evaluator is None:  # within `try`: a task that can't be loaded is an answer, too
                _check_device(about["device"])
                task = task_loader.load(about["target"], fields=about["fields"])
                evaluator = Evaluator(task, {**about["options"], "backend": "single"})
            answer = _evaluated(evaluator, task, Path(path))
        except Exception as error:  # the task's code may fail in any way
            # The next checkpoint is tried all the same.
            text = str(error) if isinstance(error, UsageError) else explain.in_a_line(error)
            answer = {"error": mask(text)}
        give_answer(jsonable({"path": path, **answer}))


def _check_device(device: str) -> None:
    """Refuses a GPU that TensorFlow doesn't see. Without this, the CPU would be used silently."""
    if device != "cpu" and not tf.config.list_physical_devices("GPU"):
        raise UsageError(
            f"{device} was to evaluate it, and TensorFlow doesn't see it: see `tfloop doctor`, or give cpu"
        )


def _evaluated(evaluator: Evaluator, task: TrainTask, path: Path) -> Json:
    metrics = evaluator.metrics(path)
    state = evaluator.manifest
    phases = phases_of(task)
    phase = phases[index_of(state, task)].name if phases else ""
    progress = state["progress"]
    return {"step": progress["step"], "epoch": progress["epoch"], "phase": phase, "metrics": metrics}


if __name__ == "__main__":
    main()
