"""`tfloop verify`: trains a task for a few steps on one replica and on several, and compares every number."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from loop.backends import devices
from loop.backends.base import Backend
from loop.commands import diagnose, terminal
from loop.data import in_float64, part
from loop.errors import UsageError
from loop.model.variables import as_tf, trainable_variables, variable_names
from loop.options import phases_of, with_defaults
from loop.run.session import Session
from loop.run.state import named_variables_of
from loop.step import approximations
from loop.step.batch_norm import statistics
from loop.step.observer import GradientObserver
from loop.step.train_step import EPOCH_ENDED, NOT_FINITE, TrainStep
from loop.task import TrainTask

BOUNDS = {"float32": 1e-4, "float64": 1e-5}
"""The largest difference that is taken for rounding: a mistake is rarely below 1e-3.

Rounding in float64 is below 1e-12; but some layers, and the states of Keras's metrics, are float32 within.

In float32 only the first step is judged by it. Where a gradient is 0 but for rounding, an optimizer such as Adam makes
steps of the learning rate out of it, and after a few of them weights differ by as much on any backend.
"""
EPOCHS = 2
REPLICAS = 2, 3
KINDS = ("gradients", "weights", "statistics", "metrics")

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass
class Comparison:
    """One way to train, compared with one replica.

    Attributes:
        precision: of the layers.
        engine: how it was trained.
        replicas: on how many.
        differences: the largest relative difference by kind; nan where there is nothing of it.
        first: what differs first, or "".
        same: whether all differences are rounding.
        note: why it could not be compared, or "".
    """

    precision: str
    engine: str
    replicas: int
    differences: dict[str, float]
    first: str
    same: bool
    note: str = ""


@dataclasses.dataclass
class Report:
    """What `verify` found.

    Attributes:
        task: the task's name.
        batch_size: the global batch.
        steps: how many were made.
        comparisons: one for each precision and engine.
        causes: why numbers differ, or would with other data; as far as it can be known.
        same: whether everything is the same everywhere.
        devices: on which devices it was compared, in words.
    """

    task: str
    batch_size: int
    steps: int
    comparisons: list[Comparison]
    causes: list[str]
    same: bool
    devices: str = ""


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

    Args:
        task: the task. Its own options (`TrainTask.defaults`) are kept, but for the length of the training.
        batch_size: the global batch; None: the task's own.
        replicas: on how many devices to train it, beside one: GPUs if there are enough, else logical CPU devices.
        job: records the task in real processes, into a directory; gives an error, or "". None: no processes.
        job_engine: the engine of those.
        progress: is called with what is being done.
        compile: `graph` or `xla`; None: the task's own.

    Raises:
        UsageError: the task can't be trained at all.
    """
    from loop import backends

    where = devices.alike(max(replicas))
    ways = [("single", 1, Backend()), *(("mirrored", n, backends.create("mirrored", n)) for n in replicas)]
    comparisons, steps = [], 0
    with tempfile.TemporaryDirectory(prefix="tfloop-verify-") as directory:
        problem = ""
        if job is not None:
            progress(f"2 processes of {job_engine}")
            problem = job(Path(directory))
        for precision in BOUNDS:
            progress(f"{precision}: 1 replica")
            try:
                reference = record(task, Backend(), precision, batch_size, compile)
            except Exception as error:
                if precision == "float32" or isinstance(error, UsageError):
                    raise
                # Such as a tf.Module of float32 tensors: no mistake of the task.
                comparisons.append(Comparison(precision, "single", 1, {}, "", True, _why_not(task, error)))
                continue
            steps = len({name.split("/")[1] for name in reference if name.startswith("gradients/")})
            for engine, n, backend in ways:
                progress(f"{precision}: {n} replica{'s' * (n > 1)}{' again' * (n == 1)}")
                found = record(task, backend, precision, batch_size, compile)
                comparisons.append(compare(precision, engine, n, reference, found))
            if job is not None and not problem:
                with np.load(Path(directory) / f"{precision}.npz", allow_pickle=False) as stored:
                    found = {name: stored[name] for name in stored.files}
                comparisons.append(compare(precision, job_engine, 2, reference, found))
            elif job is not None:
                comparisons.append(Comparison(precision, job_engine, 2, {}, "", False, problem))
    progress("looking for causes")
    causes = diagnose.causes(task, options_of(task, "float32", batch_size))
    same = all(comparison.same for comparison in comparisons) and not causes
    if not same and not causes:
        causes = [UNKNOWN]
    size = options_of(task, "float32", batch_size)["batch_size"]
    return Report(type(task).__name__, size, steps, comparisons, causes, same, where)


def _why_not(task: TrainTask, error: Exception) -> str:
    """Why a task that can be computed in float32 can't be computed in float64."""
    text, file = str(error), inspect.getsourcefile(type(task)) or "?"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    lines += [int(number) for number in re.findall(rf'File "{re.escape(file)}", line (\d+)', text)]  # of AutoGraph
    where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    if not re.search(r"float32|\bfloat\b", text):
        first = (text.strip().splitlines() or [""])[0][:200]
        return f"can't be computed{where}: {type(error).__name__}: {first}"
    return (
        f"not compared: the task has float32 written into it{where}; what counts is the comparison in float32. To "
        "compare in float64, too, use the dtype of the batch, or keras.config.floatx()"
    )


UNKNOWN = (
    "the cause can't be told from outside: look at what compute() makes of the variable that differs first, for a "
    "number that depends on how many examples it sees, or on the rank"
)


def options_of(task: TrainTask, precision: str, batch_size: int | None, compile: str | None = None) -> dict[str, Any]:
    """The options with which a task is verified: its own, but for precision and length, and nothing is compressed."""
    given = {"batch_size": batch_size, "precision": precision, "compile": compile, "eval_every": "epoch"}
    options = with_defaults(task, given)
    options |= {"epochs": EPOCHS, "steps": None, "backend": "single", "compression": "none", "overfit": None}
    return options | approximations.OFF


def record(
    task: TrainTask, backend: Backend, precision: str, batch_size: int | None, compile: str | None = None
) -> Arrays:
    """Trains for a few steps, and writes down every number by kind, step and name."""
    keras.utils.clear_session(free_memory=False)  # names of layers start anew, and are the same each time
    found: Arrays = {}
    session = Session(task, backend, options_of(task, precision, batch_size, compile), change=_few)
    number = _train(session, 0, found)
    while session.index + 1 < len(phases_of(task)):
        session.enter_next_phase()
        number = _train(session, number, found)
    built = session.built
    trained = {id(variable) for variable in as_tf(trainable_variables(built.model))}
    gathered = {id(variable) for variable in statistics(built.model)}
    for name, variable in named_variables_of(built).items():
        if name.startswith("model/") and id(variable) in trained | gathered:
            kind = "weights" if id(variable) in trained else "statistics"
            found[f"{kind}/{name.removeprefix('model/')}"] = backend.local_values(variable)[0]
    return found


def _train(session: Session, number: int, found: Arrays) -> int:
    """Trains for a phase, writes every number down in `found`, and returns how many steps have been made by then."""
    backend = session.backend
    gradients = GradientObserver(session.built.model, backend)
    step = session.make_step(observer=gradients)
    backend.broadcast_variables(step.built.variables + step.variables)
    names = variable_names(trainable_variables(step.built.model))
    end = f"end-{number}" if number else "end"
    for totals in _steps(step):
        number += 1
        for index, (name, gradient) in enumerate(zip(names, gradients.last, strict=True)):
            found[f"gradients/{number}/{index:05d}:{name}"] = backend.local_values(gradient)[0]
        for name, value in step.means(totals).items():
            found[f"metrics/{number}/{name}"] = np.array(value)
    evaluated = step.evaluation.means(step.evaluation.whole()) if step.data.eval is not None else {}
    found |= {f"metrics/{end}/{name}": np.array(value) for name, value in evaluated.items()}
    step.average_statistics()
    return number


def _steps(step: TrainStep) -> Iterator[np.ndarray]:
    """Makes one step after the other; the totals of each."""
    handle = step.data.train.start(0, 0)
    for epoch in range(EPOCHS):
        done = 0
        while done != step.data.train.steps_per_epoch:
            made, status, totals = step.train(handle, epoch, done, 1)
            if status == NOT_FINITE:
                raise UsageError(f"step {done + 1}: not finite: {', '.join(step.not_finite)}: nothing can be compared")
            if status == EPOCH_ENDED:
                break
            done += made
            yield totals
        handle = step.data.train.next_epoch(handle)


def _few(data: Any, options: dict[str, Any]) -> Any:
    """The first examples of what a task returned, in the precision of the options."""
    few = part(data, 2 * options["batch_size"] + 1)
    return in_float64(few) if options["precision"] == "float64" else few


def compare(precision: str, engine: str, replicas: int, reference: Arrays, found: Arrays) -> Comparison:
    """Compares all that was recorded; see `difference` for what it is relative to."""
    differences: dict[str, float] = {}
    first = ""
    judged = ("gradients/1/", "metrics/1/") if precision == "float32" else tuple(f"{kind}/" for kind in KINDS)
    other = [name for name in [*reference, *found] if (name in reference) != (name in found)]
    if other:
        return Comparison(precision, engine, replicas, {}, "", False, f"only one of the two has {other[0]}")
    for kind in KINDS:
        names = [name for name in reference if name.startswith(f"{kind}/")]
        largest = max((difference(name, reference, found) for name in names), default=float("nan"))
        differences[kind] = largest
        beyond = [n for n in names if n.startswith(judged) and not difference(n, reference, found) <= BOUNDS[precision]]
        first = first or (beyond[0] if beyond else "")
    return Comparison(precision, engine, replicas, differences, first, not first)


def difference(name: str, reference: Arrays, found: Arrays) -> float:
    """The largest absolute difference, relative to the largest number of its kind (and step) in the whole model.

    Not to that of the variable alone: where the gradient is 0 but for rounding, as that of a bias that a softmax or a
    normalisation takes out again, rounding is all there is.
    """
    one, other = reference[name].astype("float64"), found[name].astype("float64")
    if one.shape != other.shape:
        return float("inf")
    same = (one == other) | (np.isnan(one) & np.isnan(other))  # infinite ones too
    if same.all():
        return 0.0
    apart = float(np.abs(one - other)[~same].max())
    kind, _, rest = name.partition("/")
    if kind == "metrics":
        return apart / max(1e-3, float(np.abs(one).max()))
    group = f"{kind}/{rest.partition('/')[0]}/" if kind == "gradients" else f"{kind}/"
    sizes = [float(np.abs(each).max()) for key, each in reference.items() if key.startswith(group) and each.size]
    scale = max((size for size in sizes if np.isfinite(size)), default=0.0)
    return apart / scale if scale else apart


def write(
    directory: Path, task: TrainTask, backend: Backend, batch_size: int | None, compile: str | None = None
) -> None:
    """Records a task in each precision as the worker of a job; the chief writes what was found."""
    for precision in BOUNDS:
        try:
            found = record(task, backend, precision, batch_size, compile)
        except Exception:
            if precision == "float32":
                raise
            continue  # the reference can't be computed either
        if backend.is_chief:
            with (directory / f"{precision}.npz").open("wb") as file:
                np.savez(file, allow_pickle=False, **found)


def as_json(report: Report) -> str:
    """The report as one line of JSON."""
    fields = dataclasses.asdict(report)
    for comparison in fields["comparisons"]:
        comparison["differences"] = {k: (None if v != v else v) for k, v in comparison["differences"].items()}
    return json.dumps(fields)


def lines(report: Report) -> Iterator[tuple[str, bool | None]]:
    """The report for people, line by line: its text, and whether it is good (True) or bad (False) news."""
    yield f"{report.task}: {report.steps} steps of {report.batch_size} examples, the last of each epoch shorter", None
    yield f"compared on {report.devices}", None
    yield "", None
    yield "largest relative difference from 1 replica:", None
    size = max(len(_way(each)) for each in report.comparisons)
    yield f"{'':9}{'':{size}}" + "".join(f"  {kind}" for kind in KINDS), None
    for each in report.comparisons:
        how = f"{each.precision:9}{_way(each):{size}}"
        if each.differences:
            numbers = "".join(f"{number(each.differences[kind]):>{len(kind) + 2}}" for kind in KINDS)
            yield f"{how}{numbers}  {'same' if each.same else 'apart'}", each.same
        else:
            yield f"{how}  not compared", each.same
        for text in filter(None, (each.note, each.first and f"first: {each.first}")):
            for line in terminal.wrapped(text, indent=f"{'':9}"):
                yield line, each.same
    yield "", None
    for cause in report.causes:
        for line in terminal.wrapped(f"why: {cause}"):
            yield line, False
    if report.same:
        yield "the same numbers everywhere", True
    elif all(each.same for each in report.comparisons):
        yield "the numbers agree here by chance: with weights, or other data, they won't", False
    else:
        yield "not the same numbers", False


def _way(comparison: Comparison) -> str:
    """How something was trained, in a few words: 80 columns have room for no more."""
    if comparison.replicas == 1:
        return "1 replica, again"
    return f"{comparison.engine}, {comparison.replicas} replicas"


def number(value: float) -> str:
    """A difference in few characters; "-" where there is nothing to compare."""
    return "-" if value != value else "0" if value == 0 else f"{value:.0e}"
