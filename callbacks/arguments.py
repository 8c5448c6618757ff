"""Checks of what a callback is made with: an error names the callback, the argument, its value and the fix."""

from __future__ import annotations

import math
import numbers
from typing import Any


def is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    """Whether it is a whole number, of any kind but bool, within these bounds."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_number(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether it is a finite number, of any kind but bool, within these bounds."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value) and least <= value <= most


def check(callback: object, good: bool, fix: str, **given: Any) -> None:
    """Refuses an argument that isn't good.

    Args:
        callback: whose.
        good: whether it is.
        fix: what to give instead.
        **given: the argument, or those that don't fit together, by name.

    Raises:
        ValueError: it isn't.
    """
    if not good:
        what = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{type(callback).__name__}({what}): {fix}")
