"""Watchdog: when nothing has ended for long, says what this worker is at, since when, and with which stacks."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from callbacks.run_record.redaction import tell


class Watchdog:
    """The watch over one worker. Every worker has one, so that together they show who waits for whom.

    Args:
        rank: of this worker.
        workers: how many there are.
        stall_timeout: how long nothing may end before it speaks, in seconds; None: it never does.
    """

    def __init__(self, rank: int, workers: int, stall_timeout: float | None) -> None:
        self._who = f"rank {rank} of {workers}"
        self._timeout = stall_timeout
        self._phases: list[tuple[str | Callable[[], str], float]] = []
        self._beat = time.monotonic()
        self._where = "before the first step"
        self._ended = threading.Event()

    @contextlib.contextmanager
    def phase(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Within it, the worker is at `what`: a text, or a function that finds out, called by another thread."""
        self._phases.append((what, time.monotonic()))
        try:
            yield
        finally:
            self._phases.pop()

    def beat(self, step: int, epoch: int) -> None:
        """Something has ended: the worker is alive."""
        self._beat, self._where = time.monotonic(), f"step {step}, epoch {epoch + 1}"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a thread watches."""
        if self._timeout is None:
            yield
            return
        self._beat = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(self._timeout,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()

    def _watch(self, timeout: float) -> None:
        beat, patience = self._beat, timeout
        while not self._ended.wait(min(timeout / 4, 5.0)):
            if beat != self._beat:
                beat, patience = self._beat, timeout
            if time.monotonic() - beat >= patience:
                with contextlib.suppress(Exception):  # what it asks may be in any state
                    tell(self.report())
                patience *= 2  # a log isn't to be flooded

    def report(self) -> str:
        """What this worker is at, and the stacks of all its threads."""
        what, since = [("between calls", self._beat), *self._phases][-1]
        phase = what if isinstance(what, str) else what()
        lines = [
            f"watchdog: {self._who}: no call has ended for {time.monotonic() - self._beat:.0f} s; it is at {phase} for "
            f"{time.monotonic() - since:.0f} s ({self._where}). Its threads:"
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                stack = traceback.format_stack(frame)[-12:]
                lines += [f"thread {names.get(ident, ident)}:", *"".join(stack).rstrip().splitlines()]
        return "\n".join(lines)
