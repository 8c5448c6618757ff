"""Random numbers that don't depend on the number of replicas: each replica draws those of its own rows.

TensorFlow's stateless operations read a stream of numbers from its beginning. (It is that of Philox, a generator based
on a counter, which can start anywhere.) Each replica would draw the same numbers, and make the same dropout mask. Here
a replica whose rows start at row k of the batch starts k rows later in the stream. So together the replicas draw what
one replica alone would draw.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from tensorflow.python.framework import tensor_util  # there is no public way to ask which sizes of a shape are known

from loop.data import count
from loop.errors import ReplicaWarning, UsageError
from loop.model.variables import layers
from loop.step.dropout import replace_dropout
from loop.step.replica import TriedReplica, current
from loop.task import Model

Shape: TypeAlias = tf.Tensor | tf.TensorShape | Sequence[int | tf.Tensor]
Seed: TypeAlias = tf.Tensor | Sequence[int]
"""Two integers."""
Number: TypeAlias = tf.Tensor | float
Draw: TypeAlias = Callable[..., tf.Tensor]
"""A function of TensorFlow that draws random numbers, or one with the same arguments."""

_PHILOX = 1
"""The number of the algorithm in TensorFlow."""

_NOT_BY_ROW = ("truncated_normal", "gamma", "binomial", "poisson", "categorical")
"""What can't be drawn by row: how far a draw goes in the stream depends on what it draws."""
_DRAW = (
    "Draw by `normal`, `uniform` or dropout, with the examples as the first axis; or in compute(), for each example "
    "with a seed of loop.example_seed()"
)
"""What to do instead."""
_CHOOSE = (
    "Choose tf.argmax(logits - tf.math.log(-tf.math.log(u)), -1), with u = keras.random.uniform(tf.shape(logits), "
    "seed=...), whose categories have the same probabilities"
)
"""The same of categories: the Gumbel-max trick (Maddison et al., 2014)."""


def by_row() -> None:
    """Lets `tf.random.stateless_uniform`, `stateless_normal` and stateless dropout draw by row within `compute`.

    Keras's layers draw with these functions. Outside of `compute` they don't change, nor does a draw whose shape is
    known while tracing. The number of rows isn't known then, so a shape that isn't known is taken to have the batch as
    its first axis. If the model takes batches of one size alone, a first axis of that size is taken for the batch, too.
    """
    for module in (tf, tf.compat.v2):  # Keras 3 uses the first one, tf_keras the second one
        if not hasattr(module.random.stateless_uniform, "by_row"):
            module.random.stateless_uniform = _by_row(module.random.stateless_uniform, uniform)
            module.random.stateless_normal = _by_row(module.random.stateless_normal, normal)
            for name in _NOT_BY_ROW:
                setattr(module.random, f"stateless_{name}", _warning(getattr(module.random, f"stateless_{name}"), name))
    shuffle = keras.src.backend.random.shuffle
    if not hasattr(shuffle, "by_row"):
        keras.src.backend.random.shuffle = _warning_of_shuffle(shuffle)
        keras.layers.Equalization.transform_images = _warning_of_equalization(
            keras.layers.Equalization.transform_images
        )
    replace_dropout()


def reseed(model: Model) -> None:
    """Gives the random layers of a `tf_keras` model seeds of the run within `compute`: see `Replica.seed_of_draw`."""
    # Their own seeds come from generators that aren't in checkpoints, and that differ between replicas.
    for layer in layers(model):
        generator: Any = getattr(layer, "_random_generator", None)
        if hasattr(generator, "make_seed_for_stateless_op"):
            for name in ("dropout", "random_normal", "random_uniform", "truncated_normal"):
                setattr(generator, name, functools.partial(_with_seed_of_run, generator, name))


def _with_seed_of_run(generator: Any, name: str, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Draws with a generator of tf_keras, but with a seed of the run."""
    draw = getattr(type(generator), name)
    replica = current()
    if replica is None:
        return draw(generator, *args, **kwargs)
    # For this draw alone: outside of `compute`, the generator draws as tf_keras has it.
    own_type = generator._rng_type
    generator._rng_type = generator.RNG_STATELESS
    generator.make_seed_for_stateless_op = replica.seed_of_draw
    try:
        return draw(generator, *args, **kwargs)
    finally:
        generator._rng_type = own_type
        del generator.make_seed_for_stateless_op


def _by_row(original: Draw, draw: Draw) -> Draw:
    """A function that calls `draw` where numbers are to be drawn by row, and `original` elsewhere."""

    @functools.wraps(original)
    def function(shape: Shape, seed: Seed, *args: Any, **kwargs: Any) -> tf.Tensor:
        replica = current()
        known = tf.get_static_value(tf.convert_to_tensor(shape, tf.int32))
        if replica is None:
            return original(shape, seed, *args, **kwargs)
        if known is not None and not (known.size and known[0] == replica.fixed_rows):  # the first axis isn't the batch
            return original(shape, seed, *args, **kwargs)
        # One replica that XLA compiles: TensorFlow's own function draws the same, and XLA finds how many numbers.
        if isinstance(replica.rows.first, int) and replica.rows.kept is None:
            return original(shape, seed, *args, **kwargs)
        replica.check_draws()
        sizes = _known_sizes(shape)
        if known is None and sizes and sizes[0] not in (None, 1):
            _warn(f"draw random numbers of shape {sizes}, whose first axis isn't that of the examples", _DRAW)
        return draw(shape, seed, *args, **kwargs)

    function.by_row = True  # type: ignore[attr-defined]
    return function


def _warning(original: Draw, name: str) -> Draw:
    """A function that draws as `original` does, and warns where it draws numbers for each example."""

    @functools.wraps(original)
    def function(*args: object, **kwargs: object) -> tf.Tensor:
        # The shape of what is drawn; of categories, their logits.
        given = args[0] if args else kwargs.get("shape", kwargs.get("logits"))
        if current() is not None:
            shape = tf.shape(given) if name == "categorical" else given
            sizes = _known_sizes(shape)
            if _has_rows(sizes):
                fix = _CHOOSE if name == "categorical" else _DRAW
                _warn(f"draw random numbers for each example by `{name}`, which can't be drawn by row", fix)
        return original(*args, **kwargs)

    return function


def _warning_of_shuffle(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Keras's `random.shuffle`, which warns where it mixes the examples of a batch."""

    @functools.wraps(original)
    def shuffle(x: tf.Tensor, axis: int = 0, seed: object = None) -> tf.Tensor:
        if current() is not None and _has_rows([tf.convert_to_tensor(x).shape[axis]]):
            _warn("mix the examples of a batch by `keras.random.shuffle`", "Mix them in train_data()")
        return original(x, axis=axis, seed=seed)

    shuffle.by_row = True  # type: ignore[attr-defined]
    return shuffle


def _warning_of_equalization(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """A method of Keras's `Equalization`, which warns where it makes one histogram of all images of a batch.

    A trial of a few batches may not show it: `RandAugment` draws whether it equalizes.
    """

    @functools.wraps(original)
    def transform_images(
        self: keras.layers.Layer, images: tf.Tensor, transformation: object, training: bool = True
    ) -> tf.Tensor:
        if training and current() is not None and _has_rows([tf.convert_to_tensor(images).shape[0]]):
            _warn("equalize the images of a batch as one, as `RandAugment` does", "Equalize each one in train_data()")
        return original(self, images, transformation, training)

    return transform_images


def _known_sizes(shape: Shape) -> list[int | None]:
    """The sizes of a shape, None for each that isn't known while tracing; [] if their number isn't known."""
    known = tensor_util.constant_value_as_shape(tf.convert_to_tensor(shape, tf.int32))
    return [] if known.rank is None else known.as_list()


def _has_rows(sizes: Sequence[int | None]) -> bool:
    """Whether one of these sizes may be the number of rows."""
    replica = current()
    return None in sizes or (replica is not None and replica.fixed_rows in sizes[:1])


def _warn(what: str, fix: str) -> None:
    """Warns of what layers do, on several replicas."""
    replica = current()
    if isinstance(replica, TriedReplica):
        raise UsageError(f"layers {what}")  # ends the trial: the step warns of it
    if replica is not None and replica.backend.replicas > 1:
        warnings.warn(
            f"layers {what}: each of {replica.backend.replicas} replicas has only its own examples, so that the "
            f"numbers depend on the number of replicas. {fix}",
            ReplicaWarning,
            stacklevel=2,
        )


def uniform(
    shape: Shape,
    seed: Seed,
    minval: Number = 0,
    maxval: Number | None = None,
    dtype: tf.DType = tf.float32,
    name: str | None = None,
    alg: str = "",
) -> tf.Tensor:
    """`tf.random.stateless_uniform` by row; see `by_row`."""
    dtype = tf.as_dtype(dtype)
    # As in TensorFlow's own function, with which one replica draws: the bits must be the same.
    if dtype.is_floating:
        drawn = _draw(tf.raw_ops.StatelessRandomUniformV2, shape, seed, dtype.size, dtype=dtype)
        if _is_number(minval, 0) and (maxval is None or _is_number(maxval, 1)):
            return drawn  # as of dropout, which draws as many numbers as there are activations
        # Not `tf.cast`, which would round a Python number to 32 bits first.
        low = tf.convert_to_tensor(minval, dtype)
        high = tf.convert_to_tensor(1 if maxval is None else maxval, dtype)
        return drawn * (high - low) + low
    if maxval is None:
        return _draw(tf.raw_ops.StatelessRandomUniformFullIntV2, shape, seed, dtype.size, dtype=dtype)
    low = tf.convert_to_tensor(minval, dtype)
    high = tf.convert_to_tensor(maxval, dtype)
    return _draw(tf.raw_ops.StatelessRandomUniformIntV2, shape, seed, dtype.size, minval=low, maxval=high)


def _is_number(value: Number, number: int) -> bool:
    """Whether a value is known to be this number."""
    return isinstance(value, int | float) and value == number


def normal(
    shape: Shape,
    seed: Seed,
    mean: Number = 0.0,
    stddev: Number = 1.0,
    dtype: tf.DType = tf.float32,
    name: str | None = None,
    alg: str = "",
) -> tf.Tensor:
    """`tf.random.stateless_normal` by row; see `by_row`."""
    dtype = tf.as_dtype(dtype)
    drawn = _draw(tf.raw_ops.StatelessRandomNormalV2, shape, seed, dtype.size, dtype=dtype)
    return drawn * tf.convert_to_tensor(stddev, dtype) + tf.convert_to_tensor(mean, dtype)


def _draw(operation: Draw, shape: Shape, seed: Seed, bytes_each: int, **arguments: Any) -> tf.Tensor:
    """The replica's share of one draw.

    The batch is the outermost axis, so the numbers of the replica's rows stand side by side in the stream, after those
    of all rows before its first one.

    Args:
        operation: draws from a stream.
        shape: the shape of the replica's share; the first axis is its rows.
        seed: the seed of the stream.
        bytes_each: the size of a number, in bytes.
        **arguments: further arguments of the operation.
    """
    replica = current()
    assert replica is not None
    operation = functools.partial(operation, **arguments)
    shape = tf.cast(shape, tf.int64)
    size = tf.reduce_prod(shape)
    rows = count(replica.batch)
    row_size = size // tf.maximum(rows, 1)
    first = row_size * replica.rows.first
    if replica.rows.kept is None:
        return tf.reshape(_stretch(operation, first, size, seed, bytes_each), shape)

    # Rows that were left out keep their numbers in the stream: no worker knows how many of them others have.
    places = tf.where(replica.rows.kept)[:, 0]
    shared_out = tf.size(replica.rows.kept, tf.int64)
    added = rows - tf.size(places, tf.int64)  # a stand-in, or rows that fill up a batch, which belong to no example
    places = tf.concat([places, shared_out + tf.range(added)], 0)
    drawn = _stretch(operation, first, row_size * (shared_out + added), seed, bytes_each)
    return tf.reshape(tf.gather(tf.reshape(drawn, [shared_out + added, row_size]), places), shape)


def _stretch(operation: Draw, first: tf.Tensor, size: tf.Tensor, seed: Seed, bytes_each: int) -> tf.Tensor:
    """Some numbers of a stream, from the one of number `first` on."""
    # The counter jumps there. It counts states, each of which gives several numbers.
    per_state = 2 if bytes_each == 8 else 4
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    counter += tf.cast(tf.stack([first // per_state, 0]), tf.uint64)
    # The first number may lie within a state. The numbers before it are drawn, too, and dropped.
    ahead = first % per_state
    drawn = operation(shape=[size + ahead], key=key, counter=counter, alg=_PHILOX)
    return drawn[ahead:]
