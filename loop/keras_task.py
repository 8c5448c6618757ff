"""KerasTask: a Keras model, optimizer and loss as a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loop.errors import UsageError
from loop.task import TrainTask


class KerasTask(TrainTask):
    """An existing Keras model, optimizer and loss as a task: trains on any engine as it is.

    Args:
        model_fn: returns the model.
        optimizer_fn: returns the optimizer.
        loss_fn: a Keras loss (object, or its name), or a function of (labels, predictions) that returns one value per
            element. A loss object's own reduction is not used.
        train: the training data, of pairs (inputs, labels) or triples (inputs, labels, weights).
        eval: the evaluation data, or None.
        metrics: by name, functions of (labels, predictions) that return one value per element; or `keras.metrics`
            metrics (AUC, ...), which are updated with the two.
    """

    def __init__(
        self,
        model_fn: Callable[[], Any],
        optimizer_fn: Callable[[], Any],
        loss_fn: Any,
        train: Any,
        eval: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        for name, function in (("model_fn", model_fn), ("optimizer_fn", optimizer_fn)):
            made = hasattr(function, "variables") and not isinstance(function, type)
            if made or not callable(function):
                raise UsageError(
                    f"KerasTask({name}={type(function).__name__}): give a function that makes it, such as "
                    f"lambda: {'keras.optimizers.Adam(1e-3)' if name == 'optimizer_fn' else 'keras.Sequential([...])'}"
                )
        if not (isinstance(loss_fn, str) or callable(loss_fn)):
            raise UsageError(
                f"KerasTask(loss_fn={type(loss_fn).__name__}): give a Keras loss, its name, or a function of (labels, "
                "predictions); for a model of several outputs one that adds up their losses, each with its weight"
            )
        named = isinstance(metrics or {}, Mapping)
        if not named or any(isinstance(each, type) or not callable(each) for each in (metrics or {}).values()):
            raise UsageError(
                f"KerasTask(metrics={metrics!r}): give a dict of functions of (labels, predictions), or of metrics, by "
                'name, such as {"accuracy": keras.metrics.sparse_categorical_accuracy, "auc": keras.metrics.AUC()}'
            )
        self._model_fn, self._optimizer_fn, self._loss_fn = model_fn, optimizer_fn, loss_fn
        self._train, self._eval, self._metrics = train, eval, dict(metrics or {})

    def build_model(self) -> Any:
        return self._model_fn()

    def build_optimizer(self) -> Any:
        return self._optimizer_fn()

    def train_data(self) -> Any:
        return self._train

    def eval_data(self) -> Any:
        return self._eval

    def build_metrics(self) -> dict[str, Any]:
        return {name: metric for name, metric in self._metrics.items() if hasattr(metric, "update_state")}

    def compute(self, model: Any, batch: Any, training: bool) -> dict[str, Any]:
        import keras

        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            of = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"one {type(batch).__name__}"
            raise UsageError(
                f"KerasTask takes examples of (inputs, labels) or (inputs, labels, weights); these are of {of}: give "
                "ArrayData(inputs, labels), where the inputs are the labels too ArrayData(inputs, inputs)"
            )
        inputs, given, *weights = batch
        predictions = model(inputs, training=training)
        try:
            loss = keras.losses.get(self._loss_fn)
        except ValueError:
            raise UsageError(f"KerasTask(loss_fn={self._loss_fn!r}): keras.losses has no loss of that name") from None
        labels, found = _as_keras_pairs(given, predictions)
        values: dict[str, Any] = {}
        if hasattr(loss, "reduction"):  # its __call__ makes numbers of the labels, and a mean of what `call` returns
            floats = keras.tree.map_structure(lambda each: keras.ops.cast(each, _dtype(found)), labels)
            values["loss"] = loss.call(floats, found)
        else:
            values["loss"] = loss(labels, found)
        for name, metric in self._metrics.items():
            kept = hasattr(metric, "update_state")  # a metric with a state of its own: see `build_metrics`
            values[name] = (given, predictions) if kept else metric(labels, found)
        # What Keras masks (padding; `ignore_class`) weighs nothing, as in Keras's own `fit`.
        masks = [getattr(each, "_keras_mask", None) for each in (predictions, values["loss"])]
        rank = len(values["loss"].shape)
        weights += [mask for mask in masks if mask is not None and len(mask.shape) <= rank]
        for each in weights if rank else ():
            if len(each.shape) == rank + 1 and each.shape[-1] == 1:
                each = keras.ops.squeeze(each, -1)
            while len(each.shape) < rank:
                each = keras.ops.expand_dims(each, -1)
            each = keras.ops.cast(each, values["loss"].dtype) * keras.ops.ones_like(values["loss"])
            values["weight"] = values["weight"] * each if "weight" in values else each
        return values


def _as_keras_pairs(labels: Any, predictions: Any) -> tuple[Any, Any]:
    """Labels and predictions as Keras hands them to a loss.

    They have floating-point numbers of one kind, never of 16 bits; and where one has a last axis, of size 1, that the
    other has not, it gets one: of shapes [n] and [n, 1], a difference would have the shape [n, n].
    """
    import keras

    dtype = _dtype(predictions)

    def floats(each: Any) -> Any:
        each = keras.ops.convert_to_tensor(each)
        return keras.ops.cast(each, dtype) if each.dtype.is_floating else each

    labels, predictions = (keras.tree.map_structure(floats, each) for each in (labels, predictions))
    if hasattr(labels, "shape") and hasattr(predictions, "shape"):
        if len(predictions.shape) == 1 or (len(predictions.shape) < len(labels.shape) and labels.shape[-1] == 1):
            predictions = keras.ops.expand_dims(predictions, -1)
        if len(labels.shape) == len(predictions.shape) - 1 and predictions.shape[-1] == 1:
            labels = keras.ops.expand_dims(labels, -1)
    return labels, predictions


def _dtype(predictions: Any) -> str:
    import keras

    dtypes = {keras.backend.standardize_dtype(each.dtype) for each in keras.tree.flatten(predictions)}
    return "float64" if "float64" in dtypes else "float32"
