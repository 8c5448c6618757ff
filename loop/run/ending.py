"""The end of an attempt: the last checkpoints, the last events, and the error that ended it."""

from __future__ import annotations

from collections.abc import Callable

from loop.launch.worker import has_unsaved
from loop.monitor import stopwatch
from loop.run.bus import Bus
from loop.run.result import take_best
from loop.run.run import Run


def wait_for_checkpoints(run: Run, bus: Bus) -> None:
    """Waits for the checkpoints that are being written. All workers must call it."""
    # One checkpoint a turn: a boundary tells the outcome of one write.
    while run.checkpointing.under_way:
        run.checkpointing.wait()
        decision = run.synchronize(run.decision.steps)
        if decision.saved:
            bus.fire("checkpoint", decision.saved)


def finish(run: Run, bus: Bus) -> None:
    """Completes what training has begun, and gives the model its final weights. All workers must call it."""
    # First: the best checkpoint, which `take_best` reads, may be one of them.
    wait_for_checkpoints(run, bus)
    run.step.average_statistics()
    bus.fire_profile()
    if run.options["profile"]:
        bus.fire("profile", "summary", stopwatch.summary(run.backend.gather_json(run.stopwatch.total)))
    take_best(run)
    # The last events are the chief's alone, which couldn't gather the averages.
    run.step.averages.settle()
    run.synchronize()


def end_failed(run: Run, bus: Bus, error: BaseException) -> BaseException:
    """Ends an attempt that an error has ended; returns the error to raise, which may be a translation of it."""
    translated = run.translate_error(error)
    if run.backend.is_recoverable(error):
        run.checkpointing.close()  # no last events: the next attempt of an elastic job fires them
    else:
        end(run, bus, "failed", translated)
    return translated


def end(run: Run, bus: Bus, status: str, error: BaseException | None = None) -> None:
    """Fires the last events, and writes the status.

    Errors in the last events are added as notes to `error`, which has ended the run, and don't hide it.
    """
    # First: the status and the last events must know of a checkpoint that can't be written.
    run.checkpointing.close()
    has_unsaved.clear()  # no attempt follows, to which a signal could be left
    last_acts: list[Callable[[], None]] = [
        run.checkpointing.raise_errors,
        lambda: run.run_status.write(run, status),
        lambda: bus.fire_last("fit_end", status),
    ]
    if error is not None:
        last_acts.insert(1, lambda: bus.fire_last("exception", error))
    # Each of them, even if one before fails: the status must be written, and callbacks must close what they hold.
    first = error
    for act in last_acts:
        try:
            act()
        except Exception as further:
            if first is None:
                first = further
            else:
                first.add_note(f"further: {type(further).__name__}: {further}")
    if error is None and first is not None:
        raise first
