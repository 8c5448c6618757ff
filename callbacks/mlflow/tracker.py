"""MLflowTracker: shows the run in MLflow. A separate process follows the journal, so training never waits for it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from callbacks import files
from callbacks.arguments import check, is_number, is_text
from callbacks.base import Callback, Run, SettingsError
from callbacks.files import read_json, write_text
from callbacks.mlflow import logged_model
from callbacks.mlflow.courier_process import CourierProcess, courier_for
from callbacks.run_record import journal
from callbacks.run_record.redaction import redact, tell
from callbacks.types import Json, JsonObject

STATE = "mlflow.json"
"""The file in the run directory that names the store, the experiment and the MLflow run."""
_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks", "file")


def default_uri() -> str:
    """The tracking store: `MLFLOW_TRACKING_URI`, or the sqlite file `runs/mlflow.db` below the current directory.

    It is always given to MLflow, whose own default changes silently if there is an old `./mlruns`.
    """
    return os.environ.get("MLFLOW_TRACKING_URI") or files.sqlite_uri(files.launch_path("runs").resolve() / "mlflow.db")


def _is_store(uri: object) -> bool:
    """Whether MLflow may have a store there. Without a known scheme it is a typing error, such as `of` for `off`."""
    if not isinstance(uri, str) or not uri.strip():
        return False
    scheme, colon, _ = uri.partition(":")
    # A plain path is a file store, which MLflow refuses unless this variable is set.
    if not colon:
        return uri == "databricks" or "MLFLOW_ALLOW_FILE_STORE" in os.environ
    if scheme.lower() in ("http", "https"):
        return _names_host(uri)
    database = scheme.partition("+")[0]  # postgresql of postgresql+psycopg2
    if database == "sqlite" and not re.match(r"[^:]+://(/|$)", uri):  # it would be taken for a host
        return False
    plugins = entry_points(group="mlflow.tracking_store").names
    return database in _SCHEMES or scheme in plugins


def _names_host(uri: str) -> bool:
    """Whether the address of a server has a host, and a port that can be one."""
    try:
        address = urlsplit(uri)
        port = address.port
    except ValueError:  # "http://[::1", "http://host:port"
        return False
    return bool(address.hostname) and not re.search(r"\s", address.netloc) and port != 0


def store(uri: str | None) -> str:
    """The given tracking store, or the default one, with an absolute path if it is a sqlite file."""
    return files.absolute_sqlite(uri or default_uri())


class MLflowTracker(Callback):
    """Logs the run to MLflow: parameters, metrics by step, tags, the run directory's files, and how it ended.

    Metrics of an epoch have their plain names; those within an epoch are named `step/...`. A run that is resumed in its
    directory goes on in the same MLflow run. A problem with the store is printed once, and never stops or delays the
    training: all points are in the journal, and are delivered as soon as the store can be reached.

    Args:
        uri: the tracking store; None: see `default_uri`.
        experiment: the experiment's name; None: the task's.
        wait: how long the end of the run may wait for the store, in seconds.
        tags: tags of your own, by name; they replace ours.
        parent: the id of a run in the same store within which this one is shown; None: `MLFLOW_PARENT_RUN_ID`.
        log_model: whether the model is written to `model/` at the end of the run, with signature and input example, and
            becomes an artifact: `mlflow.pyfunc.load_model("runs:/<run id>/model")`.
        register: the name of the registered model of which it becomes a version; includes `log_model`.

    Without `parent`, the active run of MLflow in this process (`mlflow.start_run()`), or the one that `MLFLOW_RUN_ID`
    names, is used, and not ended. If it has the points of another training already, this run is shown within it.
    """

    def __init__(
        self,
        uri: str | None = None,
        experiment: str | None = None,
        wait: float = 60.0,
        tags: Mapping[str, Json] | None = None,
        parent: str | None = None,
        log_model: bool = False,
        register: str | None = None,
    ) -> None:
        fix = "give a URI such as sqlite:///mlflow.db or http://host:5000"
        check(self, uri is None or _is_store(uri), fix, uri=redact(uri))
        check(self, is_number(wait, 0, 1e6), "give seconds, from 0 to 1000000", wait=wait)
        is_name = register is None or _is_model_name(register)
        check(self, is_name, "give a name without / : and quotes", register=register)
        check(self, _are_tags(tags or {}), "each tag needs a name, a text", tags=tags)
        self.uri = uri
        self.experiment = experiment
        self.wait = wait
        self.tags = {name: str(value) for name, value in (tags or {}).items()}
        self.parent = parent
        self.log_model = log_model or register is not None
        self.register = register
        self._store = ""
        self._courier: CourierProcess | None = None
        self._delivers = False  # whether the courier knows its run
        self._error = ""

    def warm(self) -> None:
        """Starts the process that delivers, if there is none. Start it early: it imports MLflow, which takes seconds.

        The command line calls it before TensorFlow is loaded; otherwise `on_setup` does.
        """
        if self._courier is not None:
            return
        try:
            self._courier = courier_for(self._store_and_run()[0])
        except OSError as error:  # told at the end of the run, with all that MLflow didn't get
            self._error = f"no process can be started: {error.strerror}"

    def close(self) -> None:
        """Ends the process that `warm` has started, if it has no run to deliver."""
        if self._courier is not None and not self._delivers:
            self._courier.end()
            self._courier = None

    def on_setup(self, run: Run) -> None:
        self.warm()

    def on_fit_start(self, run: Run) -> None:
        if not (run.directory / journal.NAME).exists():
            raise SettingsError("MLflowTracker feeds on the journal: keep callbacks.Journal in the set")
        if self._delivers:  # the workers of an elastic job have formed anew
            return
        parent = self.parent or os.environ.get("MLFLOW_PARENT_RUN_ID") or None
        # Asked again: when the process was started, the task's code had not begun its run of MLflow yet.
        self._store, given = self._store_and_run()
        experiment = self.experiment or run.info["task"]
        relation: dict[str, str | None] = {}
        if parent:
            relation = {"parent": parent, "given": None}
        elif given:
            relation = {"given": given}
        # Before the order: the courier finds tags and relation in this file, as `tfloop sync` does.
        write_state(run.directory, self._store, experiment, tags=redact(self.tags), **relation)
        self.warm()
        if self._courier is None:
            return
        # By stdin, since the URI may hold a password, and all users can see a command line.
        self._courier.order({"directory": str(run.directory), "uri": self._store, "experiment": experiment})
        self._delivers = True

    def _store_and_run(self) -> tuple[str, str | None]:
        """The store, and the run that the user has made in it: active in this process, or named by the environment."""
        mlflow = sys.modules.get("mlflow")  # if the user has imported it; the import is slow
        if mlflow and (active := mlflow.active_run()):
            # A run of another store can't hold this one.
            active_store = store(mlflow.get_tracking_uri())
            if self.uri is None or store(self.uri) == active_store:
                return active_store, active.info.run_id
        return store(self.uri), os.environ.get("MLFLOW_RUN_ID") or None

    def on_fit_end(self, run: Run, status: str) -> None:
        if self.log_model and status in ("finished", "stopped"):
            try:
                journal.artifact(run, logged_model.write(run), register=self.register)
            except Exception as error:  # it must not fail a run that is trained and saved
                first_line = str(error).strip().partition("\n")[0]
                _warn(f"the model isn't logged ({first_line or type(error).__name__})")
        self.close()  # if the run ended before `on_fit_start`
        outcome: JsonObject = {"error": self._error, "warnings": []}
        if self._courier is not None:
            outcome |= self._courier.finish(self._store, self.wait)
            self._courier = None
            self._delivers = False
        for text in outcome["warnings"]:
            _warn(text)
        if outcome["error"]:
            _warn(
                f"MLflow at {self._store} did not take everything ({outcome['error']}); all points "
                f"are in {run.directory / journal.NAME}, and `tfloop sync {run.directory}` delivers the rest"
            )


def _warn(text: str) -> None:
    tell(f"warning: {text}")


def _are_tags(tags: object) -> bool:
    return isinstance(tags, Mapping) and all(map(is_text, tags))


def _is_model_name(name: object) -> bool:
    return isinstance(name, str) and name.strip() != "" and not set("/:'\"") & set(name)


def write_state(directory: Path, uri: str, experiment: str, **more: Json) -> None:
    """Notes in `mlflow.json` where the run is delivered to. Other entries stay; for another store, only the tags do."""
    old = read_json(directory / STATE)
    uri = redact(uri)  # as the file has it: without a password
    kept = old
    if old.get("uri") != uri:
        kept = {"tags": old["tags"]} if "tags" in old else {}
    state = {"run_id": None, **kept, "uri": uri, "experiment": experiment, **more}
    if state != old:
        write_text(directory / STATE, json.dumps(state))
