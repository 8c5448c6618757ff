"""`tfloop sweep`: trains a task with other values of its fields, several at once, and finds the best.

Each trial is `tfloop train` in a process of its own, and in a run directory of its own below the sweep's. What was
decided is in Optuna's storage there, what was trained in the runs, and what is shown in MLflow follows from their
journals: a kill at any moment loses nothing, and the same command goes on. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from callbacks import pruning
from callbacks.files import appending, check, make_directory, opened, read_json, reading, sqlite_uri, write_text
from callbacks.metric_direction import lower_is_better
from callbacks.run_record import journal
from callbacks.run_record.redaction import HIDDEN, is_secret, mask, redact, remember, shown, tell
from loop.checkpoint.lock import NAME as LOCK
from loop.checkpoint.lock import locked
from loop.commands import command_line, config, tracking
from loop.commands.tune import reason
from loop.errors import UsageError
from loop.launch import signals
from loop.launch.environment import LAUNCHER
from loop.options import nearest
from loop.run import trust
from loop.target.fields import set_fields, split

STORAGE = "study.db"
"""Optuna's storage, in the directory of the sweep."""
SAMPLERS, PRUNERS, DIRECTIONS = ("tpe", "random"), ("none", "median"), ("minimize", "maximize")
MOST_TRIALS = 100_000
_COMMAND = [sys.executable, "-P", "-m", "cli", "train"]
_LARGEST = 2**53  # a float can tell whole numbers apart up to it
_LOG_SECONDS = 60.0  # between two lines of a log that say what is under way


@dataclasses.dataclass(frozen=True)
class Range:
    """The values from `low` to `high`, drawn evenly, or evenly in their logarithm."""

    low: int | float
    high: int | float
    log: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be tried, and how.

    Attributes:
        target: the task.
        grid: by field, all values to be tried, as typed.
        random: by field, from what values are drawn, as typed: `16..256`, `1e-4..1e-1:log`, or `adam,sgd`.
        metric: what is to be best.
        direction: `minimize` or `maximize`.
        sampler: `tpe` or `random`.
        pruner: `median` or `none`.
        seed: of what is drawn.
        arguments: options of `tfloop train`.
        place: the directory in which the trials are started.
    """

    target: str
    grid: dict[str, str]
    random: dict[str, str]
    metric: str
    direction: str
    sampler: str
    pruner: str
    seed: int
    arguments: list[str]
    place: str

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("sampler", self.sampler, SAMPLERS), ("pruner", self.pruner, PRUNERS),
            ("direction", self.direction, DIRECTIONS),
        ):  # fmt: skip
            if value not in allowed:
                raise UsageError(f"--{option} {value}: there is no such {option}{nearest(value, allowed)}")
        if not self.grid and not self.random:
            raise UsageError("give what is to be tried: --grid FIELD=VALUE,VALUE or --random FIELD=LOW..HIGH")
        fixed = [each.partition("=")[0] for each in self.fixed]
        for one, other, twice in (
            ("--grid", "--random", set(self.grid) & set(self.random)),
            ("--set", "--grid or --random", set(fixed) & (set(self.grid) | set(self.random))),
        ):
            if twice:
                raise UsageError(f"{min(twice)} is in {one} and in {other}: leave one out")
        for name, values in (self.grid | self.random).items():
            remember(split(values), name)
            if is_secret(name) and ".." in self.random.get(name, ""):
                raise UsageError(f"--random {name}: a secret is not drawn from a range: give its values, {name}=A,B")

    @property
    def fixed(self) -> list[str]:
        """The fields that don't vary, as after `--set`."""
        return [each.removeprefix("--set=") for each in self.arguments if each.startswith("--set=")]

    def combination(self, number: int) -> dict[str, str]:
        """The values of the grid's fields that a trial has: all combinations, one after the other, and again."""
        found = {}
        for name, values in reversed(self.grid.items()):
            choices = split(values)
            number, place = divmod(number, len(choices))
            found[name] = stand_ins(name, choices)[place]
        return found

    def typed(self, params: Mapping[str, str]) -> dict[str, str]:
        """The values of a trial's fields as they were typed: see `stand_ins`."""
        found = dict(params)
        for name, values in (self.grid | self.random).items():
            if name in params and is_secret(name):
                choices = split(values)
                found[name] = choices[stand_ins(name, choices).index(params[name])]
        return found

    def trials(self, asked: int | None) -> int:
        """How many trials there are to be."""
        combinations = math.prod(len(split(values)) for values in self.grid.values())
        if asked is None and self.random:
            raise UsageError("--random draws for ever: give --trials N")
        trials = combinations if asked is None else asked
        if not 1 <= trials <= MOST_TRIALS:
            raise UsageError(f"--trials {trials}: give a whole number from 1 to {MOST_TRIALS:,}")
        if trials > combinations and not self.random:
            raise UsageError(f"--trials {trials}: the grid has only {combinations} combinations: leave --trials out")
        return trials

    def as_json(self) -> dict[str, Any]:
        """What is kept of it: without secrets."""
        tried = {"grid": self.grid, "random": self.random}
        without = {
            option: {name: ",".join(stand_ins(name, split(values))) for name, values in fields.items()}
            for option, fields in tried.items()
        }
        return dataclasses.asdict(self) | without | {"arguments": [mask(each) for each in self.arguments]}

    @property
    def directory(self) -> Path:
        """Where it is kept if nobody says: the same place for the same plan."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.target.rpartition(":")[2])[:80]
        digest = hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]
        return Path("runs") / f"sweep-{name}-{digest}"


def stand_ins(name: str, choices: Sequence[str]) -> list[str]:
    """What stands for the values of a field wherever they are stored or shown: for secrets, their numbers."""
    return [f"{HIDDEN}{number}" for number, _ in enumerate(choices, 1)] if is_secret(name) else list(choices)


def direction(metric: str, asked: str | None) -> str:
    """Which way the metric gets better: as asked for, or by its name."""
    less = lower_is_better(metric)
    if asked is None and less is None:
        raise UsageError(f"--metric {metric}: the name doesn't say what is better: check it, or give --direction")
    return asked or ("minimize" if less else "maximize")


def is_directory(target: str) -> bool:
    """Whether what was typed as TARGET is the directory of a sweep, to be gone on with."""
    with contextlib.suppress(OSError, ValueError):  # too long for a name, for example
        return Path(target).is_dir()
    return False


def reopened(directory: Path, trusted: bool = False) -> tuple[Plan, int]:
    """The plan of a sweep that was begun in this directory, and its number of trials; `trusted`: by anybody."""
    about = read_json(directory / "run.json")
    kept = about.get("sweep")
    try:
        plan, trials = Plan(**kept), int(about["trials"])  # type: ignore[arg-type]
    except (TypeError, KeyError, ValueError):
        raise UsageError(f"{directory} is no directory of a sweep: give a TARGET, file.py:Class for example") from None
    if HIDDEN in json.dumps(kept):
        raise UsageError(f"{directory} doesn't have the secrets of its command: give the whole command again")
    if not trusted and not trust.is_own_sweep(directory, kept):
        raise UsageError(
            f"{directory}: you haven't begun this sweep on this machine, and what it names isn't run unasked: give its "
            "command again with --sweep-dir, or --trust if that directory is yours"
        )
    if not Path(plan.place).is_dir():
        raise UsageError(f"{directory} was begun in {plan.place}, which isn't there any more: give the command again")
    return plan, trials


def arguments(
    typed: Mapping[str, Any],
    assignments: Sequence[str],
    files: Sequence[Path],
    options: Mapping[str, config.Option],
    swept: Sequence[str],
) -> list[str]:
    """What `train` is to be given for what was typed, and for what files say, but for the fields that vary."""
    given = [name.replace("_", "-") for name, value in typed.items() if value is not None]
    fields = [*(text.partition("=")[0] for text in assignments), *swept]
    from_files = config.arguments(files, options, [*given, *(f"set {name}" for name in fields)])
    return [*from_files, *command_line.arguments(typed, assignments)]


def assigned(option: str, texts: Sequence[str]) -> dict[str, str]:
    """What was typed as `--grid` or `--random`, by field."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name.isidentifier() or not all(split(values)):
            form = "lr=1e-3,1e-2" if option == "--grid" else "hidden=16..256, lr=1e-4..1e-1:log or act=relu,tanh"
            raise UsageError(f"{option} {text}: give a field and its values, such as {form}")
        if name in found:
            raise UsageError(f"{option} {text}: {name} is there twice: leave one out")
        found[name] = values
    return found


def space(kind: type, plan: Plan) -> dict[str, list[str] | Range]:
    """The values of each field that are tried, checked against the fields of the task's class.

    Raises:
        UsageError: there is no such field, or it can't have such a value.
    """
    found: dict[str, list[str] | Range] = {}
    set_fields(kind, plan.fixed)
    for name, text in (plan.grid | plan.random).items():
        option = "--grid" if name in plan.grid else "--random"
        span = re.fullmatch(r"(.+?)\.\.(.+?)(:log)?", text) if option == "--random" else None
        texts = list(span.groups()[:2]) if span else split(text)
        values = [set_fields(kind, [f"{name}={each}"], option)[name] for each in texts]
        if not span:
            for place, value in enumerate(values):
                if value in values[:place]:
                    twice, given = ("a value", HIDDEN) if is_secret(name) else (texts[place], text)
                    raise UsageError(f"{option} {name}={given}: {twice} is there twice: leave one out")
            found[name] = stand_ins(name, texts)
            continue
        low, high = values
        if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
            raise UsageError(f"{option} {name}={text}: the field is no number: give its values, such as {name}=a,b,c")
        if not (low < high and abs(low) <= _LARGEST and abs(high) <= _LARGEST):
            raise UsageError(f"{option} {name}={text}: give LOW..HIGH with LOW < HIGH, of {_LARGEST:.0e} at most")
        if span[3] and low <= 0:
            raise UsageError(f"{option} {name}={text}: a logarithm needs LOW > 0")
        whole = isinstance(low, int) and isinstance(high, int)
        found[name] = Range(low, high, bool(span[3])) if whole else Range(float(low), float(high), bool(span[3]))
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """A trial, as it is told.

    Attributes:
        number: from 0.
        state: `complete`, `pruned`, `failed`, `running` or `waiting`.
        params: the values of its fields, as texts for `--set`.
        value: of the metric, the last one; None where there is none.
        seconds: from its start to its end.
        problem: why it has failed, or "".
        run_dir: its run directory.
    """

    number: int
    state: str
    params: dict[str, str]
    value: float | None
    seconds: float | None
    problem: str
    run_dir: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `sweep` has come to.

    Attributes:
        plan: what was to be tried.
        directory: the sweep's.
        rows: all trials.
    """

    plan: Plan
    directory: Path
    rows: list[Row]

    @property
    def stopped(self) -> bool:
        """Whether there are trials that have not come to an end."""
        return any(row.state in ("running", "waiting") for row in self.rows)

    @property
    def best(self) -> Row | None:
        """The trial with the best value; None if none is complete."""
        sign = 1 if self.plan.direction == "minimize" else -1
        complete = [row for row in self.rows if row.state == "complete" and row.value is not None]
        return min(complete, key=lambda row: sign * (row.value or 0.0), default=None)

    def command(self, row: Row) -> list[str]:
        """What trains a trial again."""
        return ["tfloop", "train", self.plan.target, *self.plan.arguments, *_sets(row.params)]

    def lines(self) -> Iterator[str]:
        """The best trial, for people."""
        if (best := self.best) is None:
            yield "no trial has come to its end" if self.stopped else "no trial has come to an end that counts"
            return
        yield f"best: trial {best.number}, {self.plan.metric} {best.value:.6g}, in {_shown(Path(best.run_dir))}"
        yield mask(shlex.join(self.command(best)))

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        best = self.best
        return {
            "sweep_dir": str(self.directory), "metric": self.plan.metric, "direction": self.plan.direction,
            "trials": [dataclasses.asdict(row) for row in self.rows],
            "best": best and dataclasses.asdict(best) | {"command": [mask(each) for each in self.command(best)]},
        }  # fmt: skip


def sweep(
    plan: Plan,
    kind: type,
    trials: int,
    jobs: int = 1,
    directory: Path | None = None,
    stream: TextIO | None = None,
) -> Report:
    """Makes the trials that have not been made.

    SIGTERM and SIGINT have the trials under way save and end, a second one ends all at once.

    Args:
        plan: what to try.
        kind: the task's class.
        trials: how many there are to be, with those that were made before.
        jobs: how many are under way at once.
        directory: the sweep's; None: see `Plan.directory`.
        stream: where to show the trials; None: stderr.

    Raises:
        UsageError: the task has no such fields; the directory has another sweep, or is in use; or the trials have no
            such metric.
    """
    fields = space(kind, plan)
    place = (directory or plan.directory).resolve()
    about = _about(plan, kind, trials)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the directory of the sweep {place} can't be made ({error.strerror})") from None
    with locked(place):
        begin(place, about)
        trust.note(place, plan.target, redact(about)["sweep"])
        return _Sweep(place, plan, about, fields, jobs, stream or sys.stderr).run()


def begin(directory: Path, about: dict[str, Any]) -> None:
    """Writes what the directory is of, or compares it with what was written.

    To what delivers to MLflow it looks like a run's: `run.json` and a journal.
    """
    for name in ("run.json", journal.NAME, STORAGE):
        check(directory / name)
    kept, now = read_json(directory / "run.json").get("sweep"), about["sweep"]
    if kept is None:
        if found := [path.name for path in directory.iterdir() if path.name not in (LOCK, "run.json.tmp")]:
            raise UsageError(
                f"--sweep-dir {directory}: it holds {found[0]}, and no sweep: give a new directory, or an empty one"
            )
    elif changed := [name for name in now if kept.get(name) != now[name]]:
        name = changed[0]
        raise UsageError(
            f"{directory} is of another sweep: {name} was {kept.get(name)!r}, now {now[name]!r}: give another "
            "--sweep-dir, or what it was"
        )
    _write_about(directory, about, "running")
    path = directory / journal.NAME
    if not path.exists():
        write_text(path, _line(0, "fit_start"))
    elif journal.torn(path):
        with appending(path) as file:
            file.write(b"\n")


class _Sweep:
    """The trials of a sweep, in one life of it."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        about: dict[str, Any],
        fields: Mapping[str, list[str] | Range],
        jobs: int,
        stream: TextIO,
    ) -> None:
        self._directory, self._plan, self._about, self._fields, self._jobs = directory, plan, about, fields, jobs
        self._trials: int = about["trials"]
        self._study = _study(directory, plan)
        # The queue is Optuna's, so that no trial is begun twice. What is drawn is drawn when a trial begins.
        for number in range(len(self._study.get_trials(deepcopy=False)), self._trials):
            self._study.enqueue_trial(plan.combination(number))
        self._of_before = [row.number for row in self._rows() if row.state == "running"]
        self._underway: list[_Process] = []
        self._signals = 0
        self._table = _Table([*fields], plan.metric, self._trials, stream)

    def run(self) -> Report:
        """Makes all trials, or stops."""
        options = dict(each.partition("=")[::2] for each in self._plan.arguments)
        tracker = tracking.tracker(options.get("--track"), float(options.get("--track-wait", 60)))
        record: Any = types.SimpleNamespace(directory=self._directory, info=self._about)
        status = "failed"
        with self._listening(), signals.temporary_directory("tfloop-sweep-") as self._temporary:
            try:
                if tracker is not None:
                    tracker.on_fit_start(record)
                self._note()
                self._table.begin(self._directory, self._rows())
                self._make_all()
                found = Report(self._plan, self._directory, self._rows())
                status = "preempted" if found.stopped else "finished" if found.best else "failed"
            finally:
                for each in self._underway:
                    each.kill()
                self._table.close()
                _write_about(self._directory, self._about, status)
                if tracker is not None:
                    tracker.on_fit_end(record, status)
        return found

    def _make_all(self) -> None:
        told = False
        while True:
            while not self._signals and len(self._underway) < self._jobs and (trial := self._next()) is not None:
                self._underway.append(_Process(trial, self._directory, self._command(trial), self._temporary))
            if not self._underway and (self._signals or not self._of_before):
                return
            if self._signals and not told:
                told = True
                self._table.line("stopping: the trials under way save and end; a second signal ends them at once")
            for each in list(self._underway):
                if self._signals:
                    each.stop(at_once=self._signals > 1)
                ended = each.ended()
                self._hear(each)
                if ended:
                    self._end(each)
            waits = [] if self._underway else self._of_before
            self._table.doing([*self._underway, *(f"waiting for what is left of trial {number}" for number in waits)])
            time.sleep(0.1)

    def _rows(self) -> list[Row]:
        return [_row(trial, self._directory) for trial in self._study.get_trials(deepcopy=False)[: self._trials]]

    def _next(self) -> Any:
        """The trial to start next: one that was under way when the life before ended, or a new one."""
        from optuna.trial import Trial, TrialState

        # What a life before has left under way ends by itself, and saves, before it is gone on with.
        free = (number for number in self._of_before if not _in_use(_run_dir(self._directory, number)))
        if (number := next(free, None)) is not None:
            self._of_before.remove(number)
            self._sample(number)
            trial = Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)
        else:
            waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if not waiting or waiting[0].number >= self._trials:
                return None
            self._sample(waiting[0].number)
            trial = self._study.ask()
        for name, values in self._fields.items():
            _draw(trial, name, values)
        return trial

    def _sample(self, number: int) -> None:
        """What a trial draws is drawn from the seed and its number, in whatever life of the sweep."""
        from optuna.samplers import RandomSampler, TPESampler

        digest = hashlib.sha256(f"{self._plan.seed} {number}".encode()).digest()
        kind = TPESampler if self._plan.sampler == "tpe" else RandomSampler
        self._study.sampler = kind(seed=int.from_bytes(digest[:4], "big"))

    def _command(self, trial: Any) -> list[str]:
        own = [*_sets(self._plan.typed(_texts(trial.params))), f"--run-dir={_run_dir(self._directory, trial.number)}"]
        return [
            *_COMMAND,
            self._plan.target,
            *self._plan.arguments,
            *own,
            "--resume=auto",
            command_line.callback_option(pruning.Pruning),
        ]

    def _hear(self, each: _Process) -> None:
        """Takes in what the trial has come to, and ends it if it isn't worth going on with."""
        each.hear(self._plan.metric)
        while each.reported < len(each.values):
            each.trial.report(each.values[each.reported], each.reported)
            each.reported += 1
            if each.trial.should_prune():
                (each.directory / pruning.NAME).touch()

    def _end(self, each: _Process) -> None:
        """Takes in how a trial has ended."""
        from optuna.trial import TrialState

        self._underway.remove(each)
        code, values = each.process.returncode, each.values
        for line in each.printed().splitlines():
            if line.startswith("warning: "):
                self._table.line(f"trial {each.trial.number}: {line}")
        if code == -signal.SIGKILL:
            time.sleep(1.0)  # whoever kills all of us may have begun with the trial, which then has not failed
        if self._signals > 1 or code in (75, 130, -signal.SIGTERM, -signal.SIGINT):
            return  # stopped: another life goes on with it
        state, problem = TrialState.COMPLETE, ""
        if code:
            problem = reason(code, each.printed())
        elif (each.directory / pruning.NAME).exists() and each.status() == "stopped":
            state = TrialState.PRUNED
        elif not values:
            raise each.unknown(self._plan.metric)
        elif not math.isfinite(values[-1]):
            problem = f"{self._plan.metric} is {values[-1]}"
        if problem:
            state = TrialState.FAIL
            each.trial.set_user_attr("problem", mask(problem))
        self._study.tell(each.trial.number, values[-1] if state == TrialState.COMPLETE else None, state)
        self._note()
        self._table.row(self._rows()[each.trial.number])

    def _note(self) -> None:
        """Writes how good the best trial is, after how many, into the sweep's journal."""
        report = Report(self._plan, self._directory, self._rows())
        ended = sum(row.state not in ("running", "waiting") for row in report.rows)
        path = self._directory / journal.NAME
        noted = max((entry["step"] for entry, _ in journal.read(path)), default=0)
        if report.best is not None and ended > noted:
            line = _line(ended, "eval_end", metrics={f"best_{self._plan.metric}": report.best.value})
            with appending(path) as file:
                file.write(line.encode())

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Within it, a signal has the trials save and end, a second one kills them, and a third ends the sweep."""
        wishes = signals.Wishes()

        def hear(number: int, frame: Any) -> None:
            self._signals = wishes.hear(number)
            if self._signals > 2:  # whatever it waits for
                signals.die(number)

        with signals.handled(dict.fromkeys(signals.stops(), hear)):
            yield


class _Process:
    """A trial that is under way, and what its journal has told.

    Attributes:
        values: all measurements of the metric; steps that were made again count once.
        reported: how many of them Optuna knows.
    """

    def __init__(self, trial: Any, sweep_directory: Path, command: list[str], temporary: str) -> None:
        self.trial, self.directory = trial, _run_dir(sweep_directory, trial.number)
        make_directory(self.directory)
        self.values: list[float] = []
        self.reported = len(trial.storage.get_trial(trial._trial_id).intermediate_values)
        self._names: dict[str, None] = {}
        self._step, self._total, self._measured, self._offset = 0, None, -1, 0
        self._told = False
        self._log = self.directory / "output.log"
        with appending(self._log) as log:
            self._printed = log.tell()
            # A session of its own: Ctrl-C at the terminal reaches the sweep alone, which hands it on.
            self.process = subprocess.Popen(
                command, env={**os.environ, LAUNCHER: str(os.getpid()), "TMPDIR": temporary},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def hear(self, metric: str) -> None:
        """Reads on in the journal.

        Raises:
            UsageError: the run has no such metric.
        """
        evaluated = metric.startswith("eval_")
        for entry, offset in journal.read(self.directory / journal.NAME, self._offset):
            self._offset = offset
            event, step, metrics = entry.get("event"), entry.get("step", 0), entry.get("metrics", {})
            self._step, self._total = max(self._step, step), entry.get("total_steps", self._total)
            if event in ("eval_end", "epoch_end"):
                self._names |= dict.fromkeys(metrics)
                if metric not in self._names and any(name.startswith("eval_") == evaluated for name in metrics):
                    raise self.unknown(metric)
            if event == ("eval_end" if evaluated else "epoch_end") and metric in metrics and step > self._measured:
                self._measured = step
                self.values.append(float(metrics[metric]))

    def unknown(self, metric: str) -> UsageError:
        """What is said of a metric that the run doesn't have."""
        return UsageError(f"--metric {metric}: a trial has no such metric{nearest(metric, self._names)}")

    def ended(self) -> bool:
        """Whether it has ended; then nothing of it lives on."""
        if self.process.poll() is None:
            return False
        self.kill()
        return True

    def stop(self, at_once: bool) -> None:
        """Has it save and end; or kills it."""
        if at_once:
            self.kill()
        elif not self._told:
            self._told = True
            self.process.terminate()

    def kill(self) -> None:
        """Ends it and all that it has started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def status(self) -> str:
        """What it says of itself."""
        return str(read_json(self.directory / "run.json").get("status", ""))

    def printed(self) -> str:
        """What it has printed in this life."""
        with reading(self._log) as log:
            log.seek(self._printed)
            return log.read().decode(errors="replace")

    def __str__(self) -> str:
        of = f" of {self._total:,}" if self._total else ""
        return f"trial {self.trial.number} " + (f"at step {self._step:,}{of}" if self._step else "starts")


class _Table:
    """Shows each trial in a line when it has ended, and below, on a terminal, what is under way."""

    def __init__(self, fields: Sequence[str], metric: str, trials: int, stream: TextIO) -> None:
        self._fields, self._metric, self._trials, self._stream = fields, metric, trials, stream
        self._bar: Any = None
        self._ended, self._last = 0, time.monotonic()

    def begin(self, directory: Path, rows: Sequence[Row]) -> None:
        """Shows those that have ended before."""
        ended = [row for row in rows if row.state not in ("running", "waiting")]
        self.line(f"directory of the sweep: {_shown(directory)}")
        if ended or any(row.state == "running" for row in rows):
            self.line(f"going on: {len(ended)} of {self._trials} trials have ended")
        if self._stream.isatty():
            from tqdm import tqdm

            form = "{n_fmt}/{total_fmt}|{bar:20}| {desc} [{elapsed}]"
            self._bar = tqdm(total=self._trials, file=self._stream, bar_format=form, dynamic_ncols=True, leave=False)
        names = "".join(f"{name:>{self._width(name)}}" for name in self._fields)
        self.line(f"trial{names}{self._metric:>{self._width(self._metric)}}   time")
        for row in ended:
            self.row(row)

    def row(self, row: Row) -> None:
        """A trial that has ended."""
        self._ended += 1
        values = "".join(f"{_short(row.params.get(name, '')):>{self._width(name)}}" for name in self._fields)
        value = "" if row.value is None else f"{row.value:.4g}"
        note = "" if row.state == "complete" else f"  {row.state}{': ' if row.problem else ''}{row.problem}"
        seconds = "" if row.seconds is None else f"{row.seconds:.0f} s"
        self.line(f"{row.number:>5}{values}{value:>{self._width(self._metric)}}{seconds:>7}{note}")
        if self._bar is not None:
            self._bar.update()

    def doing(self, what: Sequence[Any]) -> None:
        """What is under way; in a log, now and then."""
        text = ", ".join(map(str, what))
        if self._bar is not None:
            self._bar.set_description_str(text)
        elif time.monotonic() - self._last >= _LOG_SECONDS:
            self.line(f"{self._ended} of {self._trials} trials have ended; {text}")

    def line(self, text: str) -> None:
        """A line, above the bar if there is one."""
        text = shown(text)
        self._last = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            tell(text, self._stream)

    def close(self) -> None:
        """No trial is under way any more."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @staticmethod
    def _width(name: str) -> int:
        return max(len(name), 9) + 2


def _study(directory: Path, plan: Plan) -> Any:
    """The sweep in Optuna's storage."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner() if plan.pruner == "median" else optuna.pruners.NopPruner()
    try:
        return optuna.create_study(
            storage=sqlite_uri(directory / STORAGE), study_name="sweep", load_if_exists=True,
            direction=plan.direction, pruner=pruner,
        )  # fmt: skip
    except Exception as error:  # of the database, or of Optuna: it isn't ours, or damaged
        what = str(error).splitlines()[0]
        raise UsageError(f"{directory / STORAGE} can't be used ({what}): give another --sweep-dir") from None


def _draw(trial: Any, name: str, values: list[str] | Range) -> None:
    """Gives a trial the value of a field, if it has none."""
    if isinstance(values, list):
        trial.suggest_categorical(name, values)
    else:
        suggest = trial.suggest_int if isinstance(values.low, int) else trial.suggest_float
        suggest(name, values.low, values.high, log=values.log)


def _row(trial: Any, directory: Path) -> Row:
    state = {"FAIL": "failed"}.get(trial.state.name, trial.state.name.lower())
    values = trial.intermediate_values
    value = trial.value if state == "complete" else values[max(values)] if values else None
    seconds = trial.duration and trial.duration.total_seconds()
    problem = trial.user_attrs.get("problem", "")
    return Row(
        trial.number, state, _texts(trial.params), value, seconds, problem, str(_run_dir(directory, trial.number))
    )


def _run_dir(directory: Path, number: int) -> Path:
    return directory / f"trial-{number:03d}"


def _shown(path: Path) -> Path:
    """A path as people read it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _in_use(directory: Path) -> bool:
    """Whether a process holds the lock of a run directory."""
    try:
        with os.fdopen(opened(directory / LOCK, os.O_RDWR), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or none can be taken there
        return False
    return False


def _texts(params: Mapping[str, Any]) -> dict[str, str]:
    """The values of fields, as they are typed: a float with all its digits."""
    return {name: value if isinstance(value, str) else repr(value) for name, value in params.items()}


def _sets(params: Mapping[str, str]) -> list[str]:
    return [f"--set={name}={value}" for name, value in params.items()]


def _short(text: str) -> str:
    with contextlib.suppress(ValueError):
        return f"{float(text):.4g}" if len(text) > 9 else text
    return text


def _line(step: int, event: str, **more: Any) -> str:
    return json.dumps({"time": time.time(), "event": event, "step": step, "epoch": 0, **more}) + "\n"


def _about(plan: Plan, kind: type, trials: int) -> dict[str, Any]:
    """What the `run.json` of a sweep says: what that of a run does, as far as a sweep is one."""
    kept = plan.as_json()
    return {
        "task": kind.__name__,
        "target": plan.target,
        "hyperparameters": kept["grid"] | kept["random"],
        "options": {name: getattr(plan, name) for name in ("metric", "direction", "sampler", "pruner", "seed")},
        "versions": {"python": sys.version.split()[0]},
        "trials": trials,
        "sweep": kept,
    }


def _write_about(directory: Path, about: dict[str, Any], status: str) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    state = {"status": status, "updated": now, "pid": os.getpid()}
    write_text(directory / "run.json", json.dumps(redact(about) | state, indent=1))
