"""Runs the trials of a sweep: several at once, each of them once."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from callbacks import pruning
from callbacks.files import appending
from callbacks.run_record import journal
from callbacks.run_record.redaction import mask, redact
from loop.checkpoint.lock import locked
from loop.commands import command_line, tracking
from loop.commands.sweep.directory import about_sweep, begin, journal_line, write_about
from loop.commands.sweep.plan import Plan, Range, space
from loop.commands.sweep.process import TrialProcess, trial_directory
from loop.commands.sweep.report import Report, set_options
from loop.commands.sweep.study import Study, naming_full_disk, typed_values
from loop.commands.sweep.table import Table
from loop.commands.trial import reason
from loop.errors import PREEMPTED, UsageError
from loop.launch import signals, warm_start
from loop.run import trust

if TYPE_CHECKING:
    from optuna.trial import Trial

COMMAND = [*warm_start.COMMAND, "train"]
_STOPPED = (PREEMPTED, 130, -signal.SIGTERM, -signal.SIGINT)  # exit codes of a trial that was stopped


def sweep(
    plan: Plan, kind: type, trials: int, jobs: int = 1, directory: Path | None = None, stream: TextIO | None = None
) -> Report:
    """Runs the trials that have not ended, several at the same time; `trials` counts those that have ended, too.

    SIGTERM or SIGINT asks the trials that run to save and end. A second one ends them at once. Without a directory, it
    is `Plan.directory`. The trials are shown on stderr, unless another stream is given.

    Raises:
        UsageError: the task has no such fields; the directory has another sweep, or is in use; or the trials have no
            such metric.
    """
    fields = space(kind, plan)  # first: a plan that is refused leaves no directory behind
    where = (directory or plan.directory).resolve()
    about = about_sweep(plan, kind, trials)
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the directory of the sweep {where} can't be made ({error.strerror})") from None
    with locked(where):
        begin(where, about)
        # Only now: a directory of another sweep was refused before. The same plan that `run.json` has, for `reopened`.
        trust.note(where, plan.target, redact(about)["sweep"])
        with naming_full_disk(where):
            return _Trials(where, plan, about, fields, jobs, stream or sys.stderr).run()


class _Trials:
    """The trials of a sweep, while this process runs them."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        about: dict[str, Any],
        fields: Mapping[str, list[str] | Range],
        jobs: int,
        stream: TextIO,
    ) -> None:
        self._directory = directory
        self._plan = plan
        self._about = about
        self._jobs = jobs
        self._study = Study(directory, plan, fields, about["trials"])
        self._underway: list[TrialProcess] = []
        self._signals = 0
        self._table = Table(fields, plan.metric, about["trials"], stream)

    def run(self) -> Report:
        """Runs all trials, or stops when asked to."""
        options = {}
        for text in self._plan.arguments:
            name, _, value = text.partition("=")
            options[name] = value
        tracker = tracking.tracker(options.get("--track"), float(options.get("--track-wait", 60)))
        run: Any = types.SimpleNamespace(directory=self._directory, info=self._about)  # all that the tracker asks for
        status = "failed"
        # Trials have their temporary files in here, so that a trial that is killed leaves none behind.
        with self._listening(), signals.temporary_directory("tfloop-sweep-") as self._temporary:
            try:
                if tracker is not None:
                    tracker.on_fit_start(run)
                self._note()
                self._table.begin(self._directory, self._study.rows())
                self._run_all()
                report = Report(self._plan, self._directory, self._study.rows())
                if report.stopped:
                    status = "preempted"
                elif report.best:
                    status = "finished"
            finally:
                # Also after an error: no trial goes on without the sweep, and run.json has the status.
                for process in self._underway:
                    process.kill()
                self._table.close()
                write_about(self._directory, self._about | self._best(), status)
                if tracker is not None:
                    tracker.on_fit_end(run, status)
        return report

    def _best(self) -> dict[str, object]:
        """The best trial so far, as `run.json` has it."""
        best = Report(self._plan, self._directory, self._study.rows()).best
        if best is None:
            return {}
        name = Path(best.run_dir).name
        return {"best": {"trial": name, "params": best.params, "metric": self._plan.metric, "value": best.value}}

    def _run_all(self) -> None:
        has_said_stopping = False
        while True:
            self._start_trials()
            if not self._underway and (self._signals or not self._study.interrupted):
                return
            if self._signals and not has_said_stopping:
                has_said_stopping = True
                self._table.line("stopping: the trials under way save and end; a second signal ends them at once")
            for process in list(self._underway):
                self._look_at(process)
            # Trials that a killed sweep has left running end by themselves. Until then there may be nothing else to do.
            waiting = [f"waiting for what is left of trial {number}" for number in self._study.interrupted]
            self._table.doing(self._underway or waiting)
            time.sleep(0.1)

    def _start_trials(self) -> None:
        """Starts trials until `jobs` of them run."""
        while not self._signals and len(self._underway) < self._jobs:
            trial = self._study.next()
            if trial is None:
                return
            self._underway.append(TrialProcess(trial, self._directory, self._command(trial), self._temporary))

    def _look_at(self, process: TrialProcess) -> None:
        """Handles what a trial has done since the last look."""
        if self._signals:
            process.stop(at_once=self._signals > 1)
        ended = process.ended()  # before its journal is read: what it wrote last is then there
        self._hear(process)
        if ended:
            self._end(process)

    def _command(self, trial: Trial) -> list[str]:
        """The command of a trial, which begins it, or resumes it from its last checkpoint."""
        return [
            *COMMAND,
            self._plan.target,
            *self._plan.arguments,
            *set_options(self._plan.typed(typed_values(trial.params))),
            f"--run-dir={trial_directory(self._directory, trial.number)}",
            "--resume=auto",
            command_line.callback_option(pruning.Pruning),
        ]

    def _hear(self, process: TrialProcess) -> None:
        """Reports new measurements of a trial to Optuna, and asks the trial to end if Optuna prunes it."""
        process.hear(self._plan.metric)
        # One after the other: the pruner compares trials at the same number of measurements.
        while process.reported < len(process.values):
            process.trial.report(process.values[process.reported], process.reported)
            process.reported += 1
            if process.trial.should_prune():
                # A file, not a signal: it is still there if the sweep is killed now.
                (process.directory / pruning.NAME).touch()

    def _end(self, process: TrialProcess) -> None:
        """Stores how a trial has ended, and shows it."""
        self._underway.remove(process)
        code = process.process.returncode
        number = process.trial.number
        for line in process.printed().splitlines():
            if line.startswith("warning: "):
                self._table.line(f"trial {number}: {line}")
        if code == -signal.SIGKILL:
            time.sleep(1.0)  # if all processes are being killed, this one ends now, and the trial hasn't failed
        if self._signals > 1 or code in _STOPPED:
            return  # the next start of the sweep goes on with it

        pruned = not code and (process.directory / pruning.NAME).exists() and process.status() == "stopped"
        problem = "" if pruned else self._problem(process)
        if problem:
            process.trial.set_user_attr("problem", mask(problem))
        value = None if pruned or problem else process.values[-1]
        # First the storage: a kill after this line loses no trial, and `_note` can write its line later.
        self._study.end(number, value, pruned)
        self._note()
        self._table.row(self._study.rows()[number])

    def _problem(self, process: TrialProcess) -> str:
        """Why a trial that has ended has no value; "": it has one."""
        if code := process.process.returncode:
            return reason(code, process.printed())
        if not process.values:
            raise process.unknown(self._plan.metric)
        last = process.values[-1]
        return "" if math.isfinite(last) else f"{self._plan.metric} is {last}"

    def _note(self) -> None:
        """Writes the best value so far into the sweep's journal; its step is the number of trials that have ended."""
        report = Report(self._plan, self._directory, self._study.rows())
        ended = sum(row.has_ended for row in report.rows)
        path = self._directory / journal.NAME
        # Steps must grow from line to line: the delivery to MLflow passes over all others.
        noted = max((entry["step"] for entry, _ in journal.read(path)), default=0)
        if report.best is not None and ended > noted:
            line = journal_line(ended, "eval_end", metrics={f"best_{self._plan.metric}": report.best.value})
            with appending(path) as file:
                file.write(line.encode())

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Within it, a signal asks the trials to save and end, a second one kills them, and a third ends the sweep."""
        wishes = signals.Wishes()

        def hear(number: int, frame: object) -> None:
            self._signals = wishes.hear(number)
            if self._signals > 2:  # whatever it waits for
                signals.die(number)

        with signals.handled(dict.fromkeys(signals.stops(), hear)):
            yield
