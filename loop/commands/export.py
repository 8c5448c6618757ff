"""Exports the model of a run in the format that the name of the output asks for; a new process tries it first."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from callbacks.files import FULL
from callbacks.side_process import search_path
from loop.backends.base import Backend
from loop.commands import conversion, serving_layout
from loop.data import Source
from loop.errors import TrainingError, UsageError
from loop.launch import signals
from loop.model.variables import is_legacy
from loop.options import with_defaults
from loop.run.result import read_weights
from loop.run.serving import Served, save, served_by
from loop.run.session import NOT_TRAINED, Session, index_of
from loop.run.state import assign_model
from loop.step.build import BuiltModel
from loop.task import TrainTask, target_of

TOLERANCE = 1e-6
"""How far outputs of a model that was loaded again may lie from its own, by the greatest of them if that is above 1."""

TOLERANCE_CONVERTED = 1e-5
"""The same for formats with a runtime of their own, which adds in another order: ONNX and LiteRT."""


def export(
    task: TrainTask | None,
    path: Path,
    out: Path,
    check: bool = True,
    progress: Callable[[str], Any] = lambda text: None,
    serving: bool = False,
) -> str:
    """Writes the model of a checkpoint; `out` appears whole or not at all.

    Args:
        task: the task of the run; not needed for weights.
        path: a checkpoint, or a run directory.
        out: `*.npz`: all model variables, keys `00000:<variable name>` in order; `*.keras`: a Keras file; `*.onnx`,
            `*.tflite`: for ONNX Runtime and LiteRT, with named inputs and outputs; else the directory of a
            SavedModel, with the signature `serving_default`, also callable as `serve`.
        check: whether a new process loads what was written, and its outputs on evaluation examples are compared.
        progress: is called with what is done next.
        serving: whether the directory gets the layout that TensorFlow Serving reads, and a Dockerfile that serves it.

    Returns:
        What the check has shown, or "".

    Raises:
        UsageError: there is no such checkpoint, the model has no such format, or a package is missing.
        TrainingError: what was written can't be loaded, or gives other outputs.
        OSError: the disk is full.
    """
    # Beside `out`, since only within one file system is a rename atomic; with its ending, which writers look at.
    partial = out.with_name(f".{out.name}.{os.getpid()}{out.suffix}")
    shown = ""
    try:
        if out.suffix == ".npz":
            _write_weights(path, partial)
        else:
            assert task is not None
            conversion.check_installed(out)
            with contextlib.suppress(RuntimeError):  # the check's process must compute as this one does
                tf.config.set_visible_devices([], "GPU")
            progress("building the model")
            served = served_by(task, *rebuild(task, path))
            progress(f"writing {out}")
            model = serving_layout.write(partial, type(task).__name__) if serving else partial
            _write_model(served, model, out)
            if check:
                progress("loading it in a new process")
                shown = compare(served, model, out, target_of(task))
        if out.is_dir():  # `replace` would silently take the place of an empty one
            raise UsageError(f"{out} exists already: remove it, or give another name")
        partial.replace(out)
    except OSError as error:
        if error.errno in FULL:  # no bad input: the command line says what to do
            raise OSError(error.errno, error.strerror, str(out)) from None
        raise UsageError(f"{out} can't be written ({error.strerror or error}): give another name") from None
    except tf.errors.OpError as error:  # TensorFlow writes a SavedModel itself, and tells no number
        for number in FULL:
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number), str(out)) from None
        raise
    finally:
        # After a success there is nothing left of it.
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
    return shown


def _write_weights(path: Path, partial: Path) -> None:
    """Writes the variables of the model alone."""
    weights, _ = read_weights(path)
    arrays = {name.removeprefix("model/"): tensor for name, tensor in weights.items()}
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _write_model(served: Served, partial: Path, out: Path) -> None:
    """Writes the model to `partial`, in the format that the name of `out` asks for."""
    if out.suffix in conversion.EXTRAS:
        conversion.convert(served, partial, out)
    else:
        save(served, partial, out)


def rebuild(task: TrainTask, path: Path) -> tuple[BuiltModel, Source]:
    """What a task builds, with the weights of a checkpoint; and its evaluation data, or else its training data."""
    weights, manifest = read_weights(path)
    about = manifest["run"]
    # Nothing is trained: a length and a whole batch are asked of no data.
    options = with_defaults(task, {}) | NOT_TRAINED | {"eval_every": "epoch"}
    # What the model itself is built by, as the run had it.
    for name in ("precision", "batch_size", "accumulate"):
        options[name] = about["options"][name]
    session = Session(task, Backend(), options, index_of(manifest, task), trained_on=about.get("replicas", 1))
    assign_model(session.built.model, weights)
    return session.built, session.data.eval or session.data.train


def compare(served: Served, partial: Path, out: Path, target: str | None) -> str:
    """Has a new process load what was written, and compares the outputs for the examples; says how far they differ."""
    is_keras = out.suffix == ".keras"
    inputs = served.named_example()
    loaded = _loaded_outputs(served, inputs, partial, out, target)
    # A Keras file is called as the model is, and not by a signature with named inputs.
    outputs = served.call(served._inputs.value) if is_keras else served.outputs()
    expected = as_arrays(outputs)
    if _shapes(loaded) != _shapes(expected):
        names = ", ".join(loaded)
        raise TrainingError(f"{out} is not written: loaded in a new process, it has other outputs: {names}")
    worst = max((distance(value, loaded[name]) for name, value in expected.items()), default=0.0)
    examples = len(next(iter(inputs.values())))
    result = f"loaded in a new process, its outputs for {examples} examples differ by {worst:.2g}"
    tolerance = TOLERANCE_CONVERTED if out.suffix in conversion.EXTRAS else TOLERANCE
    if not worst <= tolerance:  # also where it is nan
        raise TrainingError(f"{out} is not written: {result}; give --no-check to have it all the same")
    return result


def _loaded_outputs(
    served: Served, inputs: dict[str, np.ndarray], partial: Path, out: Path, target: str | None
) -> dict[str, np.ndarray]:
    """The outputs of the model that a new process has loaded."""
    is_keras = out.suffix == ".keras"
    family = "tf_keras" if is_legacy(served.model) else "keras"
    how = {"call": served.skeleton() if is_keras else None, "family": family, "target": target}
    with signals.temporary_directory("tfloop-export-") as directory:
        question = Path(directory, "inputs.npz")
        answer = Path(directory, "outputs.npz")
        arrays = {name: texts_as_bytes(value) for name, value in inputs.items()}
        np.savez(question, allow_pickle=False, **arrays)
        arguments = [str(partial), str(question), str(answer), json.dumps(how, default=str)]
        done = subprocess.run(
            # With -P, it imports nothing that lies in the working directory by chance.
            [sys.executable, "-P", "-m", "loop.commands.check_export", *arguments],
            capture_output=True,
            text=True,
            # On the CPU, as this process: a GPU would round differently.
            env={**os.environ, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": "-1"},
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            why = said[-1] if said else f"exit code {done.returncode}"
            hint = ": its classes need @keras.saving.register_keras_serializable()" if is_keras else ""
            raise TrainingError(
                f"{out} is not written: a new process can't load it ({why}){hint}; export it to another format, or "
                "give --no-check"
            )
        with np.load(answer, allow_pickle=False) as outputs:
            return dict(outputs)


def _shapes(arrays: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """The shapes of arrays, by their names."""
    return {name: array.shape for name, array in arrays.items()}


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """How far outputs lie apart, by the greatest of them if that is above 1."""
    if a.dtype.kind not in "fc":  # whole numbers and texts don't round: they are equal, or not
        return float(not np.array_equal(a, b))
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))  # also infinities, whose difference is nan
        apart = np.where(same, 0.0, np.abs(a.astype("f8") - b.astype("f8")))
    size = np.abs(a[np.isfinite(a)]).max(initial=1.0)
    return float(np.max(apart, initial=0.0) / size)


def as_arrays(outputs: Any) -> dict[str, np.ndarray]:
    """The outputs of a model as arrays by name, as a SavedModel names them: one without a name is `output_0`."""
    named = outputs if isinstance(outputs, dict) else {"output_0": outputs}
    return {name: texts_as_bytes(np.asarray(value)) for name, value in named.items()}


def texts_as_bytes(value: np.ndarray) -> np.ndarray:
    """Converts texts, which TensorFlow returns as Python objects, to bytes: those are saved without pickle."""
    return value.astype("S") if value.dtype == object else value
