"""The mathematics of one step, while it is traced.

In each replica, S = sum(loss * weight) and W = sum(weight). The gradients of S + W * sum(model.losses), S, W and the
sums of all other values travel in one fused all-reduce(SUM). What follows is done once, on the reduced values: check
that all is finite, divide by the global W, clip, apply. A replica without data contributes zeros. So the result depends
on the number of replicas only by the order in which floats are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import tensorflow as tf

from loop.backends.base import PerReplica
from loop.data import Feed
from loop.errors import UsageError
from loop.monitor.phase_marker import ALL_REDUCE, COMPUTE, PhaseMarker
from loop.step import communication, lookups, totals
from loop.step.context import StepContext
from loop.step.forward import ForwardPass
from loop.step.gradients import Gradient, are_finite, clipped, content, divided, weight_or_one
from loop.step.loop_state import LoopState
from loop.step.totals import EXAMPLES, SUMS, WEIGHT
from loop.step.tracing import as_written
from loop.step.variable_values import assign_values, put_back_unless, read_values
from loop.task import Batch, Values


class StepTrace:
    """One step while it is traced: the argument `step` of `TrainTask.train_step`; made anew for each trace.

    Args:
        context: what all traces share.
        feed: epoch, step, and what was read for the step.
        state: the state of the loop before the step.
        counted: whether the loop makes a fixed number of steps. Those after one that ends the call change nothing.

    Attributes:
        changes: tensors that are there when the step has changed variables.
    """

    in_block: ClassVar[bool] = False

    def __init__(self, context: StepContext, feed: Feed, state: LoopState, counted: bool) -> None:
        self._context = context
        self._marker = context.marker
        self._feed = feed
        self._state = state
        self._counted = counted
        # Read before the forward pass changes these variables: a bad step gives them back their old values.
        self._model_state: PerReplica = []
        if context.state:
            self._model_state = context.backend.run(lambda: list(map(tf.convert_to_tensor, context.state)))
        self._graph = tf.compat.v1.get_default_graph()
        # A copy for this trace: `ForwardPass` removes each variable whose gradient turns out to be dense.
        self._by_lookup = dict(context.plan.lookups)
        self._minimizes = 0
        self.changes: list[tf.Tensor] = []
        self._sums: dict[str, tf.Tensor] = {}
        self._states: dict[str, PerReplica] = {}
        self._finite: dict[str, tf.Tensor] = {}

    def make(self) -> LoopState:
        """Traces the step; returns the state of the loop after it."""
        as_written(self._context.task.train_step)(self._context.built.model, self)
        return self._finish()

    @tf.autograph.experimental.do_not_convert
    def minimize(self, values: Callable[[Batch], Values], optimizer: str = "") -> dict[str, tf.Tensor]:
        """One optimizer step, from the values of the global batch; to be called in `TrainTask.train_step`.

        Args:
            values: a function of a batch, which returns what `compute` would.
            optimizer: the name of one of several optimizers, which makes the step alone; "": all of them make it, each
                for its variables.

        Returns:
            The means of the values over the global batch, by name: scalar tensors.
        """
        backend = self._context.backend
        self._check_graph()
        forward = ForwardPass(
            self._context, values, optimizer, self._feed, self._minimizes, self._by_lookup, self.in_block
        )
        self._minimizes += 1  # by this number, each `minimize` of a step gets random seeds of its own

        # Forward and backward pass: each replica by itself.
        gradients, sums, states = forward.sums()

        # Reduce, check, divide, clip: each replica computes the same numbers.
        self._marker.at(ALL_REDUCE, backend.first(gradients))
        gradients, sums, checked = backend.run(
            lambda gradients, sums: self._reduced_to_clipped(forward, optimizer, gradients, sums), gradients, sums
        )
        sums = backend.first(sums)
        applies, finite = backend.first(checked)
        self._marker.at(COMPUTE, sums)

        # Apply, unless a number isn't finite, or all weights are 0.
        self._when(
            self._still_applies(applies),
            lambda: backend.run(lambda gradients: self._apply(forward, optimizer, gradients), gradients),
            self._context.changed_by(optimizer),
        )
        return self._counted_in(optimizer, sums, states, finite)

    def _check_graph(self) -> None:
        """Refuses a `minimize` within a branch or a loop of the task's own."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise self._context.computing.fail(
                UsageError(
                    "step.minimize() within tf.cond, tf.while_loop, or an `if` or `for` over a tensor: call it as "
                    "often in each step, and multiply the loss or the weight by 0 where it shall do nothing"
                )
            )

    # In each replica

    def _reduced_to_clipped(
        self, forward: ForwardPass, optimizer: str, gradients: list[Gradient], sums: tf.Tensor
    ) -> tuple[list[Gradient], tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
        """The gradients as the optimizer gets them, the sums of the global batch, and the result of `_checked`."""
        context = self._context
        plan = context.plan
        gradients, sums = self._reduced(forward, gradients, sums)
        # Checked before it is divided: with a weight of 0, the quotient wouldn't show that the sum is infinite.
        checked = self._checked(forward, optimizer, gradients, sums[SUMS], sums[WEIGHT])
        if plan.divides_gradients:
            gradients = self._divided(gradients, sums)
        gradients = clipped(gradients, plan.clip_norm, plan.clip_value, by_lookup=bool(self._by_lookup))
        if context.observer is not None:
            context.observer.gradients(dict(zip(forward.connected, gradients, strict=True)))
        return gradients, sums, checked

    def _reduced(
        self, forward: ForwardPass, gradients: list[Gradient], sums: tf.Tensor
    ) -> tuple[list[Gradient], tf.Tensor]:
        """The gradients and the sums of the global batch; with local steps, those of the replica's own rows."""
        plan = self._context.plan
        backend = self._context.backend
        if plan.adasum:
            # Adasum combines the gradients of each replica's own mean, which are not to be divided any more.
            gradients = backend.adasum(self._divided(gradients, sums))
            sums = backend.all_reduce([sums])[0]
        elif plan.local_steps == 1:
            gradients, sums = self._added_up(forward, gradients, sums)
        if plan.summed_loss:
            sums = totals.weighed_by_rows(sums)

        # After the reduction, not before: only the packed form can be added up over replicas.
        unpacked = []
        for index, gradient in zip(forward.connected, gradients, strict=True):
            if index in self._by_lookup:
                shape = tf.TensorShape(self._context.variables[index].shape)
                gradient = lookups.unpacked(gradient, shape, self._by_lookup[index])
            unpacked.append(gradient)
        return unpacked, sums

    def _added_up(
        self, forward: ForwardPass, gradients: list[Gradient], sums: tf.Tensor
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Gradients and sums, added up over all replicas. Gradients by lookup have other shapes: each travels alone."""
        plan = self._context.plan
        backend = self._context.backend
        by_index = dict(zip(forward.connected, gradients, strict=True))
        dense = {index: gradient for index, gradient in by_index.items() if index not in self._by_lookup}
        reduced, sums = communication.reduced(
            backend,
            list(dense.values()),
            sums,
            compression=plan.compression,
            groups=plan.groups,
            headroom=1 if plan.loss_scaled else plan.batch_size,
        )
        by_index |= zip(dense, reduced, strict=True)
        # In the order of the variables: all workers must enter the collectives in one order.
        for index in forward.connected:
            if lookups.is_gathered(self._by_lookup.get(index)):
                by_index[index] = backend.gather_rows(by_index[index])
            elif index in self._by_lookup:
                by_index[index] = backend.all_reduce([by_index[index]])[0]
        return list(by_index.values()), sums

    def _divided(self, gradients: list[Gradient], sums: tf.Tensor) -> list[Gradient]:
        """Gradients without the loss scale; if the loss is a mean, the gradients of the mean instead of the sum."""
        plan = self._context.plan
        scale = self._context.scale
        divisor = tf.ones([], plan.dtype) if plan.summed_loss else weight_or_one(sums[WEIGHT])
        if scale is not None:
            divisor *= scale.scale
        return [divided(gradient, divisor) for gradient in gradients]

    def _checked(
        self, forward: ForwardPass, optimizer: str, gradients: list[Gradient], loss: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the gradients may be applied: bool []; and whether the loss and each of them are finite: bool [n]."""
        by_index = dict(zip(forward.connected, gradients, strict=True))
        finite = are_finite(loss, by_index, self._context.trained_by(optimizer))
        # A batch whose weights sum to zero has no mean, so nothing is applied. The forward pass stays as it was made:
        # rows of weight 0 count for the state of layers in any batch.
        return tf.reduce_all(finite) & (weight != 0.0), finite

    def _apply(self, forward: ForwardPass, optimizer: str, gradients: list[Gradient]) -> None:
        """Applies the gradients to the optimizers' variables, and updates the moving averages."""
        context = self._context
        by_index = dict(zip(forward.connected, gradients, strict=True))
        for name, (instance, indices) in context.built.optimizers.items():
            # A variable that the loss doesn't depend on has no gradient: its optimizer leaves it alone.
            own = {index: by_index[index] for index in indices if index in by_index}
            if not own or optimizer not in ("", name):
                continue
            try:
                if context.built.shards is not None:
                    context.built.shards.apply(instance, own)
                else:
                    context.backend.apply(instance, list(own.values()), context.variables_at(own))
            except UsageError as problem:
                raise context.computing.fail(problem) from None
        # After the optimizers: the averages follow the new weights.
        context.averages.follow(context.trained_by(optimizer))

    # In cross-replica context

    def _still_applies(self, applies: tf.Tensor) -> tf.Tensor:
        """Whether a `minimize` is applied: not after a bad `minimize` of this step, or a bad step of this call."""
        plan = self._context.plan
        # If a bad step is skipped instead, each `minimize` of the step is judged by its own numbers.
        if plan.stops_at_bad_step and not plan.loss_scaled:
            for earlier in self._finite.values():
                applies &= tf.reduce_all(earlier)
        # A counted loop also makes the steps after the one that ended the call. They must change nothing.
        if self._counted:
            applies &= self._state.going
        return applies

    def _counted_in(
        self, optimizer: str, sums: tf.Tensor, states: PerReplica, finite: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Adds the totals of a `minimize` to those of the step; returns the means of its values."""
        context = self._context
        # Before earlier sums are added: the task asks for the means of this `minimize` alone.
        means = totals.batch_means(sums)
        if optimizer in self._sums:  # a second `minimize` with the same optimizer in this step
            finite = finite & self._finite[optimizer]
            sums = totals.with_sums_added(self._sums[optimizer], sums)
            states = context.backend.run(tf.add, states, self._states[optimizer])
        self._sums[optimizer] = sums
        self._states[optimizer] = states
        self._finite[optimizer] = finite
        names = context.layout.minimized[optimizer].names
        return {name: tf.cast(means[index], context.plan.dtype) for index, name in enumerate(names)}

    def _when(self, condition: tf.Tensor, act: Callable[[], object], variables: list[tf.Variable]) -> None:
        """Calls `act`, which changes `variables`, if the condition holds."""

        def acted() -> tf.Tensor:
            act()
            return condition

        # `tf.cond` wants a result from both branches. This one is there when the variables are changed.
        self.changes.append(tf.cond(condition, acted, lambda: condition))

    def _finish(self) -> LoopState:
        """Ends the trace; returns the state of the loop after the step."""
        context = self._context
        plan = context.plan
        before = self._state
        # In the order of `StepContext.checked`, which names them: the task may call `minimize` in another order.
        each_finite = totals.joined([self._finite[name] for name in context.layout.minimized])
        finite = tf.reduce_all(each_finite)
        step_totals = context.layout.joined(self._sums)
        going, ended = self._goes_on(finite)
        if not plan.stops_at_bad_step or plan.loss_scaled:
            step_totals = tf.where(finite, step_totals, totals.as_skipped(step_totals))
        # After a step that has ended the call, a step is never good: what it computes must come to nothing.
        good = finite & before.going if self._counted else finite
        if context.kept_batch is not None:
            # The step that finds a stream at its end is none: it draws, counts and iterates nothing.
            good &= ~ended
        self._restore_model_state(good)
        states = self._added_states(good)
        call_totals = before.totals + self._if_made(step_totals, going, ended)
        step = before.step + 1
        if self._counted:
            # If an earlier step has ended the call, its number and what wasn't finite in it are kept.
            step = tf.where(before.going, step, before.step)
            each_finite = tf.where(before.going, each_finite, before.finite)
        return LoopState(step, going, ended, call_totals, states, each_finite)

    def _goes_on(self, finite: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the call goes on after the step, bool []; and whether the data is at its end, see `LoopState`."""
        context = self._context
        plan = context.plan
        scale = context.scale
        going = finite
        ended = self._state.ended
        examples = self._sums[next(iter(context.layout.minimized))][EXAMPLES]  # each `minimize` has seen the same
        if context.kept_batch is not None:
            ended = examples == 0.0
            keep = context.kept_batch.keep
            # The batch of a bad step is saved for `tfloop replay`, and a stream can't be read again.
            tf.cond(finite, lambda: ended, lambda: keep(self._feed[-1]))
            going &= ~ended
        if scale is not None:
            # An overflow in float16 isn't an error: the step is skipped, and the next one is made with half the scale.
            # A step without examples, or after the end of the call, says nothing of the scale.
            has_examples = examples != 0.0
            if self._counted:
                has_examples &= self._state.going
            self._when(has_examples, lambda: context.backend.run(lambda: scale.update(finite)), scale.variables)
            goes_on = not plan.stops_at_bad_step or ~scale.exhausted()
            going |= goes_on if context.kept_batch is None else goes_on & ~ended
        if context.backend.asynchronous and not plan.stops_at_bad_step:
            going = tf.constant(True)  # no other worker would make the steps after a bad one in this part of a call
        if self._counted:
            going &= self._state.going  # an earlier step may have ended the call
        return going, ended

    def _if_made(self, step_totals: tf.Tensor, going: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
        """The totals of the step; 0 if it isn't made: it ends the run or the data, or an earlier one ended the call."""
        made = None
        if self._context.plan.stops_at_bad_step:
            made = going
        elif self._context.kept_batch is not None:
            made = ~ended
        elif self._counted:
            made = self._state.going
        # The 0 comes second: `tf.where` takes the type of the first value.
        return step_totals if made is None else tf.where(made, step_totals, 0)

    def _restore_model_state(self, good: tf.Tensor) -> None:
        """Undoes the changes of the forward pass if the step turns out to be bad."""
        context = self._context
        if not context.state:
            return

        def restore(before: list[tf.Tensor]) -> None:
            assign_values(context.state, before)

        self._when(~good, lambda: context.backend.run(restore, self._model_state), context.state)

    def _added_states(self, good: tf.Tensor) -> PerReplica:
        """The states of metrics after the step, in each replica: float64 [m]."""
        layout = self._context.layout

        def added(states: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
            return states + tf.where(good, totals.joined(parts), 0)

        if not layout.states_width:
            return self._state.states
        parts = [self._states[name] for name in layout.minimized]
        return self._context.backend.run(added, self._state.states, *parts)


class BlockStepTrace(StepTrace):
    """A step of a block that is one XLA program.

    In XLA, checking a gradient takes as long as applying it, and a branch copies its inputs and outputs. So each step
    selects between old and new values as part of the update. It also subtracts each gradient from itself, which gives
    0 where it is finite, else nan, and adds that up: the gradient's sign. The block checks the signs of all its steps,
    and is undone as a whole.

    See `StepTrace` for the arguments.

    Attributes:
        signs: the sign of the loss, at 0, and of the gradient of each variable, at 1 + its index.
    """

    in_block = True

    def __init__(self, context: StepContext, feed: Feed, state: LoopState) -> None:
        super().__init__(context, feed, state, counted=False)
        self._marker = PhaseMarker(noted=False, timed=False, replicas=1)  # an XLA program can't note its phases
        self.signs: dict[int, tf.Tensor] = {}

    def _checked(
        self, forward: ForwardPass, optimizer: str, gradients: list[Gradient], loss: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds to the signs, which the block checks at its end. For now, all counts as finite."""
        tensors = {0: loss}
        for index, gradient in zip(forward.connected, gradients, strict=True):
            tensors[1 + index] = gradient
        for index, tensor in tensors.items():
            elements = content(tensor)
            sign = elements - elements
            if isinstance(tensor, tf.IndexedSlices):
                sign = tf.reduce_sum(sign)  # each step has other rows, so their signs can't be added up by element
            self.signs[index] = self.signs[index] + sign if index in self.signs else sign
        return weight != 0.0, tf.ones([1 + len(self._context.trained_by(optimizer))], tf.bool)

    def _when(self, condition: tf.Tensor, act: Callable[[], object], variables: list[tf.Variable]) -> None:
        """Calls `act` in any case, and then selects between the new and the old values of `variables`."""
        old_values = read_values(variables)
        act()
        put_back_unless(condition, variables, old_values)

    def _restore_model_state(self, good: tf.Tensor) -> None:
        """Does nothing: the block undoes the changes."""
