"""`tfloop verify`: trains a task for a few steps on one replica and on several, and compares every number."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import keras
import numpy as np

from callbacks.types import JsonObject
from loop import backends
from loop.backends import devices
from loop.backends.base import Backend
from loop.commands import diagnose, terminal
from loop.data import head
from loop.errors import UsageError, named
from loop.launch import signals
from loop.model.variables import as_tf, trainable_variables, variable_names
from loop.options import Options, phases_of, with_defaults
from loop.run.session import Session
from loop.run.state import named_variables_of
from loop.step import approximations
from loop.step.batch_norm import statistics
from loop.step.observer import GradientObserver
from loop.step.train_step import NOT_FINITE
from loop.task import Dataset, TrainTask

BOUNDS = {"float32": 1e-4, "float64": 1e-5}
"""The largest relative difference that counts as rounding, by precision. A mistake is rarely below 1e-3.

Rounding in float64 is below 1e-12; but some layers, and the states of Keras's metrics, compute in float32 all the same.

In float32 only the first step is judged. A gradient may be 0 except for rounding. An optimizer such as Adam makes steps
of the size of the learning rate out of it, so that after a few steps weights differ by as much on any backend.
"""
_JUDGED = {"float32": ("gradients/1/", "metrics/1/"), "float64": ("",)}  # prefixes of names; see `BOUNDS`
EPOCHS = 2
"""The number of epochs that a task is trained for."""
REPLICAS = 2, 3
"""The numbers of replicas that are compared with one."""
KINDS = ("gradients", "weights", "statistics", "metrics")
"""The kinds of numbers that are compared."""

Arrays: TypeAlias = dict[str, np.ndarray]
"""Recorded numbers, by `<kind>/<name>`; gradients and metrics by `<kind>/<step>/<name>`."""


@dataclasses.dataclass
class Comparison:
    """A training on several replicas, compared with one on a single replica."""

    precision: str  # the precision of the layers
    engine: str  # the backend
    replicas: int  # the number of replicas
    # The largest relative difference by kind; nan if there are no numbers of this kind.
    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    first: str = ""  # the name of the first number that differs, or ""
    same: bool = False  # whether all differences are rounding
    note: str = ""  # why they could not be compared, or ""


@dataclasses.dataclass
class Report:
    """The result of `verify`."""

    task: str  # the name of the task
    batch_size: int  # the size of the global batch
    steps: int  # the number of steps
    comparisons: list[Comparison]  # a comparison for each precision and backend
    causes: list[str]  # why numbers differ, or would differ with other data; as far as that can be known
    same: bool  # whether all numbers are the same everywhere
    devices: str = ""  # the devices on which they were compared, in words


def verify(
    task: TrainTask,
    batch_size: int | None = None,
    replicas: Sequence[int] = REPLICAS,
    job: Callable[[Path], str] | None = None,
    job_engine: str = "",
    progress: Callable[[str], None] = lambda text: None,
    compile: str | None = None,
) -> Report:
    """Trains a task for a few steps in several ways, and compares gradients, weights, statistics and metrics.

    The task's own options (`TrainTask.defaults`) are kept, except the length of the training, and those given here. It
    trains on one device, and on each of these numbers of devices: GPUs if there are enough, else logical CPU devices.

    Args:
        task: the task.
        batch_size: the size of the global batch.
        replicas: the numbers of devices.
        job: records the task in real processes, into a directory; returns an error, or "". None: no processes.
        job_engine: the backend of these processes.
        progress: is called with a text that says what is being done.
        compile: `graph` or `xla`.

    Raises:
        UsageError: the task can't be trained at all.
    """
    compared_on = devices.alike(max(replicas))  # first: once TensorFlow has started, its devices can't be split
    # One replica is compared with itself, too: numbers that differ there are random.
    in_process = [Backend(), *(backends.create("mirrored", n) for n in replicas)]
    comparisons: list[Comparison] = []
    warned: list[str] = []  # of the first training that warned of something
    steps = 0
    with signals.temporary_directory("tfloop-verify-") as directory, diagnose.kept_warnings() as told:
        problem = ""
        if job is not None:
            progress(f"2 processes of {job_engine}")
            problem = job(Path(directory))
        for precision in BOUNDS:
            options = options_of(task, precision, batch_size, compile)
            progress(f"{precision}: 1 replica")
            reference = _reference(task, options)
            if isinstance(reference, str):
                comparisons.append(Comparison(precision, "single", 1, same=True, note=reference))
                continue
            # Each step has gradients: `gradients/<step>/...`.
            steps = len({name.split("/")[1] for name in reference if name.startswith("gradients/")})
            for backend in in_process:
                progress(f"{precision}: {_way(backend.name, backend.replicas)}")
                numbers = record(task, backend, options)
                warned = warned or told.copy()
                comparisons.append(compare(precision, backend.name, backend.replicas, reference, numbers))
            if problem:
                comparisons.append(Comparison(precision, job_engine, 2, note=problem))
            elif job is not None:
                comparisons.append(compare(precision, job_engine, 2, reference, _read(Path(directory), precision)))
    progress("looking for causes")
    options = options_of(task, "float32", batch_size)
    causes = diagnose.explained(task, options, warned, _agree(comparisons, problem))
    same = not causes and not problem
    return Report(type(task).__name__, options["batch_size"], steps, comparisons, causes, same, compared_on)


def _agree(comparisons: Sequence[Comparison], problem: str) -> bool:
    """Whether all compared numbers are the same. Those of processes that have failed (`problem`) weren't compared."""
    compared = [comparison for comparison in comparisons if not problem or comparison.note != problem]
    return all(comparison.same for comparison in compared)


def _reference(task: TrainTask, options: Options) -> Arrays | str:
    """The numbers of one replica; or why the task isn't compared in this precision."""
    try:
        return record(task, Backend(), options)
    except Exception as error:
        # A user error about types that don't fit has TensorFlow's error as its cause.
        cause = error.__cause__ if isinstance(error, UsageError) else error
        if options["precision"] == "float32" or cause is None:
            raise
        # That a task is bound to float32, such as a tf.Module of float32 tensors, isn't a mistake.
        return _why_not(task, cause)


def _why_not(task: TrainTask, error: BaseException) -> str:
    """Why a task that can be computed in float32 can't be computed in float64."""
    text = str(error)
    file = inspect.getsourcefile(type(task)) or "?"
    # The last line within the task's own file: the frames below it are TensorFlow's, which tell the user nothing.
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file:
            lines.append(frame.lineno)
    # What AutoGraph has converted has no frame in that file: it names the lines in the text of its error.
    lines += map(int, re.findall(rf'File "{re.escape(file)}", line (\d+)', text))
    where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    if not re.search(r"float32|\bfloat\b", text):
        return f"can't be computed{where}: {named(error)}"
    return (
        f"not compared: the task has float32 written into it{where}; what counts is the comparison in float32. To "
        "compare in float64, too, use the dtype of the batch, or keras.config.floatx()"
    )


def options_of(task: TrainTask, precision: str, batch_size: int | None, compile: str | None = None) -> Options:
    """The options with which a task is verified: its own, except precision and length, and without approximations."""
    given = {"batch_size": batch_size, "precision": precision, "compile": compile, "eval_every": "epoch"}
    options = with_defaults(task, given)
    options |= {"epochs": EPOCHS, "steps": None, "backend": "single", "compression": "none", "overfit": None}
    return options | approximations.OFF


def record(task: TrainTask, backend: Backend, options: Options) -> Arrays:
    """Trains for a few steps, and records every number by kind, step and name."""
    keras.utils.clear_session(free_memory=False)  # so that layers have the same names each time
    numbers: Arrays = {}
    session = Session(task, backend, options, change=_few)
    steps = _train(session, 0, numbers)
    while session.index + 1 < len(phases_of(task)):
        session.enter_next_phase()
        steps = _train(session, steps, numbers)

    model = session.built.model
    kinds = dict.fromkeys(map(id, statistics(model)), "statistics")
    kinds |= dict.fromkeys(map(id, as_tf(trainable_variables(model))), "weights")
    # Other variables of the model, such as the seeds of layers, aren't a result that replicas must share.
    for name, variable in named_variables_of(session.built).items():
        if name.startswith("model/") and id(variable) in kinds:
            kind = kinds[id(variable)]
            numbers[f"{kind}/{name.removeprefix('model/')}"] = backend.local_values(variable)[0]
    return numbers


def _train(session: Session, steps_before: int, numbers: Arrays) -> int:
    """Trains a phase, and records its numbers; returns the number of steps made so far, with earlier phases."""
    backend = session.backend
    gradients = GradientObserver(session.built.model, backend)
    step = session.make_step(observer=gradients)
    backend.broadcast_variables(step.built.variables + step.variables)
    names = variable_names(trainable_variables(step.built.model))
    steps = steps_before
    for ending, totals in session.steps(EPOCHS):
        if ending == NOT_FINITE:
            raise UsageError(f"step {steps + 1}: not finite: {', '.join(step.not_finite)}: nothing can be compared")
        steps += 1
        # With an index, because two variables may have one name.
        for index, (name, gradient) in enumerate(zip(names, gradients.last, strict=True)):
            numbers[f"gradients/{steps}/{index:05d}:{name}"] = backend.local_values(gradient)[0]
        for name, value in step.means(totals).items():
            numbers[f"metrics/{steps}/{name}"] = np.array(value)
    # Each phase is evaluated at its end: a later one must not take the place of an earlier one.
    end = f"end-{steps_before}" if steps_before else "end"
    for evaluation in step.evaluations.values():
        for name, value in evaluation.means(evaluation.whole()).items():
            numbers[f"metrics/{end}/{name}"] = np.array(value)
    step.average_statistics()
    return steps


def _few(data: Dataset, options: Options) -> Dataset:
    """The first examples of what a task returned, in the precision of the options."""
    # Two whole batches, and one of a single example: on several replicas, some have no row of it.
    return diagnose.in_precision(head(data, 2 * options["batch_size"] + 1), options)


def compare(precision: str, engine: str, replicas: int, reference: Arrays, numbers: Arrays) -> Comparison:
    """Compares recorded numbers with those of one replica; see `difference`."""
    if not numbers:
        return Comparison(precision, engine, replicas, note="it fails there, but not on 1 replica")
    comparison = Comparison(precision, engine, replicas)
    if in_one := reference.keys() ^ numbers.keys():
        comparison.note = f"only one of the two has {min(in_one)}"
        return comparison

    scales = _scales(reference)
    for kind in KINDS:
        apart: dict[str, float] = {}
        for name, expected in reference.items():
            if name.startswith(f"{kind}/"):
                apart[name] = difference(name, expected, numbers[name], scales)
        # A nan that comes later is lost in `max`; the comparison with the bound below finds it.
        comparison.differences[kind] = max(apart.values(), default=float("nan"))
        for name, value in apart.items():
            # Not `>`, which would take a nan for rounding.
            if not comparison.first and name.startswith(_JUDGED[precision]) and not value <= BOUNDS[precision]:
                comparison.first = name
    comparison.same = not comparison.first
    return comparison


def _group(name: str) -> str:
    """The group of numbers that share a scale: all numbers of a kind; for gradients, those of one step."""
    kind, _, rest = name.partition("/")
    return f"{kind}/{rest.partition('/')[0]}" if kind == "gradients" else kind


def _scales(reference: Arrays) -> dict[str, float]:
    """The largest finite number of each group."""
    scales: dict[str, float] = {}
    for name, array in reference.items():
        size = float(np.abs(array).max()) if array.size else 0.0
        if math.isfinite(size):
            scales[_group(name)] = max(size, scales.get(_group(name), 0.0))
    return scales


def difference(name: str, reference: np.ndarray, numbers: np.ndarray, scales: dict[str, float]) -> float:
    """The largest absolute difference, relative to the largest number of the same group in the whole model."""
    # Not relative to the variable alone: a gradient may be 0 except for rounding, such as that of a bias that a softmax
    # or a normalization cancels. Relative to itself, rounding would be a large difference.
    one = reference.astype("float64")
    other = numbers.astype("float64")
    if one.shape != other.shape:
        return float("inf")
    same = (one == other) | (np.isnan(one) & np.isnan(other))  # equal infinities are the same, too
    if same.all():
        return 0.0
    apart = float(np.abs(one - other)[~same].max())
    # Each metric has a scale of its own, since one says nothing about another. Near 0, the scale is a fixed one.
    if name.startswith("metrics/"):
        return apart / max(1e-3, float(np.abs(one).max()))
    scale = scales.get(_group(name), 0.0)
    return apart / scale if scale else apart


def write(
    directory: Path, task: TrainTask, backend: Backend, batch_size: int | None, compile: str | None = None
) -> None:
    """Records a task in each precision, as the worker of a job; the chief writes the numbers."""
    for precision in BOUNDS:
        try:
            with diagnose.kept_warnings():  # the process that compares the numbers has the same ones
                numbers = record(task, backend, options_of(task, precision, batch_size, compile))
        except Exception:
            if precision == "float32":
                raise
            continue  # in most cases, the reference can't be computed either
        if backend.is_chief:
            with (directory / f"{precision}.npz").open("wb") as file:
                np.savez(file, allow_pickle=False, **numbers)


def _read(directory: Path, precision: str) -> Arrays:
    """Reads the numbers that `write` has written; {} if the processes have failed in this precision."""
    path = directory / f"{precision}.npz"
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def as_json(report: Report) -> JsonObject:
    """The report as JSON values."""
    fields = dataclasses.asdict(report)
    for comparison in fields["comparisons"]:
        for kind, value in comparison["differences"].items():
            if math.isnan(value):  # JSON has no nan
                comparison["differences"][kind] = None
    return fields


def lines(report: Report) -> Iterator[tuple[str, bool | None]]:
    """The report for people, line by line: its text, and whether it is good (True) or bad (False) news."""
    yield f"{report.task}: {report.steps} steps of {report.batch_size} examples, the last of each epoch shorter", None
    yield f"compared on {report.devices}", None
    yield "", None
    yield "largest relative difference from 1 replica:", None
    width = max(len(_way(comparison.engine, comparison.replicas)) for comparison in report.comparisons)
    yield f"{'':9}{'':{width}}" + "".join(f"  {kind}" for kind in KINDS), None
    for comparison in report.comparisons:
        for text in _comparison_lines(comparison, width):
            yield text, comparison.same
    if any(map(_differs_later, report.comparisons)):
        yield "* only the first step is judged in float32: later ones may make more of rounding", None
    yield "", None
    for cause in report.causes:
        for line in terminal.wrapped(f"why: {cause}"):
            yield line, False
    if report.same:
        yield "the same numbers everywhere", True
    elif not report.causes:
        yield "not all could be compared", False
    # No number differs, but `diagnose` has found a mistake.
    elif all(comparison.same for comparison in report.comparisons):
        yield "the numbers agree here by chance: with weights, or other data, they won't", False
    else:
        yield "not the same numbers", False


def _comparison_lines(comparison: Comparison, width: int) -> Iterator[str]:
    """A row of the table, and below it its note and what differs first."""
    result = "  not compared"
    if comparison.differences:
        result = ""
        for kind in KINDS:
            result += f"{number(comparison.differences[kind]):>{len(kind) + 2}}"
        result += "  same" if comparison.same else "  apart"
        result += "*" if _differs_later(comparison) else ""
    yield f"{comparison.precision:9}{_way(comparison.engine, comparison.replicas):{width}}{result}"
    if comparison.note:
        yield from terminal.wrapped(comparison.note, indent=f"{'':9}")
    if comparison.first:
        yield from terminal.wrapped(f"first: {comparison.first}", indent=f"{'':9}")


def _differs_later(comparison: Comparison) -> bool:
    """Whether it counts as the same by its first step alone."""
    bound = BOUNDS[comparison.precision]
    return comparison.same and any(value > bound for value in comparison.differences.values())


def _way(engine: str, replicas: int) -> str:
    """The backend and the number of replicas, in few words: the table must fit into 80 columns."""
    return "1 replica, again" if replicas == 1 else f"{engine}, {replicas} replicas"


def number(value: float) -> str:
    """A difference in few characters; "-" if there is nothing to compare."""
    if math.isnan(value):
        return "-"
    return f"{value:.0e}" if value else "0"
