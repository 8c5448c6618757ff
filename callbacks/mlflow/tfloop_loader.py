"""Loads an MLflow model that tfloop has written. A copy is part of each model; needs only TensorFlow and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


class Model:
    """A SavedModel with MLflow's `predict`, which takes and returns an array, or arrays by name."""

    def __init__(self, path: str) -> None:
        import tensorflow as tf

        self._loaded = tf.saved_model.load(path)
        self._serve = self._loaded.signatures["serving_default"]
        # By the name of the input. The inputs of a signature are all keyword arguments: [0] is empty.
        self._specs = self._serve.structured_input_signature[1]

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """The model's outputs for examples."""
        import tensorflow as tf

        if hasattr(data, "to_dict") and set(data) >= set(self._specs):  # a DataFrame with a column for each input
            data = {name: np.stack(data[name].to_list()) for name in self._specs}
        elif hasattr(data, "to_numpy"):
            data = data.to_numpy()
        if not isinstance(data, dict):  # a single array is that of the only input
            data = dict.fromkeys(self._specs, data)
        inputs = {}
        for name, spec in self._specs.items():
            inputs[name] = tf.constant(data[name], spec.dtype)
        outputs = self._serve(**inputs)
        arrays = {name: tensor.numpy() for name, tensor in outputs.items()}
        # A SavedModel gives this name to an output that has none.
        return arrays["output_0"] if list(arrays) == ["output_0"] else arrays


def _load_pyfunc(path: str) -> Model:
    """Loads the model; MLflow calls it."""
    return Model(path)
