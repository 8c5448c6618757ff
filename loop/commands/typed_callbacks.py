"""Callbacks that are typed: `--callback "EarlyStopping(metric='eval_loss', patience=3)"`. Literals alone, no code.

Imports no TensorFlow.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import callbacks
from callbacks.nearest import nearest
from loop.errors import UsageError

_OF_COMMANDS = re.compile(r"@[\w.]+:\w+(=.*)?", re.DOTALL)
"""The form in which a command adds a callback to the trainings it starts: see `command_line.callback_option`."""
_OF_A_MODULE = re.compile(r"[\w./-]+:\w+")  # the form of a TARGET, in which a user may type a callback of their own
_REFUSED = {
    "FromKeras": "takes an object of Keras",
    "LambdaCallback": "takes functions",
    "Notify": "takes an address that is a secret, and a command line can be read by others",
}
"""Callbacks whose arguments can't be typed, and why."""
_MOST_CHARACTERS = 2000  # of a text: Python's parser may crash on one that is nested deeply enough


class TypedSet(callbacks.StandardSet):
    """The callbacks of a training that was typed. What was typed also holds for the callbacks of the task.

    Args:
        chosen: the standard set, as it was typed.
        texts: the callbacks that were typed, which replace those of the task, as they do those of `chosen`.
        typed: the other options that were typed, by the names of the command's parameters.
    """

    def __init__(self, chosen: Iterable[callbacks.Callback], texts: Sequence[str], typed: SimpleNamespace) -> None:
        made = make(texts)
        super().__init__(callbacks.complete(callbacks.StandardSet(chosen), made))
        only_one: tuple[type[callbacks.Callback], ...] = (callbacks.EvaluateBeside, *callbacks.STANDARD)
        self.named = tuple(type(callback) for callback in made if isinstance(callback, only_one))
        if typed.eval_beside is not None:
            self.named += (callbacks.EvaluateBeside,)
        if typed.track == "off":
            self.named += (callbacks.MLflowTracker,)
        self._typed = typed

    def left_of(self, own: Iterable[callbacks.Callback]) -> list[callbacks.Callback]:
        left = super().left_of(own)
        # Those of this set were made from typed options. For an option that wasn't typed, the task's own value counts.
        for given, callback in itertools.product(self, left):
            if isinstance(given, callbacks.Checkpoint) and isinstance(callback, callbacks.Checkpoint):
                self._change_checkpoint(callback, given)
            elif isinstance(given, callbacks.MLflowTracker) and isinstance(callback, callbacks.MLflowTracker):
                self._change_tracker(callback, given)
        return left

    def _change_checkpoint(self, callback: callbacks.Checkpoint, given: callbacks.Checkpoint) -> None:
        if self._typed.checkpoint_every is not None:
            callback.every = given.every
            callback.pause = given.pause

    def _change_tracker(self, callback: callbacks.MLflowTracker, given: callbacks.MLflowTracker) -> None:
        if self._typed.track_wait is not None:
            callback.wait = given.wait
        callback.uri = given.uri or callback.uri
        callback.tags |= given.tags
        callback.log_model = callback.log_model or given.log_model
        callback.register = given.register or callback.register


def of_commands(texts: Iterable[str]) -> bool:
    """Whether another command has started this training, and has added a callback."""
    return any(map(_OF_COMMANDS.fullmatch, texts))


def names() -> list[str]:
    """The names of the callbacks that can be typed."""
    return [name for name in callbacks.__all__ if _is_callback(name) and name not in _REFUSED]


def _is_callback(name: str) -> bool:
    kind = getattr(callbacks, name)
    # `__all__` also has functions, types and the base class.
    return isinstance(kind, type) and issubclass(kind, callbacks.Callback) and kind is not callbacks.Callback


def make(texts: Sequence[str]) -> list[callbacks.Callback]:
    """Makes the callbacks that were typed.

    Raises:
        UsageError: there is no such callback, or an argument isn't a literal or not one that it takes.
    """
    made = []
    for text in texts:
        is_of_command = _OF_COMMANDS.fullmatch(text) is not None
        callback = _made_by_command(text) if is_of_command else _made(text)
        callback.typed = text
        made.append(callback)
    return made


def _made_by_command(text: str) -> callbacks.Callback:
    """The callback of a text that `command_line.callback_option` has made."""
    name, has_argument, argument = text.removeprefix("@").partition("=")
    module, _, class_name = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError):
        kind = None
    # Checked before it is called: a text that was typed may name any function.
    if not isinstance(kind, type) or not issubclass(kind, callbacks.Callback):
        raise UsageError(
            f"--callback {text}: {name} isn't a callback: the form with @ is for commands that start a training; type "
            "a name, as TensorBoard, or Class(argument=value)"
        )
    make: Callable[..., callbacks.Callback] = kind
    try:
        return make(argument) if has_argument else make()
    except (TypeError, ValueError) as error:  # a user has typed it
        raise UsageError(f"--callback {text}: {error}") from None


def _made(text: str) -> callbacks.Callback:
    """The callback of a text that a user has typed."""
    if _OF_A_MODULE.match(text):
        raise UsageError(
            f"--callback {text:.100}: tfloop's own callbacks can be typed, and no others: return it from the task's "
            "build_callbacks()"
        )
    name, positional, named = _parsed(text)
    if name in _REFUSED:
        raise UsageError(f"--callback {name}: it {_REFUSED[name]}: return it from the task's build_callbacks()")
    if name not in names():
        raise UsageError(f"--callback {name}: tfloop has no callback of this name{nearest(name, names())}")
    kind = getattr(callbacks, name)
    try:
        inspect.signature(kind).bind(*positional, **named)
    except TypeError as error:
        raise UsageError(f"--callback {text}: {error}: give {name}{_arguments(kind)}") from None
    try:
        callback: callbacks.Callback = kind(*positional, **named)
    except (TypeError, ValueError) as error:
        raise UsageError(f"--callback {text}: {error}") from None
    return callback


def _arguments(kind: Callable[..., object]) -> str:
    """What a callback takes, as it is typed: `(metric, patience=2)`."""
    parameters = inspect.signature(kind).parameters.values()
    untyped = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(untyped))


def _parsed(text: str) -> tuple[str, list[object], dict[str, object]]:
    """The name of the class, its positional and its named arguments. Nothing of the text is evaluated but literals."""
    shown = f"--callback {text:.100}"
    usage = "give a name, as TensorBoard, or a call with literals, as \"EarlyStopping(metric='eval_loss', patience=3)\""
    text = text[:_MOST_CHARACTERS].strip()
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: brackets that nest too deep
        raise UsageError(f"{shown}: it can't be read: {usage}") from None
    if isinstance(node, ast.Name):  # a name alone is a call without arguments
        return node.id, [], {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise UsageError(f"{shown}: it isn't a callback: {usage}")

    positional = [_literal(argument, text) for argument in node.args]
    named: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise UsageError(f"{shown}: ** can't be typed: {usage}")
        named[keyword.arg] = _literal(keyword.value, text)
    return node.func.id, positional, named


def _literal(node: ast.expr, text: str) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        argument = f"{ast.get_source_segment(text, node)}"
        raise UsageError(
            f"--callback {text:.100}: {argument:.60} isn't a literal: give numbers, texts in quotes, True, False, "
            "None, or lists and tuples of these"
        ) from None
