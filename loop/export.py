"""Exports the model of a run: weights as npz, a Keras file, or a SavedModel; each is tried in a new process first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from loop import checkpoint, rundir
from loop.assembly import assemble, index_of
from loop.backends.base import Backend
from loop.build import Built, all_variables, build, carried_variables, model_variables
from loop.data import likely_rows
from loop.errors import TrainingError, UsageError
from loop.evaluate import load_weights
from loop.options import with_defaults
from loop.replica import probing
from loop.run import Run
from loop.seeds import random_state, set_random_state
from loop.state import assign, averaged, numbered, snapshot
from loop.task import TrainTask, target_of
from loop.tracing import as_written
from loop.trial import of_size, put_back
from loop.writer import arrays

TOLERANCE = 1e-6
"""How far outputs of a model that was loaded again may lie from its own, by the greatest of them if that is above 1."""


def export(
    task: TrainTask | None,
    path: Path,
    out: Path,
    check: bool = True,
    progress: Callable[[str], Any] = lambda text: None,
) -> str:
    """Writes the model of a checkpoint; `out` appears whole or not at all.

    Args:
        task: the task of the run; not needed for weights.
        path: a checkpoint, or a run directory.
        out: `*.npz`: all model variables, keys `00000:<variable name>` in order; `*.keras`: a Keras file; else the
            directory of a SavedModel, with the signature `serving_default`, also callable as `serve`.
        check: whether a new process loads what was written, and its outputs on evaluation examples are compared.
        progress: is told what is done next.

    Returns:
        What the check has shown, or "".

    Raises:
        UsageError: there is no such checkpoint, or the model has no such format.
        TrainingError: what was written can't be loaded, or gives other outputs.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}{out.suffix}")
    shown = ""
    try:
        if out.suffix == ".npz":
            found, manifest = rundir.locate_weights(path)
            tensors = checkpoint.read(found, manifest)
            weights = {name.removeprefix("model/"): tensor for name, tensor in averaged(tensors).items()}
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **weights)
        else:
            assert task is not None
            with contextlib.suppress(RuntimeError):  # the check's process must compute as this one does
                tf.config.set_visible_devices([], "GPU")
            progress("building the model")
            model, batch = rebuild(task, path)
            served = Served(model, *call_of(task, model, batch))
            progress(f"writing {out}")
            save(served, partial, out)
            if check:
                progress("loading it in a new process")
                shown = compare(served, partial, out, target_of(task))
        if out.is_dir():
            raise UsageError(f"{out} exists already: remove it, or give another name")
        partial.replace(out)
    except OSError as error:
        raise UsageError(f"{out} can't be written ({error.strerror or error})") from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
    return shown


def rebuild(task: TrainTask, path: Path) -> tuple[Any, Any]:
    """The model of a checkpoint, with its weights; and a few examples, of the evaluation data if there are any."""
    _, manifest = rundir.locate_weights(path)
    about = manifest["run"]
    options = with_defaults(task, {}) | {"eval_every": "epoch", "steps": 1}
    options |= {"precision": about["options"]["precision"]}
    rows = likely_rows(about["options"], about.get("replicas", 1))
    index = index_of(manifest, task)
    _, data, built = assemble(task, Backend(), options, index, lambda options, data: rows)
    load_weights(built.model, path)
    return built.model, examples_for(built, (data.eval or data.train).example)


def examples_for(built: Built, example: Any) -> Any:
    """Examples for a model to be called with: as many as it takes, where it takes no other number."""
    return example if built.fixed_rows is None else of_size(example, built.fixed_rows)


def export_run(run: Run, out: Path) -> tuple[Any, Any]:
    """Writes the model of a run that is under way as a SavedModel; see `Run.export`."""
    tensors = averaged(arrays(snapshot(run)[0]))
    data = run.step.data
    # Another model: that of the run may be in several places, or in others' hands, and has its raw weights.
    built = _built_again(run)
    assign(numbered("model", all_variables(built.model)), tensors)
    example = examples_for(built, (data.eval or data.train).example)
    served = Served(built.model, *call_of(run.task, built.model, example))
    save(served, out, out)
    return served.example(), served.outputs()


def _built_again(run: Run) -> Built:
    """The model of a run once more, as it is in its phase. The run's random numbers go on as if it weren't made."""
    before, index = random_state(), run.plan.place.index
    rows = likely_rows(run.options, run.backend.replicas)
    try:
        if index:
            return assemble(run.task, Backend(), run.options, index, lambda options, data: rows).built
        return build(run.task, Backend(), run.options["precision"], run.step.data.train.example, rows)
    finally:
        set_random_state(before)


def call_of(task: TrainTask, model: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which `compute` calls the model first, on a batch that is evaluated."""
    kind: Any = type(model)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    if callable(model):
        original = kind.__call__

        def listening(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is model:
                calls.append((args, kwargs))
            return original(self, *args, **kwargs)

        own = "__call__" in vars(kind)
        kind.__call__ = listening
        try:
            state = [*model_variables(model), *carried_variables(model)]
            with probing(int(tf.shape(tf.nest.flatten(batch)[0])[0])), put_back(state):
                task.compute(model, batch, training=False)
        finally:
            if own:
                kind.__call__ = original
            else:
                del kind.__call__
    if not calls:
        raise UsageError(
            f"compute() of {type(task).__name__} never calls the model as model(...), so that nobody knows what is to "
            "be served: give the model a __call__ and use it there, or export its weights to a file *.npz"
        )
    return calls[0]


class Served(tf.Module):
    """A model with a function `serve` of its tensors alone: one tensor as it is, or several in a dict by name.

    Args:
        model: the model.
        args: what it is called with; a tensor is an input, all else stays as it is here.
        kwargs: the same by name.
    """

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model: Any = model
        inputs = named_tensors((args, kwargs), "input")
        if not inputs:
            raise UsageError("compute() calls the model without a tensor: there is nothing to serve")
        if list(inputs) == ["input_0"]:
            inputs = {"inputs": inputs["input_0"]}
        self._call, self._inputs = Hidden((args, kwargs)), Hidden(inputs)
        specs = {name: self._spec(i, leaf, name) for i, (name, leaf) in enumerate(self._inputs.value.items())}
        signature = [specs if len(specs) > 1 else next(iter(specs.values()))]
        self.serve = tf.function(self._serve, input_signature=signature, autograph=False)

    def _spec(self, index: int, leaf: tf.Tensor, name: str) -> tf.TensorSpec:
        """Any number of examples, and what else a functional Keras model leaves open."""
        known = [each.shape for each in getattr(self.model, "inputs", None) or ()]
        shape = tf.TensorShape([None, *leaf.shape[1:]] if leaf.shape.rank else [])
        if len(known) == len(self._inputs.value) and tf.TensorShape(known[index]).is_compatible_with(leaf.shape):
            shape = tf.TensorShape(known[index])
        return tf.TensorSpec(shape, leaf.dtype, name)

    def _serve(self, inputs: Any) -> Any:
        return self.call(inputs if isinstance(inputs, dict) else {next(iter(self._inputs.value)): inputs})

    def call(self, inputs: dict[str, tf.Tensor]) -> Any:
        """The model's outputs: a tensor, or tensors by name."""
        left = iter(inputs[name] for name in self._inputs.value)
        args, kwargs = keras.tree.map_structure(
            lambda leaf: next(left) if tf.is_tensor(leaf) else leaf, self._call.value
        )
        return plain_outputs(as_written(called)(self.model, args, kwargs))

    def example(self) -> Any:
        """The examples that it was made with, as `serve` takes them."""
        found = {name: tensor.numpy() for name, tensor in self._inputs.value.items()}
        return found if len(found) > 1 else next(iter(found.values()))

    def outputs(self) -> Any:
        """What `serve` gives for them."""
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self.serve(self.example()))

    def skeleton(self) -> Any:
        """What the model is called with as JSON values; the name of an input stands as `{"input": name}`."""
        names = iter(self._inputs.value)
        return keras.tree.map_structure(
            lambda leaf: {"input": next(names)} if tf.is_tensor(leaf) else leaf, self._call.value
        )


class Hidden:
    """A value that a `tf.Module` holds, and that isn't saved with it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def called(model: Any, args: Any, kwargs: Any) -> Any:
    """Calls the model; a function, so that AutoGraph can be told to follow it."""
    return model(*args, **kwargs)


def plain_outputs(outputs: Any) -> Any:
    """What a model returned: a tensor as it is, several by name; bfloat16, which few know, as float32."""
    found = {
        name: tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
        for name, tensor in named_tensors(outputs, "output").items()
    }
    return found["output_0"] if tf.is_tensor(outputs) else found


def named_tensors(structure: Any, kind: str) -> dict[str, tf.Tensor]:
    """The tensors of a structure, by the keys that lead to them; `kind_0`, `kind_1` where there are none."""
    found: dict[str, tf.Tensor] = {}
    for path, leaf in keras.tree.flatten_with_path(structure):
        if tf.is_tensor(leaf):
            name = "_".join(re.sub(r"\W", "_", key) for key in path if isinstance(key, str))
            found[name if name and name not in found else f"{name or kind}_{len(found)}"] = leaf
    return found


def save(served: Served, partial: Path, out: Path) -> None:
    """Writes the model in the format that the name of `out` says."""
    if out.suffix != ".keras":
        tf.saved_model.save(served, str(partial), signatures={"serving_default": served.serve})
        return
    if not hasattr(served.model, "save"):
        raise UsageError(f"{out}: the model is a plain tf.Module, not a Keras model: export it to a directory")
    try:
        served.model.save(partial)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(
            f"{out}: Keras can't save this model ({first_line(error)}): export it to a directory"
        ) from None


def compare(served: Served, partial: Path, out: Path, target: str | None) -> str:
    """Has a new process load what was written, and compares the outputs for the examples; tells what that has shown."""
    is_keras = out.suffix == ".keras"
    with tempfile.TemporaryDirectory(prefix="tfloop-export-") as directory:
        question, answer = Path(directory, "inputs.npz"), Path(directory, "outputs.npz")
        example = served.example()
        inputs = example if isinstance(example, dict) else {next(iter(served._inputs.value)): example}
        np.savez(question, allow_pickle=False, **{name: texts_as_bytes(value) for name, value in inputs.items()})
        family = type(served.model).__module__.split(".")[0]
        how = {"call": served.skeleton() if is_keras else None, "family": family, "target": target}
        command = [sys.executable, "-P", "-m", "loop.exported", str(partial), str(question), str(answer)]
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*command, json.dumps(how, default=str)], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"},
        )  # fmt: skip
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            hint = ": its classes need @keras.saving.register_keras_serializable()" if is_keras else ""
            raise TrainingError(
                f"{out} is not written: a new process can't load it ({why}){hint}; export it to another format, or "
                "give --no-check"
            )
        with np.load(answer, allow_pickle=False) as found:
            got = dict(found)
    expected = served.call(served._inputs.value) if is_keras else served.outputs()
    wanted = expected if isinstance(expected, dict) else {"output_0": expected}
    wanted = {name: texts_as_bytes(np.asarray(value)) for name, value in wanted.items()}
    if {name: each.shape for name, each in got.items()} != {name: each.shape for name, each in wanted.items()}:
        raise TrainingError(f"{out} is not written: loaded in a new process, it has other outputs: {', '.join(got)}")
    worst = max((distance(each, got[name]) for name, each in wanted.items()), default=0.0)
    n = len(next(iter(inputs.values())))
    if not worst <= TOLERANCE:
        raise TrainingError(
            f"{out} is not written: loaded in a new process, its outputs for {n} examples differ by {worst:.2g}; give "
            "--no-check to have it all the same"
        )
    return f"loaded in a new process, its outputs for {n} examples differ by {worst:.2g}"


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """How far outputs lie apart, by the greatest of them if that is above 1."""
    if a.dtype.kind not in "fc":
        return float(not np.array_equal(a, b))
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a.astype("f8") - b.astype("f8")))
    size = np.abs(a[np.isfinite(a)]).max(initial=1.0)
    return float(np.max(apart, initial=0.0) / size)


def texts_as_bytes(value: np.ndarray) -> np.ndarray:
    """Texts, of which TensorFlow makes objects, as a file without pickle can hold them."""
    return value.astype("S") if value.dtype == object else value


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
