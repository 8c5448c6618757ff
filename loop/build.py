"""Builds what a task describes: its model and optimizer, with all their variables, on an engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from loop.backends.base import Backend
from loop.errors import UsageError
from loop.task import TrainTask

PRECISIONS = {"float32": "float32", "float64": "float64", "bfloat16": "mixed_bfloat16"}
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


def build(task: TrainTask, backend: Backend, precision: str, example: Any) -> tuple[Any, Any, list[str]]:
    """Builds model and optimizer with all their variables, before anything is traced.

    Args:
        task: the task.
        backend: the engine, in whose scope variables are made.
        precision: a key of `PRECISIONS`.
        example: one or two examples as a batch, on which `compute` is tried once.

    Returns:
        The model, the optimizer, and the names of the values that `compute` returns, the loss first.

    Raises:
        UsageError: the task returned something that can't be trained; the message shows the fix.
    """
    with backend.scope(), keras_precision(precision):
        model = task.build_model()
        if not isinstance(model, tf.Module) and not isinstance(model, keras.Model):
            raise UsageError(
                f"build_model() returned {type(model).__name__}: return a keras.Model, a tf_keras.Model or a tf.Module"
            )
        # A model without an input shape makes its variables at the first call: this one.
        # Once more with one example: a mean over examples can have the right shape by chance, but not twice.
        values = task.compute(model, example, training=False)
        names = check(values, int(tf.shape(tf.nest.flatten(example)[0])[0]))
        check(task.compute(model, tf.nest.map_structure(lambda tensor: tensor[:1], example), training=False), 1, names)
        if not trainable_variables(model):
            raise UsageError("the model has no trainable variables: build_model() must return one with weights")
        optimizer = task.build_optimizer()
        if not hasattr(optimizer, "build") or not hasattr(optimizer, "learning_rate"):
            raise UsageError(
                f"build_optimizer() returned {type(optimizer).__name__}: return a Keras optimizer of the model's family"
            )
        if type(optimizer).__name__ == "LossScaleOptimizer":
            raise UsageError(
                "build_optimizer() returned a LossScaleOptimizer: it would divide gradients that nobody has scaled. "
                "Return the optimizer within it, and use precision='bfloat16', which needs no scale"
            )
        family = type(optimizer).__module__.startswith("tf_keras")
        if type(model).__module__.startswith("tf_keras") != family and isinstance(model, keras_models()):
            raise UsageError(
                f"the model is of {type(model).__module__.split('.')[0]}, but its optimizer of "
                f"{type(optimizer).__module__.split('.')[0]}: take both from one family"
            )
        # Slots exist before step 1, so that they can be broadcast and restored.
        optimizer.build(trainable_variables(model))
    return model, optimizer, names


def keras_models() -> tuple[type, ...]:
    """The model classes of the Keras families that are loaded."""
    legacy = sys.modules.get("tf_keras")
    return (keras.Model, legacy.Model) if legacy else (keras.Model,)


def check(values: Any, n: int | None, names: Sequence[str] | None = None) -> list[str]:
    """Checks what `compute` returned for n examples; gives the names of its values, the loss first.

    Args:
        values: what it returned.
        n: the number of examples; None while tracing, when nobody knows it.
        names: the values that it returned before, and must return again.

    Raises:
        UsageError: no loss, a mean instead of values, or shapes that don't fit; with the fix.
    """
    if not isinstance(values, dict) or "loss" not in values:
        got = f"a dict of {', '.join(map(str, values))}" if isinstance(values, dict) else type(values).__name__
        raise UsageError(f'compute() returned {got}: return a dict with a per-example "loss"')
    shapes = {name: tf.convert_to_tensor(value).shape for name, value in values.items()}
    for name, shape in shapes.items():
        if shape.rank == 0:
            raise UsageError(
                f'compute() returned a scalar for "{name}": return one value per example, never a mean (shape [n]). '
                "For example keras.losses.mse(labels, predictions), the function, instead of "
                "keras.losses.MeanSquaredError()(labels, predictions); or leave out tf.reduce_mean(...)"
            )
        if n is not None and shape[0] != n:
            raise UsageError(
                f'compute() returned "{name}" of shape {list(shape)} for {n} example{"s" * (n > 1)}: return shape '
                "[n] or [n, ...], one value per element, never a mean"
            )
    if "weight" in values and n is not None:
        weight = shapes["weight"]
        if weight != shapes["loss"]:
            raise UsageError(
                f'compute() returned "weight" of shape {list(weight)} beside "loss" of shape {list(shapes["loss"])}: '
                "give both one shape, with tf.broadcast_to(weight, tf.shape(loss))"
            )
        for name, shape in shapes.items():
            if shape[: weight.rank] != weight:
                raise UsageError(
                    f'compute() returned "{name}" of shape {list(shape)}, which "weight" of shape {list(weight)} '
                    "can't weigh: its shape must begin with that of the weight"
                )
    if not tf.convert_to_tensor(values["loss"]).dtype.is_floating:
        raise UsageError(f'compute() returned "loss" of {values["loss"].dtype}: a loss must be a floating-point tensor')
    found = ["loss", *(name for name in values if name not in ("loss", "weight"))]
    if names is not None and set(found) != set(names):
        raise UsageError(
            f"compute() returned {', '.join(names)} at first, and now {', '.join(found)}: return the same values "
            "always, with training=True too"
        )
    return found


def as_tf(variables: Sequence[Any]) -> list[tf.Variable]:
    """The TensorFlow variables behind Keras 3 variables; others as they are."""
    return [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]


def keras_layers(model: Any) -> list[Any]:
    """The Keras 3 layers that a plain tf.Module holds: TensorFlow doesn't count their variables as the module's."""
    if isinstance(model, keras_models()):
        return []
    return list(model._flatten(predicate=lambda value: isinstance(value, keras.Layer)))


def trainable_variables(model: Any) -> list[Any]:
    """The model's trainable variables, in its own order; of a tf.Module those of its Keras layers too."""
    layers = keras_layers(model)
    return [*model.trainable_variables, *(variable for layer in layers for variable in layer.trainable_variables)]


def all_variables(model: Any) -> list[Any]:
    """All variables of the model, in its own order; of a tf.Module those of its Keras layers too."""
    return [*model.variables, *(variable for layer in keras_layers(model) for variable in layer.variables)]


def losses(model: Any) -> list[Any]:
    """The penalties of the model's layers, of the last call."""
    if layers := keras_layers(model):
        return [penalty for layer in layers for penalty in layer.losses]
    return list(getattr(model, "losses", []))


def model_variables(model: Any) -> list[tf.Variable]:
    """All variables of the model as TensorFlow's."""
    return as_tf(all_variables(model))


def optimizer_variables(optimizer: Any) -> list[tf.Variable]:
    """All variables of the optimizer: counter, learning rate, slots."""
    variables = optimizer.variables
    found = as_tf(variables() if callable(variables) else variables)
    rate = getattr(optimizer, "_learning_rate", None)  # tf_keras leaves it out
    if isinstance(rate, tf.Variable) and not any(rate is variable for variable in found):
        found.append(rate)
    return found


def variable_names(variables: Sequence[Any]) -> list[str]:
    """The names of variables as the user knows them: paths in Keras 3."""
    return [getattr(variable, "path", None) or variable.name.split(":")[0] for variable in variables]


def parameters(model: Any) -> int:
    """The number of trainable parameters."""
    return sum(int(variable.shape.num_elements()) for variable in as_tf(trainable_variables(model)))
