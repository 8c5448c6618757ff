"""Snapshots that the workers of an elastic job keep in memory, for the next attempt to start from."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from callbacks.run_record.journal import jsonable
from loop.checkpoint.kept import Kept
from loop.checkpoint.writer import arrays
from loop.launch.worker import has_unsaved
from loop.run import state

if TYPE_CHECKING:
    from loop.run.run import Run

COPIED_PER_SECOND = 2e9
"""The rate at which variables are copied, in bytes a second; most machines are faster."""
COST = 0.01
"""The greatest share of the time that snapshots may take."""


class MemorySnapshots:
    """Takes snapshots, as often as `COST` allows."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._due_at = 0.0
        self._taken = 0

    @property
    def due(self) -> bool:
        """Whether the next one is due. The chief's clock decides."""
        backend = self._run.backend
        return backend.member is not None and backend.is_chief and time.monotonic() >= self._due_at

    def take(self) -> None:
        """Takes a snapshot. All workers call it.

        It costs the time that it takes, and the time in which the next step copies the variables that it changes. The
        next one is due when that is no more than `COST` of the time since this one.
        """
        run = self._run
        member = run.backend.member
        assert member is not None  # else no worker asks for a snapshot
        begun = time.monotonic()
        with run.defer_errors(), run.watchdog.phase("keeping a snapshot"), run.stopwatch.at("saving"):
            run.step.average_statistics()
            parts = state.gather(run)
            if parts is None:
                return
            # Whole on each worker: the slices of one that is lost would be lost with it.
            tensors, rest = state.snapshot(run, state.gathered(run, keep=True))
            rest |= {"history": jsonable(run.history), "workers": parts.workers}
            member.kept = Kept(run.directory, tensors | parts.streams, rest)
            has_unsaved.set()

            now = time.monotonic()
            size = sum(array.nbytes for array in arrays(tensors).values())
            self._taken += 1
            if self._taken > 1:  # the first one isn't a measure: it is traced
                self._due_at = now + (now - begun + size / COPIED_PER_SECOND) / COST
