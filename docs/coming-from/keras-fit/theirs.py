"""Digits with Keras `fit`."""

import keras
from sklearn.datasets import load_digits

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
model.compile(
    keras.optimizers.SGD(0.1, momentum=0.9),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(
    images[:1600],
    labels[:1600],
    batch_size=64,
    epochs=3,
    shuffle=False,
    verbose=0,
)
loss = model.evaluate(images[1600:], labels[1600:], verbose=0)
print(f"loss {loss:.6f}")
