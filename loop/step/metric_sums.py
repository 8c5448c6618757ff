"""How the values of `compute` become metrics: sums in each replica, one vector for all of them, and means."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from loop.errors import UsageError, message_of
from loop.step.values import RESERVED, Unweighted, Value, check, content, in_dtype

SumAndWeight: TypeAlias = tuple[tf.Tensor, tf.Tensor]
"""The weighted sum of a value, and the sum of its weights: scalars; or of a stack of values, vectors and a scalar."""

Numbers: TypeAlias = np.ndarray | Mapping[str, np.ndarray]
"""The result of a Keras metric: a number, an array, or a dict of them; float64."""


class MetricSums:
    """The values of one `compute`, and how they become totals: vectors that can be added up.

    Each value becomes its weighted sum and the sum of its weights, and a `keras.metrics` metric its state. So totals
    may be added up in any order, over replicas, steps and calls.

    Args:
        names: the values, the loss first.
        metrics: Keras metrics by the name of the value that each is updated with.
    """

    def __init__(self, names: Sequence[str], metrics: Mapping[str, keras.metrics.Metric]) -> None:
        # Only the metrics of this `compute`: another `minimize` of the step may return other values.
        self.metrics = {name: metric for name, metric in metrics.items() if name in names}
        self.names = [name for name in names if name not in self.metrics]
        self._expected = list(names)

    @property
    def width(self) -> int:
        """The length of the vector of sums: two for each value."""
        return 2 * len(self.names)

    @property
    def state_width(self) -> int:
        """The length of the vector of states: all numbers of all metrics."""
        width = 0
        for metric in self.metrics.values():
            width += sum(_sizes(metric))
        return width

    def sums(self, values: Mapping[str, Value], dtype: tf.DType) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """The weighted sum of the loss, which is differentiated; and the sums of all values.

        Args:
            values: what `compute` returned for the replica's rows.
            dtype: the type of the sums.

        Returns:
            A scalar; and two scalars for each value: its weighted sum, and its divisor.

        Raises:
            UsageError: the values have other names than when `compute` was first tried.
        """
        check(values, None, self._expected, tuple(self.metrics))
        weight = values.get("weight")
        if weight is not None:
            # A constant for the gradient: a loss may compute its weight from the model's predictions.
            weight = tf.stop_gradient(tf.cast(weight, dtype))
        tensors = {name: tf.cast(content(values[name]), dtype) for name in self.names}
        sums = {"loss": _weighted_sum(tensors["loss"], weight)}
        # The task's own divisor takes the place of the sum of weights.
        if "loss_count" in values:
            divisor = tf.reduce_sum(tf.stop_gradient(tf.cast(values["loss_count"], dtype)))
            # Plus 0, or nan if the divisor isn't finite: the check of a step looks at the sum, not at its divisor.
            sums["loss"] = (sums["loss"][0] + (divisor - divisor), divisor)

        # The other values by kind, since those with the same weight are added up in one operation.
        weighted = {}
        unweighted = {}
        for name in self.names:
            if isinstance(values[name], Unweighted):
                unweighted[name] = tensors[name]
            elif name != "loss":
                weighted[name] = tensors[name]
        sums |= _sums(weighted, weight)
        sums |= _sums(unweighted, None)

        # In the order of `compute`, which `means` relies on.
        flat: list[tf.Tensor] = []
        for name in self.names:
            flat += sums[name]
        return sums["loss"][0], flat

    def states(self, values: Mapping[str, Value]) -> tf.Tensor:
        """What the values add to the states of the metrics: float64 [state_width]."""
        parts = [tf.zeros([0], tf.float64)]  # `tf.concat` takes no empty list
        for name, metric in self.metrics.items():
            # From zeros, and not from the metric's own variables: so states of replicas and steps can be added up.
            start = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
            arguments, weight = _arguments(metric, values, name)
            for state in metric.stateless_update_state(start, *arguments, **weight):
                parts.append(tf.reshape(tf.cast(tf.stop_gradient(state), tf.float64), [-1]))
        return tf.concat(parts, 0)

    def means(self, sums: np.ndarray, states: np.ndarray) -> dict[str, float]:
        """The mean of each value, nan if its weight is 0; and the result of each metric, a number for each element."""
        means: dict[str, float] = {}
        # 0 / 0 is nan, as it is meant to be; NumPy needn't warn of it.
        with np.errstate(invalid="ignore", divide="ignore"):
            for index, name in enumerate(self.names):
                means[name] = float(sums[2 * index] / sums[2 * index + 1])

        # The vector holds the states of all metrics, one after the other, in the order of `states`.
        numbers = iter(states)
        for name, metric in self.metrics.items():
            variables = []
            for variable, size in zip(metric.variables, _sizes(metric), strict=True):
                part = np.fromiter(itertools.islice(numbers, size), np.float64, size)
                variables.append(tf.constant(part.reshape(variable.shape), variable.dtype))
            means |= _by_element(name, _result(metric, variables))
        return {name: means[name] for name in sorted(means, key=self._index)}

    def _index(self, name: str) -> int:
        """The index of a value, or of the metric that has this element, in the order of `compute`."""
        if name in self._expected:
            return self._expected.index(name)
        # An element of a metric is named "<metric>_<index>"; see `_by_element`.
        return max(index for index, value in enumerate(self._expected) if name.startswith(f"{value}_"))


def _sums(values: Mapping[str, tf.Tensor], weight: tf.Tensor | None) -> dict[str, SumAndWeight]:
    """The weighted sum of each value and the sum of its weights, by name."""
    sums: dict[str, SumAndWeight] = {}
    # Values of one number for each example are added up in one operation: ten take hardly longer than one.
    flat = [name for name, value in values.items() if value.shape.rank == 1]
    if len(flat) > 1:
        stacked = tf.stack([values[name] for name in flat])
        totals, weights = _weighted_sum(stacked, weight, [1])
        for index, name in enumerate(flat):
            sums[name] = (totals[index], weights)
    for name, value in values.items():
        if name not in sums:
            sums[name] = _weighted_sum(value, weight)
    return sums


def _weighted_sum(value: tf.Tensor, weight: tf.Tensor | None, axis: list[int] | None = None) -> SumAndWeight:
    """The sum of value * weight, and the sum of the weights; of a stack of values, over its axis of examples."""
    if weight is None:
        total = tf.reduce_sum(value, axis)
        elements = tf.size(value) if axis is None else tf.shape(value)[1]
        return total, tf.cast(elements, value.dtype)
    # Where a weight is 0, the product is 0 even if the value is nan: such rows, as of padding, count for nothing.
    if axis is not None:
        return tf.reduce_sum(tf.math.multiply_no_nan(value, weight[tf.newaxis]), axis), tf.reduce_sum(weight)
    weights = weight
    if value.shape.rank is None or weight.shape.rank is None:
        # The graph doesn't know the rank of what `tf.numpy_function` or `tf.py_function` returns.
        trailing = tf.ones([tf.rank(value) - tf.rank(weight)], tf.int32)
        sizes = tf.concat([tf.shape(weight), trailing], 0)
        weights = tf.broadcast_to(tf.reshape(weight, sizes), tf.shape(value))
    elif value.shape.rank > weight.shape.rank:
        # A weight with fewer axes than the value weighs all elements along the other axes.
        sizes = [*tf.unstack(tf.shape(weight)), *[1] * (value.shape.rank - weight.shape.rank)]
        weights = tf.broadcast_to(tf.reshape(weight, sizes), tf.shape(value))
    return tf.reduce_sum(tf.math.multiply_no_nan(value, weights)), tf.reduce_sum(weights)


def _by_element(name: str, result: Numbers) -> dict[str, float]:
    """The result of a metric by name; of a dict or an array, each element by the metric's name and its key or index."""
    elements: dict[str, float] = {}
    if isinstance(result, Mapping):
        for key, part in result.items():
            elements |= _by_element(f"{name}_{key}", part)
        return elements
    if result.ndim == 0:
        return {name: float(result)}
    for index, value in np.ndenumerate(result):
        elements["_".join([name, *map(str, index)])] = float(value)
    return elements


def _sizes(metric: keras.metrics.Metric) -> list[int]:
    """The number of elements of each variable of a metric."""
    return [int(np.prod(variable.shape)) for variable in metric.variables]


def checked_metrics(metrics: object) -> dict[str, keras.metrics.Metric]:
    """The metrics that a task has built, checked.

    Raises:
        UsageError: an object isn't a metric of Keras 3, or has a name that is taken.
    """
    if not isinstance(metrics, Mapping):
        raise UsageError(f"build_metrics() returned {type(metrics).__name__}: return a dict of keras.metrics by name")
    for name, metric in metrics.items():
        if name in RESERVED:
            raise UsageError(f"build_metrics() returned a metric {name!r}: that name is taken, give it another")
        if not isinstance(metric, keras.metrics.Metric):
            raise UsageError(
                f"build_metrics() returned {type(metric).__name__} for {name!r}: return a metric of Keras 3 "
                "(keras.metrics...), also for a tf_keras model"
            )
    return dict(metrics)


def try_metrics(metrics: Mapping[str, keras.metrics.Metric], values: Mapping[str, Value]) -> None:
    """Has metrics make their variables, on the values of a few examples; and checks that their states are sums.

    Raises:
        UsageError: a state isn't a sum that starts from 0, or isn't one over the examples.
    """
    for name, metric in metrics.items():
        # A metric whose value this `compute` doesn't return can't be updated; its other properties are checked.
        doubled = _try_metric(name, metric, values) if name in values else [True] * len(metric.variables)
        for variable, is_doubled in zip(metric.variables, doubled, strict=True):
            if variable.aggregation != "sum" or not is_doubled or np.any(variable.value.numpy()):
                raise UsageError(
                    f"build_metrics(): the state {variable.name!r} of {name!r} isn't a sum that starts from 0 "
                    f"(aggregation {variable.aggregation!r}): parts of it that replicas gather can't be put together. "
                    "Keep sums in it, and make the result of them in result()"
                )
        if name in values and not _is_sum_over_rows(metric, *_arguments(metric, values, name)):
            raise UsageError(
                f"the metric {name!r} of several examples isn't made of those of each example, so that it would "
                "depend on the number of replicas: a function in it must return one value per example, never a mean, "
                "such as keras.ops.mean(..., axis=-1) instead of keras.ops.mean(...), whose labels and predictions "
                "have the shape [n, 1] instead of [n]; a state must be a sum over examples"
            )


def _try_metric(name: str, metric: keras.metrics.Metric, values: Mapping[str, Value]) -> list[bool]:
    """Updates a metric twice with the same values. Returns whether each of its states has doubled, as a sum does."""
    arguments, weight = _arguments(metric, values, name)
    try:
        metric.update_state(*arguments, **weight)
        elements = _by_element(name, _numbers(metric.result()))
        once = _states(metric)
        metric.update_state(*arguments, **weight)
        twice = _states(metric)
    except Exception as error:
        tensors = [*arguments, *weight.values()]
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise UsageError(
            f"{type(metric).__name__}, the metric {name!r}, can't be updated with tensors of shape {shapes} "
            f"(the last is the weight, if there is one): {message_of(error)}. compute() returns what its "
            "update_state() takes: a tensor, or a tuple such as (labels, predictions) or (labels, predictions, weights)"
        ) from None
    if taken := sorted((set(elements) - {name}) & set(values)):
        raise UsageError(f"compute() returns {taken[0]!r}, but that is an element of the metric {name!r}: rename it")
    metric.reset_state()  # the examples of a trial must not count in the run
    doubled = []
    for first, second in zip(once, twice, strict=True):
        doubled.append(np.allclose(2 * first, second, equal_nan=True))
    return doubled


def _is_sum_over_rows(
    metric: keras.metrics.Metric, arguments: Sequence[tf.Tensor], weight: Mapping[str, tf.Tensor]
) -> bool:
    """Whether a metric of several rows is made of the sum of its states for parts of them; True if there is no telling.

    Args:
        metric: the metric, with its variables.
        arguments: the positional arguments of its update.
        weight: the named one, if there is one.
    """
    sizes = {tensor.shape[0] if tensor.shape.rank else 0 for tensor in [*arguments, *weight.values()]}
    rows = max(sizes)
    if len(sizes) > 1 or rows < 2:
        return True

    def states(part: slice) -> list[tf.Tensor]:
        start = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
        named = {name: tensor[part] for name, tensor in weight.items()}
        return list(metric.stateless_update_state(start, *[tensor[part] for tensor in arguments], **named))

    # The parts stand for the rows of two replicas, whose states are added up. The whole is cut as well: a cut tensor
    # has lost the mask that Keras may have given it.
    try:
        of_all = states(slice(rows))
        of_first = states(slice(1))
        of_rest = states(slice(1, rows))
    except Exception:
        return True  # it takes no other number of rows
    added = list(map(tf.add, of_first, of_rest))
    # The results, too: one of two states may be a count of updates, which the result doesn't depend on.
    result = keras.tree.flatten(_result(metric, of_all))
    result_of_parts = keras.tree.flatten(_result(metric, added))
    for one, other in ((of_all, added), (result, result_of_parts)):
        pairs = zip(one, other, strict=True)
        # With room for rounding: states are float32 within.
        if all(np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) for a, b in pairs):
            return True
    return False


def _result(metric: keras.metrics.Metric, state: Sequence[tf.Tensor]) -> Numbers:
    """The result of a metric whose variables have these values."""
    # Read within the scope: `result` may return a variable itself, which has its own value outside of it.
    with keras.StatelessScope(state_mapping=list(zip(metric.variables, state, strict=True))):
        return _numbers(metric.result())


def _numbers(result: tf.Tensor | Mapping[str, tf.Tensor]) -> Numbers:
    """The result of a metric as float64."""
    if isinstance(result, Mapping):
        return {key: np.asarray(part, np.float64) for key, part in result.items()}
    return np.asarray(result, np.float64)


def _states(metric: keras.metrics.Metric) -> list[np.ndarray]:
    """The values of a metric's variables: float64."""
    return [np.asarray(variable.value.numpy(), np.float64) for variable in metric.variables]


def _arguments(
    metric: keras.metrics.Metric, values: Mapping[str, Value], name: str
) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
    """The positional arguments of a metric's update, and its weight as a named argument, if there is one.

    The weight is the one of `compute`. If the value has a third tensor, that one is the weight; if the value is
    unweighted, there is none.
    """
    value = content(values[name])
    weight = None if isinstance(values[name], Unweighted) else values.get("weight")
    parts = value if isinstance(value, tuple | list) else (value,)
    tensors = list(map(tf.convert_to_tensor, parts))
    has_weight = weight is not None and len(tensors) < 3
    if has_weight:
        tensors.append(tf.convert_to_tensor(weight))
    # Some operations of metrics take floats of no other dtype than that of the state. A state of integers, as that of
    # `BinaryIoU`, counts what the metric makes of floats.
    for index, tensor in enumerate(tensors):
        if tensor.dtype.is_floating and keras.backend.is_float_dtype(metric.dtype):
            tensors[index] = in_dtype(tensor, metric.dtype)
    if has_weight:
        return tensors[:-1], {"sample_weight": tensors[-1]}
    return tensors, {}


class Perplexity(keras.metrics.Mean):
    """The exponential of the mean: for a loss in nats, how many equally likely choices are as hard to guess.

    It is exact over all examples. A mean of the perplexities of batches would be greater.
    """

    def __init__(self, name: str = "perplexity", dtype: str | None = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def result(self) -> tf.Tensor:
        return keras.ops.exp(super().result())
