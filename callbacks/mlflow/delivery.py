"""Delivery: sends the journal of a run to MLflow; in a process beside the training, and in `tfloop sync`.

What is sent depends on the journal alone: its artifacts and, of each metric in the order of the lines, every point
whose step is greater than the steps before it (a resumed run makes some steps again, with the same values). How much
of it has arrived, the store itself says: the last step of each metric, and a tag that counts the artifacts. Nothing
else is recorded, so nothing can contradict the store, and a kill of either side at any moment neither loses a point
nor sends it twice. The order is that of steps, not of time, because clocks jump.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import itertools
import json
import logging
import os
import posixpath
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from callbacks.files import SQLITE, appending, hidden_name, is_plain, place, read_json, sqlite_path, sqlite_uri
from callbacks.mlflow import kept_models
from callbacks.mlflow.description import BEST, SPEED, best_values, note
from callbacks.mlflow.mlflow_run import MLflowRun
from callbacks.mlflow.points import Names, Point, milliseconds, points
from callbacks.mlflow.tracker import STATE, write_state
from callbacks.run_record import journal, record
from callbacks.run_record.redaction import mask, redact
from callbacks.run_record.report import NAME as REPORT
from callbacks.types import Foreign, JsonObject

SENT = "tfloop.artifacts"
"""The tag with the number of the journal's artifacts that the store has."""
_METRICS_AT_ONCE = 500  # MLflow takes 1000 metrics and 1 MB in a request
_REFUSALS = (400, 401, 403, 404)  # the states of HTTP of a store that answers, and takes nothing
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_loading = threading.Lock()  # two threads that import MLflow at once may deadlock
_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}  # anything else is KILLED


@dataclasses.dataclass
class _Position:
    """How far the journal has been sent."""

    last_steps: dict[str, int]  # the last step of each metric, by its name in MLflow
    sent_artifacts: int  # how many of the journal's artifacts the store has
    # The artifact lines of the journal, up to `offset`.
    artifacts: list[JsonObject] = dataclasses.field(default_factory=list)
    offset: int = 0  # the byte up to which the journal has been read
    time: int = 0  # the time of the last line, in ms


class Delivery:
    """Sends one run directory to one MLflow run. After an error it can be used again: it asks the store anew.

    Args:
        directory: the run directory, with `run.json` and the journal.
        uri: the tracking store.
        experiment: the experiment's name; None: the one in `mlflow.json`, else the task's.

    Attributes:
        run_id: the id of the MLflow run; "" before `connect`.
        count: the number of points sent.
        artifacts: the number of artifacts sent.
    """

    def __init__(self, directory: Path, uri: str, experiment: str | None = None) -> None:
        self.directory = directory
        self.uri = uri
        self.run_id = ""
        self.count = 0
        self.artifacts = 0
        about = read_json(directory / "run.json")
        self._experiment = experiment or read_json(directory / STATE).get("experiment") or about["task"]
        self._client: Foreign = None  # None: not connected
        self._names = Names()
        self._missing: dict[str, None] = {}  # artifacts that are not in the run directory any more
        self._problem = ""  # why artifacts can't be sent, where all else works

    def warnings(self) -> list[str]:
        """What could not be delivered unchanged."""
        texts = [self._problem] if self._problem else []
        for name in self._missing:
            texts.append(f"{name} isn't in {self.directory} any more: MLflow doesn't have it")
        changed = self._names.changed()
        if changed:
            more = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
            texts.append(
                f"MLflow can't hold {changed[0][:80]!r}{more} as it is: names have been changed, or values cut, there; "
                "all is in the run directory"
            )
        return texts

    def connect(self) -> None:
        """Finds the MLflow run, or creates it, and asks how much it has; does nothing if it is connected."""
        if self._client is not None:
            return
        client = client_of(self.uri)
        mlflow_run = MLflowRun(self.directory, self.uri, self._experiment, self._names)
        parent_id = None
        with contextlib.ExitStack() as stack:
            if "sweep" in read_json(self.directory / "run.json"):
                # All its trials look for its run at once, and only one of them may create it.
                lock = stack.enter_context(appending(self.directory / "mlflow.lock"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            elif "sweep" in read_json(self.directory.parent / "run.json"):
                sweep = Delivery(self.directory.parent, self.uri, self._experiment)
                sweep.connect()
                parent_id = sweep.run_id
            run = mlflow_run.find(client, parent_id)
            self.run_id = run.info.run_id
            self._mlflow_run = mlflow_run
            self._is_ours = mlflow_run.is_ours(self.run_id)
            write_state(self.directory, self.uri, self._experiment, run_id=self.run_id)
            mlflow_run.describe(client, run)
        # A request that timed out here may still be carried out there, after this look at the store. Its points are
        # then sent again; they are identical, since times come from the journal, and MLflow's SQL stores keep
        # identical points once.
        last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        sent = run.data.tags.get(SENT, "")
        sent_artifacts = int(sent) if sent.isdecimal() else 0
        self._position = _Position(last_steps, sent_artifacts)
        self._problem = ""
        self._client = client  # last: after an error before it, the next call connects anew
        _remove_escaped_directory(self.uri)

    def disconnect(self) -> None:
        """Forgets what the store has: after an error, it isn't known."""
        self._client = None

    def pending(self) -> int:
        """The number of points in the journal that the store doesn't have."""
        self.connect()
        # A copy, since `_due` moves the position: counting must not make `deliver` skip these points.
        return sum(1 for _ in self._due(copy.deepcopy(self._position)))

    def deliver(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Sends what the store doesn't have; `progress` is called with the number of points of each request."""
        self.connect()
        from mlflow.entities import Metric

        due = self._due(self._position)
        while batch := [Metric(*point) for point in itertools.islice(due, _METRICS_AT_ONCE)]:
            self._client.log_batch(self.run_id, metrics=batch)
            self.count += len(batch)
            progress(len(batch))
        if not self._problem:
            self._upload()

    def _upload(self) -> None:
        """Sends the artifacts that are due. One that a kill kept from being counted is sent again, and overwritten."""
        position = self._position
        for entry in position.artifacts[position.sent_artifacts :]:
            name = str(entry.get("path"))
            local = (self.directory / name).resolve()
            if local.is_relative_to(self.directory.resolve()) and _is_sound(local):
                to = entry.get("to", name if local.is_dir() else posixpath.dirname(name))
                send = self._client.log_artifacts if local.is_dir() else self._client.log_artifact
                if not self._sends(name, send, local, to):
                    return  # without counting it: `close` tries once more
                if entry.get("register") and not self._is_replaced(entry):
                    # A copy, since a run that goes on replaces its `model`, and a version must stay what it is.
                    step = entry.get("step")
                    copy = f"registered/step-{step if isinstance(step, int) else 0:08d}"
                    if not self._sends(name, send, local, copy):
                        return
                    self._register(str(entry["register"]), copy)
                self.artifacts += 1
            else:
                self._missing[name] = None
            position.sent_artifacts += 1
            # After each one, so that a kill leaves at most one to be sent again.
            self._client.set_tag(self.run_id, SENT, position.sent_artifacts)

    def _is_replaced(self, entry: JsonObject) -> bool:
        """Whether the run has written a later artifact to the same path: the earlier one is no longer there."""
        last = [other for other in self._position.artifacts if other.get("path") == entry.get("path")][-1]
        return last is not entry

    def _register(self, name: str, path: str) -> None:
        """Makes a model of the run a version of the registered model `name`, unless it is one already."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"runs:/{self.run_id}/{path}"
        versions = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        if not any((version.name, version.source) == (name, source) for version in versions):
            self._client.create_model_version(name, source, self.run_id)

    def _sends(self, name: str, send: Callable[..., object], local: Path, to: str = "") -> bool:
        """Sends a file or a directory. Returns whether the store took it."""
        return self._tries(f"file {name}", lambda: send(self.run_id, str(local), to or None))

    def _tries(self, what: str, send: Callable[[], object]) -> bool:
        """Sends something that a store may not take, where all else works. Returns whether it took it.

        Raises:
            Exception: the whole store is down.
        """
        try:
            send()
            return True
        except Exception as error:  # often the store keeps files where this machine can't write: not ours to repair
            self._client.get_run(self.run_id)  # raises if the whole store is down
            if not self._problem:
                self._problem = f"MLflow at {redact(self.uri)} did not take the {what} ({reason(error)})"
            return False

    def close(self) -> None:
        """Records how the run ended, and stores the files of the run directory."""
        self._problem = ""  # `deliver` sends no artifacts after a problem; at the end they get another chance
        self._upload()
        self._summarize()
        status = _STATUS.get(read_json(self.directory / "run.json").get("status", ""), "KILLED")
        if self._is_ours:
            self._client.set_terminated(self.run_id, status, self._position.time or None)
        for name in ("run.json", journal.NAME, "metrics.csv", REPORT):
            if is_plain(self.directory / name):
                self._sends(name, self._client.log_artifact, self.directory / name)

    def _summarize(self) -> None:
        """Sends what is known at the end: best values, speed, the description, and a model for each checkpoint."""
        from mlflow.entities import Metric

        # Best values and speed, as metrics.
        of = record.read(self.directory)
        summary = {}
        for name, point in best_values(of).items():
            summary[BEST + name] = point
        if of.speed:
            summary[SPEED] = of.speed[-1]
        metrics = []
        for name, (step, value) in summary.items():
            key = self._names.key(name)
            # A run that goes on may have found better ones; a point that is there already isn't sent again.
            if step > self._position.last_steps.get(key, -1):
                metrics.append(Metric(key, value, self._position.time, step))
        self._send_metrics(metrics)

        # The description, and what only newer servers take: data and models.
        about = read_json(self.directory / "run.json")
        run = self._client.get_run(self.run_id)
        self._mlflow_run.write_note(self._client, run, note(about, of, str(about.get("status", ""))))
        self._tries("data", lambda: self._mlflow_run.name_data(self._client, run))
        if "sweep" not in about:  # a sweep has no checkpoints of its own
            params = self._mlflow_run.hyperparameters()
            self._tries("models", lambda: kept_models.update(self._client, run, of, params))

    def _send_metrics(self, metrics: list[Foreign]) -> None:
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def _due(self, position: _Position) -> Iterator[Point]:
        """The points after a position: key, value, time in ms, step. Moves the position as it goes."""
        for entry, offset in journal.read(self.directory / journal.NAME, position.offset):
            if entry.get("event") == "artifact":
                position.artifacts.append(entry)
            for name, value, time, step in points(entry):
                known_as = self._names.key(name)
                if step > position.last_steps.get(known_as, -1):
                    position.last_steps[known_as] = step
                    yield known_as, value, time, step
            # Only now: after an error within the line, all of it is looked at again.
            position.offset = offset
            position.time = milliseconds(entry) or position.time


def client_of(uri: str) -> Foreign:
    """A client of the store at this URI, which can be opened.

    Raises:
        ValueError: another version of MLflow has made the store's tables.
        Exception: a store may fail in any way.
    """
    load(uri)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    if path := sqlite_path(uri):
        _open_once(path)
    try:
        return MlflowClient(uri)
    except MlflowException as error:
        if "database schema" not in str(error):
            raise
        raise ValueError(
            "another version of MLflow has made its tables: if that was an older one, copy the database, then "
            f"`mlflow db upgrade {redact(uri)}`; if a newer one, install that"
        ) from None


def _open_once(path: Path) -> None:
    """Opens a sqlite file, which may not exist yet. MLflow would try for minutes to open one that can't be opened."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() and os.access(path.parent, os.W_OK):
        _make_database(path)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA schema_version")


def _make_database(path: Path) -> None:
    """Makes the sqlite file of a store, whole or not at all.

    MLflow makes its tables one after the other, which takes seconds. A kill meanwhile would leave a file that it never
    opens again.
    """
    from mlflow import MlflowClient

    aside = hidden_name(path)
    try:
        # By its name, a later command removes the directory that a killed process has left (`loop/launch/signals.py`).
        with tempfile.TemporaryDirectory(".tfloop", "tfloop-mlflow-", ignore_cleanup_errors=True) as directory:
            made = Path(directory) / "mlflow.db"
            MlflowClient(sqlite_uri(made)).search_experiments(max_results=1)
            with (
                contextlib.closing(sqlite3.connect(made)) as source,
                contextlib.closing(sqlite3.connect(aside)) as copy,
            ):
                source.backup(copy)
        place(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _remove_escaped_directory(uri: str) -> None:
    """Removes the empty directory that MLflow makes for a sqlite file, with the escapes of the URI in its name."""
    path = sqlite_path(uri)
    escaped = Path(uri.removeprefix(SQLITE)).parent
    if path and escaped != path.parent:
        with contextlib.suppress(OSError):
            os.removedirs(escaped)


def _is_sound(path: Path) -> bool:
    """Whether it is a file, or a directory of files. A link would lead MLflow elsewhere; a pipe would block it."""
    if not path.is_dir():
        return is_plain(path, shared=True)
    for entry in path.rglob("*"):
        is_directory = entry.is_dir() and not entry.is_symlink()
        if not is_directory and not is_plain(entry, shared=True):
            return False
    return True


def reason(error: BaseException) -> str:
    """Why the store can't be used, in one line without secrets. In a chain of network errors, the first counts."""
    first = error
    while inner := first.__cause__ or first.__context__:
        first = inner
    text = str(first) if isinstance(first, OSError) and str(first) else f"{error}"
    return mask((text or type(error).__name__).splitlines()[0])[:500]


def is_refusal(error: Exception) -> bool:
    """Whether the store's answer, or its address, stays the same until someone changes something."""
    if isinstance(error, json.JSONDecodeError):  # a proxy's page, while the server behind it starts
        return False
    # Without the driver of a database, or with an address that is none, no attempt can succeed.
    if isinstance(error, ImportError | ValueError) or type(error).__name__ == "InvalidUrlException":
        return True
    # MLflow's own errors have a status of HTTP.
    return hasattr(error, "get_http_status_code") and error.get_http_status_code() in _REFUSALS


def load(uri: str) -> None:
    """Imports what a store of this kind needs, which takes seconds. A second caller waits for the first."""
    with _loading:
        # Set before the import. The courier tries again, and looks at the store first; the client must not retry by
        # itself. Telemetry would delay the exit.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            Path.home()  # MLflow asks for it while it is imported, and its error doesn't name HOME
        except RuntimeError:  # in a container, the user may have no name
            raise ImportError("MLflow needs a home directory, and this user has none: set HOME") from None
        import mlflow.tracking

        if uri.partition(":")[0].partition("+")[0] in _DATABASES:
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - a third of the time
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
