"""A short training in a process of its own, which another command measures: its start, its end, and why it failed.

Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loop.errors import BAD_INPUT, TrainingError, UsageError
from loop.launch import stderr
from loop.launch.environment import LAUNCHER

ENDLESS = 2**31 - 1
"""The `--steps` of a trial that trains until it has been measured."""
_GRACE = 3.0  # seconds that a trial has to end, after it was asked to


def run(arguments: Sequence[str], directory: Path) -> int:
    """Trains in a process of its own, and waits for its end; returns the exit code.

    The directory is for its temporary files, and for `stderr`: what it says.
    """
    return run_module("cli", ["train", *arguments], directory)


def run_module(name: str, arguments: Sequence[str], directory: Path) -> int:
    """Runs a module as `run` runs a training; see there."""
    # What a killed trial leaves in its temporary directory is removed with it. Not a warm start: a process that was
    # forked has less memory of its own, and its peak is what some trials measure.
    environment = {**os.environ, LAUNCHER: str(os.getpid()), "TMPDIR": str(directory)}
    with (directory / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", name, *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait()
        finally:
            _end(process)


def problem(code: int, directory: Path) -> str:
    """Why a trial in this directory has failed, in a line."""
    why = reason(code, (directory / "stderr").read_text(errors="replace"))
    # The steps are the trial's: the user can't leave them out.
    phases = re.match(rf"steps={ENDLESS}: (.+ has phases \(.*\)), which say how long each is", why)
    if phases:
        return (
            f"{phases[1]}, which end by themselves, and a trial trains until it is measured: give a task without "
            "phases(), such as a subclass whose phases() returns []"
        )
    return why


def reason(code: int, printed: str) -> str:
    """Why a process has failed, in a line."""
    if code == -signal.SIGKILL:
        return "killed, or out of memory"
    why = f"exit code {code}, without a word"
    has_error = False
    for line in map(str.strip, printed.splitlines()):
        is_error = re.match(r"tfloop: error: |[\w.]+(Error|Exception)\b", line) is not None
        # The last error, or else the last line that isn't TensorFlow's.
        if line and not re.match(stderr.CHATTER, line) and (is_error or not has_error):
            why = line
            has_error = is_error
    return why.removeprefix("tfloop: error: ")


def failure(code: int, why: str) -> UsageError | TrainingError:
    """The error of a command whose process has ended with this code: what is bad input there is bad input here."""
    return UsageError(why) if code == BAD_INPUT else TrainingError(why)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a trial: a launcher that gets two signals ends its workers, and then itself."""
    try:
        for _ in range(2):
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
