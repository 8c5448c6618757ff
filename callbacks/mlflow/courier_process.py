"""The process that delivers to MLflow, as the training sees it: started early, asked to end, kept for the next run."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from callbacks.files import ROOT, sqlite_path
from callbacks.run_record.redaction import tell
from callbacks.types import JsonObject

ANSWER = b"\x1e"
"""Starts the line on stdout with the outcome (ASCII record separator); MLflow may print others."""
_SILENT = 0.3  # seconds that the end of the run may wait without a message
_GRACE = 5.0  # seconds beyond the wait after which a process that doesn't answer is killed


class CourierProcess:
    """A process that has imported MLflow, or is about to; see `courier.main`.

    Args:
        uri: the store for which it is started.

    Attributes:
        process: the process itself.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, uri: str) -> None:
        self._circumstances = _circumstances()
        self._store: object = None  # that of the run that it has delivered
        # A process, not a thread: importing MLflow would block the interpreter, and so the training, for up to a tenth
        # of a second at a time. And a process can be left behind, whatever it hangs in.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "callbacks.mlflow.courier", uri.partition(":")[0]],
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def order(self, line: JsonObject | float) -> None:
        """Sends a line to the process. If it has died, the end of the run reports it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(line).encode() + b"\n")

    def finish(self, uri: str, wait: float) -> JsonObject:
        """Has the process deliver the rest of its run; returns the outcome. If all is well, the process is kept.

        Args:
            uri: the store of the run.
            wait: the longest time that it may take, in seconds.
        """
        self.order(wait)
        line = self._answer(_SILENT)
        if line is None:
            tell(f"sending the rest to MLflow (at most {wait:.0f} s) ...")
            line = self._answer(wait + _GRACE)
        if line is None:
            self.end()
            return {"error": f"no answer within {wait:.0f} s"}
        if not line:
            self.process.wait()
            self.end()
            return {"error": f"its process ended with {self.process.returncode}"}
        outcome: JsonObject = json.loads(line)
        if outcome["error"]:  # it is still trying
            self.end()
        else:
            self._store = _store(uri)
            _idle.append(self)
        return outcome

    def end(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.communicate()

    def fits(self, uri: str) -> bool:
        """Whether the process can deliver another run to this store, as a new one would."""
        same_store = self._store == _store(uri)
        return same_store and self._circumstances == _circumstances() and self.process.poll() is None

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, and not the one from which this process was forked."""
        return self._circumstances[0] == os.getpid()

    def _answer(self, seconds: float) -> bytes | None:
        """The outcome that the process prints; b"" if it ends without one; None if it takes longer."""
        stdout = self.process.stdout
        assert stdout is not None
        deadline = time.monotonic() + seconds
        while select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = stdout.readline()
            if not line.endswith(b"\n"):
                return b""
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER)
        return None


_idle: list[CourierProcess] = []
"""The process that has delivered the last run. In a notebook the next `fit` takes it, and saves MLflow's import, which
takes seconds. It ends with this process."""


def courier_for(uri: str) -> CourierProcess:
    """A process for a run that goes to this store: the idle one, or a new one.

    Raises:
        OSError: no process can be started.
    """
    for courier in [courier for courier in _idle if courier.is_ours]:
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
    """What a process takes from the one that starts it. MLflow reads passwords and much else from the environment."""
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
        about = path.stat()
        return uri, about.st_dev, about.st_ino
    return None
