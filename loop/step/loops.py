"""The loops of a compiled call of training: over batches, over groups of local steps, and over blocks for XLA."""

from __future__ import annotations

import tensorflow as tf

from loop.data import ArraySource, DataIterator, IndexedSource, ReadBatch
from loop.model.variables import as_tf
from loop.monitor.phase_marker import ALL_REDUCE, COMPUTE, DATA
from loop.step import communication
from loop.step.batches import Batches, Following
from loop.step.context import StepContext
from loop.step.gradients import all_finite
from loop.step.loop_state import LoopState
from loop.step.step_trace import BlockStepTrace, StepTrace
from loop.step.tracing import compiled, repeated
from loop.step.variable_values import assign_values, read_values


class BatchLoop:
    """Makes steps, one batch after the other.

    Over arrays it makes a fixed number of steps: what a step computes never decides whether there is another one, and
    the steps after a bad one change nothing. A loop condition that depends on gradients would close a circle in the
    graph. In a circle, TensorFlow's rewriters may reach a gradient before the operation that it belongs to, and then
    don't optimize it: the backward pass of a pooling layer took seven times as long.

    Args:
        context: what all traces share.
        iterator: what the `start` of the source returned.
        epoch: the epoch, int64 [].
        end: the step within the epoch before which the loop ends, int64 [].
    """

    def __init__(self, context: StepContext, iterator: DataIterator, epoch: tf.Tensor, end: tf.Tensor) -> None:
        self._context = context
        self._source = context.source
        self._epoch = epoch
        self._end = end
        self._batches = Batches(context.source, iterator, epoch, end, context.marker, context.plan.accumulate)

    def run(self, state: LoopState) -> LoopState:
        """Makes the steps from `state.step` on; returns the state after them."""
        first = self._batches.first(state.step)
        _, _, after = self._batches.each(self._more, self._step, state.step, first, state)
        return after

    def _more(self, step: tf.Tensor, state: LoopState) -> tf.Tensor:
        """Whether there is another step."""
        # With arrays, only the counter decides: `state.going` depends on gradients; see the class.
        if isinstance(self._source, ArraySource):
            return step < self._end
        return (step < self._end) & state.going

    def _step(self, step: tf.Tensor, read: ReadBatch, state: LoopState) -> LoopState:
        """Makes one step."""
        source = self._source
        marker = self._context.marker
        trace = StepTrace(self._context, (self._epoch, step, read), state, counted=isinstance(source, ArraySource))
        state = trace.make()
        # The totals are there before the gradients are applied, which is no waiting for data.
        made = [state.totals, *trace.changes]
        if isinstance(source, IndexedSource):
            marker.at(DATA, made)  # until the host has read the next batch
        else:
            # The next batch is there already, or its reading marks the phase itself: see `Batches.each`.
            marker.lap(DATA, made)
        return state


class LocalStepsLoop(BatchLoop):
    """Makes local steps, which each replica applies by itself. After every few of them, replicas average variables.

    The number of steps between two averages must not depend on what is computed. Replicas don't communicate between
    averages, and all of them must enter the collectives of each average.
    """

    def run(self, state: LoopState) -> LoopState:
        """Makes the steps from `state.step` on, and averages; returns the state after them."""
        first = self._batches.first(state.step)
        _, _, after = repeated(
            lambda step, following, state: self._more(step, state), self._group, state.step, first, state
        )
        return after

    def _group(self, step: tf.Tensor, following: Following, state: LoopState) -> tuple[tf.Tensor, Following, LoopState]:
        """Makes the steps up to the next average."""
        local_steps = self._context.plan.local_steps
        # At multiples of `local_steps` within the epoch, wherever a call begins: a resumed run averages where the
        # first one did.
        end = tf.minimum(self._end, (step // local_steps + 1) * local_steps)
        before = state.totals
        step, following, state = self._batches.each(lambda step, _: step < end, self._step, step, following, state)
        return step, following, self._averaged(state, before)

    def _averaged(self, state: LoopState, before: tf.Tensor) -> LoopState:
        """Gives all replicas the mean of their variables, and adds up their totals.

        A replica whose loss or gradient wasn't finite has changed nothing since. The others learn of it here.

        Args:
            state: the state of this replica's loop.
            before: the totals before these steps.
        """
        context = self._context
        backend = context.backend
        own_totals = state.totals - before
        own_bad = tf.cast(~state.finite, tf.float64)

        def summed() -> tf.Tensor:
            # The step of each replica in an element of its own, so that the sum over replicas holds all of them.
            steps = tf.one_hot(backend.replica(), backend.replicas, tf.cast(state.step, tf.float64), dtype=tf.float64)
            return backend.all_reduce([tf.concat([steps, own_bad, own_totals], 0)])[0]

        # Two reductions: of the variables, and of what each replica has counted and seen.
        context.marker.at(ALL_REDUCE, own_totals)
        variables = [*context.changed_by(""), *context.statistics]
        backend.run(lambda variables: communication.average(backend, variables), variables)
        packed = backend.first(backend.run(summed))
        steps, bad, added = tf.split(packed, [backend.replicas, own_bad.shape[0], own_totals.shape[0]])
        finite = bad == 0
        totals = before + added
        context.marker.at(COMPUTE, totals)
        # A replica with a bad step has stopped counting at that step; the others have gone on.
        step = tf.cast(tf.reduce_min(steps), tf.int64)
        return state._replace(step=step, going=tf.reduce_all(finite), totals=totals, finite=finite)


class BlockLoop:
    """Makes the steps that have a whole batch, many of them in one XLA program: a block.

    If a number in a block isn't finite, the whole block is undone. `BatchLoop` then makes the steps of the block
    again, and finds the bad one.

    Args:
        context: what all traces share.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.compile()

    def compile(self) -> None:
        """Makes the compiled function anew."""
        self._block = compiled(self._steps_of_block, jit_compile=True)

    @property
    def active(self) -> bool:
        """Whether steps are made in blocks: the plan asks for it, and XLA hasn't failed to compile one."""
        return self._context.plan.block_steps > 0 and self._context.computing.compiles(self._context.source)

    @property
    def whole_steps(self) -> int:
        """How many steps of an epoch have a whole batch."""
        return self._source.size // self._context.plan.batch_size

    @property
    def _source(self) -> ArraySource:
        source = self._context.source
        assert isinstance(source, ArraySource)
        return source

    def run(self, epoch: tf.Tensor, end: tf.Tensor, state: LoopState) -> LoopState:
        """Makes the steps from `state.step` on, up to the last whole batch; returns the state after them.

        Args:
            epoch: the epoch, int64 [].
            end: the step within the epoch before which the loop ends, int64 [].
            state: the state of the loop before the steps.
        """
        source = self._source
        size = self._context.plan.block_steps
        end = tf.minimum(end, self.whole_steps)  # `BatchLoop` makes the steps after these

        def more(block: ReadBatch, finite: tf.Tensor, state: LoopState) -> tf.Tensor:
            return (state.step < end) & finite

        def steps(block: ReadBatch, finite: tf.Tensor, state: LoopState) -> tuple[ReadBatch, tf.Tensor, LoopState]:
            # Nothing in this block depends on the next one, so TensorFlow reads it while this one is computed.
            following = source.read_batches(epoch, state.step + size, size)
            self._context.marker.at(COMPUTE, block)
            state, finite = self._block(block, epoch, tf.minimum(end, state.step + size), state)
            return following, finite, state

        first = source.read_batches(epoch, state.step, size)
        _, _, after = repeated(more, steps, first, tf.constant(True), state)
        return after

    def _steps_of_block(
        self, block: ReadBatch, epoch: tf.Tensor, end: tf.Tensor, state: LoopState
    ) -> tuple[LoopState, tf.Tensor]:
        """For XLA: makes the steps of a block, or undoes them all if a number isn't finite.

        Args:
            block: the batches from `state.step` on.
            epoch: the epoch, int64 [].
            end: the step within the epoch before which the block ends, int64 [].
            state: the state of the loop before the block.

        Returns:
            The state after the block, and whether all numbers were finite.
        """
        context = self._context
        # All that the block may change, to be put back: an XLA program assigns variables at its end in any case.
        changed = [*context.changed_by(""), *context.state]
        old_values = read_values(changed)
        # At 0 the sign of the loss, then one for each variable; see `BlockStepTrace`.
        signs = [tf.zeros([], context.plan.dtype)]
        signs += [tf.zeros(variable.shape, variable.dtype) for variable in as_tf(context.variables)]

        def more(position: tf.Tensor, signs: list[tf.Tensor], state: LoopState) -> tf.Tensor:
            return state.step < end

        def step(
            position: tf.Tensor, signs: list[tf.Tensor], state: LoopState
        ) -> tuple[tf.Tensor, list[tf.Tensor], LoopState]:
            read = tf.nest.map_structure(lambda tensor: tensor[position], block)
            trace = BlockStepTrace(context, (epoch, state.step, read), state)
            state = trace.make()
            # A variable without a gradient keeps its sign: the loop must carry the same tensors in each step.
            added = []
            for index, sign in enumerate(signs):
                if index in trace.signs:
                    added.append(sign + trace.signs[index])
                else:
                    added.append(sign)
            return position + 1, added, state

        # Counted from a constant 0: XLA would take a number from outside for a constant, and compile anew for each.
        _, signs, after = repeated(more, step, tf.constant(0, tf.int64), signs, state)
        finite_signs = [all_finite(sign) for sign in signs]
        finite = tf.reduce_all(tf.stack(finite_signs))

        def undone() -> LoopState:
            assign_values(changed, old_values)
            return state

        # A branch, since XLA (of TensorFlow 2.21) takes some weights for constants, such as those of a loss with
        # `tape.batch_jacobian`: read here, they would be as before the loop. A branch gets what they have become.
        return tf.cond(finite, lambda: after, undone), finite
