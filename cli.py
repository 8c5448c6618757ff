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
from typing import Annotated, Any, NoReturn

import typer
from typer import Argument, Option
from typer.core import TyperCommand

import callbacks
import callbacks.progress
import callbacks.run_record.record
from callbacks.run_record.journal import jsonable
from loop.commands import command_line, completion, config, dry_run, runs, terminal, tracking
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
from loop.options import nearest, with_defaults
from loop.target import task_loader

NO_DIRECTORY = (".npz", ".keras", ".h5", ".hdf5", ".onnx", ".tflite", ".pb", ".pt", ".npy", ".ckpt", ".zip")
"""The endings of names that nobody gives a directory, in small letters."""

app = typer.Typer(
    help="Trains TensorFlow models: the same task, and the same numbers, on one device or many.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Line = str | tuple[str, bool | None]
"""A line that a command prints, and whether it is good or bad news."""
Target = Annotated[
    str,
    Argument(
        metavar="TARGET",
        help="file.py:Class, package.module:Class, or a shipped example: digits, charlm, gan, ...",
        autocompletion=completion.targets,
    ),
]
RunDir = Annotated[
    str,
    Argument(
        metavar="RUN",
        help="A run: its directory, or a checkpoint in it; its name in runs/, the beginning of one, or latest.",
        autocompletion=completion.runs,
    ),
]
TaskTarget = Annotated[
    str | None, Option("--target", help="The task, if not the one with which you trained there on this machine.")
]
Trust = Annotated[bool, Option("--trust", help="Use what the directory itself names: code that it names is run.")]
Set = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="A field of the task; repeatable.")]
Epochs = Annotated[int | None, Option(help="Passes over the training data.")]
Steps = Annotated[int | None, Option(help="Optimizer steps, instead of epochs.")]
BatchSize = Annotated[int | None, Option(help="The global batch, over all replicas.")]
Backend = Annotated[
    str | None,
    Option(
        help="auto, single, mirrored, central, multiworker, horovod, parameter_server, tpu, or a plug-in's name.",
        autocompletion=completion.backends,
    ),
]
Workers = Annotated[int | None, Option(help="Processes on this machine; with mirrored, central: replicas.")]
AsJson = Annotated[bool, Option("--json", help="The last line of stdout is the result as JSON.")]
Seed = Annotated[int | None, Option(help="Of initial weights and of the data's order.")]
EvalEvery = Annotated[str | None, Option(help="epoch, never, or a number of steps.")]
Track = Annotated[str | None, Option(help="MLflow's tracking URI, or off.")]
Replicas = Annotated[int | None, Option(help="Replicas, with mirrored or central.")]
Config = Annotated[
    list[Path] | None,
    Option(
        "--config", help="A TOML or YAML file of train's options, and a table [set]; what is typed wins. Repeatable."
    ),
]


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
    target_: Target,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    backend: Backend = None,
    workers: Workers = None,
    ps: Annotated[int | None, Option(help="Parameter servers, with parameter_server; 1.")] = None,
    min_shard_bytes: Annotated[
        int | None, Option(help="Cut variables into shards of at least so many bytes, over the --ps servers.")
    ] = None,
    hosts_: Annotated[
        str | None, Option("--hosts", metavar="H1:4,H2:4", help="Processes on several hosts, started over ssh.")
    ] = None,
    interface: Annotated[
        str | None, Option(help="Where the hosts meet, if not as ssh finds them: eth1, or 10.0.0.0/24.")
    ] = None,
    remote_python: Annotated[str | None, Option(help="Python on the other hosts, if not at the same path.")] = None,
    devices: Annotated[
        str | None, Option(metavar="LIST", help="With mirrored, central: a replica on each, as gpu:0,gpu:2.")
    ] = None,
    tpu: Annotated[str | None, Option(metavar="NAME", help="The TPU, for the backend tpu; TPU_NAME.")] = None,
    elastic_: Annotated[
        str | None, Option("--elastic", metavar="MIN:MAX", help="Go on while so many workers live (horovod).")
    ] = None,
    discovery: Annotated[
        Path | None, Option(metavar="SCRIPT", help="With --elastic: prints host:slots, asked each second.")
    ] = None,
    set_: Set = None,
    run_dir: Annotated[Path | None, Option(help="The run directory; a new one below runs/ if not given.")] = None,
    resume: Annotated[str | None, Option(help="auto, never, or the path of a checkpoint.")] = None,
    seed: Seed = None,
    shuffle: Annotated[bool | None, Option("--shuffle/--no-shuffle", help="Permute the data each epoch.")] = None,
    precision: Annotated[str | None, Option(help="float32, float64, bfloat16 or mixed_float16.")] = None,
    accumulate: Annotated[int | None, Option(help="Micro-batches in a global batch.")] = None,
    compression: Annotated[str | None, Option(help="Of gradients between replicas: none, fp16 or bf16.")] = None,
    groups: Annotated[int | None, Option(help="Collectives in which gradients are reduced.")] = None,
    reduction: Annotated[str | None, Option(help="Of gradients: sum; or adasum, which is inexact.")] = None,
    local_steps: Annotated[
        int | None, Option(help="Steps that replicas make between two averages: inexact; 1: exact.")
    ] = None,
    clip_norm: Annotated[float | None, Option(help="Greatest global norm of the gradient.")] = None,
    clip_value: Annotated[float | None, Option(help="Greatest absolute value in the gradient.")] = None,
    on_nonfinite: Annotated[str | None, Option(help="stop or skip, when a gradient is not finite.")] = None,
    accept_changes: Annotated[
        bool | None, Option("--accept-changes", help="Go on with other settings than the run had.")
    ] = None,
    stall_timeout: Annotated[float | None, Option(help="Seconds after which a run that hangs says where.")] = None,
    profile: Annotated[
        str | None, Option(metavar="A:B", help="Trace steps A to B, and tell where the time goes.")
    ] = None,
    sync_batch_norm: Annotated[
        bool | None, Option("--sync-batch-norm/--no-sync-batch-norm", help="Its statistics over all replicas.")
    ] = None,
    ema: Annotated[float | None, Option(help="Decay of a moving average of the weights.")] = None,
    compile_: Annotated[str | None, Option("--compile", help="graph or xla.")] = None,
    steps_per_call: Annotated[str | None, Option(help="Steps in a compiled call, or auto.")] = None,
    prefetch: Annotated[str | None, Option(help="Batches that a stream is read ahead, or auto.")] = None,
    threads: Annotated[int | None, Option(help="TensorFlow's threads for an operation, in each worker.")] = None,
    eval_every: EvalEvery = None,
    checkpoint_every: Annotated[
        str, Option(help="epoch, a number of steps, or a time such as 10m; auto: epochs, at most one in 10 s.")
    ] = "auto",
    track: Track = None,
    track_wait: Annotated[float, Option(help="How long the end may wait for MLflow, in seconds.")] = 60.0,
    tag: Annotated[
        list[str] | None, Option(metavar="KEY=VALUE", help="A tag of the run in MLflow; repeatable.")
    ] = None,
    log_model: Annotated[
        bool, Option("--log-model", help="At the end, MLflow gets the model, with signature and input example.")
    ] = False,
    register: Annotated[
        str | None, Option(metavar="NAME", help="Register the model in MLflow by this name; with --log-model.")
    ] = None,
    start_timeout: Annotated[
        float | None, Option(help="Seconds that all workers have to start; TFLOOP_START_TIMEOUT, or 120.")
    ] = None,
    overfit: Annotated[
        int | None, Option(metavar="N", help="Train and evaluate on the first N global batches alone.")
    ] = None,
    keep: Annotated[str | None, Option(help="Which weights are the result: last, or best.")] = None,
    dry_run_: Annotated[
        bool, Option("--dry-run", help="Make two steps and an evaluation, show what they tell, keep nothing.")
    ] = False,
    debug: Annotated[
        bool, Option("--debug", help="If it fails in code that isn't tfloop's: the whole traceback.")
    ] = False,
    config_: Config = None,
    as_json: AsJson = False,
    callback: Annotated[list[str] | None, Option(hidden=True)] = None,
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
    for line in lines:
        text, good = (line, None) if isinstance(line, str) else line
        typer.secho(text, fg={True: "green", False: "red"}[good]) if good is not None else print(text)


@contextlib.contextmanager
def shown_stages(total: int) -> Iterator[Callable[[str], None]]:
    """Yields what is to be told of each stage of a command; it is shown also where TensorFlow is made quiet."""
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
    run: RunDir,
    task_target: TaskTarget = None,
    trust: Trust = False,
    backend: Annotated[str | None, Option(help="single, mirrored or central; in a job: auto.")] = None,
    workers: Replicas = None,
    batch_size: Annotated[int | None, Option(help="The global batch.")] = None,
    as_json: AsJson = False,
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
    run: RunDir,
    out: Annotated[Path, Argument(help="OUT.npz (weights), OUT.keras (Keras file), or a directory (SavedModel).")],
    task_target: TaskTarget = None,
    trust: Trust = False,
    check: Annotated[
        bool, Option("--check/--no-check", help="Load it in a new process, and compare outputs to 1e-6.")
    ] = True,
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
    target_: Target,
    set_: Set = None,
    batch_size: Annotated[int | None, Option(help="The global batch; the task's own if not given.")] = None,
    compile_: Annotated[str | None, Option("--compile", help="graph or xla; the task's own if not given.")] = None,
    processes: Annotated[bool, Option(help="Also in 2 real processes, not in logical devices alone.")] = True,
    as_json: AsJson = False,
    record: Annotated[Path | None, Option(hidden=True)] = None,
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
    kept: Annotated[
        str,
        Argument(metavar="RUN", help="RUN_DIR/bad/step-..., or a run: its newest one.", autocompletion=completion.runs),
    ],
    task_target: TaskTarget = None,
    trust: Trust = False,
    as_json: AsJson = False,
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
        made.exchange(0)  # nobody leaves before all are done
        made.close()
        report(0)


@app.command()
def chaos(
    target_: Target,
    kills: Annotated[int, Option(help="How many processes are killed, one after the other.")] = 6,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    backend: Backend = None,
    workers: Workers = None,
    set_: Set = None,
    checkpoint_every: Annotated[
        str | None, Option(help="epoch, a number of steps, or a time; if not given, some ten times in the run.")
    ] = None,
    seed: Annotated[int, Option(help="Of the moments of the kills, and of the training.")] = 0,
    keep: Annotated[Path | None, Option(help="Where to keep all runs; they are removed if not given.")] = None,
    as_json: AsJson = False,
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
    target_: Target,
    batch_size: BatchSize = None,
    backend: Backend = None,
    workers: Workers = None,
    set_: Set = None,
    config_: Config = None,
    only: Annotated[
        list[str] | None, Option(metavar="NAME", help=f"What to try, of {', '.join(tune_.TUNED)}; repeatable.")
    ] = None,
    seconds: Annotated[float, Option(help="How long a trial measures, when it is warm.")] = 2.0,
    rounds: Annotated[int, Option(min=1, help="How often settings that are close are measured, in turns.")] = 3,
    tune_batch_size: Annotated[
        bool,
        Option(
            "--tune-batch-size", help="Take the fastest batch size, too: with another one, something else is learned."
        ),
    ] = False,
    out: Annotated[Path, Option(help="Where to write the best settings, for --config.")] = Path("tune.toml"),
    force: Annotated[bool, Option("--force", help="Write over the file.")] = False,
    as_json: AsJson = False,
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
    typed = {"batch_size": batch_size, "backend": backend, "workers": workers}
    arguments = command_line.arguments(typed, set_ or (), config_ or ())
    stages = len(tune_.TUNED) * rounds * 2
    with stopped_clean("nothing is written, and nothing is left behind"), shown_stages(stages) as progress:
        found = tune_.tune([target_, *arguments], only or tune_.TUNED, seconds, rounds, tune_batch_size, progress)
    tune_.write(out, found)
    lines: list[Line] = [*tune_.lines(found), f"\nwrote {out}: tfloop train {target_} --config {out}"]
    show(tune_.as_json(found) | {"file": str(out)}, lines, as_json)


@app.command()
def new(name: Annotated[str, Argument(metavar="NAME", help="Of the file, without .py.")]) -> None:
    """Write a commented task file, NAME.py, that trains at once."""
    place_ = new_.new(name)
    print(f"wrote {place_.partition(':')[0]}; train it: tfloop train {place_}")


@app.command()
def sweep(
    context: typer.Context,
    target_: Annotated[
        str, Argument(metavar="TARGET", help="As for train; or the directory of a sweep, to go on with it.")
    ],
    grid: Annotated[
        list[str] | None, Option(metavar="FIELD=A,B,...", help="Try each of these values; repeatable.")
    ] = None,
    random: Annotated[
        list[str] | None,
        Option(metavar="FIELD=LOW..HIGH", help="Draw values; add :log for a wide range; repeatable."),
    ] = None,
    trials: Annotated[int | None, Option(help="How many; all combinations of the grid if not given.")] = None,
    metric: Annotated[str, Option(help="What is to be best, at the end of a trial.")] = "eval_loss",
    direction: Annotated[str | None, Option(help="minimize or maximize; by the metric's name.")] = None,
    jobs: Annotated[int, Option(min=1, max=256, help="How many trials are under way at once.")] = 1,
    sampler: Annotated[str, Option(help="How --random draws: tpe (learns from the trials) or random.")] = "tpe",
    pruner: Annotated[
        str, Option(help="median ends trials that are worse than half of those before; or none.")
    ] = "none",
    sweep_dir: Annotated[
        Path | None, Option(help="The directory of the sweep; if not given, one for this command below runs/.")
    ] = None,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    backend: Backend = None,
    workers: Workers = None,
    set_: Set = None,
    trust: Trust = False,
    seed: Annotated[int | None, Option(help="Of what is drawn, and of the training.")] = None,
    eval_every: EvalEvery = None,
    track: Track = None,
    config_: Config = None,
    as_json: AsJson = False,
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
        typed = {**options, "workers": workers, "eval_every": eval_every, "track": track}
        plan = sweep_.Plan(
            target=task_loader.absolute(target_), grid=swept, random=drawn, metric=metric,
            direction=sweep_.direction(metric, direction), sampler=sampler, pruner=pruner, seed=seed or 0,
            place=str(Path.cwd()),
            arguments=sweep_.arguments(typed, set_ or (), config_ or (), train_options(), [*swept, *drawn]),
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
    target_: Target,
    steps: Annotated[int, Option(min=10, max=100_000, help="How many steps to make.")] = 100,
    low: Annotated[float, Option(help="The learning rate of the first step.")] = 1e-6,
    high: Annotated[float, Option(help="That of the last one.")] = 10.0,
    batch_size: BatchSize = None,
    backend: Annotated[str | None, Option(help="single, mirrored or central.")] = None,
    workers: Replicas = None,
    set_: Set = None,
    seed: Seed = None,
    out: Annotated[Path | None, Option(help="Where to write the plot (.png, .svg) or the numbers (.json).")] = None,
    as_json: AsJson = False,
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
def doctor(as_json: AsJson = False) -> None:
    """Say what works on this machine, what doesn't, and what to do about it."""
    with stderr.quiet_start():
        from loop.commands.doctor import examine

        findings = examine()
    if as_json:
        print(json.dumps(findings))
        return
    marks = {"ok": typer.colors.GREEN, "missing": typer.colors.YELLOW, "broken": typer.colors.RED}
    for finding in findings:
        mark = typer.style(f"{finding['state']:>8}", fg=marks[finding["state"]])
        typer.echo(f"{mark}  {finding['what']}: {finding['found']}")
        if finding["fix"]:
            typer.echo(f"{'':10}-> {finding['fix']}")
    if any(finding["state"] == "broken" for finding in findings):
        raise typer.Exit(FAILED)


@app.command()
def ui(
    port: Annotated[int, Option(max=65535, min=1, help="The port; another one is taken if it is in use.")] = 5000,
    host: Annotated[str, Option(help="The address to listen on; loopback unless told otherwise.")] = "127.0.0.1",
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
    run: Name,
    track: Annotated[str | None, Option(help="MLflow's tracking URI; the run's own if not given.")] = None,
    trust: Trust = False,
) -> None:
    """Deliver to MLflow what a run that is over has not delivered; of a sweep, with all its trials."""
    tracking.deliver(runs.named(run), track, trust)


runs_app = typer.Typer(help="List, show, compare and remove runs.", rich_markup_mode=None)
app.add_typer(runs_app, name="runs")
Root = Annotated[Path | None, Option(help="Where the runs are; runs/ if not given.", show_default=False)]
_ONE = "A name, the beginning of one, a path, or latest."
Name = Annotated[str, Argument(metavar="RUN", help=_ONE, autocompletion=completion.runs)]
Names = Annotated[list[str], Argument(metavar="RUN", help=_ONE, autocompletion=completion.runs)]
Metric = Annotated[str | None, Option(help="The metric to show; the loss if not given.")]


@runs_app.callback(invoke_without_command=True)
def list_runs(
    context: typer.Context,
    filter_: Annotated[
        list[str] | None,
        Option("--filter", metavar="CONDITION", help="status=finished, eval_loss<0.3, hidden>=64, ...; repeatable."),
    ] = None,
    sort: Annotated[
        str | None, Option(help="A column, metric or hyperparameter; with a - before it, the other way round.")
    ] = None,
    metric: Metric = None,
    as_json: AsJson = False,
    root: Root = None,
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
        terminal.write(runs.lines(found, metric))
    else:
        print("no such runs" if filter_ else "no runs here yet: tfloop train digits makes one", file=sys.stderr)


@runs_app.command("show")
def show_run(
    context: typer.Context, run: Name, metric: Metric = None, as_json: AsJson = False, root: Root = None
) -> None:
    """Show a run: curves, parameters, checkpoints, and where its time went."""
    record = callbacks.run_record.record.read(runs.locate(root or context.obj or runs.ROOT, run))
    if as_json:
        print(runs.shown_as_json(record))
    else:
        terminal.write(runs.show(record, metric))


@runs_app.command("compare")
def compare_runs(context: typer.Context, names: Names, metric: Metric = None, root: Root = None) -> None:
    """Show what runs differ in, and their curves in one plot."""
    records = [callbacks.run_record.record.read(runs.locate(root or context.obj or runs.ROOT, name)) for name in names]
    terminal.write(runs.compare(records, metric))


@runs_app.command("rm")
def remove_runs(
    context: typer.Context,
    names: Names,
    yes: Annotated[bool, Option("--yes", help="Don't ask.")] = False,
    root: Root = None,
) -> None:
    """Remove runs with all that is in their directories; asks first. What MLflow has stays."""
    place_ = root or context.obj or runs.ROOT
    paths = list(dict.fromkeys(runs.locate(place_, name) for name in names))
    for path in paths:
        runs.removable(path, place_)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("runs rm asks first, and there is no terminal: give --yes")
        terminal.write(
            [f"{callbacks.run_record.record.printable(str(path))}  {terminal.size(runs.size(path))}" for path in paths]
        )
        if not typer.confirm(f"Remove {'it' if len(paths) == 1 else f'these {len(paths)}'}?"):
            raise typer.Exit(0)
    left = [text for path in paths for text in runs.remove(path)]
    if left:
        raise TrainingError(f"not all could be removed; left: {'; '.join(left[:3])}{', ...' * (len(left) > 3)}")


@app.command()
def tail(
    run: Name,
    count: Annotated[int, Option("-n", min=0, help="How many events of before are shown first.")] = 10,
    follow: Annotated[bool, Option("--follow/--no-follow", help="Show what comes until the run ends.")] = True,
    root: Root = None,
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
    run: Name,
    out: Annotated[
        Path | None, Argument(metavar="[OUT.html]", help="The page; if not given: report.html in the directory.")
    ] = None,
    root: Root = None,
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
