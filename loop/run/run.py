"""Run: one training run, made of its parts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from callbacks import Callback
from loop.data import evaluation_sets
from loop.errors import TrainingError
from loop.monitor import fault_injection
from loop.monitor.stopwatch import Stopwatch
from loop.monitor.watchdog import Watchdog
from loop.options import phases_of
from loop.run import out_of_memory
from loop.run.agreement import Decision, Wishes, decide, exchange
from loop.run.callback_view import CallbackView
from loop.run.calls import Calls
from loop.run.checkpointing import Checkpointing
from loop.run.data_position import DataPosition
from loop.run.deferred_errors import DeferredErrors
from loop.run.epoch_metrics import EpochMetrics
from loop.run.late_changes import LateChanges
from loop.run.phases import Plan
from loop.run.progress import Progress
from loop.run.session import Session
from loop.run.status import RunStatus
from loop.run.stop_requests import StopRequests
from loop.step.totals import EXAMPLES
from loop.step.train_step import EPOCH_ENDED


class Run(CallbackView):
    """One training run. What callbacks see of it is in `CallbackView`.

    Attributes:
        session: what it trains with: task, backend, options, model, optimizer and step.
        directory: the run directory.
        run_status: its status, and `run.json`.
        progress: its position in the data.
        plan: its phases, and where it is among them.
        data: the training data's iterator.
        epoch: metrics, of the epoch under way and of those before.
        calls: the compiled calls, and their pace.
        errors: of this worker, until all workers know of them.
        stops: requests to stop.
        checkpointing: which checkpoints are asked for, taken, and written.
        callbacks: those that are called in this process, by their keys.
        stopwatch: where the time goes.
        watchdog: reports when nothing has ended for long.
        decision: what the workers have agreed on last.
    """

    def __init__(self, session: Session, directory: Path) -> None:
        backend = session.backend
        options = session.options
        self.session = session
        self.directory = directory
        self.run_status = RunStatus(directory, backend.is_chief)
        self.progress = Progress()
        self.plan = Plan(phases_of(session.task), options, self.progress)
        self.data = DataPosition()
        self.epoch = EpochMetrics()
        self.calls = Calls(options["steps_per_call"], LateChanges(session.task, session.built))
        self.errors = DeferredErrors(backend)
        self.stops = StopRequests()
        self.checkpointing = Checkpointing(self)
        self.callbacks: dict[str, Callback] = {}
        self.stopwatch = Stopwatch()
        self.watchdog = Watchdog(backend.rank, backend.workers, options["stall_timeout"])
        self.decision = Decision()

    @property
    def phase_over(self) -> bool:
        """Whether all of the phase has been made, and evaluated."""
        return not self.epoch.evaluating and self.plan.over

    @property
    def at_end(self) -> bool:
        """Whether all steps, or all epochs, have been made, and evaluated."""
        return self.phase_over and self.plan.is_last

    @property
    def at_epoch_end(self) -> bool:
        """Whether the epoch is complete, or the last step has been made within it."""
        return self.epoch.ended or self.plan.at_last_step

    # Errors and agreement

    def defer_errors(self) -> AbstractContextManager[None]:
        """Within it, an error is kept until `synchronize`: if it were raised, the other workers would wait forever."""
        return self.errors.defer()

    def synchronize(self, steps: int = 1) -> Decision:
        """All workers exchange errors, signals and wishes, and agree on what follows: one collective if all is well.

        The next call is to have so many steps; the chief's number counts.

        Raises:
            Exception: this worker's error, or a `PeerError` that names the rank and error of another.
        """
        fault_injection.reached("agree", self.backend.rank, self.progress.step)
        # At each boundary: a chief that has lost its directory or its lease must not write into another run's.
        with self.defer_errors():
            self.check_directory()
        # Before the wishes are made: a checkpoint that could not be written may be an error of this worker.
        outcome = self.checkpointing.next_outcome()
        wishes = self._wishes(steps, outcome)
        with self.watchdog.phase("waiting for the other workers"), self.stopwatch.at("waiting"):
            agreed = exchange(self.backend, wishes)
        self.watchdog.beat(self.progress.step, self.progress.epoch)
        # Before anything else is done with the decision: all workers end here, and none enters another collective.
        if agreed.failing:
            self.errors.raise_on_all()
        saved = self.checkpointing.take_outcome(agreed.write_outcome)
        if agreed.part_written:
            self.checkpointing.parts.complete()
        self.decision = decide(agreed, self.at_end, saved)
        self.run_status.follow(self.decision)
        return self.decision

    def _wishes(self, steps: int, outcome: int) -> Wishes:
        # A checkpoint or a stop waits for the end of an evaluation, unless a signal asks for it.
        evaluating = self.epoch.evaluating
        member = self.backend.member
        own_steps = steps if self.backend.is_chief else 0  # the numbers of all workers are added up
        return Wishes(
            steps=own_steps,
            write_outcome=outcome,
            part_written=self.checkpointing.parts.written,
            failing=self.errors.pending,
            save=self.checkpointing.wants_save(evaluating),
            save_on_stop=self.save_on_stop,
            wait=not self.save_in_background,
            check=self.check_on_save,
            stop=bool(self.stop_reason) and not evaluating,
            signalled=self.stops.signalled,
            keep=self.checkpointing.memory.due,
            regroup=member is not None and member.changed,
            hold=self.checkpointing.wants_hold(evaluating),
        )

    def translate_error(self, error: BaseException) -> BaseException:
        """Converts an error of the machine into one that says what to do.

        For a lack of memory: what takes it, and what saves it. For lost variables of a backend: where to resume from.
        """
        if (lack := out_of_memory.translated(self, error)) is not None:
            return lack
        lost = self.backend.lost(error)
        if not lost:
            return error
        self.checkpointing.writer.wait()  # the checkpoint that is being written is the one to resume from
        checkpoints = self.checkpoints()
        what = f"to go on from {checkpoints[-1]}" if checkpoints else "anew: there is no checkpoint yet"
        return TrainingError(f"{lost}; start again with run_dir={str(self.directory)!r} (--run-dir) {what}")

    # Steps, epochs and phases

    def make_steps(self) -> tuple[int, np.ndarray]:
        """Makes the next compiled call, and counts its steps and examples.

        Returns:
            Why the call ended (see `loop.step.train_step`), and the totals of its steps.
        """
        if self.backend.is_chief:
            self.calls.late_changes.warn(of_model=self.progress.step_in_epoch == 0)
        steps, ending, totals = self.calls.make(self)
        if self.calls.made == 1:
            self.calls.late_changes.note()
        self.progress.add(steps, int(totals[EXAMPLES]))
        # A stream says that it has ended; of arrays, the number of steps is known.
        whole_epoch = self.progress.step_in_epoch == self.step.data.train.steps_per_epoch
        self.epoch.add(totals, ended=ending == EPOCH_ENDED or whole_epoch)
        return ending, totals

    def means(self, totals: np.ndarray) -> dict[str, float]:
        """The metrics of some steps: the means of their totals, and the values of the gauges now."""
        return self.epoch.means(self.step, totals)

    def metric_names(self) -> list[str]:
        """The metrics that the epochs of this run will have; known before the first step, once gauges are set."""
        names = [*self.step.metric_names(), *self.gauges]
        for name in self.evaluated_sets:
            names += self.step.evaluations[name].metric_names()
        return names

    @property
    def evaluated_sets(self) -> list[str]:
        """The names of the evaluation sets that this run evaluates."""
        names = []
        for name in self.step.evaluations:
            if evaluation_sets.pace(self.options, name) != "never":
                names.append(name)
        return names

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation is due now, or one that was cut off has to be completed."""
        # A run may have been cut off after the last set, and before the event of the evaluation.
        return bool(self.epoch.evaluated or self.sets_due)

    @property
    def sets_due(self) -> list[str]:
        """The names of the evaluation sets that are due now."""
        return [name for name in self.step.evaluations if self._is_due(name)]

    def _is_due(self, name: str) -> bool:
        every = evaluation_sets.pace(self.options, name)
        step = self.progress.step
        # A set that was evaluated at this step isn't due again, which tells a resumed evaluation where to go on.
        if every == "never" or self.epoch.evaluated_at.get(name) == step:
            return False
        # The end of the training, or of a phase, is always evaluated.
        if self.plan.at_last_step or (self.epoch.ended and self.plan.epochs_left == 1):
            return True
        if isinstance(every, int):
            return step % every == 0
        return self.epoch.ended

    def close_epoch(self) -> dict[str, float]:
        """Adds the epoch's row to the history; returns its metrics and those of the last evaluation."""
        return self.epoch.close(self.step, self.progress, self.options)

    def next_epoch(self) -> None:
        """Goes to the start of the next epoch."""
        # At each epoch's end, not only before checkpoints: when those are written may depend on the clock, and results
        # must not.
        self.step.average_statistics()
        self.progress.next_epoch()
        self.data.next_epoch(self)
        self.epoch.clear_totals()

    def enter_phase(self) -> None:
        """Goes to the next phase, and drops what belongs to the one before."""
        self.session.enter_next_phase()
        self.plan.advance()
        self.data.start_phase()
        self.epoch.start_phase()
        self.calls.start_phase(self.options["steps_per_call"], LateChanges(self.task, self.session.built))
