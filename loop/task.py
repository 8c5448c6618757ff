"""TrainTask: the class that users write. It has model, optimizer, data, and the values of each example."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from callbacks.files import original_path
from loop.errors import UsageError
from loop.options import Phase

if TYPE_CHECKING:  # a command that only looks for the task needs no TensorFlow
    import keras
    import tensorflow as tf

    from callbacks import Callback

# `Any`, because each task uses other types: they are here so that signatures say what is meant.
Model: TypeAlias = Any
"""A `keras.Model` of Keras 3, a `tf_keras.Model`, or any `tf.Module`."""
Optimizer: TypeAlias = Any
"""A Keras optimizer of the model's family, or a dict of them by name."""
Batch: TypeAlias = Any
"""Examples, stacked along the first axis: a tensor, or a tuple, list or dict of tensors."""
Dataset: TypeAlias = Any
"""`ArrayData`, `StreamData`, `IndexedData`, or an unbatched `tf.data.Dataset` of examples."""
Values: TypeAlias = dict[str, Any]
"""What `compute` returns: tensors by name; for a metric of `build_metrics`, a tensor or a tuple of them."""


class Step(Protocol):
    """One step while it is traced, as `TrainTask.train_step` sees it."""

    def minimize(self, values: Callable[[Batch], Values], optimizer: str = "") -> dict[str, tf.Tensor]:
        """See `TrainTask.train_step`."""


class TrainTask:
    """One experiment: subclass it, as a dataclass whose fields are the hyperparameters, and pass it to `fit`.

    Class attributes:
        defaults: the task's own defaults for options of `fit`, such as `{"batch_size": 64, "epochs": 6}`; options that
            are passed or typed win.
        phase: the current phase of a task with `phases`; all methods may read it.
        loss_reduction: what is differentiated: "mean", sum(loss * weight) / sum(weight) over the global batch; or
            "sum", sum(loss * weight) without a division, as Keras's `reduction="sum"`. With "sum", the reported "loss"
            is the sum of a batch; over several batches the mean of their sums, weighted by their rows, as in Keras.
        repeated_rows: what optimizers such as Adam receive for a row of an embedding that a batch looks up twice:
            "summed", the gradient; or "squared_each", as in Keras's `fit`, which squares the gradient of each lookup.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    phase: ClassVar[Phase | None] = None
    loss_reduction: str = "mean"
    repeated_rows: str = "summed"

    def build_model(self) -> Model:
        """Returns a `keras.Model` (Keras 3), a `tf_keras.Model`, or any `tf.Module`, with all its variables."""
        raise UsageError(f"{type(self).__name__} has no build_model(): define it and return the model")

    def build_optimizer(self) -> Optimizer:
        """Returns a Keras optimizer of the model's family (for a plain `tf.Module`: of either family).

        Or it returns a dict of optimizers by name: each trains the variables that `optimizer_variables` returns.
        """
        raise UsageError(f"{type(self).__name__} has no build_optimizer(): define it and return a Keras optimizer")

    def optimizer_variables(self, model: Model, names: list[str]) -> dict[str, list[keras.Variable | tf.Variable]]:
        """The variables that each of several optimizers trains.

        Args:
            model: what `build_model` returned.
            names: the names of the optimizers.

        Returns:
            Lists of variables by the optimizers' names. By default, those of the model's attribute or layer of that
            name.
        """
        parts = {}
        for name in names:
            part = getattr(model, name, None)
            if part is None:
                part = next((layer for layer in getattr(model, "layers", []) if layer.name == name), None)
            variables = getattr(part, "trainable_variables", None)
            if variables is None:
                raise UsageError(
                    f"build_optimizer() has an optimizer {name!r}, but the model has no attribute or layer of that "
                    f"name: define optimizer_variables(self, model, names) in {type(self).__name__}, and return the "
                    "variables of each"
                )
            parts[name] = variables
        return parts

    def build_metrics(self) -> dict[str, keras.Metric]:
        """Returns metrics that aren't means over examples: `keras.metrics` (AUC, F1Score, ...), by name.

        `compute` returns under the same name the arguments of the metric's update: a tensor, or a tuple such as
        (labels, predictions). The weights of `compute` are its sample weights. The result is exact on any number of
        replicas: it is computed from the sum of their states.
        """
        return {}

    def phases(self) -> list[Phase]:
        """Returns the phases of the training, in order, such as `[Phase("head", epochs=3), Phase("all", steps=500)]`.

        Each phase is like a separate `fit` of the same model: `begin_phase` is called, then `train_data`, `eval_data`
        and `build_optimizer` again, and `compute` is traced again; `self.phase` is the current phase. But they are one
        run, with one directory, one journal, and one count of steps and epochs, which can be resumed in any phase.
        Without phases, `epochs` or `steps` of `fit` is the length of the run.
        """
        return []

    def begin_phase(self, model: Model, phase: Phase) -> None:
        """Called at the start of each phase, before its data and optimizer are made.

        Freeze (`layer.trainable = False`) and unfreeze layers here. A resumed run calls it for each phase so far, so
        the changes must depend only on the phase and the model.
        """

    def build_callbacks(self) -> list[Callback]:
        """Returns callbacks for each run of the task, such as `[callbacks.ShardData("file")]`.

        Each replaces the standard callback of its class; callbacks that are passed to `fit` win.
        """
        return []

    def _prepare(self, model: Model, example: Batch) -> None:
        """Called with the model and a few examples, before `build_metrics`; `KerasTask` overrides it."""

    def train_data(self) -> Dataset:
        """Returns `ArrayData`, `IndexedData`, `StreamData`, or an unbatched `tf.data.Dataset`, of examples."""
        raise UsageError(f"{type(self).__name__} has no train_data(): define it and return ArrayData(...)")

    def eval_data(self) -> Dataset | dict[str, Dataset] | None:
        """The same for evaluation; None for no evaluation.

        A dict of several sets, such as `{"val": ArrayData(...), "test": ArrayData(...)}`, has the metrics
        `eval_val_loss`, `eval_test_loss`, and so on; `eval_every` says when each set is evaluated.
        """
        return None

    def compute(self, model: Model, batch: Batch, training: bool) -> Values:
        """The values of each example. It is traced into the compiled step.

        Args:
            model: what `build_model` returned.
            batch: examples of `train_data` or `eval_data`, stacked along a first axis n >= 1: the replica's part of a
                (micro-)batch.
            training: whether this is a training step.

        Returns:
            A dict of tensors of shape `[n]` or `[n, ...]`, one value per element and never a mean. `"loss"` is
            minimized; `"weight"` (optional, same shape as loss, not differentiated) weights it and every value of the
            same shape; `"loss_count"` (optional, of the loss's shape or [n], not differentiated) is what each element
            adds to the divisor of the loss, if that isn't its weight. All others are metrics. The loss is minimized and
            reported as sum(loss * weight) / sum(loss_count), every other value as sum(value * weight) / sum(weight),
            and a value marked with `loop.unweighted` as its mean.
        """
        raise UsageError(f"{type(self).__name__} has no compute(): define it and return a dict with per-example 'loss'")

    def train_step(self, model: Model, step: Step) -> None:
        """One training step, traced into the compiled loop. Override it for more than one loss.

        A GAN, whose two optimizers have the names of two parts of its model, makes a step with each:

            def train_step(self, model, step):
                step.minimize(lambda batch: self.judge(model, batch), "discriminator")
                step.minimize(lambda batch: self.forge(model, batch), "generator")

        Statements around `minimize` run once a step, in order, on each replica. What they assign must be the same on
        all: so are the model's variables, and a target network that follows them. The optimizers' own variables don't
        exist yet when `train_step` is first tried.

        Args:
            model: what `build_model` returned.
            step: `step.minimize(values, optimizer)` reduces, checks, clips and applies the gradient of the values'
                "loss" for the variables of the named optimizer (without a name: of all). `values` is a function of a
                batch that returns what `compute` would; its values are reported with the optimizer's name as a prefix.
                `minimize` returns their means over the global batch, as scalar tensors by name.
        """
        step.minimize(lambda batch: self.compute(model, batch, training=True))

    def predict(self, model: Model, batch: Batch) -> Batch:
        """What `loop.predict` and `tfloop predict` write for each example. It is traced into a compiled function.

        Args:
            model: what `build_model` returned.
            batch: examples, stacked, as for `compute`; or the inputs alone, where they are read from a file: an array,
                or a dict of arrays.

        Returns:
            A tensor of shape `[n, ...]`, or a dict or tuple of them. By default, what the model returns where `compute`
            calls it first, with `training=False`.
        """
        with ModelCalls(model) as calls:
            self.compute(model, batch, training=False)
        if not calls.results:
            raise UsageError(
                f"compute() of {type(self).__name__} never calls the model as model(...), so that its outputs aren't "
                f"known: define predict(self, model, batch) in {type(self).__name__}, and return a value per example"
            )
        return calls.results[0]

    def sample(self, model: Model, batch: Batch) -> list[str] | dict[str, tf.Tensor]:
        """What `callbacks.SamplePredictions` shows of some examples. By default for examples (inputs, labels, ...).

        Args:
            model: what `build_model` returned.
            batch: some examples, stacked.

        Returns:
            A text for each example; or a dict of arrays with a value for each: pictures, [n, height, width] or
            [n, height, width, channels], become a grid with "label" and "prediction" below; other values become lines.
        """
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise UsageError(
                f"SamplePredictions can't tell inputs from labels in the examples of {type(self).__name__}: define "
                "sample(self, model, batch), and return texts, or a dict with pictures, label and prediction"
            )
        return {"input": batch[0], "label": batch[1], "prediction": model(batch[0], training=False)}


class ModelCalls:
    """Within it, calls `model(...)` are noted.

    Attributes:
        arguments: of the calls so far, in order: those by position, and those by name.
        results: what the calls have returned so far, in order.
    """

    def __init__(self, model: Model) -> None:
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.results: list[Any] = []
        self._model = model
        self._kind: Any = type(model)  # Python looks up `model(...)` on the class, so that is what is changed

    def __enter__(self) -> ModelCalls:
        """Listens, if the model can be called at all."""
        self._own = "__call__" in vars(self._kind)  # else it is inherited, and must be removed afterwards
        self._listens = callable(self._model)
        if self._listens:
            self._original = self._kind.__call__
            self._kind.__call__ = self._listening(self._original)
        return self

    def _listening(self, original: Any) -> Any:
        def call(model: Model, *args: Any, **kwargs: Any) -> Any:
            if model is not self._model:  # another object of the class, such as a model within this one
                return original(model, *args, **kwargs)
            self.arguments.append((args, kwargs))
            result = original(model, *args, **kwargs)
            self.results.append(result)
            return result

        return call

    def __exit__(self, *error: object) -> None:
        """Gives the model's class its own method back."""
        if self._listens and self._own:
            self._kind.__call__ = self._original
        elif self._listens:
            del self._kind.__call__


def check_is_task(task: object, call: str = "fit") -> None:
    """Refuses an object, given to the function `call`, that `fit` can't train.

    Raises:
        UsageError: it is a class, or not a task; or a method can't take what it is called with.
    """
    if isinstance(task, type):
        raise UsageError(f"{call}({task.__name__}): give an object, not its class: {call}({task.__name__}())")
    if not isinstance(task, TrainTask):
        raise UsageError(
            f"{call}({type(task).__name__}): give an object of a subclass of loop.TrainTask; loop.KerasTask makes one "
            "of a Keras model, its optimizer and its loss"
        )
    for name, method in vars(TrainTask).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            _check_arguments(task, name)


def _check_arguments(task: TrainTask, name: str) -> None:
    """Refuses a method that can't take what tfloop calls it with, such as a `compute` without `training`."""
    arguments = list(inspect.signature(getattr(TrainTask, name)).parameters)[1:]
    # The one argument that is passed by its name.
    named = {"training": False} if name == "compute" else {}
    method = getattr(task, name)
    # Not of the bound method: Python gives no signature for one whose function doesn't even take `self`.
    function = getattr(method, "__func__", method)
    bound = [] if function is method else [task]
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):  # it has none that Python can tell, as a function written in C
        return
    try:
        own.bind(*bound, *arguments[: len(arguments) - len(named)], **named)
    except TypeError as error:
        expected = ", ".join(["self", *arguments])
        raise UsageError(
            f"{name}() of {type(task).__name__} can't be called as tfloop does ({error}): define it as "
            f"def {name}({expected})"
        ) from None


def _fields(task: object) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a task, or of its class; none if it isn't a dataclass."""
    return dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()


def hyperparameters(task: TrainTask) -> dict[str, object]:
    """The task's dataclass fields and their values; {} if it isn't a dataclass.

    Those with `init=False` are left out: the task computes them of the others, and can't be made with them.
    """
    return {field.name: getattr(task, field.name) for field in _fields(task) if field.init}


def field_values(task: TrainTask) -> dict[str, object]:
    """The values of all dataclass fields, also of those that the task computes, if they are set by now."""
    computed = {}
    for field in _fields(task):
        if not field.init and hasattr(task, field.name):
            computed[field.name] = getattr(task, field.name)
    return hyperparameters(task) | computed


def without_computed(task: TrainTask, recorded: dict[str, object]) -> dict[str, object]:
    """The recorded fields of a run without those that the task computes, which an earlier version has recorded, too."""
    computed = field_values(task).keys() - hyperparameters(task).keys()
    return {name: value for name, value in recorded.items() if name not in computed}


def changed_fields(task: TrainTask) -> list[str]:
    """The names of the fields whose values aren't the task's defaults."""
    changed = []
    for name, default in defaults(type(task)).items():
        value = getattr(task, name)
        is_default = default is value
        with contextlib.suppress(Exception):  # a field may hold an array, or anything else that has no truth
            is_default = is_default or bool(default == value)
        if not is_default:
            changed.append(name)
    return changed


def defaults(kind: type) -> dict[str, object]:
    """The defaults of a task's fields, but for those that it computes; `MISSING`, which no value equals, for none."""
    found: dict[str, object] = {}
    for field in _fields(kind):
        if field.init:
            found[field.name] = field.default
            if field.default_factory is not dataclasses.MISSING:
                found[field.name] = field.default_factory()
    return found


def target_of(task: TrainTask) -> str | None:
    """The TARGET that names the task's class on a command line; None if its class isn't in a file."""
    # A resume and `tfloop export` find the task by it, so it must name a file that can be imported again.
    try:
        path = inspect.getsourcefile(type(task))
    except (TypeError, OSError):  # OSError: of a notebook, or of a `__main__` without a file
        return None
    name = type(task).__qualname__
    if path is None or not Path(path).is_file() or not name.isidentifier():  # typed at a prompt, or in a function
        return None
    return f"{original_path(Path(path).resolve())}:{name}"
