"""What a worker is at within a compiled call, and for how long: noted by the call itself, read by other threads."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

COMPUTE, DATA, ALL_REDUCE, HOST = 0, 1, 2, 3
"""What a worker is at within a compiled call, or outside of it."""


class PhaseMarker:
    """Notes places in a graph.

    Args:
        noted: whether this worker can ever wait; if not, nothing is added to the graph.
        timed: whether it is to measure for how long, too.
        replicas: how many there are; with one, a reduction counts as computing.
    """

    def __init__(self, noted: bool, timed: bool, replicas: int) -> None:
        self._replicas = replicas
        self._doing: tf.Variable | None = None
        # Seconds at each place, and when the last one was reached.
        self._clock: tf.Variable | None = None
        with tf.device("CPU:0"):
            if noted or timed:
                self._doing = tf.Variable(HOST if timed else COMPUTE, trainable=False, dtype=tf.int64)
            if timed:
                self._clock = tf.Variable(tf.zeros([5], tf.float64), trainable=False)

    def at(self, place: int, after: Any = ()) -> list[tf.Operation]:
        """While tracing: notes what this worker is at, once the tensors in `after` are there."""
        if self._doing is None:
            return []
        with tf.control_dependencies(tf.nest.flatten(after)):
            if self._clock is None:
                return [self._doing.assign(place)]
            was = self._doing.read_value()
        with tf.control_dependencies([was]):
            lap = tf.timestamp() - self._clock[-1]
        # The lap to what it was at, and to the time at which that was reached.
        spent = self._clock.assign_add(lap * tf.concat([tf.one_hot(was, HOST + 1, dtype=tf.float64), [1.0]], 0))
        with tf.control_dependencies([spent]):
            return [self._doing.assign(place)]

    def lap(self, place: int, after: Any) -> None:
        """The same, where only the time matters."""
        if self._clock is not None:
            self.at(place, after)

    def doing(self) -> str:
        """What this worker is at, while a compiled call is under way; to be asked from another thread."""
        place = COMPUTE if self._doing is None else int(self._doing.numpy())
        return {COMPUTE: "compute", DATA: "data", ALL_REDUCE: "all-reduce", HOST: "compute"}[place]

    def laps(self) -> dict[str, float]:
        """Seconds of all compiled calls by what this worker was at; between calls, and only where they are timed."""
        if self._clock is None:
            return {}
        compute, data, all_reduce = (float(seconds) for seconds in self._clock.numpy()[:HOST])
        if self._replicas == 1:
            compute, all_reduce = compute + all_reduce, 0.0
        return {"data": data, "compute": compute, "all_reduce": all_reduce}
