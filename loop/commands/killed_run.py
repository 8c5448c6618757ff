"""A run of `tfloop train` whose processes are killed, and which is started again: the means of `tfloop chaos`."""

from __future__ import annotations

import contextlib
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

from callbacks.example_log import ExampleLog
from loop.checkpoint import checkpoint_files
from loop.commands import command_line
from loop.errors import TrainingError, UsageError

MARK = "TFLOOP_CHAOS"
"""Environment variable that marks all processes of an attempt, also those whose parent has ended."""
WRITING, STARTING, TRAINING = KINDS = ("in a checkpoint write", "in start-up", "in training")
_COMMAND = [sys.executable, "-P", "-m", "cli", "train"]
_FIRST_LINE = 30  # bytes, or less


class Run:
    """A run that is started again with the same command until it has ended.

    Args:
        directory: for all that it writes.
        arguments: of `tfloop train`.
        checkpoint_every: how often it saves; None: as `tfloop train` does by default.
    """

    def __init__(self, directory: Path, arguments: Sequence[str], checkpoint_every: str | None) -> None:
        self.directory = directory
        self.checkpoints = directory / "run" / "checkpoints"
        self.examples = directory / "witness"
        log = command_line.callback_option(ExampleLog, self.examples)
        saving = ["--checkpoint-every", checkpoint_every] if checkpoint_every else []
        own = ["--run-dir", str(directory / "run"), log, "--track", "off", "--json"]
        self.command = [*_COMMAND, *arguments, *saving, *own]
        self.code: int | None = None
        self.examples.mkdir(parents=True)
        (directory / "tmp").mkdir()

    @property
    def finished(self) -> bool:
        """Whether an attempt at it has come to its end."""
        return self.code == 0

    @contextlib.contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Starts it (again). Afterwards all of its processes have ended."""
        with (self.directory / "stdout").open("ab") as out, (self.directory / "stderr").open("ab") as err:
            attempt = Attempt(self, out, err)
            try:
                yield attempt
            finally:
                attempt.gone(0)
                self.code = attempt.process.wait()

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
        """Checkpoints that are half written, newer than all complete ones: their inodes by name, since names repeat."""
        newest = max((path.name for path in checkpoint_files.complete(self.checkpoints)), default="")
        inodes = {}
        with contextlib.suppress(FileNotFoundError):  # a moment later it is written
            for entry in os.scandir(self.checkpoints):
                if entry.name.endswith(".tmp") and entry.name > newest + ".tmp":
                    inodes[entry.name] = entry.inode()
        return inodes


class Attempt:
    """All processes of one start of a run."""

    def __init__(self, run: Run, out: BinaryIO, err: BinaryIO) -> None:
        self.run = run
        self.begun = time.monotonic()
        self._before = {path.name for path in run.examples.iterdir()}
        self._litter = run.writing().items()
        self._token = secrets.token_hex(8)
        # A launcher that is killed can't remove its temporary files: they go where all goes.
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
        """The arguments of its running processes, by id."""
        arguments = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
                if f"{MARK}={self._token}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    arguments[int(path.name)] = (path / "cmdline").read_text(errors="replace").split("\0")
        return arguments

    def kill(self, draw: random.Random, chief: bool) -> None:
        """Kills one of launcher and workers, or the chief."""
        # Launcher and workers run the same command; what they start beside it is no target.
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
