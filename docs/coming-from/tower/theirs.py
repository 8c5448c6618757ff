"""Digits in towers: gradients of each device, averaged by hand."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

EXAMPLES = 1600
TOWERS = ["CPU:0", "CPU:0"]  # on a machine with GPUs: ["GPU:0", "GPU:1"]

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
train = images[:EXAMPLES], labels[:EXAMPLES]
data = tf.data.Dataset.from_tensor_slices(train).batch(64)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, "relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def average_gradients(tower_gradients):
    return [
        tf.reduce_mean(tf.stack(gradients), axis=0)
        for gradients in zip(*tower_gradients)
    ]


@tf.function(reduce_retracing=True)
def train_step(images, labels):
    cut = (tf.shape(images)[0] + 1) // 2
    parts = [(images[:cut], labels[:cut]), (images[cut:], labels[cut:])]
    tower_gradients = []
    for device, (inputs, targets) in zip(TOWERS, parts):
        with tf.device(device), tf.GradientTape() as tape:
            loss = cross_entropy(targets, model(inputs, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        tower_gradients.append(gradients)
    averaged = average_gradients(tower_gradients)
    optimizer.apply_gradients(zip(averaged, model.trainable_variables))


optimizer.build(model.trainable_variables)
for _ in range(3):
    for batch in data:
        train_step(*batch)

loss = float(cross_entropy(labels[1600:], model(images[1600:])))
print(f"loss {loss:.6f}")
