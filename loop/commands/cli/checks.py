"""`tfloop verify`, `replay`, `rerun` and `chaos`: whether a task trains as it should."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from callbacks.run_record.record import read, read_about
from callbacks.run_record.redaction import tell
from loop.checkpoint.store import address
from loop.commands import command_line, runs
from loop.commands import rerun as rerun_
from loop.commands.cli import check_options as check
from loop.commands.cli import options as typed
from loop.commands.cli.output import end, show, shown_stages, stopped_clean
from loop.commands.cli.training import train_options
from loop.errors import PREEMPTED, UsageError
from loop.launch import signals, stderr
from loop.launch.backend_choice import choose_backend, choose_for_command, job_backend
from loop.launch.fixed_job import run_job
from loop.launch.worker import reporting
from loop.options import with_defaults
from loop.target import task_loader


def verify(
    target_: typed.Target,
    set_: typed.Set = typed.UNTYPED,
    batch_size: check.VerifyBatchSize = None,
    compile_: check.VerifyCompile = None,
    processes: check.Processes = True,
    as_json: typed.AsJson = False,
    record: check.Record = None,
) -> None:
    """Show that a task has the same numbers on any number of replicas."""
    with_defaults(None, {"batch_size": batch_size, "compile": compile_})
    task_loader.check(target_)
    if record is not None:  # this process is a worker of the job below
        _record(target_, set_, batch_size, compile_, record)
        return

    def job(directory: Path) -> str:
        code, problem, *_ = run_job(backend, 2, [*sys.argv[1:], "--record", str(directory)])
        if code == PREEMPTED:
            raise KeyboardInterrupt  # the user wants to stop the whole command, not only its job
        return problem

    # For each of two precisions: one replica, the same again, two numbers of replicas; at the end, the causes.
    stages = 10 if processes else 9
    with stopped_clean("nothing is left behind"), shown_stages(stages) as progress, stderr.quiet_start():
        from loop.backends import devices
        from loop.commands import verify as verify_

        devices.alike(max(verify_.REPLICAS))  # before the task is loaded: its code may use them
        if not devices.use_gpus():
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # of the processes, too
        backend = job_backend()[0]
        task = task_loader.load(target_, set_)
        job_or_none = job if processes else None
        report = verify_.verify(
            task, batch_size, job=job_or_none, job_engine=backend, progress=progress, compile=compile_
        )
    show(verify_.as_json(report), verify_.lines(report), as_json)
    end(report.same)


def _record(
    target_: str, assignments: list[str], batch_size: int | None, compile_: str | None, directory: Path
) -> None:
    """Records the numbers of a task, in a worker of the job that `verify` has started."""
    with reporting() as report:
        with stderr.quiet_start():
            from loop import backends
            from loop.commands import verify

            name, _ = choose_backend("auto")  # by the environment of the job
            task, backend = backends.with_task(lambda: task_loader.load(target_, assignments), name)
        verify.write(directory, task, backend, batch_size, compile_)
        backend.exchange(0)  # no worker leaves before all are done
        backend.close()
        report(0)


def replay(
    kept: check.Kept, task_target: typed.TaskTarget = None, trust: typed.Trust = False, as_json: typed.AsJson = False
) -> None:
    """Make a step that was not finite once more. Show its values and gradients, and which example it was."""
    # What can be refused without TensorFlow is refused before it loads.
    path = runs.named(kept)
    if not (path / "bad").is_dir():
        runs.checkpointed(path)
    if task_target is not None:
        task_loader.check(task_target)
    with stderr.quiet_start():
        from loop.backends import devices
        from loop.commands import replay as replay_
        from loop.run import run_directory

        devices.prepare()  # before the task is loaded: its code may use TensorFlow
        directory, _ = replay_.locate(path)
        task, *_ = run_directory.task_of(directory, task_target, trust)
        report = replay_.replay(task, directory)
    show(replay_.as_json(report), replay_.lines(report), as_json)


def rerun(
    run: typed.Name,
    task_target: typed.TaskTarget = None,
    trust: typed.Trust = False,
    run_dir: typed.TrainRunDir = None,
    root: typed.Root = runs.ROOT,
    as_json: typed.AsJson = False,
) -> None:
    """Train a run again, and compare the bits of the weights."""
    from loop.run.trust import known_target, target_of

    path = runs.locate(root, run)
    runs.refuse_sweep(path)
    record = read(path)
    about = read_about(path)
    options = rerun_.arguments(record, train_options(), about)
    # A target runs code: one that only the directory names is taken if this user trained there, or trusts it.
    target = known_target(path, about.get("target"), task_target, trust)
    task_loader.check(target)
    options += rerun_.callback_arguments(about, trust or target_of(path) is not None)
    for change in rerun_.changes(record):
        tell(f"note: {change}")
    second = rerun_.train(target, options, run_dir)
    with stderr.quiet_start():
        report = rerun_.compare(path, second)
    show(rerun_.as_json(report), rerun_.lines(report), as_json)
    end(report.exact)


def chaos(
    target_: typed.Target,
    kills: check.Kills = 6,
    epochs: typed.Epochs = None,
    steps: typed.Steps = None,
    batch_size: typed.BatchSize = None,
    backend: typed.Backend = None,
    workers: typed.Workers = None,
    set_: typed.Set = typed.UNTYPED,
    checkpoint_every: check.ChaosCheckpointEvery = None,
    migrate: check.ChaosMigrate = False,
    store: check.ChaosStore = None,
    seed: check.ChaosSeed = 0,
    keep: check.ChaosKeep = None,
    as_json: typed.AsJson = False,
) -> None:
    """Show that kill -9 at any moment loses nothing of a training."""
    from loop.commands import chaos as chaos_  # late: it imports NumPy, which most commands don't need

    if not 1 <= kills <= chaos_.MOST_KILLS:
        raise UsageError(f"--kills {kills}: give a whole number from 1 to {chaos_.MOST_KILLS}")
    if migrate:
        _refuse_chosen(backend, workers)
    # Checked here as the trainings would check it: they start only later.
    options = {"epochs": epochs, "steps": steps, "batch_size": batch_size, "backend": backend, "seed": seed}
    with_defaults(None, options)
    plan = chaos_.Plan(kills, seed, checkpoint_every, store and address.read_url(store), migrate)
    if checkpoint_every is not None:
        command_line.schedule(checkpoint_every)
    task_loader.check(target_)
    choose_for_command(backend or "auto", workers)
    _refuse_used(keep)
    arguments = command_line.arguments(options | {"workers": workers}, set_)
    left = f"what was made is in {keep}" if keep else "nothing is left behind"
    with (
        stopped_clean(left),
        signals.temporary_directory("tfloop-chaos-") as directory,
        # Beside an attempt for each kill: the undisturbed run, and the attempt that comes to the end.
        shown_stages(kills + 2) as progress,
    ):
        report = chaos_.chaos([target_, *arguments], plan, keep or Path(directory), progress)
    show(chaos_.as_json(report), chaos_.lines(report), as_json)
    end(report.exact)


def _refuse_chosen(backend: str | None, workers: int | None) -> None:
    """Refuses options whose values `--migrate` chooses."""
    if backend or workers:
        given = f"--backend {backend}" if backend else f"--workers {workers}"
        raise UsageError(f"{given}: --migrate chooses backends and workers: leave it out")


def _refuse_used(keep: Path | None) -> None:
    """Refuses a directory for runs that isn't empty."""
    if keep is None or not keep.exists():
        return
    if not keep.is_dir() or any(keep.iterdir()):
        raise UsageError(f"--keep {keep}: it is there already: give a new directory, or an empty one")
