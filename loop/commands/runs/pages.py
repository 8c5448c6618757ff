"""The page of the runs that were typed: the report of one run, or the comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from callbacks.run_record.record import Record, printable
from loop.commands.runs.directories import locate
from loop.errors import UsageError


def several(root: Path, names: Sequence[str]) -> list[Path]:
    """The directories of the runs with these names; see `locate`.

    Raises:
        UsageError: a run isn't there or is named twice, or there are too many for a page.
    """
    from callbacks.run_record.comparison import MOST

    paths = [locate(root, name, checkpoints=False) for name in names]
    if len(paths) > MOST:
        raise UsageError(f"{len(paths)} runs on a page: give at most {MOST}, whose colors can be told apart")
    seen: dict[Path, str] = {}
    for path, name in zip(paths, names, strict=True):
        # Resolved: a name, a path and a link may all mean the same directory.
        if path.resolve() in seen:
            raise UsageError(f"{printable(name)} and {printable(seen[path.resolve()])} are the same run: give it once")
        seen[path.resolve()] = name
    return paths


def page_of(records: Sequence[Record], live: bool = False) -> str:
    """The page of one run, or of several, as HTML."""
    from callbacks.run_record import comparison, report

    return comparison.html(records, live) if len(records) > 1 else report.html(records[0], live)
