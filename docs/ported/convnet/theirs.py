"""A convolutional network with Keras `fit`."""

import keras
from convnet import images, labels, make_model

keras.utils.set_random_seed(0)
model = make_model()
model.fit(
    images[:1000],
    labels[:1000],
    batch_size=128,
    epochs=2,
    shuffle=False,
    verbose=0,
    validation_data=(images[1000:], labels[1000:]),
)
weights = model.get_weights()
accuracy = model.evaluate(images[1000:], labels[1000:], verbose=0)[1]
