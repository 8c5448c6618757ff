"""Run: the state of one training run, what a callback is handed, and how its workers agree."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from callbacks.redact import redact
from loop import build, checkpoint, state
from loop.backends.base import Backend, fingerprint
from loop.errors import PeerError, TrainingError, UsageError
from loop.pace import Pace
from loop.state import Progress, plain
from loop.step import EXAMPLES, SKIPPED, SUMS, Step
from loop.task import TrainTask, hyperparameters, target_of

COUNTERS = ("epoch", "step", "examples")
"""The entries of a row of the history that are no metrics."""

KEPT = (
    "batch_size", "seed", "shuffle", "drop_remainder", "precision", "accumulate", "clip_norm", "clip_value",
    "on_nonfinite", "sync_batch_norm", "ema",
)  # fmt: skip
"""The options that a resumed run must keep: with others it would be a different run."""


class Run:
    """One training run. The public names are those that `callbacks.Run` promises to callbacks."""

    def __init__(
        self, task: TrainTask, backend: Backend, options: dict[str, Any], built: build.Built, directory: Path
    ) -> None:
        self.task, self.backend, self.options, self.directory = task, backend, options, directory
        self.built, self.model, self.optimizer = built, built.model, built.optimizer
        self.progress = Progress()
        self.history: list[dict[str, float]] = []
        self.save_on_stop = self.check_on_save = False
        self.step: Step
        self.callbacks: dict[str, Any] = {}
        self.pace = Pace(options["steps_per_call"])
        self.epoch_totals = np.zeros(())
        self.eval_metrics: dict[str, float] = {}
        self.next_steps = 1
        self.saving = self.stopping = False
        self.status = "finished"
        self._save_reason = self.stop_reason = ""
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
    def total_steps(self) -> int | None:
        """The step at which the run ends, or None where the data has no known length."""
        per_epoch = self.step.data.train.steps_per_epoch
        return self.options["steps"] or (per_epoch and per_epoch * self.options["epochs"])

    @property
    def examples_per_second(self) -> float:
        """Examples trained on in this process, by the time that the compiled calls took.

        The first call, which is traced and compiled, doesn't count, unless there was no other.
        """
        return self._examples / self._seconds if self._seconds else 0.0

    @property
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
            "parameters": build.parameters(self.model),
            "backend": self.backend.name,
            "workers": self.backend.workers,
            "replicas": self.backend.replicas,
            "versions": versions,
        }

    def stop(self, reason: str) -> None:
        """Asks all workers to end the run at the next boundary between calls."""
        self.stop_reason = self.stop_reason or reason

    def save(self, reason: str) -> None:
        """Asks for a checkpoint at the next boundary between calls."""
        self._save_reason = self._save_reason or reason

    def checkpoints(self) -> list[Path]:
        """The checkpoints of this run, oldest first."""
        return checkpoint.complete(self.directory / "checkpoints")

    def fingerprints(self) -> dict[int, list[str]]:
        """A hash of each of `variables` in each replica. All workers must call it."""
        return self.backend.fingerprints(self.variables)

    def check_replicas(self) -> None:
        """Compares all variables across all replicas. All workers must call it, and all raise the same error.

        Raises:
            TrainingError: one isn't the same everywhere; which, and where.
        """
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

    # What the loop uses

    @property
    def at_last_step(self) -> bool:
        """Whether the number of steps that was asked for has been made."""
        return self.options["steps"] is not None and self.progress.step >= self.options["steps"]

    @property
    def at_end(self) -> bool:
        """Whether all steps, or all epochs, have been made."""
        return self.at_last_step or (self.options["steps"] is None and self.progress.epoch >= self.options["epochs"])

    @property
    def failing(self) -> bool:
        """Whether this worker has an error that the others have not heard of."""
        return self._error is not None

    def fail(self, error: BaseException) -> None:
        """Keeps an error of this worker until all workers can hear of it; the first one counts."""
        self._error = self._error or error

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Keeps an error that may be this worker's alone until `agree`: the others would wait for it for ever."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def agree(self, boundary: int | None = None) -> None:
        """All workers hear of each other's errors, signals and wishes, and take the chief's length of the next call.

        Args:
            boundary: how many steps the next call may have at most.

        Raises:
            Exception: this worker's error, or a `PeerError` that names the rank and error of another.
        """
        wanted = self.pace.steps if boundary is None else min(self.pace.steps, boundary)
        stops, signalled = bool(self.stop_reason), self._signals > 0
        flags = (self.failing, bool(self._save_reason), self.save_on_stop, stops, signalled)
        table = self.backend.exchange(wanted if self.backend.is_chief else 0, *map(int, flags))
        if table[:, 1].any():
            text = f"{type(self._error).__name__}: {self._error}" if self._error else ""
            texts = self.backend.gather_json([text, isinstance(self._error, UsageError)])
            if self._error is not None:
                raise self._error
            rank, (text, usage) = next((rank, each) for rank, each in enumerate(texts) if each[0])
            raise (UsageError if usage else PeerError)(f"rank {rank} failed: {text}")
        self.next_steps = int(table[:, 0].sum())
        _, _, saves, saves_on_stop, stops, signalled = (bool(column.any()) for column in table.T)
        self.stopping = stops or signalled
        self.saving = saves or (self.stopping and saves_on_stop)
        if self.stopping:
            self.status = "preempted" if signalled else "stopped"

    def count(self, steps: int, totals: np.ndarray, seconds: float) -> None:
        """Takes in what a compiled call did."""
        examples = int(totals[EXAMPLES])
        self.progress.step += steps
        self.progress.step_in_epoch += steps
        self.progress.examples += examples
        self.epoch_totals = self.epoch_totals + totals
        self.pace.record(steps, seconds)
        if self._calls == 1:
            self._examples, self._seconds = 0, 0.0
        self._calls += 1
        self._examples, self._seconds = self._examples + examples, self._seconds + seconds

    def evaluation_due(self, epoch_ends: bool) -> bool:
        """Whether the evaluation data is to be seen now."""
        every, step = self.options["eval_every"], self.progress.step
        if self.step.data.eval is None or every == "never" or self.evaluated_at == step:
            return False
        last_epoch = self.options["steps"] is None and self.progress.epoch + 1 == self.options["epochs"]
        last = self.at_last_step or (epoch_ends and last_epoch)
        return last or (epoch_ends if every == "epoch" else step % every == 0)

    def evaluated(self, totals: np.ndarray) -> None:
        """Takes in the totals of an evaluation."""
        if not totals[SUMS + 1]:
            warnings.warn(
                "the weights of all evaluation examples sum to zero, so that their means are nan: look at the "
                '"weight" that compute() returns',
                stacklevel=2,
            )
        self.eval_metrics = self.step.eval_means(totals)
        self.evaluated_at = self.progress.step

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
        if not self.epoch_totals[SUMS + 1] and self.epoch_totals[SKIPPED]:
            raise TrainingError(
                f"epoch {self.progress.epoch + 1}: all {int(self.epoch_totals[SKIPPED])} steps were skipped, because "
                "the loss or its gradient was not finite: nothing was trained. Lower the learning rate, or look for "
                "bad values in the data"
            )
        if not self.epoch_totals[SUMS + 1]:
            raise UsageError(
                f"epoch {self.progress.epoch + 1}: the weights of all examples sum to zero, so that nothing was "
                'trained: look at the "weight" that compute() returns'
            )
        metrics = {**self.step.means(self.epoch_totals), **self.eval_metrics}
        done = self.progress
        row = {"epoch": done.epoch + 1, "step": done.step, "examples": done.examples, **metrics}
        # An epoch that was cut short by the end of a run, and goes on in a longer one, has one row.
        self.history = [old for old in self.history if old["epoch"] != row["epoch"]] + [row]
        return metrics

    def next_epoch(self) -> None:
        """Takes the position to the start of the next epoch."""
        self.progress.epoch += 1
        self.progress.step_in_epoch = 0
        self.epoch_totals = np.zeros(())

    def write_checkpoint(self) -> str:
        """Writes the checkpoint that the workers have agreed on (chief only); returns why."""
        reason, self._save_reason = self._save_reason or self.stop_reason or "signal", ""
        if self.check_on_save:
            self.check_replicas()
        self.step.average_statistics()
        if self.backend.is_chief:
            checkpoint.write(self.directory / "checkpoints", self.progress.step, *state.snapshot(self))
        return reason

    def weights_sha256(self) -> str:
        """The hash of the model's variables, in order; see `fingerprint`."""
        return fingerprint(*(self.backend.local_values(each)[0] for each in build.model_variables(self.model)))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within it, SIGTERM and SIGINT end the run politely at the next boundary; a second one at once."""

        def hear(number: int, frame: Any) -> None:
            self._signals += 1
            for each in heard:  # the next one is deadly
                signal.signal(each, signal.SIG_DFL)

        heard = (signal.SIGTERM, signal.SIGINT)
        try:
            before = [signal.signal(number, hear) for number in heard]
        except ValueError:  # not the main thread: signals are somebody else's business
            yield
            return
        try:
            yield
        finally:
            for number, handler in zip(heard, before, strict=True):
                signal.signal(number, handler)

    def write_status(self, status: str) -> None:
        """Writes `run.json` (chief only)."""
        if self.backend.is_chief:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            about = {
                "status": status,
                "updated": now,
                "pid": os.getpid(),
                "progress": dataclasses.asdict(self.progress),
            }
            checkpoint.write_json(self.directory / "run.json", {**redact(self.info), **about})
