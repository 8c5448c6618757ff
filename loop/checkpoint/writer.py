"""Writer: writes and removes checkpoints in a thread, one after the other, while training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from callbacks.files import FileError, MovedError
from callbacks.run_record import journal
from callbacks.run_record.redaction import tell
from loop.checkpoint import array_files, checkpoint_files
from loop.checkpoint.array_files import InParts, Json
from loop.checkpoint.background import lower_priority
from loop.errors import named
from loop.monitor import fault_injection

T = TypeVar("T")


@dataclasses.dataclass
class Snapshot:
    """A checkpoint that is not written yet.

    On workers other than the chief it has no tensors and no state; nor on the chief, if it could not be taken.
    """

    reason: str  # why it was requested
    step: int  # the number of steps made
    tensors: dict[str, tf.Tensor | np.ndarray | InParts] = dataclasses.field(default_factory=dict)  # by name
    state: Json = dataclasses.field(default_factory=dict)  # everything else, as JSON values
    # The arrays of which this worker writes its part, by name.
    part: dict[str, tf.Tensor | np.ndarray] = dataclasses.field(default_factory=dict)


class Writer:
    """Writes checkpoints in a thread of its own, and keeps the outcome of each until it is taken.

    Args:
        check: called before each write; raises an error if the run directory was moved or deleted.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        # One thread: checkpoints are written in order, and a removal never overtakes the write before it.
        self._pool = ThreadPoolExecutor(1, "checkpoint", lower_priority)
        self._under_way: Future[Any] | None = None
        self._outcomes: deque[Exception | None] = deque()  # a deque, to which one thread may add while another pops

    def write(self, directory: Path, snapshots: Sequence[Snapshot]) -> None:
        """Starts to write checkpoints, oldest first.

        Args:
            directory: the directory of the checkpoints, in the run directory.
            snapshots: what to write; see `checkpoint_files.write`.
        """

        def job() -> None:
            for snapshot in snapshots:
                with self._noting_outcome(directory):
                    # First: a checkpoint that is complete must not name lines of the journal that a crash can lose.
                    self._rely_on_journal(directory, snapshot)
                    checkpoint_files.write(directory, snapshot.step, arrays(snapshot.tensors), snapshot.state)

        self._submit(job)

    def begin(self, directory: Path, step: int) -> Path | None:
        """Makes the directory into which all workers write their parts of a checkpoint; None: that has failed."""
        self.wait()  # `begin` removes what isn't complete, which must not be the one before
        try:
            self._check()
            return checkpoint_files.begin(directory, step)
        except Exception as error:
            self._outcomes.append(error)
            return None

    def write_part(self, partial: Path, rank: int, snapshot: Snapshot) -> Future[Json]:
        """Starts to write this worker's part of a checkpoint, and on the chief what is whole.

        Args:
            partial: what `begin` has returned on the chief.
            rank: of this worker.
            snapshot: what to write.

        Returns:
            Size and hash of each file by name; or the error, as a text, by the name "error".
        """

        def job() -> Json:
            step = snapshot.step
            try:
                self._check()
                files = array_files.write_arrays(partial / array_files.part_name(rank), arrays(snapshot.part))
                fault_injection.reached("write-part", rank, step)
                if rank == 0:
                    # The chief writes what is whole, beside its own part.
                    self._rely_on_journal(partial.parent, snapshot)
                    files |= array_files.write_arrays(partial / array_files.TENSORS, arrays(snapshot.tensors))
                    fault_injection.reached("write-tensors", rank, step)
                return files
            except Exception as error:  # as a text: the chief raises it, perhaps in another process
                return {"error": named(error)}

        return self._submit(job)

    def finish(self, partial: Path, snapshot: Snapshot, parts: Sequence[Json]) -> None:
        """On the chief: starts to complete a checkpoint whose parts are written.

        Args:
            partial: what `begin` has returned.
            snapshot: of the chief.
            parts: what the future of `write_part` has returned on each worker.
        """

        def job() -> None:
            with self._noting_outcome(partial.parent), checkpoint_files.removed_on_error(partial):
                files: Json = {}
                for rank, part in enumerate(parts):
                    if "error" in part:
                        problem = f"worker {rank} could not write its part: {part['error']}"
                        raise FileError(errno.EIO, problem, str(partial.with_suffix("")))
                    files |= part
                checkpoint_files.finish(partial, snapshot.step, files, arrays(snapshot.tensors), snapshot.state)

        self._submit(job)

    @contextlib.contextmanager
    def _noting_outcome(self, directory: Path) -> Iterator[None]:
        """Within it, one checkpoint is written or completed."""
        try:
            self._check()
            yield
            self._outcomes.append(None)
        except Exception as error:
            if isinstance(error, OSError):  # the error of a full disk names no file
                error.filename = error.filename or str(directory)
            self._outcomes.append(error)

    def _rely_on_journal(self, directory: Path, snapshot: Snapshot) -> None:
        """Makes the lines of the journal durable that a checkpoint relies on."""
        if "journal" in snapshot.state:
            _make_durable(directory.parent / journal.NAME)

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        self.wait()  # else memory fills with snapshots when the disk is slower than the training
        future = self._pool.submit(job)
        self._under_way = future
        return future

    def remove(self, path: Path) -> None:
        """Removes a checkpoint, after the current write."""

        def job() -> None:
            # Renamed first: a half-deleted checkpoint must not look like a checkpoint.
            doomed = path.with_name(path.name + ".tmp")
            try:
                self._check()
                path.rename(doomed)
                shutil.rmtree(doomed)
            except (FileNotFoundError, MovedError):  # another process has removed it
                return
            except OSError as error:
                tell(f"warning: the old checkpoint {path} can't be removed ({error})")

        self._pool.submit(job)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete, or has failed."""
        if self._under_way is not None:
            self._under_way.result()

    def outcomes(self) -> deque[Exception | None]:
        """The outcomes of finished writes, oldest first: None, or the error. The caller pops them from the left."""
        return self._outcomes

    def close(self) -> None:
        """Waits for all writes and removals, and ends the thread."""
        self._pool.shutdown()


def _make_durable(path: Path) -> None:
    """Flushes a file to the disk, so that a power failure doesn't lose it."""
    # A link isn't followed, and a pipe of that name doesn't block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as NumPy arrays, which share the memory of tensors on the host; other values stay as they are."""
    return {name: _array(value) if tf.is_tensor(value) else value for name, value in tensors.items()}


def _array(tensor: tf.Tensor) -> np.ndarray:
    # Not by `.numpy()`, which copies: all tensors at once, while the checkpoint is being written. But in the other way,
    # NumPy doesn't take a bfloat16 without a dimension.
    return np.asarray(tensor) if tensor.shape.rank else np.asarray(tensor.numpy())
