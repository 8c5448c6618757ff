"""Evaluates a task with the weights of a checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path

from loop.backends.base import Backend
from loop.errors import UsageError
from loop.model.variables import all_variables
from loop.run import run_directory
from loop.run.result import read_weights
from loop.run.session import Session, index_of, options_and_backend
from loop.run.state import assign, numbered
from loop.step import approximations
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
        The means over all examples, named `eval_...`, of several evaluation sets `eval_<set>_...`; the same on all
        workers.

    Raises:
        UsageError: the task has no evaluation data, or the checkpoint is not of this model.
    """
    given = {"batch_size": batch_size, "backend": backend, "precision": precision}
    options, backend = options_and_backend(task, given)
    # The training data isn't used; and the checkpoint's moving averages are loaded as the weights.
    options |= {"eval_every": "epoch", "steps": 1, "drop_remainder": False, "overfit": None, "ema": None}
    options |= approximations.OFF | {"shard_optimizer": False}
    weights, manifest = read_weights(Path(path))
    with run_directory.of_a_run(path):
        session = Session(task, backend, options, index_of(manifest, task), trained_on=backend.replicas)
    if session.data.eval is None:
        raise UsageError(f"{type(task).__name__}.eval_data() returned None: there is nothing to evaluate on")
    assign(numbered("model", all_variables(session.built.model)), weights)
    with contextlib.closing(session):
        metrics: dict[str, float] = {}
        for evaluation in session.make_step().evaluations.values():
            metrics |= evaluation.means(evaluation.whole())
        return metrics
