"""Watchdog: reports a worker that has made no progress for long: its phase, since when, and all stacks."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from callbacks.run_record.redaction import tell


class Watchdog:
    """Watches one worker. Every worker has one, so that their reports together show which one the others wait for.

    It reports after so many seconds without progress; None: never.
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
        """Within it, the worker's phase is `what`: a text, or a function that returns it and runs in another thread."""
        self._phases.append((what, time.monotonic()))
        try:
            yield
        finally:
            self._phases.pop()

    def beat(self, step: int, epoch: int) -> None:
        """Notes progress: something has ended."""
        # No lock: the watchdog sees each assignment whole, and may see an old value once.
        self._beat = time.monotonic()
        self._where = f"step {step}, epoch {epoch + 1}"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, a thread watches the worker."""
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
        beat = self._beat
        patience = timeout
        while not self._ended.wait(min(timeout / 4, 5.0)):  # a short timeout is noticed in time, too
            if beat != self._beat:  # progress since the last look: back to the first patience
                beat = self._beat
                patience = timeout
            if time.monotonic() - beat >= patience:
                with contextlib.suppress(Exception):  # the training thread may be in any state
                    tell(self.report())
                patience *= 2  # else a long stall floods the log

    def report(self) -> str:
        """The phase of this worker, and the stacks of all its threads."""
        # A copy: the training thread may change the list at any moment.
        what, since = [("between calls", self._beat), *self._phases][-1]
        phase = what if isinstance(what, str) else what()
        lines = [
            f"watchdog: {self._who}: no call has ended for {time.monotonic() - self._beat:.0f} s; it is at {phase} for "
            f"{time.monotonic() - since:.0f} s ({self._where}). Its threads:"
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():  # there is no public function for other threads' stacks
            if ident == threading.get_ident():  # the watchdog's own
                continue
            stack = traceback.format_stack(frame)[-12:]
            lines += [f"thread {names.get(ident, ident)}:", *"".join(stack).rstrip().splitlines()]
        return "\n".join(lines)
