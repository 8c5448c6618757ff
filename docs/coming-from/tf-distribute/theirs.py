"""Digits with a hand-written loop on `tf.distribute`."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

# Four logical CPU devices stand for four GPUs: they work on any machine.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 4,
)
strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(4)])

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
data = tf.data.Dataset.from_tensor_slices((images[:1600], labels[:1600]))
data = strategy.experimental_distribute_dataset(data.batch(64))

keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)


def per_example(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(
        labels, logits, from_logits=True
    )


def replica_step(images, labels):
    with tf.GradientTape() as tape:
        losses = per_example(labels, model(images, training=True))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=64)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@tf.function
def train_step(batch):
    losses = strategy.run(replica_step, batch)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


for _ in range(3):
    for batch in data:
        train_step(batch)

losses = per_example(labels[1600:], model(images[1600:]))
loss = float(tf.reduce_mean(losses))
print(f"loss {loss:.6f}")
