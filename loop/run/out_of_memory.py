"""Out of memory: converts the error of a step into one that says what takes the memory, and what saves it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import tensorflow as tf

from callbacks.formats import size
from loop.errors import OUT_OF_MEMORY, OutOfMemoryError, message_of
from loop.model.variables import as_tf, bytes_of, model_variables, optimizer_variables, trainable_variables
from loop.task import target_of

if TYPE_CHECKING:
    from loop.run.run import Run

# `ResourceExhaustedError` is also raised for a message that is too long: its text must have one of these.
_SIGNS = re.compile("OOM|out of memory|allocat")


def translated(run: Run, error: BaseException) -> OutOfMemoryError | None:
    """The error to raise instead of what has ended the run, if a step had too little memory; else None."""
    # A MemoryError is about memory of the host, for example when arrays are read.
    exhausted = isinstance(error, tf.errors.ResourceExhaustedError) and _SIGNS.search(str(error))
    if not (exhausted or isinstance(error, MemoryError)):
        return None
    why = message_of(error)
    target = target_of(run.task) or "TARGET"
    return OutOfMemoryError(
        f"{OUT_OF_MEMORY} {run.progress.step + 1:,}, with a batch of {run.options['batch_size']:,}: {why}. "
        f"Whatever the batch is, {_taken(run)}. Use remat, accumulate, shard_optimizer or a smaller batch: "
        f"`tfloop memory {target}` says what each of them needs"
    )


def _taken(run: Run) -> str:
    """What variables take in each replica, in words."""
    weights = size(bytes_of(model_variables(run.model)))
    gradients = size(bytes_of(as_tf(trainable_variables(run.model))))
    averages = run.step.averages.variables if run.session.has_step else []  # else it was the averages that didn't fit
    state = size(bytes_of(optimizer_variables(run.optimizer) + averages))
    return f"weights take {weights}, gradients {gradients}, and the optimizer's state {state}"
