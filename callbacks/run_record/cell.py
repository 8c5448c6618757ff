"""A run as a notebook shows it behind a cell: a line of facts, and a row for each metric with its curve.

One table with inline styles and no script, so that it looks the same in Jupyter, in an exported page and on GitHub.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from callbacks.metric_direction import lower_is_better
from callbacks.run_record.history import COUNTERS
from callbacks.run_record.redaction import mask

WIDTH = 160
HEIGHT = 28
"""The size of a curve, in pixels."""
_MOST_METRICS = 20
_CELL = "text-align:right;padding:2px 12px 2px 0"


def html(facts: Iterable[str], history: Sequence[Mapping[str, float]]) -> str:
    """The facts of a run and its metrics, as HTML.

    Args:
        facts: short texts, such as the status and the number of steps.
        history: a row for each epoch, as in `FitResult.history`.
    """
    names = [name for name in dict.fromkeys(name for row in history for name in row) if name not in COUNTERS]
    line = escape(mask(" · ".join(facts)))
    rows = [_row(name, history) for name in names[:_MOST_METRICS]]
    head = "".join(f'<th style="{_CELL}">{title}</th>' for title in ("metric", "last", "best", "by epoch"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    more = f"<div>and {len(names) - _MOST_METRICS} more</div>" if len(names) > _MOST_METRICS else ""
    return f"<div><div>{line}</div>{table}{more}</div>"


def _row(name: str, history: Sequence[Mapping[str, float]]) -> str:
    """The row of one metric: its name, its last and its best value, its curve."""
    points = [(row["epoch"], row[name]) for row in history if name in row]
    finite = [(epoch, value) for epoch, value in points if math.isfinite(value)]
    less = lower_is_better(name)
    best = ""
    if less is not None and finite:
        best = f"{(min if less else max)(value for _, value in finite):.4g}"
    cells = [escape(mask(name)), f"{points[-1][1]:.4g}", best, _curve(finite)]
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """A line through the points, as SVG; "" if there are fewer than two."""
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    values = [value for _, value in points]
    low, high = min(values), max(values)
    # A constant value would divide by zero; it is drawn at the bottom.
    across = WIDTH / ((last - first) or 1)
    up = (HEIGHT - 4) / ((high - low) or 1)
    path = " ".join(f"{(epoch - first) * across:.1f},{HEIGHT - 2 - (value - low) * up:.1f}" for epoch, value in points)
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="from {values[0]:.4g} to {values[-1]:.4g}">'
        f'<polyline fill="none" stroke="#2a78d6" stroke-width="1.5" points="{path}"/></svg>'
    )
