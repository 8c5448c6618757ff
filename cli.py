"""The command `tfloop`. Checks what was typed before TensorFlow is loaded; everything else is the loop's business."""

from __future__ import annotations

import os
import signal
import sys

CLOSED = []
STREAMS = []
"""What was opened in place of closed ones: `guard_streams` takes their buffers, which would be closed with them."""
for descriptor in range(3):  # in this order: each takes the lowest number that is free
    try:
        os.fstat(descriptor)
    except OSError:  # `>&-`: the next file that is opened would get its number, and what is printed
        CLOSED.append(os.open(os.devnull, os.O_RDWR))
        os.set_inheritable(descriptor, True)
        if descriptor:
            STREAMS.append(open(descriptor, "w"))  # noqa: SIM115
            setattr(sys, "stdout" if descriptor == 1 else "stderr", STREAMS[-1])


def leave(number: int, frame: object) -> None:
    """Ends the process without a word: on Ctrl-C while all is loaded; afterwards `main` minds it."""
    os._exit(130)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    try:  # noqa: SIM105 - nothing is loaded before it
        signal.signal(signal.SIGINT, leave)
    except ValueError:  # in a thread
        pass

import contextlib
import functools
import importlib.metadata
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer import Option
from typer.core import TyperCommand

import callbacks
import callbacks.progress
import callbacks.run_record.record
from callbacks import formats
from callbacks.nearest import nearest
from callbacks.run_record.journal import jsonable
from loop.commands import cli_options as typed
from loop.commands import command_line, config, dry_run, runs, terminal, tracking
from loop.commands import new as new_
from loop.commands import sweep as sweep_
from loop.commands import train as train_
from loop.commands import tune as tune_
from loop.errors import FAILED, PREEMPTED, TrainingError, UsageError, no_exit
from loop.launch import explain, machine, signals, stderr
from loop.launch.backend_choice import choose_backend, choose_for_command, job_backend
from loop.launch.environment import JOB, job_size
from loop.launch.fixed_job import run_job
from loop.launch.worker import reporting
from loop.options import with_defaults
from loop.target import task_loader

if TYPE_CHECKING:
    from rich.console import RenderableType

NO_DIRECTORY = (".npz", ".keras", ".h5", ".hdf5", ".onnx", ".tflite", ".pb", ".pt", ".npy", ".ckpt", ".zip")
"""The endings of names that are files and no directories, in small letters."""

app = typer.Typer(
    help="Trains TensorFlow models: the same task, and the same numbers, on one device or many.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Line: typing.TypeAlias = "RenderableType | tuple[str, bool | None]"
"""What a command prints; of a text, also whether it is good or bad news."""


class Configurable(TyperCommand):
    """A command that takes options from files, as if they had been typed before all others."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        given: dict[str, Any] = self.make_parser(context).parse_args(args=list(args))[0]
        names = {name.rstrip("_").replace("_", "-") for name in given}
        paths = [Path(each) for each in given.get("config_") or ()]
        return super().parse_args(context, [*config.arguments(paths, train_options(), names), *args])


def print_version(asked: bool) -> None:
    """Prints the version, if it is asked for, and ends."""
    if asked:
        print(f"tfloop {importlib.metadata.version('tfloop')}")
        raise typer.Exit


@app.callback()
def tfloop(
    version: Annotated[
        bool, Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command(cls=Configurable)
def train(
    target_: typed.Target,
    epochs: typed.Epochs = None,
    steps: typed.Steps = None,
    batch_size: typed.BatchSize = None,
    backend: typed.Backend = None,
    workers: typed.Workers = None,
    ps: typed.Ps = None,
    min_shard_bytes: typed.MinShardBytes = None,
    hosts_: typed.Hosts = None,
    interface: typed.Interface = None,
    remote_python: typed.RemotePython = None,
    devices: typed.Devices = None,
    tpu: typed.Tpu = None,
    elastic_: typed.Elastic = None,
    discovery: typed.Discovery = None,
    set_: typed.Set = None,
    run_dir: typed.TrainRunDir = None,
    resume: typed.Resume = None,
    seed: typed.Seed = None,
    shuffle: typed.Shuffle = None,
    precision: typed.Precision = None,
    accumulate: typed.Accumulate = None,
    compression: typed.Compression = None,
    groups: typed.Groups = None,
    reduction: typed.Reduction = None,
    local_steps: typed.LocalSteps = None,
    clip_norm: typed.ClipNorm = None,
    clip_value: typed.ClipValue = None,
    on_nonfinite: typed.OnNonfinite = None,
    accept_changes: typed.AcceptChanges = None,
    stall_timeout: typed.StallTimeout = None,
    profile: typed.Profile = None,
    sync_batch_norm: typed.SyncBatchNorm = None,
    ema: typed.Ema = None,
    compile_: typed.Compile = None,
    steps_per_call: typed.StepsPerCall = None,
    prefetch: typed.Prefetch = None,
    threads: typed.Threads = None,
    eval_every: typed.EvalEvery = None,
    checkpoint_every: typed.CheckpointEvery = "auto",
    track: typed.Track = None,
    track_wait: typed.TrackWait = 60.0,
    tag: typed.Tag = None,
    log_model: typed.LogModel = False,
    register: typed.Register = None,
    start_timeout: typed.StartTimeout = None,
    overfit: typed.Overfit = None,
    keep: typed.Keep = None,
    dry_run_: typed.DryRun = False,
    debug: typed.Debug = False,
    config_: typed.Config = None,
    as_json: typed.AsJson = False,
    callback: typed.Callback = None,
) -> None:
    """Train a task."""
    if debug:
        os.environ[explain.DEBUG] = "1"
    code, problem, fields = train_.train(types.SimpleNamespace(**locals()), sys.argv[1:])
    seen = tracking.seen(track, fields.get("run_dir")) if fields is not None else ""
    finish(code, problem, fields, as_json, dry_run.lines if dry_run_ and code == 0 else lambda fields: (), seen)


@functools.cache
def train_options() -> dict[str, config.Option]:
    """What files for `--config` may have."""
    hints, found = typing.get_type_hints(train), {}
    for each in typer.main.get_group(app).commands["train"].params:
        if each.param_type_name == "option" and not getattr(each, "hidden", False) and each.name != "config_":
            kind, *_ = typing.get_args(hints[each.name]) or (hints[each.name],)
            found[each.opts[0].removeprefix("--")] = config.Option(kind, *each.secondary_opts)
    return found


def finish(
    code: int,
    error: str,
    result: Any,
    as_json: bool,
    lines: Callable[[Any], Iterable[Line]] = lambda result: (),
    seen: str = "",
) -> NoReturn:
    """Prints how it ended, and where a browser shows it, and ends."""
    if error:
        command_line.say(error)
    if result is not None:
        show(result, lines(result), as_json)
        if seen and code == 0 and sys.stderr.isatty():
            print(f"see it in the browser: {seen}", file=sys.stderr)
    raise typer.Exit(code)


def show(result: Any, lines: Iterable[Line], as_json: bool) -> None:
    """Prints a result as JSON, or its lines: what is good in green, what is bad in red."""
    if as_json:
        print(
            result if isinstance(result, str) else json.dumps(jsonable(callbacks.run_record.redaction.redact(result)))
        )
        if 1 in CLOSED:
            print("note: stdout is closed: the result isn't shown", file=sys.stderr)
        return
    terminal.write(_in_color(line) for line in lines)


def _in_color(line: Line) -> RenderableType:
    """A line: green if it is good news, red if it is bad news."""
    if not isinstance(line, tuple):
        return line
    text, is_good = line
    return text if is_good is None else terminal.colored(text, "green" if is_good else "red")


@contextlib.contextmanager
def shown_stages(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the next stage of a command, also while TensorFlow's output is hidden."""
    with os.fdopen(os.dup(2), "w") as stderr, contextlib.closing(callbacks.progress.Stages(total, stderr)) as stages:
        yield stages.next


@contextlib.contextmanager
def stopped_clean(left: str) -> Iterator[None]:
    """Within it, a signal ends a command that starts others, when they have ended; says what is left behind."""
    try:
        with signals.interrupting(always=[signal.SIGINT]):  # which a shell has ignored in the background
            yield
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(f"stopped: {left}", file=sys.stderr)
        raise typer.Exit(PREEMPTED) from None


def checkpointed(run: str, task_target: str | None) -> Path:
    """The run that is meant, which has a checkpoint; TARGET is checked, too."""
    path = runs.checkpointed(runs.named(run))
    if task_target is not None:
        task_loader.check(task_target)
    return path


@app.command()
def evaluate(
    run: typed.RunDir,
    task_target: typed.TaskTarget = None,
    trust: typed.Trust = False,
    backend: typed.EvaluateBackend = None,
    workers: typed.Replicas = None,
    batch_size: typed.EvaluateBatchSize = None,
    as_json: typed.AsJson = False,
) -> None:
    """Evaluate a checkpoint on the whole evaluation data."""
    with_defaults(None, {"batch_size": batch_size, "backend": backend})
    path = checkpointed(run, task_target)
    engine = choose_for_command(backend or "auto", workers)
    if engine in ("horovod", "multiworker") and job_size() is None:
        finish(*run_job(engine, workers or 1, sys.argv[1:]), as_json, metric_lines)
    with reporting() as report, stderr.quiet_start():
        from loop import backends
        from loop.run import run_directory

        (task, manifest), made = backends.with_task(
            lambda: run_directory.task_of(path, task_target, trust), engine, workers
        )
        from loop.commands.evaluate import evaluate as evaluate_

        precision = manifest["run"]["options"]["precision"]
        metrics = evaluate_(task, path, batch_size=batch_size, backend=made, precision=precision)
        report(0, None, metrics)
    if JOB not in os.environ and made.is_chief:
        finish(0, "", metrics, as_json, metric_lines)


def metric_lines(metrics: dict[str, float]) -> list[str]:
    """Metrics, a line each."""
    return [f"{name} {value:.6g}" for name, value in metrics.items()]


@app.command()
def export(
    run: typed.RunDir,
    out: typed.Out,
    task_target: typed.TaskTarget = None,
    trust: typed.Trust = False,
    check: typed.Check = True,
) -> None:
    """Export the model of a run."""
    path = checkpointed(run, task_target)
    if out.exists():
        raise UsageError(f"{out} exists already: remove it, or give another name")
    if out.suffix not in (".npz", ".keras") and out.suffix.lower() in NO_DIRECTORY:
        raise UsageError(f"{out}: there is no such format: give OUT.npz, OUT.keras, or a directory for a SavedModel")
    with shown_stages(3) as progress, stderr.quiet_start():
        from loop.backends import devices
        from loop.run import run_directory

        devices.prepare()
        from loop.commands.export import export as export_

        task = (
            None if out.suffix == ".npz" else run_directory.task_of(path, task_target, trust)[0]
        )  # weights need no model
        shown = export_(task, path, out, check, progress)
    print(f"wrote {out}" + (f": {shown}" if shown else ""), file=sys.stderr)


@app.command()
def verify(
    target_: typed.Target,
    set_: typed.Set = None,
    batch_size: typed.VerifyBatchSize = None,
    compile_: typed.VerifyCompile = None,
    processes: typed.Processes = True,
    as_json: typed.AsJson = False,
    record: typed.Record = None,
) -> None:
    """Show that a task has the same numbers on any number of replicas, or why not."""
    with_defaults(None, {"batch_size": batch_size, "compile": compile_})
    task_loader.check(target_)
    if record is not None:
        _record(target_, set_ or (), batch_size, compile_, record)
        return

    def job(directory: Path) -> str:
        code, problem, _ = run_job(backend, 2, [*sys.argv[1:], "--record", str(directory)])
        if code == PREEMPTED:
            raise KeyboardInterrupt
        return problem

    with shown_stages(9 + processes) as progress, stderr.quiet_start():
        from loop.backends import devices
        from loop.commands import verify as verify_

        devices.alike(max(verify_.REPLICAS))
        if not devices.use_gpus():
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # of the processes, too
        backend = job_backend()[0]
        task = task_loader.load(target_, set_ or ())
        found = verify_.verify(
            task, batch_size, job=job if processes else None, job_engine=backend, progress=progress, compile=compile_
        )
    show(verify_.as_json(found), verify_.lines(found), as_json)
    raise typer.Exit(0 if found.same else FAILED)


@app.command()
def replay(
    kept: typed.Kept,
    task_target: typed.TaskTarget = None,
    trust: typed.Trust = False,
    as_json: typed.AsJson = False,
) -> None:
    """Make a step whose loss or gradient was not finite once more, and show its values and gradients."""
    path = runs.named(kept)
    if not (path / "bad").is_dir():
        runs.checkpointed(path)
    if task_target is not None:
        task_loader.check(task_target)
    with stderr.quiet_start():
        from loop.backends import devices
        from loop.commands import replay as replay_
        from loop.run import run_directory

        devices.prepare()
        place_, _ = replay_.locate(path)
        task, _ = run_directory.task_of(place_, task_target, trust)
        found = replay_.replay(task, place_)
    show(replay_.as_json(found), replay_.lines(found), as_json)


def _record(
    target_: str, assignments: list[str] | tuple[()], batch_size: int | None, compile_: str | None, directory: Path
) -> None:
    """What `verify` does in a worker of its job."""
    with reporting() as report:
        with stderr.quiet_start():
            from loop import backends
            from loop.commands import verify

            task, made = backends.with_task(lambda: task_loader.load(target_, assignments), choose_backend("auto")[0])
        verify.write(directory, task, made, batch_size, compile_)
        made.exchange(0)  # no worker leaves before all are done
        made.close()
        report(0)


@app.command()
def chaos(
    target_: typed.Target,
    kills: typed.Kills = 6,
    epochs: typed.Epochs = None,
    steps: typed.Steps = None,
    batch_size: typed.BatchSize = None,
    backend: typed.Backend = None,
    workers: typed.Workers = None,
    set_: typed.Set = None,
    checkpoint_every: typed.ChaosCheckpointEvery = None,
    seed: typed.ChaosSeed = 0,
    keep: typed.ChaosKeep = None,
    as_json: typed.AsJson = False,
) -> None:
    """Show that kill -9 at any moment loses nothing of a task's training."""
    from loop.commands import chaos as chaos_

    if not 1 <= kills <= chaos_.MOST_KILLS:
        raise UsageError(f"--kills {kills}: give a whole number from 1 to {chaos_.MOST_KILLS}")
    options = {"epochs": epochs, "steps": steps, "batch_size": batch_size, "backend": backend, "seed": seed}
    with_defaults(None, options)
    if checkpoint_every is not None:
        command_line.schedule(checkpoint_every)
    task_loader.check(target_)
    choose_for_command(backend or "auto", workers)
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"--keep {keep}: it is there already: give a new directory, or an empty one")
    arguments = command_line.arguments(options | {"workers": workers}, set_ or ())
    with (
        stopped_clean(f"what was made is in {keep}" if keep else "nothing is left behind"),
        signals.temporary_directory("tfloop-chaos-") as directory,
        shown_stages(kills + 2) as progress,
    ):
        found = chaos_.chaos([target_, *arguments], kills, keep or Path(directory), seed, checkpoint_every, progress)
    show(vars(found) | {"exact": found.exact}, chaos_.lines(found), as_json)
    raise typer.Exit(0 if found.exact else FAILED)


@app.command()
def tune(
    target_: typed.Target,
    batch_size: typed.BatchSize = None,
    backend: typed.Backend = None,
    workers: typed.Workers = None,
    set_: typed.Set = None,
    config_: typed.Config = None,
    only: typed.Only = None,
    seconds: typed.Seconds = 2.0,
    rounds: typed.Rounds = 3,
    tune_batch_size: typed.TuneBatchSize = False,
    out: typed.TuneOut = Path("tune.toml"),
    force: typed.Force = False,
    as_json: typed.AsJson = False,
) -> None:
    """Find the fastest settings for a task on this machine, and write them to a file for train --config."""
    with_defaults(None, {"batch_size": batch_size, "backend": backend})
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds {seconds}: give a number > 0")
    if unknown := [each for each in only or () if each not in tune_.TUNED]:
        raise UsageError(f"--only {unknown[0]}: nothing of that name can be tried{nearest(unknown[0], tune_.TUNED)}")
    if out.exists() and not (force and out.is_file()):
        raise UsageError(f"--out {out} exists already: give another name" + (", or --force" if out.is_file() else ""))
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out}: the directory can't be written, or isn't there")
    if job_size() is not None:
        raise UsageError("tune starts its workers itself: call it once, with --workers")
    config.arguments(config_ or (), train_options(), ())
    task_loader.check(target_)
    choose_for_command(backend or "auto", workers)
    given = {"batch_size": batch_size, "backend": backend, "workers": workers}
    arguments = command_line.arguments(given, set_ or (), config_ or ())
    stages = len(tune_.TUNED) * rounds * 2
    with stopped_clean("nothing is written, and nothing is left behind"), shown_stages(stages) as progress:
        found = tune_.tune([target_, *arguments], only or tune_.TUNED, seconds, rounds, tune_batch_size, progress)
    tune_.write(out, found)
    lines: list[Line] = [*tune_.lines(found), f"\nwrote {out}: tfloop train {target_} --config {out}"]
    show(tune_.as_json(found) | {"file": str(out)}, lines, as_json)


@app.command()
def new(name: typed.NewName) -> None:
    """Write a commented task file, NAME.py, that trains at once."""
    place_ = new_.new(name)
    print(f"wrote {place_.partition(':')[0]}; train it: tfloop train {place_}")


@app.command()
def sweep(
    context: typer.Context,
    target_: typed.SweepTarget,
    grid: typed.Grid = None,
    random: typed.Random = None,
    trials: typed.Trials = None,
    metric: typed.SweepMetric = "eval_loss",
    direction: typed.Direction = None,
    jobs: typed.Jobs = 1,
    sampler: typed.Sampler = "tpe",
    pruner: typed.Pruner = "none",
    sweep_dir: typed.SweepDir = None,
    epochs: typed.Epochs = None,
    steps: typed.Steps = None,
    batch_size: typed.BatchSize = None,
    backend: typed.Backend = None,
    workers: typed.Workers = None,
    set_: typed.Set = None,
    trust: typed.Trust = False,
    seed: typed.SweepSeed = None,
    eval_every: typed.EvalEvery = None,
    track: typed.Track = None,
    config_: typed.Config = None,
    as_json: typed.AsJson = False,
) -> None:
    """Train a task with other values of its fields, several at once, and find the best; goes on after a kill."""
    options = {"epochs": epochs, "steps": steps, "batch_size": batch_size, "backend": backend, "seed": seed}
    with_defaults(None, options | {"eval_every": command_line.number_or_word(eval_every)})
    if sweep_.is_directory(target_):
        for name in context.params:
            source = context.get_parameter_source(name)
            may_differ = name in ("target_", "trials", "jobs", "trust", "as_json")
            if source and source.name == "COMMANDLINE" and not may_differ:
                option = f"--{name.rstrip('_').replace('_', '-')}"
                raise UsageError(f"{option}: {target_} is a directory, whose sweep has its own: leave {option} out")
        directory: Path | None = Path(target_).resolve()
        plan, before = sweep_.reopened(Path(target_), trust)
        trials = before if trials is None else trials
        os.chdir(plan.place)
    else:
        directory = sweep_dir
        task_loader.check(target_)
        choose_for_command(backend or "auto", workers, asynchronous=True)
        swept, drawn = sweep_.assigned("--grid", grid or ()), sweep_.assigned("--random", random or ())
        given = {**options, "workers": workers, "eval_every": eval_every, "track": track}
        plan = sweep_.Plan(
            target=task_loader.absolute(target_), grid=swept, random=drawn, metric=metric,
            direction=sweep_.direction(metric, direction), sampler=sampler, pruner=pruner, seed=seed or 0,
            place=str(Path.cwd()),
            arguments=sweep_.arguments(given, set_ or (), config_ or (), train_options(), [*swept, *drawn]),
        )  # fmt: skip
    if job_size() is not None:
        raise UsageError("sweep starts its trials itself: call it once, with --jobs and --workers")
    count = plan.trials(trials)
    with stderr.quiet_start():
        from loop.backends import devices

        devices.prepare()
        kind = task_loader.find(plan.target)
    found = sweep_.sweep(plan, kind, count, jobs, directory)
    show(found.as_json(), found.lines(), as_json)
    if found.stopped:
        print(f"stopped; tfloop sweep {found.directory} goes on", file=sys.stderr)
    raise typer.Exit(PREEMPTED if found.stopped else 0 if found.best else FAILED)


@app.command("find-lr")
def find_lr(
    target_: typed.Target,
    steps: typed.FindLrSteps = 100,
    low: typed.Low = 1e-6,
    high: typed.High = 10.0,
    batch_size: typed.BatchSize = None,
    backend: typed.FindLrBackend = None,
    workers: typed.Replicas = None,
    set_: typed.Set = None,
    seed: typed.Seed = None,
    out: typed.FindLrOut = None,
    as_json: typed.AsJson = False,
) -> None:
    """Find a learning rate: train some steps with one that grows, and see where the loss falls fastest."""
    given = {"batch_size": batch_size, "backend": backend, "seed": seed}
    with_defaults(None, given)
    if not 0 < low < high < float("inf"):
        raise UsageError(f"--low {low} --high {high}: give learning rates > 0, the lower one first")
    if out is not None and out.suffix not in (".json", ".png", ".svg"):
        raise UsageError(f"--out {out}: give a name that ends in .png, .svg or .json")
    if out is not None and (out.is_dir() or not os.access(out.parent, os.W_OK)):
        raise UsageError(f"--out {out}: it can't be written there")
    task_loader.check(target_)
    engine = choose_for_command(backend or "auto", workers, alone="find-lr")
    with stderr.quiet_start():
        from loop import backends

        task, made = backends.with_task(lambda: task_loader.load(target_, set_ or ()), engine, workers)
        from loop.commands import find_lr as find_lr_

        options = with_defaults(task, given | {"backend": engine})
    with callbacks.progress.counted(steps, "step", sys.stderr) as advance:
        found = find_lr_.find_lr(task, made, options, steps, low, high, advance)
    if out is not None:
        find_lr_.write(out, found)
    show(find_lr_.as_json(found), find_lr_.lines(found), as_json)
    raise typer.Exit(FAILED if found.suggestion is None else 0)


@app.command()
def doctor(as_json: typed.AsJson = False) -> None:
    """Say what works on this machine, what doesn't, and what to do about it."""
    with stderr.quiet_start():
        from loop.commands import doctor as doctor_

        findings = doctor_.examine()
    if as_json:
        print(json.dumps(findings))
        return
    terminal.write([doctor_.table(findings)])
    if any(finding["state"] == "broken" for finding in findings):
        raise typer.Exit(FAILED)


@app.command()
def ui(
    port: typed.Port = 5000,
    host: typed.Host = "127.0.0.1",
) -> None:
    """Start the MLflow UI on the default store, and print its address."""
    from callbacks import files
    from callbacks.mlflow.tracker import default_uri

    uri = default_uri()
    path = files.sqlite_path(uri)
    if path and not path.exists():
        raise UsageError(f"{path} isn't there: train something first, here")
    if not machine.port_is_free(host, port):
        taken, port = port, machine.free_ports(1)[0]
        print(f"port {taken} is in use, taking {port}", file=sys.stderr)
    # Without the query, MLflow's page starts with its part for language models, where these runs aren't.
    print(
        f"MLflow UI: http://{host}:{port}/?workflowType=machine_learning  (Ctrl-C ends it)", file=sys.stderr, flush=True
    )
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", host, "--port", str(port)]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted


@app.command()
def sync(
    run: typed.Name,
    track: typed.SyncTrack = None,
    trust: typed.Trust = False,
) -> None:
    """Deliver to MLflow what a run that is over has not delivered; of a sweep, with all its trials."""
    tracking.deliver(runs.named(run), track, trust)


runs_app = typer.Typer(help="List, show, compare and remove runs.", rich_markup_mode=None)
app.add_typer(runs_app, name="runs")


@runs_app.callback(invoke_without_command=True)
def list_runs(
    context: typer.Context,
    filter_: typed.Filter = None,
    sort: typed.Sort = None,
    metric: typed.Metric = None,
    as_json: typed.AsJson = False,
    root: typed.Root = None,
) -> None:
    """List runs; with a command, show, compare or remove them."""
    context.obj = root
    if context.invoked_subcommand is not None:
        if filter_ or sort or metric or as_json:
            raise UsageError(f"runs {context.invoked_subcommand}: give its options behind it")
        return
    found = runs.listed(root or runs.ROOT, filter_ or (), sort, metric)
    if as_json:
        print(runs.as_json(found))
    elif found:
        terminal.write([runs.table(found, metric)])
    else:
        print("no such runs" if filter_ else "no runs here yet: tfloop train digits makes one", file=sys.stderr)


@runs_app.command("show")
def show_run(
    context: typer.Context,
    run: typed.Name,
    metric: typed.Metric = None,
    as_json: typed.AsJson = False,
    root: typed.Root = None,
) -> None:
    """Show a run: curves, parameters, checkpoints, and where its time went."""
    record = callbacks.run_record.record.read(runs.locate(root or context.obj or runs.ROOT, run))
    if as_json:
        print(runs.shown_as_json(record))
    else:
        terminal.write(runs.show(record, metric))


@runs_app.command("compare")
def compare_runs(
    context: typer.Context, names: typed.Names, metric: typed.Metric = None, root: typed.Root = None
) -> None:
    """Show what runs differ in, and their curves in one plot."""
    records = [callbacks.run_record.record.read(runs.locate(root or context.obj or runs.ROOT, name)) for name in names]
    terminal.write(runs.compare(records, metric))


@runs_app.command("rm")
def remove_runs(
    context: typer.Context,
    names: typed.Names,
    yes: typed.Yes = False,
    root: typed.Root = None,
) -> None:
    """Remove runs with all that is in their directories; asks first. What MLflow has stays."""
    place_ = root or context.obj or runs.ROOT
    paths = list(dict.fromkeys(runs.locate(place_, name) for name in names))
    for path in paths:
        runs.check_removable(path, place_)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("runs rm asks first, and there is no terminal: give --yes")
        for path in paths:
            terminal.write([f"{callbacks.run_record.record.printable(str(path))}  {formats.size(runs.size(path))}"])
        if not typer.confirm(f"Remove {'it' if len(paths) == 1 else f'these {len(paths)}'}?"):
            raise typer.Exit(0)
    left = [text for path in paths for text in runs.remove(path)]
    if left:
        raise TrainingError(f"not all could be removed; left: {'; '.join(left[:3])}{', ...' * (len(left) > 3)}")


@app.command()
def tail(
    run: typed.Name,
    count: typed.Count = 10,
    follow: typed.Follow = True,
    root: typed.Root = None,
) -> None:
    """Follow a run: a line for each event, until it ends."""
    try:
        for line in runs.tail(runs.locate(root or runs.ROOT, run), count, follow):
            terminal.write([line])
    except KeyboardInterrupt:
        print("the run goes on without being watched", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def report(
    run: typed.Name,
    out: typed.ReportOut = None,
    root: typed.Root = None,
) -> None:
    """Make the page of a run anew: its curves, settings, time and faults, in one file."""
    from callbacks.run_record import report as page

    path = runs.locate(root or runs.ROOT, run)
    out = out or path / page.NAME
    shown = callbacks.run_record.record.printable(str(out))
    try:
        if out.exists() and not page.is_report(out):
            raise UsageError(f"{shown} exists already, and is no report: give another name")
        page.write(out, callbacks.run_record.record.read(path))
    except OSError as error:
        raise UsageError(f"{shown} can't be written ({error.strerror}): give another name") from None
    print(f"wrote {shown}", file=sys.stderr)


def main() -> None:
    """Runs the command; a wrong input is one line and exit code 2."""
    callbacks.run_record.redaction.guard_streams()
    try:
        command_line.check(sys.argv[1:])
        # Training, and the workers of a job, have handlers of their own.
        own = JOB in os.environ or sys.argv[1:2] == ["train"]
        with contextlib.nullcontext() if own else signals.interrupting(), no_exit():
            code = typer.main.get_command(app).main(standalone_mode=False) or 0
    except KeyboardInterrupt as error:
        code = 128 + (error.args[0] if error.args else signal.SIGINT)
    except Exception as error:
        code = command_line.told(error)
    with contextlib.suppress(OSError):  # a terminal that is gone
        sys.stderr.flush()
    sys.exit(code if command_line.flushed() else code or FAILED)


if signal.getsignal(signal.SIGINT) is leave:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if __name__ == "__main__":
    main()
