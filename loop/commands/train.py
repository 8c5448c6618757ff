"""`tfloop train`: checks what was typed, and has `fit` called: in this process, or in workers that it starts.

Loads no TensorFlow before training begins.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import callbacks
from callbacks.formats import plural
from callbacks.run_record.redaction import tell
from callbacks.types import JsonObject
from loop.checkpoint.store import address
from loop.commands import command_line, dry_run, memory_advice, runs, terminal, tracking, typed_callbacks
from loop.commands.train_place import Place, read_place
from loop.errors import FAILED, OUT_OF_MEMORY, PREEMPTED, OutOfMemoryError, UsageError
from loop.launch import host_slots, hosts, job, ray_cluster, signals, ssh, stderr
from loop.launch.backend_choice import starts_workers
from loop.launch.elastic_job import run_elastic_job
from loop.launch.environment import JOB, LAUNCHER, START_TIMEOUT, job_rank, job_size, start_timeout
from loop.launch.fixed_job import MOST_RESTARTS, run_job
from loop.launch.ray_places import NodeLostError
from loop.launch.worker import before_training, die_with_parent, reporting
from loop.options import DEFAULTS, Options, with_defaults
from loop.target import task_loader
from loop.task import TrainTask

Outcome = tuple[int, str, dict[str, Any] | None]
"""The exit code; the error, or ""; the result, or None if another process prints it."""


def train(typed: SimpleNamespace, arguments: Sequence[str]) -> Outcome:
    """Trains a task.

    Args:
        typed: what was typed, by the names of the command's parameters.
        arguments: the same as it was typed, for workers.
    """
    try:
        outcome = _train(typed, arguments)
    except OutOfMemoryError as error:
        if JOB in os.environ:  # the launcher makes the table
            raise
        outcome = (FAILED, str(error), None)
    # A command that measures settings itself reads why a trial has failed: no table for it.
    is_trial = typed_callbacks.of_commands(typed.callback) or LAUNCHER in os.environ
    if OUT_OF_MEMORY in outcome[1] and not is_trial:
        _end_with_memory(typed, outcome[1])
    return outcome


def _end_with_memory(typed: SimpleNamespace, problem: str) -> NoReturn:
    """Ends with what the training would need with each setting that saves memory."""
    command_line.say(problem)
    backend = typed.backend or "auto"
    by_host = host_slots.read_hosts(typed.hosts_, typed.workers, backend, typed.interface, typed.remote_python)
    devices = typed.devices.split(",") if typed.devices else []  # a replica on each
    workers = sum(by_host.values()) or typed.workers or len(devices) or 1
    options = {"precision": typed.precision, "ema": typed.ema}  # those that change what the variables take
    # Workers on this machine share its memory; on other machines, each is assumed to have one for itself.
    share = 1 if typed.hosts_ or typed.launcher else 1 / workers
    memory_advice.replace_process(typed.target_, typed.set_, typed.batch_size, workers, options, share)


def _train(typed: SimpleNamespace, arguments: Sequence[str]) -> Outcome:
    """See `train`.

    Raises:
        OutOfMemoryError: a step has found too little memory, in this process.
    """
    # All that can be refused without TensorFlow is refused before it loads, and before any worker starts.
    given = _options(typed)
    with_defaults(None, given)
    every = command_line.schedule(typed.checkpoint_every)
    beside = command_line.evaluates_beside(typed.eval_beside, typed.eval_every)
    tracker = _tracker(typed)
    task_loader.check(typed.target_)
    _check(typed)
    place = read_place(typed)
    with contextlib.ExitStack() as beginning:
        beginning.enter_context(before_training())
        if _needs_launch(place):
            code, problem, fields = _launch(typed, place, arguments)
        elif place.backend == "parameter_server" and job_rank():  # rank 0 trains, the others serve
            return _serve(typed.threads or 0)
        else:
            chosen = callbacks.standard(checkpoint=callbacks.Checkpoint(every=every), mlflow=tracker) + beside
            if not typed.dry_run_:
                _warm(tracker, beginning)
            code, problem, fields = _work(typed, given, place, chosen, beginning)

    if fields is not None and typed.dry_run_:
        fields["why"] = place.why
    elif fields is not None and fields["status"] == "preempted" and not typed_callbacks.of_commands(typed.callback):
        _tell_how_to_go_on(typed, arguments, fields)
    return code, problem, fields


def _tracker(typed: SimpleNamespace) -> callbacks.MLflowTracker | None:
    """The tracker of the run; None: it is not tracked."""
    # A command that trains without MLflow has the user's files, in which tags may stand for other trainings.
    if typed.track == "off" and typed_callbacks.of_commands(typed.callback):
        return None
    return tracking.tracker(typed.track, typed.track_wait, typed.tag, typed.log_model, typed.register)


def _needs_launch(place: Place) -> bool:
    """Whether this process starts the workers, instead of being one."""
    if place.ray is not None:
        return JOB not in os.environ
    return starts_workers(place.backend)


def _warm(tracker: callbacks.MLflowTracker | None, beginning: contextlib.ExitStack) -> None:
    """Starts the chief's tracker, which imports MLflow while this process loads TensorFlow."""
    if tracker is not None and job_rank() == 0:
        beginning.callback(tracker.close)  # before it starts a process, which must not outlive a failure
        tracker.warm()


def _tell_how_to_go_on(typed: SimpleNamespace, arguments: Sequence[str], fields: Mapping[str, Any]) -> None:
    """Says with which command an interrupted run goes on."""
    command = ["tfloop", *arguments]
    directory = Path(fields["run_dir"])
    # With a run directory, the run resumes by itself: `--resume` was for the first start.
    for index in reversed(range(len(command))):  # from the end: deleting moves the words after it
        if command[index].partition("=")[0] == "--resume":
            words = 1 if "=" in command[index] else 2  # `--resume=auto`, or `--resume auto`
            del command[index : index + words]
    if typed.resume not in (None, "auto") and typed.config_:  # a file may have it
        command.append("--resume=auto")
    if typed.run_dir is None:
        command += ["--run-dir", str(terminal.shown_path(directory))]
    tell(f"interrupted at step {fields['steps']:,}; go on with:\n{shlex.join(command)}")


def _options(typed: SimpleNamespace) -> Options:
    """The options of `fit`; None: not typed."""
    given: Options = {}
    for parameter, value in vars(typed).items():
        name = parameter.rstrip("_")  # a parameter such as `compile_` must not hide what Python has by that name
        if name in DEFAULTS:
            given[name] = value
    for name in ("steps_per_call", "prefetch"):
        given[name] = command_line.number_or_word(given[name])
    given["eval_every"] = "never" if typed.eval_beside else command_line.eval_every(given["eval_every"])
    return given


def _check(typed: SimpleNamespace) -> None:
    """Refuses values that are wrong for every backend; sets the variables that workers inherit."""
    command_line.check_threads(typed.threads)
    made = typed_callbacks.make(typed.callback)  # refused here, before TensorFlow loads
    if typed_callbacks.of_commands(typed.callback):  # it must not outlive the command that has started it
        die_with_parent()
    else:
        _check_replaced(typed, made)
    if typed.start_timeout is not None:
        if not 0 < typed.start_timeout < float("inf"):
            raise UsageError(f"--start-timeout {typed.start_timeout}: give a number of seconds > 0")
        os.environ[START_TIMEOUT] = str(typed.start_timeout)  # workers inherit it
    # `Path.exists` raises if a directory above can't be read. What prepares the run directory says so, with the fix.
    if isinstance(typed.run_dir, Path) and os.path.exists(typed.run_dir) and not typed.run_dir.is_dir():  # noqa: PTH110
        raise UsageError(f"--run-dir {typed.run_dir}: it is a file: give a directory")
    start_timeout()  # for its check of the variable, which may have been set from outside
    if typed.resume not in (None, "auto", "never"):
        _check_resume(typed)


def _check_replaced(typed: SimpleNamespace, made: Sequence[callbacks.Callback]) -> None:
    """Refuses an option that configures a callback of the standard set if `--callback` replaces that callback."""
    of_callback = {
        "Checkpoint": {"--checkpoint-every": typed.checkpoint_every},
        "EvaluateBeside": {"--eval-beside": typed.eval_beside},
        "MLflowTracker": {
            "--track": typed.track,
            "--track-wait": typed.track_wait is not None,  # it may be 0
            "--tag": typed.tag,
            "--log-model": typed.log_model,
            "--register": typed.register,
        },
        "Profiler": {"--profile": typed.profile},
    }
    for callback in made:
        name = type(callback).__name__
        for option, value in of_callback.get(name, {}).items():
            if value:
                raise UsageError(
                    f"{option} with --callback {name}, which has an argument for it: leave one of them out"
                )


def _check_resume(typed: SimpleNamespace) -> None:
    """Refuses a `--resume` that isn't a run, where that can be told before workers start."""
    if address.is_url(typed.resume):
        address.read_url(typed.resume)
        return
    # A run directory with checkpoints goes on from those, whatever `--resume` names. One at a URL may have some there.
    at_url = isinstance(typed.run_dir, str)
    is_fresh = not at_url and (typed.run_dir is None or not (typed.run_dir / "checkpoints").is_dir())
    # Only where it is certain to be on this machine's disk: other hosts have disks of their own.
    if is_fresh and not typed.hosts_ and job_size() is None:
        runs.checkpointed(Path(typed.resume), "--resume ")


def _launch(typed: SimpleNamespace, place: Place, arguments: Sequence[str]) -> Outcome:
    """Starts workers, which come to `_work` with the same arguments, and waits for them."""
    where = ""
    if place.hosts:
        where = f" on {len(place.hosts)} hosts"
    elif place.ray:
        where = " on Ray"
    limits = place.limits
    # On Ray, an elastic job starts with as many workers as there is room for.
    fewest = ""
    if place.ray and limits and limits.low < limits.high:
        fewest = f"{limits.low} to "
    many = place.workers or (limits.high if limits else 1)
    tell(f"starting {fewest}{plural(many, 'worker')}{where} ({place.backend}) ...")
    run = _run_job if place.ray is None else _run_on_ray
    done = run(typed, place, arguments)
    if done.code == PREEMPTED and done.result is None and not done.error:
        tell(signals.STOPPED)
    return done[:3]


def _run_job(typed: SimpleNamespace, place: Place, arguments: Sequence[str]) -> job.Outcome:
    """Runs the job of these workers, here or on other machines."""
    with _connected(typed, place) as cluster:
        if place.limits is None:
            return run_job(place.backend, place.workers or 1, arguments, typed.ps or 1, cluster)
        return run_elastic_job(place.limits, place.workers, arguments, cluster)


def _run_on_ray(typed: SimpleNamespace, place: Place, arguments: Sequence[str]) -> job.Outcome:
    """Runs a job. When Ray loses a node, the job goes on with the nodes that are left."""
    done = _attempt_on_ray(typed, place, arguments)
    for _ in range(MOST_RESTARTS):
        if done.lost_run is None:
            break
        # "" means that the node was lost before there was a run: see `_attempt_on_ray`.
        how = "going on from the last checkpoint" if done.lost_run else "starting again"
        tell(f"{done.error}; {how}, where Ray finds room")
        if done.lost_run:
            # If an option is given twice, the last one counts.
            arguments = [*arguments, f"--run-dir={done.lost_run}", "--resume=auto"]
        try:
            done = _attempt_on_ray(typed, place, arguments)
        except UsageError as error:  # not what was typed: the first attempt had room
            return job.Outcome(PREEMPTED, f"{error}; the same command goes on", None)
    return done


def _attempt_on_ray(typed: SimpleNamespace, place: Place, arguments: Sequence[str]) -> job.Outcome:
    """Runs the job once; a node that is lost before the workers have started counts as one that is lost later."""
    try:
        return _run_job(typed, place, arguments)
    except NodeLostError as error:
        return job.Outcome(FAILED, str(error), None, "")


def _connected(typed: SimpleNamespace, place: Place) -> contextlib.AbstractContextManager[hosts.Cluster | None]:
    """Within it, agents on other machines can start the job's workers. None: the workers run on this machine."""
    if place.ray is None and not place.hosts:
        return contextlib.nullcontext()
    files = hosts.files(typed.target_, typed.config_)
    if place.ray is not None:
        run_dir = None if isinstance(typed.run_dir, str) else typed.run_dir  # a text is a URL
        return ray_cluster.connect(place.ray, place.backend, files, run_dir)
    return ssh.connect(place.hosts, place.backend, files, typed.interface, typed.remote_python)


def _serve(threads: int) -> Outcome:
    """Serves the variables of a job, in a process that trains nothing."""
    with reporting():
        with stderr.quiet_start():
            from loop.backends.parameter_server import serve
        serve(threads)
    return 0, "", None


def _fields(result: object) -> JsonObject:
    """What `fit` returned, as far as it can be printed."""
    fields = dict(vars(result))
    del fields["model"]
    return fields | {"run_dir": str(fields["run_dir"])}


def _work(
    typed: SimpleNamespace, given: Options, place: Place, chosen: callbacks.StandardSet, beginning: contextlib.ExitStack
) -> Outcome:
    """Trains in this process, which may be one of several; then closes `beginning`, which handles signals."""
    with reporting() as report:
        with stderr.quiet_start():
            from loop import backends
            from loop.fit import fit

            def load() -> TrainTask:
                task = task_loader.load(typed.target_, typed.set_)
                with_defaults(task, given)
                return task

            task, backend = backends.with_task(
                load,
                place.backend,
                place.workers,
                typed.threads,
                devices=place.devices,
                min_shard_bytes=typed.min_shard_bytes,
                devices_per_replica=typed.devices_per_replica,
                partition=typed.partition,
                communication=typed.communication,
            )

        chosen = typed_callbacks.TypedSet(chosen, typed.callback, typed)
        if typed.dry_run_:
            fields = dry_run.dry_run(task, backend, given)
        else:
            fields = _fields(fit(task, **given | {"backend": backend}, run_dir=typed.run_dir, callbacks=chosen))
        # From here on, a signal no longer ends the process at once: the result is about to be reported.
        beginning.close()
        backend.close()
        # Only the chief delivers to a store. What is missing there, the run itself has reported.
        directory = fields.get("run_dir")  # None: a dry run
        is_undelivered = backend.is_chief and directory is not None and not address.is_delivered(Path(directory))
        code = PREEMPTED if fields["status"] == "preempted" or is_undelivered else 0
        report(code, None, fields)
    if JOB in os.environ:
        # Not `code`: after any other code than 0, the launcher ends the other workers. The report has the code.
        return 0, "", None
    return code, "", fields if backend.is_chief else None
