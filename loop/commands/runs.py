"""Runs: finds, lists, shows, compares, follows and removes runs by their directories. Imports no TensorFlow."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from callbacks.base import shown_status
from callbacks.metric_direction import lower_is_better
from callbacks.run_record.journal import jsonable
from callbacks.run_record.record import (
    ABOUT,
    LOCK,
    STATUSES,
    STEP,
    Record,
    begun,
    entries,
    is_run,
    printable,
    read,
    read_about,
    under_way,
)
from callbacks.run_record.redaction import mask
from loop.checkpoint.lock import locked
from loop.commands import terminal
from loop.errors import UsageError
from loop.options import BACKENDS, DEFAULTS, nearest

ROOT = Path("runs")
LATEST = "latest"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLUMNS = {"engine": "backend", "duration": "seconds"}
"""What a table calls otherwise than the record."""
_FIELDS = (
    "name", "task", "target", "status", "backend", "replicas", "workers", "steps", "epochs", "examples", "parameters",
    "seconds", "lives", "started",
)  # fmt: skip
_COLOURS = {"finished": "green", "running": "cyan", "failed": "red", "killed": "red"}
_POLL = 0.25  # seconds between two looks at a journal


def find(root: Path) -> list[Path]:
    """The run directories below `root`.

    Raises:
        UsageError: there is no such directory, though it isn't the default one.
    """
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and is_run(path))
    except FileNotFoundError:
        if root == ROOT:
            return []
        raise UsageError(f"--root {printable(str(root))}: there is no such directory") from None
    except OSError as error:
        raise UsageError(f"--root {printable(str(root))}: can't be read ({error.strerror})") from None


def locate(root: Path, text: str) -> Path:
    """The run directory that is meant by a name in `root`, the beginning of one, a path, or `latest`.

    Raises:
        UsageError: there is none, or more than one.
    """
    shown = printable(text)
    if not text:
        raise UsageError("the name of a run is empty: give one, or latest")
    if text not in (LATEST, ".", ".."):
        for path in (root / text, Path(text)):
            if is_run(path):
                return path
    if "/" in text or text in (".", ".."):
        raise UsageError(f"{shown} is no run directory: there is no run.json, and no journal")
    there = {path.name: path for path in find(root)}
    if not there:
        raise UsageError(f"{shown}: there are no runs in {printable(str(root))}: --root DIR says where they are")
    if text == LATEST:
        return max(there.values(), key=begun)
    meant = [name for name in there if name.startswith(text)]
    if len(meant) == 1:
        return there[meant[0]]
    if meant:
        some = ", ".join(map(printable, meant[:3])) + (", ..." if len(meant) > 3 else "")
        raise UsageError(f"{shown}: {len(meant)} runs begin so: {some}")
    close = difflib.get_close_matches(text, there, 1)
    hint = (
        f"did you mean {printable(close[0])!r}?" if close else f"the latest is {max(there.values(), key=begun).name!r}"
    )
    raise UsageError(f"{shown}: no run of that name in {printable(str(root))}; {hint}")


def named(text: str) -> Path:
    """What is meant by a path, the name of a run in `runs/`, the beginning of one, or `latest`.

    Raises:
        UsageError: there are runs, and none of this name.
    """
    path = Path(text)
    return path if path.exists() or "/" in text or not find(ROOT) else locate(ROOT, text)


def checkpointed(path: Path, option: str = "") -> Path:
    """The same path, if it is a checkpoint, or a run directory that has one.

    Raises:
        UsageError: it isn't.
    """
    from loop.checkpoint.checkpoint_files import MANIFEST, complete  # which loads NumPy

    if not os.path.lexists(path / MANIFEST) and not complete(path / "checkpoints"):
        raise UsageError(
            f"{option}{printable(str(path))}: no checkpoint there: give a run directory or a directory step-<8 digits>"
        )
    return path


# The table


def listed(root: Path, filters: Sequence[str], sort: str | None, metric: str | None) -> list[Record]:
    """The runs below `root` that pass all filters, sorted.

    Args:
        root: where they are.
        filters: texts such as `status=finished`, `eval_loss<0.3`: see `_Filter`.
        sort: a field, metric or hyperparameter; the other way round with a `-` before it; None: when they started.
        metric: the one that is to be shown; checked alone.

    Raises:
        UsageError: a filter, column, metric or value that makes no sense for these runs.
    """
    wanted = [_Filter(text) for text in filters]
    records = [read(path, whole=False) for path in find(root)]
    if records:
        if metric is not None:
            _known("--metric", metric, _metrics(records))
        keys = _keys(records)
        for each in wanted:
            each.check(records, keys)
    column = (sort or "started").removeprefix("-")
    column = _COLUMNS.get(column, column)
    if records and column not in keys:
        raise UsageError(f"--sort {printable(sort or '')}: the runs have nothing of that name{nearest(column, keys)}")
    passed = [each for each in records if all(test(each) for test in wanted)]
    having = [(_order(value(each, column)), each) for each in passed if value(each, column) is not None]
    having.sort(key=lambda pair: pair[0], reverse=(sort or "").startswith("-"))
    return [each for _, each in having] + [each for each in passed if value(each, column) is None]


def value(record: Record, key: str) -> Any:
    """What a run has of this name: a field, a hyperparameter, an option, or `_best` of a metric; else None."""
    if key in _FIELDS:
        found = getattr(record, key)
        return found if found != "" else None
    for values in (record.hyperparameters, record.options):
        if key in values:
            return values[key]
    return _best(record, key)


def _best(record: Record, metric: str) -> float | None:
    """The best value of a metric, or the last one where it isn't known what is best."""
    best = record.best(metric)
    return best[1] if best else record.last(metric)


def _keys(records: Iterable[Record]) -> list[str]:
    found = dict.fromkeys(_FIELDS)
    for each in records:
        found |= dict.fromkeys([*each.hyperparameters, *each.options, *each.curves])
    return list(found)


def _metrics(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(name for each in records for name in each.curves))


def _known(what: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        hint = nearest(name, names) if names else "; they have none yet"
        raise UsageError(f"{what} {printable(name)}: no metric of that name{hint}")


def _order(found: Any) -> tuple[bool, float, str]:
    """A key by which values of any kind can be sorted: numbers before texts."""
    if isinstance(found, int | float):
        return found != found, _real(found), ""
    return True, 0.0, str(found)


class _Filter:
    """A condition `KEY=VALUE`, or with `!=`, `<`, `<=`, `>`, `>=`."""

    _TESTS: dict[str, Callable[[Any, Any], bool]] = {
        "=": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    }  # fmt: skip

    def __init__(self, text: str) -> None:
        found = re.fullmatch(r"\s*([^=<>!]+?)\s*(!=|<=|>=|==|=|<|>)\s*(.*?)\s*", text, re.DOTALL)
        if not found:
            raise UsageError(f"--filter {printable(text)}: give KEY=VALUE, or with !=, <, <=, >, >=")
        self.text = printable(text)
        self.key, self.sign, self.wanted = _COLUMNS.get(found[1], found[1]), found[2].replace("==", "="), found[3]
        if self.key == "status" and self.wanted == shown_status("preempted"):
            self.wanted = "preempted"

    def check(self, records: Sequence[Record], keys: Sequence[str]) -> None:
        """Refuses a key that no run has, and a value that none can have."""
        if self.key not in keys:
            raise UsageError(f"--filter {self.text}: the runs have nothing of that name{nearest(self.key, keys)}")
        allowed = {"status": STATUSES, "backend": BACKENDS, "task": ()}.get(self.key)
        if allowed is not None and self.sign in ("=", "!="):
            names = dict.fromkeys([*allowed, *(str(value(each, self.key) or "") for each in records)])
            if self.wanted not in names:
                raise UsageError(f"--filter {self.text}: no {self.key} {self.wanted!r}{nearest(self.wanted, names)}")
        kinds = {_kind(found) for each in records if (found := value(each, self.key)) is not None}
        if self.key != "started" and kinds == {float} and not _is_number(self.wanted):
            raise UsageError(f"--filter {self.text}: {self.wanted!r} is no number")

    def __call__(self, record: Record) -> bool:
        found, wanted = value(record, self.key), self.wanted
        if found is None:
            return self.wanted.lower() in ("none", "") if self.sign == "=" else False
        if self.key == "started":
            return self._TESTS[self.sign](terminal.when(found)[: len(wanted)], wanted.replace("T", " ").rstrip("Z"))
        if _kind(found) is float:
            return _is_number(wanted) and self._TESTS[self.sign](_real(found), float(wanted))
        return self._TESTS[self.sign](str(found), wanted.capitalize() if isinstance(found, bool) else wanted)


def _kind(found: Any) -> type:
    return float if isinstance(found, int | float) and not isinstance(found, bool) else str


def _real(found: int | float) -> float:
    try:
        return float(found)
    except OverflowError:
        return math.inf if found > 0 else -math.inf


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def lines(records: Sequence[Record], metric: str | None) -> list[str]:
    """The table of runs."""
    head = ["run", "status", "engine", "steps", f"best {metric}" if metric else "best", "duration", "started (UTC)"]
    rows = [head, *([*_row(each, metric)] for each in records)]
    return _titled(terminal.table(rows, right=(3, 5), spare=(6, 2, 5, 3, 4)))


def _row(record: Record, metric: str | None) -> Iterator[str]:
    name = metric or record.metric
    best = _best(record, name)
    yield terminal.cut(record.name, 60)
    yield terminal.coloured(shown_status(record.status), _COLOURS.get(record.status))
    yield record.backend + ("" if record.replicas is None else f" x{record.replicas}")
    yield f"{record.steps:,}" + (
        f"/{record.total_steps:,}" if record.status != "finished" and record.total_steps else ""
    )
    yield "" if best is None else f"{best:.4g}" + ("" if metric else f" {name}")
    yield terminal.duration(record.seconds)
    yield terminal.when(record.started)[:16]


def as_json(records: Iterable[Record]) -> str:
    """The runs as a JSON list: what is known without their curves."""
    return json.dumps([jsonable(_about(each)) for each in records])


def _about(record: Record) -> dict[str, Any]:
    names = (*_FIELDS, "reason", "total_steps", "hyperparameters", "options", "versions", "machine")
    best = {name: record.best(name) for name in record.curves}
    return {name: getattr(record, name) for name in names} | {
        "path": printable(str(record.path.absolute())),
        "best": {name: {"step": point[0], "value": point[1]} for name, point in best.items() if point},
        "last": {name: record.last(name) for name in record.curves},
    }


# One run


def shown_as_json(record: Record) -> str:
    """All of a run as JSON."""
    return json.dumps(jsonable(dataclasses.asdict(record) | {"path": printable(str(record.path.absolute()))}))


def show(record: Record, metric: str | None = None) -> list[str]:
    """A picture of a run: what it is, its curves, checkpoints, where its time went, what went wrong.

    Raises:
        UsageError: it has no such metric.
    """
    if metric is not None:
        _known("--metric", metric, list(record.curves))
    of = f" of {record.total_steps:,}" if record.total_steps and record.total_steps != record.steps else ""
    done = f"{record.steps:,}{of} steps, {_counted(record.epochs, 'epoch')}, {record.examples:,} examples"
    lives = f" in {record.lives} lives" if record.lives > 1 else ""
    status = terminal.coloured(shown_status(record.status) or "?", _COLOURS.get(record.status), bold=True)
    why = f" ({record.reason})" if record.reason else ""
    since = "" if record.started is None else f", from {terminal.when(record.started)} UTC"
    found = [
        terminal.coloured(record.name, None, bold=True),
        f"{status}{why}: {done}; {terminal.duration(record.seconds)}{lives}{since}",
    ]
    places = _counted(record.replicas, "replica"), _counted(record.workers, "worker")
    changed = {name: each for name, each in record.options.items() if DEFAULTS.get(name) != each and name != "backend"}
    size = "" if record.parameters is None else f", {record.parameters:,} parameters"
    facts = {
        "task": f"{record.target or record.task}{size}",
        "engine": record.backend and f"{record.backend}, {places[0]} on {places[1]}",
        "fields": _pairs(record.hyperparameters),
        "options": _pairs(changed),
        "versions": _pairs(record.versions),
    }
    found += terminal.table([[name, text] for name, text in facts.items() if text])
    for title, curves in _groups(record, metric):
        found += ["", *terminal.plot(title, curves)]
    if record.curves:
        rows = [["metric", "last", "best", "at step"]]
        for name in record.curves:
            if not name.startswith(STEP):
                step, best = record.best(name) or ("", None)
                numbers = ["" if each is None else f"{each:.6g}" for each in (record.last(name), best)]
                rows.append([name, *numbers, f"{step}"])
        found += ["", *_titled(terminal.table(rows, right=(1, 2, 3)))]
    if record.checkpoints:
        rows = [["checkpoint", "saved for", "size", "time"]]
        for each in record.checkpoints:
            rows.append([each.name, each.reason, terminal.size(each.bytes), terminal.when(each.time)])
        found += ["", *_titled(terminal.table(rows, right=(2,)))]
    if record.split:
        found += ["", *_titled(["where the time went"]), *terminal.bars(record.split)]
    if record.verdict:
        found += ["", *record.verdict]
    if record.faults:
        rows = [[terminal.when(each.time), f"step {each.step:,}", each.text] for each in record.faults]
        found += ["", *_titled(["what it went through"]), *terminal.table(rows, right=(1,))]
    return found


def _counted(count: Any, what: str) -> str:
    return f"{'?' if count is None else count} {what}{'s' * (count != 1)}"


def _titled(text: list[str]) -> list[str]:
    return [terminal.coloured(text[0], None, bold=True), *text[1:]]


def _pairs(values: dict[str, Any]) -> str:
    return "  ".join(f"{name}={each}" for name, each in values.items())


def _groups(record: Record, metric: str | None, most: int = 2) -> Iterator[tuple[str, dict[str, terminal.Points]]]:
    """Curves that belong in one plot, with its title: a metric of training, within epochs, and of the evaluation."""
    names = dict.fromkeys(name.removeprefix(STEP).removeprefix("eval_") for name in record.curves)
    base = metric.removeprefix(STEP).removeprefix("eval_") if metric else None
    chosen = [base] if base else sorted(names, key=lambda name: name != "loss")[:most]
    for name in chosen:
        yield name, {key: record.curves[key] for key in (STEP + name, name, "eval_" + name) if key in record.curves}


# Several runs


def compare(records: Sequence[Record], metric: str | None = None) -> list[str]:
    """What runs differ in, what came out, and one curve of each in one plot.

    Raises:
        UsageError: fewer than two, or more than there are letters; no run has the metric.
    """
    if not 2 <= len(records) <= len(LETTERS):
        raise UsageError(f"{_counted(len(records), 'run')} to compare: give 2 to {len(LETTERS)}")
    if metric is not None:
        _known("--metric", metric, _metrics(records))
    letters = LETTERS[: len(records)]
    found = [f"{letter}  {each.name}" for letter, each in zip(letters, records, strict=True)]
    rows = [["differs", *letters]]
    for group in ("", "hyperparameters", "options", "versions", "machine"):
        tables = [getattr(each, group) if group else _topology(each) for each in records]
        for name in dict.fromkeys(name for each in tables for name in each):
            cells = ["-" if name not in each else terminal.cut(f"{each[name]}", 120) for each in tables]
            if len(set(cells)) > 1:
                label = {"": "", "hyperparameters": "", "options": "option ", "versions": "version "}.get(group, "")
                rows.append([label + name, *cells])
    found += ["", *_titled(terminal.fitted(rows))] if len(rows) > 1 else ["", "they differ in nothing"]
    rows = [["best", *letters]]
    for name in _metrics(records):
        if not name.startswith(STEP) or name == metric:
            values, less = [_best(each, name) for each in records], lower_is_better(name)
            having = [each for each in values if each is not None and math.isfinite(each)]
            top = None if less is None else (min if less else max)(having, default=None)
            cells = ["-" if each is None else f"{each:.6g}" + ("*" if each == top else " ") for each in values]
            rows.append([name, *cells])
    found += ["", *_titled(terminal.fitted(rows, right=range(1, len(rows[0]))))]
    name = metric or next((each.metric for each in records if each.metric), "")
    if name:
        curves = {letter: each.curves.get(name, []) for letter, each in zip(letters, records, strict=True)}
        found += ["", *terminal.plot(name, curves)]
    return found


def _topology(record: Record) -> dict[str, Any]:
    names = ("task", "target", "status", "backend", "replicas", "workers", "parameters", "steps", "epochs", "examples")
    found = {name: found for name in names if (found := getattr(record, name)) not in (None, "")}
    if record.status:
        found["status"] = shown_status(record.status)
    return found | {"time": terminal.duration(record.seconds)}


# Removing


def removable(path: Path, root: Path) -> None:
    """Checks that a directory may be removed.

    Raises:
        UsageError: it isn't a run's alone, or the run is under way.
    """
    shown = printable(str(path))
    about = read_about(path)
    if path.is_symlink():
        raise UsageError(f"{shown} is a link: give the directory {printable(os.path.realpath(path))} itself")
    if not {"task", "status", "hyperparameters"} <= set(about):
        raise UsageError(f"{shown} has no run.json of a run: it may be anything, remove it yourself")
    whole = path.resolve()
    if any(whole == each or whole in each.parents for each in (Path.cwd(), Path.home(), root.resolve())):
        raise UsageError(f"{shown} holds where you are, or all runs: remove what is of the run in it yourself")
    if any(is_run(each) for each in path.iterdir() if each.is_dir() and not each.is_symlink()):
        raise UsageError(f"{shown} holds other runs: remove them first")
    if (path / LOCK).is_symlink() or under_way(path):
        raise UsageError(f"{shown}: the run is under way: end it first")


def size(path: Path) -> int:
    """The bytes of all files below a directory; links aren't followed."""
    return sum((Path(where) / name).lstat().st_size for where, _, names in os.walk(path) for name in names)


def remove(path: Path) -> list[str]:
    """Removes a run directory, its `run.json` last: what is left of it can be removed later.

    Returns:
        What could not be removed, and why.
    """
    left: list[str] = []

    def note(action: Any, name: str, error: Any) -> None:
        if not isinstance(error[1], FileNotFoundError):
            left.append(f"{printable(str(name))} ({getattr(error[1], 'strerror', None) or error[1]})")

    try:
        with locked(path):
            for each in sorted(path.iterdir(), key=lambda each: each.name == ABOUT):
                if left and each.name == ABOUT:
                    return left
                if each.is_dir() and not each.is_symlink():
                    shutil.rmtree(each, onerror=note)
                else:
                    each.unlink(missing_ok=True)
        path.rmdir()
    except OSError as error:
        note(None, error.filename or str(path), (None, error))
    return left


# Following


def tail(path: Path, last: int, follow: bool) -> Iterator[str]:
    """The events of a run as lines: the last so many that there are, then those that come, until the run ends."""
    alive = under_way(path)
    recent, offset = _news(path, 0)
    yield from deque(recent, maxlen=min(last, sys.maxsize))
    while follow and alive:
        time.sleep(_POLL)
        alive = under_way(path)  # asked before reading: what is written until then is read below
        recent, offset = _news(path, offset)
        yield from recent
    if follow:
        record = read(path, whole=False)
        how = shown_status(record.status) or "over"
        yield terminal.coloured(f"{how} at step {record.steps:,}", _COLOURS.get(record.status))


def _news(path: Path, offset: int) -> tuple[list[str], int]:
    """The events of a journal from byte `offset` on, as people read them, and the offset behind them."""
    texts = []
    for entry, behind in entries(path, offset):
        texts.append(told(entry))
        offset = behind
    return [text for text in texts if text], offset


def told(entry: dict[str, Any]) -> str:
    """A line of a journal as people read it; "" for what is none, and for where the time of a call went."""
    event, step, epoch, stamp = (entry.get(name) for name in ("event", "step", "epoch", "time"))
    if not isinstance(event, str) or event == "call" or not isinstance(stamp, int | float) or not 0 <= stamp < 1e11:
        return ""
    at = f"{terminal.when(stamp)[11:]}  step {step if isinstance(step, int) else '?':>6}"
    metrics, about, text = entry.get("metrics"), entry.get("about"), entry.get("text")
    if isinstance(metrics, dict):
        what = "  ".join(f"{name} {_short(each)}" for name, each in metrics.items())
    elif event == "fit_start" and isinstance(about, dict):
        what = f"{about.get('task')} on {about.get('backend')}, {_counted(about.get('replicas'), 'replica')}"
    elif event == "restore":
        what = str(entry.get("checkpoint") or "from the start")
    else:
        told_of = ("checkpoint", "path", "status", "reason", "error", "worker", "how", "verdict")
        what = "  ".join(shown_status(str(entry[name])) for name in told_of if entry.get(name))
    colour = {"exception": "red", "worker_gone": "red", "eval_end": "cyan"}.get(event)
    colour = _COLOURS.get(str(entry.get("status")), colour)
    within = event in ("epoch_start", "steps_end", "eval_end", "epoch_end")
    at += f"  epoch {epoch + 1:<3}" if within and isinstance(epoch, int) else " " * 11
    line = f"{at}  {terminal.coloured(event.ljust(11), colour)}  {mask(what)}".rstrip()
    return "\n".join([line, *(f"  {mask(str(each))}" for each in text)]) if isinstance(text, list) else line


def _short(found: Any) -> str:
    return f"{found:.4g}" if isinstance(found, float) else str(found)
