"""The precision of a model: the values of the option `precision`, and the Keras dtype policy of each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import keras

PRECISIONS = {
    "float32": "float32", "float64": "float64", "bfloat16": "mixed_bfloat16", "mixed_float16": "mixed_float16",
}  # fmt: skip
"""The values of `precision`, and the Keras dtype policy of each."""


@contextlib.contextmanager
def keras_precision(precision: str) -> Iterator[None]:
    """Layers that are made within it have this precision; see `PRECISIONS`."""
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    legacy = sys.modules.get("tf_keras")
    legacy_policy, legacy_floatx = (
        (legacy.mixed_precision.global_policy(), legacy.backend.floatx()) if legacy else (0, 0)
    )
    width = "float64" if precision == "float64" else "float32"
    try:
        keras.config.set_floatx(width)
        keras.config.set_dtype_policy(PRECISIONS[precision])
        if legacy:
            legacy.backend.set_floatx(width)
            legacy.mixed_precision.set_global_policy(PRECISIONS[precision])
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
        if legacy:
            legacy.backend.set_floatx(legacy_floatx)
            legacy.mixed_precision.set_global_policy(legacy_policy)
