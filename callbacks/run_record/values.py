"""Values from files that may be damaged, or written by another program: what is not as expected is left out."""

from __future__ import annotations

import json
import math
import re
from calendar import timegm
from collections.abc import Mapping
from time import strptime

from callbacks.run_record.redaction import printable
from callbacks.types import Json, JsonObject

_DEEPEST = 20  # levels of nested values
_LARGEST = 2.0**53  # beyond, a float does not hold every whole number
_PLAIN = re.compile(rb"[ -\[\]-~]*\n?")  # can be printed as it is: no escapes, no control characters


def parsed(line: bytes) -> JsonObject:
    """A line of a journal, whose texts can be printed; {} if it isn't a JSON object."""
    # With so few brackets it can't be nested too deeply.
    flat = line.count(b"{") + line.count(b"[") < _DEEPEST
    try:
        value = json.loads(line)
        # `clean` walks through the whole value; most lines don't need that.
        return as_dict(value if flat and _PLAIN.fullmatch(line) else clean(value))
    except (ValueError, RecursionError):
        return {}


def clean(value: Json, depth: int = _DEEPEST) -> Json:
    """A JSON value with its texts made printable.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if not depth:
        raise RecursionError
    if isinstance(value, dict):
        return {printable(name): clean(item, depth - 1) for name, item in value.items()}
    if isinstance(value, list):
        return [clean(item, depth - 1) for item in value]
    return printable(value) if isinstance(value, str) else value


def as_dict(value: object) -> JsonObject:
    """The value, if it is a dict; else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Json]:
    """The value, if it is a list; else an empty one."""
    return value if isinstance(value, list) else []


def as_text(value: object) -> str:
    """The value as a text; "" for None."""
    if isinstance(value, str):
        return value
    return "" if value is None else printable(str(value))


def as_number(value: object, finite: bool = True) -> float | None:
    """A number as the journal writes it: nan and infinities are texts there. None if it isn't a number."""
    # A bool is an int to Python, but no measurement.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON may have a whole number of any length
        return None
    return number if math.isfinite(number) or not finite else None


def as_count(value: object) -> int | None:
    """A whole number that is not negative; else None."""
    number = as_number(value)
    return int(number) if number is not None and 0 <= number < _LARGEST else None


def as_counter(value: object) -> int:
    """The same, and 0 for anything else."""
    return as_count(value) or 0


def as_seconds(parts: Mapping[str, Json]) -> dict[str, float]:
    """Durations by part; values that can't be one are left out."""
    durations = {}
    for part, value in parts.items():
        seconds = as_number(value)
        if seconds is not None and 0 <= seconds < _LARGEST:
            durations[part] = seconds
    return durations


def as_stamp(value: object) -> float | None:
    """The time of an ISO text such as `run.json` has."""
    try:
        return float(timegm(strptime(str(value), "%Y-%m-%dT%H:%M:%SZ")))
    except (ValueError, OverflowError):
        return None
