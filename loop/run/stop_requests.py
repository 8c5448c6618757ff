"""Requests to stop a run: by a callback, or by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from callbacks import notebook
from loop.launch import signals
from loop.launch.environment import LAUNCHER
from loop.launch.worker import mark_state, stop_deferred

if TYPE_CHECKING:
    from loop.run.run import Run

STOPPING_UNSAVED = "interrupted: the run ends, and saves nothing; a second Ctrl-C (or signal) ends it at once"
"""The message that is printed at once when a signal stops a run that no callback saves."""
STOPPING_CELL = "interrupted: the run saves, and fit returns what there is; fit(..., run_dir=result.run_dir) goes on"
STOPPING_CELL_UNSAVED = "interrupted: fit returns what there is, and nothing is saved"
"""The same in a notebook."""


class StopRequests:
    """Whether this worker was asked to stop, and by what. All workers stop together, at a boundary between calls.

    Attributes:
        reason: the reason of the callback that asked for it; "": none did.
        signalled: whether a signal asked for it.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.signalled = False

    def request(self, reason: str) -> None:
        """Asks for a stop; the first reason counts."""
        self.reason = self.reason or reason or "a callback asked for it"

    @contextlib.contextmanager
    def handling_signals(self, run: Run) -> Iterator[None]:
        """Within it, a signal that stops a command ends the run at the next boundary; a second one ends it at once.

        SIGUSR1 asks for a checkpoint. In a job of tfloop, only the launcher counts signals: it passes its own on, and
        ends this process at a second one. A worker that hears two may have heard one twice, since a service or a Slurm
        step sends a signal to all processes.
        """
        stops = signals.stops()
        wishes = signals.Wishes()

        # Both only set flags, which the next boundary reads: a handler may run between any two lines.
        def save(number: int, frame: FrameType | None) -> None:
            run.checkpointing.request("SIGUSR1", at_once=True)

        def stop(number: int, frame: FrameType | None) -> None:
            self.signalled = True

        # Called by a thread, at once. The handlers above are called only after the compiled call under way.
        def announce(number: int) -> None:
            if number not in stops or os.environ.get(LAUNCHER) == str(os.getppid()):
                return
            before = wishes.count
            if wishes.hear(number) > 1 and not notebook.active():  # the end of a kernel would lose all of the notebook
                signals.die(number)
            if not before and run.backend.is_chief:
                # In its own thread: writing to a full pipe blocks, and the second signal must be handled all the same.
                threading.Thread(target=_announce_stop, args=(run.save_on_stop,), daemon=True).start()

        if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
            yield
            return
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            **dict.fromkeys(stops, stop),
            signal.SIGUSR1: save,
        }
        with signals.handled(handlers), signals.watched(announce):
            self.signalled = self.signalled or stop_deferred.is_set()
            # Last, because it says that a signal has the run save from now on.
            mark_state("trains", str(run.directory))
            yield


def _announce_stop(saves: bool) -> None:
    """Prints at once what the signal does, since the next boundary may be minutes away."""
    if notebook.active():
        print(STOPPING_CELL if saves else STOPPING_CELL_UNSAVED, flush=True)
        return
    text = signals.STOPPING if saves else STOPPING_UNSAVED
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a terminal that is gone, or closed
        start = "\r\x1b[K" if sys.stderr.isatty() else ""  # removes the progress bar from the line
        print(f"{start}{text}", file=sys.stderr, flush=True)
