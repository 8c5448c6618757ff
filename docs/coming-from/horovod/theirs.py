"""Digits with Horovod; `horovodrun -np 2 python theirs.py`."""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
for number, gpu in enumerate(tf.config.list_physical_devices("GPU")):
    tf.config.experimental.set_memory_growth(gpu, True)
    if number == hvd.local_rank():
        tf.config.set_visible_devices(gpu, "GPU")

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
data = tf.data.Dataset.from_tensor_slices((images[:1600], labels[:1600]))
data = data.shard(hvd.size(), hvd.rank()).batch(32)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, "relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(images, labels):
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = cross_entropy(labels, model(images, training=True))
    weights = [v.value for v in model.trainable_variables]
    gradients = tape.gradient(loss, weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


optimizer.build(model.trainable_variables)
hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
hvd.broadcast_variables([v.value for v in optimizer.variables], root_rank=0)
for _ in range(3):
    for batch in data:
        train_step(*batch)

if hvd.rank() == 0:
    loss = float(cross_entropy(labels[1600:], model(images[1600:])))
    print(f"loss {loss:.6f}")
    model.save("digits.keras")
