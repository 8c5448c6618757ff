"""The process that delivers to MLflow, as the training sees it: started early, asked to end, kept for the next run."""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path

from callbacks.files import sqlite_path
from callbacks.run_record.redaction import tell
from callbacks.side_process import SideProcess
from callbacks.types import JsonObject

_SILENT = 0.3  # seconds that the end of the run may wait without a message
_GRACE = 5.0  # seconds beyond the wait after which a process that doesn't answer is killed


class CourierProcess(SideProcess):
    """A process that has imported MLflow for a store, or is about to; see `courier.main`.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, uri: str) -> None:
        self._circumstances = _circumstances()
        self._store: object = None  # that of the run that it has delivered
        # A process, not a thread: importing MLflow would block the interpreter, and so the training, for up to a tenth
        # of a second at a time. And a process can be left behind, whatever it hangs in.
        super().__init__("callbacks.mlflow.courier", uri.partition(":")[0])

    def finish(self, uri: str, wait: float) -> JsonObject:
        """Has the process deliver the rest of its run within a time; returns the outcome. It is kept if all is well."""
        self.order(wait)
        try:
            outcome = self.answer(_SILENT)
            if outcome is None:
                tell(f"sending the rest to MLflow (at most {wait:.0f} s) ...")
                outcome = self.answer(wait + _GRACE)
        except EOFError as error:
            outcome = {"error": str(error), "warnings": []}
        if outcome is None:
            outcome = {"error": f"no answer within {wait:.0f} s", "warnings": []}
        if outcome["error"]:  # it is still trying, hangs, or has ended
            self.end()
        else:
            self._store = _store(uri)
            _idle.append(self)
        return outcome

    def fits(self, uri: str) -> bool:
        """Whether the process can deliver another run to this store, as a new one would."""
        same_store = self._store == _store(uri)
        return same_store and self._circumstances == _circumstances() and self.process.poll() is None

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, and not the one from which this process was forked."""
        return self._circumstances[0] == os.getpid()


_idle: list[CourierProcess] = []
"""The process that has delivered the last run. In a notebook the next `fit` takes it, and saves MLflow's import, which
takes seconds. It ends with this process."""


def courier_for(uri: str) -> CourierProcess:
    """A process for a run that goes to this store: the idle one, or a new one.

    Raises:
        OSError: no process can be started.
    """
    for courier in list(_idle):  # a copy, since couriers are removed
        if not courier.is_ours:
            continue
        _idle.remove(courier)
        if courier.fits(uri):
            return courier
        courier.end()
    return CourierProcess(uri)


@atexit.register
def _end_idle() -> None:
    for courier in _idle:
        if courier.is_ours:
            courier.end()


def _circumstances() -> tuple[int, str, dict[str, str]]:
    """What a process inherits from the one that starts it. MLflow reads passwords and more from the environment."""
    directory = ""
    with contextlib.suppress(OSError):  # it was removed
        directory = str(Path.cwd())
    return os.getpid(), directory, dict(os.environ)


def _store(uri: str) -> object:
    """What tells a store from another one: its URI, and the file, which may have been removed and made anew."""
    path = sqlite_path(uri)
    if path is None:
        return uri
    with contextlib.suppress(OSError):
        status = path.stat()
        return uri, status.st_dev, status.st_ino
    return None
