"""Evaluates a task with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from callbacks import ShardData
from loop import backends
from loop.backends.base import Backend
from loop.checkpoint import checkpoint_files
from loop.data import likely_rows
from loop.errors import UsageError
from loop.launch.backend_choice import choose_backend
from loop.model.variables import all_variables
from loop.options import with_defaults
from loop.run import run_directory
from loop.run.session import assemble, index_of
from loop.run.state import assign, averaged, numbered
from loop.step import approximations
from loop.step.train_step import TrainStep
from loop.task import TrainTask


def evaluate(
    task: TrainTask,
    path: str | Path,
    *,
    batch_size: int | None = None,
    backend: str | Backend | None = None,
    precision: str | None = None,
) -> dict[str, float]:
    """Evaluates a task on its evaluation data, every example once, with the weights of a checkpoint.

    Args:
        task: the task, with the hyperparameters of the run.
        path: a checkpoint, or a run directory: its newest good checkpoint is taken, or the best where the run keeps it.
        batch_size: the global batch; it doesn't change the result.
        backend: as for `fit`.
        precision: as for `fit`.

    Returns:
        The means over all examples, named `eval_...`; the same on all workers.

    Raises:
        UsageError: the task has no evaluation data, or the checkpoint is not of this model.
    """
    given = {"batch_size": batch_size, "precision": precision}
    options = with_defaults(task, given | {"backend": None if isinstance(backend, Backend) else backend})
    options |= {
        "eval_every": "epoch",
        "steps": 1,
        "drop_remainder": False,
        "overfit": None,
    }  # the training data isn't used
    engine = backend if isinstance(backend, Backend) else backends.create(choose_backend(options["backend"])[0])
    _, manifest = run_directory.locate_weights(Path(path))
    with run_directory.of_a_run(path):
        index = index_of(manifest, task)
        options, data, built = assemble(
            task, engine, options, index, lambda options, data: likely_rows(options, engine.replicas, engine.replicas)
        )
    if data.eval is None:
        raise UsageError(f"{type(task).__name__}.eval_data() returned None: there is nothing to evaluate on")
    load_weights(built.model, Path(path))
    # The checkpoint's moving averages have been loaded as the weights.
    step = TrainStep(
        task, built, engine, data.sharded(engine, ShardData().policy), options | {"ema": None} | approximations.OFF
    )
    return step.evaluation.means(step.evaluation.whole())


def load_weights(model: Any, path: Path) -> dict[str, Any]:
    """Gives a model the weights of a checkpoint, or those that are the result of a run; returns the manifest.

    Where the run kept moving averages of its weights, it is those.
    """
    found, manifest = run_directory.locate_weights(path)
    tensors: dict[str, np.ndarray] = checkpoint_files.read(found, manifest)
    assign(numbered("model", all_variables(model)), averaged(tensors))
    return manifest
