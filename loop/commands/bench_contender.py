"""A contender of `tfloop bench`, in its own process: a plain loop, or Keras's `fit`, made of a task's `compute`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from callbacks.files import write_text
from callbacks.types import JsonObject
from loop.errors import UsageError
from loop.launch import stderr
from loop.options import DEFAULTS, with_defaults

if TYPE_CHECKING:
    import tensorflow as tf

    from loop.task import Batch, Model, Optimizer, TrainTask

    Trainer: TypeAlias = Callable[[], int]
    """Trains for a while; returns how many examples it has used."""


_OURS_ALONE = ("accumulate", "compile", "ema", "overfit", "remat")
"""The options that change what a step does, and that the contenders don't have."""


class _NotComparableError(Exception):
    """Why a contender can't train the task; the text is shown to the user."""


def main() -> None:
    """Makes the measurement that the command line asks for, as JSON, and writes the answer to a file."""
    asked = json.loads(sys.argv[1])
    with stderr.quiet_start(says=False):
        from loop.backends import devices
        from loop.target import task_loader

        devices.prepare()  # before the task is loaded: its code may use TensorFlow
        task = task_loader.load(asked["target"], asked["assignments"])
    try:
        answer: dict[str, object] = {"examples_per_second": _speed(task, asked), "left_out": _left_out(task)}
    except (_NotComparableError, UsageError) as error:
        answer = {"problem": str(error)}
    write_text(Path(asked["out"]), json.dumps(answer))


def _speed(task: TrainTask, asked: JsonObject) -> float:
    """Examples per second, after a warm-up of half the time in which they are counted."""
    seconds = asked["seconds"]
    make = _by_hand if asked["contender"] == "by hand" else _keras  # see `bench.BY_HAND`
    _check(task)
    train = make(task, asked["batch_size"], asked["steps"])
    train()  # which compiles
    warm_at = time.monotonic() + seconds / 2
    while time.monotonic() < warm_at:
        train()
    begun = time.monotonic()
    examples = 0
    while time.monotonic() < begun + seconds:
        examples += train()
    return examples / (time.monotonic() - begun)


def _check(task: TrainTask) -> None:
    """Refuses tasks that a short loop doesn't train as tfloop does."""
    from loop.task import TrainTask

    precision = with_defaults(task, {})["precision"]
    problems = {
        "has a train_step of its own, which only tfloop calls": type(task).train_step is not TrainTask.train_step,
        "has metrics with a state, which a plain loop would have to keep": task.build_metrics(),
        "has several phases": task.phases(),
        f"trains in {precision} by itself, and a plain loop would in float32": precision != DEFAULTS["precision"],
    }
    for problem, is_there in problems.items():
        if is_there:
            raise _NotComparableError(f"the task {problem}")


def _left_out(task: TrainTask) -> str:
    """The task's own options that a contender goes without, in words."""
    options = with_defaults(task, {})
    return ", ".join(f"{name}={options[name]!r}" for name in _OURS_ALONE if options[name] != DEFAULTS[name])


def _clipped(task: TrainTask, gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """The gradients, clipped as the task's own options say; None, of a variable without a gradient, stays."""
    from loop.step.gradients import clipped

    options = with_defaults(task, {})
    by_index = {}
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            by_index[index] = gradient
    small = clipped(list(by_index.values()), options["clip_norm"], options["clip_value"], False)
    result = list(gradients)
    for index, gradient in zip(by_index, small, strict=True):
        result[index] = gradient
    return result


def _optimizer(task: TrainTask) -> Optimizer:
    optimizer = task.build_optimizer()
    if isinstance(optimizer, dict):
        raise _NotComparableError("the task has several optimizers")
    return optimizer


def _batches(task: TrainTask, batch_size: int) -> tf.data.Dataset:
    """The batches of the training data, shuffled, without end; as a guide to `tf.data` would make them."""
    import tensorflow as tf

    from loop.data import ArrayData

    data = task.train_data()
    if isinstance(data, ArrayData) and data.padding is None:
        examples = tf.data.Dataset.from_tensor_slices(data.arrays)
        if with_defaults(task, {})["shuffle"]:
            examples = examples.shuffle(min(data.size, 10_000))
    elif isinstance(data, tf.data.Dataset):  # the task has shuffled it, where it wants to
        examples = data
    else:
        raise _NotComparableError(f"the data is {type(data).__name__}: ArrayData and tf.data.Dataset are compared")
    return examples.repeat().batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _mean_loss(task: TrainTask, model: Model, batch: Batch) -> tf.Tensor:
    """The mean of the losses of a batch by their weights, with the model's penalties."""
    import tensorflow as tf

    values = task.compute(model, batch, training=True)
    losses = values["loss"]
    if "weight" in values:
        weights = tf.cast(values["weight"], losses.dtype)
        while weights.shape.rank < losses.shape.rank:  # a weight of an example weighs all its elements
            weights = weights[..., tf.newaxis]
        weights = tf.broadcast_to(weights, tf.shape(losses))
        loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
    else:
        loss = tf.reduce_mean(losses)
    penalties = getattr(model, "losses", [])
    return tf.add_n([loss, *penalties]) if penalties else loss


def _by_hand(task: TrainTask, batch_size: int, steps: int) -> Trainer:
    """The loop that a guide shows: a tape, an optimizer, several steps in a compiled call."""
    import tensorflow as tf

    model = task.build_model()
    optimizer = _optimizer(task)
    batches = _batches(task, batch_size)
    variables = model.trainable_variables
    if hasattr(optimizer, "build"):  # its variables must exist before the function is traced
        optimizer.build(variables)

    @tf.function(reduce_retracing=True)
    def train(iterator: Iterator[Batch]) -> None:
        for _ in tf.range(steps):
            with tf.GradientTape() as tape:
                loss = _mean_loss(task, model, next(iterator))
            gradients = _clipped(task, tape.gradient(loss, variables))
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    iterator = iter(batches)

    # The loop runs without end over one iterator, so that no call waits for the first batch.
    def call() -> int:
        train(iterator)
        return steps * batch_size

    return call


def _keras(task: TrainTask, batch_size: int, steps: int) -> Trainer:
    """Keras's `fit`, whose model calls the task."""
    import keras
    import tensorflow as tf

    inner = task.build_model()
    optimizer = _optimizer(task)
    if not isinstance(inner, keras.Model) or not isinstance(optimizer, keras.optimizers.Optimizer):
        raise _NotComparableError("model and optimizer aren't Keras 3's")
    variables = inner.trainable_variables

    class Trained(keras.Model):
        """A model that trains another one, by the task."""

        def train_step(self, batch: Batch) -> dict[str, tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = _mean_loss(task, inner, batch)
            optimizer.apply(_clipped(task, tape.gradient(loss, variables)), variables)
            return {"loss": loss}

    optimizer.build(variables)
    model = Trained()
    model.built = True  # it has no variables of its own, which Keras would miss
    model.compile(steps_per_execution=steps)
    batches = _batches(task, batch_size)
    in_epoch = max(IN_EPOCH, steps)

    def call() -> int:
        model.fit(batches, steps_per_epoch=in_epoch, epochs=1, verbose=0)
        return in_epoch * batch_size

    return call


IN_EPOCH = 500
"""The steps of an epoch of Keras's: so many that its start takes no part of the time."""

if __name__ == "__main__":
    main()
