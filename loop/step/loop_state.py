"""What the loop over the steps of a compiled call carries from step to step."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from loop.backends.base import PerReplica


class LoopState(NamedTuple):
    """The state of the loop over the steps of a compiled call."""

    # The step after the last one, within the epoch; int64 []. The last one counts even if it changed nothing.
    step: tf.Tensor
    going: tf.Tensor  # whether the call goes on; bool []
    # Whether the last step found the data at its end; bool []. (): the data isn't a stream, and its length is known.
    ended: tf.Tensor
    totals: tf.Tensor  # the totals of the steps that were made, without states; float64 [n]
    states: PerReplica  # the states of metrics in each replica; float64 [m]. (): no metric has a state.
    finite: tf.Tensor  # which numbers were finite in the last step; bool, in the order of `StepContext.checked`
