"""Writer: writes and removes checkpoints in a thread, one after the other, while training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from callbacks.files import MovedError
from callbacks.run_record import journal
from callbacks.run_record.redaction import tell
from loop.checkpoint import checkpoint_files


@dataclasses.dataclass
class Snapshot:
    """A checkpoint that is not written yet. On workers other than the chief it has no tensors and no state.

    Attributes:
        reason: why it was requested.
        step: the number of steps made.
        tensors: by name.
        state: everything else, as JSON values.
    """

    reason: str
    step: int
    tensors: dict[str, tf.Tensor | np.ndarray] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


class Writer:
    """Writes checkpoints in a thread of its own, and keeps the outcome of each until it is taken.

    Args:
        check: called before each write; raises an error if the run directory was moved or deleted.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        # One thread: checkpoints are written in order, and a removal never overtakes the write before it.
        self._pool = ThreadPoolExecutor(1, "checkpoint", _lower_priority)
        self._under_way: Future[None] | None = None
        self._outcomes: deque[Exception | None] = deque()

    def write(self, directory: Path, snapshots: Sequence[Snapshot]) -> None:
        """Starts to write checkpoints, oldest first.

        Args:
            directory: the directory of the checkpoints, in the run directory.
            snapshots: what to write; see `checkpoint_files.write`.
        """

        def job() -> None:
            for snapshot in snapshots:
                try:
                    self._check()
                    if "journal" in snapshot.state:  # the checkpoint relies on the lines of the journal so far
                        _make_durable(directory.parent / journal.NAME)
                    checkpoint_files.write(directory, snapshot.step, arrays(snapshot.tensors), snapshot.state)
                    self._outcomes.append(None)
                except Exception as error:
                    if isinstance(error, OSError):  # the error of a full disk names no file
                        error.filename = error.filename or str(directory)
                    self._outcomes.append(error)

        self.wait()  # else memory fills with snapshots when the disk is slower than the training
        self._under_way = self._pool.submit(job)

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
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lower_priority() -> None:
    """Lets the threads that train go first."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform == "linux":  # elsewhere it would be the priority of the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def arrays(tensors: dict[str, tf.Tensor | np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as NumPy arrays."""
    return {name: value if isinstance(value, np.ndarray) else value.numpy() for name, value in tensors.items()}
