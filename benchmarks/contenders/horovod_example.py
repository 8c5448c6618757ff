"""Horovod's documented loop, that of its `examples/tensorflow2/tensorflow2_mnist.py`, with a workload's model.

One compiled step a call, a `DistributedGradientTape` in each, and one tensor a collective. What it does besides (it
prints the loss each ten steps, and writes a checkpoint at its end) is left out.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from benchmarks.worker import Port, drive
from benchmarks.workloads import Workload


def serve(workload: Workload, port: Port) -> None:
    """Trains in all processes. The first one has the commands, and tells the others."""
    hvd.init()
    inputs, labels = workload.arrays()
    size = workload.batch_size // hvd.size()
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).repeat().shuffle(10_000).batch(size)
    model, optimizer = workload.build(), workload.keras_optimizer()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def training_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss_value = loss(labels, logits)
        tape = hvd.DistributedGradientTape(tape)
        # Keras 3's variables aren't TensorFlow's, whose names and references Horovod asks for.
        gradients = tape.gradient(loss_value, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(labels, logits)
        return loss_value

    # As there, after the variables exist: all start alike. Each reads an order of its own.
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([variable.value for variable in model.variables + optimizer.variables], root_rank=0)
    batches = iter(dataset)

    def run(steps: int) -> tuple[int, float]:
        hvd.broadcast(tf.constant(steps), 0, name="steps")
        return steps, train(steps)

    def train(steps: int) -> float:
        losses = [training_step(*next(batches)) for _ in range(steps)]
        return float(tf.add_n(losses)) / steps

    if hvd.rank() == 0:
        drive(port, {"": (run, 1)})
        hvd.broadcast(tf.constant(0), 0, name="steps")
    else:
        while steps := int(hvd.broadcast(tf.constant(0), 0, name="steps")):
            train(steps)
