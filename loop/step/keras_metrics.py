"""The metrics that a Keras model is compiled with, for all of its outputs, as Keras matches them with the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from loop.step.keras_compile import Compiled, Tensors
from loop.step.values import in_dtype


class _OutputMetric(NamedTuple):
    """A metric of one output."""

    name: str  # the name that is reported
    metric: keras.metrics.Metric  # the metric
    output: int  # the index of the output
    by_weight: bool  # whether the metric is weighted


class Metrics:
    """The metrics of a model's outputs, as `compile(metrics=..., weighted_metrics=...)` takes them.

    Args:
        metrics: unweighted metrics: names, functions or Keras metrics; for several outputs a list or dict of them; or a
            dict of them by the names to report.
        weighted: the same, for metrics that are weighted by sample weights or class weights.
        output_names: the names of the model's outputs, if it has names.
        labels: the labels of a few examples.
        predictions: the predictions for these examples.
    """

    def __init__(
        self,
        metrics: Compiled,
        weighted: Compiled,
        output_names: Sequence[str] | None,
        labels: Tensors,
        predictions: Tensors,
    ) -> None:
        outputs = set(predictions) if isinstance(predictions, Mapping) else set(output_names or ())
        metrics, names = _without_names(metrics, outputs)
        weighted, weighted_names = _without_names(weighted, outputs)
        # Keras matches metrics with outputs. By their shapes, it decides which metric "accuracy" means.
        self._compiled = CompileMetrics(metrics, weighted, output_names=output_names)
        self._compiled.build(labels, predictions)
        self._flat: list[_OutputMetric] = []
        # Unweighted metrics first, as Keras reports them: the later one of two equal names gets a prefix or a number.
        taken: dict[str, int] = {}
        self._add(self._compiled._flat_metrics, names, False, taken)
        self._add(self._compiled._flat_weighted_metrics, weighted_names, True, taken)

    def _add(self, groups: Sequence[Any], names: list[str], by_weight: bool, taken: dict[str, int]) -> None:
        """Adds the metrics of each output.

        Args:
            groups: Keras's list of metrics of each output, or None for an output without metrics.
            names: the names to report; []: those that Keras gives.
            by_weight: whether the metrics are weighted.
            taken: how often each name has been given; changed.
        """
        for output, group in enumerate(groups):
            if not group:
                continue
            for index, metric in enumerate(group.metrics):
                name = names[index] if names else _name(metric.name, group.output_name, by_weight, taken)
                self._flat.append(_OutputMetric(name, metric, output, by_weight))

    def by_name(self) -> dict[str, keras.metrics.Metric]:
        """The Keras metrics, by the names that Keras reports."""
        return {name: metric for name, metric, _, _ in self._flat}

    def arguments(self, labels: Tensors, predictions: Tensors, weights: Tensors) -> dict[str, tuple[tf.Tensor, ...]]:
        """What each metric is updated with, by name: labels, predictions, and weights if it has some."""
        flatten = self._compiled._flatten_y
        flat_labels = flatten(labels)
        flat_predictions = flatten(predictions)
        flat_weights = [None] * len(flat_labels) if weights is None else flatten(weights)
        if len(flat_weights) < len(flat_labels):
            flat_weights = [flat_weights[0]] * len(flat_labels)  # one weight of each example, for all outputs
        arguments: dict[str, tuple[tf.Tensor, ...]] = {}
        for name, metric, output, by_weight in self._flat:
            tensors = [flat_labels[output], flat_predictions[output]]
            if by_weight and flat_weights[output] is not None:
                tensors.append(flat_weights[output])
            # All of them: a metric may convert none to the dtype of another.
            converted = []
            for tensor in tensors:
                converted.append(_in_dtype(tensor, metric.dtype))
            arguments[name] = tuple(converted)
        return arguments


def _without_names(metrics: Compiled, outputs: set[str]) -> tuple[Compiled, list[str]]:
    """Splits a dict of metrics by the names to report into metrics and names; anything else stays as it is."""
    if not metrics or not isinstance(metrics, Mapping):
        return metrics, []
    # A dict by outputs: Keras takes it as it is. Lists of metrics belong to outputs, too.
    has_lists = any(isinstance(value, list | tuple) for value in metrics.values())
    if has_lists or set(metrics) <= outputs:
        return metrics, []
    return list(metrics.values()), list(metrics)


def _name(metric: str, output: str | None, by_weight: bool, taken: dict[str, int]) -> str:
    """The name that Keras reports for a metric: after the output's name, and with a number if it is taken."""
    name = f"{output}_{metric}" if output else metric
    if name in taken and by_weight:
        name = f"{output}_weighted_{metric}" if output else f"weighted_{metric}"
    taken[name] = taken.get(name, -1) + 1
    return f"{name}_{taken[name]}" if taken[name] else name


def _in_dtype(tensor: tf.Tensor, dtype: str) -> tf.Tensor:
    """A tensor of floats in the dtype of a state of floats."""
    tensor = keras.ops.convert_to_tensor(tensor)
    is_float = tensor.dtype.is_floating and keras.backend.is_float_dtype(dtype)
    return in_dtype(tensor, dtype) if is_float else tensor
