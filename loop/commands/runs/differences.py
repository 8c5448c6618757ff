"""`tfloop runs diff`: the settings, versions, data, commit and lines of code in which two runs differ."""

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
"""The facts of `callbacks.run_record.provenance` that are compared, each with its label."""
_TEXTS = {"task": "the task's file", "diff": "changes since the commit"}
_LONGEST = 120  # characters of a fact
_MOST_LINES = 400  # of a text's differences


def diff(first: Record, second: Record) -> list[RenderableType]:
    """A table of what two runs differ in, and the lines of code that differ."""
    rows = [*differences([first, second]), *_facts(first, second)]
    parts: list[RenderableType] = [f"A  {first.name}", f"B  {second.name}", ""]
    if rows:
        parts += terminal.tables(rows, ["differs", "A", "B"])
    code: list[str] = []
    for what in _TEXTS:
        code += _text_differences(first, second, what)
    if not rows and not code:
        parts.append("they differ in nothing that is recorded")
    return parts + code


def _facts(first: Record, second: Record) -> Iterator[list[str]]:
    """A row for each fact about the origin and the data that differs."""
    for name, label in _SHOWN.items():
        one = str(first.provenance.get(name, "-"))
        other = str(second.provenance.get(name, "-"))
        if one != other:
            start = 0
            while one[start : start + 1] == other[start : start + 1]:
                start += 1
            yield [label, _part(one, start), _part(other, start)]
    for kind in ("train", "eval"):
        one = _data(first, kind)
        other = _data(second, kind)
        if one != other:
            yield [f"{kind} data", one, other]


def _part(text: str, start: int) -> str:
    """A text as a row shows it: of a long one, what is around the first character that differs."""
    first = max(0, min(start - _LONGEST // 3, len(text) - _LONGEST))
    part = text[first : first + _LONGEST]
    before = "..." if first else ""
    after = "..." if first + _LONGEST < len(text) else ""
    return printable(f"{before}{part}{after}")  # what a run directory holds may have control characters


def _data(record: Record, kind: str) -> str:
    """The data of a run in a few words: the number of examples, and the beginning of the hash of the first ones."""
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
    lines = list(difflib.unified_diff(one.splitlines(), other.splitlines(), "A", "B", lineterm="", n=2))
    lines = lines[2:]  # without the head, which names the two files; it is there only if they differ
    if not lines:
        return []
    shown = list(map(printable, lines[:_MOST_LINES]))
    if len(lines) > _MOST_LINES:
        shown.append(f"... {len(lines) - _MOST_LINES} more lines")
    return ["", f"{_TEXTS[what]}, - A, + B:", *shown]
