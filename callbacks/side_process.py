"""Side process: a Python process beside the training, which takes orders and answers, each a line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from callbacks.files import ROOT
from callbacks.types import Json

_ANSWER = b"\x1e"
"""Starts a line on stdout with an answer (ASCII record separator); libraries may print others."""


class SideProcess:
    """A Python process that a callback starts, so that the training neither waits for its work nor dies with it.

    Args:
        module: what it runs; its `main` uses the functions below.
        *arguments: of its command line, which all users of the machine can see.
        environment: variables that differ from those of this process; None: a variable that it doesn't have.

    Attributes:
        process: the process itself.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str | None] | None = None) -> None:
        variables = {**os.environ, "PYTHONPATH": search_path(), **(environment or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def order(self, line: Json) -> None:
        """Sends a line to the process. If it has died, `answer` tells."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(line).encode() + b"\n")

    def answer(self, seconds: float) -> Json | None:
        """The next answer; None: there is none within this time.

        Raises:
            EOFError: the process has ended without one; with its exit code.
        """
        stdout = self.process.stdout
        assert stdout is not None
        deadline = time.monotonic() + seconds
        poll = select.poll()  # `select` takes no descriptor from 1024 on
        poll.register(stdout, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            line = stdout.readline()
            if not line.endswith(b"\n"):
                raise EOFError(f"its process ended with {self.process.wait()}")
            if line.startswith(_ANSWER):
                return json.loads(line.removeprefix(_ANSWER))
        return None

    def end(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.communicate()


def search_path() -> str:
    """The PYTHONPATH with which a new process imports this tfloop."""
    path = str(ROOT)
    if own_path := os.environ.get("PYTHONPATH"):
        path += os.pathsep + own_path
    return path


# In the process


def orders() -> Iterator[Json]:
    """Makes this process one beside a training, at once; yields the orders, until the training is gone."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are for the training, whose last orders are still to come
    os.nice(10)  # the training comes first; threads that are started later have it, too
    return _orders(os.getppid())


def give_answer(answer: Json) -> None:
    """Sends an answer to the training."""
    os.write(1, b"\n" + _ANSWER + json.dumps(answer).encode() + b"\n")


def _orders(parent: int) -> Iterator[Json]:
    while line := _next_line(parent):
        yield json.loads(line)


def _next_line(parent: int) -> bytes:
    """The next line of stdin; b"" if the training is gone."""
    line = b""
    while not line.endswith(b"\n"):
        if select.select([0], [], [], 1.0)[0]:
            byte = os.read(0, 1)  # not more: `select` doesn't see what has been read already
            if not byte:
                return b""
            line += byte
        elif os.getppid() != parent:
            return b""
    return line
