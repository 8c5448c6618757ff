"""The initial values of variables in `multiworker`, which TensorFlow sends from the chief to the other workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

SENT = frozenset((tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64))
"""The types that TensorFlow's collectives between workers broadcast."""


def allow_any_type(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Lets this strategy make variables of each type: those that it can't send start with each worker's own value.

    As with Horovod, `BroadcastVariables` gives all workers the chief's values before the first step.
    """
    extended = strategy.extended
    send = extended._get_variable_creator_initial_value

    def initial_value(replica_id: int, **arguments: object) -> Callable[[], tf.Tensor] | object:
        # Replicas of this worker but the first one copy its value.
        if replica_id > 0 or arguments.get("dtype") in SENT:
            return send(replica_id=replica_id, **arguments)
        return lambda: _own_or_sent(send, arguments)

    extended._get_variable_creator_initial_value = initial_value
    return strategy


def _own_or_sent(send: Callable[..., Callable[[], tf.Tensor]], arguments: Mapping[str, object]) -> tf.Tensor:
    """The first value of a variable, which alone may tell its type."""
    with tf.device(arguments["device"]):
        given = arguments["initial_value"]
        if callable(given):
            given = given()
        value = tf.convert_to_tensor(given, arguments.get("dtype"))
    if value.dtype not in SENT:
        return value
    return send(replica_id=0, **{**arguments, "initial_value": value})()
