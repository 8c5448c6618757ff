"""Writer: a thread that writes and removes checkpoints, one after the other, while training goes on."""

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
    """A checkpoint that is still to be written.

    Attributes:
        reason: why it was asked for.
        step: the number of steps made.
        tensors: by name; only the chief has them, as well as the state.
        state: all else, as JSON values.
    """

    reason: str
    step: int
    tensors: dict[str, tf.Tensor | np.ndarray] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


class Writer:
    """Writes checkpoints in a thread of its own; how each came out is kept until it is asked for."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """Makes a writer; `check` raises an error if what is to be written has no place any more."""
        self._check = check
        self._pool = ThreadPoolExecutor(1, "checkpoint", _give_way)
        self._under_way: Future[None] | None = None
        self._outcomes: deque[Exception | None] = deque()

    def write(self, directory: Path, snapshots: Sequence[Snapshot]) -> None:
        """Starts to write checkpoints, oldest first. Waits for those before, so that memory doesn't fill with them.

        Args:
            directory: of the checkpoints, in the run directory.
            snapshots: what to write; see `checkpoint.write`.
        """

        def job() -> None:
            for each in snapshots:
                try:
                    self._check()
                    if "journal" in each.state:  # the checkpoint relies on these lines
                        _make_durable(directory.parent / journal.NAME)
                    checkpoint_files.write(directory, each.step, arrays(each.tensors), each.state)
                    self._outcomes.append(None)
                except Exception as error:
                    if isinstance(error, OSError):  # a full disk doesn't say which
                        error.filename = error.filename or str(directory)
                    self._outcomes.append(error)

        self.wait()
        self._under_way = self._pool.submit(job)

    def remove(self, path: Path) -> None:
        """Removes a checkpoint, after what is being written."""

        def job() -> None:
            # Renamed first: a checkpoint that is half deleted must not look like one.
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
        """How the writes that have ended came out, oldest first: None, or the error. To be taken out from the left."""
        return self._outcomes

    def close(self) -> None:
        """Waits for everything, and ends the thread."""
        self._pool.shutdown()


def _make_durable(path: Path) -> None:
    """Has the disk take what was written to a file, so that a power failure doesn't lose it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_way() -> None:
    """Lets the threads that train go first."""
    with contextlib.suppress(OSError, AttributeError):  # on Linux a thread has a priority of its own
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


def arrays(tensors: dict[str, tf.Tensor | np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as NumPy arrays."""
    return {name: each if isinstance(each, np.ndarray) else each.numpy() for name, each in tensors.items()}
