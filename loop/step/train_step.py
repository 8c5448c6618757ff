"""The mathematics: the compiled training steps.

Per replica, S = sum(loss * weight) and W = sum(weight). The gradients of S + W * sum(model.losses), and S, W and the
sums of every other value, travel in one fused all-reduce(SUM). Then: divide by the global W, check finiteness, clip,
apply; once, on reduced values. A replica without data contributes zeros. The result doesn't depend on how many
replicas made it, but for the order in which floats are added.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data import ArraySource, Data, Rows, StreamSource, count
from loop.errors import TrainingError, UsageError
from loop.model.variables import (
    as_tf,
    carried_variables,
    losses,
    optimizer_variables,
    trainable_variables,
    updates_rows,
    variable_names,
)
from loop.monitor.phase_marker import ALL_REDUCE, COMPUTE, DATA, HOST, PhaseMarker
from loop.step import approximations, communication, lookups, row_random
from loop.step.batch_norm import batch_norms, has_own_state, share, state, statistics
from loop.step.build import BuiltModel
from loop.step.computing import Computing, RetraceError
from loop.step.evaluation import Evaluation
from loop.step.loss_scale import LossScale
from loop.step.metric_sums import EXAMPLES, SKIPPED, SUMS, MetricSums
from loop.step.replica import Replica
from loop.step.tracing import as_written, repeated
from loop.step.weight_average import Averages
from loop.task import TrainTask

GOING, EPOCH_ENDED, NOT_FINITE, LAST_SKIPPED = 0, 1, 2, 3
"""How a compiled call ended: all steps made; the data is at its end; a loss or gradient is not finite, and the step was
not made; or such a step was skipped, as the options ask, and is the last one of the call."""

BLOCK_STEPS, BLOCK_BYTES = 50, 1 << 26
"""With `compile="xla"`, so many steps make one program, if their batches need no more memory than that."""


class LoopState(NamedTuple):
    """What a compiled call has come to.

    Attributes:
        step: the step after the last one made, within the epoch; that one may have been worth nothing; int64.
        going: whether there is no reason to end the call.
        ended: whether the last step found the data at its end.
        before: the totals before the last step; float64.
        totals: the totals.
        states: of metrics, in each replica; float64.
        finite: what was finite in the last step; see `TrainStep._checked`.
    """

    step: tf.Tensor
    going: tf.Tensor
    ended: tf.Tensor
    before: tf.Tensor
    totals: tf.Tensor
    states: Any
    finite: tf.Tensor


class TrainStep:
    """The compiled functions of a run, and the variables that they need beside those of model and optimizer.

    Args:
        task: the task.
        built: what it built.
        backend: the engine.
        data: the sources, shared out.
        options: the options of `fit`.
    """

    def __init__(
        self, task: TrainTask, built: BuiltModel, backend: Backend, data: Data, options: dict[str, Any]
    ) -> None:
        self.task, self.built, self.model, self.backend, self.data = task, built, built.model, backend, data
        self.options = options
        self.traces = 0
        self.not_finite: list[str] = []
        self._variables = trainable_variables(built.model)
        wide = any(variable.dtype == "float64" for variable in as_tf(self._variables))
        self.dtype = tf.float64 if wide else tf.float32
        self._trained = {name: MetricSums(names, built.metrics) for name, names in built.minimized.items()}
        self._connected: dict[str, list[int]] = {}
        compiled = data.train if options["compile"] == "xla" else None
        self.computing = Computing(backend, options, compiled, built.fixed_rows)
        # One replica that sees the whole batch at once knows its weight before the backward pass, and needn't divide
        # each gradient by it after that.
        whole = backend.replicas == 1 and options["accumulate"] == 1
        self._divided_at_once = whole and options["precision"] != "mixed_float16"
        self._summed = task.loss_reduction == "sum"
        self._by_rows = self._updated_by_rows()
        self._lookups = self._by_lookup()
        self._statistics = statistics(built.model) if backend.replicas > 1 else []
        self._state = state(built.model)
        communication.check(backend, options["compression"])
        backend.check(self._variables, data, options)
        approximations.check(backend, options, data.train, self._summed)
        self._local_steps = options["local_steps"] if backend.replicas > 1 else 1
        self._adasum = options["reduction"] == "adasum" and backend.replicas > 1
        if (
            backend.replicas > 1
            and not (backend.own_variables or options["sync_batch_norm"])
            and batch_norms(built.model)
        ):
            raise UsageError(
                f"sync_batch_norm=False with backend={backend.name!r}: variables are stored once, so no replica has "
                "statistics of its own; leave it out, or use backend='mirrored'"
            )
        share(built.model, options["sync_batch_norm"] and self._local_steps == 1)
        row_random.reseed(built.model)
        # What is carried from row to row must not see a stand-in; it is for one replica, which needs none.
        carried = carried_variables(built.model)
        self._state += carried
        if has_own_state(built.model) and not carried:
            self.computing.everyone |= {data.train, data.eval}
        if self._lookups and backend.replicas * options["accumulate"] > 1:
            self.computing.everyone.add(data.train)
        if backend.replicas > 1:
            row_random.by_row()
        with backend.scope():
            scaled = options["precision"] == "mixed_float16"
            self.scale = LossScale(options["batch_size"]) if scaled else None
        self.averages = Averages(self._variables, options["ema"], backend)
        # Where nobody can be waited for, nobody asks what a worker is waiting for.
        waits = backend.workers > 1 or any(isinstance(each, StreamSource) for each in (data.train, data.eval))
        self.phase_marker = PhaseMarker(waits, bool(options["profile"]), backend.replicas)
        self.evaluation = Evaluation(self)
        self.gradients: list[tf.Variable] = []
        self._bad_batch: list[tf.Variable] = []
        if isinstance(data.train, StreamSource):
            with tf.device("CPU:0"):
                self._bad_batch = [
                    tf.Variable(tensor, trainable=False, shape=tf.TensorShape(None))
                    for tensor in tf.nest.flatten(data.train.nothing())
                ]
        self._bad_steps_end_it = options["on_nonfinite"] == "stop"
        # Many steps as one program of XLA's, where it needs nothing from outside: no collective, no iterator.
        self._scans = self._divided_at_once and backend.name == "single" and options["compile"] == "xla"
        self._scanning, self._untried, self._block_steps = False, True, BLOCK_STEPS
        self._counted = False  # see `_train_batches`
        self._apart, self._gpus = False, tf.config.list_logical_devices("GPU")  # see `_is_to_be_apart`
        if self._scans and isinstance(data.train, ArraySource) and data.train.uniform:
            most = options["steps_per_call"] if isinstance(options["steps_per_call"], int) else BLOCK_STEPS
            self._block_steps = max(1, min(most, BLOCK_STEPS, BLOCK_BYTES // data.train.batch_bytes))
        else:
            self._scans = False
        self._compile()

    def _updated_by_rows(self) -> set[int]:
        """The variables that take the gradient of an embedding as the rows that it has, to the same bits.

        Everything but a plain step needs the whole gradient: other replicas and micro-batches, clipping, and optimizers
        that change all rows, as with momentum. Not on a GPU, where it has not been measured.
        """
        options = self.options
        clips = options["clip_norm"] is not None or options["clip_value"] is not None
        by_array = isinstance(self.data.train, ArraySource)  # others must choose between a gradient and none
        if clips or not (self._divided_at_once and self.backend.name == "single" and by_array):
            return set()
        if options["compile"] != "graph" or tf.config.list_logical_devices("GPU"):
            return set()
        return {index for each, of in self.built.optimizers.values() if updates_rows(each) for index in of}

    def _by_lookup(self) -> dict[int, str]:
        """The variables whose gradients keep a row for each lookup, and of which kind these are: see `lookups`."""
        options = self.options
        source = self.data.train
        if isinstance(source, ArraySource):
            uniform = source.uniform
        else:
            uniform = all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(source.dataset.element_spec))
        # Every replica must have room for the same number of lookups, in each step.
        dense = options["clip_value"] is not None or options["reduction"] == "adasum" or not uniform
        return {} if dense else dict(self.built.lookups)

    def watch_gradients(self) -> None:
        """From now on `gradients` has the last gradient of each trainable variable: reduced, divided, clipped."""
        with self.backend.scope():
            self.gradients = [
                tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False) for each in as_tf(self._variables)
            ]
        self._compile()

    def _compile(self) -> None:
        # What is ours is traced as it stands: AutoGraph, which the task's own methods need (`as_written`), would take
        # seconds to convert it.
        self._train = tf.function(self._train_steps, autograph=False)
        self._block = tf.function(self._train_block, jit_compile=True, autograph=False)
        self._average = tf.function(self._average_statistics, autograph=False)

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that a checkpoint holds beside those of model and optimizer."""
        return [*self.averages.variables, *(self.scale.variables if self.scale else [])]

    def train(self, iterator: Any, epoch: int, step: int, steps: int) -> tuple[int, int, np.ndarray]:
        """Makes up to `steps` training steps in one compiled call.

        Args:
            iterator: what `data.train.start` returned.
            epoch: the epoch, from 0.
            step: the step within the epoch, from 0.
            steps: how many to make at most.

        Returns:
            How many were made; how it ended (`GOING`, `EPOCH_ENDED`; `NOT_FINITE`, `LAST_SKIPPED`: see `not_finite`);
            and their totals, to be added up and handed to `means`: the numbers of examples and of skipped steps, the
            sums of all values, and the states of all metrics; float64.
        """
        if self._scans and self._untried:
            packed = self._try_blocks(iterator, epoch, step, min(steps, self._block_steps))
        else:
            packed = self._joined(step, self._call(iterator, epoch, step, steps))
        finite, packed = np.split(packed, [len(self._checked())])
        if packed[1] in (NOT_FINITE, LAST_SKIPPED):
            self.not_finite = [name for name, good in zip(self._checked(), finite, strict=True) if not good]
        return int(packed[0]), int(packed[1]), packed[2:]

    def graph(self, iterator: Any) -> tf.Graph:
        """The graph that `train` runs with such an iterator: traced already, once it has."""
        number = tf.constant(0, tf.int64)
        return self._train.get_concrete_function(iterator, number, number, number).graph

    def bad_batch(self, epoch: int, step: int) -> Rows:
        """The worker's part of the batch that wasn't finite, after a call that ended with it: NumPy arrays.

        Args:
            epoch: the epoch, from 0.
            step: the step within the epoch, from 0.
        """
        source = self.data.train
        at = tf.constant(epoch, tf.int64), tf.constant(step, tf.int64)
        if isinstance(source, StreamSource):
            leaves = [variable.read_value() for variable in self._bad_batch]
            rows = source.whole(*at, tf.nest.pack_sequence_as(source.batch_spec, leaves))
        else:
            rows = source.whole(*at)
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), rows)

    def means(self, totals: np.ndarray) -> dict[str, float]:
        """The means and metrics of totals of `train`; nan where the weight is 0."""
        means: dict[str, float] = {}
        sums_at, states_at = SUMS, SUMS + sum(values.width for values in self._trained.values())
        for name, values in self._trained.items():
            sums, states = totals[sums_at:][: values.width], totals[states_at:][: values.state_width]
            means |= {f"{name}_{key}" if name else key: value for key, value in values.means(sums, states).items()}
            sums_at, states_at = sums_at + values.width, states_at + values.state_width
        if self.scale is not None:
            means["loss_scale"] = float(self.backend.local_values(self.scale.scale)[0])
        if self.scale is not None or self.options["on_nonfinite"] == "skip":
            means["skipped_steps"] = float(totals[SKIPPED])
        return means

    def metric_names(self) -> list[str]:
        """The names that `means` will give."""
        width = sum(values.width + values.state_width for values in self._trained.values())
        return list(self.means(np.zeros(SUMS + width)))

    def average_statistics(self) -> None:
        """Gives all replicas the mean of their statistics. All workers must call it.

        Synchronised ones are equal, and stay as they are to the bit.
        """
        if self._statistics:
            self._average()

    def _call(self, iterator: Any, *numbers: int) -> list[tuple[int, np.ndarray]]:
        return self.computing.call(lambda: self._train, iterator, *numbers, compile=self._compile)

    def _joined(self, step: int, parts: list[tuple[int, np.ndarray]]) -> np.ndarray:
        """What the parts of a call from `step` on have come to; a step that isn't finite counts as the last one."""
        made, status = (len(self._checked()) + place for place in (0, 1))
        at, first_bad = min(parts, key=lambda part: (part[1][status] != NOT_FINITE, part[0]))
        packed = np.sum([part for _, part in parts], 0)
        packed[:made], packed[status] = first_bad[:made], first_bad[status]
        if packed[status] == NOT_FINITE:
            packed[made] = at - step + first_bad[made]
        return packed

    # Training: in cross-replica context

    def _train_steps(self, iterator: Any, epoch: tf.Tensor, step: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        self.traces += 1
        backend = self.backend
        tally, end = self._nothing_yet(step), step + steps
        if self._scans:
            tally = self._train_blocks(iterator, epoch, end, tally)
        tally = self._train_batches(iterator, epoch, end, tally)
        states = tally.states
        if any(values.state_width for values in self._trained.values()):
            states = backend.run(lambda states: backend.all_reduce([states])[0], states)
        stop = self._bad_steps_end_it
        bad = NOT_FINITE if stop else LAST_SKIPPED
        status = tf.where(tally.ended, EPOCH_ENDED, tf.where(tally.going, GOING, bad))
        unmade = tally.ended | (~tally.going & stop)
        made = tally.step - step - tf.cast(unmade, tf.int64)
        counts = tf.cast([made, tf.cast(status, tf.int64)], tf.float64)
        totals = tf.where(unmade, tally.before, tally.totals)
        packed = tf.concat([tf.cast(tally.finite, tf.float64), counts, totals, backend.first(states)], 0)
        self.phase_marker.lap(HOST, packed)
        return packed

    def _nothing_yet(self, step: tf.Tensor) -> LoopState:
        zeros = tf.zeros([SUMS + sum(values.width for values in self._trained.values())], tf.float64)
        width = sum(values.state_width for values in self._trained.values())
        states = self.backend.run(lambda: tf.zeros([width], tf.float64))
        finite = tf.ones([len(self._checked())], tf.bool)
        return LoopState(step, tf.constant(True), tf.constant(False), zeros, zeros, states, finite)

    def _one_step(self, feed: Any, tally: LoopState) -> LoopState:
        self._begin(feed, tally)
        as_written(self.task.train_step)(self.model, self)
        return self._finish(tally)

    def _train_batches(self, iterator: Any, epoch: tf.Tensor, end: tf.Tensor, tally: LoopState) -> LoopState:
        """Makes the steps up to `end`, one batch after the other: the loop of all loops.

        Over arrays it is counted: nothing that a step computes decides whether there is another one, and those after a
        bad step come to nothing. A condition that hung on gradients would make a circle of the graph, in which
        TensorFlow's rewriters walk from gradients to the operations that they belong to, and miss them: the backward
        pass of a pooling layer took seven times as long.
        """
        source, parts = self.data.train, self.options["accumulate"]
        counted = self._counted = source.reads_ahead

        def more(number: tf.Tensor, following: Any, tally: LoopState) -> tf.Tensor:
            return number < end if counted else (number < end) & tally.going

        def step(number: tf.Tensor, following: Any, tally: LoopState) -> tuple[tf.Tensor, Any, LoopState]:
            if source.reads_ahead:
                # Nothing in this step depends on it: it is read while the step computes.
                taken, following = following, source.read_batch(iterator, epoch, number + 1, parts)
            else:
                with tf.control_dependencies(self.phase_marker.at(DATA)):
                    taken = source.read_batch(iterator, epoch, number)
            self.phase_marker.at(COMPUTE, taken)
            tally = self._one_step((epoch, number, taken), tally)
            self.phase_marker.lap(DATA, tally.totals)
            return number + 1, following, tally

        def stretch(number: tf.Tensor, following: Any, tally: LoopState) -> tuple[tf.Tensor, Any, LoopState]:
            until, totals = tf.minimum(end, (number // self._local_steps + 1) * self._local_steps), tally.totals
            number, following, tally = repeated(lambda number, *_: number < until, step, number, following, tally)
            return number, following, self._together(tally, totals)

        following = source.read_batch(iterator, epoch, tally.step, parts) if source.reads_ahead else ()
        body = step if self._local_steps == 1 else stretch
        return repeated(more, body, tally.step, following, tally)[-1]

    def _together(self, tally: LoopState, before: tf.Tensor) -> LoopState:
        """After local steps: gives all replicas the mean of their variables, and adds up what each has counted.

        A replica whose loss or gradient wasn't finite has made no step since; now all hear of it.

        Args:
            tally: the replica's own.
            before: the totals before these steps.
        """
        backend, own = self.backend, tally.totals - before
        bad = tf.cast(~tally.finite, tf.float64)

        def summed() -> tf.Tensor:
            steps = tf.one_hot(backend.replica(), backend.replicas, tf.cast(tally.step, tf.float64), dtype=tf.float64)
            return backend.all_reduce([tf.concat([steps, bad, own], 0)])[0]

        self.phase_marker.at(ALL_REDUCE, own)
        backend.run(self._averaged, [*self._changed_by(""), *self._statistics])
        everyone = backend.first(backend.run(summed))
        steps, bad, own = tf.split(everyone, [backend.replicas, bad.shape[0], own.shape[0]])
        finite, totals = bad == 0, before + own
        self.phase_marker.at(COMPUTE, totals)
        step = tf.cast(tf.reduce_min(steps), tf.int64)
        return tally._replace(step=step, going=tf.reduce_all(finite), before=totals, totals=totals, finite=finite)

    def _train_blocks(self, iterator: Any, epoch: tf.Tensor, end: tf.Tensor, tally: LoopState) -> LoopState:
        """Makes the steps that have a whole batch, many of them in one program of XLA's.

        A block in which anything isn't finite is left as if it had never been: `_train_batches` makes its steps, and
        finds the one.
        """
        source, size = self.data.train, self._block_steps
        assert isinstance(source, ArraySource)
        whole = tf.minimum(end, source.size // self.options["batch_size"])

        def more(following: Any, fine: tf.Tensor, tally: LoopState) -> tf.Tensor:
            return (tally.step < whole) & fine

        def steps(block: Any, fine: tf.Tensor, tally: LoopState) -> tuple[Any, tf.Tensor, LoopState]:
            following = source.read_batches(iterator, epoch, tally.step + size, size)
            self.phase_marker.at(COMPUTE, block)
            tally, fine = self._block(block, epoch, tf.minimum(whole, tally.step + size), tally)
            return following, fine, tally

        first = source.read_batches(iterator, epoch, tally.step, size)
        return repeated(more, steps, first, tf.constant(True), tally)[-1]

    def _train_block(
        self, block: Any, epoch: tf.Tensor, end: tf.Tensor, tally: LoopState
    ) -> tuple[LoopState, tf.Tensor]:
        """The steps up to `end`, whose batches are in `block`, and whether all in them was finite: for XLA."""
        changed = [*self._changed_by(""), *self._state]
        before, at_first = [variable.read_value() for variable in changed], tally
        signs = [tf.zeros([], self.dtype), *(tf.zeros(each.shape, each.dtype) for each in as_tf(self._variables))]
        self._scanning = self.phase_marker.silent = True
        self._counted = False

        def more(place: tf.Tensor, signs: list[tf.Tensor], tally: LoopState) -> tf.Tensor:
            return tally.step < end

        def step(
            place: tf.Tensor, signs: list[tf.Tensor], tally: LoopState
        ) -> tuple[tf.Tensor, list[tf.Tensor], LoopState]:
            self._signs: dict[int, tf.Tensor] = {}
            index, batch = tf.nest.map_structure(lambda tensor: tensor[place], block)
            tally = self._one_step((epoch, tally.step, (index, batch)), tally)
            signs = [sign + self._signs[at] if at in self._signs else sign for at, sign in enumerate(signs)]
            return place + 1, signs, tally

        # Counted from a constant: what comes from outside would be a constant too, and compiled anew for each value.
        _, signs, tally = repeated(more, step, tf.constant(0, tf.int64), signs, tally)
        self._scanning = self.phase_marker.silent = False
        fine = tf.reduce_all(tf.stack([all_finite(sign) for sign in signs]))
        for variable, value in zip(changed, before, strict=True):
            variable.assign(tf.where(fine, variable, value))
        return tf.nest.map_structure(lambda new, old: tf.where(fine, new, old), tally, at_first), fine

    def _try_blocks(self, iterator: Any, epoch: int, step: int, steps: int) -> np.ndarray:
        """Makes the steps of a block; where XLA can't compile it, says why, and leaves the task to the graph.

        A program that isn't compiled has changed nothing.
        """
        source = self.data.train
        assert isinstance(source, ArraySource)
        try:
            packed = self._joined(step, self._call(iterator, epoch, step, steps))
            self._untried = step >= source.size // self.options["batch_size"]
            return packed
        except tf.errors.OpError as error:
            reason = " ".join(str(error.message).split())[:300]
            warnings.warn(f"XLA can't compile this task ({reason}): as compile='graph'", stacklevel=2)
            self._scans = self._scanning = self.phase_marker.silent = False
            self.computing.uncompiled.add(source)
            self._compile()
        return self._joined(step, self._call(iterator, epoch, step, steps))

    def _begin(self, feed: Any, tally: LoopState) -> None:
        """Starts to trace a step."""
        self._going = tally.going
        if self._state:
            self._state_before = self.backend.run(lambda: [tf.convert_to_tensor(variable) for variable in self._state])
        self._feed, self._graph, self._phase = feed, tf.compat.v1.get_default_graph(), -1
        self._sums: dict[str, tf.Tensor] = {}
        self._states: dict[str, Any] = {}
        self._finite: dict[str, tf.Tensor] = {}

    @tf.autograph.experimental.do_not_convert
    def minimize(self, values: Callable[[Any], dict[str, Any]], optimizer: str = "") -> dict[str, tf.Tensor]:
        """One optimizer step, from the values of the global batch; to be called in `TrainTask.train_step`.

        Args:
            values: a function of a batch, which returns what `compute` would.
            optimizer: the name of the one of several optimizers that is to make the step; "" is all, each for its
                variables.

        Returns:
            The values' means over the global batch, by name: scalar tensors.
        """
        backend, parts = self.backend, self.options["accumulate"]
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise self.computing.fail(
                UsageError(
                    "step.minimize() within tf.cond, tf.while_loop, or an `if` or `for` over a tensor: call it as "
                    "often in each step, and multiply the loss or the weight by 0 where it shall do nothing"
                )
            )
        known = self._trained[optimizer]
        self._phase += 1

        def part_sums(feed: Any, part: tf.Tensor, batch_rows: Any) -> Any:
            return self._part_sums(values, optimizer, feed, part, batch_rows)

        self._batch_rows = self._rows_of_batch() if self._summed else ()
        found = backend.run(part_sums, self._feed, tf.constant(0, tf.int64), self._batch_rows)
        gradients, sums, states = self._accumulated(part_sums, found) if parts > 1 else found
        self.phase_marker.at(ALL_REDUCE, backend.first(gradients))
        gradients, sums, checked = backend.run(lambda *pair: self._reduced(optimizer, *pair), gradients, sums)
        sums, (applies, finite) = backend.first(sums), backend.first(checked)
        self.phase_marker.at(COMPUTE, sums)
        if self.options["on_nonfinite"] == "stop" and self.scale is None:
            for earlier in self._finite.values():
                applies &= tf.reduce_all(earlier)
        if self._counted:
            applies &= self._going

        self._when(
            applies,
            lambda: backend.run(lambda gradients: self._apply(optimizer, gradients), gradients),
            self._changed_by(optimizer),
        )
        means = tf.math.divide_no_nan(sums[SUMS::2], sums[SUMS + 1 :: 2])
        if optimizer in self._sums:
            before, finite = self._sums[optimizer], finite & self._finite[optimizer]
            sums = tf.concat([before[:SUMS], before[SUMS:] + sums[SUMS:]], 0)  # the same examples, once more
            states = backend.run(tf.add, states, self._states[optimizer])
        self._sums[optimizer], self._states[optimizer], self._finite[optimizer] = sums, states, finite
        return {name: tf.cast(means[i], self.dtype) for i, name in enumerate(known.names)}

    def _rows_of_batch(self) -> Any:
        """In each replica: how many rows the global batch has."""
        backend, source = self.backend, self.data.train

        def counted(feed: Any) -> tf.Tensor:
            if source.layout is None:
                return source.batch_rows(feed)
            # Each worker reads a stream of its own, and its first replica speaks for it.
            speaks = backend.replica() % backend.local_replicas == 0
            own = count(feed[-1])
            return backend.all_reduce([tf.where(speaks, own, tf.zeros_like(own))])[0]

        return backend.run(counted, self._feed)

    def _accumulated(self, part_sums: Any, sums: Any) -> Any:
        """Adds what the other micro-batches give to the sums of the first."""

        def add(*pairs: Any) -> Any:
            return tf.nest.map_structure(tf.add, *pairs)

        def body(part: tf.Tensor, sums: Any) -> Any:
            return part + 1, self.backend.run(
                add, sums, self.backend.run(part_sums, self._feed, part, self._batch_rows)
            )

        parts = tf.constant(self.options["accumulate"], tf.int64)
        start = tf.constant(1, tf.int64), sums
        return repeated(lambda part, sums: part < parts, body, *start)[1]

    def _finish(self, tally: LoopState) -> LoopState:
        """Ends the trace of a step: what the call has come to with it."""
        backend, scale = self.backend, self.scale
        each_finite = joined([self._finite[name] for name in self._trained])
        going = finite = tf.reduce_all(each_finite)
        sums = [self._sums[name] for name in self._trained]
        totals = tf.cast(joined([sums[0], *(each[SUMS:] for each in sums[1:])]), tf.float64)
        examples, ended, seen = sums[0][EXAMPLES], tally.ended, sums[0][EXAMPLES] != 0.0
        if self._counted:
            seen &= tally.going
        if isinstance(self.data.train, StreamSource):
            ended = examples == 0.0
            tf.cond(finite, lambda: ended, self._keep_batch)
            going &= ~ended
        if scale is not None:
            # Not a sign of anything wrong: the step is skipped, and the next one is made with half the scale.
            self._when(seen, lambda: backend.run(lambda: scale.update(finite)), scale.variables)
            going |= (self.options["on_nonfinite"] == "skip" or ~scale.exhausted()) & ~ended
        if self.backend.asynchronous and not self._bad_steps_end_it:
            going = tf.constant(True)  # nobody could make up for the steps that a part of a call leaves out
        if not self._bad_steps_end_it or scale is not None:
            skipped = tf.concat([totals[:SKIPPED], [1], tf.zeros_like(totals[SUMS:])], 0)
            totals = tf.where(finite, totals, skipped)
        good = finite & tally.going if self._counted else finite
        if self._state and not self._scanning:
            # What the forward pass has changed, before it was known that the step is worth nothing.
            self._when(~good, lambda: backend.run(self._take_back_state, self._state_before), self._state)

        def added(states: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
            return states + tf.where(good, joined(parts), 0)

        states = tally.states
        if any(values.state_width for values in self._trained.values()):
            states = backend.run(added, states, *(self._states[name] for name in self._trained))
        after = LoopState(tally.step + 1, going, ended, tally.totals, tally.totals + totals, states, each_finite)
        if self._counted:  # what comes behind the step that ended the call was not made
            fields = [name for name in LoopState._fields if name not in ("ended", "states")]
            after = after._replace(
                **{name: tf.where(tally.going, getattr(after, name), getattr(tally, name)) for name in fields}
            )
        return after

    def _when(self, condition: tf.Tensor, act: Callable[[], Any], variables: list[tf.Variable]) -> None:
        """Does what `act` does to `variables`, if the condition holds."""
        if not self._scanning:

            def done() -> tf.Tensor:
                act()
                return condition

            tf.cond(condition, done, lambda: condition)
            return
        # For XLA a selection is part of the update itself, while a branch would copy what goes in and out.
        before = [variable.read_value() for variable in variables]
        act()
        for variable, value in zip(variables, before, strict=True):
            variable.assign(tf.where(condition, variable, value))

    def _changed_by(self, optimizer: str) -> list[tf.Variable]:
        """The variables that `_apply` changes."""
        optimizers = [each for name, (each, _) in self.built.optimizers.items() if optimizer in ("", name)]
        slots = [variable for each in optimizers for variable in as_tf(optimizer_variables(each))]
        return slots + as_tf([self._variables[index] for index in self._of(optimizer)]) + self.averages.variables

    def _keep_batch(self) -> tf.Tensor:
        """Keeps this worker's batch, which the stream won't give again, for `bad_batch`."""
        for variable, tensor in zip(self._bad_batch, tf.nest.flatten(self._feed[-1]), strict=True):
            variable.assign(tensor)
        return tf.constant(True)

    def _take_back_state(self, before: list[tf.Tensor]) -> None:
        for variable, value in zip(self._state, before, strict=True):
            variable.assign(value)

    # Training: in each replica

    def _part_sums(self, values: Any, optimizer: str, feed: Any, part: tf.Tensor, batch_rows: Any) -> Any:
        """The replica's sums over one micro-batch: gradients, values (laid out as totals), of metrics' states.

        Without rows they are zeros, and nothing is computed (few layers bear a batch of 0), unless all replicas are
        needed: see `Replica`.
        """
        source, parts = self.data.train, self.options["accumulate"]
        rows = source.replica_rows(feed, self.backend.replica(), part, parts)

        def some(rows: Rows, stand_in: Any) -> Any:
            return self._sum_gradients(values, optimizer, rows, stand_in, part, batch_rows)

        if self.computing.compiles(source) and not self._scans:
            some = tf.function(some, jit_compile=True, autograph=False)
        elif self._apart and source not in self.computing.everyone:
            some = tf.function(some, autograph=False, experimental_attributes={"_noinline": True})
        return self.computing.of_rows(
            source, rows, parts, lambda stand_in: some(rows, stand_in), lambda: self._nothing(optimizer)
        )

    def _sum_gradients(
        self, values: Any, optimizer: str, rows: Rows, stand_in: Any, part: tf.Tensor, batch_rows: Any
    ) -> Any:
        """The gradients of S + W * sum(model.losses), the sums of all values, and what metrics gather.

        A summed loss is never divided by W: there, the penalties' factor is the share of the batch's rows.
        """
        known, parts = self._trained[optimizer], self.options["accumulate"]
        with self.computing.replica(self.data.train, rows, stand_in, parts, self._phase) as replica:
            trained = self._of(optimizer)
            with tf.GradientTape() as tape:
                found = as_written(values)(replica.batch)
                objective, sums = known.sums(found, self.dtype)
                weight, real = sums[1], replica.counts_something
                if real is not None:
                    objective, weight = tf.where(real, objective, 0), tf.where(real, weight, 0)
                penalties = losses(self.model)
                if penalties:
                    self._check_penalties()
                    factor = self._share(rows, batch_rows) if self._summed else weight
                    objective += factor * tf.add_n([tf.cast(penalty, self.dtype) for penalty in penalties])
                if self.scale is not None:
                    objective *= self.scale.scale
                if self._divided_at_once and not self._summed:
                    objective /= weight_or_one(weight)
            of = as_tf([self._variables[index] for index in trained])
            gradients = self.backend.gradients(tape, objective, of)
            self._connected[optimizer] = [
                index for index, gradient in zip(trained, gradients, strict=True) if gradient is not None
            ]
            self._check_connected(optimizer, trained)
            if self._is_to_be_apart():
                replica.problem = RetraceError()
                raise replica.problem
            gradients = [
                self._as_sent(index, gradient, replica, part)
                for index, gradient in zip(trained, gradients, strict=True)
                if gradient is not None
            ]
            # Laid out as totals are, with the number of examples that are its own.
            totals = tf.stack([tf.cast(count(rows.batch), self.dtype), tf.zeros([], self.dtype), *sums])
            states = known.states(found)
            if real is not None:
                totals, states = tf.where(real, totals, 0), tf.where(real, states, 0)
        return gradients, totals, states

    def _share(self, rows: Rows, batch_rows: tf.Tensor) -> tf.Tensor:
        """Which part of the global batch these rows are."""
        return tf.math.divide_no_nan(tf.cast(count(rows.batch), self.dtype), tf.cast(batch_rows, self.dtype))

    def _as_sent(self, index: int, gradient: Any, replica: Replica, part: tf.Tensor) -> Any:
        """A variable's gradient as it is to be added up over micro-batches and replicas; 0 for a stand-in."""
        real = replica.counts_something
        if index in self._lookups and isinstance(gradient, tf.IndexedSlices):
            values = gradient.values if real is None else tf.where(real, gradient.values, 0)
            places = self.backend.replicas * self.options["accumulate"]
            return lookups.packed(
                tf.IndexedSlices(values, gradient.indices),
                self._lookups[index],
                count(replica.batch),
                -(-self.data.train.most(self.options["accumulate"]) // self.backend.replicas),
                part * self.backend.replicas + tf.cast(self.backend.replica(), tf.int64),
                places,
            )
        self._lookups.pop(index, None)  # dense after all
        if index in self._by_rows and isinstance(gradient, tf.IndexedSlices):
            return each_row_once(gradient)
        gradient = tf.convert_to_tensor(gradient)
        gradient.set_shape(self._variables[index].shape)  # which is lost where rows are added up
        return gradient if real is None else tf.where(real, gradient, tf.zeros_like(gradient))

    def _is_to_be_apart(self) -> bool:
        """Whether it turns out that forward and backward pass had better be a graph of their own.

        On a CPU, TensorFlow exchanges operations for oneDNN's, these gradients only after the operation that they
        belong to, in the order of a walk through the graph. A loop is a circle, in which the walk may meet the gradient
        first: a matter of luck, which costs a small CNN half of its speed.
        """
        source = self.data.train
        if self._apart or self.options["compile"] == "xla" or source in self.computing.everyone or self._gpus:
            return False
        operations = tf.compat.v1.get_default_graph().get_operations()
        self._apart = any(operation.type in ("MaxPoolGrad", "MaxPool3DGrad", "LRNGrad") for operation in operations)
        return self._apart

    def _nothing(self, optimizer: str) -> Any:
        """What a replica without rows adds."""
        known, variables = self._trained[optimizer], as_tf(self._variables)
        zeros = [
            (lookups.nothing if index in self._lookups else tf.zeros)(variables[index].shape, variables[index].dtype)
            for index in self._connected[optimizer]
        ]
        return zeros, tf.zeros([SUMS + known.width], self.dtype), tf.zeros([known.state_width], tf.float64)

    def _of(self, optimizer: str) -> list[int]:
        """The variables that a `minimize` trains, by index."""
        return self.built.optimizers[optimizer][1] if optimizer else list(range(len(self._variables)))

    def _check_connected(self, optimizer: str, trained: list[int]) -> None:
        names = variable_names(self._variables)
        lost = [names[index] for index in trained if index not in self._connected[optimizer]]
        if len(lost) == len(trained):
            raise UsageError(
                "the loss depends on no variable of the model: compute() must return a loss that is made from "
                "model(...) by differentiable operations (no argmax, no .numpy(), no tf.cast to an integer)"
            )
        if lost:
            warnings.warn(f"the loss doesn't depend on {', '.join(lost)}: not trained", stacklevel=2)

    def _check_penalties(self) -> None:
        replicas, parts = self.backend.replicas, self.options["accumulate"]
        if self.built.penalty_grows and (replicas > 1 or parts > 1):
            raise UsageError(
                "a loss that the model adds (add_loss, model.losses) is a sum over the examples of a batch: of "
                f"{replicas} replica(s) with accumulate={parts}, each knows the sum of its own "
                "rows alone. Make it a mean over the examples, as by tf.reduce_mean(...); or a value of each example, "
                'added to the "loss" of compute()'
            )

    def _reduced(self, optimizer: str, gradients: list[tf.Tensor], sums: tf.Tensor) -> Any:
        """The gradients of the global batch, divided and clipped; its sums; and what is finite: see `_checked`."""
        if self._adasum:
            gradients = self.backend.adasum(self._divided(gradients, sums))
            sums = self.backend.all_reduce([sums])[0]
        elif self._local_steps == 1:
            scaled = self.scale is not None
            gradients, sums = self._reduced_sums(optimizer, gradients, sums, scaled)
        if self._summed:
            sums = by_batch(sums)
        gradients = [
            lookups.unpacked(gradient, tf.TensorShape(self._variables[index].shape))
            if index in self._lookups
            else gradient
            for index, gradient in zip(self._connected[optimizer], gradients, strict=True)
        ]
        checked = self._check(optimizer, gradients, sums[SUMS], sums[SUMS + 1])
        if not (self._divided_at_once or self._adasum) and (self.scale is not None or not self._summed):
            gradients = self._divided(gradients, sums)
        if self.options["clip_norm"] is not None:
            norm = tf.linalg.global_norm([tf.convert_to_tensor(each) for each in gradients]) if self._lookups else None
            gradients, _ = tf.clip_by_global_norm(gradients, self.options["clip_norm"], norm)
        limit = self.options["clip_value"]
        if limit is not None:
            gradients = [tf.clip_by_value(gradient, -limit, limit) for gradient in gradients]
        if self.gradients:
            for index, gradient in zip(self._connected[optimizer], gradients, strict=True):
                self.gradients[index].assign(tf.convert_to_tensor(gradient))
        return gradients, sums, checked

    def _reduced_sums(
        self, optimizer: str, gradients: list[tf.Tensor], sums: tf.Tensor, scaled: bool
    ) -> tuple[list[Any], tf.Tensor]:
        """Gradients and sums, added up over all replicas. Those by lookup, whose size varies, travel by themselves."""
        connected = self._connected[optimizer]
        dense = [place for place, index in enumerate(connected) if index not in self._lookups]
        found: dict[int, Any] = {}
        sent, sums = communication.reduced(
            self.backend, [gradients[place] for place in dense], sums, self.options, scaled
        )
        found |= zip(dense, sent, strict=True)
        for place, index in enumerate(connected):
            if index in self._lookups:
                found[place] = self.backend.all_reduce([gradients[place]])[0]
        return [found[place] for place in range(len(gradients))], sums

    def _divided(self, gradients: list[tf.Tensor], sums: tf.Tensor) -> list[tf.Tensor]:
        """Gradients of a sum as those of a mean, if it is a mean that is minimised; and without the loss scale."""
        weight = tf.ones([], self.dtype) if self._summed else weight_or_one(sums[SUMS + 1])
        if self.scale is not None:
            weight *= self.scale.scale
        return [divided(gradient, weight) for gradient in gradients]

    def _check(self, optimizer: str, gradients: list[tf.Tensor], loss: tf.Tensor, weight: tf.Tensor) -> Any:
        """Whether the step is to be applied; and whether the loss and each gradient are finite; see `_checked`.

        A sum is as little finite as any of its elements, and costs a quarter of looking at each. (A finite gradient
        whose sum is beyond the largest number counts as infinite.)
        """
        own, connected = self._of(optimizer), self._connected[optimizer]
        if self._scanning:
            # To XLA a look at each gradient costs as much as its update. A difference that is 0, unless there is no
            # number, is part of the update; `_train_block` looks at the sum of all steps'.
            for at, each in [(0, loss), *((1 + at, each) for at, each in zip(connected, gradients, strict=True))]:
                sign = tf.reduce_sum(each.values - each.values) if isinstance(each, tf.IndexedSlices) else each - each
                self._signs[at] = self._signs[at] + sign if at in self._signs else sign
            return weight != 0.0, tf.ones([1 + len(own)], tf.bool)
        values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
        sums = dict(zip(connected, map(tf.reduce_sum, values), strict=True))
        found = [tf.cast(sums[index], loss.dtype) if index in sums else tf.zeros_like(loss) for index in own]
        found = tf.math.is_finite(tf.stack([loss, *found]))
        # A batch whose weights sum to zero says nothing: the step changes nothing.
        return tf.reduce_all(found) & (weight != 0.0), found

    def _apply(self, optimizer: str, gradients: list[tf.Tensor]) -> None:
        """The optimizers' step, and that of the moving averages."""
        by_index = dict(zip(self._connected[optimizer], gradients, strict=True))
        for name, (each, indices) in self.built.optimizers.items():
            own = [index for index in indices if index in by_index]
            if own and optimizer in ("", name):
                try:
                    self.backend.apply(each, [by_index[i] for i in own], [self._variables[i] for i in own])
                except UsageError as problem:
                    raise self.computing.fail(problem) from None
        self.averages.follow(self._of(optimizer))

    def _checked(self) -> list[str]:
        """What is checked to be finite at each step, by name."""
        names = variable_names(self._variables)
        return [
            text
            for name in self._trained
            for text in ("the loss", *(f"the gradient of {names[index]}" for index in self._of(name)))
        ]

    # Statistics

    def _average_statistics(self) -> None:
        self.backend.run(self._averaged, self._statistics)

    def _averaged(self, variables: Sequence[tf.Variable]) -> None:
        """In each replica: the chief's value plus the mean distance to it, so that equal ones stay as they are.

        Of integers, such as an optimizer's counter, it is the chief's value.
        """
        backend = self.backend
        chief = backend.replica() == 0
        values = [variable.read_value() for variable in variables]
        firsts = backend.all_reduce([tf.where(chief, value, tf.zeros_like(value)) for value in values])
        distances = backend.all_reduce(
            [
                tf.where(value == first, tf.zeros_like(value), value - first)  # of infinite ones too
                for value, first in zip(values, firsts, strict=True)
            ]
        )
        for variable, first, distance in zip(variables, firsts, distances, strict=True):
            variable.assign(first + distance / backend.replicas if first.dtype.is_floating else first)


def joined(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The vectors, one behind the other."""
    return vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)


def divided(gradient: Any, weight: tf.Tensor) -> Any:
    """A gradient, dense or by rows, divided by a scalar."""
    weight = tf.cast(weight, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / weight, gradient.indices, gradient.dense_shape)
    return gradient / weight


def each_row_once(gradient: Any) -> Any:
    """A gradient that holds some rows, with no row twice: added up in the order in which a dense one would be."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def weight_or_one(weight: tf.Tensor) -> tf.Tensor:
    """What to divide by: a weight of 0 says nothing, and nothing is applied."""
    return tf.where(weight == 0.0, tf.ones_like(weight), weight)


def by_batch(sums: tf.Tensor) -> tf.Tensor:
    """A batch's sums, with a summed loss such that the mean over batches weighs each by its rows, as Keras's does."""
    rows = sums[EXAMPLES]
    return tf.concat([sums[:SUMS], [sums[SUMS] * rows, rows], sums[SUMS + 2 :]], 0)


def all_finite(tensor: tf.Tensor) -> tf.Tensor:
    """Whether no element is nan or infinite."""
    # The last axis by itself: XLA makes vector instructions of the others.
    return tf.reduce_all(tf.reduce_all(tf.math.is_finite(tensor), list(range(tensor.shape.rank - 1))))


def not_finite(step: int, epoch: int, names: list[str], kept: str = "") -> TrainingError:
    """The error for a loss or gradient that is nan or infinite at `step`; `names` says which; `kept` where to look."""
    what = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return TrainingError(
        f"step {step} (epoch {epoch}): not finite (nan or inf): {what}; nothing was applied from there on. Lower the "
        "learning rate, set clip_norm, look for bad values in the data, or skip such steps with on_nonfinite='skip'"
        + (f"; {kept}" if kept else "")
    )
