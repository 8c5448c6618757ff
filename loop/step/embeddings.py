"""Keras's Embedding layers within `compute`: they read the rows that a batch looks up, and no others.

The layer of Keras 3 reads its whole table, and then takes rows of what it has read. That read costs nothing as long as
tables are replaced as a whole. Where an optimizer updates rows in place, TensorFlow copies the table at each read: for
a table of 25 MB, this copy took three quarters of a step.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from loop.step.replica import current


def replace_lookup() -> None:
    """Has Embedding layers of Keras 3 read rows alone within `compute`. They return the same numbers."""
    original = keras.layers.Embedding.call
    if hasattr(original, "replaces"):
        return

    @functools.wraps(original)
    def call(layer: keras.layers.Embedding, inputs: tf.types.experimental.TensorLike) -> tf.Tensor:
        # With LoRA or quantized weights, the table is computed: there is no variable that has its rows.
        table = layer.embeddings
        table = table.value if isinstance(table, keras.Variable) else table
        if current() is None or not isinstance(table, tf.Variable) or not isinstance(inputs, tf.Tensor):
            return original(layer, inputs)

        # As the layer does it, up to the gather.
        rows = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        rows = tf.where(rows < 0, rows + tf.cast(table.shape[0], rows.dtype), rows)
        return tf.cast(tf.gather(table, rows), layer.compute_dtype)

    call.replaces = original  # type: ignore[attr-defined]
    keras.layers.Embedding.call = call
