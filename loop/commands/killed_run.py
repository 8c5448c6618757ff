"""A run of `tfloop train` whose processes are killed, and that is started again; for `tfloop chaos`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from callbacks.example_log import ExampleLog
from callbacks.types import JsonObject
from loop.checkpoint import checkpoint_files
from loop.checkpoint.store import address
from loop.commands import command_line, trial
from loop.launch import warm_start

MARK = "TFLOOP_CHAOS"
"""The environment variable that marks all processes of an attempt, even those whose parent has ended."""
WRITING, STARTING, TRAINING = KINDS = ("in a checkpoint write", "in start-up", "in training")
_COMMAND = [*warm_start.COMMAND, "train"]
_FIRST_LINE = 30
"""The greatest size of the first line in a file of examples, in bytes."""


class Machine(NamedTuple):
    """A simulated machine: a directory that shares nothing with those of other machines."""

    name: str = "machine"  # of its directory
    options: Sequence[str] = ()  # of `tfloop train`: the backend and the workers there


class Run:
    """A run that is started again until it has ended.

    Attributes:
        url: where it is in object storage; None: nowhere.
        run_dir: the run directory on the machine that trains.
        examples: the directory of the logs of examples.
        command: the whole command.
        environment: the variables of its processes, beside those of this one.
        code: the exit code of the last attempt; None: there was none.
    """

    def __init__(
        self, directory: Path, arguments: Sequence[str], checkpoint_every: str | None, url: str | None = None
    ) -> None:
        self.directory = directory
        self.examples = directory / "witness"
        # Outside of the run directory, so that attempts on other machines write to it, too.
        log = command_line.callback_option(ExampleLog, self.examples)
        saving = ["--checkpoint-every", checkpoint_every] if checkpoint_every else []
        own = ["--run-dir", url or str(directory / "run"), log, "--track", "off", "--json"]
        self.url = url
        self._arguments = [*arguments, *saving, *own]
        self.move(Machine())
        self.code: int | None = None
        self.examples.mkdir(parents=True)
        (directory / "tmp").mkdir()

    def move(self, machine: Machine) -> None:
        """Lets the next attempt be made on a machine."""
        self.command = [*_COMMAND, *self._arguments, *machine.options]
        # A launcher that is killed can't remove its temporary files: they go into the directory of the run.
        self.environment = {"TMPDIR": str(self.directory / "tmp")}
        self.run_dir = self.directory / "run"
        if self.url is not None:
            # A run in a store has its spool below the user's state: another home is another machine to it.
            home = self.directory / machine.name
            self.environment["XDG_STATE_HOME"] = str(home)
            self.run_dir = address.directory_of(self.url, address.SPOOLS, home)

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether the last attempt has come to the end of the training."""
        return self.code == 0

    @contextlib.contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Starts an attempt. When the context ends, all of its processes have ended."""
        with (self.directory / "stdout").open("ab") as out, (self.directory / "stderr").open("ab") as err:
            attempt = Attempt(self, out, err)
            try:
                yield attempt
            finally:
                attempt.gone(0)  # also after an error or a signal: no process may outlive the command
                self.code = attempt.process.wait()

    def result(self) -> JsonObject:
        """The result that the run printed at its end.

        Raises:
            UsageError: it could not even start.
            TrainingError: it failed.
        """
        if self.code:
            raise trial.failure(self.code, self.last_line().removeprefix("tfloop: error: "))
        # All attempts write to one file: the last line is that of the one that has finished.
        result: JsonObject = json.loads((self.directory / "stdout").read_bytes().splitlines()[-1])
        return result

    def last_line(self) -> str:
        """The last line that the run wrote to stderr."""
        lines = (self.directory / "stderr").read_text(errors="replace").split("\n")
        for line in reversed(lines):
            if line.strip():
                return line.strip()
        return "it ended without a word"

    def unfinished_checkpoints(self) -> dict[str, int]:
        """The inodes, by name, of checkpoints that are half written, and newer than all complete ones."""
        newest = max((path.name for path in checkpoint_files.complete(self.checkpoints)), default="")
        # With inodes, because another attempt may write a checkpoint under the same name.
        inodes = {}
        with contextlib.suppress(FileNotFoundError):  # the directory isn't there yet, or the file was just renamed
            for entry in os.scandir(self.checkpoints):
                if entry.name.endswith(".tmp") and entry.name > newest + ".tmp":
                    inodes[entry.name] = entry.inode()
        return inodes


class Attempt:
    """All processes of one start of a run, with the files for their stdout and stderr."""

    def __init__(self, run: Run, out: BinaryIO, err: BinaryIO) -> None:
        self.run = run
        self.begun = time.monotonic()
        # What earlier attempts have left, to be told from what this one makes.
        self._files_before = {path.name for path in run.examples.iterdir()}
        self._unfinished_before = run.unfinished_checkpoints().items()
        self._token = secrets.token_hex(8)
        environment = {**os.environ, **run.environment, MARK: self._token}
        # In a session of its own, so that Ctrl-C in the terminal reaches this command alone.
        self.process = subprocess.Popen(
            run.command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )

    def trained(self) -> int:
        """How much it has trained: the bytes in its logs of examples, without their first lines."""
        trained = 0
        for path in self.run.examples.iterdir():
            if path.name not in self._files_before:
                trained += max(0, path.stat().st_size - _FIRST_LINE)
        return trained

    def wait_for(self, condition: Callable[[], bool], seconds: float = math.inf, pause: float = 0.01) -> bool:
        """Waits until the condition holds; returns False if the attempt ended before that, or the time was over."""
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
        """Kills the launcher or one of the workers, or the chief."""
        # Launcher and workers run the same command. Other processes that they start aren't killed.
        targets = [pid for pid, argv in self.processes().items() if argv[1:5] == self.run.command[1:5]]
        if chief:  # as long as run.json doesn't name it, any of the processes
            with contextlib.suppress(OSError, ValueError, KeyError):
                pid = json.loads((self.run.run_dir / "run.json").read_bytes())["pid"]
                targets = [pid] if pid in targets else targets
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(sorted(targets) or [self.process.pid]), signal.SIGKILL)

    def gone(self, seconds: float) -> bool:
        """Waits until all processes have ended, and returns True; after this time, kills them, and returns False."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None or self.processes():
            if time.monotonic() > deadline:
                self._kill_all()
                return False
            time.sleep(0.05)
        return True

    def _kill_all(self) -> None:
        """Kills all processes, again until there is none: one that is killed may just have started another."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def hit(self) -> str:
        """What the attempt was doing when it was killed, one of `KINDS`; by the files that it left."""
        if self.run.unfinished_checkpoints().items() - self._unfinished_before:
            return WRITING
        return TRAINING if self.trained() else STARTING
