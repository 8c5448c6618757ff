"""The loops of a compiled call of training: over batches, over stretches of local steps, and over blocks for XLA."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from loop.data import ArraySource, IndexedSource
from loop.model.variables import as_tf
from loop.monitor.phase_marker import ALL_REDUCE, COMPUTE, DATA
from loop.step import communication
from loop.step.context import StepContext
from loop.step.gradients import all_finite
from loop.step.step_trace import BlockStepTrace, LoopState, StepTrace
from loop.step.tracing import compiled, repeated


class BatchLoop:
    """Makes steps, one batch after the other.

    Over arrays it makes a fixed number of steps: nothing that a step computes decides whether there is another one, and
    the steps after a bad one change nothing. A condition that depended on gradients would make the graph a circle, in
    which TensorFlow's rewriters meet gradients before the operations that they belong to, and don't optimize them: the
    backward pass of a pooling layer took seven times as long.

    Args:
        context: what all traces share.
        iterator: what the source's `start` returned.
        epoch: the epoch.
        end: the step within the epoch before which the loop ends.
    """

    def __init__(self, context: StepContext, iterator: Any, epoch: tf.Tensor, end: tf.Tensor) -> None:
        self._context = context
        self._source = context.source
        self._iterator = iterator
        self._epoch = epoch
        self._end = end

    def run(self, state: LoopState) -> LoopState:
        """Makes the steps from `state.step` on; the state after them."""
        following: Any = ()
        if self._source.reads_ahead:
            following = self._source.read_batch(self._iterator, self._epoch, state.step, self._context.plan.accumulate)
        _, _, after = repeated(self._more, self._body, state.step, following, state)
        return after

    def _more(self, number: tf.Tensor, following: Any, state: LoopState) -> tf.Tensor:
        """Whether there is another step."""
        if self._source.reads_ahead:
            return number < self._end
        return (number < self._end) & state.going

    def _body(self, number: tf.Tensor, following: Any, state: LoopState) -> tuple[tf.Tensor, Any, LoopState]:
        """Makes one step."""
        context = self._context
        source = self._source
        marker = context.marker
        if source.reads_ahead:
            # Nothing in this step depends on the next batch: it is read while this one is computed.
            read = following
            following = source.read_batch(self._iterator, self._epoch, number + 1, context.plan.accumulate)
        else:
            with tf.control_dependencies(marker.at(DATA)):
                read = source.read_batch(self._iterator, self._epoch, number)
        marker.at(COMPUTE, read)
        state = StepTrace(context, (self._epoch, number, read), state, counted=source.reads_ahead).make()
        if isinstance(source, IndexedSource):
            marker.at(DATA, state.totals)  # until the next batch, which the host reads, is there
        else:
            marker.lap(DATA, state.totals)
        return number + 1, following, state


class LocalStepsLoop(BatchLoop):
    """Makes steps that each replica applies by itself; after every few of them, replicas average their variables.

    The number of steps between two averages must not depend on what is computed: the replicas don't communicate then,
    but must all come to the average.

    Args:
        context: what all traces share.
        iterator: what the source's `start` returned.
        epoch: the epoch.
        end: the step within the epoch before which the loop ends.
    """

    def _body(self, number: tf.Tensor, following: Any, state: LoopState) -> tuple[tf.Tensor, Any, LoopState]:
        """Makes the steps up to the next average."""
        local_steps = self._context.plan.local_steps
        until = tf.minimum(self._end, (number // local_steps + 1) * local_steps)
        before = state.totals
        number, following, state = repeated(lambda number, *_: number < until, super()._body, number, following, state)
        return number, following, self._averaged(state, before)

    def _averaged(self, state: LoopState, before: tf.Tensor) -> LoopState:
        """Gives all replicas the mean of their variables, and adds up their totals.

        A replica whose loss or gradient wasn't finite has made no step since; only now do all know it.

        Args:
            state: of this replica's loop.
            before: the totals before these steps.
        """
        context = self._context
        backend = context.backend
        own = state.totals - before
        bad = tf.cast(~state.finite, tf.float64)

        def summed() -> tf.Tensor:
            steps = tf.one_hot(backend.replica(), backend.replicas, tf.cast(state.step, tf.float64), dtype=tf.float64)
            return backend.all_reduce([tf.concat([steps, bad, own], 0)])[0]

        context.marker.at(ALL_REDUCE, own)
        variables = [*context.changed_by(""), *context.statistics]
        backend.run(lambda variables: communication.average(backend, variables), variables)
        total = backend.first(backend.run(summed))
        steps, bad_anywhere, added = tf.split(total, [backend.replicas, bad.shape[0], own.shape[0]])
        finite = bad_anywhere == 0
        totals = before + added
        context.marker.at(COMPUTE, totals)
        # The replica that has found something bad has stopped at that step; the others went on.
        step = tf.cast(tf.reduce_min(steps), tf.int64)
        return state._replace(step=step, going=tf.reduce_all(finite), before=totals, totals=totals, finite=finite)


class BlockLoop:
    """Makes the steps that have a whole batch, many of them in one XLA program.

    If a number in a block isn't finite, the whole block is undone. `BatchLoop` then makes its steps again, and finds
    the bad one.

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

    def run(self, iterator: Any, epoch: tf.Tensor, end: tf.Tensor, state: LoopState) -> LoopState:
        """Makes the steps from `state.step` on; the state after them.

        Args:
            iterator: what the source's `start` returned.
            epoch: the epoch.
            end: the step within the epoch before which the loop ends.
            state: the state of the loop before them.
        """
        source = self._source
        size = self._context.plan.block_steps
        whole = tf.minimum(end, self.whole_steps)  # `BatchLoop` makes the steps after them

        def more(block: Any, fine: tf.Tensor, state: LoopState) -> tf.Tensor:
            return (state.step < whole) & fine

        def steps(block: Any, fine: tf.Tensor, state: LoopState) -> tuple[Any, tf.Tensor, LoopState]:
            following = source.read_batches(iterator, epoch, state.step + size, size)
            self._context.marker.at(COMPUTE, block)
            state, fine = self._block(block, epoch, tf.minimum(whole, state.step + size), state)
            return following, fine, state

        first = source.read_batches(iterator, epoch, state.step, size)
        _, _, after = repeated(more, steps, first, tf.constant(True), state)
        return after

    def _steps_of_block(
        self, block: Any, epoch: tf.Tensor, end: tf.Tensor, state: LoopState
    ) -> tuple[LoopState, tf.Tensor]:
        """For XLA: makes the steps up to `end`, whose batches are in `block`; and whether all numbers were finite."""
        context = self._context
        changed = [*context.changed_by(""), *context.state]
        values = [variable.read_value() for variable in changed]
        signs = [tf.zeros([], context.plan.dtype)]
        signs += [tf.zeros(variable.shape, variable.dtype) for variable in as_tf(context.variables)]

        def more(place: tf.Tensor, signs: list[tf.Tensor], state: LoopState) -> tf.Tensor:
            return state.step < end

        def step(
            place: tf.Tensor, signs: list[tf.Tensor], state: LoopState
        ) -> tuple[tf.Tensor, list[tf.Tensor], LoopState]:
            index, batch = tf.nest.map_structure(lambda tensor: tensor[place], block)
            trace = BlockStepTrace(context, (epoch, state.step, (index, batch)), state)
            state = trace.make()
            added = []
            for index, sign in enumerate(signs):
                added.append(sign + trace.signs[index] if index in trace.signs else sign)
            return place + 1, added, state

        # Counted from a constant 0: XLA would take a number from outside for a constant, and compile anew for each.
        _, signs, after = repeated(more, step, tf.constant(0, tf.int64), signs, state)
        fine = tf.reduce_all(tf.stack([all_finite(sign) for sign in signs]))
        for variable, value in zip(changed, values, strict=True):
            variable.assign(tf.where(fine, variable, value))
        return tf.nest.map_structure(lambda new, old: tf.where(fine, new, old), after, state), fine
