"""What commands show of runs in a terminal: tables, bars and plots; without colors, in plain ASCII, in a log."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from callbacks.base import shown_status
from callbacks.formats import lasting, part_name, plural

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

Points = Sequence[tuple[int, float]]
"""A curve: steps with their values."""

STATUS_COLORS = {"finished": "green", "running": "cyan", "failed": "red", "killed": "red"}
COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue")
MARKERS = "*o+x#@"  # in place of colors, in the same order
_ASCII = str.maketrans("─│┌┐└┘├┤┬┴┼", "-|+++++++++")
_GAP = "  "  # between two columns of a table
_NARROW = 9  # characters: a column that has more is not made narrower than this while there is another way
_ENDLESS = 1 << 30  # columns of a log
_LARGEST = 1e100  # what is larger can't be plotted


def plain() -> bool:
    """Whether stdout wants neither colors nor characters beyond ASCII."""
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return not sys.stdout.isatty() or "NO_COLOR" in os.environ or encoding != "utf8"


def width() -> int:
    """The columns of the terminal; 100 in a log."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100


def write(parts: Iterable[RenderableType]) -> None:
    """Writes lines and drawings on stdout, whatever its encoding is."""
    encoding = sys.stdout.encoding or "utf-8"
    for part in parts:
        for line in as_text(part).split("\n"):
            # A character that stdout can't have must not end the command.
            printable = line.encode(encoding, "backslashreplace").decode(encoding)
            typer.echo(printable, color=False if plain() else None)


def as_text(part: RenderableType) -> str:
    """A line as it is; a drawing in lines: on a terminal with its width and colors, else plain and never broken."""
    if isinstance(part, str):
        return part
    columns = width() if sys.stdout.isatty() else _ENDLESS
    console = _console(columns)
    with console.capture() as capture:
        console.print(part)
    # rich fills each line up to the width of the table.
    return "\n".join(map(str.rstrip, capture.get().rstrip("\n").split("\n")))


def _console(columns: int) -> Console:
    from rich.console import Console  # late, here and below: the import takes a while

    return Console(
        # Without a height, rich takes the width from the environment.
        width=columns, height=24, color_system=None if plain() else "auto",
        force_jupyter=False, highlight=False, markup=False, emoji=False,
    )  # fmt: skip


def colored(text: str, color: str | None, **more: bool) -> str:
    """A text in a color, where there are any."""
    return text if plain() else typer.style(text, fg=color, **more)


def status(status: str, bold: bool = False) -> str:
    """The status of a run, as people read it, in its color."""
    return colored(shown_status(status), STATUS_COLORS.get(status), bold=bold)


def title(text: str) -> str:
    """A line that stands above others."""
    return colored(text, None, bold=True)


def counted(count: object, noun: str) -> str:
    """A count with its noun. A damaged run directory may have something else than a number there."""
    return plural(count, noun) if isinstance(count, int) else f"? {noun}s"


def wrapped(text: str, indent: str = "") -> list[str]:
    """A text in lines of whole words that fit into the terminal; one line in a log, which may be searched."""
    if not sys.stdout.isatty():
        return [indent + text]
    return textwrap.wrap(text, width(), initial_indent=indent, subsequent_indent=indent or "  ")


def table(
    rows: Sequence[Sequence[str]], head: Sequence[str] = (), right: Collection[int] = (), spare: Sequence[int] = ()
) -> Table:
    """Rows with columns. On a terminal, cells that are too long for their column go on below.

    Args:
        rows: the cells; each row has as many. They may have colors.
        head: what stands above the columns.
        right: the columns that are aligned to the right.
        spare: the columns that are left out on a terminal that is too narrow for all, in this order.
    """
    columns = len(head or next(iter(rows), ()))
    kept = list(range(columns))
    # A log has any width, so nothing is left out of it.
    if spare and sys.stdout.isatty():
        lengths = _lengths(rows, head)
        for index in spare:
            needed = sum(lengths[column] for column in kept) + len(_GAP) * (len(kept) - 1)
            if needed <= width():
                break
            kept.remove(index)
    return _table(rows, head, right, kept)


def tables(rows: Sequence[Sequence[str]], head: Sequence[str], right: Collection[int] = ()) -> list[Table]:
    """A table; or several with the same first column, where a terminal is too narrow for all other columns in one."""
    lengths = _lengths(rows, head)
    # The first column names the rows, and is in each table: it takes a third of the width at most.
    room = width() - min(lengths[0], width() // 3) if sys.stdout.isatty() else _ENDLESS
    parts = [[0]]
    used = 0
    for index, length in enumerate(lengths[1:], 1):
        needed = min(length, _NARROW) + len(_GAP)  # a longer cell goes on below
        if used and used + needed > room:
            parts.append([0])
            used = 0
        parts[-1].append(index)
        used += needed
    return [_table(rows, head, right, kept) for kept in parts]


def _lengths(rows: Sequence[Sequence[str]], head: Sequence[str]) -> list[int]:
    """How many columns of the terminal each column of a table takes, if none of its cells is broken."""
    from rich.cells import cell_len

    lengths = [0] * len(head or rows[0])
    for row in [head, *rows]:
        for index, cell in enumerate(row):
            lengths[index] = max(lengths[index], cell_len(str(_text(cell))))
    return lengths


def _text(cell: str) -> Text | str:
    """A cell for rich, which would count color codes as characters of the text."""
    from rich.text import Text

    return Text.from_ansi(cell) if "\x1b" in cell else cell


def _table(rows: Sequence[Sequence[str]], head: Sequence[str], right: Collection[int], kept: Sequence[int]) -> Table:
    from rich import box
    from rich.table import Table

    ruled = bool(head) and sys.stdout.isatty()
    # The box has a gap of its own between two columns, one blank wide.
    gap = len(_GAP) - 1 if ruled else len(_GAP)
    drawn = Table(
        box=box.SIMPLE_HEAD if ruled else None, padding=(0, gap, 0, 0),
        show_header=bool(head), header_style="bold", show_edge=False, pad_edge=False,
    )  # fmt: skip
    for index in kept:
        justify: Literal["left", "right"] = "right" if index in right else "left"
        drawn.add_column(head[index] if head else "", justify=justify, overflow="fold")
    for row in rows:
        drawn.add_row(*(_text(row[index]) for index in kept))
    return drawn


def panel(title: str, parts: Sequence[RenderableType]) -> list[RenderableType]:
    """Parts below their title; on a terminal, in a frame."""
    if not sys.stdout.isatty():
        return [title, *parts]
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    inner = [Text.from_ansi(part) if isinstance(part, str) else part for part in parts]
    return [Panel.fit(Group(*inner), title=Text(title, "bold"), title_align="left")]


def cut(text: str, longest: int) -> str:
    """A text of so many characters at most; what was cut is marked."""
    return text if len(text) <= longest else text[: longest - 2] + ".."


def bars(seconds: Mapping[str, float]) -> Table:
    """Parts of a time as a table with bars, the greatest first; those of less than a thousandth are left out."""
    whole = sum(seconds.values())
    bar = "#" if plain() else "█"
    rows = []
    for name, part in sorted(seconds.items(), key=lambda item: -item[1]):
        if part > whole / 1000:
            rows.append([part_name(name), lasting(part), f"{part / whole:.0%}", bar * round(40 * part / whole)])
    return table(rows, right=(1, 2))


def plot(title: str, curves: Mapping[str, Points]) -> list[str]:
    """Curves over steps by label, in one plot below its title and legend; values that aren't finite are left out.

    Values too large for a plot are left out, too, and counted in the legend: the line is drawn past them. A label that
    is a single character is its own marker where there are no colors.
    """
    shown = {label: finite for label, points in curves.items() if (finite := _finite(points))}
    if not shown:
        return [f"{title}: nothing to plot"]
    import plotext

    figure = plotext.figure  # one for the whole process: it still has what was drawn before
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(width(), 120), 14)

    legend = []
    for index, (label, points) in enumerate(shown.items()):
        color = COLORS[index % len(COLORS)]
        letter = label if len(label) == 1 else MARKERS[index % len(MARKERS)]
        marker = letter if plain() else plotext.marker("braille", plotext.pixel(color))
        # About 1,000 points, as a plot can't show more; and the last one, so that the curve ends at the last step.
        drawn = [*points[:: 1 + len(points) // 1000], points[-1]]
        steps, values = zip(*drawn, strict=True)
        figure.draw(figure.signal(steps, values, marker=marker).lines())
        entry = f"{letter} {label}" if plain() and letter != label else label
        legend.append(colored(entry + _left_out(curves[label]), color))
    # The axes show all points, also those that are too many to be drawn.
    all_steps, all_values = zip(*itertools.chain.from_iterable(shown.values()), strict=True)
    _scale(figure.ruler("x"), all_steps, "{:,.0f}")
    _scale(figure.ruler("y"), all_values, "{:.4g}")

    lines = figure.build().string(plain()).splitlines()
    if plain():
        lines = [line.translate(_ASCII).rstrip() for line in lines]
    return [f"{colored(title, None, bold=True)}  {'  '.join(legend)}", *lines]


def _finite(points: Points) -> Points:
    """The points that can be plotted."""
    return [point for point in points if abs(point[1]) < _LARGEST]  # which nan isn't, either


def _left_out(points: Points) -> str:
    """What the legend says of values that are too large to be plotted; "" if there are none."""
    count = sum(map(_is_too_large, points))
    return f" ({plural(count, 'value')} beyond {_LARGEST:.0e} left out)" if count else ""


def _is_too_large(point: tuple[int, float]) -> bool:
    """Whether a value is finite, and too large to be plotted."""
    return _LARGEST <= abs(point[1]) < math.inf


def _scale(ruler: Any, values: Sequence[float], form: str) -> None:
    """Has a ruler show all values, and a little around them where they are all the same."""
    low = min(values)
    high = max(values)
    ticks = 4
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low -= abs(low) / 10 or 1
        high += abs(high) / 10 or 1
        ticks = 2
    ruler.lim(low, high)
    labels = {}
    for index in range(ticks + 1):
        tick = low + (high - low) * index / ticks
        labels[form.format(tick)] = tick
    ruler.ticks(list(labels.values()), list(labels))


def shown_path(path: Path) -> Path:
    """A path as messages show it: relative, if it is below the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def when(stamp: float | None) -> str:
    """A time of the clock, UTC; "" for none."""
    return "" if stamp is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(stamp))
