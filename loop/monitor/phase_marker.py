"""Phase marker: what a worker does within a compiled call. The call notes it in a variable that other threads read."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

COMPUTE, DATA, ALL_REDUCE, HOST = 0, 1, 2, 3
"""The phases of a worker: three within a compiled call, and the host between calls."""


class PhaseMarker:
    """Adds marks to a graph, each of which notes the phase that starts there.

    Args:
        noted: whether this worker may have to wait for data or for others; if not, no mark is needed.
        timed: whether the marks also measure the time of each phase.
        replicas: the number of replicas; with one, a reduction counts as computing.
    """

    def __init__(self, noted: bool, timed: bool, replicas: int) -> None:
        self._replicas = replicas
        self._doing: tf.Variable | None = None  # the current phase
        self._clock: tf.Variable | None = None  # the seconds of each phase, and when the current one started
        with tf.device("CPU:0"):  # a variable on a GPU can't be read while the GPU computes
            if noted or timed:
                start = HOST if timed else COMPUTE
                self._doing = tf.Variable(start, trainable=False, dtype=tf.int64)
            if timed:
                self._clock = tf.Variable(tf.zeros([5], tf.float64), trainable=False)

    def at(self, phase: int, after: Sequence[tf.Tensor] | tf.Tensor = ()) -> list[tf.Operation]:
        """While tracing: marks the start of a phase, when the tensors in `after` have been computed."""
        if self._doing is None:
            return []
        with tf.control_dependencies(tf.nest.flatten(after)):
            if self._clock is None:
                return [self._doing.assign(phase)]
            was = self._doing.read_value()
        with tf.control_dependencies([was]):  # the time is read after `after`, when the phase before is over
            lap = tf.timestamp() - self._clock[-1]
        # Adds the lap to the phase before, and to the last element, which thereby becomes the time of now.
        spent = self._clock.assign_add(lap * tf.concat([tf.one_hot(was, HOST + 1, dtype=tf.float64), [1.0]], 0))
        with tf.control_dependencies([spent]):
            return [self._doing.assign(phase)]

    def lap(self, phase: int, after: Sequence[tf.Tensor] | tf.Tensor) -> None:
        """The same as `at`, for marks that only the measured time needs."""
        if self._clock is not None:
            self.at(phase, after)

    def doing(self) -> str:
        """The phase of the compiled call under way. Another thread may call it."""
        phase = COMPUTE if self._doing is None else int(self._doing.numpy())
        return {COMPUTE: "compute", DATA: "data", ALL_REDUCE: "all-reduce", HOST: "compute"}[phase]

    def laps(self) -> dict[str, float]:
        """The seconds of all compiled calls, by phase; {} if they aren't timed. Only between calls."""
        if self._clock is None:
            return {}
        compute, data, all_reduce = map(float, self._clock.numpy()[:HOST])
        if self._replicas == 1:
            compute += all_reduce
            all_reduce = 0.0
        return {"data": data, "compute": compute, "all_reduce": all_reduce}
