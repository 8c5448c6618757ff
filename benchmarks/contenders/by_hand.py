"""Loops by hand, as a good engineer writes them: a Keras model and optimizer, compiled steps, accumulated metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.worker import Port, Run, drive
from benchmarks.workloads import Workload


class ByHand:
    """A workload, and the ways to train it by hand. All of them train the same model further.

    Args:
        workload: what is trained.
        checked: whether a step that isn't finite changes nothing, as in ours.
    """

    def __init__(self, workload: Workload, checked: bool = False) -> None:
        self.checked = checked
        keras.config.set_dtype_policy(workload.precision)
        self.workload, self.model, self.optimizer = workload, workload.build(), workload.keras_optimizer()
        if workload.precision == "mixed_float16":
            self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
        self.optimizer.build(self.model.trainable_variables)
        self.inputs, self.labels = (tf.constant(array) for array in workload.arrays())
        self.examples, self.batch_size = len(self.inputs), workload.batch_size

    def update(self, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """One step; the means of all values over the batch, the loss first: float32 [values]."""
        with tf.GradientTape() as tape:
            values = self.workload.values(labels, self.model(inputs, training=True))
            means = [tf.reduce_mean(value) for value in values.values()]
            loss = self.optimizer.scale_loss(means[0])
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        self.apply(self.optimizer, gradients, variables)
        return tf.stack(means)

    def apply(self, optimizer: Any, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
        """Applies the gradients; with `checked`, if each of them is finite."""
        if not self.checked:
            optimizer.apply(gradients, variables)
            return
        finite = tf.reduce_all(tf.math.is_finite(tf.stack([tf.reduce_sum(gradient) for gradient in gradients])))
        if finite:
            optimizer.apply(gradients, variables)

    def width(self) -> int:
        """The number of values."""
        return len(self.workload.values(self.labels[:1], self.model(self.inputs[:1])))

    def dataset(self) -> tf.data.Dataset:
        """All examples, shuffled, in batches, without end."""
        dataset = (
            tf.data.Dataset.from_tensor_slices((self.inputs, self.labels)).shuffle(min(self.examples, 10_000)).repeat()
        )
        return dataset.batch(self.batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def step(self) -> tuple[Run, int]:
        """A call of a compiled function for each step."""
        iterator = iter(self.dataset())
        totals = tf.Variable(tf.zeros([self.width()]))

        @tf.function
        def train_step(iterator: Any) -> None:
            totals.assign_add(self.update(*next(iterator)))

        def run(steps: int) -> tuple[int, float]:
            totals.assign(tf.zeros_like(totals))
            for _ in range(steps):
                train_step(iterator)
            return steps, float(totals[0]) / steps

        return run, 1

    def from_dataset(self, size: int) -> tuple[Run, int]:
        """So many steps in a call, from an iterator."""
        iterator = iter(self.dataset())
        width = self.width()

        @tf.function
        def train_steps(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
            totals = tf.zeros([width])
            for _ in tf.range(steps):
                totals += self.update(*next(iterator))
            return totals

        def run(steps: int) -> tuple[int, float]:
            sizes = [min(size, steps - first) for first in range(0, steps, size)]
            totals = [train_steps(iterator, tf.constant(each)) for each in sizes]
            return steps, float(tf.add_n(totals)[0]) / steps

        return run, 1

    def from_arrays(self, size: int) -> tuple[Run, int]:
        """So many steps in a call, gathered from the arrays by a permutation that is drawn for each epoch."""
        inputs, labels, width = self.inputs, self.labels, self.width()

        @tf.function
        def train_steps(order: tf.Tensor, first: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
            totals = tf.zeros([width])
            for number in tf.range(first, first + steps):
                rows = order[number * self.batch_size : (number + 1) * self.batch_size]
                totals += self.update(tf.gather(inputs, rows), tf.gather(labels, rows))
            return totals

        return self.by_epoch(train_steps, size), 1

    def scan(self, size: int) -> tuple[Run, int]:
        """So many steps in a call, compiled by XLA, over a super-batch that was gathered before."""
        inputs, labels, width = self.inputs, self.labels, self.width()

        @tf.function(jit_compile=True)
        def scan(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            totals = tf.zeros([width])
            for number in tf.range(size):
                totals += self.update(inputs[number], labels[number])
            return totals

        @tf.function
        def train_steps(order: tf.Tensor, first: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
            rows = order[first * self.batch_size : (first + size) * self.batch_size]
            rows = tf.reshape(rows, [size, self.batch_size])
            return scan(tf.gather(inputs, rows), tf.gather(labels, rows))

        return self.by_epoch(train_steps, size, whole=True), size

    def by_epoch(self, train_steps: Callable[..., tf.Tensor], size: int, whole: bool = False) -> Run:
        """Calls `train_steps(order, first, steps)`, through one epoch after the other.

        Where only whole calls will do, the last few batches of an epoch are left out.
        """
        per_epoch, at, order = self.examples // self.batch_size, 0, self.permutation()

        def run(steps: int) -> tuple[int, float]:
            nonlocal at, order
            made, totals = 0, []
            while made < steps:
                if at + (size if whole else 1) > per_epoch:
                    at, order = 0, self.permutation()
                count = size if whole else min(size, steps - made, per_epoch - at)
                totals.append(train_steps(order, tf.constant(at), tf.constant(count)))
                made, at = made + count, at + count
            return made, float(tf.add_n(totals)[0]) / made

        return run

    def permutation(self) -> tf.Tensor:
        """An order of all examples."""
        return tf.random.shuffle(tf.range(self.examples))


def serve(workload: Workload, port: Port, ways: list[str], checked: bool = False, rows: bool = False) -> None:
    """Trains by the fastest of these ways: `step`, or `arrays`, `dataset`, `scan` and the steps in a call.

    With `rows`, Embedding layers look single rows up, where Keras reads the whole table.
    """
    if rows:
        keras.layers.Embedding.call = lambda layer, inputs: tf.nn.embedding_lookup(layer.embeddings.value, inputs)
    if workload.kind == "gan":
        from benchmarks.contenders import gan

        hand: ByHand = gan.ByHand(workload, checked)
    else:
        hand = ByHand(workload, checked)
    kinds = {"arrays": hand.from_arrays, "dataset": hand.from_dataset, "scan": hand.scan}
    made = {}
    for way in ways:
        kind, _, size = way.partition(" ")
        made[f"{kind}, {size} steps"] = kinds[kind](int(size)) if size else hand.step()
    drive(port, made)
