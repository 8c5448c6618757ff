"""Replay: makes a step that wasn't finite once more, and shows its values and gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import tensorflow as tf

from callbacks.run_record.journal import jsonable
from callbacks.types import JsonObject
from loop.backends.base import Backend
from loop.checkpoint import checkpoint_files
from loop.data import SKIPPED, ArraySource, BatchOptions, Data, Feed, ReadBatch, Rows, part_bounds
from loop.data.row_shares import RowShares
from loop.errors import UsageError
from loop.model.variables import as_tf, carried_variables, trainable_variables, variable_names
from loop.options import Options, with_defaults
from loop.run import run_directory
from loop.run.bad_step import unpacked
from loop.run.session import Session, index_of
from loop.run.state import assign, named_variables_of, numbered
from loop.step.observer import GradientObserver
from loop.task import Batch, Model, TrainTask, Values

NUMBERS = 5
"""The number of examples that are named, of those that aren't finite."""


@dataclasses.dataclass
class Shown:
    """A tensor of the step."""

    name: str  # the name of a value or of a variable
    shape: list[int]  # the shape of the tensor
    largest: float  # the greatest absolute value of its finite elements
    norm: float  # the L2 norm; nan or inf if it isn't finite
    not_finite: int  # the number of its elements that are nan or infinite
    # For a value: the indices, in the data, of the first examples that aren't finite.
    examples: list[int] = dataclasses.field(default_factory=list)
    weight: float = 0.0  # for a gradient: the greatest absolute value of the variable


@dataclasses.dataclass
class Replay:
    """A step that was made once more, on one device."""

    step: int  # the number of the step, from 1
    epoch: int  # the epoch of the step, from 1
    examples: int  # the number of examples in its batch
    names: list[str]  # what wasn't finite when the step was first made
    again: list[str]  # what wasn't finite this time
    values: list[Shown]  # the values that `compute` returned
    gradients: list[Shown]  # the gradient of each variable; divided by the weight, not clipped


def replay(task: TrainTask, path: str | Path) -> Replay:
    """Makes a step once more that wasn't finite.

    Args:
        task: the task, with the hyperparameters of the run.
        path: a directory `bad/step-...` of a run directory, or a run directory with one. It has the batch, the seeds,
            and the weights before the step.

    Raises:
        UsageError: there is no such step, or the task builds another model.
    """
    path, manifest = locate(Path(path))
    bad = manifest["bad"]
    tensors = checkpoint_files.read(path, manifest)
    # On one device, whatever the run had: the whole batch is seen at once.
    session = Session(task, Backend(), _options(task, manifest), index_of(manifest, task), trained_on=1)
    model = session.built.model
    batch, index = unpacked(tensors, session.data.train.example)
    source = _OneBatch(batch, index, BatchOptions(max(int(index.shape[0]), 1), session.phase_options["seed"]))
    index = tf.boolean_mask(index, index != SKIPPED)
    recorder = _Recorder(model, session.backend)
    step = session.make_step(Data(source, None), recorder)

    variables = named_variables_of(session.built)
    if step.scale:
        variables |= numbered("scale", step.scale.variables)
    variables |= numbered("carried", carried_variables(model))
    # A checkpoint also holds the batch, moving averages and iterators, which this step doesn't have.
    kinds = {name.partition("/")[0] for name in variables}
    kept = {}
    for name, tensor in tensors.items():
        if name.partition("/")[0] in kinds:
            kept[name] = tensor
    assign(variables, kept)
    trained = trainable_variables(model)
    weights = [variable.numpy() for variable in as_tf(trained)]  # before the step

    step.train((), bad["epoch"], bad["step_in_epoch"], 1)

    values = []
    for name, parts in recorder.recorded.items():
        in_order = [parts[part] for part in sorted(parts)]
        values.append(show(name, np.concatenate(in_order), index.numpy()))
    gradients = []
    for name, gradient, weight in zip(variable_names(trained), recorder.last, weights, strict=True):
        largest_weight = show(name, weight).largest
        gradients.append(dataclasses.replace(show(name, gradient.numpy()), weight=largest_weight))
    return Replay(bad["step"], bad["epoch"] + 1, len(index), bad["names"], step.not_finite, values, gradients)


def _options(task: TrainTask, manifest: JsonObject) -> Options:
    """The options of the run, except those that would hide what wasn't finite."""
    options = {name: value for name, value in manifest["run"]["options"].items() if value is not None}
    lengths = {name: options.pop(name, None) for name in ("epochs", "steps")}  # a task with phases doesn't take them
    # XLA can't call the Python function that records values.
    options |= {"compile": "graph", "on_nonfinite": "stop"}
    # Clipping would change the gradients that are shown; the others have no part in a single step.
    unused = dict.fromkeys(("clip_norm", "clip_value", "ema", "profile"))
    # `unused` twice: where None is given, `with_defaults` takes the task's own default.
    return with_defaults(task, options | unused) | lengths | unused


def locate(path: Path) -> tuple[Path, JsonObject]:
    """The directory of the kept step at `path`, and its manifest; for a run directory, its newest kept step."""
    given = path
    if (path / "bad").is_dir():
        path = max(checkpoint_files.complete(path / "bad"), default=path)
    path, manifest = run_directory.locate(path)
    if "bad" not in manifest:
        raise UsageError(
            f"{given}: no step that wasn't finite was kept there: give a run that has one, or RUN_DIR/bad/step-..."
        )
    return path, manifest


def show(name: str, array: np.ndarray, index: np.ndarray | None = None) -> Shown:
    """The numbers that describe a tensor; `index` has the indices of its examples in the data."""
    array = np.asarray(array, np.float64)  # in which the square of any float32 is finite
    bad = ~np.isfinite(array)
    with np.errstate(invalid="ignore", over="ignore"):
        norm = float(np.sqrt(np.sum(array**2)))
    largest = float(np.abs(array[~bad]).max(initial=0.0))
    examples = []
    if index is not None:  # the rows of a value are the examples
        examples = index[bad.reshape(len(array), -1).any(1)][:NUMBERS].tolist()
    return Shown(name, list(array.shape), largest, norm, int(bad.sum()), examples)


class _Recorder(GradientObserver):
    """Keeps the gradients of a step, and the values of its batch.

    Attributes:
        recorded: the values by name; of each micro-batch, by its number.
    """

    def __init__(self, model: Model, backend: Backend) -> None:
        super().__init__(model, backend)
        self.recorded: dict[str, dict[int, np.ndarray]] = {}

    def values(self, optimizer: str, values: Values, part: tf.Tensor) -> None:
        """See `StepObserver.values`."""
        for name, value in values.items():
            for number, tensor in enumerate(tf.nest.flatten(value)):
                key = f"{name}_{number}" if number else name
                if optimizer:
                    key = f"{optimizer}_{key}"
                self._keep(key, tensor, part)

    def _keep(self, key: str, tensor: tf.Tensor, part: tf.Tensor) -> None:
        def keep(value: np.ndarray, part: np.ndarray) -> None:
            self.recorded.setdefault(key, {})[int(part)] = value

        # What is traced is called in each micro-batch: so `keep` gets the values of all of them.
        tf.numpy_function(keep, [tf.cast(tensor, tf.float64), part], [])


class _OneBatch(ArraySource):
    """A source that has the same batch at any position."""

    def __init__(self, batch: Batch, index: tf.Tensor, options: BatchOptions) -> None:
        self.options = options
        self.size = options.batch_size
        self._shares = RowShares(self.size, self.size, drop_remainder=False)
        self.steps_per_epoch = None  # the step that is replayed may have any number
        self.example = batch
        self._index = index
        self.leaves_out = bool((index.numpy() == SKIPPED).any())

    def read_batch(self, iterator: tuple[()], epoch: tf.Tensor, step: tf.Tensor, parts: int = 1) -> ReadBatch:
        return self._index, self.example

    def batch_rows(self, feed: Feed) -> tf.Tensor:
        return tf.constant(self.size, tf.int64)

    def replica_rows(self, feed: Feed, replica: tf.Tensor | int, part: tf.Tensor | int = 0, parts: int = 1) -> Rows:
        # One device has all rows: a part of them is a micro-batch.
        epoch, step, _ = feed
        low, high = part_bounds(tf.constant(self.size, tf.int64), part, parts)
        own = tf.nest.map_structure(lambda tensor: tensor[low:high], self.example)
        first = tf.constant(0, tf.int64)  # one device has the micro-batch from its first row on
        of_part = Rows(own, first, epoch, step * parts + part, self._index[low:high])
        return of_part.without_skipped() if self.leaves_out else of_part


def lines(replayed: Replay) -> list[str]:
    """The replay for people, line by line."""
    again = f"not finite: {', '.join(replayed.again)}" if replayed.again else "all finite this time"
    text = [
        f"step {replayed.step} (epoch {replayed.epoch}), {replayed.examples} examples; {again}",
        "",
        f"{'value':<40} {'shape':>14} {'largest':>11} {'not finite':>11}",
    ]
    for value in replayed.values:
        which = f"   example {', '.join(map(str, value.examples))}" if value.examples else ""
        text.append(f"{value.name:<40} {_shape(value):>14} {value.largest:>11.4g} {value.not_finite or '':>11}{which}")
    text += ["", f"{'variable':<40} {'shape':>14} {'weight':>11} {'gradient':>11} {'norm':>11} {'not finite':>11}"]
    for gradient in replayed.gradients:
        numbers = f"{gradient.weight:>11.4g} {gradient.largest:>11.4g} {gradient.norm:>11.4g}"
        row = f"{gradient.name:<40} {_shape(gradient):>14} {numbers} {gradient.not_finite or '':>11}"
        text.append(row.rstrip())
    return text


def _shape(shown: Shown) -> str:
    return "x".join(map(str, shown.shape)) or "scalar"


def as_json(replayed: Replay) -> JsonObject:
    """A replay as JSON values."""
    values: JsonObject = jsonable(dataclasses.asdict(replayed))
    return values
