"""Evaluates a task with the weights of checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from loop.backends.base import Backend
from loop.checkpoint.array_files import Json
from loop.errors import UsageError
from loop.run import run_directory
from loop.run.result import check_is_path, read_weights
from loop.run.session import NOT_TRAINED, Session, index_of, options_and_backend
from loop.run.state import assign_model
from loop.step.evaluation import Evaluation
from loop.task import TrainTask, check_is_task


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
        precision: as for `fit`; give that of the run.

    Returns:
        The means over all examples, named `eval_...`, of several evaluation sets `eval_<set>_...`; the same on all
        workers.

    Raises:
        UsageError: the task has no evaluation data, or the checkpoint is not of this model.
    """
    check_is_task(task, "evaluate")
    check_is_path(path, "evaluate")
    evaluator = Evaluator(task, {"batch_size": batch_size, "backend": backend, "precision": precision})
    with contextlib.closing(evaluator):
        return evaluator.metrics(Path(path))


class Evaluator:
    """Evaluates a task with the weights of one checkpoint after the other; the step is compiled once.

    Args:
        task: the task, with the hyperparameters of the run.
        given: options of `fit`.

    Attributes:
        manifest: that of the last checkpoint.
    """

    manifest: Json

    def __init__(self, task: TrainTask, given: dict[str, Any]) -> None:
        self._task = task
        self._options, self._backend = options_and_backend(task, given)
        self._options |= NOT_TRAINED | {"eval_every": "epoch"}
        self._session: Session | None = None
        self._evaluations: dict[str, Evaluation] = {}

    def metrics(self, path: Path) -> dict[str, float]:
        """The means over the whole evaluation data; see `evaluate`."""
        weights, self.manifest = read_weights(path)
        # A task with phases may have another model in each: the checkpoint says which one it is of.
        with run_directory.of_a_run(path):
            index = index_of(self.manifest, self._task)
        session = self._in_phase(index)  # not within: an error of the task isn't one of the manifest
        assign_model(session.built.model, weights)
        metrics: dict[str, float] = {}
        for evaluation in self._evaluations.values():
            metrics |= evaluation.means(evaluation.whole())
        return metrics

    def close(self) -> None:
        """Ends what reads the data."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _in_phase(self, index: int) -> Session:
        """A session in this phase of the task: the one that there is, or a new one."""
        if self._session is not None and self._session.index == index:
            return self._session
        self.close()  # what reads the data of the other phase
        session = Session(self._task, self._backend, self._options, index, trained_on=self._backend.replicas)
        if session.data.eval is None:
            raise UsageError(f"{type(self._task).__name__}.eval_data() returned None: there is nothing to evaluate on")
        self._session = session
        self._evaluations = session.make_step().evaluations
        return session
