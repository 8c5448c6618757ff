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
import getpass
import hashlib
import logging
import os
import posixpath
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from callbacks.files import LONGEST, SQLITE, appending, is_plain, read_json, reading, sqlite_path
from callbacks.mlflow.points import key, milliseconds, points
from callbacks.mlflow.tracker import STATE, write_state
from callbacks.run_record import journal
from callbacks.run_record.redaction import mask, redact
from callbacks.run_record.report import NAME as REPORT

ID = "tfloop.id"
"""The tag by which a run is found again in its experiment."""
DIRECTORY = "tfloop.run_directory"
"""The tag with the path of the run directory."""
PARENT = "mlflow.parentRunId"
"""MLflow's tag for a run within another."""
SENT = "tfloop.artifacts"
"""The tag with the number of the journal's artifacts that the store has."""
# MLflow takes 1000 metrics, 100 parameters and 1 MB in a request; the longest values fit even as \u escapes.
_METRICS_AT_ONCE = 500
_PARAMS_AT_ONCE = 10
_VALUE_LENGTH = 6000
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_loading = threading.Lock()  # two threads that import MLflow at once may deadlock
_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}  # anything else is KILLED


class _Names:
    """Names and values as MLflow takes them. Remembers which ones it had to change."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._cut: dict[str, None] = {}

    def key(self, name: str) -> str:
        """The name that a metric or parameter has in MLflow; see `points.key`."""
        if name not in self._keys:
            self._keys[name] = key(name)
        return self._keys[name]

    def texts(self, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Names with their values as texts, without secrets."""
        for name, value in redact(values).items():
            text = mask(str(value))
            if len(text) > _VALUE_LENGTH:
                self._cut[name] = None
            yield self.key(name), text[:_VALUE_LENGTH]

    def changed(self) -> list[str]:
        """The names that had to be changed, or whose values were cut. Another thread may add names meanwhile."""
        return [name for name, key in list(self._keys.items()) if name != key] + list(self._cut)


@dataclasses.dataclass
class _Position:
    """How far the journal has been sent.

    Attributes:
        last_steps: the last step of each metric, by its name in MLflow.
        sent_artifacts: how many of the journal's artifacts the store has.
        artifacts: the artifact lines of the journal, up to `offset`.
        offset: the byte up to which the journal has been read.
        time: the time of the last line, in ms.
    """

    last_steps: dict[str, int]
    sent_artifacts: int
    artifacts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    offset: int = 0
    time: int = 0


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
        self._about = read_json(directory / "run.json")
        self._state = read_json(directory / STATE)
        self._experiment = experiment or self._state.get("experiment") or self._about["task"]
        self._client: Any = None  # None: not connected
        self._names = _Names()
        self._missing: dict[str, None] = {}  # artifacts that are not in the run directory any more
        self._problem = ""  # why artifacts can't be sent, where all else works
        self._parent_id: str | None = None  # the MLflow run of the sweep of which this run is a trial

    @property
    def _is_ours(self) -> bool:
        """Whether tfloop made the MLflow run, and not the user."""
        return self.run_id != self._state.get("given")

    def warnings(self) -> list[str]:
        """What could not be delivered unchanged."""
        texts = [self._problem] if self._problem else []
        texts += [f"{name} isn't in {self.directory} any more: MLflow doesn't have it" for name in self._missing]
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
        load(self.uri)
        from mlflow import MlflowClient

        if path := sqlite_path(self.uri):
            path.parent.mkdir(parents=True, exist_ok=True)
            # MLflow would try for minutes to open a file that can't be opened.
            with contextlib.closing(sqlite3.connect(path)) as database:
                database.execute("PRAGMA schema_version")
        client = MlflowClient(self.uri)
        self._about = read_json(self.directory / "run.json")
        self._state = read_json(self.directory / STATE)
        with contextlib.ExitStack() as stack:
            if "sweep" in self._about:  # all its trials look for its run at once, and only one of them may create it
                lock = stack.enter_context(appending(self.directory / "mlflow.lock"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            elif "sweep" in read_json(self.directory.parent / "run.json"):
                sweep = Delivery(self.directory.parent, self.uri, self._experiment)
                sweep.connect()
                self._parent_id = sweep.run_id
            run = self._find(client)
            self.run_id = run.info.run_id
            write_state(self.directory, self.uri, self._experiment, run_id=self.run_id)
            self._describe(client, run)
        # A request that timed out here may still be carried out there, after this look at the store. Its points are
        # then sent again; they are identical, since times come from the journal, and MLflow's SQL stores keep
        # identical points once.
        last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        sent = run.data.tags.get(SENT, "")
        self._position = _Position(last_steps, int(sent) if sent.isdecimal() else 0)
        self._problem = ""
        self._client = client
        _remove_escaped_directory(self.uri)

    def disconnect(self) -> None:
        """Forgets what the store has: after an error, it isn't known."""
        self._client = None

    def pending(self) -> int:
        """The number of points in the journal that the store doesn't have."""
        self.connect()
        return sum(1 for _ in self._due(copy.deepcopy(self._position)))

    def deliver(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Sends what the store doesn't have; `progress` is called with the number of points of each request."""
        self.connect()
        from mlflow.entities import Metric

        due = self._due(self._position)
        while batch := [Metric(*point) for point in islice(due, _METRICS_AT_ONCE)]:
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
                    return
                if entry.get("register"):
                    self._register(str(entry["register"]), to)
                self.artifacts += 1
            else:
                self._missing[name] = None
            position.sent_artifacts += 1
            self._client.set_tag(self.run_id, SENT, position.sent_artifacts)

    def _register(self, name: str, path: str) -> None:
        """Makes the run's model a version of the registered model `name`, unless it is one already."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        if not any(version.name == name for version in versions):
            self._client.create_model_version(name, f"runs:/{self.run_id}/{path}", self.run_id)

    def _sends(self, name: str, send: Callable[..., object], local: Path, to: str = "") -> bool:
        """Sends a file or a directory. Returns whether the store took it.

        Raises:
            Exception: the whole store is down.
        """
        try:
            send(self.run_id, str(local), to or None)
            return True
        except Exception as error:  # often the store keeps files where this machine can't write: not ours to repair
            self._client.get_run(self.run_id)  # raises if the whole store is down
            if not self._problem:
                self._problem = f"MLflow at {redact(self.uri)} did not take the file {name} ({reason(error)})"
            return False

    def close(self) -> None:
        """Records how the run ended, and stores the files of the run directory."""
        self._problem = ""
        self._upload()
        status = _STATUS.get(read_json(self.directory / "run.json").get("status", ""), "KILLED")
        if self._is_ours:
            self._client.set_terminated(self.run_id, status, self._position.time or None)
        for name in ("run.json", journal.NAME, "metrics.csv", REPORT):
            if is_plain(self.directory / name):
                self._sends(name, self._client.log_artifact, self.directory / name)

    def _due(self, position: _Position) -> Iterator[tuple[str, float, int, int]]:
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

    def _find(self, client: Any) -> Any:
        """The MLflow run of this run directory, which is created if there is none."""
        state = self._state_of_store()
        own_id = self._own_id()
        parent_id = self._parent_id or state.get("parent")
        parent = None
        if state.get("given"):
            parent = client.get_run(state["given"])
            if parent.data.tags.get(ID, own_id) == own_id:
                return parent  # else it has the points of another training, and can't hold those of two
        elif state.get("run_id"):
            run = _existing_run(client, state["run_id"])
            if run is not None and not self._is_of_original(run):
                return run
            if run is not None:
                own_id = self._own_id(self.directory)
        if parent_id:
            parent = client.get_run(parent_id)
        experiment = parent.info.experiment_id if parent else self._experiment_id(client)
        runs = client.search_runs([experiment], f"tags.`{ID}` = '{own_id}'", max_results=1)
        if runs:
            return runs[0]
        tags = {ID: own_id}
        if parent:
            tags[PARENT] = parent.info.run_id
        return client.create_run(experiment, self._start(), tags=tags, run_name=self._run_name())

    def _state_of_store(self) -> dict[str, Any]:
        """What `mlflow.json` says, if it is of this store."""
        return self._state if self._state.get("uri") == redact(self.uri) else {}

    def _run_name(self) -> str:
        about = self._about
        if "sweep" in about:
            return self.directory.name
        # What tells runs apart comes first: MLflow's tables cut the end.
        return f"{about['backend']}-{about['replicas']} {self.directory.name.removeprefix(about['task'] + '-')}"

    def _is_of_original(self, run: Any) -> bool:
        """Whether a run belongs to another directory that still exists, of which this one is a copy."""
        other = Path(run.data.tags.get(DIRECTORY, self.directory))
        return other != self.directory and read_json(other / STATE).get("run_id") == run.info.run_id

    def _own_id(self, name: Path | str = "") -> str:
        """The id by which the run is found in its experiment.

        It is made of what the run directory has anyway: the first line of its journal, and its name. So a kill between
        creating an MLflow run and noting it leaves no run that isn't found again.
        """
        with reading(self.directory / journal.NAME) as file:
            first_line = file.readline(LONGEST)
        return hashlib.sha256(first_line + os.fsencode(name or self.directory.name)).hexdigest()[:32]

    def _start(self) -> int | None:
        """The time of the first line of the journal, in ms."""
        entries = (entry for entry, _ in journal.read(self.directory / journal.NAME))
        return milliseconds(next(entries, {})) or None

    def _describe(self, client: Any, run: Any) -> None:
        """Sends the parameters and tags that the run doesn't have. A parameter never changes: MLflow's rule."""
        from mlflow.entities import Param, RunTag

        params = [Param(*pair) for pair in self._names.texts(self._params()) if pair[0] not in run.data.params]
        tags = [
            RunTag(name, value)
            for name, value in self._names.texts(self._tags(run))
            if run.data.tags.get(name) != value
        ]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            client.log_batch(run.info.run_id, params=params[start : start + _PARAMS_AT_ONCE])
        for start in range(0, len(tags), _PARAMS_AT_ONCE):
            client.log_batch(run.info.run_id, tags=tags[start : start + _PARAMS_AT_ONCE])
        if self._is_ours and self._about["status"] == "running" and run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")

    def _params(self) -> dict[str, Any]:
        """The options of `fit` and the fields of the task; where both have a name, the field bears it."""
        options = self._about["options"]
        fields = self._about["hyperparameters"]
        clashes = {f"option.{name}": options[name] for name in options if name in fields}
        return {name: value for name, value in (options | fields | clashes).items() if value is not None}

    def _tags(self, run: Any) -> dict[str, Any]:
        about = self._about
        tags = {
            "mlflow.user": _user(),
            "mlflow.source.type": "LOCAL",
            "mlflow.source.name": about["target"],
            DIRECTORY: self.directory,
            "tfloop.parameters": about.get("parameters"),
            **{f"version.{name}": version for name, version in about["versions"].items()},
            **{name: about.get(name) for name in ("backend", "replicas", "workers")},
        }
        tags = {name: value for name, value in tags.items() if value is not None}  # a sweep has fewer than a run
        if not self._is_ours:  # the tags that the user gave the run stay
            tags = {ID: self._own_id(), **{name: value for name, value in tags.items() if name not in run.data.tags}}
        return tags | self._state.get("tags", {})

    def _experiment_id(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = None
        if path := sqlite_path(self.uri):
            location = (path.parent / "mlartifacts").resolve().as_uri()
        try:
            kind = {"mlflow.experimentKind": "custom_model_development"}
            return str(client.create_experiment(self._experiment, artifact_location=location, tags=kind))
        except MlflowException:  # another run may have created it in the meantime
            experiment = client.get_experiment_by_name(self._experiment)
            if experiment is None:
                raise
            return str(experiment.experiment_id)


def _existing_run(client: Any, run_id: str) -> Any:
    """The MLflow run of this id; None if it was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


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
    entries = [entry for entry in path.rglob("*") if entry.is_symlink() or not entry.is_dir()]
    return all(is_plain(entry, shared=True) for entry in entries)


def reason(error: BaseException) -> str:
    """Why the store can't be used, in one line without secrets. Of a chain of network errors, the first counts."""
    first = error
    while inner := first.__cause__ or first.__context__:
        first = inner
    text = str(first) if isinstance(first, OSError) and str(first) else f"{error}"
    return mask((text or type(error).__name__).splitlines()[0])[:500]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


def load(uri: str) -> None:
    """Imports what a store of this kind needs, which takes seconds. A second caller waits for the first."""
    with _loading:
        # The courier tries again, and looks at the store first; the client must not retry by itself. Telemetry would
        # delay the exit.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow.tracking

        if uri.partition(":")[0].partition("+")[0] in _DATABASES:
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - a third of the time
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
