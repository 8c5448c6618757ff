"""The end of an attempt: the last checkpoints, the last events, and the error that ended it."""

from __future__ import annotations

from loop.run.bus import Bus
from loop.run.run import Run


def wait_for_checkpoints(run: Run, bus: Bus) -> None:
    """Waits for the checkpoints that are being written. All workers must call it."""
    while run.checkpointing.under_way:
        run.checkpointing.wait()
        decision = run.synchronize(run.decision.steps)
        if decision.saved:
            bus.fire("checkpoint", decision.saved)


def end(run: Run, bus: Bus, status: str, error: BaseException | None = None) -> None:
    """Fires the last events, and writes the status.

    Args:
        run: the run.
        bus: its callbacks.
        status: how it ended.
        error: what ended it, if it failed. An error in the last events is added to it as a note, and doesn't hide it.
    """
    # First: the status and the last events must know of a checkpoint that can't be written.
    run.checkpointing.close()
    last_acts = [
        run.checkpointing.raise_errors,
        lambda: run.run_status.write(run, status),
        lambda: bus.fire_last("fit_end", status),
    ]
    if error is not None:
        last_acts.insert(1, lambda: bus.fire_last("exception", error))
    # Each of them, whatever the others do: the status must be written, and callbacks must close what they hold.
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
