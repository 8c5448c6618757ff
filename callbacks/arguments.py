"""Checks of a callback's arguments: an error names the callback, the argument, its value and the fix."""

from __future__ import annotations

import math
import numbers


def is_whole(value: object, least: int, most: float = math.inf) -> bool:
    """Whether it is a whole number of any type but bool, within these bounds."""
    # NumPy's integers are Integral, too; and so is bool, but `patience=True` is a mistake.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_number(value: object, least: float, most: float = math.inf) -> bool:
    """Whether it is a finite number of any type but bool, within these bounds."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return math.isfinite(value) and least <= float(value) <= most


def check(callback: object, is_valid: bool, fix: str, **given: object) -> None:
    """Refuses an invalid argument of a callback.

    Args:
        callback: the callback.
        is_valid: whether the argument is valid.
        fix: what to give instead.
        **given: the argument, or arguments that don't fit together, by name.

    Raises:
        ValueError: it isn't valid.
    """
    if not is_valid:
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{type(callback).__name__}({arguments}): {fix}")
