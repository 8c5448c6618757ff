"""Replay: makes a step that wasn't finite once more, and shows its values and gradients."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from callbacks.run_record.journal import jsonable
from loop.backends.base import Backend
from loop.checkpoint import checkpoint_files
from loop.data import ArraySource, BatchOptions, Data, Rows, rows
from loop.errors import UsageError
from loop.model.variables import as_tf, carried_variables, trainable_variables, variable_names
from loop.options import with_defaults
from loop.run import run_directory
from loop.run.session import Session, index_of
from loop.run.state import assign, named_variables_of, numbered, unpacked
from loop.step.observer import GradientObserver
from loop.task import TrainTask

NUMBERS = 5
"""So many examples that aren't finite are named."""


@dataclasses.dataclass
class Shown:
    """A tensor of the step.

    Attributes:
        name: of a value, or of a variable.
        shape: its shape.
        largest: the greatest absolute value among the finite ones.
        norm: the L2 norm; nan or inf if it isn't finite.
        not_finite: how many of its elements are nan or infinite.
        examples: of a value: the indices, in the data, of the first examples that aren't finite.
        weight: of a gradient: the greatest absolute value of its variable.
    """

    name: str
    shape: list[int]
    largest: float
    norm: float
    not_finite: int
    examples: list[int] = dataclasses.field(default_factory=list)
    weight: float = 0.0


@dataclasses.dataclass
class Replay:
    """A step made once more, on one device.

    Attributes:
        step: its number, from 1.
        epoch: its epoch, from 1.
        examples: how many it was made from.
        names: what wasn't finite when it was first made.
        again: the same, now.
        values: the values that `compute` returned.
        gradients: by variable; divided by the weight, not clipped.
    """

    step: int
    epoch: int
    examples: int
    names: list[str]
    again: list[str]
    values: list[Shown]
    gradients: list[Shown]


def replay(task: TrainTask, path: str | Path) -> Replay:
    """Makes the step that is kept at `path` (a directory `bad/step-...` of a run directory) once more.

    Args:
        task: the task, with the hyperparameters of the run.
        path: what was kept: the batch, the seeds, and the weights before the step.

    Raises:
        UsageError: there is no such step, or the task builds another model.
    """
    path, manifest = locate(Path(path))
    bad, options = manifest["bad"], dict(manifest["run"]["options"])
    options |= {"clip_norm": None, "clip_value": None, "compile": "graph", "ema": None, "on_nonfinite": "stop"}
    options["profile"] = None
    lengths = {name: options.pop(name) for name in ("epochs", "steps")}  # which a task with phases doesn't take
    options = with_defaults(task, {name: each for name, each in options.items() if each is not None} | {"ema": None})
    session = Session(task, Backend(), options | lengths, index_of(manifest, task), trained_on=1)
    built = session.built
    tensors = checkpoint_files.read(path, manifest)
    batch, index = unpacked(tensors, session.data.train.example)
    data = _OneBatch(batch, index, BatchOptions(max(int(index.shape[0]), 1), session.phase_options["seed"]))
    watch = _Watch(built.model, session.backend)
    step = session.make_step(Data(data, None), watch)
    variables = named_variables_of(built) | numbered("scale", step.scale.variables if step.scale else [])
    variables |= numbered("carried", carried_variables(built.model))
    kinds = {name.partition("/")[0] for name in variables}
    assign(variables, {name: each for name, each in tensors.items() if name.partition("/")[0] in kinds})
    weights = [variable.numpy() for variable in as_tf(trainable_variables(built.model))]

    step.train((), bad["epoch"], bad["step_in_epoch"], 1)

    values = [show(name, np.concatenate(parts), index.numpy()) for name, parts in watch.seen.items()]
    gradients = [show(name, each.numpy()) for name, each in zip(_names(built), watch.last, strict=True)]
    for shown, weight in zip(gradients, weights, strict=True):
        shown.weight = show("", weight).largest
    return Replay(bad["step"], bad["epoch"] + 1, len(index), bad["names"], step.not_finite, values, gradients)


def locate(path: Path) -> tuple[Path, dict[str, Any]]:
    """The directory of the kept step at `path`, and its manifest; of a run directory, its newest one."""
    if (path / "bad").is_dir():
        path = max(checkpoint_files.complete(path / "bad"), default=path)
    path, manifest = run_directory.locate(path)
    if "bad" not in manifest:
        raise UsageError(
            f"{path} is a checkpoint: give what was kept of a step that wasn't finite (RUN_DIR/bad/step-...)"
        )
    return path, manifest


def _names(built: Any) -> list[str]:
    return variable_names(trainable_variables(built.model))


def show(name: str, array: np.ndarray, index: np.ndarray | None = None) -> Shown:
    """What there is to tell about a tensor."""
    array = np.asarray(array, np.float64)
    bad = ~np.isfinite(array)
    with np.errstate(invalid="ignore", over="ignore"):
        norm = float(np.sqrt(np.sum(array**2)))
    largest = float(np.abs(array[~bad]).max(initial=0.0))
    examples = [] if index is None else index[bad.reshape(len(array), -1).any(1)][:NUMBERS].tolist()
    return Shown(name, list(array.shape), largest, norm, int(bad.sum()), examples)


class _Watch(GradientObserver):
    """Keeps the gradients of a step, and the values of its batch.

    Attributes:
        seen: the values by name; of micro-batches, a part each.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        super().__init__(model, backend)
        self.seen: dict[str, list[np.ndarray]] = {}

    def values(self, optimizer: str, values: Mapping[str, Any]) -> None:
        """See `StepObserver.values`."""
        for name, value in values.items():
            for place, tensor in enumerate(tf.nest.flatten(value)):
                key = f"{name}_{place}" if place else name
                self._keep(f"{optimizer}_{key}" if optimizer else key, tensor)

    def _keep(self, key: str, tensor: tf.Tensor) -> None:
        def keep(value: np.ndarray) -> None:
            self.seen.setdefault(key, []).append(value)

        tf.numpy_function(keep, [tf.cast(tensor, tf.float64)], [])


class _OneBatch(ArraySource):
    """A source of one batch, at any address."""

    def __init__(self, batch: Any, index: tf.Tensor, options: BatchOptions) -> None:
        self.options, self.size, self.endless, self.steps_per_epoch = options, options.batch_size, False, None
        self.example, self._index = batch, index

    def read_batch(self, handle: tuple[()], epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> Any:
        return self._index, self.example

    def batch_rows(self, feed: Any) -> tf.Tensor:
        return tf.constant(self.size, tf.int64)

    def replica_rows(self, feed: Any, replica: Any, part: Any = 0, parts: int = 1) -> Rows:
        epoch, step, _ = feed
        low, high = rows(tf.constant(self.size, tf.int64), part, parts)
        own = tf.nest.map_structure(lambda tensor: tensor[low:high], self.example)
        return Rows(own, low, epoch, step * parts + part, self._index[low:high])


def lines(replayed: Replay) -> list[str]:
    """A replay as people read it."""
    again = f"not finite: {', '.join(replayed.again)}" if replayed.again else "all finite this time"
    found = [
        f"step {replayed.step} (epoch {replayed.epoch}), {replayed.examples} examples; {again}",
        "",
        f"{'value':<40} {'shape':>14} {'largest':>11} {'not finite':>11}",
    ]
    for each in replayed.values:
        which = f"   example {', '.join(map(str, each.examples))}" if each.examples else ""
        found.append(f"{each.name:<40} {_shape(each):>14} {each.largest:>11.4g} {each.not_finite or '':>11}{which}")
    found += ["", f"{'variable':<40} {'shape':>14} {'weight':>11} {'gradient':>11} {'norm':>11} {'not finite':>11}"]
    found += [
        f"{each.name:<40} {_shape(each):>14} {each.weight:>11.4g} {each.largest:>11.4g} {each.norm:>11.4g} "
        f"{each.not_finite or '':>11}".rstrip()
        for each in replayed.gradients
    ]
    return found


def _shape(shown: Shown) -> str:
    return "x".join(map(str, shown.shape)) or "scalar"


def as_json(replayed: Replay) -> str:
    """A replay as JSON."""
    return json.dumps(jsonable(dataclasses.asdict(replayed)))
