"""Collaborative filtering: embeddings trained with Adam."""

import keras
from ratings import Recommender, pairs, ratings

keras.utils.set_random_seed(0)
model = Recommender()
model.compile(
    loss=keras.losses.BinaryCrossentropy(),
    optimizer=keras.optimizers.Adam(learning_rate=0.001),
)
model.fit(
    pairs[:1350],
    ratings[:1350],
    batch_size=64,
    epochs=3,
    shuffle=False,
    verbose=0,
    validation_data=(pairs[1350:], ratings[1350:]),
)
weights = model.get_weights()
