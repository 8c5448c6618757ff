"""The change from one phase of a task to the next: of a run that trains, and of one that is restored."""

from __future__ import annotations

from loop.run.bus import Bus
from loop.run.run import Run


def enter_phase(run: Run, bus: Bus) -> None:
    """Goes to the task's next phase: the model goes on; data, optimizer and compiled step are made anew."""
    run.enter_phase()
    bus.forget()  # before the new step counts anything: its totals may have another layout
    run.session.make_step(bus.fire_data(run.session.data))


def next_phase(run: Run, bus: Bus) -> None:
    """Ends the phase under way, and begins the next one. All workers do the same."""
    if not run.epoch.is_closed(run.progress):  # a callback has ended the phase within an epoch
        bus.fire("epoch_end", run.close_epoch())
    if run.progress.step_in_epoch:
        run.next_epoch()
    with run.watchdog.phase("beginning a phase"):
        run.step.averages.take()  # the next phase starts from the averages, which are the result of this one
        with run.defer_errors():
            enter_phase(run, bus)
        run.synchronize()
        # Variables that the phase has made have values of each worker's own until here.
        run.backend.broadcast_variables(run.variables)
        run.step.averages.restart()
        with run.defer_errors():
            run.data.open(run)
        run.synchronize()
