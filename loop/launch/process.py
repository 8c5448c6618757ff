"""A worker's process on this machine: starting it, killing it, and reading what it prints."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

# Seconds for which the output of a worker's own processes is still read after the worker has ended.
_LAST_WORDS = 2.0
_LONGEST = 1 << 20  # bytes that are read at once, and the length from which a line is shown in parts


class WorkerProcess(subprocess.Popen[bytes]):
    """A worker on this machine."""

    where = ""
    """Text that messages add to its rank to say on which host it runs; see `hosts.Remote`."""
    lost = ""
    """Why its host is lost; "": it isn't."""

    def kill(self) -> None:
        """Kills it, and all processes that it has started, at once: each worker is a group of processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def worker_command(arguments: Sequence[str]) -> list[str]:
    """The command that runs `tfloop` with these arguments in a worker."""
    return [sys.executable, "-P", "-m", "cli", *arguments]


def start_worker(command: list[str], environment: dict[str, str]) -> WorkerProcess:
    """Starts a worker with pipes for what it prints."""
    # A session of its own: Ctrl-C at the terminal reaches the launcher alone, which passes it on once.
    return WorkerProcess(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def printed_lines(worker: WorkerProcess, stream: IO[bytes]) -> Iterator[str]:
    """The lines that a worker prints, until it has ended.

    The stream may stay open for longer, because processes that the worker has started hold it.
    """
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    rest = b""
    until = float("inf")
    over = False
    while not over:
        if worker.poll() is not None:
            until = min(until, time.monotonic() + _LAST_WORDS)
        over = time.monotonic() > until
        if not poll.poll(0 if over else 1000):
            continue
        piece = os.read(stream.fileno(), _LONGEST)
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
        if len(rest) > _LONGEST:  # a line that never ends must not fill the memory
            yield rest.decode(errors="replace")
            rest = b""
        over = over or not piece
    if rest:
        yield rest.decode(errors="replace")
