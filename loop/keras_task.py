"""KerasTask: a Keras model with the arguments of `compile` and `fit`, as a task that trains as `fit` does."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from loop.data import ArrayData
from loop.errors import UsageError, message_of
from loop.model.variables import keras_models, layers
from loop.step import keras_compile
from loop.step.keras_metrics import Metrics
from loop.task import Batch, Dataset, Model, Optimizer, TrainTask, Values

Tensors: TypeAlias = tf.Tensor | list[tf.Tensor] | tuple[tf.Tensor, ...] | dict[str, tf.Tensor]
"""The inputs, labels or predictions of a model: one tensor, or one for each of its inputs or outputs."""

Compiled: TypeAlias = Any
"""An argument of `compile`: a name, a function or an object of Keras, or a list or dict of them for several outputs."""


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """The arguments of `compile`, but for the optimizer."""

    loss: Compiled = None
    loss_weights: Compiled = None
    metrics: Compiled = None
    weighted_metrics: Compiled = None


class KerasTask(TrainTask):
    """A Keras model with the arguments of `compile` and `fit`: trains on any number of replicas as `fit` does on one.

    Args:
        model_fn: returns the model; a compiled one if `optimizer_fn` and `loss_fn` are left out.
        optimizer_fn: returns the optimizer; or its name, such as "adam".
        loss_fn: as in `compile`: a Keras loss, its name, or a function of (labels, predictions) that returns one value
            per element; for several outputs a list or dict of them. Its reduction is the same as in Keras.
        train: the training data, of pairs (inputs, labels) or triples (inputs, labels, weights): `ArrayData`,
            `IndexedData` (also of a Keras `PyDataset`), an unbatched `tf.data.Dataset`, or a tuple of arrays as `fit`
            takes them.
        eval: the evaluation data, or a dict of several sets by name, or None.
        metrics: as in `compile`: names, functions or `keras.metrics`, for several outputs a list or dict of them; or a
            dict of functions and metrics by the names to report. They ignore the weights of examples.
        weighted_metrics: the same, but they use the weights.
        loss_weights: a factor for the loss of each output, as in `compile`.
        class_weight: a weight for each class, by its number, as in `fit`: only for training.

    Class attributes:
        repeated_rows: "squared_each", as in `fit`: see `TrainTask`. "summed" is the mathematical gradient. It needs
            less communication if a batch looks up more rows than the table has.
    """

    repeated_rows = "squared_each"

    def __init__(
        self,
        model_fn: Callable[[], Model],
        optimizer_fn: Callable[[], Optimizer] | str | None = None,
        loss_fn: Compiled = None,
        train: Dataset = None,
        eval: Dataset | dict[str, Dataset] = None,
        metrics: Compiled = None,
        *,
        weighted_metrics: Compiled = None,
        loss_weights: Compiled = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        _check_makes("model_fn", model_fn, "keras.Sequential([...])")
        if optimizer_fn is not None and not isinstance(optimizer_fn, str):
            _check_makes("optimizer_fn", optimizer_fn, "keras.optimizers.Adam(1e-3)")
        if train is None:
            raise UsageError("KerasTask(train=None): give the training data, such as ArrayData(inputs, labels)")
        self._model_fn = model_fn
        self._optimizer_fn = optimizer_fn
        self._compiled = _Compiled(loss_fn, loss_weights, metrics, weighted_metrics)
        self._class_weight = _checked(class_weight)
        self._train = train
        self._eval = eval
        if optimizer_fn is None and any(value is not None for value in vars(self._compiled).values()):
            raise UsageError(
                "KerasTask(optimizer_fn=None): without an optimizer, model_fn returns a compiled model, from which "
                "loss and metrics are taken too: give an optimizer, or leave out the others"
            )
        self._compiled_optimizer: Optimizer = None  # until a compiled model is built

        # Found out by `_prepare`, with the model and a few examples.
        self._takes_training = True
        self._losses: keras_compile.Losses | None = None
        self._compiled_metrics: Metrics | None = None
        self._built_metrics: dict[str, keras.Metric] = {}

    @classmethod
    def from_compiled(
        cls,
        model_fn: Callable[[], Model],
        train: Dataset,
        eval: Dataset | dict[str, Dataset] = None,
        *,
        class_weight: Mapping[int, float] | None = None,
    ) -> KerasTask:
        """The task of a compiled model, with the optimizer, the losses and the metrics that it was compiled with.

        Args:
            model_fn: makes and compiles the model.
            train: as for `KerasTask`.
            eval: as for `KerasTask`.
            class_weight: as in `fit`.
        """
        # Not `cls(...)`: a subclass may have an `__init__` with other arguments.
        task = cls.__new__(cls)
        KerasTask.__init__(task, model_fn, train=train, eval=eval, class_weight=class_weight)
        return task

    def build_model(self) -> Model:
        model = self._model_fn()
        _check_no_own_step(model)
        if self._optimizer_fn is None:
            self._take_compiled(model)
        return model

    def _take_compiled(self, model: keras.Model) -> None:
        """Reads the arguments with which a model was compiled."""
        if not getattr(model, "compiled", False):
            raise UsageError(
                "KerasTask without optimizer_fn: model_fn returned a model that isn't compiled: call "
                "model.compile(optimizer, loss, ...) in it, or give optimizer_fn and loss_fn"
            )
        optimizer = model.optimizer
        if model.dtype_policy.name == "mixed_float16":  # `compile` has wrapped it in a loss scale; tfloop has its own
            optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._compiled_optimizer = optimizer
        # Keras has no public way to the arguments of `compile`. Either is None where `compile` got none.
        losses = model._compile_loss
        metrics = model._compile_metrics
        given: dict[str, Compiled] = {}
        if losses is not None:
            given |= {"loss": losses._user_loss, "loss_weights": losses._user_loss_weights}
        if metrics is not None:
            given |= {"metrics": metrics._user_metrics, "weighted_metrics": metrics._user_weighted_metrics}
        self._compiled = _Compiled(**given)

    def build_optimizer(self) -> Optimizer:
        if self._optimizer_fn is None:
            if self._compiled_optimizer is None:
                self.build_model()  # for its optimizer alone: in a later phase, the model itself goes on
            optimizer = self._compiled_optimizer
            self._compiled_optimizer = None  # used once: a later phase needs a new one, without slots
        elif isinstance(self._optimizer_fn, str):
            optimizer = _named_optimizer(self._optimizer_fn)
        else:
            optimizer = self._optimizer_fn()
        if getattr(optimizer, "use_ema", False):
            raise UsageError(
                f"{type(optimizer).__name__}(use_ema=True): at its end, Keras's fit gives the model the averages "
                f"of its weights: leave it out, and use ema={optimizer.ema_momentum} (--ema), whose averages are "
                "evaluated, saved and returned; with ema_overwrite_frequency there is nothing like it"
            )
        return optimizer

    def train_data(self) -> Dataset:
        return _as_data(self._train)

    def eval_data(self) -> Dataset | dict[str, Dataset] | None:
        if isinstance(self._eval, Mapping):
            return {name: _as_data(data) for name, data in self._eval.items()}
        return _as_data(self._eval)

    def build_metrics(self) -> dict[str, keras.Metric]:
        return dict(self._built_metrics)

    def _prepare(self, model: Model, example: Batch) -> None:
        # Before `compute` is traced: the graph keeps what these attributes are then.
        self._takes_training = "training" in inspect.signature(model.call).parameters
        if not self._takes_training:
            _warn_of_modes(model)
        # Class weights exist only in training. Only names and shapes of the predictions count here.
        inputs, labels, weights = self._parts(example, training=True)
        predictions = self._predictions(model, inputs, training=False)
        try:
            self._resolve(getattr(model, "output_names", None), labels, predictions, weights)
        except (ValueError, KeyError, TypeError, tf.errors.InvalidArgumentError) as error:
            raise UsageError(
                f"KerasTask: Keras can't put together losses, metrics, labels and predictions: {message_of(error)}"
            ) from error

    def _resolve(
        self, names: list[str] | None, labels: Tensors | None, predictions: Tensors, weights: Tensors | None
    ) -> None:
        """Has Keras match losses and metrics with the outputs, by means of a few examples."""
        # A later phase, or a resumed run, resolves them anew.
        self._losses = None
        self._compiled_metrics = None
        self._built_metrics = {}
        compiled = self._compiled
        if compiled.loss is not None:
            self._losses = keras_compile.Losses(compiled.loss, compiled.loss_weights, names)
            losses = self._losses.of(labels, predictions, weights)
            self.loss_reduction = "sum" if all(loss.summed for loss in losses) else "mean"
            self._built_metrics |= keras_compile.reported_metrics(losses)
        if compiled.metrics or compiled.weighted_metrics:  # `try_metrics` checks them, as those of any task
            self._compiled_metrics = Metrics(compiled.metrics, compiled.weighted_metrics, names, labels, predictions)
            self._built_metrics |= self._compiled_metrics.by_name()

    def compute(self, model: Model, batch: Batch, training: bool) -> Values:
        inputs, labels, weights = self._parts(batch, training)
        predictions = self._predictions(model, inputs, training)
        return self._values(model, labels, predictions, weights)

    def _predictions(self, model: Model, inputs: Tensors, training: bool) -> Tensors:
        # As in `fit`: a model without the argument is called without it, and its layers run in inference mode.
        return model(inputs, training=training) if self._takes_training else model(inputs)

    # Nothing for AutoGraph to convert: all branches depend on the structure alone.
    @tf.autograph.experimental.do_not_convert
    def _values(self, model: Model, labels: Tensors | None, predictions: Tensors, weights: Tensors | None) -> Values:
        """The values that `compute` returns, from the model's predictions."""
        if self._losses is None:
            values = keras_compile.added(model, predictions)  # without a loss, what layers add is all that there is
        else:
            losses = self._losses.of(labels, predictions, weights)
            values = keras_compile.combined(losses) | keras_compile.reported(losses)
        if self._compiled_metrics is not None:
            values |= self._compiled_metrics.arguments(labels, predictions, weights)
        return values

    @tf.autograph.experimental.do_not_convert
    def _parts(self, batch: Batch, training: bool) -> tuple[Tensors, Tensors | None, Tensors | None]:
        """Inputs, labels (or None), and weights (or None)."""
        # A dict or a single tensor is inputs alone.
        is_tuple = isinstance(batch, tuple | list)
        parts = batch if is_tuple else (batch,)
        if len(parts) not in ((1, 2, 3) if self._compiled.loss is None else (2, 3)):
            of = f"{len(parts)} part(s)" if is_tuple else f"one {type(batch).__name__}"
            raise UsageError(
                f"KerasTask takes examples of (inputs, labels) or (inputs, labels, weights); these are of {of}: give "
                "ArrayData(inputs, labels), where the inputs are the labels too ArrayData(inputs, inputs)"
            )
        inputs, labels, weights = (*parts, None, None)[:3]  # None for what is missing
        # As in `fit`, evaluation data may have weights beside class weights, which exist only in training.
        if self._class_weight and training and labels is not None:
            if weights is not None:
                raise UsageError("KerasTask(class_weight=...) with examples that have weights: give one of the two")
            weights = keras_compile.class_weights(labels, self._class_weight)
        return inputs, labels, weights


def _checked(class_weight: object) -> dict[int, float] | None:
    """Weights by class; refuses what isn't by class, such as the array or the "balanced" of scikit-learn."""
    if class_weight is None:
        return None
    if not isinstance(class_weight, Mapping) or not all(isinstance(key, numbers.Integral) for key in class_weight):
        raise UsageError(
            f"KerasTask(class_weight={class_weight!r:.99}): give a dict with a weight for the number of each class, "
            "such as {0: 1.0, 1: 5.0}"
        )
    return dict(class_weight) or None


def _check_makes(name: str, function: object, example: str) -> None:
    """Refuses a model or optimizer instead of a function that makes it: a resumed run has to make it again."""
    is_object = hasattr(function, "variables") and not isinstance(function, type)
    if is_object or not callable(function):
        raise UsageError(
            f"KerasTask({name}={type(function).__name__}): give a function that makes it, such as lambda: {example}"
        )


_PORTS = {
    "train_step": "a TrainTask: what stands within its tape goes into compute(), and returns one value per "
    "example; several optimizers go into train_step(), a step.minimize(...) for each",
    "test_step": "a TrainTask: its values go into compute(), which evaluation calls with training=False",
    "compute_loss": "a TrainTask: its loss goes into compute(), as one value per example",
    "compute_metrics": "a TrainTask: its metrics go into build_metrics(), their arguments into compute()",
}
"""Methods that `fit` would call, and what to do instead of overriding them."""


def _check_no_own_step(model: Model) -> None:
    """Refuses a model with a method of its own that `fit` would call, and this task would not."""
    if not isinstance(model, keras_models()):
        return
    # Compared with the class of its own family: Keras 3 and tf_keras have different methods of the same name.
    family = keras.Model if isinstance(model, keras.Model) else keras_models()[-1]
    for name, port in _PORTS.items():
        # On the object or in its class: `model.train_step = ...` overrides it, too.
        is_own = getattr(type(model), name, None) is not getattr(family, name, None)
        if name in vars(model) or is_own:
            raise UsageError(
                f"{type(model).__name__} has a {name}() of its own, which KerasTask would not call: port the model to "
                f"{port}; see docs/coming-from/keras-fit.md"
            )


def _warn_of_modes(model: Model) -> None:
    """Warns of layers that stay in inference mode, because the model's `call` has no argument to pass on."""
    names = [layer.name for layer in layers(model) if layer is not model and _has_modes(layer)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"{type(model).__name__}.call() has no argument `training`: as in Keras's fit, "
            f"{', '.join(names[:3])}{more} run in inference mode while it trains (no dropout, no batch statistics). "
            "Write call(self, x, training=False), and hand it to these layers",
            stacklevel=2,
        )


def _has_modes(layer: keras.Layer) -> bool:
    """Whether a layer of Keras differs between training and inference."""
    is_of_keras = type(layer).__module__.startswith(("keras.", "tf_keras."))
    if not is_of_keras or "training" not in inspect.signature(layer.call).parameters:
        return False
    # By name: many layers take `training` only to pass it on, and have no modes.
    return re.search("Dropout|Normalization|Noise|Random", type(layer).__name__) is not None


def _named_optimizer(name: str) -> keras.Optimizer:
    try:
        return keras.optimizers.get(name)
    except ValueError:
        raise UsageError(f"KerasTask(optimizer_fn={name!r}): keras.optimizers has no optimizer of that name") from None


def _as_data(data: Dataset) -> Dataset:
    """The data as a task returns it: a tuple or list of arrays, as `fit` takes it, becomes `ArrayData`; None stays."""
    return ArrayData.of(data) if isinstance(data, tuple | list) else data
