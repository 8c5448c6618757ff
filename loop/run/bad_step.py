"""Keeps the batch and the state of a step that wasn't finite, for `tfloop replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.checkpoint import checkpoint_files
from loop.checkpoint.writer import arrays
from loop.data import Rows
from loop.errors import message_of
from loop.run import state
from loop.run.bus import goes_alone
from loop.run.state import Arrays
from loop.task import Batch

if TYPE_CHECKING:
    from loop.run.run import Run

BATCH = "batch/"
"""The prefix of the batch of a step that wasn't finite."""

MOST_BAD_STEPS = 3
"""The greatest number of bad steps that a run directory keeps."""


def keep_bad_step(run: Run, skipped: bool) -> str:
    """Writes the batch and the state of the last step, which wasn't finite. All workers must call it.

    Returns:
        A note for the user; "" if the step isn't kept.
    """
    if goes_alone(run.callbacks.values()):  # what is kept would be removed at once
        return ""
    progress = run.progress
    directory = run.directory / "bad"
    counted = 1 if skipped else 0  # a skipped step has been counted; one that ended the run hasn't
    step = progress.step - counted  # the steps before the bad one
    in_epoch = progress.step_in_epoch - counted
    # Without a layout, all workers have read the same batch; else each adds its own rows, in a collective.
    same_batch = run.step.data.train.layout is None
    writes = run.backend.is_chief and _has_room(directory)

    # Only the chief knows whether it writes. Gathering slices is a collective, so all workers ask the chief first.
    whole: Arrays = {}
    if run.sliced_variables:
        if not run.backend.broadcast_json(writes):
            return ""
        whole = state.gathered(run, keep=writes)

    if same_batch and not writes:  # no collective follows, so that only the chief goes on
        return ""
    gathering = None if same_batch else run.backend
    batch = packed(run.step.bad_batch(progress.epoch, in_epoch), gathering)
    if not writes:
        return ""
    bad = {"step": step + 1, "epoch": progress.epoch, "step_in_epoch": in_epoch, "names": run.step.not_finite}
    try:
        run.check_directory()
        tensors, rest = state.snapshot(run, whole)
        path = checkpoint_files.write(directory, step + 1, arrays(tensors) | batch, rest | {"bad": bad})
    except Exception as error:  # best effort: must not hide that the step wasn't finite
        return f"what it was made from could not be kept ({message_of(error)})"
    return f"what it was made from is kept: `tfloop replay {path}` shows it"


def _has_room(directory: Path) -> bool:
    """Whether one more step can be kept. Where that can't be read, the attempt to write tells why it fails."""
    try:
        return len(checkpoint_files.complete(directory)) < MOST_BAD_STEPS
    except checkpoint_files.CheckpointError:
        return True


def packed(rows: Rows, backend: Backend | None) -> Arrays:
    """The tensors of a checkpoint that hold a batch, of which these are a worker's rows: serialized, uint8 [n].

    With a backend, its workers each have rows of their own, and all must call it; None: these are the whole batch.
    """
    tensors = {}
    for index, leaf in enumerate([*tf.nest.flatten(rows.batch), rows.index]):
        # Serialized, because a batch may have types that an array file hasn't, such as texts.
        text = np.frombuffer(tf.io.serialize_tensor(leaf).numpy(), np.uint8)
        parts = [text] if backend is None else backend.gather_bytes(text)
        for rank, part in enumerate(parts):
            tensors[f"{BATCH}{index:05d}/{rank:05d}"] = part
    return tensors


def unpacked(tensors: Arrays, example: Batch) -> tuple[Batch, tf.Tensor]:
    """The batch that `packed` has made, and the indices of its examples; `example` is a batch of such examples."""
    dtypes = [leaf.dtype for leaf in tf.nest.flatten(example)] + [tf.int64]  # the indices come last: see `packed`
    leaves = []
    for index, dtype in enumerate(dtypes):
        texts, _ = state.split(tensors, f"{BATCH}{index:05d}/")
        # By rank, which is the order of a worker's rows in the batch.
        parts = [tf.io.parse_tensor(text.tobytes(), dtype) for text in texts.values()]
        leaves.append(tf.concat(parts, 0))
    return tf.nest.pack_sequence_as(example, leaves[:-1]), leaves[-1]
