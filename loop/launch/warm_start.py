"""Starts processes of `tfloop` that have TensorFlow imported already, where the system can fork them.

A server imports TensorFlow once and forks for each process: a trial of a sweep then starts in a tenth of a second,
instead of several seconds. The server itself computes nothing with TensorFlow, so that a forked process is like one
that has just imported it. The processes don't depend on each other: a crash or a kill ends only one of them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from loop.launch.environment import LAUNCHER

COMMAND = [sys.executable, "-P", "-m", "cli"]
"""The beginning of a command that can be started in this way."""

_PRELOADED = "loop.commands.preloaded"
"""The module that the server imports; by name, since a launcher imports none of it."""
_SESSION_PAUSE = 0.001  # seconds between two looks at whether a process has its session
_AT_IMPORT = ("TF_", "XLA_", "KERAS_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "LD_", "MALLOC_", "PYTHON")
"""Variables whose names begin so are read while modules are imported: they must be those of the server."""


class Process(Protocol):
    """A process that was started, by the server or without it: a part of `subprocess.Popen`."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: the signal that has ended it; None: it has not ended."""

    def poll(self) -> int | None:
        """The exit code, or None."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended in this many seconds.
        """

    def terminate(self) -> None:
        """Sends it SIGTERM."""


def start(command: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path) -> Process:
    """Starts a command in a session of its own, without input.

    Args:
        command: the command; one that doesn't begin with `COMMAND` is started without the server.
        environment: its environment variables.
        stdout: the file to which its output is appended.
        stderr: the file to which its errors are appended.
    """
    # Opened here in any case, so that both files exist however early the process ends.
    with stdout.open("ab") as out, stderr.open("ab") as errors:
        # Go on without the server if it can't start, as when the path of its socket in TMPDIR is too long for the
        # system, or has crashed, or was killed.
        with contextlib.suppress(OSError, EOFError):
            if list(command[: len(COMMAND)]) == COMMAND and _can_fork(environment):
                return _Forked(command, environment, stdout, stderr)
        return subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
        )


def _can_fork(environment: Mapping[str, str]) -> bool:
    # Elsewhere than on Linux, a process that was forked without `exec` may not use all of the system's libraries.
    return sys.platform == "linux" and _at_import(environment) == _server_environment()


@functools.cache
def _server_environment() -> dict[str, str]:
    """Starts the server, once; returns its variables."""
    multiprocessing.set_forkserver_preload([_PRELOADED])
    variables = _at_import(os.environ)
    forkserver.ensure_running()
    return variables


def _at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_IMPORT)}


class _Forked:
    """A process that the server has forked."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        arguments = (list(command), dict(environment), stdout.absolute(), stderr.absolute())
        self._command = list(command)
        self._process: BaseProcess = context.Process(target=_run, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._wait_for_session()

    def _wait_for_session(self) -> None:
        """Waits until the process leads a session: a caller may want to kill the whole session at once."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while os.getpgid(self.pid) != self.pid:
                time.sleep(_SESSION_PAUSE)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def _run(command: list[str], environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    """Makes this process, which was just forked, the one that runs the command."""
    import numpy

    # First: the caller waits for it.
    os.setsid()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    for path, number in ((Path(os.devnull), 0), (stdout, 1), (stderr, 2)):
        descriptor = os.open(path, flags if number else os.O_RDONLY, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)

    os.environ.clear()
    os.environ.update(environment)
    if LAUNCHER in environment:
        os.environ[LAUNCHER] = str(os.getppid())  # the server, which ends with the launcher
    numpy.random.seed()  # or all processes would draw the same numbers
    # As `python -P -m MODULE ARGUMENTS...` would do; see `COMMAND`.
    sys.argv[:] = ["tfloop", *command[4:]]
    try:
        runpy.run_module(command[3], run_name="__main__", alter_sys=True)
    finally:
        # A process of `multiprocessing` ends without these three, unlike any other process of Python.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
