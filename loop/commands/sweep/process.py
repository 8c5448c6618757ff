"""TrialProcess: a trial that runs, in a process of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.files import appending, make_directory, opened, read_json, reading
from callbacks.nearest import nearest
from callbacks.run_record import journal
from loop.checkpoint.lock import NAME as LOCK
from loop.errors import UsageError
from loop.launch import warm_start
from loop.launch.environment import LAUNCHER

if TYPE_CHECKING:
    from optuna.trial import Trial


class TrialProcess:
    """A trial that runs, and what its journal has reported so far.

    Attributes:
        values: all measurements of the metric. Steps that a resumed run has made again count once.
        reported: how many of the measurements Optuna knows.
    """

    def __init__(self, trial: Trial, sweep_directory: Path, command: list[str], temporary: str) -> None:
        self.trial = trial
        self.directory = trial_directory(sweep_directory, trial.number)
        make_directory(self.directory)
        self.values: list[float] = []
        # The journal is read from its beginning, and Optuna has some of a resumed trial's measurements already.
        self.reported = len(trial.storage.get_trial(trial._trial_id).intermediate_values)
        self._names: dict[str, None] = {}
        self._step = 0
        self._total: int | None = None
        self._measured = -1  # the step of the last measurement
        self._offset = 0  # in the journal
        self._asked_to_stop = False
        self._log = self.directory / "output.log"
        # An earlier attempt may have written into the same file.
        with appending(self._log) as log:
            self._printed = log.tell()
        # A session of its own: Ctrl-C at the terminal reaches only the sweep, which passes it on.
        environment = {**os.environ, LAUNCHER: str(os.getpid()), "TMPDIR": temporary}
        self.process = warm_start.start(command, environment, self._log, self._log)

    def hear(self, metric: str) -> None:
        """Reads what is new in the journal.

        Raises:
            UsageError: the run has no such metric.
        """
        of_metric = "eval_end" if metric.startswith("eval_") else "epoch_end"
        for entry, offset in journal.read(self.directory / journal.NAME, self._offset):
            self._offset = offset
            event = entry.get("event")
            step = entry.get("step", 0)
            metrics = entry.get("metrics", {})
            self._step = max(self._step, step)
            self._total = entry.get("total_steps", self._total)
            if event in ("eval_end", "epoch_end"):
                self._check_name(metric, metrics)
            # A resumed run makes some steps again: each counts once.
            if event == of_metric and metric in metrics and step > self._measured:
                self._measured = step
                self.values.append(float(metrics[metric]))

    def _check_name(self, metric: str, metrics: Mapping[str, object]) -> None:
        """Refuses a metric that is missing among those of its kind: of training, or of the evaluation."""
        self._names |= dict.fromkeys(metrics)
        if metric in self._names:
            return
        # Metrics of the other kind alone refuse nothing: the first evaluation may come after some epochs.
        evaluated = metric.startswith("eval_")
        if any(name.startswith("eval_") == evaluated for name in metrics):
            raise self.unknown(metric)

    def unknown(self, metric: str) -> UsageError:
        """The error for a metric that the run doesn't have."""
        return UsageError(f"--metric {metric}: a trial has no such metric{nearest(metric, self._names)}")

    def ended(self) -> bool:
        """Whether it has ended. If so, the processes that it has started are killed."""
        if self.process.poll() is None:
            return False
        self.kill()  # what is left of its process group, such as readers of data
        return True

    def stop(self, at_once: bool) -> None:
        """Asks it to save and end; with `at_once`, kills it."""
        if at_once:
            self.kill()
        elif not self._asked_to_stop:  # a second SIGTERM would end it without saving
            self._asked_to_stop = True
            self.process.terminate()

    def kill(self) -> None:
        """Kills it, and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def status(self) -> str:
        """The status in its `run.json`."""
        return str(read_json(self.directory / "run.json").get("status", ""))

    def printed(self) -> str:
        """What it has printed since this object has started it."""
        with reading(self._log) as log:
            log.seek(self._printed)
            return log.read().decode(errors="replace")

    def __str__(self) -> str:
        of = f" of {self._total:,}" if self._total else ""
        return f"trial {self.trial.number} " + (f"at step {self._step:,}{of}" if self._step else "starts")


def trial_directory(directory: Path, number: int) -> Path:
    """The run directory of a trial."""
    return directory / f"trial-{number:03d}"


def in_use(directory: Path) -> bool:
    """Whether a process holds the lock of a run directory."""
    try:
        with os.fdopen(opened(directory / LOCK, os.O_RDWR), "r+b") as file:
            # Shared: a command that looks at the same moment must not take this for the run. Closing releases it.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or none can be taken there
        return False
    return False
