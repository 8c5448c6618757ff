"""The mathematics of one step, while it is traced.

Per replica, S = sum(loss * weight) and W = sum(weight). The gradients of S + W * sum(model.losses), and S, W and the
sums of every other value, travel in one fused all-reduce(SUM). Then: divide by the global W, check finiteness, clip,
apply; once, on reduced values. A replica without data contributes zeros. The result depends on the number of replicas
only by the order in which floats are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf

from loop.errors import UsageError
from loop.monitor.phase_marker import ALL_REDUCE, COMPUTE, PhaseMarker
from loop.step import communication, lookups, totals
from loop.step.context import StepContext
from loop.step.forward import ForwardPass
from loop.step.gradients import are_finite, clipped, content, divided, weight_or_one
from loop.step.totals import EXAMPLES, SUMS, WEIGHT
from loop.step.tracing import as_written


class LoopState(NamedTuple):
    """The state of the loop over the steps of a compiled call.

    Attributes:
        step: the step after the last one, within the epoch; int64. The last one counts also if it changed nothing.
        going: whether there is no reason to end the call.
        ended: whether the last step found the data at its end.
        before: the totals before the last step, without states; float64.
        totals: the totals, without states.
        states: of metrics, in each replica; float64.
        finite: which numbers were finite in the last step; see `StepContext.checked`.
    """

    step: tf.Tensor
    going: tf.Tensor
    ended: tf.Tensor
    before: tf.Tensor
    totals: tf.Tensor
    states: Any
    finite: tf.Tensor


class StepTrace:
    """One step while it is traced: the argument `step` of `TrainTask.train_step`.

    It is made anew for each trace, in the graph of the loop's body.

    Args:
        context: what all traces share.
        feed: epoch, step, and what was read for the step.
        state: the state of the loop before the step.
        counted: whether the loop makes a fixed number of steps. The steps after one that ends the call then change
            nothing.
    """

    in_block: ClassVar[bool] = False

    def __init__(self, context: StepContext, feed: Any, state: LoopState, counted: bool) -> None:
        self._context = context
        self._marker = context.marker
        self._feed = feed
        self._state = state
        self._counted = counted
        self._model_state: Any = []
        if context.state:
            self._model_state = context.backend.run(
                lambda: [tf.convert_to_tensor(variable) for variable in context.state]
            )
        self._graph = tf.compat.v1.get_default_graph()
        self._by_lookup = dict(context.plan.lookups)
        self._minimizes = 0
        self._sums: dict[str, tf.Tensor] = {}
        self._states: dict[str, Any] = {}
        self._finite: dict[str, tf.Tensor] = {}

    def make(self) -> LoopState:
        """Traces the step; the state of the loop after it."""
        as_written(self._context.task.train_step)(self._context.built.model, self)
        return self._finish()

    @tf.autograph.experimental.do_not_convert
    def minimize(self, values: Callable[[Any], dict[str, Any]], optimizer: str = "") -> dict[str, tf.Tensor]:
        """One optimizer step, from the values of the global batch; to be called in `TrainTask.train_step`.

        Args:
            values: a function of a batch, which returns what `compute` would.
            optimizer: the name of the optimizer that makes the step, of several; "": all make it, each for its
                variables.

        Returns:
            The values' means over the global batch, by name: scalar tensors.
        """
        plan = self._context.plan
        backend = self._context.backend
        self._check_graph()
        forward = ForwardPass(
            self._context, values, optimizer, self._feed, self._minimizes, self._by_lookup, self.in_block
        )
        self._minimizes += 1

        def reduced_to_clipped(gradients: list[Any], sums: tf.Tensor) -> tuple[list[Any], tf.Tensor, Any]:
            gradients, sums = self._reduced(forward, gradients, sums)
            # Checked before it is divided: with a weight of 0, the quotient wouldn't show that the sum is infinite.
            checked = self._checked(forward, optimizer, gradients, sums[SUMS], sums[WEIGHT])
            if plan.divides_gradients:
                gradients = self._divided(gradients, sums)
            gradients = clipped(gradients, plan.clip_norm, plan.clip_value, by_lookup=bool(self._by_lookup))
            if self._context.observer is not None:
                self._context.observer.gradients(dict(zip(forward.connected, gradients, strict=True)))
            return gradients, sums, checked

        # Forward and backward pass: each replica, by itself.
        gradients, sums, states = forward.sums()

        # Reduce, check, divide, clip: each replica, with the same numbers.
        self._marker.at(ALL_REDUCE, backend.first(gradients))
        gradients, sums, checked = backend.run(reduced_to_clipped, gradients, sums)
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

    def _reduced(self, forward: ForwardPass, gradients: list[Any], sums: tf.Tensor) -> tuple[list[Any], tf.Tensor]:
        """The gradients of the global batch, and its sums."""
        plan = self._context.plan
        backend = self._context.backend
        if plan.adasum:
            gradients = backend.adasum(self._divided(gradients, sums))
            sums = backend.all_reduce([sums])[0]
        elif plan.local_steps == 1:
            gradients, sums = self._added_up(forward, gradients, sums)
        if plan.summed_loss:
            sums = totals.weighed_by_rows(sums)
        whole = []
        for index, gradient in zip(forward.connected, gradients, strict=True):
            if index in self._by_lookup:
                shape = tf.TensorShape(self._context.variables[index].shape)
                gradient = lookups.unpacked(gradient, shape)
                if self._by_lookup[index] == lookups.GATHERED:
                    gradient = tf.ensure_shape(tf.convert_to_tensor(gradient), shape)
            whole.append(gradient)
        return whole, sums

    def _added_up(self, forward: ForwardPass, gradients: list[Any], sums: tf.Tensor) -> tuple[list[Any], tf.Tensor]:
        """Gradients and sums, added up over all replicas. Those by lookup have other sizes, and are sent separately."""
        plan = self._context.plan
        backend = self._context.backend
        by_index = dict(zip(forward.connected, gradients, strict=True))
        dense = [index for index in forward.connected if index not in self._by_lookup]
        sent, sums = communication.reduced(
            backend,
            [by_index[index] for index in dense],
            sums,
            compression=plan.compression,
            groups=plan.groups,
            headroom=1 if plan.loss_scaled else plan.batch_size,
        )
        by_index |= zip(dense, sent, strict=True)
        # In the order of variables: all workers must enter the collectives in one order.
        for index in forward.connected:
            if self._by_lookup.get(index) == lookups.GATHERED:
                by_index[index] = backend.gather_rows(by_index[index])
            elif index in self._by_lookup:
                by_index[index] = backend.all_reduce([by_index[index]])[0]
        return list(by_index.values()), sums

    def _divided(self, gradients: list[Any], sums: tf.Tensor) -> list[Any]:
        """Gradients without the loss scale; and, if the loss is a mean, those of the mean instead of the sum."""
        plan = self._context.plan
        scale = self._context.scale
        divisor = tf.ones([], plan.dtype) if plan.summed_loss else weight_or_one(sums[WEIGHT])
        if scale is not None:
            divisor *= scale.scale
        return [divided(gradient, divisor) for gradient in gradients]

    def _checked(
        self, forward: ForwardPass, optimizer: str, gradients: list[Any], loss: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the step is to be applied; and whether the loss and each gradient are finite."""
        by_index = dict(zip(forward.connected, gradients, strict=True))
        finite = are_finite(loss, by_index, self._context.trained_by(optimizer))
        # A batch whose weights sum to zero has no mean: the step changes nothing.
        return tf.reduce_all(finite) & (weight != 0.0), finite

    def _apply(self, forward: ForwardPass, optimizer: str, gradients: list[Any]) -> None:
        """The optimizers' step, and that of the moving averages."""
        context = self._context
        by_index = dict(zip(forward.connected, gradients, strict=True))
        for name, (instance, indices) in context.built.optimizers.items():
            own = [index for index in indices if index in by_index]
            if not own or optimizer not in ("", name):
                continue
            own_gradients = [by_index[index] for index in own]
            try:
                if context.built.shards is not None:
                    context.built.shards.apply(instance, dict(zip(own, own_gradients, strict=True)))
                else:
                    context.backend.apply(instance, own_gradients, [context.variables[index] for index in own])
            except UsageError as problem:
                raise context.computing.fail(problem) from None
        # After the optimizers: the averages follow the new weights.
        context.averages.follow(context.trained_by(optimizer))

    # In cross-replica context

    def _still_applies(self, applies: tf.Tensor) -> tf.Tensor:
        """Whether a `minimize` is applied: not after one in this step, or a step in this call, that was bad."""
        plan = self._context.plan
        if plan.stops_at_bad_step and not plan.loss_scaled:
            for earlier in self._finite.values():
                applies &= tf.reduce_all(earlier)
        if self._counted:
            applies &= self._state.going
        return applies

    def _counted_in(self, optimizer: str, sums: tf.Tensor, states: Any, finite: tf.Tensor) -> dict[str, tf.Tensor]:
        """Adds the totals of a `minimize` to those of the step; returns the means of its values."""
        context = self._context
        means = totals.batch_means(sums)
        if optimizer in self._sums:
            finite = finite & self._finite[optimizer]
            sums = totals.with_sums_added(self._sums[optimizer], sums)
            states = context.backend.run(tf.add, states, self._states[optimizer])
        self._sums[optimizer] = sums
        self._states[optimizer] = states
        self._finite[optimizer] = finite
        names = context.layout.minimized[optimizer].names
        return {name: tf.cast(means[place], context.plan.dtype) for place, name in enumerate(names)}

    def _when(self, condition: tf.Tensor, act: Callable[[], Any], variables: list[tf.Variable]) -> None:
        """Does what `act` does to `variables`, if the condition holds."""

        def done() -> tf.Tensor:
            act()
            return condition

        tf.cond(condition, done, lambda: condition)

    def _finish(self) -> LoopState:
        """Ends the trace: the state of the loop after the step."""
        context = self._context
        plan = context.plan
        layout = context.layout
        before = self._state
        each_finite = totals.joined([self._finite[name] for name in layout.minimized])
        finite = tf.reduce_all(each_finite)
        step_totals = layout.joined(self._sums)
        any_sums = self._sums[next(iter(layout.minimized))]  # each `minimize` has seen the same examples
        examples = any_sums[EXAMPLES]
        seen = any_sums[EXAMPLES] != 0.0
        if self._counted:
            seen &= before.going

        going, ended = self._goes_on(finite, examples, seen)
        if not plan.stops_at_bad_step or plan.loss_scaled:
            step_totals = tf.where(finite, step_totals, totals.as_skipped(step_totals))
        # A step after one that has ended the call is no good one, whatever it has computed.
        good = finite & before.going if self._counted else finite
        self._take_back_model_state(good)
        states = self._added_states(good)
        after = LoopState(
            before.step + 1, going, ended, before.totals, before.totals + step_totals, states, each_finite
        )
        return self._unless_over(after) if self._counted else after

    def _goes_on(self, finite: tf.Tensor, examples: tf.Tensor, seen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the call goes on after the step; and whether the data is at its end."""
        context = self._context
        plan = context.plan
        scale = context.scale
        going = finite
        ended = self._state.ended
        if context.kept_batch is not None:
            ended = examples == 0.0
            keep = context.kept_batch.keep
            tf.cond(finite, lambda: ended, lambda: keep(self._feed[-1]))
            going &= ~ended
        if scale is not None:
            # An overflow in float16 is no error: the step is skipped, and the next one is made with half the scale.
            self._when(seen, lambda: context.backend.run(lambda: scale.update(finite)), scale.variables)
            going |= (not plan.stops_at_bad_step or ~scale.exhausted()) & ~ended
        if context.backend.asynchronous and not plan.stops_at_bad_step:
            going = tf.constant(True)  # no other worker would make the steps after a bad one in this part of a call
        return going, ended

    def _take_back_model_state(self, good: tf.Tensor) -> None:
        """Undoes the changes of the forward pass if the step turns out to be bad."""
        context = self._context
        if not context.state:
            return

        def restore(before: list[tf.Tensor]) -> None:
            for variable, value in zip(context.state, before, strict=True):
                variable.assign(value)

        self._when(~good, lambda: context.backend.run(restore, self._model_state), context.state)

    def _added_states(self, good: tf.Tensor) -> Any:
        """The states of metrics after the step, in each replica."""
        layout = self._context.layout

        def added(states: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
            return states + tf.where(good, totals.joined(parts), 0)

        if not layout.states_width:
            return self._state.states
        parts = [self._states[name] for name in layout.minimized]
        return self._context.backend.run(added, self._state.states, *parts)

    def _unless_over(self, after: LoopState) -> LoopState:
        """The state after the step; or the state before it, if an earlier step has ended the call."""
        changed = {}
        for name in ("step", "going", "before", "totals", "finite"):
            changed[name] = tf.where(self._state.going, getattr(after, name), getattr(self._state, name))
        return after._replace(**changed)


class BlockStepTrace(StepTrace):
    """A step of a block that is one XLA program.

    In XLA, a check of each gradient costs as much as its update, and a branch copies its inputs and outputs. So each
    step selects between old and new values as part of the update, and adds up the difference of each gradient with
    itself: that is 0 if it is finite, else nan. The block checks the sums of all steps, and is undone as a whole.

    Args:
        context: what all traces share.
        feed: epoch, step, and what was read for the step.
        state: the state of the loop before the step.

    Attributes:
        signs: the difference of the loss (0) and of the gradient of each variable (1 + its index) with itself.
    """

    in_block = True

    def __init__(self, context: StepContext, feed: Any, state: LoopState) -> None:
        super().__init__(context, feed, state, counted=False)
        self._marker = PhaseMarker(noted=False, timed=False, replicas=1)  # an XLA program can't note its phases
        self.signs: dict[int, tf.Tensor] = {}

    def _checked(
        self, forward: ForwardPass, optimizer: str, gradients: list[Any], loss: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Notes the signs, for the block to check them at its end."""
        tensors = {0: loss}
        for index, gradient in zip(forward.connected, gradients, strict=True):
            tensors[1 + index] = gradient
        for index, tensor in tensors.items():
            numbers = content(tensor)
            sign = numbers - numbers
            if isinstance(tensor, tf.IndexedSlices):
                sign = tf.reduce_sum(sign)
            self.signs[index] = self.signs[index] + sign if index in self.signs else sign
        return weight != 0.0, tf.ones([1 + len(self._context.trained_by(optimizer))], tf.bool)

    def _when(self, condition: tf.Tensor, act: Callable[[], Any], variables: list[tf.Variable]) -> None:
        """Acts in any case, and then selects between the new and the old values."""
        before = [variable.read_value() for variable in variables]
        act()
        for variable, value in zip(variables, before, strict=True):
            variable.assign(tf.where(condition, variable, value))

    def _take_back_model_state(self, good: tf.Tensor) -> None:
        """Does nothing: the block undoes the changes."""
