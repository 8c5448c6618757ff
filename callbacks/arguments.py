"""Checks of arguments, whose errors name the callback, the argument, its value and the fix; and of stored states."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from typing import TypeGuard

from callbacks.types import Json, JsonObject


def is_whole(value: object, least: float, most: float = math.inf) -> TypeGuard[int]:
    """Whether it is a whole number of any type but bool, within these bounds."""
    # NumPy's integers are Integral, too; and so is bool, but `patience=True` is a mistake.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_whole_or_none(value: object, least: float) -> bool:
    """Whether it is None, or a whole number that isn't less."""
    return value is None or is_whole(value, least)


def is_text(value: object) -> bool:
    """Whether it is a text, and not an empty one."""
    return isinstance(value, str) and value != ""


def is_fraction(value: object) -> bool:
    """Whether it is a number between 0 and 1, and neither of them."""
    return is_number(value, 0, 1) and value not in (0, 1)


def is_number(value: object, least: float, most: float = math.inf) -> bool:
    """Whether it is a finite number of any type but bool, within these bounds."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return math.isfinite(value) and least <= float(value) <= most


def plain_numbers(value: object) -> object:
    """A number or truth value of another type, such as NumPy's, as Python's own, also in a dict; others unchanged."""
    if isinstance(value, dict):
        return {name: plain_numbers(item) for name, item in value.items()}
    if isinstance(value, bool):
        return value
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):  # which NumPy registers as no number
        return bool(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)
    with contextlib.suppress(TypeError):  # an array of several numbers has the method, too
        return operator.index(value)  # type: ignore[arg-type]
    return value


def check(callback: object, is_valid: bool, fix: str, **given: object) -> None:
    """Refuses an argument of a callback, or arguments that don't fit together; the fix says what to give instead.

    Raises:
        ValueError: it isn't valid.
    """
    if not is_valid:
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{type(callback).__name__}({arguments}): {fix}")


def stored_number(
    state: JsonObject, name: str, whole: bool = False, optional: bool = False, least: float = -math.inf
) -> Json:
    """A finite number of a callback's state in a checkpoint, which may be of any origin; if it is optional, also None.

    Raises:
        ValueError: it is something else, less than `least`, or not whole where it must be.
    """
    value = state[name]
    is_valid = is_whole(value, least) if whole else is_number(value, least)
    if not is_valid and not (optional and value is None):
        raise ValueError(f"{name} is {value!r:.60}")
    return value
