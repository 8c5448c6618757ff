"""Random numbers that don't depend on the number of replicas: each replica draws those of its own rows.

TensorFlow's stateless operations read a stream of numbers (Philox, which is counter-based) from its beginning: each
replica would draw the same numbers, and make the same dropout mask. Here a replica whose rows start at row k of the
batch starts k rows later in the stream. So together the replicas draw what one replica alone would draw.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from loop.model.variables import layers
from loop.step.replica import current

_PHILOX = 1


def by_row() -> None:
    """Lets `tf.random.stateless_uniform`, `stateless_normal` and stateless dropout draw by row within `compute`.

    Keras's layers draw with them. Elsewhere they don't change, nor for a shape that is known while tracing: the size of
    the batch isn't known then, so a shape of unknown size is taken to have the batch as its first axis. If the model
    takes batches of one size alone, a first axis of that size is taken for the batch, too.
    """
    for space in (tf, tf.compat.v2):  # Keras 3 uses the first module, tf_keras the second
        if not hasattr(space.random.stateless_uniform, "by_row"):
            space.random.stateless_uniform = _by_row(space.random.stateless_uniform, uniform)
            space.random.stateless_normal = _by_row(space.random.stateless_normal, normal)
            space.nn.experimental.stateless_dropout = _dropout(space.nn.experimental.stateless_dropout)


def reseed(model: Any) -> None:
    """Gives the random layers of a `tf_keras` model seeds of the run within `compute`: see `Replica.seed_of_draw`.

    Their own seeds come from generators that aren't in checkpoints, and of which each replica has its own.
    """
    for layer in layers(model):
        generator: Any = getattr(layer, "_random_generator", None)
        if hasattr(generator, "make_seed_for_stateless_op"):
            for name in ("dropout", "random_normal", "random_uniform", "truncated_normal"):
                setattr(generator, name, functools.partial(_with_our_seed, generator, name))


def _with_our_seed(generator: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    draw = getattr(type(generator), name)
    replica = current()
    if replica is None:
        return draw(generator, *args, **kwargs)
    kind = generator._rng_type
    generator._rng_type = generator.RNG_STATELESS
    generator.make_seed_for_stateless_op = replica.seed_of_draw
    try:
        return draw(generator, *args, **kwargs)
    finally:
        generator._rng_type = kind
        del generator.make_seed_for_stateless_op


def _by_row(original: Any, draw: Any) -> Any:
    @functools.wraps(original)
    def function(shape: Any, seed: Any, *args: Any, **kwargs: Any) -> Any:
        replica = current()
        known = tf.get_static_value(tf.convert_to_tensor(shape, tf.int32))
        if replica is None or (known is not None and not (known.size and known[0] == replica.fixed_rows)):
            return original(shape, seed, *args, **kwargs)
        replica.check_draws()
        return draw(shape, seed, *args, **kwargs)

    function.by_row = True  # type: ignore[attr-defined]
    return function


def _dropout(original: Any) -> Any:
    @functools.wraps(original)
    def function(
        x: Any, rate: Any, seed: Any, rng_alg: Any = "auto_select", noise_shape: Any = None, name: Any = None
    ) -> Any:
        def sampler(shape: Any, dtype: Any) -> tf.Tensor:
            return tf.random.stateless_uniform(shape, seed, dtype=dtype)

        if current() is None:
            return original(x, rate, seed, rng_alg, noise_shape, name)
        return tf.nn.experimental.general_dropout(x, rate, sampler, noise_shape, name)

    return function


def uniform(
    shape: Any, seed: Any, minval: Any = 0, maxval: Any = None, dtype: Any = tf.float32, name: Any = None, alg: Any = ""
) -> tf.Tensor:
    """`tf.random.stateless_uniform` by row; see `by_row`."""
    dtype = tf.as_dtype(dtype)
    if dtype.is_floating:
        low = tf.cast(minval, dtype)
        high = tf.cast(1 if maxval is None else maxval, dtype)
        return _draw(tf.raw_ops.StatelessRandomUniformV2, shape, seed, dtype.size, dtype=dtype) * (high - low) + low
    if maxval is None:
        return _draw(tf.raw_ops.StatelessRandomUniformFullIntV2, shape, seed, dtype.size, dtype=dtype)
    low = tf.cast(minval, dtype)
    high = tf.cast(maxval, dtype)
    return _draw(tf.raw_ops.StatelessRandomUniformIntV2, shape, seed, dtype.size, minval=low, maxval=high)


def normal(
    shape: Any, seed: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = tf.float32, name: Any = None, alg: Any = ""
) -> tf.Tensor:
    """`tf.random.stateless_normal` by row; see `by_row`."""
    dtype = tf.as_dtype(dtype)
    drawn = _draw(tf.raw_ops.StatelessRandomNormalV2, shape, seed, dtype.size, dtype=dtype)
    return drawn * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def _draw(operation: Any, shape: Any, seed: Any, bytes_each: int, **arguments: Any) -> tf.Tensor:
    """The replica's share of one draw: its rows are a part of the stream, since the batch is the outermost axis."""
    replica = current()
    assert replica is not None
    shape = tf.cast(shape, tf.int64)
    size = tf.reduce_prod(shape)
    rows = tf.shape(tf.nest.flatten(replica.batch)[0], out_type=tf.int64)[0]
    first = size // tf.maximum(rows, 1) * replica.rows.first
    per_state = 2 if bytes_each == 8 else 4  # how many numbers a state of the counter gives
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    counter += tf.cast(tf.stack([first // per_state, 0]), tf.uint64)
    # The first number may lie within a state: those before it are drawn, too, and dropped.
    ahead = first % per_state
    drawn = operation(shape=[size + ahead], key=key, counter=counter, alg=_PHILOX, **arguments)
    return tf.reshape(drawn[ahead:], shape)
