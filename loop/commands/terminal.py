"""What commands show of runs in a terminal: tables, bars and plots; without colors, in plain ASCII, in a log."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from callbacks.base import shown_status
from callbacks.formats import lasting, part_name, plural

Points = Sequence[tuple[int, float]]

STATUS_COLORS = {"finished": "green", "running": "cyan", "failed": "red", "killed": "red"}
COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue")
MARKERS = "*o+x#@"
_ASCII = str.maketrans("─│┌┐└┘├┤┬┴┼", "-|+++++++++")
_LARGEST = 1e100  # what is larger can't be plotted


def plain() -> bool:
    """Whether stdout wants neither colors nor characters beyond ASCII."""
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return not sys.stdout.isatty() or "NO_COLOR" in os.environ or encoding != "utf8"


def width() -> int:
    """The columns of the terminal; 100 in a log."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100


def write(lines: Sequence[str]) -> None:
    """Writes lines on stdout, whatever its encoding is."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        typer.echo(line.encode(encoding, "backslashreplace").decode(encoding), color=False if plain() else None)


def colored(text: str, color: str | None, **more: bool) -> str:
    """A text in a color, where there are any."""
    return text if plain() else typer.style(text, fg=color, **more)


def status(status: str, bold: bool = False) -> str:
    """The status of a run, as people read it, in its color."""
    return colored(shown_status(status), STATUS_COLORS.get(status), bold=bold)


def titled(lines: Sequence[str]) -> list[str]:
    """Lines of which the first one is a title."""
    return [colored(lines[0], None, bold=True), *lines[1:]]


def counted(count: object, noun: str) -> str:
    """A count with its noun, of which a damaged run directory may have no number."""
    return plural(count, noun) if isinstance(count, int) else f"? {noun}s"


def wrapped(text: str, indent: str = "") -> list[str]:
    """A text in lines of whole words that fit into the terminal; one line in a log, where it may be looked for."""
    if not sys.stdout.isatty():
        return [indent + text]
    return textwrap.wrap(text, width(), initial_indent=indent, subsequent_indent=indent or "  ")


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), spare: Sequence[int] = ()) -> list[str]:
    """Rows as lines with columns; those of the numbers in `right` end flush.

    On a terminal that is too narrow for all columns those of the numbers in `spare` are left out, the first one first.
    """
    cells = [list(row) for row in rows]
    widths = [max(map(_shown, column)) for column in zip(*cells, strict=True)]
    for index in spare:
        if sys.stdout.isatty() and sum(size + 2 for size in widths if size) - 2 > width():
            cells = [[*row[:index], "", *row[index + 1 :]] for row in cells]
            widths[index] = 0
    text = []
    for row in cells:
        pads = [" " * (size - _shown(cell)) for cell, size in zip(row, widths, strict=True)]
        padded = [
            pad + cell if index in right else cell + pad
            for index, (cell, pad) in enumerate(zip(row, pads, strict=True))
            if widths[index]
        ]
        text.append("  ".join(padded).rstrip())
    return text


def fitted(rows: Sequence[Sequence[str]], right: Sequence[int] = (), least: int = 9) -> list[str]:
    """Rows as lines with columns that fit into the terminal.

    A cell that is longer than its column goes on below. Where columns would be narrower than `least`, some of them
    stand in further tables, each with the first column again.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sizes[0] = min(sizes[0], width() // 3)
    found: list[str] = []
    start = 1
    while start < len(sizes):
        end = start + 1
        while end < len(sizes) and sum(min(size, least) + 2 for size in sizes[start : end + 1]) <= width() - sizes[0]:
            end += 1
        chosen = [0, *range(start, end)]
        room = _shared([sizes[index] for index in chosen[1:]], width() - sizes[0] - 2 * (end - start))
        found += [""] * bool(found) + _wrapped(rows, chosen, [sizes[0], *room], right)
        start = end
    return found


def _shared(sizes: Sequence[int], room: int) -> list[int]:
    """The sizes of columns that have so much room together: the widest give way."""
    shared = list(sizes)
    while sum(shared) > max(room, len(shared)):
        shared[shared.index(max(shared))] -= 1
    return shared


def _wrapped(
    rows: Sequence[Sequence[str]], columns: Sequence[int], sizes: Sequence[int], right: Sequence[int]
) -> list[str]:
    """Some columns of rows as lines, in which long cells go on below."""
    text = []
    for row in rows:
        cells = [_broken(row[index], size) for index, size in zip(columns, sizes, strict=True)]
        for line in range(max(map(len, cells))):
            parts = []
            for index, size, cell in zip(columns, sizes, cells, strict=True):
                part = cell[line] if line < len(cell) else ""
                parts.append(part.rjust(size) if index in right else part.ljust(size))
            text.append("  ".join(parts).rstrip())
    return text


def _broken(cell: str, size: int) -> list[str]:
    """A cell in parts of so many characters at most, broken where a path or a list has its parts, if it can be."""
    parts = []
    while len(cell) > size:
        places = [found.end() for found in re.finditer(r"[/,:_ -]", cell[:size])]
        at = places[-1] if places and places[-1] > size // 2 else size
        parts.append(cell[:at])
        cell = cell[at:]
    return [*parts, cell]


def _shown(cell: str) -> int:
    """How many columns a cell takes."""
    return len(re.sub(r"\x1b\[[0-9;]*m", "", cell))


def cut(text: str, longest: int) -> str:
    """A text of so many characters at most; what was cut is marked."""
    return text if len(text) <= longest else text[: longest - 2] + ".."


def bars(seconds: Mapping[str, float], size: int = 40) -> list[str]:
    """Parts of a time as lines with bars, the greatest first; those of less than a thousandth are left out."""
    whole = sum(seconds.values())
    found = sorted((item for item in seconds.items() if item[1] > whole / 1000), key=lambda item: -item[1])
    bar = "#" if plain() else "█"
    rows = [
        [part_name(name), lasting(some), f"{some / whole:.0%}", bar * round(size * some / whole)]
        for name, some in found
    ]
    return table(rows, right=(1, 2))


def plot(title: str, curves: Mapping[str, Points], height: int = 14) -> list[str]:
    """Curves over steps in one plot, with its title and legend above it; values that are not finite are left out.

    Args:
        title: what the values are.
        curves: by label. One that is a single character is its own marker where there are no colors.
        height: lines of the plot.
    """
    shown = {
        label: [(step, value) for step, value in points if math.isfinite(value) and abs(value) < _LARGEST]
        for label, points in curves.items()
    }
    shown = {label: points for label, points in shown.items() if points}
    if not shown:
        return [f"{title}: nothing to plot"]
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(width(), 120), height)
    legend = []
    for index, (label, points) in enumerate(shown.items()):
        color, letter = COLORS[index % len(COLORS)], label if len(label) == 1 else MARKERS[index % len(MARKERS)]
        marker = letter if plain() else plotext.marker("braille", plotext.pixel(color))
        thinned = [*points[:: 1 + len(points) // 1000], points[-1]]
        figure.draw(figure.signal(*zip(*thinned, strict=True), marker=marker).lines())
        legend.append(colored(f"{letter} {label}" if plain() and letter != label else label, color))
    steps = [step for points in shown.values() for step, _ in points]
    values = [value for points in shown.values() for _, value in points]
    _scale(figure.ruler("x"), min(steps), max(steps), "{:,.0f}")
    _scale(figure.ruler("y"), min(values), max(values), "{:.4g}")
    lines = figure.build().string(plain()).splitlines()
    if plain():
        lines = [line.translate(_ASCII).rstrip() for line in lines]
    return [f"{colored(title, None, bold=True)}  {'  '.join(legend)}", *lines]


def _scale(ruler: Any, low: float, high: float, form: str, ticks: int = 4) -> None:
    """Has a ruler show values from `low` to `high`, and a little around them where they are all the same."""
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low, high, ticks = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1), 2
    ruler.lim(low, high)
    labels = {form.format(tick): tick for tick in (low + (high - low) * index / ticks for index in range(ticks + 1))}
    ruler.ticks(list(labels.values()), list(labels))


def when(stamp: float | None) -> str:
    """A time of the clock, UTC; "" for none."""
    return "" if stamp is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(stamp))
