"""Charts: the geometry of the curves in a page, which `templates/chart.html` draws.

Without a script, a page shows the whole of each curve. `templates/charts.js` zooms and smooths, for which a chart has
its points.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

from callbacks.formats import round_number
from callbacks.types import Json, JsonObject

HEIGHT = 200  # of a chart, in pixels
TOP = 10  # of the plot within the chart
BOTTOM = 174
_POINTS = 360  # the most points of a line as it is drawn at first: a chart has no pixels for more
_ZOOMED = 1000  # the most points of a line that the script has
_ON_A_PAGE = 12_000  # the most points that the script has of all lines together: a page stays below 500 kB
_DOTTED = 40  # the most points of a line that has a dot at each point
_DOTS_ON_A_PAGE = 2000
_GAPS = 40  # the most values of a line that are marked because they are not finite
_HUGE = 1e100  # greater values are not drawn
_TINY = 1e-100  # a logarithmic scale starts above this

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve as it is given."""

    name: str  # its name in the legend
    kind: str  # its class in the style sheet: `train`, `within`, `held`, or `run0` to `run11` of a comparison
    points: Sequence[Point]  # (step, value), by step


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
    """A picture of lines over steps."""

    title: str  # the name of the values
    log: bool  # whether the scale of the values is logarithmic
    last_step: float  # the last step that a line has
    keys: list[Key]  # the legend
    value_ticks: list[Tick]  # labels of the vertical axis
    step_ticks: list[Tick]  # labels of the horizontal axis
    marks: list[float]  # the percentages of dashed lines
    curves: list[Curve]  # the lines, in the order in which they are drawn
    data: JsonObject  # what the script draws: the lines with more points, and the steps of the dashed lines
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
        values = values or [0.0]  # a chart of gaps alone still has axes
        self.first = min(steps, default=0)
        self.last = max(steps, default=0)
        self.log = _looks_flat(values)
        if self.log:
            values = list(map(math.log10, values))
        self._low, self._high = _range(values)

    def x(self, step: float) -> float:
        if self.first == self.last:  # one step: in the middle, and no division by zero
            return 50.0
        return 100 * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        height = math.log10(value) if self.log else value
        # Pixels count downward, so the lowest value is at BOTTOM.
        return BOTTOM - (BOTTOM - TOP) * (height - self._low) / (self._high - self._low)

    def value_ticks(self) -> list[Tick]:
        values = _powers(self._low, self._high) if self.log else _ticks(self._low, self._high)
        return [Tick(self.y(value), round_number(value)) for value in values]

    def step_ticks(self) -> list[Tick]:
        steps = [self.first] if self.first == self.last else _ticks(self.first, self.last)
        ticks = []
        for step in steps:
            x = self.x(step)
            ticks.append(Tick(x, f"{step:,.0f}", _anchor(x)))
        return ticks


def charts(titles: Mapping[str, Sequence[Line]], marks: Sequence[int] = ()) -> list[Chart]:
    """The charts of a page, by title; see `chart`. The more lines there are, the fewer points each of them has."""
    count = 0
    for line in itertools.chain.from_iterable(titles.values()):
        if line.points:  # `chart` leaves out the others
            count += 1
    count = max(1, count)
    most = min(_ZOOMED, _ON_A_PAGE // count)
    dotted = min(_DOTTED, _DOTS_ON_A_PAGE // count)
    return [chart(title, lines, marks, most, dotted) for title, lines in titles.items()]


def chart(
    title: str, lines: Sequence[Line], marks: Sequence[int] = (), most: int = _ZOOMED, dotted: int = _DOTTED
) -> Chart:
    """A picture of lines, with a dashed line at each step of `marks`; a value that is not finite is a gap.

    A line without points is left out. The script has at most `most` points of a line; one of at most `dotted` points
    has a dot at each.
    """
    detailed = []  # what the script has
    drawn = []  # what the page shows without it
    keys = []
    for line in lines:
        if not line.points:
            continue
        points = thinned(line.points, most)
        detailed.append(dataclasses.replace(line, points=points))
        drawn.append(dataclasses.replace(line, points=thinned(points, min(most, _POINTS))))
        keys.append(Key(line.name, line.kind, points[-1][1]))  # thinning keeps the last point

    # The axes fit the points that are drawn: thinning keeps the extremes of each stretch.
    axes = _Axes(drawn)
    # The line within epochs is pale and has the most points, so the others are drawn over it.
    in_drawing_order = sorted(drawn, key=lambda line: line.kind != "within")
    shown_marks = [step for step in marks if axes.first <= step <= axes.last]
    return Chart(
        title=title,
        log=axes.log,
        last_step=axes.last,
        keys=keys,
        value_ticks=axes.value_ticks(),
        step_ticks=axes.step_ticks(),
        marks=list(map(axes.x, shown_marks)),
        curves=[_curve(line, axes, dotted) for line in in_drawing_order],
        data={"lines": list(map(_data, detailed)), "marks": shown_marks, "log": axes.log},
    )


def _data(line: Line) -> JsonObject:
    """A line for the script: steps, and values of five digits; a value that isn't drawn is a text."""
    steps = []
    values: list[Json] = []
    for step, value in line.points:
        steps.append(step)
        if _is_drawn(value):
            values.append(float(f"{value:.5g}"))
        else:
            values.append(str(value))  # JSON has no nan and no infinity; the script skips what isn't a number
    return {"kind": line.kind, "steps": steps, "values": values}


def pace(clock: Sequence[Point]) -> Iterator[tuple[int, float]]:
    """Steps per second between points (step, seconds), each over at least a hundredth of the time."""
    if not clock:
        return
    # The speed over a shorter stretch is mostly noise.
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


def _curve(line: Line, axes: _Axes, dotted: int) -> Curve:
    path_points: list[Point] = []
    dots: list[Point] = []
    gaps: list[Gap] = []
    for step, value in line.points:
        x = axes.x(step)
        if _is_drawn(value):
            path_points.append((10 * x, axes.y(value)))  # the picture is 1000 units wide
            dots.append((x, axes.y(value)))
        else:
            path_points.append((10 * x, math.nan))  # interrupts the path
            gaps.append(Gap(x, f"{line.name}: {value} at step {step:,}"))
    if len(line.points) > dotted:
        dots = []
    is_dense = len(line.points) > _POINTS // 2
    return Curve(line.kind, is_dense, _path(path_points), dots, gaps[:_GAPS])


def _looks_flat(values: Sequence[float]) -> bool:
    """Whether most of these values would be flat at the bottom of a linear scale."""
    values = sorted([*values, values[0]])  # at least two, so that they have a lowest and a highest one
    low = values[0]
    high = values[-1]
    # Over at least a decade, with the median in the lowest 15% of the scale. A logarithm needs positive values.
    return low > _TINY and high / low >= 10 and values[len(values) // 2] - low < 0.15 * (high - low)


def _is_drawn(value: float) -> bool:
    """Whether a value is drawn: it is neither nan nor huge."""
    # A comparison with nan is False, so this excludes nan, too.
    return abs(value) < _HUGE


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """At most about `most` points that look the same.

    The lowest point of each stretch, the highest and one that isn't drawn are kept; and the first and the last of all.
    """
    if len(points) <= most:
        return points
    width = math.ceil(3 * len(points) / most)  # each stretch leaves up to three points
    kept = [points[0]]
    for start in range(1, len(points) - 1, width):
        stretch = points[start : min(start + width, len(points) - 1)]
        drawn: list[Point] = []
        gaps: list[Point] = []
        for point in stretch:
            if _is_drawn(point[1]):
                drawn.append(point)
            else:
                gaps.append(point)
        drawn.sort(key=operator.itemgetter(1))
        # A set, since the lowest point may be the highest one, too.
        kept += sorted({*drawn[:1], *drawn[-1:], *gaps[:1]}, key=operator.itemgetter(0))
    return [*kept, points[-1]]


def _range(values: Sequence[float]) -> Point:
    """The lowest and the highest value, with a margin."""
    low = min(values)
    high = max(values)
    # Never 0, also where all values are the same: `_Axes.y` divides by the range.
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
    every = max(1, math.ceil((high - low) / 4))  # decades between two labels
    # Multiples of `every`, wherever the range begins: charts of similar ranges get the same labels.
    first = every * math.ceil(math.floor(low) / every)
    decades = range(first, math.ceil(high) + 1, every)
    values: list[float] = []
    # The fewest digits that give three labels: within one decade, powers of ten alone give one or none.
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
        # A line of no length, `h0`, shows as a dot if the next point is missing.
        parts.append(f"{pen}{x:.1f} {y:.1f}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(parts)
