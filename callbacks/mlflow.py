"""MLflowTracker: shows the run in MLflow. A process of its own follows the journal: training never waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from callbacks import journal
from callbacks.base import Callback, Run
from callbacks.redact import redact

STATE = "mlflow.json"
"""The file in the run directory that says which store, experiment and MLflow run this is."""
_ROOT = Path(__file__).resolve().parent.parent
_GRACE = 5.0  # seconds beyond the wait after which a process that doesn't say anything is killed


def default_uri() -> str:
    """The tracking store: `MLFLOW_TRACKING_URI`, or the sqlite file `runs/mlflow.db` below the current directory.

    Always explicit: MLflow's own default changes silently when an old `./mlruns` lies about.
    """
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('runs').resolve() / 'mlflow.db'}"


def store(uri: str | None) -> str:
    """A tracking store that was given, or the default one; the path of a sqlite file is made absolute."""
    uri = uri or default_uri()
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


class MLflowTracker(Callback):
    """Logs the run to MLflow: parameters, metrics by step, tags, the run directory's files, and how it ended.

    Metrics of an epoch bear their plain names; those within an epoch are named `step/...`. A run that is resumed in its
    directory goes on in the same MLflow run. Trouble with the store is told once and never stops or delays the
    training: all points are in the journal, from which they are delivered as soon as the store can be reached.

    Args:
        uri: the tracking store; None: see `default_uri`.
        experiment: the experiment's name; None: the task's.
        wait: how long the end of the run may wait for the store, in seconds.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None, wait: float = 60.0) -> None:
        if not 0 <= wait <= 1e6:
            raise ValueError(f"MLflowTracker(wait={wait}): give seconds, from 0 to 1000000")
        self.uri = uri
        self.experiment = experiment
        self.wait = wait
        self._store = ""
        self._courier: subprocess.Popen[str] | None = None
        self._error = ""

    def on_fit_start(self, run: Run) -> None:
        if not (run.directory / journal.NAME).exists():
            raise ValueError("MLflowTracker feeds on the journal: keep callbacks.Journal in the set")
        if self._courier is not None:  # the workers of an elastic job have formed anew
            return
        self._store = store(self.uri)
        experiment = self.experiment or run.info["task"]
        write_state(run.directory, self._store, experiment)
        # A process, not a thread: importing MLflow alone, some seconds of Python, would take the interpreter from the
        # training for up to a tenth of a second at a time. And it can be left behind, whatever it is stuck in. The URI
        # goes by the environment, since it may hold a password, and a command line can be seen by all.
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        try:
            self._courier = subprocess.Popen(
                [sys.executable, "-P", "-m", "callbacks.delivery", str(run.directory), experiment],
                env={**os.environ, "MLFLOW_TRACKING_URI": self._store, "PYTHONPATH": path}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._error = f"no process can be started: {error.strerror}"

    def on_fit_end(self, run: Run, status: str) -> None:
        outcome: dict[str, Any] = {"error": self._error, "warnings": []}
        if self._courier is not None:
            outcome |= _finish(self._courier, self.wait)
            self._courier = None
        for text in outcome["warnings"]:
            _warn(text)
        if outcome["error"]:
            _warn(
                f"MLflow at {redact(self._store)} did not take everything ({outcome['error']}); all points "
                f"are in {run.directory / journal.NAME}, and `tfloop sync {run.directory}` delivers the rest"
            )


def _finish(courier: subprocess.Popen[str], wait: float) -> dict[str, Any]:
    """Lets the courier deliver the rest, and hears what became of it."""
    try:
        try:
            output, _ = courier.communicate(f"{wait}\n", timeout=1.0)
        except subprocess.TimeoutExpired:
            if sys.stderr.isatty():
                print(f"sending the rest to MLflow (at most {wait:.0f} s) ...", file=sys.stderr)
            output, _ = courier.communicate(timeout=wait + _GRACE)
        outcome: dict[str, Any] = json.loads(output.splitlines()[-1])
        return outcome
    except subprocess.TimeoutExpired:
        courier.kill()
        courier.communicate()
        return {"error": f"no answer within {wait:.0f} s"}
    except (IndexError, ValueError):
        return {"error": f"its process ended with {courier.returncode}"}


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def write_state(directory: Path, uri: str, experiment: str, run_id: str | None = None) -> None:
    """Notes where the run is delivered to; without `run_id`, what is known of that store stays."""
    old = journal.read_json(directory / STATE)
    state = {"uri": redact(uri), "experiment": experiment, "run_id": run_id}
    if run_id is None and old.get("uri") == state["uri"]:
        state["run_id"] = old.get("run_id")
    if state != old:
        partial = directory / (STATE + ".tmp")
        partial.write_text(json.dumps(state))
        partial.replace(directory / STATE)
