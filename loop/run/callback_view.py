"""What callbacks see of a run: the interface that `callbacks.Run` describes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import tensorflow as tf

from callbacks.run_record import cell, history
from loop.backends.base import Backend
from loop.checkpoint import checkpoint_files
from loop.checkpoint.array_files import Json
from loop.errors import UsageError
from loop.model import variables
from loop.monitor.stopwatch import Stopwatch
from loop.options import Options, Phase
from loop.run import state, status
from loop.run.checkpointing import Checkpointing
from loop.run.data_position import DataPosition
from loop.run.phases import Plan
from loop.run.progress import Progress
from loop.run.replica_check import check_same
from loop.run.session import Session
from loop.run.stop_requests import StopRequests
from loop.step.build import BuiltModel
from loop.step.train_step import TrainStep
from loop.task import Model, Optimizer, TrainTask

if TYPE_CHECKING:
    from loop.run.run import Run
    from loop.run.serving import ServedArrays

T = TypeVar("T")


class PartAttribute(Generic[T]):
    """An attribute of a run that one of its parts holds: read and set on the run, kept in the part.

    `path` is that of the attribute, from the run.
    """

    def __init__(self, path: str) -> None:
        # Made once: the loop reads such attributes at each boundary.
        part, _, self._name = path.rpartition(".")
        self._part = attrgetter(part)

    def __get__(self, run: CallbackView, owner: type) -> T:
        value: T = getattr(self._part(run), self._name)
        return value

    def __set__(self, run: CallbackView, value: T) -> None:
        setattr(self._part(run), self._name, value)


class CallbackView:
    """The part of `Run` that callbacks use. It holds nothing itself: its attributes are those of the run's parts."""

    session: Session
    directory: Path
    progress: Progress
    plan: Plan
    data: DataPosition
    checkpointing: Checkpointing
    stops: StopRequests
    run_status: status.RunStatus
    stopwatch: Stopwatch
    _info: Json | None = None

    # What `callbacks.Run` promises, and the part of a run that holds it.
    task = PartAttribute[TrainTask]("session.task")
    backend = PartAttribute[Backend]("session.backend")
    options = PartAttribute[Options]("session.options")
    built = PartAttribute[BuiltModel]("session.built")
    model = PartAttribute[Model]("session.built.model")
    optimizer = PartAttribute[Optimizer]("session.built.optimizer")
    history = PartAttribute[list[history.Row]]("epoch.history")
    gauges = PartAttribute[dict[str, Callable[[], float]]]("epoch.gauges")
    stop_reason = PartAttribute[str]("stops.reason")
    signalled = PartAttribute[bool]("stops.signalled")
    best = PartAttribute[Json | None]("checkpointing.best")
    saved_path = PartAttribute[Path | None]("checkpointing.saved_path")
    save_on_stop = PartAttribute[bool]("checkpointing.policy.save_on_stop")
    check_on_save = PartAttribute[bool]("checkpointing.policy.check_on_save")
    save_in_background = PartAttribute[bool]("checkpointing.policy.save_in_background")
    save_must_succeed = PartAttribute[bool]("checkpointing.policy.save_must_succeed")
    best_is_judged = PartAttribute[bool]("checkpointing.policy.best_is_judged")
    history_in_journal = PartAttribute[bool]("checkpointing.policy.history_in_journal")
    examples_per_second = PartAttribute[float]("calls.examples_per_second")

    @property
    def _run(self) -> Run:
        return cast("Run", self)

    @property
    def step(self) -> TrainStep:
        """The compiled step."""
        try:
            return self.session.step
        except AttributeError:
            raise UsageError(
                "a callback asks in on_setup or on_data for what is known once the data is: the run's total_steps, "
                "metric_names(), graph or export(): ask in on_restore, or later"
            ) from None

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables of the state of the run that are the same in all replicas: of model, optimizer and step."""
        # In `on_setup`, there is no step yet.
        return self.built.variables + (self.step.variables if self.session.has_step else [])

    @property
    def sliced_variables(self) -> list[tf.Variable]:
        """The other variables of the state: with `shard_optimizer`, each replica has its own slice of them."""
        return self.step.sliced_variables if self.session.has_step else self.built.sliced_variables

    @property
    def weights(self) -> list[tuple[str, tf.Variable, bool]]:
        """The model's variables in its own order: the name, the variable, and whether it is trained."""
        # By identity: variables may have the same name, and comparing them compares their values.
        trained = set(map(id, variables.as_tf(variables.trainable_variables(self.model))))
        own = variables.all_variables(self.model)
        named = zip(variables.variable_names(own), variables.as_tf(own), strict=True)
        return [(name, variable, id(variable) in trained) for name, variable in named]

    @property
    def graph(self) -> tf.Graph | None:
        """The graph of the compiled training, once steps have been made; None where other processes make them."""
        return None if self.backend.asynchronous else self.step.graph(self.data.iterator)

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, or None where the data has no known length."""
        return self.plan.total_steps(self.step.data.train.steps_per_epoch)

    @property
    def phase(self) -> Phase | None:
        """The phase of the task that the run is in; None for a task without phases."""
        return self.plan.phase if self.plan.named else None

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of this process went, from its first call on to the end of the last one, by part."""
        return dict(self.stopwatch.seconds)

    @property
    def info(self) -> Json:
        """The task, its options, the model's size, the backend, versions and machine, as JSON values."""
        if self._info is not None:
            return self._info
        described = status.describe(self._run)
        # Kept, since it looks up the versions of packages, and counts the parameters. But before there is a step,
        # options may still change: by callbacks in `on_setup`, and `compile="auto"`.
        if self.session.has_step:
            self._info = described
        return described

    def _repr_html_(self) -> str:
        """What a notebook shows of a run: where it stands, and its metrics with their curves."""
        position = f"epoch {self.progress.epoch + 1}, step {self.progress.step:,}"
        return cell.html([type(self.task).__name__, position, str(self.directory)], self.history)

    def stop(self, reason: str) -> None:
        """Asks all workers to end the run at the next boundary between calls."""
        self.stops.request(reason)

    def save(self, reason: str, later: bool = False) -> None:
        """Asks for a checkpoint at the next boundary between calls.

        Args:
            reason: what it is for.
            later: the state of that boundary stays in memory, and is written just before the next checkpoint. A newer
                one takes its place. A kill before it is written loses nothing: the run goes on from an earlier
                checkpoint, and comes to this state again.
        """
        self.checkpointing.request(reason, later)

    def keep_best(self, metric: str, value: float, step: int) -> None:
        """Makes the weights of a step the result of the run, as long as no other is better; its checkpoint is kept."""
        self.best = {"step": step, "metric": metric, "value": value}

    def checkpoints(self) -> list[Path]:
        """The checkpoints of this run, oldest first."""
        return checkpoint_files.complete(self.directory / "checkpoints")

    def discard(self, paths: list[Path]) -> None:
        """Removes checkpoints, without waiting for it."""
        for path in paths:
            self.checkpointing.writer.remove(path)

    def fingerprints(self) -> dict[int, list[str]]:
        """A hash of each of `variables` in each replica. All workers must call it."""
        return self.backend.fingerprints(self.variables)

    def check_replicas(self) -> None:
        """Compares all variables across all replicas. All workers must call it, and all raise the same error.

        Raises:
            TrainingError: one isn't the same everywhere; which, and where.
        """
        if self.backend.replicas > 1:
            self.step.average_statistics()  # between these averages, each replica may have its own
            hashes = self.fingerprints()
            check_same(state.whole_variables(self._run), hashes, self.backend.local_replicas, self.progress.step)

    def check_directory(self) -> None:
        """Checks that the run directory is where it was (on the chief, which writes into it).

        Raises:
            MovedError: it was moved or deleted. Another run may have its old name.
        """
        self.run_status.check_directory()

    def export(self, out: Path) -> tuple[ServedArrays, ServedArrays]:
        """Writes the model as a SavedModel, with the moving averages of its weights where there are any.

        Returns:
            A few examples, as an array or arrays by name, and the model's outputs for them.
        """
        from loop.run.serving import export_run

        return export_run(self._run, out)
