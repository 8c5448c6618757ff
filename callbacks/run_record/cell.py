"""A run, or several, as a notebook shows them below a cell: facts, and a row for each metric with its curves.

Tables with inline styles and no script, so that they look the same in Jupyter, in an exported page and on GitHub.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from callbacks.formats import number
from callbacks.run_record.charts import thinned
from callbacks.run_record.comparison import best_of_all
from callbacks.run_record.history import COUNTERS
from callbacks.run_record.redaction import mask

WIDTH = 160
HEIGHT = 28
"""The size of a curve, in pixels."""
_COMPARED_HEIGHT = 64
"""The height of the curves of several runs: they must be told apart."""
_MOST_METRICS = 20
_POINTS = 160  # the most points of a curve: it has no more pixels
_CELL = "text-align:right;padding:2px 12px 2px 0"
COLORS = (
    "#3b82f6", "#ee6c1e", "#16a34a", "#c44bd6", "#b98509", "#0d9db8",
    "#e0464d", "#8b5cf6", "#6b9a0f", "#e0559a", "#7d899b", "#a86a3a",
)  # fmt: skip
"""Of the runs that are compared, as `page.css` has them."""

Points = Sequence[tuple[float, float]]


def html(facts: Iterable[str], history: Sequence[Mapping[str, float]]) -> str:
    """The facts of a run, such as its status, and its metrics by epoch, as HTML."""
    names = dict.fromkeys(itertools.chain.from_iterable(history))  # of all rows: a metric may begin in a later epoch
    for counter in COUNTERS:
        names.pop(counter, None)
    line = escape(mask(" · ".join(facts)))
    rows = [_row(name, history) for name in list(names)[:_MOST_METRICS]]
    table = _table(("metric", "last", "best", "by epoch"), rows)
    return f"<div><div>{line}</div>{table}{_more(len(names))}</div>"


def comparison(
    names: Sequence[str],
    results: Sequence[Sequence[str]],
    curves: Mapping[str, Sequence[Points]],
    differences: Sequence[Sequence[str]],
) -> str:
    """Several runs as HTML: rows of results and of differing settings, each with a name and the value of each run.

    The curves are by metric: the points (step, value) of each run.
    """
    heads = list(map(_head, names, COLORS))  # not more than there are colors
    rows = []
    for result in results[:_MOST_METRICS]:
        picture = _picture(curves.get(result[0], ()), COLORS, _COMPARED_HEIGHT)
        rows.append([*map(_text, result), picture])
    outcome = _table(("metric", *heads, "by step"), rows)
    settings = _table(("differs", *heads), [list(map(_text, row)) for row in differences])
    return f"<div>{outcome}{_more(len(results))}{settings}</div>"


def _head(name: str, color: str) -> str:
    """The head of a run's column: a square in the color of its curves, and its name."""
    return f'<span style="color:{color}">&#9632;</span> {escape(mask(name))}'


def _row(name: str, history: Sequence[Mapping[str, float]]) -> list[str]:
    """The row of one metric: its name, its last and its best value, its curve."""
    points = []
    for row in history:
        if name in row:  # else an epoch without an evaluation
            points.append((row["epoch"], row[name]))
    _, values = zip(*points, strict=True)
    best = best_of_all(name, values)
    shown_best = "" if best is None else number(best)
    return [escape(mask(name)), number(values[-1]), shown_best, _picture([points], ("#2a78d6",), HEIGHT)]


def _text(cell: str) -> str:
    # Masked before it is escaped: the secret stands in the text as it is, not as HTML has it.
    return escape(mask(cell)).replace("\n", "<br>")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML; "" without rows."""
    if not rows:
        return ""
    body = ""
    for row in rows:
        body += _table_row("td", row)
    return f"<table><thead>{_table_row('th', heads)}</thead><tbody>{body}</tbody></table>"


def _table_row(tag: str, cells: Iterable[str]) -> str:
    """A row whose cells are all heads, `th`, or all values, `td`."""
    content = "".join(f'<{tag} style="{_CELL}">{cell}</{tag}>' for cell in cells)
    return f"<tr>{content}</tr>"


def _more(count: int) -> str:
    """The line that says how many of so many metrics are left out."""
    return f"<div>and {count - _MOST_METRICS} more</div>" if count > _MOST_METRICS else ""


def _picture(curves: Iterable[Points], colors: Sequence[str], height: int) -> str:
    """A line through the finite points of each curve, as SVG; "" if no curve has two."""
    drawn: dict[str, Points] = {}  # by color
    for points, color in zip(curves, colors, strict=False):
        finite = [point for point in points if math.isfinite(point[1])]
        if len(finite) > 1:
            drawn[color] = thinned(finite, _POINTS)
    if not drawn:
        return ""
    steps, values = zip(*itertools.chain.from_iterable(drawn.values()), strict=True)
    first = min(steps)
    low = min(values)
    high = max(values)

    # A constant value would divide by zero; it is drawn at the bottom.
    across = WIDTH / ((max(steps) - first) or 1)
    up = (height - 4) / ((high - low) or 1)
    lines = ""
    for color, points in drawn.items():
        positions = []
        for step, value in points:
            x = (step - first) * across
            y = height - 2 - (value - low) * up  # pixels count downward; 2 of them are a margin
            positions.append(f"{x:.1f},{y:.1f}")
        path = " ".join(positions)
        lines += f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>'

    # What a screen reader says: how one curve went, or the range of several.
    start, end = (values[0], values[-1]) if len(drawn) == 1 else (low, high)
    label = f"from {start:.4g} to {end:.4g}"
    return f'<svg width="{WIDTH}" height="{height}" role="img" aria-label="{label}">{lines}</svg>'
