"""The beginning of an attempt: step, checkpoint and data, up to the first step."""

from __future__ import annotations

from loop.model.precision import warn_of_policy
from loop.run import compile_choice, run_directory
from loop.run.bus import Bus
from loop.run.phase_change import enter_phase
from loop.run.run import Run


def set_up(run: Run, bus: Bus) -> None:
    """Takes the run to where it starts."""
    if run.backend.is_chief:
        warn_of_policy(run.options["precision"])
    # An error of a hook is deferred. All workers end with it at the next `synchronize`, so one follows each event.
    bus.fire("setup")  # before the step is made: a hook may change options
    run.calls.late_changes.check_setup()
    data = bus.fire_data(run.session.data)
    compile_choice.settle(run, data)
    run.session.make_step(data)
    bus.check_metrics()
    run.synchronize()
    with run.watchdog.phase("restoring"):
        # The phases before that of the checkpoint are entered one by one: each fires the event for its data.
        path = run_directory.restore(run, lambda: enter_phase(run, bus))
    bus.fire("restore", path)
    # Only now: an attempt that was refused above leaves `run.json` as the last attempt wrote it.
    with run.defer_errors(), run.watchdog.phase("opening the data"):
        run.run_status.start(run)
        run.data.open(run)
    run.synchronize()
    bus.fire("fit_start")
    run.synchronize()
    if path is None:  # after the hooks, which may have changed the weights
        run.step.averages.restart()
