"""Forward and backward pass of one `minimize`: in each replica, sums over its own rows, and their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from loop.backends import devices
from loop.backends.base import PerReplica
from loop.data import ArraySource, Feed, Rows, count
from loop.errors import UsageError
from loop.model.variables import as_tf, losses
from loop.step import lookups, penalties
from loop.step.computing import RetraceError
from loop.step.context import StepContext
from loop.step.gradients import Gradient, each_row_once, weight_or_one
from loop.step.hints import warn_of_python
from loop.step.replica import Replica
from loop.step.tracing import as_written, repeated
from loop.task import Batch, Values

Sums: TypeAlias = tuple[list[Gradient], tf.Tensor, tf.Tensor]
"""Gradients, totals (without states), and the states of metrics."""

_SLOW_IN_LOOPS = ("MaxPoolGrad", "MaxPool3DGrad", "LRNGrad")
"""Operations that TensorFlow may fail to replace by those of oneDNN in a loop; see `ForwardPass._isolates`."""


class ForwardPass:
    """S, W and the gradients of S + W * sum(model.losses) of one `minimize`, in each replica, while it is traced.

    Args:
        context: what all traces share.
        values: a function of a batch, which returns what `compute` would.
        optimizer: the name that `minimize` was called with.
        feed: epoch, step, and what was read for the step.
        number: the index of this `minimize` within the step.
        by_lookup: the variables whose gradients are reduced by lookup. A variable whose gradient turns out to be
            dense is removed from it.
        in_block: whether the step is in a block, which XLA compiles as a whole.

    Attributes:
        connected: the indices of the variables that the loss depends on; known once the pass is traced.
    """

    def __init__(
        self,
        context: StepContext,
        values: Callable[[Batch], Values],
        optimizer: str,
        feed: Feed,
        number: int,
        by_lookup: dict[int, str],
        in_block: bool,
    ) -> None:
        self._context = context
        self._values = values
        self._optimizer = optimizer
        self._feed = feed
        self._number = number
        self._by_lookup = by_lookup
        self._in_block = in_block
        self._trained = context.trained_by(optimizer)
        self.connected: list[int] = []

    # In cross-replica context

    def sums(self) -> Sums:
        """The sums of each replica, over all micro-batches."""
        backend = self._context.backend
        batch_rows = self._batch_rows() if self._context.plan.summed_loss else ()
        # The first one stands outside of the loop over the others. Tracing it shows which variables are connected, and
        # so which gradients the loop adds up.
        first = backend.run(self._micro_batch, self._feed, tf.constant(0, tf.int64), batch_rows)
        return self._accumulated(first, batch_rows) if self._context.plan.accumulate > 1 else first

    def _batch_rows(self) -> PerReplica:
        """In each replica: the number of rows of the global batch, int64 []."""
        context = self._context
        return context.backend.run(lambda feed: context.computing.batch_rows(context.source, feed), self._feed)

    def _accumulated(self, sums: Sums, batch_rows: PerReplica) -> Sums:
        """Adds the sums of the other micro-batches to those of the first."""
        backend = self._context.backend

        def add(sums: Sums, others: Sums) -> Sums:
            return tf.nest.map_structure(tf.add, sums, others)

        def following(part: tf.Tensor, sums: Sums, parts: int) -> tuple[tf.Tensor, Sums]:
            """Adds the sums of `parts` more micro-batches, which don't wait for each other."""
            for _ in range(parts):
                sums = backend.run(add, sums, backend.run(self._micro_batch, self._feed, part, batch_rows))
                part += 1
            return part, sums

        left = self._context.plan.accumulate - 1
        together = min(self._parts_together(), left)
        # The micro-batches that don't fill an iteration follow after the loop, unrolled.
        end = tf.constant(1 + left - left % together, tf.int64)
        part, sums = repeated(
            lambda part, sums: part < end,
            lambda part, sums: following(part, sums, together),
            tf.constant(1, tf.int64),
            sums,
        )
        return following(part, sums, left % together)[1]

    def _parts_together(self) -> int:
        """The number of micro-batches in an iteration of the loop: several keep all devices of a replica busy."""
        context = self._context
        # Micro-batches that change variables, or enter collectives, must come one after the other.
        in_order = bool(context.state) or context.source in context.computing.computed_by_all
        if devices.per_replica() == 1 or in_order:
            return 1
        return 2 * devices.per_replica()

    # In each replica

    def _micro_batch(self, feed: Feed, part: tf.Tensor, batch_rows: tf.Tensor) -> Sums:
        """The replica's sums over one micro-batch.

        A replica without rows has zeros, and computes nothing, since few layers accept a batch of 0 rows. If all
        replicas must take part, it computes a stand-in instead: see `Replica`.
        """
        context = self._context
        computing = context.computing
        source = context.source
        parts = context.plan.accumulate
        rows = source.replica_rows(feed, context.backend.replica(), part, parts)

        def compute(rows: Rows, stand_in: Batch | None) -> Sums:
            return self._of_rows(rows, stand_in, part, batch_rows)

        # A function of its own, if XLA compiles this pass, or if the loop's graph would slow it down.
        if self._is_compiled():
            if context.backend.replicas == 1:
                # Known while tracing: how many numbers a random layer draws depends on it, and XLA must know how many.
                rows = rows._replace(first=0, kept=None)
            # A TPU takes known sizes alone. Without XLA the size stays open: by it, `row_random` recognizes draws that
            # have a number for each row.
            known_count = source.even_count(parts) if isinstance(source, ArraySource) else None
            rows = rows.of_count(known_count)
            compute = tf.function(compute, jit_compile=True, autograph=False)
        elif computing.is_isolated(source):
            compute = tf.function(compute, autograph=False, experimental_attributes={"_noinline": True})
        return computing.of_rows(source, rows, parts, lambda stand_in: compute(rows, stand_in), self._without_rows)

    def _is_compiled(self) -> bool:
        """Whether XLA compiles the forward and backward pass by itself."""
        # With blocks, XLA compiles many steps as a whole, and the steps outside of blocks are left to the graph.
        context = self._context
        return context.computing.compiles(context.source) and not context.plan.block_steps

    def _of_rows(self, rows: Rows, stand_in: Batch | None, part: tf.Tensor, batch_rows: tf.Tensor) -> Sums:
        """The gradients of S + W * sum(model.losses), the sums of all values, and what the metrics add up."""
        context = self._context
        plan = context.plan
        metric_sums = context.layout.minimized[self._optimizer]
        with context.computing.replica(context.source, rows, stand_in, plan.accumulate, self._number) as replica:
            # Forward pass: the values of `compute`, and the objective.
            with tf.GradientTape() as tape:
                with context.remat.tracing(self._in_block or self._is_compiled()):
                    values = as_written(self._values)(replica.batch)
                if context.observer is not None:
                    context.observer.values(self._optimizer, values, part)
                loss, sums = metric_sums.sums(values, plan.dtype)
                uneven = penalties.is_uneven(values)
                objective = self._objective(loss, sums[1], rows, batch_rows, replica, uneven)

            # Backward pass, within the replica: `compute` may have collectives, whose gradients are collectives, too.
            gradients = self._gradients(tape, objective, replica, part)

            # The number of the replica's own rows, of which a stand-in is none.
            totals = context.layout.of_replica(count(rows.batch), sums, plan.dtype)
            states = metric_sums.states(values)
            if replica.counts_something is not None:
                totals = tf.where(replica.counts_something, totals, 0)
                states = tf.where(replica.counts_something, states, 0)
        return gradients, totals, states

    def _objective(
        self, loss: tf.Tensor, weight: tf.Tensor, rows: Rows, batch_rows: tf.Tensor, replica: Replica, uneven: bool
    ) -> tf.Tensor:
        """The scalar that is differentiated: S + W * sum(model.losses).

        With a summed loss, which is never divided by W, the factor of the penalties is the share of the batch's rows:
        over all replicas these shares add up to 1.
        """
        plan = self._context.plan
        scale = self._context.scale
        objective = loss
        # Selected, not multiplied by 0: the loss of a stand-in may be nan.
        if replica.counts_something is not None:
            objective = tf.where(replica.counts_something, objective, 0)
            weight = tf.where(replica.counts_something, weight, 0)
        added = losses(self._context.built.model)
        if added:
            self._check_penalties()
            # Times the replica's W: after the division by the global W, the penalties count once in all.
            if plan.summed_loss:
                factor = self._share(rows, batch_rows)
            else:
                factor = self._weight_by_rows(weight, replica) if uneven else weight
            objective += factor * tf.add_n([_scalar(tf.cast(penalty, plan.dtype)) for penalty in added])
        # The scale comes before the backward pass: it keeps small gradients of activations above 0 in float16.
        if scale is not None:
            objective *= scale.scale
        if plan.divides_objective and not plan.summed_loss:
            objective /= weight_or_one(weight)
        return objective

    def _weight_by_rows(self, weight: tf.Tensor, replica: Replica) -> tf.Tensor:
        """The W of all replicas, times the replica's share of their rows. May be a collective.

        A penalty of activations is a mean over rows, whatever these weigh.
        """
        plan = self._context.plan
        reduced = plan.local_steps == 1 and not plan.adasum
        if self._context.backend.replicas == 1 or not reduced or not self._context.built.penalties.vary:
            return weight
        rows = tf.cast(replica.count, plan.dtype)
        total, rows_of_all = tf.unstack(replica.sum(tf.stack([weight, rows])))
        return total * tf.math.divide_no_nan(rows, rows_of_all)

    def _share(self, rows: Rows, batch_rows: tf.Tensor) -> tf.Tensor:
        """The share of these rows in those of the global batch, between 0 and 1."""
        dtype = self._context.plan.dtype
        return tf.math.divide_no_nan(tf.cast(count(rows.batch), dtype), tf.cast(batch_rows, dtype))

    def _gradients(
        self, tape: tf.GradientTape, objective: tf.Tensor, replica: Replica, part: tf.Tensor
    ) -> list[Gradient]:
        """The gradients of the connected variables, in the form in which replicas and micro-batches add them up."""
        context = self._context
        variables = as_tf(context.variables_at(self._trained))
        gradients = dict(zip(self._trained, context.backend.gradients(tape, objective, variables), strict=True))
        # In the order of the variables, the same on all workers, since gradients are reduced in this order.
        self.connected = [index for index, gradient in gradients.items() if gradient is not None]
        self._check_connected()
        warn_of_python()
        # Only now: whether the graph has such an operation shows when the backward pass is traced.
        if self._isolates(replica):
            replica.problem = RetraceError()
            raise replica.problem
        return [self._to_be_added(index, gradients[index], replica, part) for index in self.connected]

    def _to_be_added(self, index: int, gradient: Gradient, replica: Replica, part: tf.Tensor) -> Gradient:
        """A variable's gradient, in the form in which replicas and micro-batches add it up; 0 for a stand-in."""
        context = self._context
        has_rows = replica.counts_something
        if isinstance(gradient, tf.IndexedSlices):
            if index in self._by_lookup:
                return self._packed(index, gradient, replica, part)
            if index in context.plan.row_gradients:
                return each_row_once(gradient)
        self._by_lookup.pop(index, None)  # its gradient is dense after all
        gradient = tf.convert_to_tensor(gradient)
        gradient.set_shape(context.variables[index].shape)  # a sparse gradient loses its shape when it is made dense
        return gradient if has_rows is None else tf.where(has_rows, gradient, tf.zeros_like(gradient))

    def _packed(self, index: int, gradient: tf.IndexedSlices, replica: Replica, part: tf.Tensor) -> tf.Tensor:
        """A gradient by lookups; see `lookups.packed`."""
        context = self._context
        has_rows = replica.counts_something
        values = gradient.values if has_rows is None else tf.where(has_rows, gradient.values, 0)
        replicas = context.backend.replicas
        parts = context.plan.accumulate
        return lookups.packed(
            tf.IndexedSlices(values, gradient.indices),
            self._by_lookup[index],
            examples=count(replica.batch),
            most=-(-context.source.most_rows(parts) // replicas),
            place=part * replicas + tf.cast(context.backend.replica(), tf.int64),
            places=replicas * parts,
        )

    def _isolates(self, replica: Replica) -> bool:
        """Whether the forward and backward pass turns out to need a graph of its own to be fast.

        On a CPU, TensorFlow walks through the graph and replaces operations by those of oneDNN. It replaces some
        gradients only if it has reached the operation that they belong to before. The graph of a loop is a circle, in
        which the walk may reach the gradient first. Whether it does depends on the names in the graph; where it does, a
        small CNN has half of its speed.
        """
        computing = self._context.computing
        source = self._context.source
        if source in computing.isolated or not self._context.plan.may_isolate:
            return False
        # A graph of its own can have no collective. A replica without rows computes for their sake alone.
        if replica.received or source in computing.computed_by_all:
            return False
        operations = tf.compat.v1.get_default_graph().get_operations()
        types = {operation.type for operation in operations}
        if types.isdisjoint(_SLOW_IN_LOOPS):
            return False
        computing.isolated.add(source)
        return True

    def _without_rows(self) -> Sums:
        """The sums of a replica without rows: zeros."""
        context = self._context
        variables = as_tf(context.variables)
        zeros = []
        for index in self.connected:
            # Both branches of a replica's `tf.cond` must return tensors of the same kinds; see `Computing.of_rows`.
            make_zeros = lookups.nothing if index in self._by_lookup else tf.zeros
            zeros.append(make_zeros(variables[index].shape, variables[index].dtype))
        return zeros, *context.layout.no_rows(self._optimizer, context.plan.dtype)

    def _check_connected(self) -> None:
        """Refuses a loss that depends on no trained variable; warns of variables that it doesn't depend on."""
        names = self._context.names
        unconnected = [names[index] for index in self._trained if index not in self.connected]
        if len(unconnected) == len(self._trained):
            raise UsageError(
                "the loss depends on no variable of the model: compute() must return a loss that is made from "
                "model(...) by differentiable operations (no argmax, no .numpy(), no tf.cast to an integer)"
            )
        if unconnected:
            warnings.warn(f"the loss doesn't depend on {', '.join(unconnected)}: not trained", stacklevel=2)

    def _check_penalties(self) -> None:
        """Refuses penalties that are sums over rows, if a replica or a micro-batch has only some of the rows."""
        replicas = self._context.backend.replicas
        parts = self._context.plan.accumulate
        if self._context.built.penalties.grow and (replicas > 1 or parts > 1):
            raise UsageError(
                "a loss that the model adds (add_loss, model.losses) is a sum over the examples of a batch: of "
                f"{replicas} replica(s) with accumulate={parts}, each knows the sum of its own "
                "rows alone. Make it a mean over the examples, as by tf.reduce_mean(...); or a value of each example, "
                'added to the "loss" of compute()'
            )


def _scalar(penalty: tf.Tensor) -> tf.Tensor:
    """The sum of a penalty, as in Keras. A vector would make the objective one, with the loss in each element."""
    return penalty if penalty.shape.rank == 0 else tf.reduce_sum(penalty)
