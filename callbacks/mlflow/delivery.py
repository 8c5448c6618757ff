"""Delivery: brings the journal of a run to MLflow; beside the training in a process of its own, and for `tfloop sync`.

What is delivered is a function of the journal alone: of each metric, in the order of the lines, every point whose step
lies behind those before it (a resumed run makes some steps again, with the same values); and the artifacts that it
names. How far that has got, the store itself says: its last step of each metric, and a tag that counts the artifacts.
So there is nothing to keep in step with it, and a kill of either side at any instant neither loses a point nor doubles
one. The order is that of steps, never of time: clocks jump.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import logging
import os
import posixpath
import sqlite3
import threading
from collections.abc import Callable, Iterator
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
"""The tag that says where the run is."""
PARENT = "mlflow.parentRunId"
"""MLflow's tag for a run within another."""
SENT = "tfloop.artifacts"
"""The tag that says how many of the journal's artifacts the store has."""
# MLflow takes 1000 metrics or 100 parameters at once, and 1 MB: what is long has a place in it even as \u escapes.
_METRICS, _PARAMS = 500, 10
_VALUE_LENGTH = 6000
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_loading = threading.Lock()
_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}  # anything else is KILLED


class Delivery:
    """Delivers one run directory to one MLflow run. After any error it can be used again, and starts from the truth.

    Args:
        directory: the run directory, with `run.json` and the journal.
        uri: the tracking store.
        experiment: the experiment's name; None: the one in `mlflow.json`, else the task's.
    """

    def __init__(self, directory: Path, uri: str, experiment: str | None = None) -> None:
        self.directory, self.uri = directory, uri
        self.run_id, self.count, self.artifacts = "", 0, 0
        self._about = read_json(directory / "run.json")
        self._experiment = experiment or read_json(directory / STATE).get("experiment") or self._about["task"]
        self._client: Any = None
        self._keys: dict[str, str] = {}
        self._cut: dict[str, None] = {}
        self._lost: dict[str, None] = {}
        self._trouble = ""
        self._parent: str | None = None  # the MLflow run of the sweep of which this is a trial

    def warnings(self) -> list[str]:
        """What could not be delivered as it is."""
        changed = [name for name, key in list(self._keys.items()) if name != key] + list(self._cut)
        texts = [self._trouble] if self._trouble else []
        texts += [f"{name} isn't in {self.directory} any more: MLflow has it not" for name in self._lost]
        if changed:
            more = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
            texts.append(
                f"MLflow can't hold {changed[0][:80]!r}{more} as it is: names have been changed, or values cut, there; "
                "all is in the run directory"
            )
        return texts

    def connect(self) -> None:
        """Finds the MLflow run, or creates it, and asks how far it has got; nothing if that has been done."""
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
        self._about, self._state = read_json(self.directory / "run.json"), read_json(self.directory / STATE)
        above = self.directory.parent
        with contextlib.ExitStack() as alone:
            if "sweep" in self._about:  # all its trials look for it at once, and one of them is to create it
                lock = alone.enter_context(appending(self.directory / "mlflow.lock"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            elif "sweep" in read_json(above / "run.json"):
                sweep = Delivery(above, self.uri, self._experiment)
                sweep.connect()
                self._parent = sweep.run_id
            run = self._find(client)
            self.run_id, self._ours = run.info.run_id, run.info.run_id != self._state.get("given")
            write_state(self.directory, self.uri, self._experiment, run_id=self.run_id)
            self._describe(client, run)
        # A request that timed out here may still be carried out there, after this look at it. What is then sent once
        # more is identical, since times come from the journal, and MLflow's SQL stores keep identical points once.
        self._last = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._offset, self._time = 0, 0
        self._files: list[dict[str, Any]] = []  # the journal's artifacts up to the offset
        sent = run.data.tags.get(SENT, "")
        self._sent = int(sent) if sent.isdecimal() else 0
        self._trouble = ""
        self._client = client
        if (path := sqlite_path(self.uri)) and (escaped := Path(self.uri.removeprefix(SQLITE)).parent) != path.parent:
            with contextlib.suppress(OSError):  # MLflow makes an empty directory with the escapes in its name
                os.removedirs(escaped)

    def disconnect(self) -> None:
        """Forgets what is known of the store: after an error, nothing is."""
        self._client = None

    def pending(self) -> int:
        """How many points the journal has that the store hasn't."""
        self.connect()
        offset, last, files = self._offset, dict(self._last), len(self._files)
        count = sum(1 for _ in self._due())
        self._offset, self._last = offset, last
        del self._files[files:]
        return count

    def deliver(self, progress: Callable[[int], Any] = lambda count: None) -> None:
        """Sends what the journal has and the store hasn't; `progress` is called after each batch."""
        self.connect()
        from mlflow.entities import Metric

        due = self._due()
        while batch := [Metric(*point) for point in islice(due, _METRICS)]:
            self._client.log_batch(self.run_id, metrics=batch)
            self.count += len(batch)
            progress(len(batch))
        if not self._trouble:
            self._upload()

    def _upload(self) -> None:
        """Sends the artifacts that are due. One that was sent, and killed before it was counted, is written over."""
        for entry in self._files[self._sent :]:
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
                self._lost[name] = None
            self._sent += 1
            self._client.set_tag(self.run_id, SENT, self._sent)

    def _register(self, name: str, path: str) -> None:
        """Makes the run's model a version of a registered one, if it is none yet."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        if not any(version.name == name for version in versions):
            self._client.create_model_version(name, f"runs:/{self.run_id}/{path}", self.run_id)

    def _sends(self, name: str, send: Callable[..., Any], local: Path, to: str = "") -> bool:
        """Sends a file or a directory. Returns whether it was taken: no, if all but artifacts works."""
        try:
            send(self.run_id, str(local), to or None)
            return True
        except Exception as error:  # often a store whose files lie where this machine can't write: not ours to mend
            self._client.get_run(self.run_id)  # raises where the whole store is down
            self._trouble = (
                self._trouble or f"MLflow at {redact(self.uri)} did not take the file {name} ({reason(error)})"
            )
            return False

    def close(self) -> None:
        """Says there how the run ended, and stores the files of the run directory."""
        self._trouble = ""
        self._upload()
        status = _STATUS.get(read_json(self.directory / "run.json").get("status", ""), "KILLED")
        if self._ours:
            self._client.set_terminated(self.run_id, status, self._time or None)
        for name in ("run.json", journal.NAME, "metrics.csv", REPORT):
            if is_plain(self.directory / name):
                self._sends(name, self._client.log_artifact, self.directory / name)

    def _due(self) -> Iterator[tuple[str, float, int, int]]:
        """The points that are yet to be delivered: key, value, time in ms, step."""
        for entry, offset in journal.read(self.directory / journal.NAME, self._offset):
            if entry.get("event") == "artifact":
                self._files.append(entry)
            for name, value, at, step in points(entry):
                known_as = self._key(name)
                if step > self._last.get(known_as, -1):
                    self._last[known_as] = step
                    yield known_as, value, at, step
            self._offset, self._time = offset, milliseconds(entry) or self._time

    def _find(self, client: Any) -> Any:
        from mlflow.exceptions import MlflowException

        state = self._state if self._state.get("uri") == redact(self.uri) else {}
        # The tag is made of what the run directory has anyway: a kill between creating a run and noting it leaves
        # nothing that isn't found again.
        first, begun_at = self._beginning()
        self._id = hashlib.sha256(first + os.fsencode(self.directory.name)).hexdigest()[:32]
        parent = None
        if state.get("given"):
            run = client.get_run(state["given"])
            if run.data.tags.get(ID, self._id) == self._id:
                return run
            parent = run  # has another training's points already: one run has no place for two
        elif state.get("run_id"):
            try:
                run = client.get_run(state["run_id"])
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                other = Path(run.data.tags.get(DIRECTORY, self.directory))
                if other == self.directory or read_json(other / STATE).get("run_id") != state["run_id"]:
                    return run
                # This is a copy of a directory that is still there, and a run of its own.
                self._id = hashlib.sha256(first + os.fsencode(self.directory)).hexdigest()[:32]
        if self._parent or state.get("parent"):
            parent = client.get_run(self._parent or state["parent"])
        experiment = parent.info.experiment_id if parent else self._experiment_id(client)
        found = client.search_runs([experiment], f"tags.`{ID}` = '{self._id}'", max_results=1)
        if found:
            return found[0]
        # What tells runs apart comes first: tables cut the rest.
        about = self._about
        name = self.directory.name
        if "sweep" not in about:
            name = f"{about['backend']}-{about['replicas']} " + name.removeprefix(f"{about['task']}-")
        tags = {ID: self._id} | ({PARENT: parent.info.run_id} if parent else {})
        return client.create_run(experiment, begun_at, tags=tags, run_name=name)

    def _beginning(self) -> tuple[bytes, int | None]:
        """The first line of the journal, and its time in ms."""
        with reading(self.directory / journal.NAME) as file:
            first = file.readline(LONGEST)
        entries = (entry for entry, _ in journal.read(self.directory / journal.NAME))
        return first, milliseconds(next(entries, {})) or None

    def _describe(self, client: Any, run: Any) -> None:
        """Sends the parameters and tags that aren't there. A parameter that is there keeps its value: MLflow's rule."""
        from mlflow.entities import Param, RunTag

        about = self._about
        options, fields = about["options"], about["hyperparameters"]
        clashes = {f"option.{name}": options[name] for name in options if name in fields}
        params = {name: value for name, value in (options | fields | clashes).items() if value is not None}
        own = {
            "mlflow.user": _user(),
            "mlflow.source.type": "LOCAL",
            "mlflow.source.name": about["target"],
            DIRECTORY: self.directory,
            "tfloop.parameters": about.get("parameters"),
            **{f"version.{name}": version for name, version in about["versions"].items()},
            **{name: about.get(name) for name in ("backend", "replicas", "workers")},
        }
        own = {name: value for name, value in own.items() if value is not None}  # a sweep has fewer than a run
        if not self._ours:  # what others have said of their run stays
            own = {ID: self._id, **{name: value for name, value in own.items() if name not in run.data.tags}}
        tags = own | self._state.get("tags", {})
        missing = [Param(*pair) for pair in self._texts(params) if pair[0] not in run.data.params]
        changed = [RunTag(*pair) for pair in self._texts(tags) if run.data.tags.get(pair[0]) != pair[1]]
        for start in range(0, len(missing), _PARAMS):
            client.log_batch(run.info.run_id, params=missing[start : start + _PARAMS])
        for start in range(0, len(changed), _PARAMS):
            client.log_batch(run.info.run_id, tags=changed[start : start + _PARAMS])
        if self._ours and about["status"] == "running" and run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")

    def _texts(self, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
        for name, value in redact(values).items():
            text = mask(str(value))
            if len(text) > _VALUE_LENGTH:
                self._cut[name] = None
            yield self._key(name), text[:_VALUE_LENGTH]

    def _key(self, name: str) -> str:
        """The name that a metric or parameter has in MLflow; see `key`."""
        if name not in self._keys:
            self._keys[name] = key(name)
        return self._keys[name]

    def _experiment_id(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        location = None
        if path := sqlite_path(self.uri):
            location = (path.parent / "mlartifacts").resolve().as_uri()
        try:
            kind = {"mlflow.experimentKind": "custom_model_development"}
            return str(client.create_experiment(self._experiment, artifact_location=location, tags=kind))
        except MlflowException:  # another run may have created it in the meantime
            found = client.get_experiment_by_name(self._experiment)
            if found is None:
                raise
            return str(found.experiment_id)


def _is_sound(path: Path) -> bool:
    """Whether there is a file, or a directory of files: a link in it would lead MLflow elsewhere, a pipe hold it up."""
    if not path.is_dir():
        return is_plain(path, shared=True)
    entries = [each for each in path.rglob("*") if each.is_symlink() or not each.is_dir()]
    return all(is_plain(each, shared=True) for each in entries)


def reason(error: BaseException) -> str:
    """Why the store can't be used, in one line without secrets: of a chain of network errors, the first."""
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
    """Imports what a store of this kind needs, which takes seconds; who calls while that is under way waits for it."""
    with _loading:
        # Who delivers tries again, after a look at the store; the client doesn't. Telemetry would hold up the exit.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow.tracking

        if uri.partition(":")[0].partition("+")[0] in _DATABASES:
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - a third of the time, as long as all else
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
