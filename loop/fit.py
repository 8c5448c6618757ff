"""The training loop: `fit`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from callbacks import Callback, Checkpoint, Profiler, complete
from callbacks.run_record.redaction import remember
from loop.backends.base import Backend
from loop.errors import RegroupError, UsageError, no_exit
from loop.monitor import stopwatch
from loop.options import DEFAULTS
from loop.run import run_directory
from loop.run.bad_step import keep_bad_step
from loop.run.bus import Bus
from loop.run.ending import end, wait_for_checkpoints
from loop.run.result import FitResult, result, take_best
from loop.run.run import Run
from loop.run.session import Session, options_and_backend
from loop.step.train_step import LAST_SKIPPED, NOT_FINITE, not_finite
from loop.task import TrainTask, check_is_task, hyperparameters


def fit(
    task: TrainTask,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    backend: str | Backend | None = None,
    callbacks: Iterable[Callback] | None = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    precision: str | None = None,
    accumulate: int | None = None,
    compression: str | None = None,
    groups: int | None = None,
    reduction: str | None = None,
    local_steps: int | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    on_nonfinite: str | None = None,
    sync_batch_norm: bool | None = None,
    shard_optimizer: bool | None = None,
    ema: float | None = None,
    remat: str | Sequence[str] | None = None,
    steps_per_call: int | str | None = None,
    compile: str | None = None,
    prefetch: int | str | None = None,
    eval_every: int | str | None = None,
    drop_remainder: bool | None = None,
    stall_timeout: float | None = None,
    profile: str | None = None,
    accept_changes: bool | None = None,
    overfit: int | None = None,
    keep: str | None = None,
) -> FitResult:
    """Trains a task.

    The loop, with the event that each part fires:

        start the backend, build the model and the optimizer     on_setup
        open the data, each replica its share                    on_data
        go on from the newest good checkpoint, or start          on_restore
        give all workers the same variables                      on_fit_start
        until the last step is made, or a stop is asked for:
            at the start of a phase of the task                  on_phase_start
            at the start of an epoch                             on_epoch_start
            make steps in one compiled call, up to a boundary    on_steps_end
            where it is due, evaluate the whole set              on_eval_end
            at the end of an epoch                               on_epoch_end
            agree with all workers on what comes next
            when the checkpoint being written is complete        on_checkpoint
            where one is asked for, begin to write another
            with `profile`, report where the time went           on_profile
        if anything went wrong                                   on_exception
        always                                                   on_fit_end

    Every argument that isn't given takes the task's own default (`TrainTask.defaults`), else the one below.

    Args:
        task: the task.
        epochs: passes over the training data; 1.
        steps: optimizer steps instead of epochs.
        batch_size: the *global* batch, over all replicas; 32.
        backend: `auto`, `single`, `mirrored`, `central`, `multiworker`, `horovod`, `parameter_server`, `tpu`, a
            plug-in's name, or a `Backend` object; `auto`.
        callbacks: None: the standard set. A list is added to it, and each of its callbacks takes the place of a
            standard one of its kind. What `callbacks.standard(...)` built is taken as it is. The task's own are added
            to either: `TrainTask.build_callbacks`.
        run_dir: the run directory; a new one below `runs/`.
        resume: `auto` goes on from the newest good checkpoint in the run directory, also if a callback has stopped the
            run; `never` refuses a directory that has one; a path of a checkpoint or a run directory starts from there,
            in a run directory of its own; `auto`.
        seed: of initial weights and of the data's order; 0.
        shuffle: whether `ArrayData` is permuted anew each epoch; True. A `tf.data.Dataset` has its own order.
        precision: `float32`, `float64`; or `bfloat16`, `mixed_float16`: layers compute in it, variables stay float32
            (with float16, the loss is scaled as much as its reduced gradients bear); `float32`.
        accumulate: into how many micro-batches a global batch is cut, one after the other, to save memory; 1. The
            result doesn't depend on it, unless something looks at the whole batch (BatchNormalization, `all_gather`):
            it then sees the micro-batch, of all replicas.
        compression: the type in which gradients are sent between replicas: `fp16`, or `bf16` (not with Horovod). Their
            sums are then rounded to 11 or 8 bits, and nothing else is; `none`.
        groups: in how many collectives the gradients are reduced, the last layers' first, while those of the layers
            before are still computed; 1.
        reduction: `sum`; or `adasum` (Horovod built with MPI): the adaptive sum of the replicas' own mean gradients,
            for large batches. Inexact: the weights depend on the number of replicas; `sum`.
        local_steps: after how many steps of an epoch the replicas average their weights and the optimizer's state. In
            between, each makes its own steps on its own share of the batches, and nothing is sent (local SGD).
            Inexact: the weights depend on the number of replicas, and on when callbacks and evaluations look at the
            run, since the replicas average then, too. For arrays, with `horovod` or `multiworker` and one device for
            each process. BatchNormalization's statistics are each replica's own in between; 1: exact.
        clip_norm: the greatest global norm of the reduced gradient; no clipping.
        clip_value: the greatest absolute value of an element of the reduced gradient; no clipping.
        on_nonfinite: what to do when the loss or its gradient is nan or infinite: `stop`, or `skip` the step, on all
            replicas; `stop`.
        sync_batch_norm: whether BatchNormalization takes its statistics over all replicas, exactly; True. Without it,
            each replica has its own, and their mean is what is evaluated and saved.
        shard_optimizer: whether each replica holds only its part of the optimizer's state and of the moving averages,
            which saves memory (ZeRO, stage 1). The weights are the same. With `horovod`, `multiworker` and `mirrored`,
            and optimizers that compute each element by itself, such as `Adam`; False: each replica holds all of it.
        ema: the decay of a moving average of the weights, such as 0.999: what is evaluated, exported and returned is
            the average; no average.
        remat: which layers' results are computed again on the way back instead of being remembered, which saves memory
            and costs time: `full`, in segments of the model; a size such as `64MB`: of layers whose results for a
            replica's micro-batch are at least that large; or a list of layers' names, in which * stands for any
            letters. The numbers don't change; none.
        steps_per_call: steps in a compiled call at most; `auto`: as many as take a quarter of a second, and
            of slow ones up to eight in a second.
        compile: `graph`, or `xla`: on one device, many steps become one XLA program, if the data are arrays; else
            forward and backward pass of each replica do. Random layers draw other numbers in XLA, so they are refused
            on several replicas; `graph`.
        prefetch: how many batches a `tf.data.Dataset` is read ahead, or `auto`: as TensorFlow finds best; 2.
        eval_every: `epoch`, a number of steps, or `never`; `epoch`. The end of training is always evaluated, except
            with `never`.
        drop_remainder: whether a short last batch is left out; False: it is used, and weighs what it should.
        stall_timeout: when nothing has ended for so many seconds, each worker prints what it is doing, with the stacks
            of its threads; 300.
        profile: `"10:20"` traces steps 10 to 20 on each worker, for TensorBoard, and reports where the time of each
            call and of the whole run goes: data, compute, all-reduce, evaluation, callbacks, saving; no profile.
        accept_changes: whether a run that goes on may have other settings, or other hyperparameters of the task, than
            it had; False: they are shown and refused.
        overfit: trains on the first so many global batches alone, again and again, and evaluates on the same examples.
            They are read once, and not shuffled unless `shuffle` is given. A model that can't learn them by heart has
            a mistake; None: all data.
        keep: which weights are returned, and what `export` and `evaluate` of the run take: those of the `last` step, or
            the `best`, by the metric of `callbacks.Checkpoint` (`eval_loss`; without an evaluation `loss`). The run
            itself can go on from its last step in either case; `last`.

    Raises:
        UsageError: an argument or the task is wrong; the message says what to do.
        TrainingError: a loss or gradient is not finite; or another worker failed (`PeerError`).
    """
    given = {name: value for name, value in locals().items() if name in DEFAULTS}
    check_is_task(task)
    remember(hyperparameters(task))  # from here on, the secrets among them are hidden in all output
    options, backend = options_and_backend(task, given)
    return result(attempts(task, backend, options, callbacks_of(task, callbacks, options), run_dir))


def callbacks_of(task: TrainTask, given: Iterable[Callback] | None, options: Mapping[str, Any]) -> list[Callback]:
    """All callbacks of a run: the standard set, those that were given, the task's own, and what the options add."""
    callbacks = complete(given, task.build_callbacks())
    if options["profile"]:
        callbacks.append(Profiler(*map(int, options["profile"].split(":"))))
    if options["keep"] == "best" and not any(isinstance(callback, Checkpoint) for callback in callbacks):
        raise UsageError("keep='best' takes the weights of the best checkpoint: leave callbacks.Checkpoint in the set")
    return callbacks


def attempts(
    task: TrainTask,
    backend: Backend,
    options: dict[str, Any],
    callbacks: list[Callback],
    run_dir: str | Path | None,
) -> Run:
    """Makes attempts until one has come to the end of the run. Only an elastic job makes several."""
    while True:
        try:
            with no_exit():
                return attempt(task, backend, options, callbacks, run_dir)
        except Exception as error:
            if not backend.is_recoverable(error):
                raise
        # Outside of `except`: the error's traceback holds the variables of the last attempt.
        backend.rejoin()


def attempt(
    task: TrainTask,
    backend: Backend,
    options: dict[str, Any],
    callbacks: list[Callback],
    run_dir: str | Path | None,
) -> Run:
    """One attempt at a run, with the workers that are there at its start."""
    with (
        contextlib.closing(Session(task, backend, options)) as session,
        run_directory.prepared(task, run_dir, options["resume"], backend) as directory,
    ):
        run = Run(session, directory)
        bus = Bus(callbacks, run)
        with run.stops.handling_signals(run), run.watchdog.watching():
            try:
                set_up(run, bus)
                train(run, bus)
                wait_for_checkpoints(run, bus)
                run.step.average_statistics()
                report_time(run, bus)
                if options["profile"]:
                    bus.fire("profile", "summary", stopwatch.summary(backend.gather_json(run.stopwatch.total)))
                take_best(run)
                # The last events are the chief's alone, which couldn't gather the averages.
                run.step.averages.settle()
                run.synchronize()
            except BaseException as error:
                translated = run.translate_error(error)
                # The next attempt of an elastic job fires the last events.
                if backend.is_recoverable(error):
                    run.checkpointing.close()
                else:
                    end(run, bus, "failed", translated)
                if translated is error:
                    raise
                raise translated from error
            end(run, bus, run.run_status.name)
            backend.exchange(0)  # all workers wait here until the chief's last callbacks have delivered everything
    run.step.averages.take()
    return run


def set_up(run: Run, bus: Bus) -> None:
    """Takes the run to where it starts."""
    # An error of a hook is deferred: all workers end with it at the next `synchronize`.
    bus.fire("setup")
    run.session.make_step(bus.fire_data(run.session.data))
    bus.check_metrics()
    run.synchronize()
    with run.watchdog.phase("restoring"):
        path = run_directory.restore(run, lambda: enter_phase(run, bus))
    bus.fire("restore", path)
    with run.defer_errors(), run.watchdog.phase("opening the data"):
        run.run_status.start(run)
        run.data.open(run)
    run.synchronize()
    bus.fire("fit_start")
    run.synchronize()
    if path is None:
        run.step.averages.restart()


def enter_phase(run: Run, bus: Bus) -> None:
    """Goes to the task's next phase: the model goes on; data, optimizer and compiled step are made anew."""
    run.enter_phase()
    bus.forget()
    run.session.make_step(bus.fire_data(run.session.data))


def next_phase(run: Run, bus: Bus) -> None:
    """Ends the phase under way, and begins the next one. All workers do the same."""
    if not run.epoch.is_closed(run.progress):  # a callback has ended the phase within an epoch
        bus.fire("epoch_end", run.close_epoch())
    if run.progress.step_in_epoch:
        run.next_epoch()
    with run.watchdog.phase("beginning a phase"):
        run.step.averages.take()
        with run.defer_errors():
            enter_phase(run, bus)
        run.synchronize()
        run.backend.broadcast_variables(run.variables)
        run.step.averages.restart()
        with run.defer_errors():
            run.data.open(run)
        run.synchronize()


def train(run: Run, bus: Bus) -> None:
    """The loop itself, from where the run stands to its end."""
    epoch_under_way = False
    while not run.at_end:
        report_time(run, bus)
        if run.phase_over:
            next_phase(run, bus)
            epoch_under_way = False
        if not epoch_under_way:
            epoch_under_way = True
            if run.plan.begins:
                bus.fire("phase_start")
            bus.fire("epoch_start")
            if between_calls(run, bus):
                return

        # An attempt that was cut off within an evaluation goes on with that evaluation.
        if not run.epoch.evaluating:
            make_steps(run, bus)

        closing = run.at_epoch_end
        if run.evaluation_due:
            if not evaluate(run, bus):
                return
            bus.fire("eval_end", run.epoch.eval_metrics)
        run.epoch.end_evaluation()  # also of a checkpoint, if the resumed run makes no evaluations
        if closing:
            bus.fire("epoch_end", run.close_epoch())
        if run.epoch.ended:
            run.next_epoch()
            epoch_under_way = False

        if between_calls(run, bus):
            return


def make_steps(run: Run, bus: Bus) -> None:
    """Makes the steps of one compiled call.

    Raises:
        TrainingError: a step isn't finite, and the options don't let it be skipped.
    """
    ending, totals = run.make_steps()
    if ending in (NOT_FINITE, LAST_SKIPPED):
        kept = keep_bad_step(run, skipped=ending == LAST_SKIPPED)
    if ending == NOT_FINITE:
        raise not_finite(run.progress.step + 1, run.progress.epoch + 1, run.step.not_finite, kept)
    bus.fire_steps_end(totals, run.at_epoch_end)


def evaluate(run: Run, bus: Bus) -> bool:
    """Evaluates on the whole evaluation data. Returns whether it came to the end; a signal may stop the run before."""
    evaluation = run.step.evaluation
    pace = run.calls.eval_pace
    run.epoch.start_evaluation()
    with run.watchdog.phase("the start of the evaluation"), run.stopwatch.at("evaluation"):
        iterator = evaluation.start()
        totals = np.zeros(())
    step: int | None = 0
    while step is not None:
        if between_calls(run, bus, pace.steps):
            return False
        part = "evaluation" if pace.calls else stopwatch.COMPILING
        begun = time.perf_counter()
        with run.watchdog.phase(lambda: f"{run.step.phase_marker.doing()} of the evaluation"), run.stopwatch.at(part):
            step, more = evaluation.steps(iterator, step, run.decision.steps)
        pace.record(run.decision.steps, time.perf_counter() - begun)
        totals = totals + more
    run.epoch.add_evaluation(run.progress.step, totals, evaluation.means)
    return True


def between_calls(run: Run, bus: Bus, steps: int | None = None) -> bool:
    """All workers agree on what comes next, and take the checkpoint that is due.

    Args:
        run: the run.
        bus: its callbacks.
        steps: how many steps the next call makes; None: up to the next boundary of the training.

    Returns:
        Whether the run ends here.
    """
    decision = run.synchronize(run.calls.steps_to_boundary(run, bus.steps_left()) if steps is None else steps)
    if decision.saved:
        bus.fire("checkpoint", decision.saved)
    if decision.keep:
        run.checkpointing.memory.take()
    if decision.save:
        run.checkpointing.save()
        if decision.wait:
            wait_for_checkpoints(run, bus)
    elif decision.hold:
        run.checkpointing.hold()
    # Not `decision` from here on: while checkpoints are waited for, the workers agree anew.
    if run.decision.regroup and not run.decision.stop and not run.at_end:
        wait_for_checkpoints(run, bus)
        raise RegroupError
    return run.decision.stop


def report_time(run: Run, bus: Bus) -> None:
    """With `profile`, reports to callbacks where the time of the last call, and of what followed it, went."""
    entry = run.stopwatch.split()
    if entry is not None and run.options["profile"]:
        bus.fire("profile", "call", entry)
