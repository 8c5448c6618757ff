"""TrainTask: what a user writes. Model, optimizer, data, and the values of each example."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from loop.errors import UsageError


class TrainTask:
    """One experiment: subclass it, as a dataclass whose fields are the hyperparameters, and hand it to `fit`.

    Class attributes:
        defaults: the task's own defaults for options of `fit`, such as `{"batch_size": 64, "epochs": 6}`; what is
            passed or typed wins.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}

    def build_model(self) -> Any:
        """Returns a `keras.Model` (Keras 3), a `tf_keras.Model`, or any `tf.Module`. Variables are made here."""
        raise UsageError(f"{type(self).__name__} has no build_model(): define it and return the model")

    def build_optimizer(self) -> Any:
        """Returns a Keras optimizer of the model's family (for a plain `tf.Module`: either family).

        Or a dict of them, by name: each trains the variables that `optimizer_variables` says.
        """
        raise UsageError(f"{type(self).__name__} has no build_optimizer(): define it and return a Keras optimizer")

    def optimizer_variables(self, model: Any, names: list[str]) -> dict[str, Any]:
        """Which variables each of several optimizers trains.

        Args:
            model: what `build_model` returned.
            names: the names of the optimizers.

        Returns:
            Lists of variables by the optimizers' names. As it is: those of the model's attribute or layer of that name.
        """
        parts = {}
        for name in names:
            part: Any = getattr(model, name, None)
            if part is None:
                found = [layer for layer in getattr(model, "layers", []) if layer.name == name]
                part = found[0] if found else None
            if not hasattr(part, "trainable_variables"):
                raise UsageError(
                    f"build_optimizer() has an optimizer {name!r}, but the model has no attribute or layer of that "
                    f"name: define optimizer_variables(self, model, names) in {type(self).__name__}, and return the "
                    "variables of each"
                )
            parts[name] = part.trainable_variables
        return parts

    def build_metrics(self) -> dict[str, Any]:
        """Returns metrics that are no means over examples: `keras.metrics` (AUC, F1Score, ...), by name.

        `compute` returns under the same name what the metric is updated with: a tensor, or a tuple such as
        (labels, predictions). The weights of `compute` are its sample weights. What it gives is exact on any number
        of replicas: states are added up, and the result is made of the sum.
        """
        return {}

    def build_callbacks(self) -> list[Any]:
        """Returns callbacks that the task wants in each of its runs, such as `[callbacks.ShardData("file")]`.

        Each takes the place of the standard one of its kind; what is handed to `fit` as a list wins.
        """
        return []

    def train_data(self) -> Any:
        """Returns `ArrayData(...)`, or an unbatched `tf.data.Dataset` of examples."""
        raise UsageError(f"{type(self).__name__} has no train_data(): define it and return ArrayData(...)")

    def eval_data(self) -> Any:
        """The same for evaluation; None for no evaluation."""
        return None

    def compute(self, model: Any, batch: Any, training: bool) -> dict[str, Any]:
        """The values of each example: traced into the compiled step.

        Args:
            model: what `build_model` returned.
            batch: examples of `train_data` or `eval_data`, stacked along a first axis n >= 1: the replica's share of
                a (micro-)batch.
            training: whether this is a training step.

        Returns:
            A dict of tensors of shape `[n]` or `[n, ...]`, one value per element and never a mean. `"loss"` is
            minimised; `"weight"` (optional, same shape as loss, not differentiated) weighs it and every value of the
            same shape. All others are metrics. Each is reported as sum(value * weight) / sum(weight).
        """
        raise UsageError(f"{type(self).__name__} has no compute(): define it and return a dict with per-example 'loss'")

    def train_step(self, model: Any, step: Any) -> None:
        """One training step, traced into the compiled loop. Override it for more than one loss.

        A GAN, whose two optimizers are named after two parts of its model, takes a step each:

            def train_step(self, model, step):
                step.minimize(lambda batch: self.judge(model, batch), "discriminator")
                step.minimize(lambda batch: self.forge(model, batch), "generator")

        Args:
            model: what `build_model` returned.
            step: `step.minimize(values, optimizer)` reduces, checks, clips and applies the gradient of the values'
                "loss" for the variables of that optimizer (of all, if it isn't named). `values` is a function of a
                batch that returns what `compute` would; its values are reported with the optimizer's name in front.
                It returns their means over the global batch, as scalar tensors by name.
        """
        step.minimize(lambda batch: self.compute(model, batch, training=True))

    def sample(self, model: Any, batch: Any) -> Any:
        """What `callbacks.SamplePredictions` shows of some examples. As it is, it knows examples (inputs, labels, ...).

        Args:
            model: what `build_model` returned.
            batch: some examples, stacked.

        Returns:
            A text for each example; or a dict of arrays with a value for each: pictures, [n, height, width] or
            [n, height, width, channels], become a grid; "label" and "prediction" stand below, or each in a line.
        """
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise UsageError(
                f"SamplePredictions can't tell inputs from labels in the examples of {type(self).__name__}: define "
                "sample(self, model, batch), and return texts, or a dict with pictures, label and prediction"
            )
        return {"input": batch[0], "label": batch[1], "prediction": model(batch[0], training=False)}


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


def hyperparameters(task: TrainTask) -> dict[str, Any]:
    """The task's dataclass fields and their values; empty for a task that is no dataclass."""
    if not dataclasses.is_dataclass(task):
        return {}
    return {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}


def target_of(task: TrainTask) -> str | None:
    """The TARGET that names the task's class on a command line; None if its class stands in no file."""
    try:
        path = inspect.getsourcefile(type(task))
    except TypeError:
        return None
    name = type(task).__qualname__
    return f"{Path(path).resolve()}:{name}" if path and name.isidentifier() else None
