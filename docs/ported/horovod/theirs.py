"""Horovod's example for TensorFlow 2: `horovodrun -np 2 python theirs.py`."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from mnist import images, labels, make_model

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# Each process reads the rows of a global batch of 64 that are its own.
rows = np.arange(1792).reshape(-1, hvd.size(), 64 // hvd.size())
rows = rows[:, hvd.rank()].ravel()
dataset = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows]))
dataset = dataset.repeat().batch(64 // hvd.size())

keras.utils.set_random_seed(0)
model = make_model()
loss_of = keras.losses.SparseCategoricalCrossentropy()
optimizer = keras.optimizers.Adam(0.001 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def train_step(images, labels, first):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    variables = [each.value for each in model.trainable_variables]
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first:
        variables = [each.value for each in model.variables]
        hvd.broadcast_variables(variables, root_rank=0)
        variables = [each.value for each in optimizer.variables]
        hvd.broadcast_variables(variables, root_rank=0)
    return loss


for step, (batch, answers) in enumerate(dataset.take(100 // hvd.size())):
    loss = train_step(batch, answers, step == 0)
    if step % 10 == 0 and hvd.rank() == 0:
        print(f"step {step} loss {loss:.6f}")
if hvd.rank() == 0:
    checkpoint.save("checkpoints/")
weights = model.get_weights()
