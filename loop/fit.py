"""The training loop: `fit`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from callbacks import Callback, notebook
from callbacks.run_record.redaction import remember
from loop.backends.base import Backend
from loop.data.host_random import used_by_this_thread
from loop.errors import RegroupError, no_exit
from loop.launch.worker import peer_errors
from loop.monitor import stopwatch
from loop.options import DEFAULTS, Options
from loop.run import run_directory
from loop.run.bad_step import keep_bad_step
from loop.run.beginning import set_up
from loop.run.bus import Bus, callbacks_of
from loop.run.ending import end, end_failed, finish, wait_for_checkpoints
from loop.run.phase_change import next_phase
from loop.run.result import FitResult, result
from loop.run.run import Run
from loop.run.session import Session, options_and_backend
from loop.run.worker_processes import fit_in_workers
from loop.step.train_step import LAST_SKIPPED, NOT_FINITE, not_finite
from loop.task import TrainTask, check_is_task, field_values


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
    eval_every: int | str | Mapping[str, int | str] | None = None,
    drop_remainder: bool | None = None,
    stall_timeout: float | None = None,
    profile: str | None = None,
    accept_changes: bool | None = None,
    overfit: int | None = None,
    keep: str | None = None,
    workers: int | None = None,
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
            where it is due, evaluate the whole set, or sets     on_eval_end
            at the end of an epoch                               on_epoch_end
            agree with all workers on what comes next
            when the checkpoint being written is complete        on_checkpoint
            where one is asked for, begin to write another
            with `profile`, report where the time went           on_profile
        if anything went wrong                                   on_exception
        always                                                   on_fit_end

    An argument that isn't given takes the task's own default (`TrainTask.defaults`), else the one at the end below.

    Args:
        task: the task.
        epochs: passes over the training data; 1.
        steps: optimizer steps instead of epochs.
        batch_size: the *global* batch, over all replicas; 32.
        backend: `auto`, `single`, `mirrored`, `central`, `multiworker`, `horovod`, `parameter_server`, `tpu`, a
            plug-in's name, or a `Backend` object; `auto`.
        callbacks: added to the standard set, where each replaces the standard callback of its class. What
            `callbacks.standard(...)` returned is taken as it is. The task's own (`TrainTask.build_callbacks`) are added
            to either, except those that a callback given here replaces or drops; None: the standard set.
        run_dir: the run directory; a new one below `runs/`.
        resume: `auto` goes on from the newest good checkpoint in the run directory, also if a callback has stopped the
            run. `never` refuses a directory that has one. The path of a checkpoint or a run directory starts from
            there, in a run directory of its own; `auto`.
        seed: of initial weights and of the data's order; 0.
        shuffle: whether `ArrayData` is permuted anew each epoch. A `tf.data.Dataset` has its own order; True.
        precision: `float32` or `float64`; or `bfloat16` or `mixed_float16`, in which layers compute while variables
            stay float32. With `mixed_float16` the loss is scaled, as far as its gradients stay finite; `float32`.
        accumulate: into how many micro-batches a global batch is cut, to save memory. The result doesn't depend on it,
            unless the model looks at the whole batch (BatchNormalization), or draws (dropout), for each micro-batch; 1.
        compression: the type in which gradients are sent between replicas: `fp16`, or `bf16` (not with Horovod). Only
            their sums are rounded, to 11 or 8 bits; `none`.
        groups: the number of collectives that reduce the gradients. The last layers' gradients are reduced while those
            of earlier layers are computed; 1.
        reduction: `sum`; or `adasum` (Horovod built with MPI), the adaptive sum of the replicas' own mean gradients,
            for large batches. Inexact: the weights depend on the number of replicas; `sum`.
        local_steps: how many steps each replica makes on its own rows before the replicas average their weights and the
            optimizer's state (local SGD). Inexact: the weights depend on the number of replicas, and on when callbacks
            and evaluations look at the run, because the replicas average then, too. For arrays, with `horovod` or
            `multiworker` and one device for each process; 1, which is exact.
        clip_norm: the greatest global norm of the reduced gradient; no clipping.
        clip_value: the greatest absolute value of an element of the reduced gradient; no clipping.
        on_nonfinite: if the loss or its gradient is nan or infinite, `stop`, or `skip` the step everywhere; `stop`.
        sync_batch_norm: whether BatchNormalization takes its statistics over all replicas, exactly. Otherwise each
            replica has its own, and their mean is evaluated and saved; True.
        shard_optimizer: whether each replica holds only its part of the optimizer's state and of the moving averages
            (ZeRO, stage 1), on several replicas, with optimizers that work element by element, as `Adam`; False.
        ema: the decay of a moving average of the weights, such as 0.999. The average is what is evaluated, exported and
            returned; no average.
        remat: the layers whose results are computed again in the backward pass, to save memory: `full`, in segments of
            the model; a size such as `64MB`, layers whose results for a replica's micro-batch are at least that large;
            or a list of layers' names, in which * matches any letters. The numbers stay the same; none.
        steps_per_call: the most steps of a compiled call; `auto`: as many as take a quarter of a second, and of slow
            ones up to eight in a second.
        compile: `graph`; or `xla`, which makes one XLA program of many steps on one device if the data are arrays, else
            of each replica's forward and backward pass. Random layers are refused in XLA on several replicas. `auto`
            measures both before the first step, on one device, and takes the faster; `graph`.
        prefetch: how many batches of a `tf.data.Dataset` are read ahead; `auto`: as TensorFlow finds best; 2.
        eval_every: `epoch`, a number of steps, or `never`. The end of training is evaluated, too, except with `never`.
            If `eval_data` returns several sets, a dict gives each its own, such as `{"val": 100, "test": "never"}`; a
            set that isn't named has `epoch`; `epoch`.
        drop_remainder: whether a short last batch is left out. If used, it weighs what it should; False.
        stall_timeout: after how many seconds without progress each worker prints what it is doing, with the stacks of
            its threads; 300.
        profile: `"10:20"` traces steps 10 to 20 on each worker, for TensorBoard, and reports where the time of each
            call and of the whole run goes: data, compute, all-reduce, evaluation, callbacks, saving; no profile.
        accept_changes: whether a resumed run may have other settings, or other hyperparameters of the task, than
            before. Otherwise they are shown and refused; False.
        overfit: trains on the first so many global batches alone, again and again, and evaluates on them. They are read
            once, and not shuffled unless `shuffle` is given. A model that can't memorize them has a bug; all data.
        keep: the weights that are returned, and that `export` and `evaluate` of the run take: of the `last` step, or
            the `best`, by the metric of `callbacks.Checkpoint` (`eval_loss`; without an evaluation `loss`). A resumed
            run goes on from its last step in either case; `last`.
        workers: trains in so many processes on this machine, as `tfloop train --workers` does. The result has the model
            on one device. Callbacks come from the task (`TrainTask.build_callbacks`); None: this process trains.

    Raises:
        UsageError: an argument or the task is wrong; the message says what to do.
        TrainingError: a loss or gradient is not finite; or another worker failed (`PeerError`).
    """
    # First, while the local variables are the arguments and nothing else.
    given = {name: value for name, value in locals().items() if name in DEFAULTS}
    check_is_task(task)
    remember(field_values(task))  # from here on, the secrets among them are hidden in all output
    with notebook.short_interrupt(), peer_errors():
        if workers is not None:
            return fit_in_workers(task, given, workers, callbacks, run_dir)
        return result(attempts(task, given, callbacks, run_dir))


def attempts(
    task: TrainTask, given: Mapping[str, object], callbacks: Iterable[Callback] | None, run_dir: str | Path | None
) -> Run:
    """Makes attempts until one has come to the end of the run. Only an elastic job makes several."""
    options, backend = options_and_backend(task, given)
    all_callbacks = callbacks_of(task, callbacks, options)
    while True:
        try:
            with no_exit():
                return attempt(task, backend, options, all_callbacks, run_dir)
        except Exception as error:
            if not backend.is_recoverable(error):
                raise
        # Outside of `except`: the error's traceback holds the variables of the last attempt.
        backend.rejoin()


def attempt(
    task: TrainTask, backend: Backend, options: Options, callbacks: list[Callback], run_dir: str | Path | None
) -> Run:
    """One attempt at a run, with the workers that are there at its start."""
    with (
        used_by_this_thread(),
        contextlib.closing(Session(task, backend, options)) as session,
        run_directory.prepared(task, run_dir, options["resume"], backend) as directory,
    ):
        run = Run(session, directory)
        bus = Bus(callbacks, run)
        # The last events are within it, too: they may take long, and be stopped or stall.
        with run.stops.handling_signals(run), run.watchdog.watching():
            try:
                set_up(run, bus)
                train(run, bus)
                finish(run, bus)
            except BaseException as error:  # `KeyboardInterrupt` as well: the last events close what callbacks hold
                translated = end_failed(run, bus, error)
                if translated is error:
                    raise
                raise translated from error
            end(run, bus, run.run_status.name)
            backend.exchange(0)  # all workers wait here until the chief's last callbacks have delivered everything
    # The caller gets a model with the averages. (Sliced ones were settled in `finish`, by a collective.)
    run.step.averages.take()
    return run


def train(run: Run, bus: Bus) -> None:
    """The loop itself, from where the run stands to its end."""
    epoch_under_way = False
    while not run.at_end:
        bus.fire_profile()

        # Here, and not after the evaluation: a resumed run may stand at the end of a phase.
        if run.phase_over:
            next_phase(run, bus)
            epoch_under_way = False
        if not epoch_under_way:
            epoch_under_way = True
            if run.plan.begins:
                bus.fire("phase_start")
            bus.fire("epoch_start")
            # A hook may ask for a stop or a checkpoint: both come before the first step.
            if between_calls(run, bus):
                return

        # An attempt that was cut off within an evaluation goes on with that evaluation.
        if not run.epoch.evaluating:
            make_steps(run, bus)

        closing = run.at_epoch_end
        if run.evaluation_due:
            if not evaluate(run, bus):
                return
            bus.fire("eval_end", run.epoch.evaluated)
        run.epoch.end_evaluation()  # also of a checkpoint, if the resumed run makes no evaluations
        # The last step may lie within an epoch, which then has a row, but no epoch after it.
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
    # First of all, since it keeps the state after this step; a hook may change that.
    if ending in (NOT_FINITE, LAST_SKIPPED):
        kept = keep_bad_step(run, skipped=ending == LAST_SKIPPED)
    if ending == NOT_FINITE:
        raise not_finite(run.progress.step + 1, run.progress.epoch + 1, run.step.not_finite, kept)
    bus.fire_steps_end(totals, run.at_epoch_end)


def evaluate(run: Run, bus: Bus) -> bool:
    """Evaluates on each set that is due. Returns whether it came to the end; a signal may stop the run before."""
    run.epoch.start_evaluation()
    return all(evaluate_set(run, bus, name) for name in run.sets_due)


def evaluate_set(run: Run, bus: Bus, name: str) -> bool:
    """Evaluates on the whole of a set. Returns whether it came to the end."""
    evaluation = run.step.evaluations[name]
    pace = run.calls.eval_paces[name]
    with run.watchdog.phase("the start of the evaluation"), run.stopwatch.at("evaluation"):
        iterator = evaluation.start()
        totals = np.zeros(())
    step: int | None = 0
    while step is not None:
        # Only a signal stops an evaluation here; the stop of a callback waits for its end (`Run._wishes`).
        if between_calls(run, bus, pace.steps):
            return False
        part = "evaluation" if pace.calls else stopwatch.COMPILING
        begun = time.perf_counter()
        with run.watchdog.phase(lambda: f"{run.step.phase_marker.doing()} of the evaluation"), run.stopwatch.at(part):
            step, more = evaluation.steps(iterator, step, run.decision.steps)
        pace.record(run.decision.steps, time.perf_counter() - begun)
        totals = totals + more  # not `+=`: the first zero is a scalar, and `more` a vector
    run.epoch.add_evaluation(name, run.progress.step, totals, evaluation)
    return True


def between_calls(run: Run, bus: Bus, steps: int | None = None) -> bool:
    """All workers agree on what comes next, and take the checkpoint that is due. Returns whether the run ends here.

    `steps` is how many steps the next call makes; None: up to the next boundary of the training.
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
        if not run.decision.stop:
            raise RegroupError
        # A signal came meanwhile, and the next attempt would not know of it: the run ends here.
        if run.decision.save:
            run.checkpointing.save()
    return run.decision.stop
