"""`tfloop runs diff`: what two runs differ in: settings, versions, data, commit, and the lines of their code."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from callbacks.run_record import provenance
from callbacks.run_record.comparison import differences
from callbacks.run_record.record import Record, printable
from loop.commands import terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN = {
    "task_file": "task file",
    "lock_sha256": "lock",
    "commit": "commit",
    "branch": "branch",
    "changed": "changed files",
    "command": "command",
    "host": "host",
    "image": "image",
}
"""The facts of `callbacks.run_record.provenance` that are compared, and what they are called."""
_TEXTS = {"task": "the task's file", "diff": "changes since the commit"}
_MOST_LINES = 400  # of a text's differences


def diff(first: Record, second: Record) -> list[RenderableType]:
    """What two runs differ in, as a table, and the lines of code that differ."""
    rows = [*differences([first, second]), *_facts(first, second)]
    parts: list[RenderableType] = [f"A  {first.name}", f"B  {second.name}", ""]
    if rows:
        parts += terminal.tables(rows, ["differs", "A", "B"])
    code = [line for what in _TEXTS for line in _text_differences(first, second, what)]
    if not rows and not code:
        parts.append("they differ in nothing that is recorded")
    return parts + code


def _facts(first: Record, second: Record) -> Iterator[list[str]]:
    """A row for each fact about the origin and the data that differs."""
    for name, label in _SHOWN.items():
        cells = [str(record.provenance.get(name, "-")) for record in (first, second)]
        if cells[0] != cells[1]:
            yield [label, *(printable(cell[:120]) for cell in cells)]
    for kind in ("train", "eval"):
        cells = [_data(record, kind) for record in (first, second)]
        if cells[0] != cells[1]:
            yield [f"{kind} data", *cells]


def _data(record: Record, kind: str) -> str:
    """The data of a run in a few words: how many examples, and the beginning of the hash of the first ones."""
    about = record.data.get(kind)
    if not isinstance(about, dict):
        return "-"
    examples = about.get("examples")
    count = f"{examples:,} examples, " if isinstance(examples, int) else ""
    return printable(f"{count}{str(about.get('sha256', ''))[:12]}")


def _text_differences(first: Record, second: Record, what: str) -> list[str]:
    """The differing lines of a text that both runs have kept, as a unified diff."""
    one = provenance.text(first.path, first.provenance, what) or ""
    other = provenance.text(second.path, second.provenance, what) or ""
    found = list(difflib.unified_diff(one.splitlines(), other.splitlines(), "A", "B", lineterm="", n=2))
    if not found:
        return []
    shown = [printable(line) for line in found[2:][:_MOST_LINES]]
    if len(found) - 2 > _MOST_LINES:
        shown.append(f"... {len(found) - 2 - _MOST_LINES} more lines")
    return ["", f"{_TEXTS[what]}, - A, + B:", *shown]
