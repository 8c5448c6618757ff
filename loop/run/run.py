"""Run: the state of one training run, what a callback is handed, and how its workers agree."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled  # nothing public tells it

from callbacks.files import Anchor, read_json, write_json
from callbacks.run_record import history
from callbacks.run_record.journal import jsonable
from callbacks.run_record.redaction import redact, tell
from loop.backends.base import Backend, fingerprint
from loop.checkpoint import checkpoint_files
from loop.checkpoint.kept import Kept
from loop.checkpoint.writer import Snapshot, Writer, arrays
from loop.data.host_random import set_random_state
from loop.errors import PeerError, TrainingError, UsageError, no_exit
from loop.launch import signals
from loop.launch.environment import LAUNCHER
from loop.launch.worker import mark_state
from loop.model import variables
from loop.monitor import fault_injection
from loop.monitor.stopwatch import COMPILING, Stopwatch
from loop.monitor.watchdog import Watchdog
from loop.options import Phase, phases_of
from loop.run import state
from loop.run.pace import Pace
from loop.run.phases import Plan, as_json
from loop.run.session import Assembled
from loop.run.state import Progress, plain
from loop.step.build import BuiltModel
from loop.step.loss_scale import SMALLEST
from loop.step.metric_sums import EXAMPLES, SKIPPED, SUMS
from loop.step.train_step import TrainStep
from loop.task import TrainTask, hyperparameters, target_of

MOST_BAD_STEPS = 3
"""So many steps that weren't finite are kept at most in a run directory."""

COPIED_PER_SECOND = 2e9
"""So many bytes of variables are copied in a second, or more."""

STOPPING_UNSAVED = "interrupted: the run ends, and saves nothing; a second Ctrl-C (or signal) ends it at once"
"""What is said at once of a stop by a signal, where no callback saves."""

_WRITTEN, _FAILED = 1, 2


class Run:
    """One training run. The public names are those that `callbacks.Run` promises to callbacks."""

    def __init__(
        self,
        task: TrainTask,
        backend: Backend,
        options: dict[str, Any],
        phase_options: dict[str, Any],
        built: BuiltModel,
        directory: Path,
    ) -> None:
        self.task, self.backend, self.options, self.directory = task, backend, options, directory
        self.built, self.model, self.optimizer = built, built.model, built.optimizer
        self.progress = Progress()
        self.plan = Plan(phases_of(task), options, self.progress)
        self.phase_options = phase_options
        self.history: list[history.Row] = []
        self.save_on_stop = self.check_on_save = self.history_in_journal = False
        self.save_in_background = self.save_must_succeed = True
        self.best_is_judged = False
        self.step: TrainStep
        self.handle: Any = None
        self.adopted: list[str] = []
        self.random_state: dict[str, Any] | None = None
        self.stream_state: np.ndarray | None = None
        self.learning_rates = variables.learning_rates(built.optimizer)
        self.model_variables = [variables.model_variables(built.model)]
        self._anchor = Anchor(directory) if backend.is_chief else None
        self.writer = Writer(self.check_directory)
        self.stopwatch = Stopwatch()
        self.watchdog = Watchdog(backend.rank, backend.workers, options["stall_timeout"])
        self.callbacks: dict[str, Any] = {}
        self.gauges: dict[str, Callable[[], float]] = {}
        self.pace, self.eval_pace = Pace(options["steps_per_call"]), Pace(options["steps_per_call"])
        self.epoch_totals = np.zeros(())
        self.eval_metrics: dict[str, float] = {}
        self.next_steps = 1
        self.evaluating = self.epoch_ends = False
        self.saving = self.saves_wait = self.checks = self.stopping = self.keeping = self.regrouping = False
        self.holding = False
        self._keep_at, self._keeps = 0.0, 0  # when the next snapshot is due, and how many there were
        self.status = "finished"
        self.begun = False  # whether this life stands where it starts: until then, run.json is of the life before
        self._save_reason = self._hold_reason = self.stop_reason = self.saved = ""
        self._save_at_once = False
        self._held: Snapshot | None = None
        self._saves: list[tuple[str, int]] = []
        self.saved_path: Path | None = None
        self.newest_checkpoint: str | None = None  # of this run directory, by its name
        # On the chief: the step whose weights are the result, the metric and its value; see `keep_best`.
        self.best: dict[str, Any] | None = None
        self.best_step: int | None = None  # that step, once the model has its weights
        self._error: BaseException | None = None
        self._signals = 0
        self._calls = 0
        self.evaluated_at = -1
        self._examples, self._seconds = 0, 0.0

    # What callbacks use

    @property
    def variables(self) -> list[Any]:
        """All variables that make up the state of the run: of the model, the optimizer, and the step."""
        return self.built.variables + (self.step.variables if hasattr(self, "step") else [])

    @property
    def weights(self) -> list[tuple[str, tf.Variable, bool]]:
        """The model's variables in its own order: the name, the variable, and whether it is trained."""
        trained = {id(variable) for variable in variables.as_tf(variables.trainable_variables(self.model))}
        own = variables.all_variables(self.model)
        named = zip(variables.variable_names(own), variables.as_tf(own), strict=True)
        return [(name, variable, id(variable) in trained) for name, variable in named]

    @property
    def graph(self) -> tf.Graph | None:
        """The graph of the compiled training, once steps have been made; None where other processes make them."""
        return None if self.backend.asynchronous else self.step.graph(self.handle)

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, or None where the data has no known length."""
        return self.plan.total_steps(self.step.data.train.steps_per_epoch)

    @property
    def phase(self) -> Phase | None:
        """The phase of the task that the run is in; None for a task without phases."""
        return self.plan.phase if self.plan.named else None

    @property
    def examples_per_second(self) -> float:
        """Examples trained on in this process, by the time that the compiled calls took.

        The first call, which is traced and compiled, doesn't count, unless there was no other.
        """
        return self._examples / self._seconds if self._seconds else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of this process went, from its first call on to the end of the last one, by part."""
        return dict(self.stopwatch.seconds)

    @functools.cached_property
    def info(self) -> dict[str, Any]:
        """Who, what, versions, topology: JSON values."""
        from importlib.metadata import PackageNotFoundError, version

        versions = {"python": sys.version.split()[0]}
        engine = ("horovod",) if self.backend.name == "horovod" else ()
        for package in ("tfloop", "tensorflow", "keras", "numpy", *engine):
            with contextlib.suppress(PackageNotFoundError):
                versions[package] = version(package)
        return {
            "task": type(self.task).__name__,
            "target": target_of(self.task),
            "hyperparameters": {name: plain(value) for name, value in hyperparameters(self.task).items()},
            "options": {name: plain(value) for name, value in self.options.items()},
            "batch_size": self.options["batch_size"],
            "parameters": variables.parameters(self.model),
            **({"phases": as_json(self.plan.named)} if self.plan.named else {}),
            "backend": self.backend.name,
            "workers": self.backend.workers,
            "replicas": self.backend.replicas,
            "versions": versions,
            "machine": {
                "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
                "intra_op_threads": tf.config.threading.get_intra_op_parallelism_threads(),
                "inter_op_threads": tf.config.threading.get_inter_op_parallelism_threads(),
                "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", ""),
                "deterministic_ops": is_op_determinism_enabled(),
                "compile": self.options["compile"],
            },
        }

    def stop(self, reason: str) -> None:
        """Asks all workers to end the run at the next boundary between calls."""
        self.stop_reason = self.stop_reason or reason

    def save(self, reason: str, later: bool = False) -> None:
        """Asks for a checkpoint at the next boundary between calls.

        Args:
            reason: what it is for.
            later: the state of that boundary stays in memory, and is written just before the next checkpoint. Of
                several, only the last is kept. A kill before that loses nothing: the run goes on from an earlier
                checkpoint, and comes to this state again.
        """
        if later and self.backend.member is None:  # workers that outlive the chief don't have what it holds
            self._hold_reason = reason
        else:
            self._save_reason = self._save_reason or reason

    def keep_best(self, metric: str, value: float, step: int) -> None:
        """Makes the weights of a step the result of the run, as long as no other is better; its checkpoint is kept."""
        self.best = {"step": step, "metric": metric, "value": value}

    def checkpoints(self) -> list[Path]:
        """The checkpoints of this run, oldest first."""
        return checkpoint_files.complete(self.directory / "checkpoints")

    def fingerprints(self) -> dict[int, list[str]]:
        """A hash of each of `variables` in each replica. All workers must call it."""
        return self.backend.fingerprints(self.variables)

    def check_replicas(self) -> None:
        """Compares all variables across all replicas. All workers must call it, and all raise the same error.

        Raises:
            TrainingError: one isn't the same everywhere; which, and where.
        """
        if self.backend.replicas == 1:
            return
        self.step.average_statistics()
        prints = self.fingerprints()
        for index, name in enumerate(state.named_variables(self)):
            # What most replicas have is taken to be right; where there is no majority, what the chief has.
            seen = [hashes[index] for hashes in prints.values()]
            usual = max(seen, key=lambda each: (seen.count(each), each == seen[0]))
            differ = [replica for replica, each in enumerate(seen) if each != usual]
            if differ:
                local = self.backend.local_replicas
                where = ", ".join(f"replica {replica} (rank {replica // local})" for replica in differ)
                raise TrainingError(
                    f"step {self.progress.step}: the replicas have drifted apart: {name} differs on {where}. Look for "
                    "code that depends on the rank, for a variable that is changed outside of the step, and at the "
                    "hardware; `tfloop verify` tries the task itself"
                )

    def check_directory(self) -> None:
        """Checks that the run directory is where it was (on the chief, who writes into it).

        Raises:
            MovedError: it was moved or deleted. Another run may have its old name.
        """
        if self._anchor is not None:
            self._anchor.check()

    def export(self, out: Path) -> tuple[Any, Any]:
        """Writes the model as a SavedModel, with the moving averages of its weights where there are any.

        Returns:
            A few examples, as an array or arrays by name, and the model's outputs for them.
        """
        from loop.run.serving import export_run

        return export_run(self, out)

    # What the loop uses

    @property
    def at_last_step(self) -> bool:
        """Whether the number of steps that was asked for, in this phase, has been made."""
        return self.plan.at_last_step

    @property
    def at_end(self) -> bool:
        """Whether all steps, or all epochs, have been made, and evaluated."""
        return self.phase_over and self.plan.is_last

    @property
    def phase_over(self) -> bool:
        """Whether all of the phase has been made, and evaluated."""
        return not self.evaluating and self.plan.over

    @property
    def failing(self) -> bool:
        """Whether this worker has an error that the others have not heard of."""
        return self._error is not None

    def fail(self, error: BaseException) -> None:
        """Keeps an error of this worker until all workers can hear of it; the first one counts."""
        self._error = self._error or error

    def translate_error(self, error: BaseException) -> BaseException:
        """The error as it is to be told: where the engine has lost variables, with the checkpoint that has them."""
        lost = self.backend.lost(error)
        if not lost:
            return error
        self.writer.wait()
        there = self.checkpoints()
        what = f"to go on from {there[-1]}" if there else "anew: there is no checkpoint yet"
        return TrainingError(f"{lost}; start again with run_dir={str(self.directory)!r} (--run-dir) {what}")

    @contextlib.contextmanager
    def defer_errors(self) -> Iterator[None]:
        """Keeps an error of this worker until `synchronize`: without it, the other workers would wait forever."""
        try:
            with no_exit():
                yield
        except Exception as error:
            self.fail(error)

    def synchronize(self, steps: int = 1) -> None:
        """All workers hear of each other's errors, signals and wishes, and take the chief's length of the next call.

        Args:
            steps: how many steps the next call is to have.

        Raises:
            Exception: this worker's error, or a `PeerError` that names the rank and error of another.
        """
        fault_injection.reached("agree", self.backend.rank, self.progress.step)
        with self.defer_errors():
            self.check_directory()
        ended = self._save_ended()
        stops, signalled = bool(self.stop_reason), self._signals > 0
        waits = not self.save_in_background
        # An evaluation comes to its end, unless somebody can't wait.
        saves, stops = (wish and not self.evaluating for wish in (bool(self._save_reason), stops))
        saves |= self._save_at_once
        holds = bool(self._hold_reason) and not self.evaluating
        member = self.backend.member
        keeps = member is not None and self.backend.is_chief and time.monotonic() >= self._keep_at
        flags = (
            self.failing, saves, self.save_on_stop, waits, self.check_on_save, stops, signalled, keeps,
            member is not None and member.changed, holds,
        )  # fmt: skip
        with self.watchdog.phase("waiting for the other workers"), self.stopwatch.at("waiting"):
            table = self.backend.exchange(steps if self.backend.is_chief else 0, ended, *map(int, flags))
        self.watchdog.beat(self.progress.step, self.progress.epoch)
        if table[:, 2].any():
            text = f"{type(self._error).__name__}: {self._error}" if self._error else ""
            texts = self.backend.gather_json([text, isinstance(self._error, UsageError)])
            if self._error is not None:
                raise self._error
            rank, (text, usage) = next((rank, each) for rank, each in enumerate(texts) if each[0])
            raise (UsageError if usage else PeerError)(f"rank {rank} failed: {text}")
        self.next_steps = int(table[:, 0].sum())
        ended = int(table[:, 1].sum())
        reason, step = self._saves.pop(0) if ended else ("", 0)
        self.saved = reason if ended == _WRITTEN else ""
        if self.saved:
            self.saved_path = self.directory / "checkpoints" / f"step-{step:08d}"
            self.newest_checkpoint = self.saved_path.name
        columns = (bool(column.any()) for column in table[:, 3:].T)
        saves, saves_on_stop, self.saves_wait, self.checks, stops, signalled, keeps, self.regrouping, holds = columns
        self.stopping = stops or signalled
        self.keeping = keeps or self.regrouping
        self.saving = saves or ((self.stopping or self.at_end) and saves_on_stop)
        self.holding = holds and not self.saving
        if self.stopping:
            self.status = "preempted" if signalled else "stopped"

    def timed(self, train: Callable[..., tuple[int, int, np.ndarray]], *position: Any) -> tuple[int, int, np.ndarray]:
        """Makes the next call."""
        laps = self.step.phase_marker.laps
        doing = self.step.phase_marker.doing if self._calls else "the first call: tracing, compiling and running it"
        before, begun = laps(), time.perf_counter()
        with self.watchdog.phase(doing), self.stopwatch.at("other" if self._calls else COMPILING):
            fault_injection.reached("call", self.backend.rank, self.progress.step)
            done = train(*position, self.next_steps)
        self._call_seconds = time.perf_counter() - begun
        if self._calls:
            self.stopwatch.give({part: seconds - before[part] for part, seconds in laps().items()})
        return done

    def count(self, steps: int, totals: np.ndarray) -> None:
        """Takes in what the call has done."""
        seconds = self._call_seconds
        examples = int(totals[EXAMPLES])
        self.progress.step += steps
        self.progress.step_in_epoch += steps
        self.progress.examples += examples
        self.epoch_totals = self.epoch_totals + totals
        self.pace.record(steps, seconds)
        self.stopwatch.count(steps, examples)
        if self._calls == 1:
            self._examples, self._seconds = 0, 0.0
        self._calls += 1
        self._examples, self._seconds = self._examples + examples, self._seconds + seconds

    def evaluation_due(self, epoch_ends: bool) -> bool:
        """Whether the evaluation data is to be seen now."""
        every, step = self.options["eval_every"], self.progress.step
        if self.step.data.eval is None or every == "never" or self.evaluated_at == step:
            return False
        last = self.at_last_step or (epoch_ends and self.plan.in_last_epoch)
        return last or (epoch_ends if every == "epoch" else step % every == 0)

    def evaluated(self, totals: np.ndarray) -> None:
        """Takes in the totals of an evaluation."""
        if not totals[SUMS + 1]:
            warnings.warn(
                "the weights of all evaluation examples sum to zero, so that their means are nan: look at the "
                '"weight" that compute() returns',
                stacklevel=2,
            )
        self.eval_metrics = self.step.evaluation.means(totals)
        self.evaluated_at = self.progress.step

    def means(self, totals: np.ndarray) -> dict[str, float]:
        """The metrics of some steps: the means of their totals, and what the gauges say now."""
        return self.step.means(totals) | {name: float(gauge()) for name, gauge in self.gauges.items()}

    def metric_names(self) -> list[str]:
        """The metrics that the epochs of this run will have; known before the first step, and once gauges are set."""
        names = [*self.step.metric_names(), *self.gauges]
        if self.step.data.eval is not None and self.options["eval_every"] != "never":
            names += self.step.evaluation.metric_names()
        return names

    def close_epoch(self) -> dict[str, float]:
        """Adds the epoch's row to the history; returns its metrics and those of the last evaluation.

        Raises:
            TrainingError: the epoch had no examples.
        """
        if not self.progress.step_in_epoch and self.options["drop_remainder"]:
            raise UsageError(
                f"drop_remainder with batch_size={self.options['batch_size']} leaves nothing of the data: make the "
                "batch smaller, or keep the remainder"
            )
        if not self.progress.step_in_epoch:
            raise TrainingError(f"epoch {self.progress.epoch + 1} had no examples: the data has run dry")
        metrics = {**self.means(self.epoch_totals), **self.eval_metrics}
        # A loss scale that can still be halved has only not been found yet.
        searching = metrics.get("loss_scale", 0.0) > SMALLEST
        nothing, skipped = not self.epoch_totals[SUMS + 1], int(self.epoch_totals[SKIPPED])
        if nothing and skipped and not searching:
            raise TrainingError(
                f"epoch {self.progress.epoch + 1}: all {skipped} steps were skipped, because "
                "the loss or its gradient was not finite: nothing was trained. Lower the learning rate, or look for "
                "bad values in the data"
            )
        if nothing and not skipped:
            raise UsageError(
                f"epoch {self.progress.epoch + 1}: the weights of all examples sum to zero, so that nothing was "
                'trained: look at the "weight" that compute() returns'
            )
        done = self.progress
        row = {"epoch": done.epoch + 1, "step": done.step, "examples": done.examples, **metrics}
        # An epoch that was cut short by the end of a run, and goes on in a longer one, has one row.
        while self.history and self.history[-1]["epoch"] >= row["epoch"]:
            self.history.pop()
        self.history.append(row)
        return metrics

    def next_epoch(self) -> None:
        """Takes the position to the start of the next epoch."""
        # Here, and not only where a checkpoint is written: when that is may depend on the clock.
        self.step.average_statistics()
        self.progress.epoch += 1
        self.progress.step_in_epoch = 0
        with self.stopwatch.at("data"):
            self.handle = self.step.data.train.next_epoch(self.handle)
        self.epoch_totals = np.zeros(())

    def enter_phase(self, found: Assembled) -> None:
        """Goes to the next phase, with what the task has made for it. What was of the one before is dropped."""
        self.plan.advance()
        self.built, self.optimizer, self.phase_options = found.built, found.built.optimizer, found.options
        self.learning_rates = variables.learning_rates(self.optimizer)
        self.model_variables.append(variables.model_variables(self.model))
        self.random_state = self.stream_state = None
        self.eval_metrics, self.epoch_totals = {}, np.zeros(())
        self.epoch_ends = False
        every = self.options["steps_per_call"]
        self.pace, self.eval_pace, self._calls = Pace(every), Pace(every), 0

    @property
    def epoch_closed(self) -> bool:
        """Whether the history has a row of the epoch, or of what has been made of it, or nothing was."""
        closed = bool(self.history) and self.history[-1]["step"] == self.progress.step
        return closed or not self.progress.step_in_epoch

    def save_checkpoint(self) -> None:
        """Takes the snapshot that the workers have agreed on, and lets the chief write it; see `saved`."""
        reason = self._save_reason or self._hold_reason or self.stop_reason or ("end" if self.at_end else "signal")
        self._save_reason, self._save_at_once = "", False
        with self.watchdog.phase("saving"), self.stopwatch.at("saving"):
            held, self._held = self._held, None
            if self.checks:
                self.check_replicas()
            snapshot = self._snapshot(reason)
            pending = [each for each in (held, snapshot) if each is not None]
            self._saves += [(each.reason, each.step) for each in pending]
            if self.backend.is_chief and pending:
                self.writer.write(self.directory / "checkpoints", pending)

    def hold_checkpoint(self) -> None:
        """Takes the snapshot that the workers have agreed on, to be written before the next checkpoint."""
        with self.watchdog.phase("saving"), self.stopwatch.at("saving"):
            self._held = None  # memory holds one
            self._held = self._snapshot(self._hold_reason)

    def _snapshot(self, reason: str) -> Snapshot | None:
        """The state of this boundary; None on all workers, where one of them has failed."""
        self._hold_reason = ""
        self.step.average_statistics()
        own = None
        with self.defer_errors():  # others wait for this worker in what follows
            fault_injection.reached("save", self.backend.rank, self.progress.step)
            own = state.own(self)
        workers = self.backend.gather_json(own)
        streams = state.streams(self)
        if not all(workers):
            return None
        if not self.backend.is_chief:
            return Snapshot(reason, self.progress.step)
        tensors, rest = state.snapshot(self)
        rest |= state.history_of(self) | {"workers": workers}
        if self.best is not None:
            rest["best"] = self.best
        return Snapshot(reason, self.progress.step, tensors | streams, rest)

    def close_writer(self) -> None:
        """Writes what is held in memory, waits for all writes, and ends the thread."""
        held, self._held = self._held, None
        if held is not None and self.backend.is_chief:
            self.writer.write(self.directory / "checkpoints", [held])
        self.writer.close()

    def keep(self) -> None:
        """Takes a snapshot, for the workers of an elastic job to go on from: see `Member`. All workers call it.

        The next one is due when this one has cost less than a hundredth of the time: what it took, and what the next
        step will to copy the variables that it changes.
        """
        begun = time.monotonic()
        with self.watchdog.phase("keeping a snapshot"), self.stopwatch.at("saving"):
            self.step.average_statistics()
            own = None
            with self.defer_errors():  # others wait for this worker in what follows
                own = state.own(self)
            workers = self.backend.gather_json(own)
            streams = state.streams(self)
            if not all(workers):
                return
            tensors, rest = state.snapshot(self)
            rest |= {"history": jsonable(self.history), "workers": workers}
            assert self.backend.member is not None  # or nobody would have asked for it
            self.backend.member.kept = Kept(self.directory, tensors | streams, rest)
        now, size = time.monotonic(), sum(each.nbytes for each in arrays(tensors).values())
        self._keeps += 1
        if self._keeps > 1:  # the first one is traced
            self._keep_at = now + 100 * (now - begun + size / COPIED_PER_SECOND)

    @property
    def saves_under_way(self) -> int:
        """How many checkpoints have been asked for whose end hasn't been agreed on; the same on all workers."""
        return len(self._saves)

    def wait_for_saves(self) -> None:
        """Waits until the checkpoint that is being written is complete, or has failed."""
        with self.watchdog.phase("saving"), self.stopwatch.at("saving"):
            self.writer.wait()

    def check_saves(self) -> None:
        """Raises the error of a checkpoint of which nobody has heard yet."""
        for error in filter(None, self.writer.outcomes()):
            raise error

    def discard(self, paths: list[Path]) -> None:
        """Removes checkpoints, without waiting for it."""
        for path in paths:
            self.writer.remove(path)

    def _save_ended(self) -> int:
        """How the oldest write that nobody has heard of came out: 0 if there is none."""
        if not self.writer.outcomes():
            return 0
        error = self.writer.outcomes().popleft()
        if error is None:
            return _WRITTEN
        if self.save_must_succeed:
            self.fail(error)
        else:
            tell(f"warning: a checkpoint could not be written ({error}); training goes on")
        return _FAILED

    def open_data(self) -> None:
        """Opens the training data where the run stands.

        Raises:
            UsageError: the data pipeline isn't the one whose position was saved.
        """
        done, source = self.progress, self.step.data.train
        position = done.epoch - self.plan.place.epoch, done.step_in_epoch  # a phase has a stream of its own
        if any(position) and source.steps_per_epoch is None and self.stream_state is None:
            self._tell("the checkpoint has no state of the data pipeline: reading up to where the run was")
        if source.steps_per_epoch is not None and done.step_in_epoch > source.steps_per_epoch:
            raise UsageError(
                f"the checkpoint stands at step {done.step_in_epoch:,} of an epoch, and train_data() has "
                f"{source.steps_per_epoch:,} in one: give the data that the run had, or start a new run"
            )
        try:
            self.handle = source.start(*position, self.stream_state)
        except tf.errors.OpError as error:
            if not self.options["accept_changes"]:
                raise UsageError(
                    f"train_data() isn't the pipeline whose position the checkpoint has ({error.message}): give the "
                    "old one, or read up to the position in the new one with accept_changes=True (--accept-changes)"
                ) from None
            self.handle = source.start(*position)
        if self.random_state is not None:  # only now: a pipeline that was read up to here has drawn, too
            set_random_state(self.random_state)
        if reason := source.unsaved(self.handle):
            self._tell(
                f"the data pipeline's position can't be saved ({reason.rstrip('.')}): a resumed run will read up to "
                "where it was"
            )

    def _tell(self, text: str) -> None:
        if self.backend.is_chief:
            with contextlib.suppress(OSError):  # a terminal that is gone
                tell(f"note: {text}")

    def keep_bad_step(self, names: list[str], skipped: bool) -> str:
        """Writes what a step that wasn't finite was made from, for `tfloop replay`. All workers must call it.

        Args:
            names: what wasn't finite.
            skipped: whether the step counts as made.

        Returns:
            What to tell about it.
        """
        done, directory = self.progress, self.directory / "bad"
        step, in_epoch = done.step - skipped, done.step_in_epoch - skipped
        alike = self.step.data.train.layout is None  # the chief's worker has read what all have
        enough = not self.backend.is_chief or len(checkpoint_files.complete(directory)) >= MOST_BAD_STEPS
        if alike and enough:
            return ""
        batch = state.packed(self.step.bad_batch(done.epoch, in_epoch), None if alike else self.backend)
        if enough:
            return ""
        bad = {"step": step + 1, "epoch": done.epoch, "step_in_epoch": in_epoch, "names": names}
        try:
            self.check_directory()
            tensors, rest = state.snapshot(self)
            path = checkpoint_files.write(directory, step + 1, arrays(tensors) | batch, rest | {"bad": bad})
        except Exception as error:  # it is bad enough without
            return f"what it was made from could not be kept ({error})"
        return f"what it was made from is kept: `tfloop replay {path}` shows it"

    def weights_sha256(self) -> str:
        """The hash of the model's variables, in order; see `fingerprint`."""
        return fingerprint(*(self.backend.local_values(each)[0] for each in variables.model_variables(self.model)))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within it, a signal that stops a command ends the run politely at the next boundary; a second one at once.

        SIGUSR1 asks for a checkpoint. A launcher of ours hands on what it hears, and ends this process itself at a
        second signal: what comes twice here may have been sent once, to all processes of a service or a Slurm step.
        """

        def save(number: int, frame: Any) -> None:
            self._save_at_once = True
            self.save("SIGUSR1")

        def hear(number: int, frame: Any) -> None:
            self._signals += 1

        stops, wishes = signals.stops(), signals.Wishes()

        def heard(number: int) -> None:
            if number not in stops or os.environ.get(LAUNCHER) == str(os.getppid()):
                return
            before = wishes.count
            if wishes.hear(number) > 1:
                signals.die(number)
            if not before and self.backend.is_chief:
                self._announce_stop()

        if threading.current_thread() is not threading.main_thread():  # which alone can hear them
            yield
            return
        with signals.handled(dict.fromkeys(stops, hear) | {signal.SIGUSR1: save}), signals.watched(heard):
            mark_state("trains")
            yield

    def _announce_stop(self) -> None:
        """Says at once what a signal does: the boundary at which it is done may be far."""
        text = signals.STOPPING if self.save_on_stop else STOPPING_UNSAVED
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a terminal that is gone, or closed
            start = "\r\x1b[K" if sys.stderr.isatty() else ""  # over the bar
            print(f"{start}{text}", file=sys.stderr, flush=True)

    def write_status(self, status: str) -> None:
        """Writes `run.json` (chief only). A life that was refused before it began leaves there what is told."""
        if not self.backend.is_chief:
            return
        self.check_directory()
        path = self.directory / "run.json"
        about = {} if self.begun else read_json(path)
        if about and about.get("status") != "running":
            return
        about = about or {**redact(self.info), "progress": dataclasses.asdict(self.progress)}
        if self.begun:
            about["checkpoint"] = self.newest_checkpoint
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(path, {**about, "status": status, "updated": now, "pid": os.getpid()})
