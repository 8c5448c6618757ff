"""`tfloop tune`, `bench`, `memory`, `sweep` and `find-lr`: trials of a task with other settings."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import typer

from callbacks.nearest import nearest
from callbacks.progress import counted
from callbacks.run_record.redaction import tell
from loop.commands import bench as bench_
from loop.commands import command_line, config, memory_measurements
from loop.commands import memory as memory_
from loop.commands import sweep as sweep_
from loop.commands import tune as tune_
from loop.commands.cli import options as typed
from loop.commands.cli import search_options as search
from loop.commands.cli.output import end, show, shown_stages, stopped_clean
from loop.commands.cli.signature import takes
from loop.commands.cli.training import train_options
from loop.errors import PREEMPTED, UsageError
from loop.launch import ray_options, stderr
from loop.launch.backend_choice import choose_for_command
from loop.launch.environment import job_size
from loop.options import with_defaults
from loop.target import task_loader


def tune(
    target_: typed.Target,
    batch_size: typed.BatchSize = None,
    backend: typed.Backend = None,
    workers: typed.Workers = None,
    set_: typed.Set = typed.UNTYPED,
    config_: typed.Config = typed.UNTYPED,
    only: search.Only = typed.UNTYPED,
    seconds: search.Seconds = 2.0,
    rounds: search.Rounds = 3,
    tune_batch_size: search.TuneBatchSize = False,
    out: search.TuneOut = Path("tune.toml"),
    force: search.Force = False,
    as_json: typed.AsJson = False,
) -> None:
    """Find the fastest settings on this machine. They are written to a file for train --config."""
    with_defaults(None, {"batch_size": batch_size, "backend": backend})
    _check_seconds(seconds)
    for name in only:
        if name not in tune_.TUNED:
            raise UsageError(f"--only {name}: nothing of that name can be tried{nearest(name, tune_.TUNED)}")
    _check_tune_file(out, force)  # now, and not after minutes of trials
    _refuse_in_job("tune starts its workers itself: call it once, with --workers")
    in_files = config.arguments(config_, train_options(), ())  # checked here, and read again by each trial
    task_loader.check(target_)
    choose_for_command(backend or "auto", workers)
    to_try = _to_try(only, backend, workers, in_files)
    given = {"batch_size": batch_size, "backend": backend, "workers": workers}
    arguments = command_line.arguments(given, set_, config_)
    # A guess, for the bar: how many values are tried depends on the machine and on what is found.
    stages = len(to_try) * rounds * 2
    with stopped_clean("nothing is written, and nothing is left behind"), shown_stages(stages) as progress:
        report = tune_.tune([target_, *arguments], to_try, seconds, rounds, tune_batch_size, progress)
    tune_.write(out, report)
    lines = [*tune_.lines(report), f"\nwrote {out}: {tune_.command(out, report)}"]
    show(tune_.as_json(report) | {"file": str(out)}, lines, as_json)


def _to_try(only: list[str], backend: str | None, workers: int | None, in_files: list[str]) -> list[str]:
    """What `tune` tries: what was typed, or all. A backend that the user has asked for is kept."""
    is_asked = backend is not None or any(word.startswith("--backend=") for word in in_files)
    has_several = (workers or 1) > 1 or any(word.startswith("--workers=") for word in in_files)
    if "backend" in only and (is_asked or not has_several):
        raise UsageError("--only backend: give --workers N, at least 2, and no --backend: else there is nothing to try")
    return only or [name for name in tune_.TUNED if not (is_asked and name == "backend")]


def _check_tune_file(out: Path, force: bool) -> None:
    """Refuses a file that can't be written, or that may not be written over."""
    if out.exists() and not (force and out.is_file()):
        raise UsageError(f"--out {out} exists already: give another name" + (", or --force" if out.is_file() else ""))
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out}: the directory can't be written, or isn't there")


def _check_seconds(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds {seconds}: give a number > 0")


def _refuse_in_job(text: str) -> None:
    """Refuses to be a worker of a job: a command that starts processes is called once."""
    if job_size() is not None:
        raise UsageError(text)


def bench(
    target_: typed.Target,
    batch_size: typed.BatchSize = None,
    set_: typed.Set = typed.UNTYPED,
    seconds: search.Seconds = 3.0,
    rounds: search.BenchRounds = 3,
    as_json: typed.AsJson = False,
) -> None:
    """Compare the speed of a task with Keras's fit, and with a plain loop. Both are made of the same compute."""
    with_defaults(None, {"batch_size": batch_size})
    _check_seconds(seconds)
    _refuse_in_job("bench measures in processes of its own: call it once")
    task_loader.check(target_)
    # Five ways take turns: tfloop, and two of each other contender.
    with stopped_clean("nothing is left behind"), shown_stages(5 * rounds) as progress:
        report = bench_.bench(target_, set_, batch_size, seconds, rounds, progress)
    show(bench_.as_json(report), bench_.lines(report), as_json)


def memory(
    target_: typed.Target,
    memory_limit: search.Memory = None,
    batch_size: typed.BatchSize = None,
    workers: search.MemoryWorkers = 1,
    set_: typed.Set = typed.UNTYPED,
    as_json: typed.AsJson = False,
) -> None:
    """Say what memory a training needs. Also with each setting that saves some, and which is the fastest that fits."""
    with_defaults(None, {"batch_size": batch_size})
    limit = None if memory_limit is None else memory_.parse_size(memory_limit)
    _refuse_in_job("memory measures in processes of its own: call it once, with --workers")
    task_loader.check(target_)
    with stopped_clean("nothing is left behind"), shown_stages(memory_measurements.STAGES) as progress:
        report = memory_.memory(target_, set_, batch_size, workers, limit, progress)
    show(memory_.as_json(report), memory_.lines(report), as_json)
    end(limit is None or report.best is not None)


_OF_TRAIN = ("workers", "launcher", "address", "cpus_per_worker", "placement", "eval_every", "track")
"""Options of `train` that a sweep has, beside those of `fit`."""


class SweepArguments(types.SimpleNamespace):
    """What is typed for `tfloop sweep`."""

    context: typer.Context
    target_: search.SweepTarget
    grid: search.Grid = typed.UNTYPED
    random: search.Random = typed.UNTYPED
    trials: search.Trials = None
    metric: search.SweepMetric = "eval_loss"
    direction: search.Direction = None
    jobs: search.Jobs = 1
    sampler: search.Sampler = "tpe"
    pruner: search.Pruner = "none"
    sweep_dir: search.SweepDir = None
    epochs: typed.Epochs = None
    steps: typed.Steps = None
    batch_size: typed.BatchSize = None
    backend: typed.Backend = None
    workers: typed.Workers = None
    launcher: typed.Launcher = None
    address: typed.Address = None
    cpus_per_worker: typed.CpusPerWorker = None
    placement: typed.Placement = None
    set_: typed.Set = typed.UNTYPED
    trust: typed.Trust = False
    seed: search.SweepSeed = None
    eval_every: typed.EvalEvery = None
    track: typed.Track = None
    config_: typed.Config = typed.UNTYPED
    as_json: typed.AsJson = False


@takes(SweepArguments)
def sweep(given: SweepArguments) -> None:
    """Train a task with other values of its fields, and find the best. Several at once; it goes on after a kill."""
    with_defaults(None, _options(given) | {"eval_every": command_line.eval_every(given.eval_every)})
    directory = given.sweep_dir
    trials = given.trials
    if sweep_.is_directory(given.target_):
        _check_goes_on(given.context, given.target_)
        directory = Path(given.target_).resolve()
        plan, before = sweep_.reopened(Path(given.target_), given.trust)
        trials = before if trials is None else trials
        os.chdir(plan.place)  # the paths in its arguments are relative to where it was begun
    else:
        plan = _plan(given)
    _refuse_in_job("sweep starts its trials itself: call it once, with --jobs and --workers")
    count = plan.trials(trials)
    with stopped_clean("no trial is under way; start again to go on"):  # trials have handlers of their own
        with stderr.quiet_start():
            from loop.backends import devices

            devices.prepare()  # before the task's module is imported: it may use TensorFlow
            kind = task_loader.find(plan.target)
        report = sweep_.sweep(plan, kind, count, given.jobs, directory)
    show(report.as_json(), report.lines(), given.as_json)
    if report.stopped:
        tell(f"stopped; tfloop sweep {report.directory} goes on")
        raise typer.Exit(PREEMPTED)
    end(report.best is not None)


def _options(given: SweepArguments) -> dict[str, object]:
    """Those options of `fit` that all trials of a sweep have."""
    return {name: getattr(given, name) for name in ("epochs", "steps", "batch_size", "backend", "seed")}


def _check_goes_on(context: typer.Context, directory: str) -> None:
    """Refuses options that a sweep which goes on has from its beginning."""
    for name in context.params:
        source = context.get_parameter_source(name)
        # These decide how many trials are made, and not what a trial is.
        may_differ = name in ("target_", "trials", "jobs", "trust", "as_json")
        if source and source.name == "COMMANDLINE" and not may_differ:
            option = f"--{name.rstrip('_').replace('_', '-')}"
            raise UsageError(f"{option}: {directory} is a directory, whose sweep has its own: leave {option} out")


def _plan(given: SweepArguments) -> sweep_.Plan:
    """The plan of a new sweep."""
    # What each trial would refuse is refused here, once, before the first one starts.
    task_loader.check(given.target_)
    choose_for_command(given.backend or "auto", given.workers, asynchronous=True)
    ray_options.read_request(given)
    grid = sweep_.assigned("--grid", given.grid)
    random = sweep_.assigned("--random", given.random)
    options = _options(given) | {name: getattr(given, name) for name in _OF_TRAIN}
    # Grid and random name the fields that trials set by themselves: they can't be given with --set, too.
    varied = [*grid, *random]
    return sweep_.Plan(
        # A sweep may go on from another directory, so its target must not be relative to this one.
        target=task_loader.absolute(given.target_),
        grid=grid,
        random=random,
        metric=given.metric,
        direction=sweep_.direction(given.metric, given.direction),
        sampler=given.sampler,
        pruner=given.pruner,
        seed=given.seed or 0,
        place=str(Path.cwd()),
        arguments=sweep_.arguments(options, given.set_, given.config_, train_options(), varied),
    )


def _check_plot(out: Path) -> None:
    """Refuses a file into which `find-lr` can't write."""
    if out.suffix not in (".json", ".png", ".svg"):
        raise UsageError(f"--out {out}: give a name that ends in .png, .svg or .json")
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out}: it can't be written there")


def find_lr(
    target_: typed.Target,
    steps: search.FindLrSteps = 100,
    low: search.Low = 1e-6,
    high: search.High = 10.0,
    batch_size: typed.BatchSize = None,
    backend: search.FindLrBackend = None,
    workers: typed.Replicas = None,
    set_: typed.Set = typed.UNTYPED,
    seed: typed.Seed = None,
    out: search.FindLrOut = None,
    as_json: typed.AsJson = False,
) -> None:
    """Find a learning rate. Trains some steps with one that grows, and sees where the loss falls fastest."""
    given = {"batch_size": batch_size, "backend": backend, "seed": seed}
    with_defaults(None, given)  # for its checks; the task's own defaults come below, once it is loaded
    if not 0 < low < high < float("inf"):
        raise UsageError(f"--low {low} --high {high}: give learning rates > 0, the lower one first")
    if out is not None:
        _check_plot(out)
    task_loader.check(target_)
    backend_name = choose_for_command(backend or "auto", workers, alone="find-lr")
    with stderr.quiet_start():
        from loop import backends

        task, chosen = backends.with_task(lambda: task_loader.load(target_, set_), backend_name, workers)
        from loop.commands import find_lr as find_lr_  # only now: it imports TensorFlow, whose devices are set

        options = with_defaults(task, given | {"backend": backend_name})
    with counted(steps, "step", sys.stderr) as advance:
        result = find_lr_.find_lr(task, chosen, options, steps, low, high, advance)
    if out is not None:
        find_lr_.write(out, result)
    show(find_lr_.as_json(result), find_lr_.lines(result), as_json)
    end(result.suggestion is not None)
