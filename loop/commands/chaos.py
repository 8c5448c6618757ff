"""`tfloop chaos`: trains a task undisturbed, and again through many kill -9, and compares what has come of it.

Imports no TensorFlow: all training is done in processes, which can be killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from callbacks.example_log import Example, ExampleLog, differences, used
from loop.checkpoint import checkpoint_files
from loop.commands import command_line
from loop.errors import TrainingError, UsageError

MARK = "TFLOOP_CHAOS"
"""Environment variable that marks all processes of an attempt, also those whose parent has ended."""
WRITING, STARTING, TRAINING = KINDS = ("in a checkpoint write", "in start-up", "in training")
MOST_KILLS = 1000
"""So many kills are asked for at most: each takes a start of TensorFlow, or more."""
_COMMAND = [sys.executable, "-P", "-m", "cli", "train"]
_FIRST_LINE = 30  # bytes, or less
_GONE = 30.0  # seconds in which a job must be gone when one of its processes was killed


@dataclasses.dataclass
class Report:
    """What `chaos` found.

    Attributes:
        target: the task.
        backend: the engine.
        replicas: how many.
        steps: that were made.
        kills: by where they hit, which is where they were found to have hit.
        lives: processes, or jobs, that were started for the runs with kills.
        runs: that came to their end in spite of kills.
        same_weights: whether all of them ended with the weights of the undisturbed one, to the bit.
        same_examples: whether all of them used the same examples in the same order, each once in an epoch.
        problems: what went wrong, first things first.
        seconds: how long it took.
    """

    target: str
    backend: str
    replicas: int
    steps: int
    kills: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    lives: int = 0
    runs: int = 0
    same_weights: bool = True
    same_examples: bool = True
    problems: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether nothing was lost."""
        return not self.problems


def chaos(
    arguments: Sequence[str],
    kills: int,
    directory: Path,
    seed: int = 0,
    checkpoint_every: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Trains once undisturbed, then with kills until their number is full, and compares.

    Args:
        arguments: of `tfloop train`: the target and options, but for the run directory and how often to save.
        kills: how many; spread over as many runs as it takes.
        directory: where all runs are made; empty.
        seed: of the moments.
        checkpoint_every: how often to save; None: some ten times in the run.
        progress: is told what is being done.

    Raises:
        UsageError: the task can't be trained at all; or there is no /proc here.
        TrainingError: the undisturbed run fails.
    """
    if not Path("/proc/self/environ").exists():
        raise UsageError("chaos needs /proc, to find the processes that it kills: run it on Linux")
    begun, directory = time.monotonic(), directory.resolve()
    progress("undisturbed")
    whole = Run(directory / "whole", [*arguments, *_saving(checkpoint_every)])
    with whole.live() as life:
        life.wait_for(lambda: life.trained() > 0)
        starting = time.monotonic() - life.begun
        life.wait_for(lambda: False)
        trained = life.trained()
    expected, examples = whole.result(), used(whole.examples)
    report = Report(arguments[0], expected["backend"], expected["replicas"], expected["steps"])
    report.problems += [f"undisturbed: {each}" for each in _few(differences(examples, examples))]
    if (seen := sum(map(len, examples.values()))) != expected["examples"]:
        report.problems.append(f"undisturbed: {expected['examples']} examples were used, but {seen} were seen")
    every = max(1, report.steps // 10)
    if checkpoint_every and checkpoint_every.isdecimal():
        every = int(checkpoint_every)
    aim = _Aim(seed, kills, starting, trained, report.steps, every)
    patience = 120 + 10 * (time.monotonic() - begun)
    while aim.left and not report.problems:
        report.runs += 1
        run = Run(directory / f"killed-{report.runs}", [*arguments, *_saving(checkpoint_every or str(every))])
        while not run.finished and not report.problems:
            report.lives += 1
            kind = aim.left[0] if aim.left else ""
            progress(f"run {report.runs}, life {report.lives}: {f'a kill {kind}' if kind else 'to its end'}")
            with run.live() as life:
                struck = bool(kind) and aim.strike(life, patience)
                seconds = _GONE if struck else patience
                if not life.gone(seconds):
                    report.problems.append(f"life {report.lives}: did not end within {seconds:.0f} s")
            hit = life.hit() if struck and not run.finished else ""
            aim.done(hit)
            if hit:
                report.kills[hit] += 1
            elif not run.finished and not report.problems:
                report.problems.append(f"life {report.lives} failed without a kill: {run.last_words()}")
        if run.finished:
            _compare(report, run, expected["weights_sha256"], examples)
    report.seconds = time.monotonic() - begun
    return report


def _saving(every: str | None) -> list[str]:
    return ["--checkpoint-every", every] if every else []


def _compare(report: Report, run: Run, weights: str, examples: dict[int, list[Example]]) -> None:
    found = run.result()["weights_sha256"]
    if found != weights:
        report.same_weights = False
        report.problems.append(f"run {report.runs}: weights {found[:12]}..., without kills {weights[:12]}...")
    if others := _few(differences(examples, used(run.examples))):
        report.same_examples = False
        report.problems += [f"run {report.runs}: {each}" for each in others]


def _few(texts: Iterator[str]) -> list[str]:
    first = list(itertools.islice(texts, 5))
    more = sum(1 for _ in texts)
    return [*first, f"and {more} more"] if more else first


class Run:
    """A run that is started again with the same command until it has ended.

    Args:
        directory: for all that it writes.
        arguments: of `tfloop train`.
    """

    def __init__(self, directory: Path, arguments: Sequence[str]) -> None:
        self.directory, self.checkpoints = directory, directory / "run" / "checkpoints"
        self.examples = directory / "witness"
        places = ["--run-dir", str(directory / "run"), command_line.callback_option(ExampleLog, self.examples)]
        self.command = [*_COMMAND, *arguments, *places, "--track", "off", "--json"]
        self.code: int | None = None
        for each in (self.examples, directory / "tmp"):
            each.mkdir(parents=True)

    @property
    def finished(self) -> bool:
        """Whether a life of it has come to its end."""
        return self.code == 0

    @contextlib.contextmanager
    def live(self) -> Iterator[Life]:
        """Starts it (again). Nothing of it lives on afterwards."""
        with (self.directory / "stdout").open("ab") as out, (self.directory / "stderr").open("ab") as err:
            life = Life(self, out, err)
            try:
                yield life
            finally:
                life.gone(0)
                self.code = life.process.wait()

    def result(self) -> dict[str, Any]:
        """What it printed at its end.

        Raises:
            UsageError: it could not even start.
            TrainingError: it failed.
        """
        if not self.finished:
            raise (UsageError if self.code == 2 else TrainingError)(self.last_words().removeprefix("tfloop: error: "))
        result: dict[str, Any] = json.loads((self.directory / "stdout").read_bytes().splitlines()[-1])
        return result

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        lines = (self.directory / "stderr").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a word")

    def writing(self) -> dict[str, int]:
        """Checkpoints that are half written: newer than all complete ones. Their names, and what tells two apart."""
        newest = max((path.name for path in checkpoint_files.complete(self.checkpoints)), default="")
        found = {}
        with contextlib.suppress(FileNotFoundError):  # a moment later it is written
            for entry in os.scandir(self.checkpoints):
                if entry.name.endswith(".tmp") and entry.name > newest + ".tmp":
                    found[entry.name] = entry.inode()
        return found


class Life:
    """All processes of one start of a run."""

    def __init__(self, run: Run, out: BinaryIO, err: BinaryIO) -> None:
        self.run, self.begun = run, time.monotonic()
        self._before = {path.name for path in run.examples.iterdir()}
        self._litter = run.writing().items()
        self._token = secrets.token_hex(8)
        # What a launcher leaves behind that can't tidy up goes where all goes.
        environment = {**os.environ, MARK: self._token, "TMPDIR": str(run.directory / "tmp")}
        self.process = subprocess.Popen(
            run.command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )

    def trained(self) -> int:
        """How much it has trained: bytes in the files of its examples, but for their first lines."""
        sizes = (path.stat().st_size for path in self.run.examples.iterdir() if path.name not in self._before)
        return sum(max(0, size - _FIRST_LINE) for size in sizes)

    def wait_for(self, condition: Callable[[], bool], seconds: float = math.inf, pause: float = 0.01) -> bool:
        """Whether something has happened before it ended, or that time was over."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(pause)
        return False

    def processes(self) -> dict[int, list[str]]:
        """The arguments of its processes that live, by id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
                if f"{MARK}={self._token}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return found

    def kill(self, draw: random.Random, chief: bool) -> None:
        """Kills one of launcher and workers, or the chief."""
        workers = [pid for pid, argv in self.processes().items() if argv[1:5] == self.run.command[1:5]]
        if chief:
            with contextlib.suppress(OSError, ValueError, KeyError):
                pid = json.loads((self.run.directory / "run" / "run.json").read_bytes())["pid"]
                workers = [pid] if pid in workers else workers
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(sorted(workers) or [self.process.pid]), signal.SIGKILL)

    def gone(self, seconds: float) -> bool:
        """Waits until all of it has ended; whether it did so by itself within that time. If not, it is ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None or self.processes():
            if time.monotonic() > deadline:
                while pids := self.processes():
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                return False
            time.sleep(0.05)
        return True

    def hit(self) -> str:
        """Where the kill has hit, by what is left."""
        if self.run.writing().items() - self._litter:
            return WRITING
        return TRAINING if self.trained() else STARTING


class _Aim:
    """Chooses the moments of the kills.

    A third shall hit a checkpoint write, a few the start-up, all others any step. A moment that comes too late, because
    the run is over, is tried again, sooner, in another run.
    """

    def __init__(self, seed: int, kills: int, starting: float, trained: int, steps: int, every: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311 - no secret
        self._starting, self._trained, self._steps, self._every = starting, trained, steps, every
        writing, starts = -(-kills // 3), -(-kills // 6) if kills > 2 else 0
        self.left = [WRITING] * writing + [STARTING] * starts + [TRAINING] * (kills - writing - starts)
        self._draw.shuffle(self.left)
        self._misses = 0

    def strike(self, life: Life, patience: float) -> bool:
        """Waits for the moment, and kills; whether the run had not ended before."""
        draw, kind = self._draw, self.left[0]
        done = max((int(path.name[5:]) for path in checkpoint_files.complete(life.run.checkpoints)), default=0)
        # On average as many steps as bring the run to its end with the last kill; more than are lost by a kill.
        steps = draw.uniform(0.2, 1.8) * max(self._every, (self._steps - done) / (len(self.left) + 1))
        steps /= 2**self._misses
        if kind == STARTING:
            after = draw.uniform(0, self._starting)
            came = life.wait_for(lambda: time.monotonic() - life.begun >= after or life.trained() > 0, patience)
        elif kind == TRAINING:
            enough = max(1, self._trained * steps / self._steps)
            came = life.wait_for(lambda: life.trained() >= enough, patience, 0.002)
        else:
            nth, seen = max(1, round(steps / self._every)), dict(life.run.writing())
            nth += len(seen)

            def reached() -> bool:
                seen.update(life.run.writing())
                return len(seen) >= nth

            came = life.wait_for(lambda: life.trained() > 0, patience) and life.wait_for(reached, patience, 0.0002)
        if came:
            life.kill(draw, chief=kind == WRITING)
        return came

    def done(self, hit: str) -> None:
        """The next one; or the same again, if it has hit nothing."""
        if hit:
            if self.left.pop(0) == WRITING != hit and TRAINING in self.left:
                self.left[self.left.index(TRAINING)] = WRITING
            self._misses = 0
        elif self.left:
            self._misses += 1
            if self._misses > 2:
                self.left[0] = STARTING  # that can't be missed


def lines(report: Report) -> Iterator[tuple[str, bool | None]]:
    """The report for people, line by line: its text, and whether it is good (True) or bad (False) news."""
    replicas = f"{report.replicas} replica{'s' * (report.replicas > 1)}"
    yield f"{report.target}: {report.steps} steps on {report.backend}, {replicas}; {report.seconds:.0f} s", None
    yield "", None
    yield f"{'kill -9':26}{sum(report.kills.values()):>5}", None
    for kind, number in report.kills.items():
        yield f"  {kind:24}{number:>5}", None
    yield f"{'lives':26}{report.lives:>5}", None
    yield f"{'runs that ended':26}{report.runs:>5}", None
    yield f"{'weights':26}{'the same bits' if report.same_weights else 'OTHERS'}", report.same_weights
    order = "each once in an epoch, in the same order" if report.same_examples else "OTHERS"
    yield f"{'examples used':26}{order}", report.same_examples
    yield "", None
    for problem in report.problems:
        yield problem, False
    yield ("nothing is lost", True) if report.exact else ("not the same as without kills", False)
