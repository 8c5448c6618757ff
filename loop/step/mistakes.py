"""Mistakes that are often made in `compute`: the errors by which they show, and the fix of each."""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

import tensorflow as tf

from loop.errors import UsageError, message_of
from loop.launch.explain import place
from loop.model.variables import all_variables, as_tf, variable_names
from loop.task import Model, TrainTask


class Mistake(NamedTuple):
    """A mistake, and how it shows."""

    pattern: re.Pattern[str]  # a regular expression that finds it in the message of an error
    fix: str  # what to do, in one sentence; `{0}`, `{1}` stand for the groups of the pattern


MISTAKES = (
    Mistake(
        re.compile(r"object has no attribute '(numpy)'|(Cannot convert a symbolic)"),
        "compute() becomes a graph, whose tensors have no values yet: use TensorFlow's functions instead of NumPy's, "
        "such as tf.reduce_mean(x, -1) for x.numpy().mean(-1); what needs values belongs into a callback",
    ),
    Mistake(
        re.compile(r"expected to be an? (\w+) tensor but is an? (\w+) tensor"),
        "compute() mixes {0} and {1}: cast one of them, as by tf.cast(x, tf.{0})",
    ),
    Mistake(
        re.compile(r"has type (\w+) that does not match type (\w+) of argument"),
        "compute() mixes {1} and {0}: cast one of them, as by tf.cast(x, tf.{1})",
    ),
    Mistake(
        re.compile(r"(tuple|list) indices must be integers or slices, not str"),
        "compute() looks up a name in a {0}. If that is the batch, unpack it, as by inputs, labels = batch; or let "
        "train_data() have dicts as examples, as ArrayData(dict(x=..., y=...)) has",
    ),
    Mistake(
        re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"),
        "there is a label {0}, and the model tells {1} classes apart: give labels from 0 up to one less than that, or "
        "build a model with more outputs",
    ),
    Mistake(
        re.compile(r"Cast string to (\w+) is not supported"),
        "the examples have texts where compute() takes numbers ({0}): encode them in train_data(), or by a layer such "
        "as keras.layers.StringLookup or keras.layers.TextVectorization",
    ),
    Mistake(
        re.compile(r"only supports singleton tf\.Variables"),
        "compute() makes a layer or a variable, which would be another one in each step: make it in build_model(), and "
        "call it in compute()",
    ),
    Mistake(
        re.compile(r"no scatter_nd_(\w+)"),
        "compute() changes rows of a variable, and variables of this backend have no scatter_nd_{0}(): assign the "
        "whole value, as by v.assign(tf.tensor_scatter_nd_{0}(v, indices, updates))",
    ),
)
"""Tried in this order."""

ERRORS = (
    AttributeError,
    NotImplementedError,
    TypeError,
    ValueError,
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
)
"""The types of the errors by which mistakes show."""

_NAMES = {"float": "float32", "double": "float64", "half": "float16"}
"""How TensorFlow's kernels call types that have another name in Python."""

_OF_XLA = re.compile("XLA_\\w+_JIT|tf2xla|external/xla")
"""What the error has in it if XLA can't compile a program."""

_PLACE_IN_XLA = re.compile(
    r"\s*(?:$|File \"|\[\[|tf2xla)|Graph execution error:|Detected at node|<stack traces|Stack trace for"
)
"""How the lines of such an error begin that say where in the program, and not why."""


def explained(error: BaseException) -> UsageError | None:
    """The error to raise in place of one that shows a known mistake, which is its cause; None for all others."""
    # A `UsageError` already names the fix, also where it is a `ValueError`.
    if not isinstance(error, ERRORS) or isinstance(error, UsageError):
        return None
    message = message_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    # A method that TensorFlow's variables lack is one of their base class, which raises this error without a message.
    # The method's name is that of the innermost frame; an error that was never raised has no frame.
    if isinstance(error, NotImplementedError) and not error.args and frames:
        message = f"no {frames[-1].name}"
    for mistake in MISTAKES:
        match = mistake.pattern.search(message)
        if match is None:
            continue
        types = [_NAMES.get(group, group) for group in match.groups()]
        where = place(error)
        problem = UsageError(
            f"{mistake.fix.format(*types)} ({where}{'; ' if where else ''}{type(error).__name__}: {message})"
        )
        problem.__cause__ = error  # also where it is raised later, from elsewhere
        return problem
    return None


def refused_by_xla(error: tf.errors.OpError) -> str:
    """Why XLA can't compile a step, in a line; "": the error isn't about that."""
    message = str(error.message)
    if not _OF_XLA.search(message):
        return ""
    reasons = [line for line in message.splitlines() if not _PLACE_IN_XLA.match(line)]
    return (reasons or [message])[0].strip()[:200]


def check_optimizer_is_given(task: TrainTask, optimizer: object, model: object) -> None:
    """Refuses a task that leaves its optimizer to `model.compile`.

    Raises:
        UsageError: `build_optimizer` returned None, and the model has been compiled.
    """
    if optimizer is None and getattr(model, "optimizer", None) is not None:
        raise UsageError(
            f"build_optimizer() of {type(task).__name__} returned None, and the model is compiled, which only Keras's "
            "fit uses: return the optimizer from build_optimizer(); or take loop.KerasTask.from_compiled(...)"
        )


def check_dtypes(model: Model) -> None:
    """Refuses variables whose values a checkpoint can't hold, and no worker can send to another one."""
    variables = all_variables(model)
    for name, variable in zip(variable_names(variables), as_tf(variables), strict=True):
        if variable.dtype == tf.string:
            raise UsageError(
                f"the variable {name} of the model has the dtype string, and checkpoints hold numbers alone: keep "
                "texts in a tf.constant, or in a lookup layer such as keras.layers.StringLookup"
            )
        if variable.dtype.is_quantized:  # NumPy has no such dtype: it would be restored as another one
            raise UsageError(
                f"the variable {name} of the model has the dtype {variable.dtype.name}, which checkpoints can't hold: "
                "keep it as plain integers, such as tf.int8, and cast it where it is used"
            )
