"""History: a row for each epoch of a run, read from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from callbacks.types import Json, JsonObject

Row = dict[str, float]

EVENTS = ("epoch_end", "restore")
"""The lines of a journal that matter here."""

COUNTERS = ("epoch", "step", "examples")
"""The entries of a row that are not metrics."""


def of_entries(entries: Iterable[tuple[JsonObject, int]], end: int | None = None) -> list[Row]:
    """The rows that the lines of a journal give, in order; of those lines that end within its first `end` bytes.

    A `restore` line begins another attempt, which makes later steps again: the rows of those are dropped. The line
    holds the whole history if the lines before it don't give it. A malformed line is passed over.
    """
    rows: dict[float, Row] = {}  # by epoch, in the order in which the epochs ended
    for entry, offset in entries:
        if end is not None and offset > end:
            break
        try:
            if entry["event"] == "restore":
                rows = _restored(rows, entry)
            elif entry["event"] == "epoch_end":
                row = _row(entry)
                # An epoch that was interrupted and continued has one row, the last. The old one is removed, so that the
                # new one stands at the end.
                rows.pop(row["epoch"], None)
                rows[row["epoch"]] = row
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue
    return list(rows.values())


def until(rows: Sequence[Row], step: int) -> list[Row]:
    """The rows up to a step."""
    return [row for row in rows if row["step"] <= step]


def missing(rows: Sequence[Row], epochs: int) -> int:
    """How many of the first `epochs` epochs have no row."""
    recorded = {row["epoch"] for row in rows}
    return len(set(range(1, epochs + 1)) - recorded)


def as_numbers(row: Mapping[str, Json]) -> Row:
    """A row from JSON, with all values as numbers: nan and infinities are texts in JSON."""
    numbers = {}
    for name, value in row.items():
        # Counters stay whole: as floats, they would be shown and saved as 3.0.
        numbers[name] = value if isinstance(value, int) else float(value)
    return numbers


def _restored(rows: dict[float, Row], entry: Mapping[str, Json]) -> dict[float, Row]:
    """The rows that remain when a run goes on from an earlier step."""
    if "history" in entry:  # the lines before don't give it: see `Journal.on_restore`
        given = list(map(as_numbers, entry["history"]))
    else:
        given = list(rows.values())
    return {row["epoch"]: row for row in until(given, entry["step"])}


def _row(entry: Mapping[str, Json]) -> Row:
    """The row that an `epoch_end` line stands for."""
    # The line has the index of the epoch, from 0; a row counts the epochs that have ended.
    counters = {"epoch": entry["epoch"] + 1, "step": entry["step"]}
    if "examples" in entry:  # older journals don't have it
        counters["examples"] = entry["examples"]
    return as_numbers(counters | entry["metrics"])
