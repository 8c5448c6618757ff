"""A GAN of two optimizers, by both loops: by ours and by hand. A step trains the discriminator, then the generator."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from benchmarks.contenders import by_hand, ours
from benchmarks.workloads import LATENT, Workload


def judge(model: Any, images: tf.Tensor) -> dict[str, tf.Tensor]:
    """What the discriminator gets wrong, for each example."""
    real = model.discriminator(images)[:, 0]
    fake = model.discriminator(drawn(model, images))[:, 0]
    right = (tf.cast(real > 0, tf.float32) + tf.cast(fake <= 0, tf.float32)) / 2
    return {"loss": tf.nn.softplus(-real) + tf.nn.softplus(fake), "right": right}


def forge(model: Any, images: tf.Tensor) -> dict[str, tf.Tensor]:
    """What the generator fails to pass off as real, for each example."""
    return {"loss": tf.nn.softplus(-model.discriminator(drawn(model, images))[:, 0])}


def drawn(model: Any, images: tf.Tensor) -> tf.Tensor:
    """As many drawings as there are images."""
    drawings: tf.Tensor = model.generator(tf.random.normal([tf.shape(images)[0], LATENT]))
    return drawings


class Trained(ours.Trained):
    """The GAN as a task."""

    loss = "discriminator_loss"

    def build_optimizer(self) -> Any:
        return {name: self.workload.keras_optimizer() for name in ("discriminator", "generator")}

    def compute(self, model: Any, batch: Any, training: bool) -> dict[str, Any]:
        return forge(model, batch[0])  # only for `fit`'s check of the task: a training step has both parts

    def train_step(self, model: Any, step: Any) -> None:
        step.minimize(lambda batch: judge(model, batch[0]), "discriminator")
        step.minimize(lambda batch: forge(model, batch[0]), "generator")


class ByHand(by_hand.ByHand):
    """The GAN by hand."""

    def __init__(self, workload: Workload, checked: bool = False) -> None:
        super().__init__(workload, checked)
        self.parts = []
        for part, values in ((self.model.discriminator, judge), (self.model.generator, forge)):
            optimizer: keras.Optimizer = workload.keras_optimizer()
            optimizer.build(part.trainable_variables)
            self.parts.append((part.trainable_variables, values, optimizer))

    def update(self, inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        means = []
        for variables, values, optimizer in self.parts:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([variable.value for variable in variables])
                found = [tf.reduce_mean(value) for value in values(self.model, inputs).values()]
            gradients = tape.gradient(found[0], [variable.value for variable in variables])
            self.apply(optimizer, gradients, variables)
            means += found
        return tf.stack(means)

    def width(self) -> int:
        return sum(len(values(self.model, self.inputs[:1])) for _, values, _ in self.parts)
