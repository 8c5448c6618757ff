"""LearningRateScaling: scales the learning rate to the global batch, with a warm-up."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from callbacks.arguments import check, is_number, is_whole, is_whole_or_none
from callbacks.base import Callback, Run, SettingsError
from callbacks.types import Data, Foreign, JsonObject, Optimizer, Tensors


class LearningRateScaling(Callback):
    """Multiplies the optimizer's learning rate for a global batch that is larger than the one it was tuned for.

    With k = batch_size / reference_batch_size, the rate is multiplied by k ("linear": Goyal et al. 2017, "Accurate,
    Large Minibatch SGD", arXiv:1706.02677, section 2.1) or by sqrt(k) ("sqrt": Krizhevsky 2014, arXiv:1404.5997,
    section 5; usual for Adam). The rate starts at the task's own and climbs linearly to the scaled one during the
    warm-up (Goyal et al., section 2.2). A Horovod script that trains with batch b on each of N workers and multiplies
    its rate by `hvd.size()` does the same as `batch_size=N*b`, `reference_batch_size=b` here.

    The rate is computed within the compiled step, from the optimizer's own count of steps: it costs the host nothing,
    and a resumed run has the right rate without further state. A schedule that the optimizer has is multiplied.

    Args:
        reference_batch_size: the global batch for which the task's learning rate was chosen, >= 1.
        rule: `"linear"` or `"sqrt"`.
        warmup_epochs: length of the warm-up in epochs, >= 0 (5 in Goyal et al.).
        warmup_steps: its length in steps instead, >= 0; needed for data without a known length.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(
        self,
        reference_batch_size: int,
        rule: str = "linear",
        warmup_epochs: float = 5.0,
        warmup_steps: int | None = None,
    ) -> None:
        is_size = is_whole(reference_batch_size, 1)
        check(self, is_size, "give a whole number >= 1", reference_batch_size=reference_batch_size)
        check(self, rule in ("linear", "sqrt"), "give linear or sqrt", rule=rule)
        check(self, is_number(warmup_epochs, 0), "give a number >= 0", warmup_epochs=warmup_epochs)
        is_length = is_whole_or_none(warmup_steps, 0)
        check(self, is_length, "give a whole number >= 0, or None", warmup_steps=warmup_steps)
        self.reference_batch_size = reference_batch_size
        self.rule = rule
        self.warmup_epochs = warmup_epochs
        self.warmup_steps = warmup_steps

    def on_data(self, run: Run, data: Data) -> Data:
        steps = self.warmup_steps
        if steps is None:
            if data.train.steps_per_epoch is None:
                raise SettingsError("LearningRateScaling: this data has no known length: give warmup_steps")
            steps = round(self.warmup_epochs * data.train.steps_per_epoch)
        k = run.options["batch_size"] / self.reference_batch_size
        scale = k if self.rule == "linear" else math.sqrt(k)
        for optimizer in optimizers_of(run).values():
            rate = own_rate(optimizer)
            if not callable(rate):
                rate = rate_of(optimizer)  # as a number: the variable itself is replaced by the schedule
            optimizer.learning_rate = _schedule(optimizer, rate, scale, steps)
        return data


def _schedule(optimizer: Optimizer, rate: Foreign, scale: float, warmup: int) -> Foreign:
    """`rate` (a float, or a schedule) times a factor that climbs from 1 to `scale` in `warmup` steps."""
    import tensorflow as tf

    if type(optimizer).__module__.startswith("tf_keras"):
        from tf_keras.optimizers.schedules import LearningRateSchedule
    else:
        from keras.optimizers.schedules import LearningRateSchedule

    class ScaledRate(LearningRateSchedule):
        def __call__(self, step: Tensors) -> Tensors:
            # `step` is the optimizer's own counter, which a checkpoint holds.
            done = tf.minimum(tf.cast(step, tf.float32) / float(max(warmup, 1)), 1.0) if warmup else 1.0
            base = rate(step) if callable(rate) else rate
            return base * (1.0 + (scale - 1.0) * done)

        def get_config(self) -> JsonObject:
            return {"rate": repr(rate), "scale": scale, "warmup": warmup}

    return ScaledRate()


def optimizers_of(run: Run) -> dict[str, Optimizer]:
    """The optimizers of a run by name; a single one has the name ""."""
    return run.optimizer if isinstance(run.optimizer, dict) else {"": run.optimizer}


def own_rate(optimizer: Optimizer) -> Foreign:
    """The learning rate as an optimizer has it, which may be a schedule: `learning_rate` of Keras 3 is its value."""
    return getattr(optimizer, "_learning_rate", optimizer.learning_rate)


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate of the next step."""
    import numpy as np

    rate = optimizer.learning_rate
    if type(optimizer).__module__.startswith("tf_keras") and callable(optimizer._learning_rate):
        rate = optimizer._learning_rate(optimizer.iterations)  # `learning_rate` is that of the step before
    return float(np.asarray(rate))  # `float` doesn't take variables of several replicas
