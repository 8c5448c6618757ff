"""TrainTask: what a user writes. Model, optimizer, data, and the values of each example."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from loop.errors import UsageError
from loop.options import Phase


class TrainTask:
    """One experiment: subclass it, as a dataclass whose fields are the hyperparameters, and hand it to `fit`.

    Class attributes:
        defaults: the task's own defaults for options of `fit`, such as `{"batch_size": 64, "epochs": 6}`; what is
            passed or typed wins.
        phase: the phase under way, of a task with `phases`; all methods may look at it.
        loss_reduction: what the gradient is of: "mean", sum(loss * weight) / sum(weight) over the global batch; or
            "sum", sum(loss * weight), which is never divided, as Keras's `reduction="sum"`. What is then reported as
            "loss" is the sum of a batch; over several batches their mean, each weighed by its rows, as Keras has it.
        repeated_rows: what optimizers such as Adam see of a row of an embedding that a batch looks up twice: "summed",
            the gradient as it is; or "squared_each", as in Keras's `fit`, which squares the gradient of each lookup.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    phase: ClassVar[Phase | None] = None
    loss_reduction: str = "mean"
    repeated_rows: str = "summed"

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

    def phases(self) -> list[Phase]:
        """Returns the phases of the training, in order, such as `[Phase("head", epochs=3), Phase("all", steps=500)]`.

        Each is as a `fit` of its own of the same model, one after the other: `begin_phase` is called, then
        `train_data`, `eval_data` and `build_optimizer` anew, and `compute` is traced anew; `self.phase` says which it
        is. The run is one: one directory, one journal, steps and epochs counted on, to be resumed in any phase. No
        phases: `epochs` or `steps` of `fit` say how long it is.
        """
        return []

    def begin_phase(self, model: Any, phase: Phase) -> None:
        """Called at the start of each phase, before anything of it is made; of a resumed run, of each one so far.

        Here layers are frozen (`layer.trainable = False`) and unfrozen. What is changed must follow from the phase and
        the model alone, so that a resumed run comes to the same.
        """

    def build_callbacks(self) -> list[Any]:
        """Returns callbacks that the task wants in each of its runs, such as `[callbacks.ShardData("file")]`.

        Each takes the place of the standard one of its kind; what is handed to `fit` as a list wins.
        """
        return []

    def _prepare(self, model: Any, example: Any) -> None:
        """What a task of ours works out from its model and a few examples, before its metrics are made."""

    def train_data(self) -> Any:
        """Returns `ArrayData(...)`, `StreamData(...)`, or an unbatched `tf.data.Dataset` of examples."""
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
            same shape; `"loss_count"` (optional, of the loss's shape or [n], not differentiated) is what each element
            adds to the divisor of the loss, where that isn't its weight. All others are metrics. The loss is minimised
            and reported as sum(loss * weight) / sum(loss_count), each other value as sum(value * weight) /
            sum(weight), and one marked with `loop.unweighted` as its mean.
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


def check_is_task(task: Any) -> None:
    """Refuses what `fit` can't train.

    Raises:
        UsageError: it is a class, or no task at all.
    """
    if isinstance(task, type):
        raise UsageError(f"fit({task.__name__}): give an object, not its class: fit({task.__name__}())")
    if not isinstance(task, TrainTask):
        raise UsageError(
            f"fit({type(task).__name__}): give an object of a subclass of loop.TrainTask; loop.KerasTask makes one of "
            "a Keras model, its optimizer and its loss"
        )


def hyperparameters(task: TrainTask) -> dict[str, Any]:
    """The task's dataclass fields and their values; empty for a task that is no dataclass."""
    if not dataclasses.is_dataclass(task):
        return {}
    return {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}


def target_of(task: TrainTask) -> str | None:
    """The TARGET that names the task's class on a command line; None if its class stands in no file."""
    try:
        path = inspect.getsourcefile(type(task))
    except (TypeError, OSError):  # OSError: of a notebook, or of a `__main__` without a file
        return None
    name = type(task).__qualname__
    stands = path is not None and Path(path).is_file() and name.isidentifier()  # else it was typed: `<stdin>`
    return f"{Path(path).resolve()}:{name}" if path and stands else None
