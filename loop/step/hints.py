"""Hints on mistakes that show while a task is tried: wrong shapes, side effects, a forgotten `training`."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from loop.backends.devices import graph_threads
from loop.errors import UsageError
from loop.model.variables import Layer, is_legacy, layers, trainable_variables
from loop.step.mistakes import ERRORS, explained
from loop.task import Batch, Model, TrainTask, Values

Built = TypeVar("Built")

_SHAPES = re.compile(r"\bshapes?\b|incompatible|\brank\b|dimension|\bndim\b", re.IGNORECASE)
"""Words in the errors of TensorFlow and Keras that are about shapes."""
_RATES = ("rate", "dropout", "recurrent_dropout", "stddev")
"""Attributes of layers that do something else in training, unless these attributes are 0."""


@contextmanager
def given_for(task: TrainTask) -> Iterator[None]:
    """A context in which `compute` of this task is watched.

    Raises:
        UsageError: in place of an error about shapes, with the shapes and the fix.
    """
    watch = _Watch(task)
    task.__dict__["compute"] = watch.compute  # hides the method of the class
    try:
        yield
    finally:
        del task.__dict__["compute"]
    watch.warn()


def hinted(build: Callable[..., Built]) -> Callable[..., Built]:
    """Gives hints while a function builds and tries the task that is its first argument."""

    @functools.wraps(build)
    def call(task: TrainTask, *arguments: Any, **named: Any) -> Built:
        # The object has a `compute` of its own already, or it has `__slots__` and can't be given one.
        if "compute" in getattr(task, "__dict__", {"compute": None}):
            return build(task, *arguments, **named)
        with given_for(task):
            built: Any = build(task, *arguments, **named)
        warn_of_training(task, built.model)
        warn_of_frozen(built.model)
        return built

    return call


class _Watch:
    """Calls a task's `compute`, explains its errors about shapes, and notes the attributes that it changes."""

    def __init__(self, task: TrainTask) -> None:
        self._task = task
        self._compute: Callable[..., Values] = task.compute
        self._calls = 0
        self._changes: dict[str, int] = {}

    def compute(self, *arguments: object, **named: object) -> Values:
        """Takes the place of the task's `compute`."""
        # Any arguments: the task may call its own `compute`, which may have defaults and more parameters.
        # A shallow copy: it shows which attributes were assigned, but not what was changed in place.
        before = dict(vars(self._task))
        self._calls += 1
        try:
            values = self._compute(*arguments, **named)
            warn_of_python()  # before the graph, if this is in one, is run
            return values
        except ERRORS as error:
            problem = explained(error) or _of_optimizer(self._task, error)
            if problem is None and is_about_shapes(error):
                model, batch = inspect.signature(self._compute).bind(*arguments, **named).args[:2]
                problem = UsageError(shapes_hint(model, batch, error))
            if problem is None:
                raise
            raise problem from error
        finally:
            for name, value in vars(self._task).items():
                # Only numbers, such as counters: comparing arrays or tensors gives no single bool.
                is_number = isinstance(value, int | float | np.generic) and not isinstance(value, bool)
                known = before.get(name, value)
                if is_number and value is not known and value != known:  # nan isn't equal to itself
                    self._changes[name] = self._changes.get(name, 0) + 1

    def warn(self) -> None:
        """Warns of attributes that change with each call of `compute`."""
        for name, changes in self._changes.items():
            # An attribute that changes once only is a cache.
            if changes == self._calls > 1:
                warnings.warn(
                    f"compute() of {type(self._task).__name__} changes self.{name}: that is Python, which runs while "
                    "the step is traced, and not at each step. Count with a callback, or with a tf.Variable of the "
                    "model; a value that compute() returns is a metric",
                    stacklevel=2,
                )


@tf.autograph.experimental.do_not_convert
def warn_of_python() -> None:
    """Warns if the graph that is being made calls Python, and TensorFlow has no other thread for what that may run."""
    if tf.executing_eagerly() or graph_threads() > 1:
        return
    types = {operation.type for operation in tf.compat.v1.get_default_graph().get_operations()}
    called = [name for name in types if "PyFunc" in name]
    if called:
        warnings.warn(
            f"the step calls Python in its graph ({', '.join(sorted(called))}), and TensorFlow has one thread here: if "
            "that Python calls a tf.function, both wait for each other without end. Give TensorFlow two threads, by "
            "--threads 2, or by TF_NUM_INTEROP_THREADS=2 in the environment",
            stacklevel=1,  # by this line, so that it is said once
        )


def _of_optimizer(task: TrainTask, error: BaseException) -> UsageError | None:
    """Explains an error of a `compute` that uses an attribute set by `build_optimizer`. None: another error."""
    if not isinstance(error, AttributeError) or error.obj is not task:
        return None
    code = getattr(type(task).build_optimizer, "__code__", None)
    if code is None or error.name not in code.co_names:
        return None
    return UsageError(
        f"compute() uses self.{error.name}, which isn't set yet: build_optimizer() sets it, and is called after "
        "compute() has been tried. For a value that changes with the step, make a variable in build_model(), as by "
        "model.beta = model.add_weight(shape=(), trainable=False), and assign it in train_step()"
    )


def is_about_shapes(error: BaseException) -> bool:
    """Whether an error says that shapes don't fit."""
    types = ValueError | TypeError | tf.errors.InvalidArgumentError
    return isinstance(error, types) and not isinstance(error, UsageError) and bool(_SHAPES.search(str(error)))


def shapes_hint(model: Model, batch: Batch, error: BaseException) -> str:
    """The message for an error about shapes: the shapes of the examples, the cause, and the fix if it is known."""
    text = str(error)
    # The first line that is about shapes; the others are the arguments of the call, and where it was.
    cause = text
    for line in text.splitlines():
        if _SHAPES.search(line):
            cause = line.strip()
            break
    # Without the names of TensorFlow's internal operations, and without Keras's bold.
    cause = re.sub(r"\x1b\[[0-9;]*m|^.*?__wrapped__\w+_device_\S+\s*|\{\{[^}]*\}\}\s*|\s*\[Op:\w+\].*$", "", cause)
    fix = _inputs_fix(model, batch, text) or _labels_fix(batch, text) or "look at the shapes of inputs and labels"
    return f"compute() can't take examples of {_shapes(batch)} ({cause.rstrip('.')[:300]}): {fix}"


def _inputs_fix(model: Model, batch: Batch, text: str) -> str:
    """The fix if the model was made for inputs of another shape; else ""."""
    expected = getattr(model, "input_shape", None)
    inputs = tf.nest.flatten(batch)[0]
    if "of layer" not in text or not isinstance(expected, tuple) or not _is_shape(expected):
        return ""
    shape = tuple(inputs.shape[1:])
    # If the inputs fit, the error has another cause. None stands for any size.
    if len(shape) == len(expected) - 1:
        sizes = zip(expected[1:], shape, strict=True)
        if all(expected_size in (None, size) for expected_size, size in sizes):
            return ""
    return f"the model takes inputs of shape {list(expected[1:])}: give keras.Input({shape}), or reshape the inputs"


def _labels_fix(batch: Batch, text: str) -> str:
    """The fix if labels are one-hot and the loss takes classes, or the other way round; else ""."""
    if not isinstance(batch, tuple | list) or len(batch) < 2 or not hasattr(batch[1], "shape"):
        return ""
    labels = np.asarray(batch[1])
    if _is_one_hot(labels):
        return (
            f"the labels are one-hot, of shape {list(labels.shape[1:])} each: give classes, as by labels.argmax(-1); "
            "or take a loss for one-hot labels, such as keras.losses.categorical_crossentropy"
        )
    if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer) and re.search(r"same (shape|rank)|logits", text):
        return (
            "the labels are classes, a number each: take a loss for classes, such as "
            "keras.losses.sparse_categorical_crossentropy; or make them one-hot"
        )
    return ""


def _is_one_hot(labels: np.ndarray) -> bool:
    """Whether each row of labels has a single 1 among zeros."""
    if labels.ndim < 2 or labels.shape[-1] < 2:
        return False
    return bool(np.all((labels == 0) | (labels == 1)) and np.all(labels.sum(-1) == 1))


def _is_shape(shape: Sequence[object]) -> bool:
    """Whether a model's `input_shape` is the shape of a single input, and not a list of shapes."""
    return all(size is None or isinstance(size, int) for size in shape)


def _shapes(batch: Batch) -> str:
    """The shapes of the parts of one example, for a message."""
    parts = tf.nest.map_structure(lambda tensor: str(list(tensor.shape[1:])), batch)
    if isinstance(parts, dict):
        named = [f"{name} {shape}" for name, shape in parts.items()]
        return f"shapes {', '.join(named)}"
    if isinstance(parts, tuple | list):
        return f"shapes {', '.join(map(str, parts))}"
    return f"shape {parts}"


def warn_of_training(task: TrainTask, model: Model) -> None:
    """Warns if `compute` calls the model without `training`, although a layer depends on it."""
    if not _forgets_training(type(task)):
        return
    affected = [layer.name for layer in layers(model) if _differs_in_training(layer)]
    if affected:
        warnings.warn(
            f"compute() of {type(task).__name__} calls the model without `training`: {', '.join(affected[:3])} "
            f"{'does' if len(affected) == 1 else 'do'} while training what they do in an evaluation. Call "
            "model(inputs, training=training)",
            stacklevel=2,
        )


def warn_of_frozen(model: Model) -> None:
    """Warns of layers of `tf_keras` that are frozen, but trained: a plain tf.Module doesn't ask its layers."""
    trained = set(map(id, trainable_variables(model)))
    frozen = []
    for layer in layers(model):
        # Its own weights alone: a layer within it is judged by itself.
        if is_legacy(layer) and not layer.trainable and trained.intersection(map(id, layer._trainable_weights)):
            frozen.append(layer.name)
    if frozen:
        warnings.warn(
            f"{', '.join(frozen[:3])} of {type(model).__name__} {'has' if len(frozen) == 1 else 'have'} "
            f"trainable=False, and {'is' if len(frozen) == 1 else 'are'} trained: the trainable_variables of a "
            "tf.Module hold all weights of layers of tf_keras. Return a tf_keras.Model; or let the module have a "
            "property trainable_variables of its own, without these",
            stacklevel=2,
        )


def warn_of_unscaled(model: Model) -> None:
    """Warns of layers that compute in float16, for a run whose loss isn't scaled."""
    for layer in layers(model):
        if getattr(layer, "compute_dtype", "") == "float16" and layer.trainable_weights:
            warnings.warn(
                f"{type(layer).__name__} {layer.name!r} computes in float16, but the loss isn't scaled: small "
                "gradients become 0. Give precision='mixed_float16', which scales it, or bfloat16, which needs none",
                stacklevel=2,
            )
            return


def _differs_in_training(layer: Layer) -> bool:
    """Whether a layer does something else in training: dropout, noise, augmentation, batch statistics."""
    for name in _RATES:
        rate = getattr(layer, name, None)
        if isinstance(rate, int | float) and rate:
            return True
    layer_class = type(layer)
    if layer_class.__module__.split(".")[0] in ("keras", "tf_keras"):
        return hasattr(layer, "moving_mean") or layer_class.__name__.startswith("Random")
    # A layer of the user's own, whose `call` takes `training`. If it has layers within it, these are judged instead.
    inner = next(iter(layer._flatten_layers(include_self=False, recursive=True)), None)
    return inner is None and getattr(layer, "_call_has_training_arg", False)


def _forgets_training(task_class: type[TrainTask]) -> bool:
    """Whether `compute` calls its model, and never uses `training`; False if its source can't be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(task_class.compute)))
    except (OSError, TypeError, SyntaxError):
        return False
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 4:
        return False
    # By position: a task may give its arguments other names.
    _, model, _, training = (argument.arg for argument in function.args.args[:4])
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    if training in names:
        return False
    calls = _calls_of(model, function)
    return bool(calls) and not any(map(_may_give_training, calls))


def _calls_of(name: str, function: ast.FunctionDef) -> list[ast.Call]:
    """The calls of a name in a function."""
    calls = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            calls.append(node)
    return calls


def _may_give_training(call: ast.Call) -> bool:
    """Whether a call has `training` among its arguments, or `**keywords`, or a second positional argument."""
    return len(call.args) > 1 or any(keyword.arg in (None, "training") for keyword in call.keywords)
