"""Filter: a condition on runs, as typed after `--filter`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from callbacks.base import shown_status
from callbacks.nearest import nearest
from callbacks.run_record.record import STATUSES, Record, printable
from callbacks.run_record.redaction import reads_as_number
from loop.commands import terminal
from loop.commands.runs.fields import as_float, field_of, is_number, value
from loop.errors import UsageError
from loop.options import BACKENDS

_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Filter:
    """A condition `KEY=VALUE`, or with `!=`, `<`, `<=`, `>`, `>=`.

    Raises:
        UsageError: the text isn't a condition.
    """

    def __init__(self, text: str) -> None:
        parts = re.fullmatch(r"\s*([^=<>!]+?)\s*(!=|<=|>=|==|=|<|>)\s*(.*?)\s*", text, re.DOTALL)
        if not parts:
            raise UsageError(f"--filter {printable(text)}: give KEY=VALUE, or with !=, <, <=, >, >=")
        self._text = printable(text)
        self._key = field_of(parts[1])
        self._sign = parts[2].replace("==", "=")
        self._wanted = parts[3]
        # People type the status as tables show it; a record has its older name.
        if self._key == "status" and self._wanted == shown_status("preempted"):
            self._wanted = "preempted"

    def check(self, records: Sequence[Record], names: Sequence[str]) -> None:
        """Refuses a key that no run has, and a value that no run can have.

        Raises:
            UsageError: the key or the value is refused.
        """
        if self._key not in names:
            raise UsageError(f"--filter {self._text}: the runs have nothing of that name{nearest(self._key, names)}")
        values = [value(record, self._key) for record in records]
        self._check_choice(values)
        known = [field for field in values if field is not None]
        numeric = bool(known) and all(map(is_number, known))
        # `started` is compared as text: see `__call__`.
        if numeric and self._key != "started" and not reads_as_number(self._wanted):
            raise UsageError(f"--filter {self._text}: {self._wanted!r} isn't a number")

    def _check_choice(self, values: Sequence[object]) -> None:
        """Refuses a status, backend or task that no run can have."""
        choices = {"status": STATUSES, "backend": BACKENDS, "task": ()}.get(self._key)
        if choices is None or self._sign not in ("=", "!="):
            return
        # Also what the runs have: a plug-in's backend, or a status of a later version.
        known = dict.fromkeys(choices)
        for field in values:
            known[str(field or "")] = None
        if self._wanted not in known:
            raise UsageError(f"--filter {self._text}: no {self._key} {self._wanted!r}{nearest(self._wanted, known)}")

    def __call__(self, record: Record) -> bool:
        """Whether a run meets the condition."""
        field = value(record, self._key)
        passes = _TESTS[self._sign]
        if field is None:
            return self._sign == "=" and self._wanted.lower() in ("none", "")
        if self._key == "started":
            # As much of the time as was typed: `started>=2026-11` compares months.
            return passes(terminal.when(field)[: len(self._wanted)], self._wanted.replace("T", " ").rstrip("Z"))
        if is_number(field):
            return reads_as_number(self._wanted) and passes(as_float(field), float(self._wanted))
        # Python writes True, and people type true.
        wanted = self._wanted.capitalize() if isinstance(field, bool) else self._wanted
        return passes(str(field), wanted)
