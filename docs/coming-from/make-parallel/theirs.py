"""Digits with a wrapper that makes a Keras model parallel."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

DEVICES = ["CPU:0", "CPU:0"]  # on a machine with GPUs: ["GPU:0", "GPU:1"]


class Parallel(keras.Model):
    """Cuts a batch, runs the model on each device, joins the outputs."""

    def __init__(self, model, devices):
        super().__init__()
        self.model, self.devices = model, devices

    def call(self, inputs, training=False):
        size, count = tf.shape(inputs)[0], len(self.devices)
        cuts = [size * n // count for n in range(count + 1)]
        outputs = []
        for number, device in enumerate(self.devices):
            with tf.device(device):
                part = inputs[cuts[number] : cuts[number + 1]]
                outputs.append(self.model(part, training=training))
        return keras.ops.concatenate(outputs)


def make_parallel(model, devices):
    return Parallel(model, devices)


digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, "relu"),
        keras.layers.Dense(10),
    ]
)
parallel = make_parallel(model, DEVICES)
parallel.compile(
    keras.optimizers.SGD(0.1, momentum=0.9),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
parallel.fit(
    images[:1600],
    labels[:1600],
    batch_size=64,
    epochs=3,
    shuffle=False,
    verbose=0,
)
loss = parallel.evaluate(images[1600:], labels[1600:], verbose=0)
print(f"loss {loss:.6f}")
model.save_weights("digits.weights.h5")  # not those of the wrapper
