"""A command's parameters as the fields of a class, for commands that have dozens of them."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import TypeVar

Arguments = TypeVar("Arguments", bound=types.SimpleNamespace)


def takes(fields: type[Arguments]) -> Callable[[Callable[[Arguments], None]], Callable[..., None]]:
    """Makes a command of a function with one argument, an object with all that was typed.

    Args:
        fields: the class of that object. Each of its annotations is a parameter, whose default is the class attribute
            of the same name.
    """

    def decorate(function: Callable[[Arguments], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**typed: object) -> None:
            function(fields(**typed))

        # With the extras, which are the `Option` or `Argument` of each parameter.
        hints = typing.get_type_hints(fields, include_extras=True)
        parameters = []
        for name, hint in hints.items():
            default = getattr(fields, name, inspect.Parameter.empty)
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        # typer reads both: the signature, and the annotations for parameters without an `Option`.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return decorate
