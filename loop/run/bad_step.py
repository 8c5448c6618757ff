"""Keeps the batch and the state of a step that wasn't finite, for `tfloop replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loop.checkpoint import checkpoint_files
from loop.checkpoint.writer import arrays
from loop.run import state

if TYPE_CHECKING:
    from loop.run.run import Run

MOST_BAD_STEPS = 3
"""The greatest number of bad steps that a run directory keeps."""


def keep_bad_step(run: Run, skipped: bool) -> str:
    """Writes the batch and the state of a step that wasn't finite. All workers must call it.

    Args:
        run: the run, after that step.
        skipped: whether the step was skipped. It is counted then.

    Returns:
        A note for the user; "" if the step isn't kept.
    """
    progress = run.progress
    directory = run.directory / "bad"
    step = progress.step - skipped
    in_epoch = progress.step_in_epoch - skipped
    # Without a layout, all workers have read the same batch; else each adds its own rows, in a collective.
    same_batch = run.step.data.train.layout is None
    writes = run.backend.is_chief and len(checkpoint_files.complete(directory)) < MOST_BAD_STEPS
    if run.sliced_variables:
        if not run.backend.broadcast_json(writes):
            return ""
        whole = state.gathered(run, keep=writes)
    else:
        whole = {}
    if same_batch and not writes:
        return ""
    batch = state.packed(run.step.bad_batch(progress.epoch, in_epoch), None if same_batch else run.backend)
    if not writes:
        return ""
    bad = {"step": step + 1, "epoch": progress.epoch, "step_in_epoch": in_epoch, "names": run.step.not_finite}
    try:
        run.check_directory()
        tensors, rest = state.snapshot(run, whole)
        path = checkpoint_files.write(directory, step + 1, arrays(tensors) | batch, rest | {"bad": bad})
    except Exception as error:  # best effort: must not hide that the step wasn't finite
        return f"what it was made from could not be kept ({error})"
    return f"what it was made from is kept: `tfloop replay {path}` shows it"
