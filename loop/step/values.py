"""The values that `compute` returns: reserved names, unweighted values, and checks whose messages show the fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from callbacks.formats import plural
from loop.errors import UsageError

Value: TypeAlias = Any
"""One value of `compute`: a tensor, what becomes one, or, for a metric of `build_metrics`, a tuple of these."""
Shapes: TypeAlias = Mapping[str, tf.TensorShape]

RESERVED = ("loss", "weight", "loss_count")
"""The names of values that have a meaning of their own."""


class Unweighted(NamedTuple):
    """A value of `compute` to which the weights don't apply; see `unweighted`."""

    value: Value


def unweighted(value: Value) -> Unweighted:
    """Marks a value of `compute` to which the weights don't apply; to be used in `compute`.

    With class weights, this counts each true positive once:

        return {"loss": loss, "weight": weight, "accuracy": loop.unweighted(correct)}

    Args:
        value: a tensor, whose mean over all elements is reported; or what a metric of `build_metrics` is updated with,
            which then gets no sample weights: a tensor, or a tuple such as (labels, predictions).

    Returns:
        The marked value, to be returned under a name of its own; not as "loss", "weight" or "loss_count".
    """
    return value if isinstance(value, Unweighted) else Unweighted(value)


def content(value: Value | Unweighted) -> Value:
    """A value of `compute` without its mark."""
    return value.value if isinstance(value, Unweighted) else value


def rows_of(tensor: tf.Tensor, part: slice) -> tf.Tensor:
    """Some rows of a tensor, with their mask, which slicing would drop: the metrics of Keras need it."""
    rows = tensor[part]
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        rows._keras_mask = mask[part]
    return rows


def in_dtype(tensor: tf.Tensor, dtype: str) -> tf.Tensor:
    """A tensor in another dtype, with its mask, which `tf.cast` would drop."""
    if tensor.dtype == dtype:
        return tensor
    converted = tf.cast(tensor, dtype)
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        converted._keras_mask = mask
    return converted


def check(
    values: Mapping[str, Value], n: int | None, names: Sequence[str] | None = None, metrics: Sequence[str] = ()
) -> list[str]:
    """Checks the values that `compute` has returned for n examples; returns their names, the loss first.

    Args:
        values: the values. That they are a dict is checked, too.
        n: the number of examples; None while tracing, when it isn't known.
        names: the names of the values that it has returned before, and must return again.
        metrics: the names of values for a Keras metric. These may have any shape, or be tuples.

    Raises:
        UsageError: no loss, a mean instead of values, or shapes that don't fit; with the fix.
    """
    # Each check relies on those before it: names, then types, then shapes.
    _check_names(values)
    tensors = _tensors(values, metrics)
    _check_dtypes(tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    _check_one_value_per_example(shapes, n)

    # While tracing, the number of rows isn't known. These shapes were checked before, on a few examples.
    if n is not None and "weight" in values:
        unweighted_names = {name for name in shapes if isinstance(values[name], Unweighted)}
        _check_weight(shapes, unweighted_names)
    if n is not None and "loss_count" in values:
        _check_loss_count(shapes)
    if not tensors["loss"].dtype.is_floating:
        raise UsageError(f'compute() returned "loss" of {values["loss"].dtype}: a loss must be a floating-point tensor')

    # By name, not by order: a task may build its dict in another order with training=True.
    returned = ["loss"]
    returned += [name for name in values if name not in RESERVED]
    if names is not None and set(returned) != set(names):
        raise UsageError(
            f"compute() returned {', '.join(names)} at first, and now {', '.join(returned)}: return the same values "
            "always, with training=True too. For values of evaluations alone, define train_step(self, model, step), "
            "with step.minimize(lambda batch: self.compute(model, batch, training=True)): its values may be others"
        )
    return returned


def _check_names(values: object) -> None:
    """Refuses what isn't a dict with a loss, a name that is taken, and a reserved value that is unweighted."""
    if not isinstance(values, dict) or "loss" not in values:
        got = f"a dict of {', '.join(map(str, values))}" if isinstance(values, dict) else type(values).__name__
        raise UsageError(f'compute() returned {got}: return a dict with a per-example "loss", as in {{"loss": values}}')
    for name in values:
        if not isinstance(name, str) or name in ("", "epoch", "step", "examples") or name.startswith("eval_"):
            raise UsageError(
                f"compute() returned a value named {name!r}: that is what the loop itself counts or evaluates, or no "
                "text; give it another name"
            )
    for name in RESERVED:
        if isinstance(values.get(name), Unweighted):
            raise UsageError(
                f'compute() returned "{name}" as loop.unweighted(...), which is for metrics alone: return the tensor '
                'itself; what the loss is divided by is said by "loss_count"'
            )


def _check_dtypes(tensors: Mapping[str, tf.Tensor]) -> None:
    """Refuses values that have no mean, such as text."""
    for name, tensor in tensors.items():
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise UsageError(
                f'compute() returned "{name}" of {tensor.dtype.name}: return numbers, of which there is a mean'
            )


def _check_one_value_per_example(shapes: Shapes, n: int | None) -> None:
    """Refuses means: the means of several replicas' rows don't add up to the mean of the global batch."""
    for name, shape in shapes.items():
        if shape.rank == 0:
            raise UsageError(
                f'compute() returned a scalar for "{name}": return one value per example, never a mean (shape [n]). '
                "For example keras.losses.mean_squared_error(labels, predictions), the function, instead of "
                "keras.losses.MeanSquaredError()(labels, predictions); or leave out tf.reduce_mean(...)"
            )
        # A mean over the wrong axis has a shape, but not one entry for each row.
        if n is not None and shape[0] != n:
            raise UsageError(
                f'compute() returned "{name}" of shape {list(shape)} for {plural(n, "example")}: return shape [n] or '
                "[n, ...], one value per element, never a mean"
            )


def _check_weight(shapes: Shapes, unweighted: set[str]) -> None:
    """Refuses a weight that has another shape than the loss, or doesn't fit another value."""
    weight = shapes["weight"]
    if weight != shapes["loss"]:
        raise UsageError(
            f'compute() returned "weight" of shape {list(weight)} beside "loss" of shape {list(shapes["loss"])}: '
            "give both one shape, with tf.broadcast_to(weight, tf.shape(loss))"
        )
    for name, shape in shapes.items():
        if name == "loss_count" or name in unweighted:
            continue
        # The weight counts for all elements along the other axes, so its axes must be the value's first ones.
        if shape[: weight.rank] != weight:
            raise UsageError(
                f'compute() returned "{name}" of shape {list(shape)}, which "weight" of shape {list(weight)} '
                "can't weigh: its shape must begin with that of the weight. For its plain mean, give "
                f'"{name}": loop.unweighted(...)'
            )


def _check_loss_count(shapes: Shapes) -> None:
    """Refuses a divisor that has neither the shape of the loss nor one number for each example."""
    # It is added up over all replicas by itself, so its shape needn't be that of the weight.
    loss = shapes["loss"]
    if shapes["loss_count"] not in (loss, loss[:1]):
        raise UsageError(
            f'compute() returned "loss_count" of shape {list(shapes["loss_count"])} beside "loss" of shape '
            f"{list(loss)}: give what each element adds to the divisor, in the shape of the loss, "
            "or what each example adds, in shape [n]"
        )


def _tensors(values: Mapping[str, Value], metrics: Sequence[str]) -> dict[str, tf.Tensor]:
    """The values as tensors, but those for a Keras metric, which may be tuples."""
    tensors = {}
    for name, value in values.items():
        if name not in metrics:
            tensors[name] = _tensor(name, content(value))
    return tensors


def _tensor(name: str, value: Value) -> tf.Tensor:
    """A value as a tensor."""
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError):
        raise UsageError(
            f'compute() returned "{name}" as {type(value).__name__}: return a tensor of one value per example, leave '
            "it out, or name the Keras metric that it is for in build_metrics()"
        ) from None
