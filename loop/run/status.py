"""The status of a run, and `run.json`, which records it with all that describes the run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled  # there is no public function for it

from callbacks import STANDARD
from callbacks.files import Anchor, read_json, write_json
from callbacks.run_record import provenance
from callbacks.run_record.redaction import redact, tell
from loop.backends.host_collectives import fingerprint
from loop.checkpoint.array_files import Json
from loop.checkpoint.store import mirror
from loop.data import evaluation_sets
from loop.launch.machine import usable_cpus
from loop.model.variables import parameters
from loop.run.agreement import Decision
from loop.run.phases import as_json
from loop.target.fields import plain
from loop.task import changed_fields, hyperparameters, target_of

if TYPE_CHECKING:
    from loop.run.run import Run


class RunStatus:
    """The status of a run, and its `run.json`.

    Attributes:
        name: `finished`, unless it was `stopped` by a callback or `preempted` by a signal.
        started: whether this attempt has restored the run's state. Until then `run.json` is the last attempt's.
        best_step: the step of the weights that the model has at the end, if they aren't those of the last step.
        best_metrics: the metrics of the evaluation of that step.
    """

    def __init__(self, directory: Path, is_chief: bool) -> None:
        self.name = "finished"
        self.started = False
        self.best_step: int | None = None
        self.best_metrics: dict[str, float] = {}
        self._directory = directory
        self._anchor = Anchor(directory) if is_chief else None
        self._provenance: dict[str, object] = {}

    def follow(self, decision: Decision) -> None:
        """Notes what the workers have agreed on."""
        if decision.stop:
            self.name = "preempted" if decision.signalled else "stopped"

    def take_best(self, step: int, metrics: dict[str, float]) -> None:
        """Notes that the model has the weights of this step, and the metrics of its evaluation."""
        self.best_step = step
        self.best_metrics = metrics

    def start(self, run: Run) -> None:
        """Records that the run trains."""
        self.started = True
        if run.backend.is_chief:
            file = (target_of(run.task) or "").rpartition(":")[0]
            task_file = Path(file) if file else None
            self._provenance = provenance.collect(run.directory, task_file)
            self._tell_changes(run)  # before `run.json` is written anew
        self.write(run, "running")

    def _tell_changes(self, run: Run) -> None:
        """Tells what has changed in code and data since the last attempt; `run.json` is still that attempt's."""
        before = read_json(run.directory / "run.json")
        changes = provenance.changes(before.get("provenance"), self._provenance)
        if not run.plan.named:  # each phase may have data of its own, and the last attempt recorded those of one
            changes += provenance.changes_of_data(before.get("data"), _fingerprints(run))
        if changes:
            tell(f"note: goes on with other code or data than in its last attempt: {'; '.join(changes)}")

    def check_directory(self) -> None:
        """Checks, on the chief, that the run directory is where it was.

        Raises:
            MovedError: it was moved or deleted. Another run may have its old name.
            LeaseLostError: another process has taken over the run, in the store where it is kept.
        """
        if self._anchor is not None:
            self._anchor.check()
            mirror.check(self._directory)

    def write(self, run: Run, status: str) -> None:
        """Writes `run.json` (chief only). An attempt that fails before it has started keeps the previous status."""
        if not run.backend.is_chief:
            return
        self.check_directory()
        path = run.directory / "run.json"
        about = {} if self.started else read_json(path)
        if about and about.get("status") != "running":
            return
        # It may still say "running": the last attempt was killed, and could not write how it ended.
        about = about or {**redact(run.info), "progress": dataclasses.asdict(run.progress)}
        if self.started:
            about["checkpoint"] = run.checkpointing.newest
            about["provenance"] = self._provenance
            about["data"] = _fingerprints(run)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(path, {**about, "status": status, "updated": now, "pid": os.getpid()})


def describe(run: Run) -> Json:
    """The task, its options, the model's size, the backend, versions and machine, as JSON values."""
    backend = run.backend
    phases = {"phases": as_json(run.plan.named)} if run.plan.named else {}
    return {
        "task": type(run.task).__name__,
        "target": target_of(run.task),
        "hyperparameters": plain(hyperparameters(run.task)),
        "changed": changed_fields(run.task),
        "options": plain(run.options),
        "batch_size": run.options["batch_size"],
        "parameters": parameters(run.model),
        **phases,
        "callbacks": _added_callbacks(run),
        "backend": backend.name,
        "workers": backend.workers,
        "replicas": backend.replicas,
        # What may change the bits of a result: a resumed run tells what is different of it.
        "versions": _versions(backend.name),
        "machine": {
            "cpus": usable_cpus(),
            "intra_op_threads": tf.config.threading.get_intra_op_parallelism_threads(),
            "inter_op_threads": tf.config.threading.get_inter_op_parallelism_threads(),
            "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", ""),
            "deterministic_ops": is_op_determinism_enabled(),
            "compile": run.options["compile"],
            **backend.chosen,
        },
    }


def _added_callbacks(run: Run) -> dict[str, str]:
    """What a run has in addition to the standard set, by key: how each was typed, or "". Without those of commands."""
    added = {}
    for key, callback in run.callbacks.items():
        is_of_command = callback.typed.startswith("@")
        if not is_of_command and (callback.typed or not isinstance(callback, STANDARD)):
            added[key] = callback.typed
    return added


def _fingerprints(run: Run) -> Json:
    """What identifies the data at no cost: the number of examples, and the hash of the first ones."""
    data = run.step.data
    facts = {}
    sources = {"train": data.train}
    for name, source in data.evaluated.items():
        sources[evaluation_sets.prefix(name).removesuffix("_")] = source
    for name, source in sources.items():
        first = [np.asarray(tensor) for tensor in tf.nest.flatten(source.example)]
        size = getattr(source, "size", None)  # a stream has none
        facts[name] = {"examples": size, "sha256": fingerprint(*first)}
    return facts


def _versions(backend: str) -> dict[str, str]:
    """The versions of Python and of the packages that results depend on."""
    versions = {"python": sys.version.split()[0]}
    of_backend = ("horovod",) if backend == "horovod" else ()
    for package in ("tfloop", "tensorflow", "keras", "numpy", *of_backend):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
