"""The precision of a model: the values of the option `precision`, and how layers are made in it."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

import keras

PRECISIONS = {
    "float32": "float32", "float64": "float64", "bfloat16": "mixed_bfloat16", "mixed_float16": "mixed_float16",
}  # fmt: skip
"""The values of `precision`, and the Keras dtype policy of each."""


@contextlib.contextmanager
def keras_precision(precision: str) -> Iterator[None]:
    """Layers that are made within it have this precision; see `PRECISIONS`."""
    floatx = "float64" if precision == "float64" else "float32"
    with contextlib.ExitStack() as restored:
        # Each restores the values of before, which the user may have set.
        restored.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
        restored.callback(keras.config.set_floatx, keras.config.floatx())
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(PRECISIONS[precision])
        legacy = sys.modules.get("tf_keras")
        if legacy:
            restored.callback(legacy.mixed_precision.set_global_policy, legacy.mixed_precision.global_policy())
            restored.callback(legacy.backend.set_floatx, legacy.backend.floatx())
            legacy.backend.set_floatx(floatx)
            legacy.mixed_precision.set_global_policy(PRECISIONS[precision])
        yield


def warn_of_policy(precision: str) -> None:
    """Warns if the user has set a dtype policy of Keras that layers don't have, because `precision` wasn't given."""
    policies = [keras.config.dtype_policy().name]
    legacy = sys.modules.get("tf_keras")
    if legacy:
        policies.append(legacy.mixed_precision.global_policy().name)
    by_policy = dict(zip(PRECISIONS.values(), PRECISIONS, strict=True))
    for policy in policies:
        if precision == "float32" and policy != "float32":
            option = by_policy.get(policy)
            fix = f"precision={option!r}" if option else f"another precision ({', '.join(PRECISIONS)})"
            warnings.warn(
                f"the dtype policy of Keras is {policy!r}, but layers are made with the precision of the run, float32: "
                f"give fit {fix}, or --precision on the command line",
                stacklevel=2,
            )
