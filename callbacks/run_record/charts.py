"""Charts: the geometry of the curves in the report. `templates/chart.html` draws them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

from callbacks.formats import number, round_number

HEIGHT = 200  # of a chart, in pixels
TOP = 10  # of the plot within the chart
BOTTOM = 174
_POINTS = 360  # the most points of a line: a chart has no pixels for more
_HOVERS = 180  # the most positions of a chart at which the pointer shows values
_DOTTED = 40  # the most points of a line that has a dot at each point
_GAPS = 40  # the most values of a line that are marked because they are not finite
_HUGE = 1e100  # greater values are not drawn
_TINY = 1e-100  # a logarithmic scale starts above this

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve as it is given.

    Attributes:
        name: its name in the legend.
        kind: its class in the style sheet: `train`, `within` or `held`.
        points: (step, value), by step.
    """

    name: str
    kind: str
    points: Sequence[Point]


@dataclasses.dataclass(frozen=True)
class Key:
    """An entry of the legend: the line's name and last value."""

    name: str
    kind: str
    value: float


@dataclasses.dataclass(frozen=True)
class Tick:
    """A label of an axis, and its position: a pixel (values) or a percentage (steps)."""

    at: float
    label: str
    anchor: str = "end"


@dataclasses.dataclass(frozen=True)
class Gap:
    """A value that is not finite: its percentage of the width, and what the pointer shows there."""

    at: float
    label: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve as it is drawn: its SVG path, its dots (percentage, pixel), and values that are not finite."""

    kind: str
    dense: bool
    path: str
    dots: list[Point]
    gaps: list[Gap]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture of lines over steps.

    Attributes:
        title: the name of the values.
        log: whether the scale of the values is logarithmic.
        last_step: the last step that a line has.
        keys: the legend.
        value_ticks: labels of the vertical axis.
        step_ticks: labels of the horizontal axis.
        marks: the percentages of dashed lines.
        curves: the lines, in the order in which they are drawn.
        rows: what the script shows at a percentage: the texts for the step and each line.
    """

    title: str
    log: bool
    last_step: float
    keys: list[Key]
    value_ticks: list[Tick]
    step_ticks: list[Tick]
    marks: list[float]
    curves: list[Curve]
    rows: list[tuple[float, list[str]]]
    height: int = HEIGHT
    top: int = TOP
    bottom: int = BOTTOM


class _Axes:
    """The scales: a step is a percentage of the width, a value is a pixel of the height."""

    def __init__(self, lines: Sequence[Line]) -> None:
        steps: list[float] = []
        values: list[float] = []
        for line in lines:
            for step, value in line.points:
                steps.append(step)
                if _is_drawn(value):
                    values.append(value)
        values = values or [0.0]
        self.first = min(steps, default=0)
        self.last = max(steps, default=0)
        self.log = _looks_flat(values)
        self._low, self._high = _range(list(map(math.log10, values)) if self.log else values)

    def x(self, step: float) -> float:
        if self.first == self.last:
            return 50.0
        return 100 * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        height = math.log10(value) if self.log else value
        return BOTTOM - (BOTTOM - TOP) * (height - self._low) / (self._high - self._low)

    def value_ticks(self) -> list[Tick]:
        values = _powers(self._low, self._high) if self.log else _ticks(self._low, self._high)
        return [Tick(self.y(value), round_number(value)) for value in values]

    def step_ticks(self) -> list[Tick]:
        steps = [self.first] if self.first == self.last else _ticks(self.first, self.last)
        return [Tick(self.x(step), f"{step:,.0f}", _anchor(self.x(step))) for step in steps]


def chart(title: str, lines: Sequence[Line], marks: Sequence[int]) -> Chart:
    """A picture of lines, with a dashed line at each step of `marks`; a value that is not finite is a gap."""
    thinned = []
    for line in lines:
        if line.points:
            thinned.append(dataclasses.replace(line, points=_thinned(line.points)))
    axes = _Axes(thinned)
    # The line within epochs is pale and has the most points, so the others are drawn over it.
    in_drawing_order = sorted(thinned, key=lambda line: line.kind != "within")
    return Chart(
        title=title,
        log=axes.log,
        last_step=axes.last,
        keys=[Key(line.name, line.kind, line.points[-1][1]) for line in thinned],
        value_ticks=axes.value_ticks(),
        step_ticks=axes.step_ticks(),
        marks=[axes.x(step) for step in marks if axes.first <= step <= axes.last],
        curves=[_curve(line, axes) for line in in_drawing_order],
        rows=_hovers(thinned, axes),
    )


def pace(clock: Sequence[Point]) -> Iterator[tuple[int, float]]:
    """Steps per second between points (step, seconds), each over at least a hundredth of the time."""
    if not clock:
        return
    shortest = max((clock[-1][1] - clock[0][1]) / 100, 0.05)
    last_step, last_time = clock[0]
    for step, time_ in clock[1:]:
        went_back = step < last_step  # an attempt continued from an earlier step
        if not went_back and time_ - last_time < shortest:
            continue
        if step > last_step:
            yield int(step), (step - last_step) / (time_ - last_time)
        last_step = step
        last_time = time_


def _curve(line: Line, axes: _Axes) -> Curve:
    path_points: list[Point] = []
    dots: list[Point] = []
    gaps: list[Gap] = []
    for step, value in line.points:
        x = axes.x(step)
        if _is_drawn(value):
            path_points.append((10 * x, axes.y(value)))  # the picture is 1000 units wide
            dots.append((x, axes.y(value)))
        else:
            path_points.append((10 * x, math.nan))
            gaps.append(Gap(x, f"{line.name}: {value} at step {step:,}"))
    has_dots = len(line.points) <= _DOTTED
    is_dense = len(line.points) > _POINTS // 2
    return Curve(line.kind, is_dense, _path(path_points), dots if has_dots else [], gaps[:_GAPS])


def _hovers(lines: Sequence[Line], axes: _Axes) -> list[tuple[float, list[str]]]:
    """What the script shows at the pointer: of each line, the last value up to that step."""
    steps_of_lines = [list(map(operator.itemgetter(0), line.points)) for line in lines]
    steps = sorted(set(itertools.chain.from_iterable(steps_of_lines)))
    stride = math.ceil(len(steps) / _HOVERS) or 1

    rows = []
    for step in steps[::stride]:
        texts = [f"step {step:,}"]
        for line, line_steps in zip(lines, steps_of_lines, strict=True):
            count = bisect.bisect(line_steps, step)
            texts.append(number(line.points[count - 1][1]) if count else "-")
        rows.append((round(axes.x(step), 2), texts))
    return rows


def _looks_flat(values: Sequence[float]) -> bool:
    """Whether most of these values would be flat at the bottom of a linear scale."""
    low, *_, high = values = sorted([*values, values[0]])
    return low > _TINY and high / low >= 10 and values[len(values) // 2] - low < 0.15 * (high - low)


def _is_drawn(value: float) -> bool:
    """Whether a value is drawn: it is neither nan nor huge."""
    return abs(value) < _HUGE


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Fewer points that look the same: of each stretch the lowest, the highest, and one that isn't drawn."""
    width = math.ceil(3 * len(points) / _POINTS) if len(points) > _POINTS else 1
    kept: list[Point] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        drawn: list[Point] = []
        gaps: list[Point] = []
        for point in stretch:
            (drawn if _is_drawn(point[1]) else gaps).append(point)
        drawn.sort(key=operator.itemgetter(1))
        # A set, since the lowest point may be the highest one, too.
        kept += sorted({*drawn[:1], *drawn[-1:], *gaps[:1]}, key=operator.itemgetter(0))
    return kept


def _range(values: Sequence[float]) -> Point:
    """The lowest and the highest value, with a margin."""
    low = min(values)
    high = max(values)
    room = max(0.04 * (high - low), 5e-4 * max(abs(low), abs(high)), 1e-12)
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """At most four round numbers between two numbers."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 4))
    for times in (1, 2, 5, 10):
        if (high - low) / (unit * times) <= 4:
            unit *= times
            break
    return [unit * count for count in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Round numbers whose logarithms are between two numbers."""
    every = max(1, math.ceil((high - low) / 4))
    # Multiples of `every`, wherever the range begins: charts of similar ranges get the same labels.
    first = every * math.ceil(math.floor(low) / every)
    decades = range(first, math.ceil(high) + 1, every)
    values: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5)):
        values = []
        for decade, digit in itertools.product(decades, digits):
            value = digit * 10.0**decade
            if low <= math.log10(value) <= high:
                values.append(value)
        if len(values) >= 3:
            break
    return values


def _anchor(percent: float) -> str:
    """The alignment of a label that keeps it within the chart."""
    if percent < 8:
        return "start"
    return "end" if percent > 92 else "middle"


def _path(points: Iterable[Point]) -> str:
    """An SVG path through points. A nan is a gap; a point between two gaps becomes a dot."""
    parts = []
    pen = "M"
    for x, y in points:
        if math.isnan(y):
            pen = "M"
            continue
        parts.append(f"{pen}{x:.1f} {y:.1f}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(parts)
