"""`tfloop train`: checks what was typed, and has `fit` called: in this process, or in workers that it starts.

Loads no TensorFlow before training begins.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import callbacks
from callbacks.run_record.redaction import tell
from loop.commands import command_line, dry_run, runs, tracking
from loop.errors import PREEMPTED, UsageError
from loop.launch import hosts, machine, signals, stderr
from loop.launch.backend_choice import MOST_WORKERS, check_servers, choose_backend, choose_for_command
from loop.launch.elastic_job import run_elastic_job
from loop.launch.elastic_limits import Limits, read_limits
from loop.launch.environment import JOB, START_TIMEOUT, job_rank, job_size, start_timeout
from loop.launch.fixed_job import run_job
from loop.launch.worker import before_training, die_with_parent, reporting
from loop.options import DEFAULTS, with_defaults
from loop.target import task_loader
from loop.task import TrainTask


class Place(NamedTuple):
    """Where a task is trained: the engine, why that one, and what it is to have."""

    engine: str
    why: str
    workers: int | None
    hosts: dict[str, int]
    limits: Limits | None
    devices: list[str] | None


def train(typed: Any, arguments: Sequence[str]) -> tuple[int, str, dict[str, Any] | None]:
    """Trains a task.

    Args:
        typed: what was typed, by the names of the command's parameters.
        arguments: the same as it was typed, for workers.

    Returns:
        The exit code; what went wrong, or ""; the result, if it is this process that tells it.
    """
    given = _options(typed)
    with_defaults(None, given)
    every = command_line.schedule(typed.checkpoint_every)
    tracker = tracking.tracker(typed.track, typed.track_wait, typed.tag or [], typed.log_model, typed.register)
    task_loader.check(typed.target_)
    _check(typed)
    place = _place(typed)
    with contextlib.ExitStack() as beginning:
        beginning.enter_context(before_training())
        if place.engine in ("horovod", "multiworker", "parameter_server") and job_size() is None:
            code, problem, fields = _launch(typed, place, arguments)
        elif place.engine == "parameter_server" and job_rank():
            with reporting():
                with stderr.quiet_start():
                    from loop.backends.parameter_server import serve
                serve(typed.threads or 0)
            return 0, "", None
        else:
            if tracker is not None and job_rank() == 0 and not typed.dry_run_:
                beginning.callback(tracker.close)
                tracker.warm()  # while TensorFlow is loaded
            chosen = callbacks.standard(checkpoint=callbacks.Checkpoint(every=every), mlflow=tracker)
            code, problem, fields = _work(typed, given, place, chosen, beginning)
    if typed.dry_run_ and fields is not None:
        fields["why"] = place.why
    elif code == PREEMPTED and fields is not None:
        _tell_how_to_go_on(typed, arguments, fields)
    return code, problem, fields


def _tell_how_to_go_on(typed: Any, arguments: Sequence[str], fields: dict[str, Any]) -> None:
    """Says with which command an interrupted run goes on."""
    command, directory = ["tfloop", *arguments], Path(fields["run_dir"])
    for place in reversed([place for place, word in enumerate(command) if word.partition("=")[0] == "--resume"]):
        del command[place : place + (1 if "=" in command[place] else 2)]
    if typed.resume not in (None, "auto") and typed.config_:  # a file may have it
        command.append("--resume=auto")
    if typed.run_dir is None:
        shown = directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
        command += ["--run-dir", str(shown)]
    with contextlib.suppress(OSError):  # a terminal that is gone
        tell(f"interrupted at step {fields['steps']:,}; go on with:\n{shlex.join(command)}")


def _options(typed: Any) -> dict[str, Any]:
    """The options of `fit`; None: not typed."""
    given = {name.rstrip("_"): value for name, value in vars(typed).items() if name.rstrip("_") in DEFAULTS}
    return given | {
        name: command_line.number_or_word(given[name]) for name in ("steps_per_call", "prefetch", "eval_every")
    }


def _check(typed: Any) -> None:
    """Refuses what can't be, whatever the engine is; sets what all workers are to have."""
    if typed.threads is not None and not 1 <= typed.threads <= MOST_WORKERS:
        raise UsageError(f"--threads {typed.threads}: give a whole number >= 1, at most {MOST_WORKERS}")
    if typed.callback:  # another command has started this one, and is not to be outlived
        die_with_parent()
    if typed.start_timeout is not None:
        if not 0 < typed.start_timeout < float("inf"):
            raise UsageError(f"--start-timeout {typed.start_timeout}: give a number of seconds > 0")
        os.environ[START_TIMEOUT] = str(typed.start_timeout)
    start_timeout()
    fresh = typed.run_dir is None or not (typed.run_dir / "checkpoints").is_dir()  # else it goes on from those
    if fresh and typed.resume not in (None, "auto", "never") and not typed.hosts_ and job_size() is None:
        runs.checkpointed(Path(typed.resume), "--resume ")


def _place(typed: Any) -> Place:
    """Where the task is to be trained; refuses what doesn't fit together."""
    backend, tpu, devices = typed.backend, typed.tpu, typed.devices
    if tpu is not None:
        os.environ["TPU_NAME"], backend = tpu, backend or "tpu"
    places = hosts.read(typed.hosts_, typed.workers, backend or "auto", typed.interface, typed.remote_python)
    workers = sum(places.values()) or typed.workers
    limits = read_limits(typed.elastic_, typed.discovery, backend or "auto", workers, typed.hosts_)
    if limits is not None:
        for option, value in (("--profile", typed.profile), ("--devices", devices), ("--tpu", tpu)):
            if value is not None:
                raise UsageError(f"--elastic {typed.elastic_} with {option} {value}: leave one of them out")
        backend = "horovod"
    towers = machine.device_names(devices.split(",")) if devices is not None else None
    backend = backend or ("mirrored" if towers else "auto")
    engine = choose_for_command(backend, workers, asynchronous=True)
    why = choose_backend(backend, workers)[1] if typed.dry_run_ else ""
    if typed.ps is not None:
        check_servers(engine, typed.ps)
    least = typed.min_shard_bytes
    if least is not None and (engine != "parameter_server" or least < 1):
        raise UsageError(f"--min-shard-bytes {least}: give a number >= 1, with --backend parameter_server")
    for option, value, meant in (("--tpu", tpu, ("tpu",)), ("--devices", devices, ("mirrored", "central"))):
        if value is not None and engine not in meant:
            raise UsageError(f"{option} {value} with --backend {engine}: leave one out, or use {' or '.join(meant)}")
    if towers and workers not in (None, len(towers)):
        raise UsageError(f"--workers {workers} with {len(towers)} devices: leave --workers out")
    return Place(engine, why, workers, places, limits, towers)


def _launch(typed: Any, place: Place, arguments: Sequence[str]) -> tuple[int, str, dict[str, Any] | None]:
    """Starts workers, which come to `_work` with the same arguments, and waits for them."""
    count = place.workers or 1
    what = f"{count} worker{'s' * (count > 1)}"
    where = f" on {len(place.hosts)} hosts" if place.hosts else ""
    tell(f"starting {what}{where} ({place.engine}) ...")
    with contextlib.ExitStack() as stack:
        cluster = None
        if place.hosts:
            files = hosts.files(typed.target_, typed.config_ or ())
            connection = hosts.connect(place.hosts, place.engine, files, typed.interface, typed.remote_python)
            cluster = stack.enter_context(connection)
        if place.limits is None:
            done = run_job(place.engine, count, arguments, typed.ps or 1, cluster)
        else:
            done = run_elastic_job(place.limits, place.workers, arguments, cluster)
    if done[0] == PREEMPTED and done[2] is None:
        tell(signals.STOPPED)
    return done


def _work(
    typed: Any, given: dict[str, Any], place: Place, chosen: callbacks.StandardSet, beginning: contextlib.ExitStack
) -> tuple[int, str, dict[str, Any] | None]:
    """Trains in this process, which may be one of several; `beginning` is closed when it has the signals no more."""
    with reporting() as report:
        with stderr.quiet_start():
            from loop import backends

            def load() -> TrainTask:
                task = task_loader.load(typed.target_, typed.set_ or ())
                with_defaults(task, given)
                return task

            task, made = backends.with_task(
                load, place.engine, place.workers, place.devices, typed.min_shard_bytes, typed.threads
            )
        from loop.fit import fit

        added = [_load_callback(text) for text in typed.callback or ()]
        if any(getattr(callback, "alone", False) for callback in added):
            chosen = callbacks.standard(checkpoint=None, mlflow=None, progress=None)
        chosen += added
        if typed.dry_run_:
            fields = dry_run.dry_run(task, made, given)
        else:
            result = fit(task, **given | {"backend": made}, run_dir=typed.run_dir, callbacks=chosen)
            fields = {name: value for name, value in vars(result).items() if name != "model"}
            fields["run_dir"] = str(result.run_dir)
        beginning.close()
        made.close()
        code = PREEMPTED if fields["status"] == "preempted" else 0
        report(code, None, fields)
    if JOB in os.environ:
        # A saved run is no failure for which the others are to be ended: its code is in the report.
        return 0, "", None
    return code, "", fields if made.is_chief else None


def _load_callback(text: str) -> callbacks.Callback:
    """The callback that another command adds: see `command_line.callback_option`."""
    name, has_argument, argument = text.partition("=")
    module, _, class_name = name.partition(":")
    kind = getattr(importlib.import_module(module), class_name)
    callback: callbacks.Callback = kind(argument) if has_argument else kind()
    return callback
