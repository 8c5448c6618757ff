"""Report: the story of a run as one page of HTML, `report.html`, which needs nothing but itself."""

from __future__ import annotations

import base64
import bisect
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from callbacks import files
from callbacks.base import Callback, Run, shown_status
from callbacks.run_record import record
from callbacks.run_record.record import STEP, Record
from callbacks.run_record.redaction import mask, redact, tell

NAME = "report.html"
_MARK = '<meta name="generator" content="tfloop">'

_CHARTS, _ROWS, _LONGEST = 24, 400, 2000  # at most: curves that are drawn, rows of a table, characters of a value
_POINTS = 360  # of a line, at most: more than a chart has pixels for
_HOVERS = 180  # places of a chart at which its values can be read
_HUGE, _TINY = 1e100, 1e-100  # values beyond have no place in a picture
_HEIGHT, _TOP, _BOTTOM = 200, 10, 174  # of a chart; and of its plot, in pixels

Point = tuple[float, float]


class Report(Callback):
    """Writes `report.html` into the run directory when the run ends, however it ends.

    It comes behind `Journal`, whose last line it reads, and before `MLflowTracker`, which delivers it. That it can't be
    written is a warning.
    """

    def on_fit_end(self, run: Run, status: str) -> None:
        try:
            run.check_directory()
            told = record.read_about(run.directory).get("status")  # of a life that was refused, that of the one before
            status = status if told == "running" else told or status
            write(run.directory / NAME, dataclasses.replace(record.read(run.directory, quick=True), status=status))
        except files.MovedError:  # of which the run has said it
            return
        except Exception as error:  # whatever it is, it is no reason for a run to fail
            tell(f"warning: {NAME} could not be written ({type(error).__name__}: {error})")


def write(path: Path, of: Record) -> None:
    """Writes the page of a run, whole."""
    files.write_text(path, html(of))


def is_report(path: Path) -> bool:
    """Whether a file is a page that `write` has written."""
    with files.reading(path, shared=True) as file:
        return _MARK.encode() in file.read(1000)


def html(of: Record) -> str:
    """The page of a run. Every text in it is escaped, and has no secrets; it loads nothing, and holds for file://."""
    title = f"{of.task or 'Run'} · {of.name}"
    policy = (
        f"default-src 'none'; style-src {_sha(_STYLE)}; script-src {_sha(_SCRIPT)}; base-uri 'none'; form-action 'none'"
    )
    sections = [
        _section("Curves", _curves(of)),
        _section("Where the time went", _split(of)),
        _section("Throughput", _throughput(of)),
        _section("What happened", _faults(of)),
        _section("Checkpoints", _checkpoints(of)),
        _section("Hyperparameters", _pairs(of.hyperparameters)),
        _section("Options", _pairs(of.options)),
        _section("Topology and versions", _pairs(_place(of))),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{_head(of)}{''.join(sections)}"
        f"<footer>Made from {_text(of.path)} at {_moment(time.time())}; "
        "<code>tfloop report</code> makes it anew.</footer>\n"
        f"</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _head(of: Record) -> str:
    """What the run is, and what came of it."""
    replicas = f"{of.replicas} replica{'s' * (of.replicas != 1)}" if of.replicas else ""
    workers = f" on {of.workers} workers" if replicas and (of.workers or 1) > 1 else ""
    batch = of.options.get("batch_size")
    facts = [
        of.backend,
        replicas + workers,
        f"global batch {batch}" if batch else "",
        f"{of.parameters:,} parameters" if of.parameters is not None else "",
        _moment(of.started) if of.started is not None else "",
    ]
    status = of.status or "unknown"
    why = f" ({mask(of.reason)})" if of.reason else ""
    out = (
        f'<header><p class="name">{_text(of.name)}</p><h1>{_text(of.task or "Run")} '
        f'<span class="status {status}">{shown_status(status)}</span></h1>'
        f"<p>{_text(' · '.join(filter(None, facts)))}{_text(why)}</p></header>\n"
    )
    if status == "failed" and of.faults:
        out += f'<p class="trouble">{_text(mask(of.faults[-1].text))}</p>\n'
    return out + f'<div class="tiles">{"".join(_tile(*each) for each in _headline(of))}</div>\n'


def _headline(of: Record) -> Iterator[tuple[str, str, str]]:
    """What matters most: its name, value, and a remark."""
    epochs = f"{of.epochs:,} epoch{'s' * (of.epochs != 1)}" if of.epochs else ""
    total = f"of {of.total_steps:,}" if of.total_steps not in (None, of.steps) else ""
    yield "steps", f"{of.steps:,}", ", ".join(filter(None, (total, epochs)))
    yield "duration", _lasting(of.seconds), f"in {of.lives} lives" if of.lives > 1 else "in one go"
    if of.speed:
        yield "examples/s", f"{of.speed[-1][1]:,.0f}", "while training"
    names = [name for name in of.curves if name.startswith("eval_")] or [
        name for name in of.curves if not name.startswith(STEP)
    ]
    for name in sorted(names, key=lambda name: name != of.metric)[:3]:
        if (found := of.best(name)) is not None:
            last = _number(of.last(name))
            yield (
                f"best {name}",
                _number(found[1]),
                f"at step {found[0]:,}" + f"; last {last}" * (found[1] != of.last(name)),
            )
        else:
            yield name, _number(of.last(name)), "last"


def _tile(name: str, value: str, remark: str) -> str:
    return f'<div class="tile"><span>{_text(name)}</span><b>{_text(value)}</b><span>{_text(remark)}</span></div>'


def _curves(of: Record) -> str:
    """A chart for each metric: in training, within epochs and over them, and in evaluations."""
    bases = list(dict.fromkeys(name.removeprefix(STEP).removeprefix("eval_") for name in of.curves))
    bases.sort(key=lambda base: base != "loss")
    marks = sorted({fault.step for fault in of.faults})[:40]
    charts = []
    for base in bases[:_CHARTS]:
        within, train, held_out = (of.curves.get(name, []) for name in (STEP + base, base, "eval_" + base))
        if not train:
            within, train = [], within
        lines = [("training", "train", train), ("within epochs", "within", within), ("evaluation", "held", held_out)]
        charts.append(_chart(base, lines, marks))
    out = f'<div class="charts">{"".join(charts)}</div>' if charts else ""
    if marks and charts:
        out += '<p class="note">Dashed: something happened at this step; see below.</p>'
    if more := bases[_CHARTS:]:
        names = [name for base in more for name in (base, "eval_" + base) if name in of.curves]
        rows = [(name, _number(of.last(name)), _best(of, name)) for name in names]
        out += _table(("metric", "last", "best"), rows)
    return out


def _best(of: Record, name: str) -> str:
    found = of.best(name)
    return f"{_number(found[1])} at step {found[0]:,}" if found else ""


def _throughput(of: Record) -> str:
    """How fast it was: while it trained, and by the clock."""
    marks = sorted({fault.step for fault in of.faults})[:40]
    charts = []
    if len(of.speed) > 1:
        line = ("mean since its process began", "train", of.speed)
        charts.append(_chart("examples per second, while training", [line], marks))
    pace = list(_pace(of.clock))
    if len(pace) > 1:
        line = ("evaluation and all else included", "train", pace)
        charts.append(_chart("steps per second, by the clock", [line], marks))
    return f'<div class="charts wide">{"".join(charts)}</div>' if charts else ""


def _pace(clock: Sequence[Point]) -> Iterator[tuple[int, float]]:
    """Steps per second between points (step, seconds), over a hundredth of the time at least."""
    if not clock:
        return
    least = max((clock[-1][1] - clock[0][1]) / 100, 0.05)
    step, then = clock[0]
    for now_at, now in clock[1:]:
        if now_at < step:  # a life that went on from before
            step, then = now_at, now
        elif now - then >= least:
            if now_at > step:
                yield int(now_at), (now_at - step) / (now - then)
            step, then = now_at, now


_PARTS = (
    "data", "compute", "training", "all_reduce", "evaluation", "callbacks", "saving", "waiting", "other", "starting",
    "compiling",
)  # fmt: skip


def _split(of: Record) -> str:
    """Where the time of the chief went; and that of each rank, of a run that was profiled."""
    out = _bar("the chief, all lives" if of.lives > 1 else "the chief", of.split)
    for rank, seconds in list(enumerate(of.ranks))[:64]:
        out += _bar(f"rank {rank}, without its start and compiling", seconds)
    if out:
        known = {part for each in (of.split, *of.ranks) for part, some in each.items() if some > 0}
        keys = "".join(f'<span class="key {part}"><i></i>{_name(part)}</span>' for part in _PARTS if part in known)
        out = f'<p class="keys">{keys}</p>{out}'
    if len(of.verdict) > 2:
        return out + f'<p class="note verdict">{"<br>".join(_text(mask(line)) for line in of.verdict[-2:])}</p>'
    if "training" in of.split and not of.ranks:
        out += '<p class="note">With --profile A:B, training is split into data, compute and all-reduce.</p>'
    return out


def _bar(title: str, seconds: Mapping[str, float]) -> str:
    """Seconds by part, as a bar, with the shares written below."""
    total = sum(seconds.values())
    if not 0 < total < math.inf:
        return ""
    parts, at, told = "", 0.0, []
    for part in _PARTS:
        share = 100 * (seconds.get(part, 0.0) / total)
        if share > 0:
            label = f"{_name(part)}: {_lasting(seconds[part])}, {share:.0f}%"
            parts += (
                f'<rect class="{part}" x="{at:.3f}%" width="{share:.3f}%" height="22"><title>{label}</title></rect>'
            )
            told.append((share, f"{_name(part)} {share:.0f}%"))
            at += share
    shares = " · ".join(text for share, text in sorted(told, reverse=True) if share >= 0.5)
    return (
        f'<div class="split"><p>{_text(title)}: <b>{_lasting(total)}</b></p>'
        f'<svg class="bar" role="img" aria-label="{shares}">{parts}</svg><p class="note">{shares}</p></div>'
    )


def _name(part: str) -> str:
    return part.replace("_", "-")


def _faults(of: Record) -> str:
    rows = [(_moment(each.time), f"{each.step:,}", mask(each.text)) for each in of.faults]
    return _table(("when", "step", "what"), rows) or '<p class="note">Nothing but training.</p>'


def _checkpoints(of: Record) -> str:
    best = of.best(of.metric)
    rows = [
        (each.name, f"{each.step:,}", each.reason, _size(each.bytes), _moment(each.time),
         f"best {of.metric}" if best and each.step == best[0] else "")
        for each in of.checkpoints
    ]  # fmt: skip
    return _table(("checkpoint", "step", "saved for", "size", "when", ""), rows) or '<p class="note">There is none.</p>'


def _place(of: Record) -> dict[str, Any]:
    topology = {"backend": of.backend, "replicas": of.replicas, "workers": of.workers, "target": of.target}
    return topology | of.versions | of.machine


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>\n" if content else ""


def _pairs(values: Mapping[str, Any]) -> str:
    """Names and values."""
    shown = list(redact(dict(values)).items())[:_ROWS]
    out = "".join(f"<div><dt>{_text(name)}</dt><dd>{_value(value)}</dd></div>" for name, value in shown)
    return f"<dl>{out}</dl>{_left_out(len(values) - len(shown))}" if out else ""


def _table(heads: Iterable[str], rows: Sequence[Iterable[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{_text(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_text(each)}</td>' for each in row)}</tr>" for row in rows[-_ROWS:])
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{_left_out(len(rows) - _ROWS)}"
    )


def _left_out(count: int) -> str:
    return f'<p class="note">{count:,} more are in the run directory.</p>' if count > 0 else ""


def _value(value: Any) -> str:
    if value is None or value == "":
        return "<i>none</i>"
    return _text(value if isinstance(value, str) else json.dumps(value))


def _text(value: Any) -> str:
    """A text as it can stand anywhere in a page."""
    text = str(redact(str(value)))
    return escape(text if len(text) <= _LONGEST else text[:_LONGEST] + " …").encode("utf-8", "replace").decode()


def _chart(title: str, lines: Sequence[tuple[str, str, Sequence[Point]]], marks: Sequence[int]) -> str:
    """A picture of lines over steps, each with a name and a class; with a dashed line at each mark.

    The plot is as wide as there is room, so what has a width that must not change stands at percentages of it, and
    paths have a box of their own, 1000 wide. What is not finite is a gap, and a ring at the top.
    """
    lines = [(name, kind, _thinned(points)) for name, kind, points in lines if points]
    steps = [step for _, _, points in lines for step, _ in points]
    values = [value for _, _, points in lines for _, value in points if _drawn(value)]
    if not values:
        values = [0.0]
    first, last = min(steps, default=0), max(steps, default=0)
    log = _logarithmic(values)
    low, high = _range([math.log10(value) for value in values] if log else values)

    def x(step: float) -> float:
        return 50.0 if first == last else 100 * (step - first) / (last - first)

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * ((math.log10(value) if log else value) - low) / (high - low)

    grid = labels = paths = dots = keys = ""
    for value in _powers(low, high) if log else _ticks(low, high):
        at = f"{y(value):.1f}"
        grid += f'<line x1="0" x2="100%" y1="{at}" y2="{at}"/>'
        labels += f'<text x="44" y="{at}" dy=".32em">{_short(value)}</text>'
    for step in (first,) if first == last else _ticks(first, last):
        anchor = "start" if x(step) < 8 else "end" if x(step) > 92 else "middle"
        grid += f'<text x="{x(step):.2f}%" y="{_HEIGHT - 4}" text-anchor="{anchor}">{step:,.0f}</text>'
    for step in (mark for mark in marks if first <= mark <= last):
        grid += f'<line class="mark" x1="{x(step):.2f}%" x2="{x(step):.2f}%" y1="{_TOP}" y2="{_BOTTOM}"/>'
    for name, kind, points in sorted(lines, key=lambda line: line[1] != "within"):
        dense = " dense" if len(points) > _POINTS // 2 else ""
        places = [(10 * x(step), y(value) if _drawn(value) else math.nan) for step, value in points]
        paths += f'<path class="{kind}{dense}" d="{_path(places)}"/>'
        if len(points) <= 40:
            spots = ((x(step), y(value)) for step, value in points if _drawn(value))
            dots += "".join(f'<circle class="{kind}" cx="{at:.2f}%" cy="{up:.1f}" r="2.6"/>' for at, up in spots)
        bad = [(step, value) for step, value in points if not _drawn(value)][:40]
        dots += "".join(
            f'<circle class="bad" cx="{x(step):.2f}%" cy="{_TOP - 4}" r="3"><title>{name}: {value} at step {step:,}'
            "</title></circle>"
            for step, value in bad
        )
    for name, kind, points in lines:
        keys += f'<span class="key {kind}"><i></i>{_text(name)} <b data-value>{_number(points[-1][1])}</b></span>'
    scale = "<small>log</small>" if log else ""
    return (
        f'<figure><figcaption><strong>{_text(title)}</strong>{scale}<span class="at" data-value>step {last:,}</span>'
        f'<span class="keys">{keys}</span></figcaption><div class="plot">'
        f'<svg class="axis" width="48" height="{_HEIGHT}" aria-hidden="true">{labels}</svg>'
        f'<svg class="chart" height="{_HEIGHT}" role="img" aria-label="{_text(title)} by step" '
        f'data-rows="{_text_of_rows(lines, x)}">{grid}'
        f'<svg viewBox="0 0 1000 {_HEIGHT}" width="100%" height="{_HEIGHT}" preserveAspectRatio="none">{paths}</svg>'
        f'{dots}<line class="cursor" y1="{_TOP}" y2="{_BOTTOM}"/></svg></div></figure>'
    )


def _logarithmic(values: Sequence[float]) -> bool:
    """Whether most of these values would lie flat at the bottom if the scale were linear."""
    low, *_, high = values = sorted([*values, values[0]])
    return low > _TINY and high / low >= 10 and values[len(values) // 2] - low < 0.15 * (high - low)


def _drawn(value: float) -> bool:
    """Whether a value has a place in a picture."""
    return abs(value) < _HUGE


def _thinned(points: Sequence[Point]) -> list[Point]:
    """A line that looks the same with fewer points: of each stretch the lowest, the highest, and one that is a gap."""
    width = max(1, -(-3 * len(points) // _POINTS)) if len(points) > _POINTS else 1
    kept: list[Point] = []
    for start in range(0, len(points), width):
        some = points[start : start + width]
        drawn = sorted((point for point in some if _drawn(point[1])), key=lambda point: point[1])
        gaps = [point for point in some if not _drawn(point[1])]
        kept += sorted({*drawn[:1], *drawn[-1:], *gaps[:1]}, key=lambda point: point[0])
    return kept


def _range(values: Sequence[float]) -> Point:
    """The lowest and the highest value, with some room."""
    low, high = min(values), max(values)
    room = max(0.04 * (high - low), 5e-4 * max(abs(low), abs(high)), 1e-12)
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Four or fewer round numbers between two."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 4))
    unit *= next(times for times in (1, 2, 5, 10) if (high - low) / (unit * times) <= 4)
    return [unit * count for count in range(math.ceil(low / unit), math.floor(high / unit) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Round numbers whose logarithms are between two."""
    every = max(1, math.ceil((high - low) / 4))
    found: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5)):
        decades = range(math.floor(low), math.ceil(high) + 1)
        found = [digit * 10.0**each for each in decades if each % every == 0 for digit in digits]
        found = [value for value in found if low <= math.log10(value) <= high]
        if len(found) >= 3:
            break
    return found


def _path(points: Iterable[Point]) -> str:
    """An SVG path through points; nan is a gap, and a point between two gaps is a dot."""
    out, pen = [], "M"
    for x, y in points:
        out.append("" if math.isnan(y) else f"{pen}{x:.1f} {y:.1f}" + ("h0" if pen == "M" else ""))
        pen = "M" if math.isnan(y) else "L"
    return "".join(out)


def _text_of_rows(lines: Sequence[tuple[str, str, Sequence[Point]]], x: Any) -> str:
    """What the script shows at which place: the percentage, and the texts of step and lines."""
    steps = sorted({step for _, _, points in lines for step, _ in points})
    tables = [([step for step, _ in points], points) for _, _, points in lines]
    rows = []
    for step in steps[:: -(-len(steps) // _HOVERS) or 1]:
        behind = [(bisect.bisect(there, step), points) for there, points in tables]
        texts = [_number(points[count - 1][1]) if count else "-" for count, points in behind]
        rows.append([round(x(step), 2), [f"step {step:,}", *texts]])
    return escape(json.dumps(rows, separators=(",", ":")))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(value: float) -> str:
    """A round number, beside an axis."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if max(size, 1e4) <= abs(value) < 1e13:
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def _lasting(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    while not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _size(count: int) -> str:
    power = min(len(str(count)) - 1, 11) // 3
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB')[power]}"


def _sha(text: str) -> str:
    """What a Content-Security-Policy calls a style or a script that it lets in."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE = """
:root {
  color-scheme: light dark;
  --back: #f5f6f8; --card: #fff; --ink: #16191f; --soft: #5d6675; --line: #e4e7ec; --train: #2563eb; --held: #e8590c;
  --good: #15803d; --bad: #c81e1e; --warn: #a15c07; --trouble: #fdecec;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --back: #0d1016; --card: #161a22; --ink: #e8ebf1; --soft: #9aa4b5; --line: #272d39; --train: #6ea2ff;
    --held: #ff9a52; --good: #4ecb80; --bad: #ff7a7a; --warn: #f0b24b; --trouble: #3a1a1d;
  }
}
* { box-sizing: border-box; margin: 0 }
body {
  background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; -webkit-text-size-adjust: 100%;
}
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px }
header p, .note, footer { color: var(--soft) }
.name { font-size: 13px; letter-spacing: .02em }
h1 { font-size: 30px; line-height: 1.25; letter-spacing: -.02em }
h2 { font-size: 16px; margin-bottom: 12px }
.status {
  display: inline-block; vertical-align: .28em; font-size: 13px; font-weight: 600; letter-spacing: 0; line-height: 1;
  padding: 5px 10px; border-radius: 20px; color: var(--soft); border: 1px solid currentColor;
}
.finished { color: var(--good) } .running { color: var(--train) } .failed, .killed { color: var(--bad) }
.stopped, .preempted { color: var(--warn) }
.trouble {
  margin-top: 16px; padding: 10px 14px; background: var(--trouble); border-left: 4px solid var(--bad);
  border-radius: 6px; white-space: pre-wrap;
}
section, .tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px }
section { margin-top: 16px; padding: 16px 18px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px }
.tile { padding: 12px 16px }
.tile span { display: block; color: var(--soft); font-size: 13px }
.tile b { font-size: 24px; line-height: 1.3; letter-spacing: -.01em }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 20px 28px }
figure { min-width: 0 }
figure:first-child:nth-last-child(odd) { grid-column: 1 / -1 }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 10px; font-size: 13px }
figcaption strong { font-size: 14px }
figcaption small { color: var(--soft); border: 1px solid var(--line); border-radius: 4px; padding: 0 5px }
figcaption small { font-size: 11px }
.at { margin-left: auto; color: var(--soft) }
.keys { flex-basis: 100% }
.key { color: var(--soft); font-size: 13px; margin-right: 14px; white-space: nowrap }
.key b { color: var(--ink); font-weight: 600 }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px }
.key i { background: var(--part) }
.plot { display: flex; margin-top: 4px }
.axis { flex: none }
.chart { flex: 1; min-width: 0; overflow: visible; touch-action: pan-y }
svg text { fill: var(--soft); font-size: 11.5px }
.axis text { text-anchor: end }
.chart line { stroke: var(--line) }
.chart .mark { stroke: var(--bad); stroke-dasharray: 3 3; opacity: .55 }
.chart .cursor { stroke: var(--soft); visibility: hidden }
.chart.on .cursor { visibility: visible }
.train, .within { --part: var(--train) } .held { --part: var(--held) }
.within { opacity: .45 } .key.within { opacity: 1 } .key.within i { opacity: .45 }
path { fill: none; stroke: var(--part); stroke-width: 2; stroke-linecap: round; stroke-linejoin: round }
path { vector-effect: non-scaling-stroke }
path.within, path.dense { stroke-width: 1.2 }
circle { fill: var(--part) } .bad { fill: none; stroke: var(--bad); stroke-width: 1.5 }
.split { margin-top: 12px }
.bar { display: block; width: 100%; height: 22px; border-radius: 5px }
rect { fill: var(--part); stroke: var(--card); stroke-width: 1 }
.data { --part: #0d9f8f } .compute, .training { --part: #3b74f0 } .all_reduce { --part: #8b5cf6 }
.evaluation { --part: #ee6c1e } .callbacks { --part: #e0559a } .saving { --part: #d9a514 }
.waiting { --part: #93a1b5 } .other { --part: #66728a }
.starting { --part: #b9c3d1 } .compiling { --part: #35b0d8 }
.note { font-size: 13px; margin-top: 6px }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 10px 20px }
dt { color: var(--soft); font-size: 13px } dd { font-weight: 500 } dd i { color: var(--soft); font-weight: 400 }
.table { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th, td { text-align: left; vertical-align: top; padding: 6px 16px 6px 0; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 500; font-size: 13px } tr:last-child td { border-bottom: 0 }
td { white-space: pre-wrap; min-width: 70px }
footer { font-size: 13px; margin-top: 20px }
code { font-family: ui-monospace, SFMono-Regular, Menlo, monospace }
@media print {
  @page { margin: 14mm }
  :root { --back: #fff } main { max-width: none; padding: 0 } body { font-size: 12px; print-color-adjust: exact }
  .tile, figure, tr, .split, dl > div { break-inside: avoid } h2 { break-after: avoid }
}
"""

_SCRIPT = """
for (const chart of document.querySelectorAll(".chart")) {
  const rows = JSON.parse(chart.dataset.rows), cursor = chart.querySelector(".cursor");
  const cells = [...chart.closest("figure").querySelectorAll("[data-value]")];
  const usual = cells.map(cell => cell.textContent);
  const show = texts => cells.forEach((cell, index) => cell.textContent = texts[index]);
  chart.onpointermove = event => {
    const box = chart.getBoundingClientRect(), at = 100 * (event.clientX - box.left) / box.width;
    const [place, texts] = rows.reduce((one, other) => Math.abs(other[0] - at) < Math.abs(one[0] - at) ? other : one);
    cursor.setAttribute("x1", place + "%");
    cursor.setAttribute("x2", place + "%");
    chart.classList.add("on");
    show(texts);
  };
  chart.onpointerleave = () => { chart.classList.remove("on"); show(usual); };
}
"""
