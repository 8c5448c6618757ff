"""Transfer learning: the new layers first, then all of them, slowly."""

import keras
from flowers import is_nine, make_model, new

keras.utils.set_random_seed(0)
model = make_model()
base = model.get_layer("base")

base.trainable = False
model.compile(
    optimizer=keras.optimizers.Adam(),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
model.fit(new, is_nine, batch_size=64, epochs=2, shuffle=False, verbose=0)

base.trainable = True
model.compile(
    optimizer=keras.optimizers.Adam(1e-5),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
model.fit(new, is_nine, batch_size=64, epochs=1, shuffle=False, verbose=0)
weights = model.get_weights()
