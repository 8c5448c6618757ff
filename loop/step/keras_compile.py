"""The losses and metrics that a Keras model is compiled with, for all outputs and per example; resolved by Keras.

Keras reduces each output's loss to one number for its own batch. Such numbers can't be added up over replicas. Here the
same losses stay one value per element, together with what each example adds to the divisor that Keras would use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, get_loss
from keras.src.utils.naming import get_object_name

from loop.errors import UsageError
from loop.step.replica import sum_over_batch


class OutputLoss(NamedTuple):
    """The loss of one output.

    Attributes:
        name: as Keras reports it, without "_loss".
        scale: its factor in the sum of all, from `loss_weights`; None: 1.
        values: weighted, but not differentiated with respect to the weights: shape [n, ...].
        count: what each example adds to the divisor: shape [n].
        fixed: whether `count` is the same for each example, whatever the data.
        summed: whether the loss is a sum, which is never divided.
    """

    name: str
    scale: Any
    values: tf.Tensor
    count: tf.Tensor
    fixed: bool
    summed: bool

    def by_example(self) -> tf.Tensor:
        """The sum of each example's values, with the output's factor: shape [n]."""
        summed = tf.reduce_sum(self.values, list(range(1, self.values.shape.rank)))
        return summed if self.scale is None else summed * _number(self.scale, summed.dtype)


class Losses:
    """The losses of a model's outputs, as `compile(loss=..., loss_weights=...)` takes them.

    Args:
        loss: a Keras loss, its name, a function; or a list or dict of them.
        loss_weights: a factor for each, or None.
        output_names: of the model, if it has names.
    """

    def __init__(self, loss: Any, loss_weights: Any, output_names: Any) -> None:
        self._calls: list[Any] = []
        self._resolved: dict[int, Any] = {}
        captured = keras.tree.map_structure(self._captured, loss)
        self._compiled = _Structure(captured, loss_weights, output_names=output_names)

    def _captured(self, identifier: Any) -> Any:
        if identifier is None:
            return None
        if isinstance(identifier, type):
            identifier = identifier()
        if type(identifier).__call__ is not keras.losses.Loss.__call__ and isinstance(identifier, keras.losses.Loss):
            raise UsageError(
                f"the loss {type(identifier).__name__} overrides __call__, which returns one number for a batch: "
                "override call(self, y_true, y_pred) instead, and return one value per element"
            )
        return _Captured(identifier, self._calls)

    def of(self, labels: Any, predictions: Any, weights: Any) -> list[OutputLoss]:
        """The loss of each output that has one."""
        self._calls.clear()
        self._compiled(labels, predictions, weights)
        calls = list(self._calls)
        self._calls.clear()
        losses = []
        for index, (call, (_, _, scale, name)) in enumerate(zip(calls, self._compiled._flat_losses, strict=True)):
            identifier, label, prediction, weight = call
            if index not in self._resolved:
                self._resolved[index] = get_loss(identifier, label, prediction)
            losses.append(_output_loss(name, scale, self._resolved[index], label, prediction, weight))
        return losses


class _Captured(keras.losses.Loss):
    """Takes the place of a loss while Keras matches losses with outputs: notes the arguments of its call."""

    def __init__(self, identifier: Any, calls: list[Any]) -> None:
        name = identifier if isinstance(identifier, str) else get_object_name(identifier)
        super().__init__(name=name, reduction="sum")
        self._identifier = identifier
        self._calls = calls

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self._calls.append((self._identifier, y_true, y_pred, sample_weight))
        return keras.ops.zeros(())


class _Structure(CompileLoss):
    """Keras's matching of losses with outputs, without the metrics that it keeps of several losses."""

    @property
    def metrics(self) -> list[Any]:
        return [None] * len(self._flat_losses or [None])


def _output_loss(name: str, scale: Any, loss: Any, labels: Any, predictions: Any, weight: Any) -> OutputLoss:
    """What `keras.losses.Loss.__call__` computes, up to its reduction."""
    dtype = "float64" if _is_wide(predictions) else loss.dtype

    def floats(value: Any) -> Any:
        return keras.ops.convert_to_tensor(value, dtype=dtype)

    in_mask = getattr(predictions, "_keras_mask", None)
    values = loss.call(keras.tree.map_structure(floats, labels), keras.tree.map_structure(floats, predictions))
    values = keras.ops.convert_to_tensor(values)
    if not values.shape.rank:
        raise UsageError(
            f"the loss {loss.name!r} returned a scalar: return one value per element, never a mean, such as "
            "keras.ops.mean(..., axis=-1) instead of keras.ops.mean(...)"
        )
    masks = [floats(mask) for mask in (in_mask, getattr(values, "_keras_mask", None)) if mask is not None]
    mask = masks[0] * masks[-1] if masks else None
    values = tf.cast(values, dtype)
    summed = loss.reduction in ("sum", "none", None)
    by_weight = loss.reduction == "mean_with_sample_weight"

    if weight is not None:
        weight = tf.stop_gradient(floats(weight))
    both = weight
    if mask is not None:
        mask = tf.stop_gradient(mask)
        both = mask if weight is None else tf.multiply(*_of_one_rank(mask, weight))
    if both is not None:
        values, both = _of_one_rank(values, both)
        values = tf.math.multiply_no_nan(values, both)

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
    """How many elements each example has."""
    known = tensor.shape[1:].num_elements()
    return tf.cast(tf.reduce_prod(tf.shape(tensor)[1:]) if known is None else known, dtype)


def _number(value: Any, dtype: tf.DType) -> tf.Tensor:
    """A factor as a tensor; `tf.cast` would round a Python number to 32 bits first."""
    return keras.ops.convert_to_tensor(value, dtype=dtype.name)


def _is_wide(predictions: Any) -> bool:
    dtypes = [keras.backend.standardize_dtype(tensor.dtype) for tensor in keras.tree.flatten(predictions)]
    return "float64" in dtypes


def combined(losses: Sequence[OutputLoss]) -> dict[str, tf.Tensor]:
    """The sum of the outputs' losses, as "loss" and "loss_count" of `TrainTask.compute`.

    Each output has a divisor of its own. A fixed divisor is a factor of the values. A divisor that depends on the data
    (masks, sums of weights) is that of the global batch, which the replicas add up before they differentiate.
    """
    if len(losses) == 1:
        only = losses[0]
        values = only.values if only.scale is None else only.values * _number(only.scale, only.values.dtype)
        return {"loss": values} if only.summed else {"loss": values, "loss_count": only.count}
    if all(loss.summed for loss in losses):
        return {"loss": tf.add_n([loss.by_example() for loss in losses])}
    dtype = losses[0].values.dtype
    one = tf.ones_like(losses[0].count)
    if all(loss.fixed and not loss.summed for loss in losses):
        parts = [loss.by_example() / loss.count for loss in losses]
    else:
        parts = _parts_of_batch(losses, one)
    return {"loss": tf.add_n([tf.cast(part, dtype) for part in parts]), "loss_count": one}


def _parts_of_batch(losses: Sequence[OutputLoss], one: tf.Tensor) -> list[tf.Tensor]:
    """The losses of outputs by example, whose mean over the global batch is each output's own loss.

    Args:
        losses: of the outputs.
        one: a 1 for each example.
    """
    dtype = losses[0].values.dtype
    # One collective: the number of rows of the global batch, and each output's divisor.
    counts = sum_over_batch(tf.stack([one, *(tf.cast(loss.count, dtype) for loss in losses)], 1))
    rows = counts[0]
    parts = []
    for index, loss in enumerate(losses):
        values = loss.by_example()
        parts.append(values * (rows if loss.summed else tf.math.divide_no_nan(rows, counts[1 + index])))
    return parts


def reported(losses: Sequence[OutputLoss]) -> dict[str, Any]:
    """The loss of each of several outputs by itself, without its factor, as values of `TrainTask.compute`."""
    values: dict[str, Any] = {}
    for loss in losses if len(losses) > 1 else ():
        by_example = loss._replace(scale=None).by_example()
        mean = by_example if loss.summed else tf.math.divide_no_nan(by_example, loss.count)
        values[f"{loss.name}_loss"] = mean if loss.fixed or loss.summed else (mean, loss.count)
    return values


def reported_metrics(losses: Sequence[OutputLoss]) -> dict[str, Any]:
    """The metrics of the values of `reported` that have weights of their own."""
    return {name: keras.metrics.Mean() for name, value in reported(losses).items() if isinstance(value, tuple)}


def added(model: Any, predictions: Any) -> dict[str, tf.Tensor]:
    """The values of a model that is compiled without a loss: only the losses that its layers add are minimized."""
    rows = tf.shape(keras.tree.flatten(predictions)[0])[:1]
    penalties = [tf.cast(tf.reduce_sum(penalty), keras.config.floatx()) for penalty in model.losses]
    if not penalties:
        raise UsageError("there is no loss: compile the model with one, or give loss_fn; its layers add none either")
    return {"loss": tf.zeros(rows, penalties[0].dtype), "added_loss": tf.fill(rows, tf.add_n(penalties))}


def class_weights(labels: Any, by_class: Mapping[int, float]) -> tf.Tensor:
    """The weight of each example by its class, as Keras derives it from `class_weight`; 1 for a class without one."""
    if keras.tree.is_nested(labels):
        raise UsageError("KerasTask(class_weight=...): a model of several outputs has no one class: give weights")
    labels = tf.convert_to_tensor(labels)
    if labels.shape.rank and labels.shape.rank > 1:
        labels = tf.squeeze(labels, -1) if labels.shape[-1] == 1 else tf.argmax(labels, -1)
    classes = tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, tf.int32)
    table = tf.constant([by_class.get(index, 1.0) for index in range(max(by_class) + 1)], keras.config.floatx())
    known = (classes >= 0) & (classes <= max(by_class))
    return tf.where(known, tf.gather(table, tf.where(known, classes, 0)), tf.ones([], table.dtype))


class Metrics:
    """The metrics of a model's outputs, as `compile(metrics=..., weighted_metrics=...)` takes them.

    Args:
        metrics: unweighted ones: names, functions or Keras metrics; for several outputs a list or dict of them; or a
            dict of them by the names to report.
        weighted: the same, weighed by sample weights or class weights.
        output_names: of the model, if it has names.
        labels: of a few examples.
        predictions: for these.
    """

    def __init__(self, metrics: Any, weighted: Any, output_names: Any, labels: Any, predictions: Any) -> None:
        outputs = set(predictions) if isinstance(predictions, Mapping) else set(output_names or ())
        metrics, names = _without_names(metrics, outputs)
        weighted, more_names = _without_names(weighted, outputs)
        self._compiled = CompileMetrics(metrics, weighted, output_names=output_names)
        self._compiled.build(labels, predictions)
        self._flat: list[tuple[str, Any, int, bool]] = []
        taken: dict[str, int] = {}
        for groups, given, by_weight in (
            (self._compiled._flat_metrics, names, False),
            (self._compiled._flat_weighted_metrics, more_names, True),
        ):
            for output, group in enumerate(groups):
                for index, metric in enumerate(group.metrics if group else ()):
                    name = given[index] if given else _name(metric.name, group.output_name, by_weight, taken)
                    self._flat.append((name, metric, output, by_weight))

    def by_name(self) -> dict[str, Any]:
        """The Keras metrics, by the names that Keras reports."""
        return {name: metric for name, metric, _, _ in self._flat}

    def arguments(self, labels: Any, predictions: Any, weights: Any) -> dict[str, Any]:
        """What each metric is updated with, by name."""
        flatten = self._compiled._flatten_y
        flat_labels = flatten(labels)
        flat_predictions = flatten(predictions)
        flat_weights = [None] * len(flat_labels) if weights is None else flatten(weights)
        if len(flat_weights) < len(flat_labels):
            flat_weights = [flat_weights[0]] * len(flat_labels)
        arguments = {}
        for name, metric, output, by_weight in self._flat:
            weight = flat_weights[output] if by_weight else None
            pair = (flat_labels[output], _in_dtype(flat_predictions[output], metric.dtype))
            arguments[name] = pair if weight is None else (*pair, weight)
        return arguments

    def check(self, labels: Any, predictions: Any, weights: Any) -> None:
        """Refuses a metric whose state for several examples isn't the sum of its states for each of them.

        Raises:
            UsageError: such a metric; for example a function that returns a mean, which depends on how examples are
                shared among replicas.
        """
        rows = int(tf.shape(keras.tree.flatten(predictions)[0])[0])
        if rows < 2:
            return

        def states(metric: Any, name: str, part: slice) -> list[np.ndarray]:
            arguments = self.arguments(_rows(labels, part), _rows(predictions, part), _rows(weights, part))[name]
            start = [np.zeros(variable.shape, variable.dtype) for variable in metric.variables]
            return [np.asarray(state, "float64") for state in metric.stateless_update_state(start, *arguments)]

        for name, metric in self.by_name().items():
            metric.update_state(*self.arguments(labels, predictions, weights)[name])  # makes its variables
            metric.reset_state()
            whole = states(metric, name, slice(rows))
            first = states(metric, name, slice(1))
            rest = states(metric, name, slice(1, rows))
            if not all(np.allclose(a, b + c, 1e-4, 1e-5, True) for a, b, c in zip(whole, first, rest, strict=True)):
                raise UsageError(
                    f"the metric {name!r} of several examples isn't made of those of each example: a function must "
                    "return one value per example, never a mean, such as keras.ops.mean(..., axis=-1) instead of "
                    "keras.ops.mean(...); the state of a metric must be a sum over examples"
                )


def _rows(tensors: Any, part: slice) -> Any:
    """Some rows of each tensor, with their masks."""

    def cut(tensor: Any) -> Any:
        rows = tensor[part]
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            rows._keras_mask = mask[part]
        return rows

    return None if tensors is None else keras.tree.map_structure(cut, tensors)


def _without_names(metrics: Any, outputs: set[str]) -> tuple[Any, list[str]]:
    """Separates a dict of metrics by the names to report into the metrics and the names; others stay as they are."""
    single = isinstance(metrics, Mapping) and not any(isinstance(value, list | tuple) for value in metrics.values())
    if not metrics or not single or set(metrics) <= outputs:
        return metrics, []
    return list(metrics.values()), list(metrics)


def _name(metric: str, output: str | None, by_weight: bool, taken: dict[str, int]) -> str:
    """The name under which Keras reports a metric: after the output's name, and with a number if it comes again."""
    name = f"{output}_{metric}" if output else metric
    if name in taken and by_weight:
        name = f"{output}_weighted_{metric}" if output else f"weighted_{metric}"
    taken[name] = taken.get(name, -1) + 1
    return f"{name}_{taken[name]}" if taken[name] else name


def _in_dtype(predictions: tf.Tensor, dtype: str) -> tf.Tensor:
    """The predictions in the dtype of a metric's state, with their mask, which `tf.cast` would drop."""
    predictions = keras.ops.convert_to_tensor(predictions)
    if not predictions.dtype.is_floating or predictions.dtype == dtype:
        return predictions
    converted = tf.cast(predictions, dtype)
    mask = getattr(predictions, "_keras_mask", None)
    if mask is not None:
        converted._keras_mask = mask
    return converted
