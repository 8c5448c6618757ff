"""The losses that a Keras model is compiled with, for all of its outputs, as values per example.

Keras reduces each output's loss to one number for its own batch. Such numbers can't be added up over replicas. Here
Keras itself finds which loss belongs to which output; but each loss stays one value per element, together with what
each example adds to the divisor that Keras would use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss, get_loss
from keras.src.utils.naming import get_object_name

from loop.errors import UsageError
from loop.step.replica import sum_over_batch
from loop.task import Model, Values

Compiled: TypeAlias = Any
"""An argument of `compile`: a name, a function or an object of Keras, or a list or dict of them for several outputs."""
Identifier: TypeAlias = Any
"""A loss as `compile` takes it for one output: a name, a function, a class or an object of Keras; or None."""
Tensors: TypeAlias = Any
"""The labels, predictions or weights of a batch: a tensor, or a list, tuple or dict of them for several outputs."""
Scale: TypeAlias = float | tf.Tensor | None
"""The factor of an output's loss in the sum of all, from `loss_weights`; None: 1."""
Call: TypeAlias = tuple[Identifier, Tensors, Tensors, Tensors]
"""A loss with the labels, predictions and weights that Keras calls it with."""


class OutputLoss(NamedTuple):
    """The loss of one output."""

    name: str  # the name that Keras reports, without "_loss"
    scale: Scale  # the factor of this loss in the sum of all
    values: tf.Tensor  # the values, multiplied by the weights: shape [n, ...]. No gradient flows to the weights.
    count: tf.Tensor  # what each example adds to the divisor: shape [n]
    fixed: bool  # whether `count` is the same for each example, with any data
    summed: bool  # whether the loss is a sum, which is never divided

    @property
    def has_divisor(self) -> bool:
        """Whether the divisor isn't the number of the values, by which a step divides a loss anyway."""
        return not (self.summed or self.fixed)

    def by_example(self) -> tf.Tensor:
        """The sum of each example's values, multiplied by the output's factor: shape [n]."""
        summed = tf.reduce_sum(self.values, list(range(1, self.values.shape.rank)))
        return summed if self.scale is None else summed * _number(self.scale, summed.dtype)


class Losses:
    """The losses of a model's outputs, as `compile(loss=..., loss_weights=...)` takes them.

    Args:
        loss: the argument of `compile`.
        loss_weights: a factor for each loss, in the same structure; or None.
        output_names: the names of the model's outputs, if it has names.
    """

    def __init__(self, loss: Compiled, loss_weights: Compiled, output_names: Sequence[str] | None) -> None:
        self._calls: list[Call] = []
        self._resolved: dict[int, keras.losses.Loss] = {}
        captured = keras.tree.map_structure(self._captured, loss)
        self._compiled = _Matching(captured, loss_weights, output_names=output_names)

    def _captured(self, identifier: Identifier) -> _Captured | None:
        """A loss that takes the place of the given one, and notes its calls."""
        if identifier is None:
            return None
        if isinstance(identifier, type):
            identifier = identifier()
        if isinstance(identifier, keras.losses.Loss) and type(identifier).__call__ is not keras.losses.Loss.__call__:
            raise UsageError(
                f"the loss {type(identifier).__name__} overrides __call__, which returns one number for a batch: "
                "override call(self, y_true, y_pred) instead, and return one value per element"
            )
        return _Captured(identifier, self._calls)

    def of(self, labels: Tensors, predictions: Tensors, weights: Tensors) -> list[OutputLoss]:
        """The loss of each output that has one."""
        # Let Keras match losses with outputs. The list may still have calls of a trace that failed.
        self._calls.clear()
        self._compiled(labels, predictions, weights)  # calls each `_Captured`, which adds to `_calls`
        calls = list(self._calls)
        self._calls.clear()  # not to keep the tensors of this trace, and with them its graph

        # Compute them. Keras calls the losses in the order of its flat list.
        losses = []
        for index, (call, flat_loss) in enumerate(zip(calls, self._compiled._flat_losses, strict=True)):
            identifier, label, prediction, weight = call
            _, _, scale, name = flat_loss
            if index not in self._resolved:
                # By the shapes of labels and predictions, Keras decides which loss the name "crossentropy" means.
                self._resolved[index] = get_loss(identifier, label, prediction)
            losses.append(_output_loss(name, scale, self._resolved[index], label, prediction, weight))
        return losses


class _Captured(keras.losses.Loss):
    """Takes the place of a loss while Keras matches losses with outputs: notes the arguments of its call."""

    def __init__(self, identifier: Identifier, calls: list[Call]) -> None:
        name = identifier if isinstance(identifier, str) else get_object_name(identifier)
        super().__init__(name=name, reduction="sum")
        self._identifier = identifier
        self._calls = calls

    def __call__(self, y_true: Tensors, y_pred: Tensors, sample_weight: Tensors = None) -> tf.Tensor:
        self._calls.append((self._identifier, y_true, y_pred, sample_weight))
        return keras.ops.zeros(())


class _Matching(CompileLoss):
    """Keras's matching of losses with outputs, without the metrics that it keeps of several losses."""

    @property
    def metrics(self) -> list[None]:
        # Keras goes through its losses and this list side by side, and updates each metric that isn't None.
        return [None] * len(self._flat_losses or [None])


def _output_loss(
    name: str, scale: Scale, loss: keras.losses.Loss, labels: Tensors, predictions: Tensors, weight: Tensors
) -> OutputLoss:
    """What `keras.losses.Loss.__call__` computes, up to its reduction."""
    dtype = "float64" if _is_wide(predictions) else loss.dtype

    def floats(value: Tensors) -> tf.Tensor:
        return keras.ops.convert_to_tensor(value, dtype=dtype)

    # Read before the conversion, which drops the mask.
    in_mask = getattr(predictions, "_keras_mask", None)
    values = loss.call(keras.tree.map_structure(floats, labels), keras.tree.map_structure(floats, predictions))
    values = keras.ops.convert_to_tensor(values)
    if not values.shape.rank:
        raise UsageError(
            f"the loss {loss.name!r} returned a scalar: return one value per element, never a mean, such as "
            "keras.ops.mean(..., axis=-1) instead of keras.ops.mean(...)"
        )
    out_mask = getattr(values, "_keras_mask", None)
    masks = [floats(mask) for mask in (in_mask, out_mask) if mask is not None]
    mask = masks[0] * masks[-1] if masks else None  # a single mask of 0 and 1 times itself is itself
    values = tf.cast(values, dtype)
    summed = loss.reduction in ("sum", "none", None)
    by_weight = loss.reduction == "mean_with_sample_weight"

    # The values times mask and weight. Both are constants for the gradient.
    if weight is not None:
        weight = tf.stop_gradient(floats(weight))
    both = weight
    if mask is not None:
        mask = tf.stop_gradient(mask)
        both = mask if weight is None else tf.multiply(*_of_one_rank(mask, weight))
    if both is not None:
        values, both = _of_one_rank(values, both)
        values = tf.math.multiply_no_nan(values, both)  # where a weight is 0, a nan doesn't count

    # With the usual reduction, Keras divides by the number of values that the mask leaves, and not by their weights.
    counted = both if by_weight else mask
    count = tf.fill(tf.shape(values)[:1], _inner_size(values, values.dtype))
    if counted is not None:
        count = tf.reduce_sum(counted, list(range(1, counted.shape.rank)))
        if not by_weight:  # a mask of [n, t] beside values of [n, t, c] stands for c values
            count *= _inner_size(values, count.dtype) / _inner_size(counted, count.dtype)
    return OutputLoss(name, scale, values, count, counted is None, summed)


def _of_one_rank(first: tf.Tensor, second: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives two tensors one rank, as Keras does; a number for an example then stands for all of its elements."""
    first, second = squeeze_or_expand_to_same_rank(first, second)
    while second.shape.rank < first.shape.rank:
        second = tf.expand_dims(second, -1)
    while first.shape.rank < second.shape.rank:
        first = tf.expand_dims(first, -1)
    return first, second


def _inner_size(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The number of elements of each example: a scalar."""
    size = tensor.shape[1:].num_elements()
    if size is None:
        size = tf.reduce_prod(tf.shape(tensor)[1:])
    return tf.cast(size, dtype)


def _number(value: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A factor as a tensor."""
    # Not `tf.cast`, which would round a Python number to 32 bits first.
    return keras.ops.convert_to_tensor(value, dtype=dtype.name)


def _is_wide(predictions: Tensors) -> bool:
    """Whether a prediction is float64."""
    dtypes = [keras.backend.standardize_dtype(tensor.dtype) for tensor in keras.tree.flatten(predictions)]
    return "float64" in dtypes


def combined(losses: Sequence[OutputLoss]) -> dict[str, tf.Tensor]:
    """The sum of the outputs' losses, as "loss" and "loss_count" of `TrainTask.compute`.

    Each output has a divisor of its own. A fixed divisor is a factor of the values. For a divisor that depends on the
    data (masks, sums of weights), that of the global batch is needed: the replicas add it up before they differentiate.
    """
    # A single output keeps its values per element.
    if len(losses) == 1:
        [loss] = losses
        values = loss.values if loss.scale is None else loss.values * _number(loss.scale, loss.values.dtype)
        return {"loss": values, "loss_count": loss.count} if loss.has_divisor else {"loss": values}

    # Several outputs may have values of different shapes, so each is summed by example.
    if all(loss.summed for loss in losses):
        return {"loss": tf.add_n([loss.by_example() for loss in losses])}
    dtype = losses[0].values.dtype
    one = tf.ones_like(losses[0].count)
    if all(loss.fixed and not loss.summed for loss in losses):
        parts = [loss.by_example() / loss.count for loss in losses]
    else:
        parts = _parts_of_batch(losses, one)
    total = tf.add_n([tf.cast(part, dtype) for part in parts])
    return {"loss": total}


def _parts_of_batch(losses: Sequence[OutputLoss], one: tf.Tensor) -> list[tf.Tensor]:
    """The losses of the outputs by example. The mean over the global batch is each output's own loss. A collective.

    Args:
        losses: the losses of the outputs.
        one: a 1 for each example: shape [n].
    """
    dtype = losses[0].values.dtype
    # In one collective: the number of rows of the global batch, and the divisor of each output.
    own_counts = [one]
    for loss in losses:
        own_counts.append(tf.cast(loss.count, dtype))
    counts = sum_over_batch(tf.stack(own_counts, 1))
    rows = counts[0]
    parts = []
    for index, loss in enumerate(losses):
        values = loss.by_example()
        # Times the rows: the step divides the sum of all by the rows, of which each example counts as one.
        factor = rows if loss.summed else tf.math.divide_no_nan(rows, counts[1 + index])
        parts.append(values * factor)
    return parts


def reported(losses: Sequence[OutputLoss]) -> Values:
    """The loss of each of several outputs by itself, without its factor, as values of `TrainTask.compute`."""
    values: Values = {}
    if len(losses) == 1:  # it is the loss of the step itself
        return values
    for loss in losses:
        by_example = loss._replace(scale=None).by_example()
        mean = by_example if loss.summed else tf.math.divide_no_nan(by_example, loss.count)
        values[f"{loss.name}_loss"] = mean if loss.fixed or loss.summed else (mean, loss.count)
    return values


def reported_metrics(losses: Sequence[OutputLoss]) -> dict[str, keras.metrics.Metric]:
    """The metrics for those values of `reported` that have weights of their own."""
    metrics = {}
    for name, value in reported(losses).items():
        if isinstance(value, tuple):
            metrics[name] = keras.metrics.Mean()
    return metrics


def added(model: Model, predictions: Tensors) -> dict[str, tf.Tensor]:
    """The values of a model that is compiled without a loss: only the losses that its layers add are minimized."""
    # The step minimizes the penalties of `model.losses` anyway, so the loss is 0; "added_loss" only reports them.
    rows = tf.shape(keras.tree.flatten(predictions)[0])[:1]
    penalties = [tf.cast(tf.reduce_sum(penalty), keras.config.floatx()) for penalty in model.losses]
    if not penalties:
        raise UsageError("there is no loss: compile the model with one, or give loss_fn; its layers add none either")
    return {"loss": tf.zeros(rows, penalties[0].dtype), "added_loss": tf.fill(rows, tf.add_n(penalties))}


def class_weights(labels: Tensors, by_class: Mapping[int, float]) -> tf.Tensor:
    """The weight of each example by its class, as Keras derives it from `class_weight`; 1 for a class without one."""
    if keras.tree.is_nested(labels):
        raise UsageError("KerasTask(class_weight=...): a model of several outputs has no one class: give weights")
    labels = tf.convert_to_tensor(labels)
    if labels.shape.rank and labels.shape.rank > 1:
        labels = tf.squeeze(labels, -1) if labels.shape[-1] == 1 else tf.argmax(labels, -1)
    if labels.dtype.is_floating:
        labels = tf.round(labels)
    classes = tf.cast(labels, tf.int32)
    least = min(by_class)
    greatest = max(by_class)
    weights = [by_class.get(index, 1.0) for index in range(least, greatest + 1)]
    table = tf.constant(weights, keras.config.floatx())
    known = (classes >= least) & (classes <= greatest)
    # The index is replaced before the lookup: on a CPU, an index outside of the table is an error.
    return tf.where(known, tf.gather(table, tf.where(known, classes - least, 0)), tf.ones([], table.dtype))
