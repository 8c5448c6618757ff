"""MLflowTracker: shows the run in MLflow. A thread of its own follows the journal: training never waits for it."""

from __future__ import annotations

import getpass
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from callbacks import journal
from callbacks.base import Callback, Run
from callbacks.redact import redact

STATE = "mlflow.json"
"""The file in the run directory that says which MLflow run this is, and how far the journal has been delivered."""
_BATCH = 1000  # the most metrics that MLflow's log_batch takes
_KEY_LENGTH, _PARAM_LENGTH = 250, 6000
_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


def default_uri() -> str:
    """The tracking store: `MLFLOW_TRACKING_URI`, or the sqlite file `runs/mlflow.db` below the current directory.

    Always explicit: MLflow's own default changes silently when an old `./mlruns` lies about.
    """
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('runs').resolve() / 'mlflow.db'}"


class MLflowTracker(Callback):
    """Logs the run to MLflow: parameters, metrics by step, tags, the run directory's files, and how it ended.

    Metrics of an epoch bear their plain names; those within an epoch are named `step/...`. A run that is resumed in its
    directory goes on in the same MLflow run. Trouble with the store is told once and never stops the training: all
    points are in the journal.

    Args:
        uri: the tracking store; None: see `default_uri`.
        experiment: the experiment's name; None: the task's.
        wait: how long the end of the run may wait for the store, in seconds.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None, wait: float = 60.0) -> None:
        self.uri = uri
        self.experiment = experiment
        self.wait = wait
        self._courier: _Courier | None = None

    def on_fit_start(self, run: Run) -> None:
        if not (run.directory / journal.NAME).exists():
            raise ValueError("MLflowTracker feeds on the journal: keep callbacks.Journal in the set")
        self._courier = _Courier(self.uri or default_uri(), self.experiment or run.info["task"], run)
        self._courier.start()

    def on_fit_end(self, run: Run, status: str) -> None:
        if self._courier is not None:
            self._courier.finish(_STATUS[status], self.wait)


class _Courier(threading.Thread):
    """Delivers the lines of one journal to one MLflow run, in batches, until it is told how the run ended."""

    def __init__(self, uri: str, experiment: str, run: Run) -> None:
        super().__init__(name="mlflow", daemon=True)
        self._uri, self._experiment = uri, experiment
        self._directory, self._info = run.directory, run.info
        self._ended = threading.Event()
        self._status = "KILLED"
        # Training doesn't wait for MLflow, and may be over when the run is made there: these are its own times.
        self._begun_at = self._ended_at = time.time()
        self._state: dict[str, Any] = {"uri": redact(uri), "run_id": None, "offset": 0, "last_step": {}}
        self._error: Exception | None = None

    def finish(self, status: str, wait: float) -> None:
        """Lets the thread deliver the rest and waits for it, at most `wait` seconds."""
        self._status, self._ended_at = status, time.time()
        self._ended.set()
        self.join(1.0)
        if self.is_alive() and sys.stderr.isatty():
            print(f"sending the rest to MLflow (at most {wait:.0f} s) ...", file=sys.stderr)
        self.join(max(wait - 1.0, 0.0))
        if self.is_alive() or self._error:
            why = f"no answer within {wait:.0f} s" if self.is_alive() else f"{self._error}"
            self._warn(f"MLflow at {redact(self._uri)} did not take everything ({why})")

    def _warn(self, text: str) -> None:
        print(f"warning: {text}; all points are in {self._directory / journal.NAME}", file=sys.stderr, flush=True)

    def run(self) -> None:
        try:
            client = self._connect()
            while not self._ended.is_set():
                self._deliver(client)
                self._ended.wait(0.5)
            self._deliver(client)
            for name in ("run.json", journal.NAME, "metrics.csv"):
                if (self._directory / name).exists():
                    client.log_artifact(self._state["run_id"], str(self._directory / name))
            client.set_terminated(self._state["run_id"], self._status, int(1000 * self._ended_at))
        except Exception as error:  # whatever the store does, training goes on; told at the end of the run
            self._error = error

    def _connect(self) -> Any:
        # A server that is gone is found out in seconds, not in the minutes of MLflow's defaults.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        if self._uri.startswith("sqlite:///"):
            Path(self._uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(self._uri)
        self._load()
        if self._state["run_id"] is None:
            # What tells runs apart comes first: tables cut the rest.
            name = f"{self._info['backend']}-{self._info['replicas']} "
            name += self._directory.name.removeprefix(f"{self._info['task']}-")
            run = client.create_run(self._experiment_id(client), int(1000 * self._begun_at), run_name=name)
            self._state["run_id"] = run.info.run_id
            options, fields = self._info["options"], self._info["hyperparameters"]
            clashes = {f"option.{name}": options[name] for name in options if name in fields}
            params = options | fields | clashes
            params = {name: value for name, value in params.items() if value is not None}
            tags = {
                "mlflow.user": _user(),
                "mlflow.source.type": "LOCAL",
                "mlflow.source.name": str(self._info["target"]),
                "tfloop.run_directory": str(self._directory),
                "tfloop.parameters": str(self._info["parameters"]),
                **{f"version.{name}": version for name, version in self._info["versions"].items()},
                **{name: str(self._info[name]) for name in ("backend", "replicas", "workers")},
            }
            client.log_batch(
                run.info.run_id,
                params=[Param(str(k)[:_KEY_LENGTH], str(v)[:_PARAM_LENGTH]) for k, v in redact(params).items()],
                tags=[RunTag(key, redact(value)) for key, value in tags.items()],
            )
            self._store()
        else:
            client.update_run(self._state["run_id"], status="RUNNING")
        return client

    def _experiment_id(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        location = None
        if self._uri.startswith("sqlite:///"):
            location = (Path(self._uri.removeprefix("sqlite:///")).parent / "mlartifacts").resolve().as_uri()
        try:
            kind = {"mlflow.experimentKind": "custom_model_development"}
            return str(client.create_experiment(self._experiment, artifact_location=location, tags=kind))
        except MlflowException:  # another run has created it in the meantime
            return str(client.get_experiment_by_name(self._experiment).experiment_id)

    def _deliver(self, client: Any) -> None:
        from mlflow.entities import Metric

        batch: list[Metric] = []
        for entry, offset in journal.read(self._directory / journal.NAME, self._state["offset"]):
            for name, value in points(entry):
                # A resumed run makes some steps again, with the same values: each is delivered once.
                if entry["step"] > self._state["last_step"].get(name, -1):
                    self._state["last_step"][name] = entry["step"]
                    batch.append(Metric(name[:_KEY_LENGTH], value, int(entry["time"] * 1000), entry["step"]))
            if len(batch) >= _BATCH // 2:
                self._send(client, batch, offset)
                batch = []
            self._state["offset"] = offset
        self._send(client, batch, self._state["offset"])

    def _send(self, client: Any, batch: list[Any], offset: int) -> None:
        for start in range(0, len(batch), _BATCH):
            client.log_batch(self._state["run_id"], metrics=batch[start : start + _BATCH])
        if batch:
            self._state["offset"] = offset
            self._store()

    def _load(self) -> None:
        path = self._directory / STATE
        if path.exists():
            state = json.loads(path.read_text())
            if state["uri"] == self._state["uri"]:
                self._state = state

    def _store(self) -> None:
        partial = self._directory / (STATE + ".tmp")
        partial.write_text(json.dumps(self._state))
        partial.replace(self._directory / STATE)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


def points(entry: dict[str, Any]) -> list[tuple[str, float]]:
    """The metric points of one line of a journal, under the names that they have in MLflow."""
    metrics = {name: float(value) for name, value in entry.get("metrics", {}).items()}
    if entry["event"] == "steps_end":
        return [(f"step/{name}", value) for name, value in metrics.items()]
    if entry["event"] == "eval_end":
        return list(metrics.items())
    if entry["event"] == "epoch_end":  # those of the evaluation had an event of their own
        return [(name, value) for name, value in metrics.items() if not name.startswith("eval_")]
    return []
