"""Tickets of a help desk, with a title, a text and tags: data and network."""

import keras
import numpy as np
from keras import layers

WORDS, TAGS, DEPARTMENTS = 50, 6, 4
random = np.random.default_rng(0)
title = random.integers(0, WORDS, (600, 6))
body = random.integers(0, WORDS, (600, 15))
tags = random.integers(0, 2, (600, TAGS)).astype("float32")
priority = (title[:, :1] + body[:, :1] > WORDS).astype("float32")
department = keras.utils.to_categorical(title[:, 0] % DEPARTMENTS, DEPARTMENTS)
inputs = {"title": title, "body": body, "tags": tags}
targets = {"priority": priority, "department": department}


def make_model():
    title = keras.Input((None,), name="title", dtype="int32")
    body = keras.Input((None,), name="body", dtype="int32")
    tags = keras.Input((TAGS,), name="tags")
    read = layers.concatenate(
        [
            layers.LSTM(8)(layers.Embedding(WORDS, 8)(title)),
            layers.LSTM(4)(layers.Embedding(WORDS, 8)(body)),
            tags,
        ]
    )
    model = keras.Model(
        inputs={"title": title, "body": body, "tags": tags},
        outputs={
            "priority": layers.Dense(1, name="priority")(read),
            "department": layers.Dense(DEPARTMENTS, name="department")(read),
        },
    )
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(
                from_logits=True
            ),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
    )
    return model
