"""A model of three inputs and two outputs, each with a loss of its own."""

import keras
from tickets import inputs, make_model, targets

keras.utils.set_random_seed(0)
model = make_model()
model.fit(inputs, targets, epochs=2, batch_size=32, shuffle=False, verbose=0)
weights = model.get_weights()
