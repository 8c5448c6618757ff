"""Agreement: what each worker asks for at a boundary between calls, and what all of them do."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from loop.backends.host_collectives import HostCollectives


class Wishes(NamedTuple):
    """What one worker brings to a boundary. All of it travels in one collective, in this order.

    The numbers come first: they are added up, and are 0 on all workers but the chief. Then comes `part_written`, which
    must hold on all workers. The flags follow: one worker that sets a flag sets it for all.

    Attributes:
        steps: how many steps the next call makes, by the chief.
        write_outcome: how the oldest checkpoint under way came out, by the chief: see `loop.run.checkpointing`.
        part_written: this worker has written its part of a checkpoint.
        failing: this worker has an error.
        save: a checkpoint was asked for.
        save_on_stop: a stop, and the end, writes a checkpoint.
        wait: training waits for a checkpoint to be written.
        check: replicas are compared before a checkpoint is written.
        stop: a callback asked for the end.
        signalled: a signal asked for the end.
        keep: a snapshot for the next attempt of an elastic job is due.
        regroup: in an elastic job, workers have come or are to go.
        hold: a snapshot was asked for that is written later.
    """

    steps: int
    write_outcome: int
    part_written: bool
    failing: bool
    save: bool
    save_on_stop: bool
    wait: bool
    check: bool
    stop: bool
    signalled: bool
    keep: bool
    regroup: bool
    hold: bool


@dataclasses.dataclass(frozen=True)
class Decision:
    """What all workers do after a boundary, the same on each.

    Attributes:
        steps: how many steps the next call makes.
        saved: the reason of the checkpoint that is now complete, or "".
        save: a checkpoint is taken.
        hold: a snapshot is taken, and written before the next checkpoint.
        wait: training waits until the checkpoint is written.
        check: replicas are compared before it is taken.
        keep: a snapshot is taken for the next attempt of an elastic job.
        stop: the run ends.
        signalled: a signal asked for the end.
        regroup: the workers of an elastic job form a new generation.
    """

    steps: int = 1
    saved: str = ""
    save: bool = False
    hold: bool = False
    wait: bool = False
    check: bool = False
    keep: bool = False
    stop: bool = False
    signalled: bool = False
    regroup: bool = False


def exchange(workers: HostCollectives, wishes: Wishes) -> Wishes:
    """The wishes of all workers together. All workers must call it: it is the one collective of a boundary."""
    table = workers.exchange(*map(int, wishes))  # a row for each worker, a column for each wish
    steps, write_outcome = table[:, :2].sum(axis=0)
    part_written = bool(table[:, 2].min())  # a checkpoint is complete only with the parts of all
    flags: list[bool] = (table[:, 3:] != 0).max(axis=0).tolist()
    return Wishes(int(steps), int(write_outcome), part_written, *flags)


def decide(wishes: Wishes, at_end: bool, saved: str) -> Decision:
    """What follows from the wishes of all workers.

    `at_end`: all steps have been made. `saved` is the reason of the checkpoint that is now complete, or "".
    """
    stop = wishes.stop or wishes.signalled
    # A snapshot that is saved takes the place of one that would be held: both are of this boundary.
    save = wishes.save or ((stop or at_end) and wishes.save_on_stop)
    return Decision(
        steps=wishes.steps,
        saved=saved,
        save=save,
        hold=wishes.hold and not save,
        wait=wishes.wait,
        check=wishes.check,
        # The next generation goes on from a snapshot of this boundary.
        keep=wishes.keep or wishes.regroup,
        stop=stop,
        signalled=wishes.signalled,
        regroup=wishes.regroup,
    )
