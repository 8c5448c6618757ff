"""Formats: how numbers, times and sizes are written for people."""

from __future__ import annotations

import time


def number(value: float | None) -> str:
    """A measured value, in four digits; "-" for None."""
    return "-" if value is None else f"{value:.4g}"


def round_number(value: float) -> str:
    """A round number, as a label of an axis."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # Four digits are short enough without a unit; from 1e13 on, an exponent is shorter.
        if max(size, 1e4) <= abs(value) < 1e13:
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 epoch", "2 epochs"."""
    ending = "" if count == 1 else "s"
    return f"{count:,} {noun}{ending}"


def lasting(seconds: float) -> str:
    """A duration, in its two largest units."""
    # A value that would be rounded to "1000 ms" or "60.0 s" gets the next unit.
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        parts = [(days, "d"), (hours, "h")]
    elif hours:
        parts = [(hours, "h"), (minutes, "min")]
    else:
        parts = [(minutes, "min"), (seconds, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count)


def moment(seconds: float) -> str:
    """A date and time, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def size(count: float) -> str:
    """A number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # what is above is rounded to 1000, which has an exponent in three digits
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def part_name(part: str) -> str:
    """The name of a part of the time: "all-reduce" for `all_reduce`."""
    return part.replace("_", "-")
