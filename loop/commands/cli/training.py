"""`tfloop train`, `evaluate`, `predict` and `export`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from callbacks.formats import plural
from callbacks.run_record.redaction import tell
from loop.commands import config, conversion, dry_run, runs, serving_layout, tracking
from loop.commands import train as train_
from loop.commands.cli import help as help_
from loop.commands.cli import options as typed
from loop.commands.cli.output import finish, shown_stages, stopped_clean
from loop.commands.cli.signature import takes
from loop.commands.cli.train_arguments import TrainArguments
from loop.commands.prediction_output import check_data, check_out, shown_parts, threads_for
from loop.errors import PREEMPTED, UsageError
from loop.launch import explain, stderr
from loop.launch.backend_choice import choose_for_command, starts_workers
from loop.launch.environment import JOB
from loop.launch.fixed_job import run_job
from loop.launch.worker import reporting
from loop.options import with_defaults
from loop.target import task_loader

_FILE_ENDINGS = (".npz", ".keras", ".h5", ".hdf5", ".onnx", ".tflite", ".pb", ".pt", ".npy", ".ckpt", ".zip")
"""Endings of file names, in lower case. An output with any other ending is a directory."""

_EXPORTED_ENDINGS = (".npz", ".keras", ".onnx", ".tflite")
"""The endings of the files that `export` writes."""

_KEPT = "what is predicted is kept, and the same command goes on from there"
"""The message of an interrupted prediction."""


class Configurable(help_.Command):
    """A command that takes options from files, as if they had been typed before all others."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        # Parsed twice: the first time only to learn which files are named, and which options are typed.
        given: dict[str, Any] = self.make_parser(context).parse_args(args=list(args))[0]
        names = {name.rstrip("_").replace("_", "-") for name in given}
        paths = list(map(Path, given.get("config_") or ()))
        from_files = config.arguments(paths, train_options(), names)
        return super().parse_args(context, [*from_files, *args])


@takes(TrainArguments)
def train(given: TrainArguments) -> None:
    """Train a task."""
    if given.debug:
        os.environ[explain.DEBUG] = "1"  # in the environment, so that workers have it, too
    code, problem, fields = train_.train(given, sys.argv[1:])
    page = tracking.seen(given.track, fields.get("run_dir")) if fields is not None else ""

    def lines(fields: Mapping[str, Any]) -> Iterable[str]:
        return dry_run.lines(fields) if given.dry_run_ and code == 0 else ()

    finish(code, problem, fields, given.as_json, lines, page)


@functools.cache
def train_options() -> dict[str, config.Option]:
    """What files for `--config` may have."""
    # Only typer's own object of the command knows each option's names, and what is typed for False.
    parser = typer.Typer(add_completion=False)
    parser.command()(train)
    hints = typing.get_type_hints(TrainArguments)
    options = {}
    for parameter in typer.main.get_command(parser).params:
        name = parameter.name or ""
        is_shown_option = parameter.param_type_name == "option" and not getattr(parameter, "hidden", False)
        if is_shown_option and name != "config_":  # a file of options names no other files
            kind = hints[name]
            if isinstance(kind, types.UnionType):  # an option that may be left out is of a type or None
                kind = typing.get_args(kind)[0]
            options[parameter.opts[0].removeprefix("--")] = config.Option(kind, *parameter.secondary_opts)
    return options


def _checkpointed(run: str, task_target: str | None) -> Path:
    """The path of a run, which must have a checkpoint; also checks `--target`."""
    path = runs.checkpointed(runs.named(run))
    if task_target is not None:
        task_loader.check(task_target)
    return path


def evaluate(
    run: typed.RunDir,
    task_target: typed.TaskTarget = None,
    trust: typed.Trust = False,
    backend: typed.UseBackend = None,
    workers: typed.Workers = None,
    batch_size: typed.EvaluateBatchSize = None,
    as_json: typed.AsJson = False,
) -> None:
    """Evaluate a checkpoint on the whole evaluation data."""
    with_defaults(None, {"batch_size": batch_size, "backend": backend})  # for its checks
    path = _checkpointed(run, task_target)
    backend_name = choose_for_command(backend or "auto", workers)
    if starts_workers(backend_name):
        # Its workers come here again, with the same arguments, and go on below. `finish` doesn't return.
        ended = run_job(backend_name, workers or 1, sys.argv[1:])[:3]
        if ended[0] == PREEMPTED:
            tell("stopped: nothing is left behind")
        finish(*ended, as_json, _metric_lines)
    with reporting() as report, stderr.quiet_start():
        from loop import backends
        from loop.commands.evaluate import evaluate as evaluate_
        from loop.run import run_directory

        (task, manifest, checkpoint), chosen = backends.with_task(
            lambda: run_directory.task_of(path, task_target, trust), backend_name, workers
        )
        precision = manifest["run"]["options"]["precision"]
        metrics = evaluate_(task, checkpoint, batch_size=batch_size, backend=chosen, precision=precision)
        report(0, None, metrics)
    # In a job of tfloop's, the launcher prints what the chief has reported.
    if JOB not in os.environ and chosen.is_chief:
        finish(0, "", metrics, as_json, _metric_lines)


def predict(
    run: typed.RunDir,
    data: typed.PredictData = "eval",
    out: typed.PredictOut = Path("predictions.parquet"),
    task_target: typed.TaskTarget = None,
    trust: typed.Trust = False,
    backend: typed.UseBackend = None,
    workers: typed.PredictWorkers = None,
    batch_size: typed.PredictBatchSize = None,
    threads: typed.PredictThreads = None,
    set_: typed.Set = typed.UNTYPED,
    as_json: typed.AsJson = False,
) -> None:
    """Predict for each example, in order, into a file. A killed one goes on where it was."""
    # All that can be refused is refused before TensorFlow loads, and by the launcher before it starts workers.
    with_defaults(None, {"batch_size": batch_size, "backend": backend})
    path = _checkpointed(run, task_target)
    check_out(out)
    check_data(data)
    cores = threads_for(out, threads)
    backend_name = choose_for_command(backend or "auto", workers)
    if starts_workers(backend_name):
        # As in `evaluate`. The launcher draws the bar, by the parts that its workers have written.
        with shown_parts(out):
            ended = run_job(backend_name, workers or 1, sys.argv[1:])[:3]
        if ended[0] == PREEMPTED:
            tell(f"stopped: {_KEPT}")
        finish(*ended, as_json, _prediction_lines)
    # In a job, the launcher stops its workers, and prints that it does.
    stoppable = contextlib.nullcontext() if JOB in os.environ else stopped_clean(_KEPT)
    with stoppable, reporting() as report, shown_parts(out), stderr.quiet_start():
        from loop import backends
        from loop.commands.predict import predict as predict_
        from loop.run import run_directory

        (task, manifest, checkpoint), chosen = backends.with_task(
            lambda: run_directory.task_of(path, task_target, trust, set_), backend_name, workers, cores
        )
        precision = manifest["run"]["options"]["precision"]
        result = predict_(task, checkpoint, data, out=out, batch_size=batch_size, backend=chosen, precision=precision)
        report(0, None, result)
    if JOB not in os.environ and chosen.is_chief:
        finish(0, "", result, as_json, _prediction_lines)


def _prediction_lines(result: Mapping[str, Any]) -> list[str]:
    """What was written, in a line."""
    shown = ", ".join(f"{name} {kind}" for name, kind in result["arrays"].items())
    return [f"wrote {result['out']}: {plural(result['rows'], 'row')} of {shown}"]


def _metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Metrics, a line each."""
    return [f"{name} {value:.6g}" for name, value in metrics.items()]


def _check_parent(out: Path, is_file: bool) -> None:
    """Refuses an output below a file, and a file in a directory that doesn't exist."""
    parent = next(parent for parent in out.parents if parent.exists())
    if not parent.is_dir():
        raise UsageError(f"{out}: {parent} isn't a directory: give another name")
    if is_file and parent != out.parent:  # a directory is made with those above it
        raise UsageError(f"{out}: there is no directory {out.parent}: make it first")


def export(
    run: typed.RunDir,
    out_: typed.Out,
    task_target: typed.TaskTarget = None,
    trust: typed.Trust = False,
    check: typed.Check = True,
    serving: typed.Serving = False,
) -> None:
    """Export the model of a run."""
    path = _checkpointed(run, task_target)
    out = Path(out_)
    if out.exists():
        raise UsageError(f"{out} exists already: remove it, or give another name")
    # Any other name is that of a directory, with a dot in it or not.
    is_file = out.suffix.lower() in _FILE_ENDINGS
    if is_file and out.suffix not in _EXPORTED_ENDINGS:
        raise UsageError(
            f"{out}: there is no such format: give OUT.npz, OUT.keras, OUT.onnx, OUT.tflite, or a directory for a "
            "SavedModel"
        )
    if is_file and out_.endswith("/"):  # which a `Path` leaves out
        raise UsageError(f"{out_}: {out.suffix} is the ending of a file: leave out the slash")
    if serving and is_file:
        raise UsageError(f"--serving: {out} is a file: give a directory, for a SavedModel")
    _check_parent(out, is_file)
    conversion.check_installed(out)
    with shown_stages(3) as progress, stderr.quiet_start():
        from loop.backends import devices
        from loop.run import run_directory

        devices.prepare()  # before anything is imported that may use them
        from loop.commands.export import export as export_

        # Weights alone are copied from the checkpoint: no code of the task is run.
        needs_model = out.suffix != ".npz"
        task = None
        if needs_model:
            task, _, path = run_directory.task_of(path, task_target, trust)
        shown = export_(task, path, out, check, progress, serving)
    tell(f"wrote {out}" + (f": {shown}" if shown else ""))
    if serving:
        tell(serving_layout.how_to_start(out))
