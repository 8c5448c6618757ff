"""The replica in which `compute` runs: what it can ask about the whole batch, its own rows in it, and random seeds.

Outside of a training or evaluation step there is one replica, which has the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import tensorflow as tf

from loop.backends.base import Backend
from loop.data import Rows, count
from loop.errors import UsageError
from loop.task import Batch

P = ParamSpec("P")
T = TypeVar("T")


class CollectiveNeededError(Exception):
    """Raised while tracing, if `compute` has a collective in it: replicas without rows must compute it, too."""


class Replica:
    """One replica in one (micro-)batch, while `compute` is traced.

    A replica without rows computes nothing, with two exceptions: `compute` has a collective in it, which all replicas
    must enter; or it changes random state, which must stay the same in all replicas. Then it computes an example that
    isn't its own, the stand-in, and its results count for nothing.

    Args:
        backend: the backend.
        rows: the replica's rows.
        seed: the seed of the run.
        most: the greatest number of rows of a (micro-)batch, over all replicas.
        phase: the index of this `minimize` within the step.

    Attributes:
        collective: whether there can be a collective in this trace.
        compiled: whether the options ask for XLA, on several replicas.
        problem: an error of this replica that is raised while tracing.
        batch: the rows that `compute` gets.
        counts_something: whether the replica has rows, bool []; None: it has rows, or computes nothing.
        fixed_rows: the number of rows that a batch must have; None: any number.
        draws: the number of the last seed that a random operation has got.
        received: the sums over all replicas that it has got.
    """

    def __init__(self, backend: Backend, rows: Rows, seed: int, most: int, phase: int = 0) -> None:
        self.backend = backend
        self.rows = rows
        self.seed = seed
        self._counts: tf.Tensor | None = None
        self.draws = phase << 10  # so that each `minimize` of a step has 1024 seeds of its own
        self._room = max(most, backend.replicas)  # if no replica has rows, each has a stand-in
        self.received: list[tf.Tensor] = []
        self.collective = True
        self.compiled = False
        self.problem: Exception | None = None
        self._graph = tf.compat.v1.get_default_graph()
        self.batch = rows.batch
        self.counts_something: tf.Tensor | None = None
        self.fixed_rows: int | None = None
        # A function, because most models don't ask for it: then the graph must have no operations for it.
        self._index: Callable[[], tf.Tensor] = lambda: rows.index

    def use_stand_in(self, stand_in: Batch | None, compiled: bool) -> None:
        """Computes examples that count for nothing where the replica has no rows.

        Args:
            stand_in: the examples, as a batch; None: such a replica computes nothing.
            compiled: whether XLA compiles the trace.
        """
        if stand_in is None:
            return
        rows = self.rows
        counts_something = self.count > 0
        stand_ins = tf.nest.flatten(stand_in)[0].shape[0] or 1
        self.counts_something = counts_something

        def first_rows(own: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
            end = tf.where(counts_something, self.count, stand_ins)
            return tf.concat([own, others], 0)[:end]

        # Selected in the graph: in another step, the replica of this trace may have rows.
        if compiled:  # XLA must know how many rows there are, which it wouldn't after a branch
            self.batch = tf.nest.map_structure(first_rows, rows.batch, stand_in)
            self._index = lambda: first_rows(rows.index, tf.zeros([stand_ins], tf.int64))
        else:
            self.batch = tf.cond(counts_something, lambda: rows.batch, lambda: stand_in)
            self._index = lambda: tf.cond(counts_something, lambda: rows.index, lambda: tf.zeros([stand_ins], tf.int64))

    @property
    def count(self) -> tf.Tensor:
        """How many rows the replica has: int64."""
        return count(self.rows.batch)

    @property
    def index(self) -> tf.Tensor:
        """The index of each example of `batch` within the epoch: int64 [n]; 0 for a stand-in."""
        return self._index()

    def fill_up(self, rows: int) -> None:
        """Repeats the last row of `batch` until it has this number of rows."""

        def filled(tensor: tf.Tensor) -> tf.Tensor:
            return tf.gather(tensor, tf.minimum(tf.range(rows), tf.shape(tensor)[0] - 1))

        # Now, and not in the lambda: `index` calls `_index`, which is replaced here.
        index = filled(self.index)
        self._index = lambda: index
        self.batch = tf.nest.map_structure(filled, self.batch)

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum over all replicas, through which gradients flow. A collective.

        Each replica differentiates its own part of the loss, and the parts of all replicas depend on this replica's
        tensor. So the gradient of the tensor is the sum of the gradients that all replicas have for the sum.
        """
        if not self.collective:
            raise self._noted(CollectiveNeededError())
        # From a function or a branch of the model's own, a collective doesn't meet those of the other replicas.
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise self._noted(
                UsageError(
                    "BatchNormalization or loop.all_gather() within a tf.function, a tf.cond or a loop of the model's "
                    "own can't reach the other replicas: take the @tf.function away (the whole step is compiled "
                    "anyway), or use sync_batch_norm=False"
                )
            )
        result = self._summed(tensor)
        self.received.append(result)
        return result

    def _summed(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.dtype.is_integer:  # there is no gradient of integers
            return self.backend.all_reduce([tensor])[0]

        @tf.custom_gradient
        def summed(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return self.backend.all_reduce([tensor])[0], lambda upstream: self.backend.all_reduce([upstream])[0]

        return summed(tensor)

    def _noted(self, problem: Exception) -> Exception:
        self.problem = problem  # TensorFlow and AutoGraph may raise another error in place of this one
        return problem

    def check_draws(self) -> None:
        """Refuses random numbers by row with XLA, whose generator gives other numbers than the graph's.

        Raises:
            UsageError: `compile="xla"` on several replicas.
        """
        if self.compiled:
            raise self._noted(
                UsageError(
                    f"compile='xla' on {self.backend.replicas} replicas: random layers (Dropout, noise) draw other "
                    "numbers in XLA than in the graph, so that the result would depend on the number of replicas: use "
                    "compile='graph', or one replica"
                )
            )

    def seed_of_draw(self) -> tf.Tensor:
        """A seed for the next random operation: int64 [2], from the run's seed, epoch, batch and operation's number."""
        # Each number has bits of its own (16 for the operation), so that no two draws of a run share a seed.
        self.draws += 1
        return tf.stack([(self.seed << 32) + self.rows.epoch, self.rows.number * (1 << 16) + self.draws])

    def table(self, row: tf.Tensor) -> tf.Tensor:
        """The vectors of all replicas, one row each: shape [replicas, size]. A collective."""
        # Each replica fills its own row, and the other rows with zeros: the sum over replicas has all rows.
        own = tf.one_hot(tf.cast(self.backend.replica(), tf.int32), self.backend.replicas, dtype=row.dtype)
        return self.sum(own[:, tf.newaxis] * row[tf.newaxis, :])

    @property
    def counts(self) -> tf.Tensor:
        """How many rows each replica has: int64 [replicas]; if none has any, one stand-in each. A collective."""
        # Not `functools.cached_property`: in Python 3.11 it holds one lock for all replicas, which wait for each other
        # in the collective.
        if self._counts is None:
            counts = self.table(tf.cast(self.count, tf.int64)[tf.newaxis])[:, 0]
            self._counts = tf.where(tf.reduce_sum(counts) == 0, tf.ones_like(counts), counts)
        return self._counts

    def first(self) -> tf.Tensor:
        """The index of this replica's first row in the gathered batch: int64 []. A collective."""
        counts = self.counts
        before = tf.reduce_sum(counts[: tf.cast(self.backend.replica(), tf.int32)])
        # After the last row there is only a stand-in, which counts for nothing. Its index must be valid nevertheless.
        return tf.minimum(before, tf.reduce_sum(counts) - 1)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """The rows of all replicas, in order. A collective."""
        counts = self.counts
        rank = tf.cast(self.backend.replica(), tf.int32)
        own = counts[rank]
        before = tf.reduce_sum(counts[:rank])
        fits = tf.debugging.assert_equal(
            count(tensor), count(self.batch), "loop.all_gather(x): x must have shape [n, ...]"
        )
        with tf.control_dependencies([fits]):
            tensor = tensor[:own]  # without the stand-in, if it is one
        # With zeros around each replica's rows, a sum is a concatenation: backends need no other collective. The sum
        # has the same shape in every step, as TensorFlow's collectives between workers require.
        after = self._room - before - own
        padding = tf.concat([[[before, after]], tf.zeros([tensor.shape.rank - 1, 2], tf.int64)], 0)
        padded = tf.ensure_shape(tf.pad(tensor, padding), [self._room, *tensor.shape[1:]])
        return self.sum(padded)[: tf.reduce_sum(counts)]


class TriedReplica(Replica):
    """A replica that only tries `compute`, before the step is traced: what it could warn of shows in the step."""


# Per thread, since the replicas of one process may be traced in threads of their own.
_here = threading.local()


def current() -> Replica | None:
    """The replica whose `compute` is being traced by this thread; None elsewhere."""
    return getattr(_here, "replica", None)


@contextlib.contextmanager
def within(replica: Replica) -> Iterator[Replica]:
    """Makes `replica` the current one."""
    before = current()
    _here.replica = replica
    try:
        yield replica
    finally:
        _here.replica = before


@tf.autograph.experimental.do_not_convert
def all_gather(x: tf.types.experimental.TensorLike) -> tf.Tensor:
    """The rows of the whole global batch, for a loss that looks at all examples at once; to be used in `compute`.

    Differentiable: a gradient with respect to what it returns reaches the replica that a row came from, as if one
    replica had computed the whole batch. With `accumulate`, the batch is the micro-batch, which doesn't depend on the
    number of replicas either.

    A contrastive loss, whose example i must find its own partner among all:

        everyone = loop.all_gather(embeddings)
        logits = tf.matmul(queries, everyone, transpose_b=True)
        labels = loop.first_row() + tf.range(tf.shape(queries)[0], dtype=tf.int64)

    Args:
        x: a number tensor of shape [n, ...], n being the rows of the batch that `compute` was handed.

    Returns:
        A tensor of the same dtype and of shape [rows of all replicas, ...], in the order of the global batch.

    Raises:
        UsageError: `x` is a scalar, or no numbers; or it is called in a `tf.function` or `tf.cond` of the model's own.
    """
    x = tf.convert_to_tensor(x)
    if x.shape.rank == 0 or x.dtype in (tf.bool, tf.string):
        numbers = "tf.strings.to_hash_bucket_fast(x, 2**62)" if x.dtype == tf.string else "numbers of shape [n, ...]"
        raise UsageError(f"loop.all_gather(x): x is {x.dtype.name}{x.shape}: give {numbers}")
    # Counted on one replica, too: `Trial` asks whether `compute` pairs examples on purpose.
    _here.gathers = all_gathers() + 1
    replica = current()
    if replica is None:
        return x
    if replica.backend.replicas > 1:
        return replica.gather(x)
    # Rows that fill up a batch belong to no example. A whole batch keeps its static shape.
    is_filled = replica.fixed_rows is not None and replica.batch is not replica.rows.batch
    return x[: replica.count] if is_filled else x


@tf.autograph.experimental.do_not_convert
def sum_over_batch(x: tf.Tensor) -> tf.Tensor:
    """The sum over the rows of the whole global batch: shape x.shape[1:]. No gradient flows through it."""
    _here.gathers = all_gathers() + 1
    replica = current()
    if replica is not None and replica.fixed_rows is not None:
        x = x[: replica.count]  # rows that fill up a batch belong to no example
    own = tf.reduce_sum(tf.stop_gradient(x), 0)
    if replica is None or replica.backend.replicas == 1:
        return own
    if replica.counts_something is not None:
        own = tf.where(replica.counts_something, own, tf.zeros_like(own))
    return replica.sum(own)


def all_gathers() -> int:
    """How often this thread has asked for what all replicas have, by `all_gather` or `sum_over_batch`."""
    return getattr(_here, "gathers", 0)


@tf.autograph.experimental.do_not_convert
def first_row() -> tf.Tensor:
    """The index of this replica's first row in what `all_gather` returns: int64; 0 on one replica."""
    replica = current()
    return tf.constant(0, tf.int64) if replica is None or replica.backend.replicas == 1 else replica.first()


@tf.autograph.experimental.do_not_convert
def example_seed(salt: int = 0) -> tf.Tensor:
    """A seed for each example of the batch, from the run's seed, the epoch and the example; to be used in `compute`.

    An augmentation that draws with it is the same with any number of replicas, from run to run, and after a resume:

        def flip(pair):
            image, seed = pair
            return tf.image.stateless_random_flip_left_right(image, seed)

        images = tf.map_fn(flip, (images, loop.example_seed()), fn_output_signature=images.dtype)

    Args:
        salt: a number from 0 to 65535; another one gives other seeds, for another use.

    Returns:
        int64 of shape [n, 2]: row i is the `seed` of `tf.random.stateless_*` for example i. No two examples of a run's
        epochs have the same.

    Raises:
        UsageError: the salt is no such number, or it isn't called within `compute`.
    """
    if not 0 <= salt < 1 << 16:
        raise UsageError(f"loop.example_seed({salt}): give a salt from 0 to 65535")
    replica = current()
    # Without a replica, `compute` is only tried: the values of the seeds don't matter, only their number.
    if replica is None:
        tried = getattr(_here, "tried", None)
        if tried is None:
            raise UsageError("loop.example_seed() belongs into compute(): elsewhere there are no examples")
        return tf.zeros([tried, 2], tf.int64)
    index = replica.index
    # It suffices that no two pairs are equal: TensorFlow scrambles them.
    epoch = tf.fill(tf.shape(index), (replica.seed << 32) + replica.rows.epoch)
    return tf.stack([epoch, index * (1 << 16) + salt], 1)


@contextlib.contextmanager
def probing(batch: Batch) -> Iterator[None]:
    """A context in which `compute` is tried on this batch, outside of any step."""
    _here.tried = int(count(batch))
    try:
        yield
    finally:
        del _here.tried


def as_in_replica(backend: Backend, compute: Callable[P, T]) -> Callable[P, T]:
    """`compute`, called anew as in a replica of a strategy if it fails outside of one, within `Backend.scope`.

    There alone TensorFlow has a gradient with respect to variables of which each replica has a copy.
    """

    @functools.wraps(compute)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return compute(*arguments, **named)
        except ValueError as error:
            # The cause is that of `GradientTape.jacobian`, which raises an error of its own.
            if not any("outside the replica context" in str(part) for part in (error, error.__cause__)):
                raise
        with backend.as_replica():
            return compute(*arguments, **named)

    return call
