"""`tfloop rerun`: trains a run again, with the same code, settings and data, and compares the bits of the weights."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from callbacks.files import read_json
from callbacks.run_record import provenance
from callbacks.run_record.record import Record
from callbacks.run_record.redaction import HIDDEN, printable, tell
from callbacks.run_record.values import as_dict
from loop.commands import trial, typed_callbacks
from loop.commands.config import Option, words
from loop.errors import PREEMPTED, UsageError
from loop.launch import warm_start
from loop.target.fields import typed as typed_field

_UNUSED = ("backend", "resume", "accept_changes", "profile", "stall_timeout")
"""Options that change no numbers, or that are given in another way."""
_OF_MACHINE = {
    "intra_op_threads": "threads",
    "communication": "communication",
    "devices_per_replica": "devices-per-replica",
}
"""The options of `tfloop train` that a run records of its machine and backend, by the names that they have there."""
_DEVICES = ("mirrored", "central")
"""Backends whose replicas are devices of one process."""


class Rerun(NamedTuple):
    """The result of a second training."""

    first: Path  # the run directory of the first one
    second: Path  # that of the second one
    steps: tuple[int, int]  # the steps of both
    variables: int  # how many variables were compared
    differing: dict[str, float]  # those whose bits differ: their names, and the greatest differences

    @property
    def exact(self) -> bool:
        """Whether the second training has come to the same bits."""
        return not self.differing and self.steps[0] == self.steps[1]


def arguments(record: Record, options: Mapping[str, Option], about: Mapping[str, object]) -> list[str]:
    """The options of `tfloop train` with which a run is made again, of those that can be typed, by their long names.

    Raises:
        UsageError: the run isn't one that has the same bits twice.
    """
    _check(record)
    typed = list(_place(record))
    recorded = dict(record.options)
    # Only one length can be typed; and none for phases, which have theirs.
    if about.get("phases"):
        recorded["steps"] = None
    if about.get("phases") or recorded.get("steps") is not None:
        recorded["epochs"] = None
    for name, value in recorded.items():
        flag = name.replace("_", "-")
        if name not in _UNUSED and value is not None and flag in options:
            typed += _typed(flag, value, options[flag])
    return [*typed, *_typed_fields(record, about.get("changed"))]


def _place(record: Record) -> Iterator[str]:
    """The words of a command line for the place where a run trained: no options of `fit`, but for the backend."""
    # The backend that was chosen, whatever was asked for: `auto` may choose another one now.
    yield f"--backend={record.backend}"
    parallel = record.replicas if record.backend in _DEVICES else record.workers
    if (parallel or 1) > 1:
        yield f"--workers={parallel}"
    for name, flag in _OF_MACHINE.items():
        if record.machine.get(name):  # 0 threads: TensorFlow decides
            yield f"--{flag}={record.machine[name]}"


def callback_arguments(about: Mapping[str, object], is_own: bool) -> Iterator[str]:
    """The words of a command line for the callbacks of a run that were typed.

    `is_own` says whether this user has made the run: a callback may write a file that its text names.
    """
    for text in _callbacks(about).values():
        # Only the forms that a user may type: others name a class to import.
        if not text or typed_callbacks.of_commands([text]) or text.startswith("MLflowTracker"):
            continue
        if is_own and HIDDEN not in text:
            yield f"--callback={text}"
        else:
            why = "a run does not record secrets" if is_own else "you haven't trained there on this machine"
            tell(f"note: --callback {printable(text)} is left out: {why}")


def left_out(first: Path, second: Path) -> Iterator[str]:
    """What the first of two runs had and the second one lacks, a line each."""
    there = _callbacks(read_json(second / "run.json"))
    for key, text in _callbacks(read_json(first / "run.json")).items():
        if not text and key not in there:
            yield f"the first training also had the callback {printable(key)}, which isn't part of the task"


def _callbacks(about: Mapping[str, object]) -> dict[str, str]:
    """The callbacks that a run has recorded, by key: how each was typed, or ""."""
    texts = {}
    for key, text in as_dict(about.get("callbacks")).items():
        if isinstance(text, str):
            texts[key] = text
    return texts


def _typed_fields(record: Record, changed: object) -> Iterator[str]:
    """The words of a command line for the fields of a run's task.

    `changed` has the names of the fields that weren't at their defaults; None: the run has not recorded them.
    """
    for name, value in record.hyperparameters.items():
        # Whether None or a list can be typed depends on the field's type; a default needn't be.
        if isinstance(changed, list) and name not in changed and isinstance(value, list | dict | None):
            continue
        text = typed_field(value)
        if HIDDEN in text:  # the mask that stands in the place of a secret isn't a value
            tell(f"note: {name}: a run does not record secrets, so the task's default is taken")
        else:
            yield f"--set={name}={text}"


def _typed(flag: str, value: object, option: Option) -> list[str]:
    """The words of a command line for an option of a run."""
    if isinstance(value, dict):  # of several evaluation sets, the pace of each
        value = [f"{name}={pace}" for name, pace in value.items()]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return words(flag, value, option)


def _check(record: Record) -> None:
    """Refuses a run that can't be made again with the same bits."""
    if record.status not in ("finished", "stopped"):  # a callback of the task stops it again at the same step
        raise UsageError(f"{record.path} is {record.status or 'no run'}, and not finished: let it end first")
    if record.backend == "parameter_server":
        raise UsageError(f"{record.path}: parameter_server trains asynchronously, so no two runs have the same bits")


def changes(record: Record) -> Iterator[str]:
    """What has changed since a run that may change its numbers, each as a line."""
    file = record.provenance.get("task_file")
    kept = record.provenance.get("task_sha256")
    if isinstance(file, str) and kept and kept != provenance.digest(Path(file)):
        yield f"{file} has changed since: tfloop runs diff shows where"
    for name, recorded in record.versions.items():
        version = _version(name)
        if version != recorded:
            yield f"{name} was {recorded}, and is {version}"


def _version(name: str) -> str:
    """The version of a package, or of Python."""
    if name == "python":
        return sys.version.split()[0]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def train(target: str, options: list[str], run_dir: Path | None) -> Path:
    """Trains in a process of its own, which says on stderr how far it is. Returns its run directory.

    Raises:
        UsageError: it could not start.
        TrainingError: it failed, or was stopped.
    """
    own = ["--track=off", "--resume=never", "--json"]
    if run_dir:
        own.append(f"--run-dir={run_dir}")
    command = [*warm_start.COMMAND, "train", target, *options, *own]
    # A session of its own: Ctrl-C at the terminal reaches only this process, which passes it on once.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            printed, _ = process.communicate()
        except KeyboardInterrupt:
            process.terminate()
            process.communicate()  # the training saves and ends; it may print more than a pipe holds
            raise
    code = process.returncode
    if code:
        why = "was stopped" if code == PREEMPTED else f"ended with exit code {code}"
        raise trial.failure(code, f"the second training {why}: see above")
    return Path(json.loads(printed.splitlines()[-1])["run_dir"])


def compare(first: Path, second: Path) -> Rerun:
    """Compares the weights that two runs have as their result, bit by bit."""
    import numpy as np

    from loop.checkpoint import checkpoint_files
    from loop.run import run_directory
    from loop.run.state import averaged

    weights = []
    steps = []
    for path in (first, second):
        checkpoint, manifest = run_directory.locate_weights(path)
        steps.append(int(manifest["step"]))
        arrays = averaged(checkpoint_files.read(checkpoint, manifest))
        # `model/00003:dense/kernel`: by number alone, since Keras counts names up from fit to fit in a process.
        of_model = {}
        for name, array in arrays.items():
            if name.startswith("model/"):
                of_model[name.partition(":")[0]] = array
        weights.append(of_model)

    differing: dict[str, float] = {}
    for name in sorted(weights[0].keys() | weights[1].keys()):
        one = weights[0].get(name)
        other = weights[1].get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            differing[name] = float("nan")
        # By bytes: 0.0 equals -0.0, and nan doesn't equal itself.
        elif one.tobytes() != other.tobytes():
            differing[name] = float(np.max(np.abs(one.astype("float64") - other.astype("float64"))))
    return Rerun(first, second, (steps[0], steps[1]), len(weights[0]), differing)


def lines(report: Rerun) -> Iterator[tuple[str, bool | None]]:
    """The result for people: each line, and whether it is good news."""
    yield f"again in {report.second}", None
    for text in left_out(report.first, report.second):
        yield text, None
    if report.exact:
        yield f"the same weights to the bit: {report.variables} variables after {report.steps[0]:,} steps", True
        return
    if report.steps[0] != report.steps[1]:
        yield f"{report.steps[1]:,} steps instead of {report.steps[0]:,}", False
    if report.differing:
        name, most = max(report.differing.items(), key=lambda item: item[1])
        yield f"{len(report.differing)} of {report.variables} variables differ, {name} the most, by {most:.3g}", False
    yield f"tfloop runs diff {report.first} {report.second} shows what differs in code, data and settings", None


def as_json(report: Rerun) -> dict[str, object]:
    """The result as JSON values."""
    paths = {"first": str(report.first), "second": str(report.second)}
    return {"exact": report.exact, **report._asdict(), **paths}
