"""The mathematics: the compiled training and evaluation steps.

Per replica, S = sum(loss * weight) and W = sum(weight). The gradients of S + W * sum(model.losses), and S, W and the
sums of every other value, travel in one fused all-reduce(SUM). Then: divide by the global W, check finiteness, clip,
apply; once, on reduced values. A replica without data contributes zeros. The result doesn't depend on how many
replicas made it, but for the order in which floats are added.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.build import as_tf, check, losses, trainable_variables, variable_names
from loop.data import Data, count, rows
from loop.errors import TrainingError, UsageError
from loop.task import TrainTask

GOING, EPOCH_ENDED, NOT_FINITE = 0, 1, 2
"""How a compiled call ended: all steps made; the data is at its end; a loss or gradient is not finite."""


class Step:
    """The compiled functions of a run.

    Args:
        task, model, optimizer: the task and what it built.
        names: the names of the values that `task.compute` returns, the loss first.
        backend: the engine.
        data: the sources.
        clip_norm: the greatest global norm of the gradient, or None.
        accumulate: into how many micro-batches each replica cuts its share.
        xla: whether XLA compiles each replica's forward and backward pass.
    """

    def __init__(
        self,
        task: TrainTask,
        model: Any,
        optimizer: Any,
        names: Sequence[str],
        backend: Backend,
        data: Data,
        clip_norm: float | None = None,
        accumulate: int = 1,
        xla: bool = False,
    ) -> None:
        self.task, self.model, self.optimizer, self.backend, self.data = task, model, optimizer, backend, data
        self.names = list(names)
        self.clip_norm, self.accumulate = clip_norm, accumulate
        self.traces = 0
        self._variables = trainable_variables(model)
        wide = any(variable.dtype == "float64" for variable in as_tf(self._variables))
        self._dtype = tf.float64 if wide else tf.float32
        self._connected: list[int] = []
        self._problem: Exception | None = None
        self._gradient_sums = tf.function(self._sum_gradients, jit_compile=True) if xla else self._sum_gradients
        self._train = tf.function(self._train_steps)
        self._evaluate = tf.function(self._evaluate_steps)

    @property
    def width(self) -> int:
        """The length of a vector of totals."""
        return 2 * len(self.names) + 1

    def train(self, handle: Any, epoch: int, step: int, steps: int) -> tuple[int, int, np.ndarray]:
        """Makes up to `steps` training steps in one compiled call.

        Args:
            handle: what `data.train.start` returned.
            epoch: the epoch, from 0.
            step: the step within the epoch, from 0.
            steps: how many to make at most.

        Returns:
            How many were made; how it ended (`GOING`, `EPOCH_ENDED`, `NOT_FINITE`); and their totals: float64 of shape
            [2 * values + 1], for each value its weighted sum and its weight, then the number of examples.
        """
        packed = self._call(self._train, handle, epoch, step, steps)
        return int(packed[0]), int(packed[1]), packed[2:]

    def evaluate(self) -> np.ndarray:
        """The totals (see `train`) of the whole evaluation data: each example once, in one compiled call."""
        source = self.data.eval
        assert source is not None
        steps = source.steps_per_epoch or np.iinfo(np.int64).max
        return self._call(self._evaluate, source.start(0, 0), 0, 0, steps)

    def means(self, totals: np.ndarray, prefix: str = "") -> dict[str, float]:
        """Each value's mean over a vector of totals; nan where the weight is 0."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return {prefix + name: float(totals[2 * i] / totals[2 * i + 1]) for i, name in enumerate(self.names)}

    def _call(self, function: Any, handle: Any, *numbers: int) -> np.ndarray:
        # One trace serves all calls, because numbers are tensors; one transfer brings back all results.
        try:
            return function(handle, *(tf.constant(number, tf.int64) for number in numbers)).numpy()
        except Exception:
            if self._problem is not None:  # raised while tracing, which wraps it in a text of its own
                raise self._problem from None
            raise

    def _train_steps(self, handle: Any, epoch: tf.Tensor, step: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        self.traces += 1
        source, backend = self.data.train, self.backend
        done, status = tf.constant(0, tf.int64), tf.constant(GOING)
        totals = tf.zeros([self.width], tf.float64)
        while done < steps and status == GOING:
            feed = source.take(handle, epoch, step + done)
            gradients, sums, finite = backend.run(self._reduced_gradients, feed)
            sums, finite = backend.first(sums), backend.first(finite)
            if sums[-1] == 0.0:
                status = tf.constant(EPOCH_ENDED)
                source.next_epoch()
            elif not finite:
                status = tf.constant(NOT_FINITE)
            else:
                if sums[1] != 0.0:  # a batch whose weights sum to zero says nothing: the step changes nothing
                    backend.run(self._apply, gradients)
                totals += tf.cast(sums, tf.float64)
                done += 1
        return tf.concat([tf.cast([done, tf.cast(status, tf.int64)], tf.float64), totals], 0)

    def _reduced_gradients(self, feed: Any) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """In each replica: the gradients of the global batch, the sums of its values, and whether all is finite."""
        batch = self.data.train.share(feed, self.backend.replica())
        gradients, sums = self._share_sums(batch)
        *gradients, sums = self.backend.all_reduce([*gradients, sums])
        finite = tf.math.is_finite(sums[0])
        for gradient in gradients:
            finite &= tf.reduce_all(tf.math.is_finite(gradient))
        weight = tf.where(sums[1] == 0.0, tf.ones_like(sums[1]), sums[1])
        gradients = [gradient / tf.cast(weight, gradient.dtype) for gradient in gradients]
        if self.clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self.clip_norm)
        return gradients, sums, finite

    def _share_sums(self, batch: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The sums of gradients and values over the replica's share, micro-batch by micro-batch."""
        if self.accumulate == 1:
            return self._part_sums(batch)
        n, parts = count(batch), self.accumulate

        def micro(part: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
            low, high = rows(n, part, parts)
            return self._part_sums(tf.nest.map_structure(lambda tensor: tensor[low:high], batch))

        gradients, sums = micro(tf.constant(0, tf.int64))
        for part in tf.range(1, parts, dtype=tf.int64):
            more, more_sums = micro(part)
            gradients = [gradient + other for gradient, other in zip(gradients, more, strict=True)]
            sums += more_sums
        return gradients, sums

    def _part_sums(self, batch: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The sums over one batch. One without rows adds zeros, and isn't computed: few layers bear a batch of 0."""
        if not self.data.train.leaves_some_without(self.backend.replicas * self.accumulate):
            return self._gradient_sums(batch)

        def nothing() -> tuple[list[tf.Tensor], tf.Tensor]:
            variables = as_tf(self._variables)  # which are connected is known by now: the other branch is traced first
            zeros = [tf.zeros(variables[index].shape, variables[index].dtype) for index in self._connected]
            return zeros, tf.zeros([self.width], self._dtype)

        return tf.cond(count(batch) > 0, lambda: self._gradient_sums(batch), nothing)

    def _sum_gradients(self, batch: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The gradients of S + W * sum(model.losses), and the sums of all values, over one batch."""
        with tf.GradientTape() as tape:
            values = self.task.compute(self.model, batch, training=True)
            objective, sums = self._sums(values, batch)
            if penalties := losses(self.model):
                objective += sums[1] * tf.add_n([tf.cast(penalty, self._dtype) for penalty in penalties])
        gradients = tape.gradient(objective, as_tf(self._variables))
        self._connected = [index for index, gradient in enumerate(gradients) if gradient is not None]
        self._check_connected()
        return [tf.convert_to_tensor(gradients[index]) for index in self._connected], sums

    def _sums(self, values: dict[str, Any], batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """The weighted sum of the loss, to be differentiated; and all totals, not to be.

        Totals: for each value its weighted sum and its weight, then the number of examples; shape [2 * values + 1].
        """
        try:
            check(values, None, self.names)
        except UsageError as error:
            self._problem = error
            raise
        weight = values.get("weight")
        if weight is not None:
            weight = tf.stop_gradient(tf.cast(weight, self._dtype))
        sums = []
        for name in self.names:
            value = tf.cast(values[name], self._dtype)
            if weight is None:
                sums += [tf.reduce_sum(value), tf.cast(tf.size(value), self._dtype)]
            else:  # the weight of an example is that of all its elements
                trailing = [1] * (value.shape.rank - weight.shape.rank)
                each = tf.broadcast_to(tf.reshape(weight, [*tf.unstack(tf.shape(weight)), *trailing]), tf.shape(value))
                sums += [tf.reduce_sum(tf.math.multiply_no_nan(value, each)), tf.reduce_sum(each)]
        return sums[0], tf.stop_gradient(tf.stack([*sums, tf.cast(count(batch), self._dtype)]))

    def _check_connected(self) -> None:
        names = variable_names(self._variables)
        lost = [name for index, name in enumerate(names) if index not in self._connected]
        if len(lost) == len(names):
            self._problem = UsageError(
                "the loss depends on no variable of the model: compute() must return a loss that is made from "
                "model(...) by differentiable operations (no argmax, no .numpy(), no tf.cast to an integer)"
            )
            raise self._problem
        if lost:
            warnings.warn(f"the loss doesn't depend on {', '.join(lost)}: not trained", stacklevel=2)

    def _apply(self, gradients: list[tf.Tensor]) -> None:
        self.backend.apply(self.optimizer, gradients, [self._variables[index] for index in self._connected])

    def _evaluate_steps(self, handle: Any, epoch: tf.Tensor, step: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        source, backend = self.data.eval, self.backend
        assert source is not None

        def sums(batch: Any) -> tf.Tensor:
            return self._sums(self.task.compute(self.model, batch, training=False), batch)[1]

        def add(totals: tf.Tensor, feed: Any) -> tf.Tensor:
            batch = source.share(feed, backend.replica())
            if source.leaves_some_without(backend.replicas):
                nothing = tf.zeros([self.width], self._dtype)
                return totals + tf.cast(tf.cond(count(batch) > 0, lambda: sums(batch), lambda: nothing), tf.float64)
            return totals + tf.cast(sums(batch), tf.float64)

        totals = backend.run(lambda: tf.zeros([self.width], tf.float64))
        going = tf.constant(True)
        while step < steps and going:
            feed = source.take(handle, epoch, step)
            going = source.more(feed)
            totals = backend.run(add, totals, feed)
            step += 1
        return backend.first(backend.run(lambda totals: backend.all_reduce([totals])[0], totals))


def not_finite(step: int, epoch: int) -> TrainingError:
    """The error for a loss or gradient that is nan or infinite at `step`."""
    return TrainingError(
        f"step {step} (epoch {epoch}): the loss or its gradient is not finite (nan or inf); this step was not applied. "
        "Lower the learning rate, set clip_norm, or look for bad values in the data"
    )
