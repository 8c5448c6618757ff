"""Checkpointing: the checkpoints of a run that were asked for, are held in memory, being written, or complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from callbacks.run_record.redaction import tell
from loop.checkpoint.array_files import InParts, Json
from loop.checkpoint.writer import Snapshot, Writer
from loop.errors import message_of
from loop.monitor import fault_injection
from loop.run import state
from loop.run.checkpoint_parts import CheckpointParts
from loop.run.memory_snapshots import MemorySnapshots

if TYPE_CHECKING:
    from loop.run.run import Run

NO_WRITE = 0
"""The oldest checkpoint under way is still being written, or there is none."""
WRITTEN = 1
"""It is complete."""
FAILED = 2
"""It could not be written."""


@dataclasses.dataclass
class SavePolicy:
    """How checkpoints are written; callbacks set it on the run, where `callbacks.Run` describes each of these."""

    save_on_stop: bool = False
    check_on_save: bool = False
    save_in_background: bool = True
    save_must_succeed: bool = True
    best_is_judged: bool = False
    history_in_journal: bool = False


class Checkpointing:
    """The checkpoints of one run. The snapshots and their order are the same on all workers; the chief writes them.

    Attributes:
        policy: how they are written.
        memory: the snapshots of an elastic job.
        writer: the thread that writes them.
        parts: the checkpoint of which each worker writes its part.
        held: a snapshot that is written before the next checkpoint.
        saved_path: the checkpoint that was last completed in this process.
        newest: the name of the newest checkpoint in the run directory.
        best: on the chief: the step whose weights are the result, the metric and its value.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.policy = SavePolicy()
        self.memory = MemorySnapshots(run)
        self.writer = Writer(run.check_directory)
        self.parts = CheckpointParts(run, self.writer)
        self.held: Snapshot | None = None
        self.saved_path: Path | None = None
        self.newest: str | None = None
        self.best: Json | None = None
        self._reason = ""  # of the checkpoint that was asked for; "": none was
        self._hold_reason = ""
        self._at_once = False
        self._under_way: list[tuple[str, int]] = []  # reason and step, oldest first; the same on all workers

    def request(self, reason: str, later: bool = False, at_once: bool = False) -> None:
        """Asks for a checkpoint at the next boundary; `reason` says what it is for.

        It is held in memory if it may come `later`; with `at_once`, it is taken within an evaluation, too.
        """
        reason = reason or "callback"
        # In an elastic job, other workers go on when the chief is lost, and with it what it holds in memory. And a
        # worker can't complete a held checkpoint alone when the run fails.
        if later and self._run.backend.member is None and not self.parts.possible:
            self._hold_reason = reason
            return
        self._reason = self._reason or reason
        self._at_once = self._at_once or at_once

    def continue_from(self, path: Path) -> None:
        """Notes the checkpoint of this run directory that the run goes on from."""
        self.newest = path.name

    def wants_save(self, evaluating: bool) -> bool:
        """Whether a checkpoint was asked for that can be taken now; most wait for the end of an evaluation."""
        return self._at_once or (bool(self._reason) and not evaluating)

    def wants_hold(self, evaluating: bool) -> bool:
        """Whether a snapshot was asked for that can be taken now, and written later."""
        return bool(self._hold_reason) and not evaluating

    def next_outcome(self) -> int:
        """The outcome of the oldest write, while other workers don't know it: `WRITTEN`, `FAILED` or `NO_WRITE`."""
        outcomes = self.writer.outcomes()
        if not outcomes:
            return NO_WRITE
        # One at a boundary: `agreement` has one place for it.
        error = outcomes.popleft()
        if error is None:
            return WRITTEN
        if self.policy.save_must_succeed:
            self._run.errors.add(error)
        else:
            tell(f"warning: a checkpoint could not be written ({message_of(error)}); training goes on")
        return FAILED

    def take_outcome(self, outcome: int) -> str:
        """Notes the outcome, which all workers know now; returns the reason of a checkpoint that is complete, or ""."""
        if outcome == NO_WRITE:
            return ""
        # By order alone: the outcome is exchanged as a number, which names no checkpoint.
        reason, step = self._under_way.pop(0)
        if outcome == FAILED:
            return ""
        self.saved_path = self._directory / f"step-{step:08d}"
        self.newest = self.saved_path.name
        return reason

    def save(self) -> None:
        """Takes the snapshot that the workers have agreed on, and lets the chief write it. All workers call it."""
        run = self._run
        # Without its last checkpoint, what was trained since the one before is lost.
        self.policy.save_must_succeed |= run.decision.stop or run.at_end
        with run.defer_errors(), run.watchdog.phase("saving"), run.stopwatch.at("saving"):
            # Before `_snapshot`, which clears the reason to hold: a save takes the place of a hold.
            usual_reason = "end" if run.at_end else "signal"
            reason = self._reason or self._hold_reason or run.stop_reason or usual_reason
            self._reason = ""
            self._at_once = False
            held = self.held
            self.held = None
            if run.decision.check:
                run.check_replicas()

            snapshots = [held, self._snapshot(reason)]
            self._write([snapshot for snapshot in snapshots if snapshot is not None])

    def _write(self, pending: list[Snapshot]) -> None:
        """Starts to write snapshots, oldest first."""
        if not pending:
            return
        # On all workers, though the chief writes: outcomes come in this order.
        for snapshot in pending:
            self._under_way.append((snapshot.reason, snapshot.step))
        if self.parts.are_used():
            self.parts.write(pending[0])  # the only one: none is held
        elif self._run.backend.is_chief:
            # Without its content, a snapshot could not be taken: that error ends the run.
            self.writer.write(self._directory, [snapshot for snapshot in pending if snapshot.state])

    def hold(self) -> None:
        """Takes the snapshot that the workers have agreed on, to be written before the next checkpoint."""
        run = self._run
        with run.defer_errors(), run.watchdog.phase("saving"), run.stopwatch.at("saving"):
            self.held = None  # before the next one is taken, so that memory never holds two
            self.held = self._snapshot(self._hold_reason)

    def _snapshot(self, reason: str) -> Snapshot | None:
        """The state of this boundary; None on all workers, if one of them has failed."""
        run = self._run
        self._hold_reason = ""
        run.step.average_statistics()
        parts = state.gather(run, fault_point="save")
        if parts is None:
            return None
        snapshot = Snapshot(reason, run.progress.step)
        whole: Mapping[str, np.ndarray | InParts] = {}
        in_parts = self.parts.are_used()
        if not in_parts:
            whole = state.gathered(run, keep=run.backend.is_chief)
        # A worker that fails here must still enter the collectives that follow, with a snapshot that lacks its content.
        with run.defer_errors():
            fault_injection.reached("snapshot", run.backend.rank, run.progress.step)
            if in_parts:
                whole, snapshot.part = state.in_parts(run)
            if run.backend.is_chief:
                tensors, rest = state.snapshot(run, whole)
                rest |= state.history_of(run) | {"workers": parts.workers}
                if self.best is not None:
                    rest["best"] = self.best
                snapshot.tensors = tensors | parts.streams
                snapshot.state = rest
        return snapshot

    @property
    def under_way(self) -> int:
        """The number of checkpoints whose outcome the workers have not agreed on; the same on all workers."""
        return len(self._under_way)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete, or has failed. All workers call it."""
        with self._run.watchdog.phase("saving"), self._run.stopwatch.at("saving"):
            self.parts.complete()
            self.writer.wait()

    def close(self) -> None:
        """Writes the held snapshot, waits for all writes, and ends the thread."""
        # Without agreement, since other workers may be gone. A held snapshot is complete, and newer than those on disk.
        held = self.held
        self.held = None
        if held is not None and held.state and self._run.backend.is_chief:
            self.writer.write(self._directory, [held])
        self.writer.close()

    def raise_errors(self) -> None:
        """Raises the error of a checkpoint that could not be written, if the workers have not agreed on it."""
        for error in self.writer.outcomes():
            if error is not None:
                raise error

    @property
    def _directory(self) -> Path:
        return self._run.directory / "checkpoints"
