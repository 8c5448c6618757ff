"""MLflow run: finds the MLflow run of a run directory, or creates it, and describes it with parameters and tags."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
from pathlib import Path

from callbacks.files import LONGEST, read_json, reading, sqlite_path
from callbacks.mlflow.description import run_name
from callbacks.mlflow.points import Names, milliseconds, utf8
from callbacks.mlflow.tracker import STATE
from callbacks.run_record import journal
from callbacks.run_record.redaction import mask, redact
from callbacks.run_record.values import as_dict
from callbacks.types import Foreign, JsonObject

ID = "tfloop.id"
"""The tag by which a run is found again in its experiment."""
DIRECTORY = "tfloop.run_directory"
"""The tag with the path of the run directory."""
PARENT = "mlflow.parentRunId"
"""MLflow's tag for a run within another."""
OPTION = "option."
"""The names of parameters that are options of `fit`, and no fields of the task, begin with this."""
NOTE = "mlflow.note.content"
"""MLflow's tag for the description of a run."""
_OUR_NOTE = "tfloop.note"  # the tag with the hash of the description that tfloop has written
_PARAMS_AT_ONCE = 10  # MLflow takes 100 parameters and 1 MB in a request


class MLflowRun:
    """The MLflow run of a run directory, in a tracking store, with names and values as MLflow takes them."""

    def __init__(self, directory: Path, uri: str, experiment: str, names: Names) -> None:
        self.directory = directory
        self.uri = uri
        self._experiment = experiment
        self._names = names
        self._about = read_json(directory / "run.json")
        self._state = read_json(directory / STATE)

    def is_ours(self, run_id: str) -> bool:
        """Whether tfloop made the MLflow run of this id, and not the user."""
        return run_id != self._state.get("given")

    def find(self, client: Foreign, parent_id: str | None) -> Foreign:
        """The MLflow run, which is created if there is none; of a trial, within the run of its sweep.

        Raises:
            ValueError: the run, its experiment, or a run that the user has named isn't there, or was deleted.
        """
        run = self._found(client, parent_id)
        # Such a run is kept by the store for a while: it can be read, but takes nothing.
        if run.info.lifecycle_stage == "deleted":
            raise ValueError(f"its run {run.info.run_id} was deleted there: restore it, {self._anew()}")
        return run

    def _found(self, client: Foreign, parent_id: str | None) -> Foreign:
        # In this order: the run that the user has given, the one that was noted, one with our tag, a new one.
        is_of_store = self._state.get("uri") == redact(self.uri)
        state = self._state if is_of_store else {}
        own_id = self._own_id()
        parent_id = parent_id or state.get("parent")
        parent = None
        if state.get("given"):
            parent = self._named_run(client, state["given"])
            if parent.data.tags.get(ID, own_id) == own_id:
                return parent  # else it has the points of another training, and can't hold those of two
        elif state.get("run_id") and (run := _existing_run(client, state["run_id"])) is not None:
            if not self._is_of_original(run):
                return run
            # The original of this copy has the same journal and may have the same name; the path tells them apart.
            own_id = self._own_id(self.directory)
        if parent_id:
            parent = self._named_run(client, parent_id)
        # MLflow shows a run within another one only in the same experiment.
        experiment = parent.info.experiment_id if parent else self._experiment_id(client)
        runs = client.search_runs([experiment], f"tags.`{ID}` = '{own_id}'", max_results=1)
        if runs:
            return runs[0]
        tags = {ID: own_id}
        if parent:
            tags[PARENT] = parent.info.run_id
        name = utf8(run_name(self.directory, self._about))
        return client.create_run(experiment, self._start(), tags=tags, run_name=name)

    def _named_run(self, client: Foreign, run_id: str) -> Foreign:
        """The run into which, or within which, this one goes."""
        run = _existing_run(client, run_id)
        if run is None:
            raise ValueError(
                f"there is no run {run_id}, which MLFLOW_RUN_ID, MLFLOW_PARENT_RUN_ID or the program has named: start "
                f"again with another one, {self._anew()}"
            )
        return run

    def _anew(self) -> str:
        return f"or remove {self.directory / STATE}, and a new run takes its place"

    def _is_of_original(self, run: Foreign) -> bool:
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
        entry, _ = next(journal.read(self.directory / journal.NAME), ({}, 0))
        return milliseconds(entry) or None

    def describe(self, client: Foreign, run: Foreign) -> None:
        """Sends the parameters and tags that the run doesn't have. A parameter never changes: MLflow's rule."""
        from mlflow.entities import Param, RunTag

        # What the store has already isn't sent again: a changed value of a parameter would be an error.
        params = self._names.texts(self._params())
        tags = self._names.texts(self._tags(run))
        missing = {
            "params": [Param(name, value) for name, value in params if name not in run.data.params],
            "tags": [RunTag(name, value) for name, value in tags if run.data.tags.get(name) != value],
        }
        for kind, entries in missing.items():
            for start in range(0, len(entries), _PARAMS_AT_ONCE):
                client.log_batch(run.info.run_id, **{kind: entries[start : start + _PARAMS_AT_ONCE]})
        # A run that goes on is shown as running again. One that the user has begun is the user's to start and end.
        if self.is_ours(run.info.run_id) and self._about["status"] == "running" and run.info.status != "RUNNING":
            client.update_run(run.info.run_id, status="RUNNING")

    def name_data(self, client: Foreign, run: Foreign) -> None:
        """Notes which data the run was trained and evaluated on: how many examples, and the hash of the first ones."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if run.inputs and run.inputs.dataset_inputs:
            return
        source = mask(json.dumps({"task": self._about.get("target")}))
        inputs = []
        for name, facts in as_dict(self._about.get("data")).items():
            if not as_dict(facts).get("sha256"):
                continue
            label = f"{self._about['task']}.{name}"
            digest = str(facts["sha256"])[:36]  # the most that MLflow takes
            profile = json.dumps({"num_rows": facts.get("examples")})
            dataset = Dataset(label, digest, "code", source, schema="{}", profile=profile)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", name)]))
        if inputs:
            client.log_inputs(run.info.run_id, inputs)

    def write_note(self, client: Foreign, run: Foreign, text: str) -> None:
        """Gives the run a description, unless the user has given it one."""
        if not self.is_ours(run.info.run_id) or NOTE in self._state.get("tags", {}):
            return
        text = utf8(text)
        present = run.data.tags.get(NOTE)
        # Our own description has its hash in a tag; one with another hash was written or edited by the user.
        is_edited = present is not None and run.data.tags.get(_OUR_NOTE) != _digest(present)
        if is_edited or present == text:
            return
        from mlflow.entities import RunTag

        client.log_batch(run.info.run_id, tags=[RunTag(NOTE, text), RunTag(_OUR_NOTE, _digest(text))])

    def _params(self) -> JsonObject:
        """The fields of the task by their names, and the options of `fit`, set apart by their prefix."""
        options = {OPTION + name: value for name, value in self._about["options"].items()}
        return _given({**self._about["hyperparameters"], **options})

    def hyperparameters(self) -> dict[str, str]:
        """The fields of the task, as MLflow takes them."""
        return dict(self._names.texts(_given(self._about["hyperparameters"])))

    def _tags(self, run: Foreign) -> JsonObject:
        about = self._about
        tags = {
            "mlflow.user": _user(),
            "mlflow.source.type": "LOCAL",
            "mlflow.source.name": about["target"],
            "mlflow.source.git.commit": about.get("provenance", {}).get("commit"),
            "mlflow.source.git.branch": about.get("provenance", {}).get("branch"),
            DIRECTORY: self.directory,
            "tfloop.parameters": about.get("parameters"),
            "backend": about.get("backend"),
            "replicas": about.get("replicas"),
            "workers": about.get("workers"),
        }
        for name, version in about["versions"].items():
            tags[f"version.{name}"] = version
        tags = _given(tags)  # a sweep has fewer than a run
        if not self.is_ours(run.info.run_id):
            for name in run.data.tags:  # the tags that the user gave the run stay
                tags.pop(name, None)
            tags[ID] = self._own_id()
        return tags | self._state.get("tags", {})

    def _experiment_id(self, client: Foreign) -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            if experiment.lifecycle_stage == "deleted":
                which = f"the experiment {self._experiment!r} was deleted there"
                raise ValueError(f"{which}: restore it, or remove it for good (mlflow gc)")
            return str(experiment.experiment_id)
        # Beside the database: MLflow's default is `mlruns` in the current directory, wherever that is.
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _given(values: JsonObject) -> JsonObject:
    """The values that are not None: MLflow would store the text "None"."""
    return {name: value for name, value in values.items() if value is not None}


def _existing_run(client: Foreign, run_id: str) -> Foreign:
    """The MLflow run of this id; None if it was deleted."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # the store can't be used: a new run would be a second one
            raise
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
