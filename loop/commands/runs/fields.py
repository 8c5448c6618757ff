"""The values of a run by name: fields of its record, hyperparameters, options and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from callbacks.nearest import nearest
from callbacks.run_record.comparison import best_or_last, metrics
from callbacks.run_record.record import Record, printable
from loop.errors import UsageError

FIELDS = (
    "name", "task", "target", "status", "backend", "replicas", "workers", "steps", "epochs", "examples", "parameters",
    "seconds", "lives", "started",
)  # fmt: skip
_FIELD_OF_COLUMN = {"engine": "backend", "duration": "seconds"}
"""The columns of the table whose names differ from the record's; `engine` is what older versions called a backend."""
_ATTRIBUTE_OF_FIELD = {"lives": "attempts"}
"""Fields with old names, which programs read in the JSON output; and the attributes of a record that hold them."""


def field_of(column: str) -> str:
    """The record's name for a column of the table."""
    return _FIELD_OF_COLUMN.get(column, column)


def attribute_of(field: str) -> str:
    """The attribute of a record that has a field."""
    return _ATTRIBUTE_OF_FIELD.get(field, field)


def value(record: Record, name: str) -> Any:
    """A value of a run: a field, hyperparameter or option, or the best of a metric; None: it has none of this name."""
    if name in FIELDS:
        field = getattr(record, attribute_of(name))
        return field if field != "" else None
    values = record.options | record.hyperparameters  # a field of the task hides an option of the same name
    return values[name] if name in values else best_or_last(record, name)


def names(records: Iterable[Record]) -> list[str]:
    """All names for which `value` finds a value in one of these runs."""
    known = dict.fromkeys(FIELDS)
    for record in records:
        known |= dict.fromkeys([*record.hyperparameters, *record.options, *record.curves])
    return list(known)


def check_metric(name: str | None, records: Sequence[Record]) -> None:
    """Refuses a name that was typed after `--metric` if none of these runs has such a metric.

    Raises:
        UsageError: none has it.
    """
    known = metrics(records)
    if name is not None and name not in known:
        hint = nearest(name, known) if known else "; they have none yet"
        raise UsageError(f"--metric {printable(name)}: no metric of that name{hint}")


def is_number(field: object) -> bool:
    """Whether a value is a number; True and False are none."""
    return isinstance(field, int | float) and not isinstance(field, bool)


def as_float(number: float) -> float:
    """A number as a float; infinite where an integer is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
