"""Checkpoints of a sharded optimizer: each worker writes the slices that it owns, all at the same time.

The chief makes the directory. All workers write into it while training goes on. When all have said so at a boundary,
the chief writes the manifest and gives the checkpoint its name: so it is complete, or isn't there.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from loop.checkpoint.array_files import Json
from loop.checkpoint.writer import Snapshot, Writer

if TYPE_CHECKING:
    from loop.run.run import Run


class CheckpointParts:
    """The checkpoint whose parts are being written: at most one. All workers call each method at the same boundary."""

    def __init__(self, run: Run, writer: Writer) -> None:
        self._run = run
        self._writer = writer
        self._shared_directory: bool | None = None  # until the workers have looked
        self._partial = Path()
        self._pending: tuple[Snapshot, Future[Json]] | None = None

    @property
    def possible(self) -> bool:
        """Whether workers own slices of the optimizer's state."""
        return self._run.built.shards is not None and self._run.backend.workers > 1

    def are_used(self) -> bool:
        """Whether they own slices, and all see the chief's run directory. The first call asks all workers."""
        if self.possible and self._shared_directory is None:
            self._shared_directory = self._is_shared(self._run.directory)
        return bool(self._shared_directory)

    def _is_shared(self, directory: Path) -> bool:
        # By a file with a random name: the same path may be another directory on another machine.
        backend = self._run.backend
        mark = directory / f".shared-{backend.broadcast_json(secrets.token_hex(8))}"
        if backend.is_chief:
            with self._run.defer_errors():
                mark.touch()
        backend.exchange(0)  # no worker looks before the chief has made it
        seen = backend.exchange(mark.exists())  # and the chief removes it only when all have looked
        if backend.is_chief:
            with self._run.defer_errors():
                mark.unlink(missing_ok=True)
        return bool(seen.all())

    def write(self, snapshot: Snapshot) -> None:
        """Starts to write this worker's part of a checkpoint."""
        self.complete()  # one checkpoint at a time
        backend = self._run.backend
        directory = self._run.directory / "checkpoints"
        self._partial = directory / f"step-{snapshot.step:08d}.tmp"
        ready = bool(snapshot.part)
        if backend.is_chief:
            ready = ready and bool(snapshot.state) and self._writer.begin(directory, snapshot.step) is not None
        if backend.exchange(ready).all():  # else a worker, or the chief's writer, has an error that ends the run
            self._pending = (snapshot, self._writer.write_part(self._partial, backend.rank, snapshot))

    @property
    def written(self) -> bool:
        """Whether this worker has written its part, or has failed to."""
        return self._pending is not None and self._pending[1].done()

    def complete(self) -> None:
        """Waits until all parts are written, and lets the chief complete the checkpoint; does nothing without one."""
        if self._pending is None:
            return
        snapshot, written = self._pending
        # An error of a worker comes as text in its part; `finish` on the chief makes it the outcome of the write.
        parts = self._run.backend.gather_json(written.result())
        if self._run.backend.is_chief:
            self._writer.finish(self._partial, snapshot, parts)
        self._pending = None
