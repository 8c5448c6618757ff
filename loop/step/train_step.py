"""The compiled training step of a run, or of one phase of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data import ArraySource, Data, DataIterator, IndexedSource, Rows, Source, StreamSource, evaluation_sets
from loop.errors import TrainingError, UsageError, message_of
from loop.model.precision import keras_precision
from loop.model.variables import as_tf, carried_variables, trainable_variables
from loop.monitor.phase_marker import HOST, PhaseMarker
from loop.options import Options
from loop.step import added_losses, communication, lookups, row_random
from loop.step.batch_norm import has_own_state, normalized_kernels, share, state, statistics
from loop.step.build import BuiltModel
from loop.step.computing import Computing
from loop.step.context import KeptBatch, StepContext
from loop.step.embeddings import replace_lookup
from loop.step.evaluation import Evaluation
from loop.step.loop_state import LoopState
from loop.step.loops import BatchLoop, BlockLoop, LocalStepsLoop
from loop.step.loss_scale import LossScale
from loop.step.metric_sums import MetricSums
from loop.step.mistakes import refused_by_xla
from loop.step.observer import StepObserver
from loop.step.plan import StepPlan, check_plan, make_plan
from loop.step.remat import Remat
from loop.step.totals import (
    EPOCH_ENDED,
    GOING,
    LAST_SKIPPED,
    NOT_FINITE,
    SKIPPED,
    CallLayout,
    CallResult,
    Parts,
    TotalsLayout,
)
from loop.step.tracing import compiled
from loop.step.weight_average import make_averages
from loop.task import Model, TrainTask

__all__ = ["EPOCH_ENDED", "GOING", "LAST_SKIPPED", "NOT_FINITE", "CallResult", "TrainStep", "not_finite"]


class TrainStep:
    """The compiled training and evaluation of a run, and the variables that they need beside model and optimizer.

    Args:
        task: the task.
        built: the model and the optimizers of the task.
        backend: the backend.
        data: the sources, sharded.
        options: the options of `fit`.
        observer: is called with what each step computes.

    Attributes:
        traces: how often training was traced.
        not_finite: what was not finite in the last bad step, in words for messages.
        averages: the moving averages of the weights.
        scale: the loss scale, with float16.
        phase_marker: what this worker does within a compiled call.
        evaluations: the compiled evaluations, by the names of the evaluation sets; a single set has the name "".
    """

    def __init__(
        self,
        task: TrainTask,
        built: BuiltModel,
        backend: Backend,
        data: Data,
        options: Options,
        observer: StepObserver | None = None,
    ) -> None:
        self.built = built
        self.backend = backend
        self.data = data
        self.traces = 0
        self.not_finite: list[str] = []
        self._context = _make_context(task, built, backend, data, options, observer)
        self.scale = self._context.scale
        self.averages = self._context.averages
        self.phase_marker = self._context.marker
        self._layout = CallLayout(self._context.checked())

        self.evaluations: dict[str, Evaluation] = {}
        for name, source in data.evaluated.items():
            prefix = evaluation_sets.prefix(name)
            self.evaluations[name] = Evaluation(self._context, source, self.average_statistics, prefix)
        _check_names(self.evaluations)

        self._blocks = BlockLoop(self._context)
        self._blocks_untried = True
        self._compile()

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the step beside those of model and optimizer that are the same in all replicas."""
        # Sliced averages differ between replicas, so they are among `sliced_variables`.
        averages = [] if self.built.shards else self.averages.variables
        return [*averages, *(self.scale.variables if self.scale else [])]

    @property
    def sliced_variables(self) -> list[tf.Variable]:
        """The variables of which each replica has a slice of its own: slots of optimizers, and moving averages."""
        return self.built.sliced_variables + (self.averages.variables if self.built.shards else [])

    @property
    def xla_refusal(self) -> str:
        """Why XLA can't compile training after all; "": it can, or wasn't asked for, or hasn't been tried yet."""
        return self._context.computing.uncompiled.get(self.data.train, "")

    def train(self, iterator: DataIterator, epoch: int, step: int, steps: int) -> CallResult:
        """Makes up to `steps` training steps in one compiled call.

        Args:
            iterator: what `data.train.start` returned.
            epoch: the epoch, from 0.
            step: the step within the epoch, from 0.
            steps: how many steps to make at most.

        Returns:
            How many steps were made, how the call ended, and the totals of the steps. Totals of several calls may be
            added up; `means` makes means of them. After `NOT_FINITE` and `LAST_SKIPPED`, `not_finite` says what wasn't
            finite.
        """
        # The first call makes one block alone: if XLA fails, no step has been made yet, and the call can be repeated.
        if self._blocks.active and self._blocks_untried:
            parts = self._try_block(iterator, epoch, step, min(steps, self._context.plan.block_steps))
        else:
            parts = self._call(iterator, epoch, step, steps)

        packed = self._layout.join(parts, step)
        result = self._layout.result(packed)
        if result.ending in (NOT_FINITE, LAST_SKIPPED):
            self.not_finite = self._layout.not_finite(packed)
        return result

    def graph(self, iterator: DataIterator) -> tf.Graph:
        """The graph that `train` runs with such an iterator. It is traced here if `train` hasn't been called yet."""
        # The types of `Backend.call`: with another type, this would be another trace.
        number = tf.constant(0, tf.int64)
        return self._train.get_concrete_function(iterator, number, number, number).graph

    def bad_batch(self, epoch: int, step: int) -> Rows:
        """The worker's part of the batch of the bad step that ended the last call, as NumPy arrays.

        Args:
            epoch: the epoch of the step, from 0.
            step: the step within the epoch, from 0.
        """
        position = (tf.constant(epoch, tf.int64), tf.constant(step, tf.int64))
        if self._context.kept_batch is not None:
            rows = self._context.kept_batch.rows(*position)
        else:
            # Arrays keep no batch: their order is a function of the position, so the batch is read again.
            assert isinstance(self.data.train, ArraySource)
            rows = self.data.train.whole(*position)
        rows = rows.with_skipped()
        return tf.nest.map_structure(lambda tensor: None if tensor is None else tensor.numpy(), rows)

    def means(self, totals: np.ndarray) -> dict[str, float]:
        """The means and metrics of totals that `train` returned; nan where the weight is 0."""
        layout = self._context.layout
        means: dict[str, float] = {}
        for optimizer, (sums, states) in layout.unpacked(totals).items():
            prefix = f"{optimizer}_" if optimizer else ""
            for name, value in layout.minimized[optimizer].means(sums, states).items():
                means[f"{prefix}{name}"] = value
        if self.scale is not None:
            means["loss_scale"] = float(self.backend.local_values(self.scale.scale)[0])
        if self.scale is not None or not self._context.plan.stops_at_bad_step:
            means["skipped_steps"] = float(totals[SKIPPED])
        return means

    def has_weight(self, totals: np.ndarray) -> bool:
        """See `TotalsLayout.has_weight`."""
        return self._context.layout.has_weight(totals)

    def metric_names(self) -> list[str]:
        """The names that `means` returns."""
        return list(self.means(self._context.layout.nothing()))

    def average_statistics(self) -> None:
        """Gives all replicas the mean of their statistics. All workers must call it.

        Synchronized statistics are equal already, and stay as they are, to the bit.
        """
        if self._context.statistics:
            self._average()

    def _compile(self) -> None:
        """Makes the compiled functions anew."""
        # tfloop's own code is traced as it stands, since AutoGraph would take seconds to convert it. Only the task's
        # methods are converted: see `as_written`.
        # In the run's precision, as `compute` is tried: it may ask Keras for its float type.
        self._train = compiled(keras_precision(self._context.plan.precision)(self._train_steps))
        self._average = compiled(self._average_over_replicas)
        self._blocks.compile()

    def _call(self, iterator: DataIterator, epoch: int, step: int, steps: int) -> Parts:
        # The function is looked up for each attempt, since `_compile` replaces it.
        try:
            return self._context.computing.call(lambda: self._train, iterator, epoch, step, steps, self._compile)
        except tf.errors.OpError as error:
            reason = refused_by_xla(error)
            # A block is made again in the graph. Outside of blocks, a batch may have been read, and is lost.
            if not reason or self._blocks.active:
                raise
            raise UsageError(f"compile='xla': XLA can't compile a step ({reason}): use compile='graph'") from error

    def _try_block(self, iterator: DataIterator, epoch: int, step: int, steps: int) -> Parts:
        """Makes the steps of a block. If XLA can't compile it, warns with the reason, and uses the graph from then on.

        A program that can't be compiled has changed nothing, so the steps can be made again.
        """
        try:
            parts = self._call(iterator, epoch, step, steps)
        except tf.errors.OpError as error:
            reason = refused_by_xla(error) or message_of(error)
            # From now on `BlockLoop.active` is false, and the new trace has no blocks.
            self._context.computing.leave_to_graph(self.data.train, reason)
            self._compile()
            return self._call(iterator, epoch, step, steps)
        # After the last whole batch there are no blocks: a call from there on has tried none.
        self._blocks_untried = step >= self._blocks.whole_steps
        return parts

    # While tracing, in cross-replica context

    def _train_steps(self, iterator: DataIterator, epoch: tf.Tensor, step: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """Makes the steps of one call; returns the vector that `CallLayout` describes."""
        self.traces += 1  # Python runs only while the function is traced
        context = self._context
        state = self._start(step)
        end = step + steps
        # Blocks make the steps with a whole batch; the loop over batches makes the rest, and a block that was undone.
        if self._blocks.active:
            state = self._blocks.run(epoch, end, state)
        loop = BatchLoop if context.plan.local_steps == 1 else LocalStepsLoop
        state = loop(context, iterator, epoch, end).run(state)
        packed = self._packed(step, state)
        # After `packed`, the last tensor of the call: from here on the host has its turn.
        self.phase_marker.lap(HOST, packed)
        return packed

    def _start(self, step: tf.Tensor) -> LoopState:
        """The state of the loop before the first step of a call."""
        layout = self._context.layout
        # float64 over many steps: float32 counts exactly up to 2**24 only, and would round the sums of a long epoch.
        zeros = tf.zeros([layout.sums_width], tf.float64)
        # What a run doesn't need is (): each tensor that the loop carries costs four operations in each step.
        ended = () if self._context.kept_batch is None else tf.constant(False)
        states = ()
        if layout.states_width:
            states = self.backend.run(lambda: tf.zeros([layout.states_width], tf.float64))
        finite = tf.ones([len(self._layout.checked)], tf.bool)
        return LoopState(step, tf.constant(True), ended, zeros, states, finite)

    def _packed(self, step: tf.Tensor, after: LoopState) -> tf.Tensor:
        """The vector that a call returns, from its first step and the state of the loop after the last one."""
        layout = self._context.layout
        stops = self._context.plan.stops_at_bad_step
        bad_ending = NOT_FINITE if stops else LAST_SKIPPED
        ending = tf.where(after.going, GOING, bad_ending)
        # A last step that found no data, or was bad and ends the run, has not been made: it doesn't count.
        last_unmade = ~after.going & stops
        if self._context.kept_batch is not None:
            ending = tf.where(after.ended, EPOCH_ENDED, ending)
            last_unmade |= after.ended
        made = after.step - step - tf.cast(last_unmade, tf.int64)
        counts = tf.cast([made, tf.cast(ending, tf.int64)], tf.float64)
        parts = [after.totals]
        # States of metrics are added up over replicas once in a call. The sums went with the gradients of each step.
        if layout.states_width:
            states = self.backend.run(lambda states: self.backend.all_reduce([states])[0], after.states)
            parts.append(self.backend.first(states))
        return self._layout.pack(after.finite, counts, *parts)

    def _average_over_replicas(self) -> None:
        backend = self.backend
        backend.run(lambda variables: communication.average(backend, variables), self._context.statistics)


def _make_context(
    task: TrainTask, built: BuiltModel, backend: Backend, data: Data, options: Options, observer: StepObserver | None
) -> StepContext:
    """Makes the objects that all traces of a step share; see `TrainStep` for the arguments."""
    summed_loss = task.loss_reduction == "sum"
    check_plan(built, backend, data, options, summed_loss)
    plan = make_plan(built, backend, data, options, summed_loss)
    compiled = data.train if options["compile"] == "xla" else None
    weights = as_tf(trainable_variables(built.model))
    computing = Computing(backend, data, options["seed"], compiled, weights, built.fixed_rows)
    _prepare_model(built.model, backend, data, computing, options["sync_batch_norm"], plan)
    with backend.scope():
        scale = LossScale(options["batch_size"]) if plan.loss_scaled else None
    averages = make_averages(trainable_variables(built.model), options["ema"], backend, built.shards)
    # A single worker that reads arrays never blocks, so it needn't note in which phase of a step it is.
    waits = backend.workers > 1 or any(map(_may_block, data.sources))
    metric_sums = {name: MetricSums(names, built.metrics) for name, names in built.minimized.items()}
    most_rows = -(-data.train.most_rows(plan.accumulate) // backend.replicas)  # of one replica, rounded up
    return StepContext(
        plan=plan,
        task=task,
        built=built,
        backend=backend,
        source=data.train,
        computing=computing,
        layout=TotalsLayout(metric_sums),
        marker=PhaseMarker(waits, bool(options["profile"]), backend.replicas),
        scale=scale,
        averages=averages,
        state=state(built.model) + carried_variables(built.model) + normalized_kernels(built.model),
        statistics=statistics(built.model) if backend.replicas > 1 else [],
        kept_batch=KeptBatch(data.train) if isinstance(data.train, StreamSource) else None,
        observer=observer,
        remat=Remat(built.model, options["remat"], most_rows),
    )


def _check_names(evaluations: Mapping[str, Evaluation]) -> None:
    """Refuses evaluation sets of which two have a metric of the same name."""
    owners: dict[str, str] = {}
    for name, evaluation in evaluations.items():
        for metric in evaluation.metric_names():
            other = owners.setdefault(metric, name)
            if other != name:
                raise UsageError(
                    f"the evaluation sets {other!r} and {name!r} both have the metric {metric!r}: rename one of them"
                )


def _prepare_model(
    model: Model, backend: Backend, data: Data, computing: Computing, sync_batch_norm: bool, plan: StepPlan
) -> None:
    """Has the layers of a model look up rows, compute statistics and draw random numbers in the ways of tfloop."""
    share(model, sync_batch_norm and plan.local_steps == 1)
    if backend.local_replicas > 1:
        added_losses.separate(model)
    replace_lookup()
    row_random.reseed(model)
    # The state of a stateful layer must not see a stand-in. Such layers are for one replica, which needs no stand-in.
    if has_own_state(model) and not carried_variables(model):
        computing.computed_by_all |= set(data.sources)
    # With a position for each lookup, all replicas and micro-batches must send the same shape; see `lookups.packed`.
    have_positions = set(plan.lookups.values()) - {lookups.GATHERED, lookups.GATHERED_ROWS}
    if have_positions and backend.replicas * plan.accumulate > 1:
        computing.computed_by_all.add(data.train)
    # One replica, too, keeps the random numbers of rows that are left out. XLA can't: it must know how many it draws.
    if backend.replicas > 1 or (data.train.leaves_out and not computing.compiles(data.train)):
        row_random.by_row()


def not_finite(step: int, epoch: int, names: list[str], kept: str = "") -> TrainingError:
    """The error for a loss or gradient that is nan or infinite.

    Args:
        step: the step, from 1.
        epoch: the epoch, from 1.
        names: what wasn't finite, in words.
        kept: a note that says where the batch is kept, or "".
    """
    listed = ", ".join(names[:5])
    if len(names) > 5:
        listed += f" and {len(names) - 5} more"
    note = f"; {kept}" if kept else ""
    return TrainingError(
        f"step {step} (epoch {epoch}): not finite (nan or inf): {listed}; nothing was applied from there on. Lower the "
        "learning rate, set clip_norm, look for bad values in the data, or skip such steps with on_nonfinite='skip'"
        f"{note}"
    )


def _may_block(source: Source) -> bool:
    """Whether reading a batch of the source may block."""
    return isinstance(source, StreamSource | IndexedSource)
