"""Examines this machine: what works, what doesn't, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.files import sqlite_path
from callbacks.mlflow.tracker import default_uri
from callbacks.run_record.redaction import mask, redact
from loop.commands import terminal
from loop.errors import UsageError
from loop.launch import machine, plugins
from loop.launch.environment import read_tf_config

if TYPE_CHECKING:
    from rich.table import Table

Finding = dict[str, str]


def examine() -> list[Finding]:
    """One finding for each thing: `what`, `state` ("ok", "missing" or "broken"), `found`, and `fix`."""
    parts = (_python, _tensorflow, _devices, _horovod, _compilers, _tf_config, _mlflow, _run_directory, _ports)
    return [*map(_safely, parts), *map(_plugin, plugins.entry_points())]


def table(findings: Sequence[Finding]) -> Table:
    """The findings for people: the state in its color; below what is missing or broken, the fix."""
    colors = {"ok": "green", "missing": "yellow", "broken": "red"}
    rows = []
    for entry in findings:
        state = entry["state"]
        rows.append([terminal.colored(state, colors[state]), f"{entry['what']}: {entry['found']}"])
        if entry["fix"]:
            rows.append(["", f"-> {entry['fix']}"])
    return terminal.table(rows, right=(0,))


def _safely(part: Callable[[], Finding]) -> Finding:
    """A finding also where the examination itself fails."""
    try:
        return part()
    except Exception as error:  # a broken installation is what this is here to find
        name = part.__name__.strip("_")
        return finding(name, "broken", f"{type(error).__name__}: {error}", "install it anew: uv sync --reinstall")


def finding(what: str, state: str, found: str, fix: str = "") -> Finding:
    """One line of the report."""
    return {"what": what, "state": state, "found": found, "fix": fix}


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}, tfloop {version('tfloop')}"
    if (3, 11) <= sys.version_info < (3, 14):
        return finding("Python", "ok", found)
    return finding("Python", "broken", found, "use Python 3.11, 3.12 or 3.13: TensorFlow has no build for another")


def _tensorflow() -> Finding:
    # Imported here, and in the other parts, so that a package that can't be imported is a finding.
    import keras
    import tensorflow as tf

    if keras.backend.backend() != "tensorflow":
        fix = "unset KERAS_BACKEND, or set it to tensorflow"
        return finding("TensorFlow", "broken", f"Keras computes with {keras.backend.backend()}", fix)
    try:
        legacy = f", tf-keras {version('tf-keras')}"
    except PackageNotFoundError:
        legacy = ", no tf-keras (extra keras2)"
    return finding("TensorFlow", "ok", f"{tf.__version__}, Keras {keras.__version__}{legacy}")


def _devices() -> Finding:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    names = [_gpu(gpu.name, tf.config.experimental.get_device_details(gpu)) for gpu in gpus]
    found = f"{os.cpu_count()} CPU cores, " + (", ".join(names) or "no GPU")
    # The driver knows of GPUs that TensorFlow's build, or its libraries, can't use.
    if machine.count_gpus() > len(gpus):
        fix = "TensorFlow doesn't see it: uv sync --extra gpu, and check nvidia-smi"
        return finding("Devices", "broken", f"{found}, but the machine has {machine.count_gpus()}", fix)
    return finding("Devices", "ok", found)


def _gpu(name: str, details: Mapping[str, Any]) -> str:
    """The name of a GPU, and the precision of 16 bits that its tensor cores have."""
    text: str = details.get("device_name", name)
    major, minor = details.get("compute_capability", (0, 0))
    if major < 7:  # no tensor cores, or not known
        return text
    return f"{text} (compute capability {major}.{minor}: --precision {'bfloat16' if major >= 8 else 'mixed_float16'})"


def _horovod() -> Finding:
    if missing := machine.horovod_missing():
        return finding("Horovod", "missing", missing, "without it, --workers N uses multiworker")
    import horovod.tensorflow as hvd

    parts = {"gloo": hvd.gloo_built(), "mpi": hvd.mpi_built(), "nccl": bool(hvd.nccl_built()), "cuda": hvd.cuda_built()}
    # Without either of these two, its workers can't find each other.
    state = "ok" if parts["gloo"] or parts["mpi"] else "broken"
    return finding("Horovod", state, f"{version('horovod')}, built with: {_yes_or_no(parts)}")


def _yes_or_no(parts: Mapping[str, object]) -> str:
    """What is there, and what isn't, in a line."""
    return ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in parts.items())


def _plugin(name: str) -> Finding:
    what = f"Backend {name}"
    where = plugins.origin(name)
    try:
        _, missing = plugins.ask(name)
    except UsageError as error:
        return finding(what, "broken", str(error))
    if missing:
        return finding(what, "missing", f"{where}: {missing}")
    return finding(what, "ok", where)


def _compilers() -> Finding:
    there = {name: shutil.which(name) for name in ("g++", "clang++", "make")}
    if (there["g++"] or there["clang++"]) and there["make"]:
        return finding("Compilers", "ok", _yes_or_no(there))
    fix = "install g++ and make to build Horovod; nothing else needs them"
    return finding("Compilers", "missing", _yes_or_no(there), fix)


def _tf_config() -> Finding:
    text = os.environ.get("TF_CONFIG")
    if text is None:
        return finding("TF_CONFIG", "ok", "not set: this process is a job of its own")
    try:
        rank, workers = read_tf_config(text)
    except UsageError as error:
        return finding("TF_CONFIG", "broken", mask(str(error)), "mend it, or unset TF_CONFIG")
    return finding("TF_CONFIG", "ok", f"rank {rank} of {workers} workers")


def _mlflow() -> Finding:
    uri = default_uri()
    found = f"{version('mlflow')}, store {redact(uri)}"
    if path := sqlite_path(uri):
        # The file, or the directory in which it would be made.
        existing = path
        while not existing.exists():
            existing = existing.parent
        if not os.access(existing, os.W_OK):
            fix = f"{existing} can't be written: go elsewhere, or set MLFLOW_TRACKING_URI"
            return finding("MLflow", "broken", found, fix)
        if existing != path:
            found += " (made by the first run)"
        return finding("MLflow", "ok", found)
    from mlflow import MlflowClient  # only where a server is to be asked: the import takes seconds

    # A server that doesn't answer is a finding, not worth minutes of waiting.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    try:
        MlflowClient(uri).search_experiments(max_results=1)
    except Exception as error:
        return finding(
            "MLflow", "broken", f"{found}: {mask(str(error))[:200]}", "start the server, or unset MLFLOW_TRACKING_URI"
        )
    return finding("MLflow", "ok", found)


def _run_directory() -> Finding:
    here = Path.cwd()
    if not os.access(here, os.W_OK):
        return finding("Run directory", "broken", f"{here} can't be written", "go elsewhere, or give --run-dir")
    free = shutil.disk_usage(here).free / 2**30
    found = f"{here / 'runs'}, {free:.1f} GiB free"
    if free > 1:
        return finding("Run directory", "ok", found)
    return finding("Run directory", "missing", found, "make room: checkpoints need it")


def _ports() -> Finding:
    ports = machine.free_ports(2)
    taken = "" if machine.port_is_free("127.0.0.1", 5000) else "; 5000 is in use, tfloop ui will take another one"
    return finding("Free ports", "ok", f"on loopback, for workers: {', '.join(map(str, ports))}{taken}")
