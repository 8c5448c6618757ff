"""A worker's process on this machine: starting it, killing it, and reading what it prints."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import IO

_LAST_WORDS = 2.0  # seconds in which what a worker has started may still print when it has ended
_LONGEST = 1 << 20  # bytes that are printed as a line, and read at once


class WorkerProcess(subprocess.Popen[bytes]):
    """A worker on this machine."""

    where = ""
    """Where it runs, as messages have it behind its rank."""
    lost = ""
    """What has become of its host, if that is gone."""

    def kill(self) -> None:
        """Kills it, and all that it has started, at once: each worker is a group of processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def start_worker(command: list[str], environment: dict[str, str]) -> WorkerProcess:
    """Starts a worker with pipes for what it prints."""
    # A session of its own: Ctrl-C at the terminal reaches the launcher alone, which hands it on once.
    return WorkerProcess(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def printed_lines(worker: WorkerProcess, stream: IO[bytes]) -> Iterator[str]:
    """The lines that a worker prints, until it has ended: what it has started may live on, and hold the stream open."""
    poll, rest, until = select.poll(), b"", float("inf")
    poll.register(stream, select.POLLIN)
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
        if len(rest) > _LONGEST:  # no line, and no memory has room for what never ends
            yield rest.decode(errors="replace")
            rest = b""
        over = over or not piece
    if rest:
        yield rest.decode(errors="replace")
