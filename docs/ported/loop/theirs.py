"""A training loop by hand: forward and backward pass, metrics, validation."""

import keras
import tensorflow as tf
from net import images, labels, make_model

train = tf.data.Dataset.from_tensor_slices((images[:1000], labels[:1000]))
train = train.batch(64)
valid = tf.data.Dataset.from_tensor_slices((images[1000:], labels[1000:]))
valid = valid.batch(64)

keras.utils.set_random_seed(0)
model = make_model()
optimizer = keras.optimizers.Adam(1e-3)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_accuracy = keras.metrics.SparseCategoricalAccuracy()
valid_accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_of(labels, logits)
        loss += sum(model.losses)
    gradients = tape.gradient(loss, model.trainable_weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_weights))
    train_accuracy.update_state(labels, logits)
    return loss


@tf.function
def valid_step(images, labels):
    logits = model(images, training=False)
    valid_accuracy.update_state(labels, logits)


for _ in range(2):
    for batch in train:
        train_step(*batch)
    train_accuracy.reset_state()
    for batch in valid:
        valid_step(*batch)
    accuracy = float(valid_accuracy.result())
    valid_accuracy.reset_state()
weights = model.get_weights()
