"""`tfloop tail`: the events of a run as lines, also while it trains."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from callbacks.base import shown_status
from callbacks.error_text import recorded
from callbacks.run_record.record import entries, read, under_way
from callbacks.run_record.redaction import mask
from callbacks.run_record.values import as_list
from loop.checkpoint.store import address
from loop.commands import terminal

_POLL = 0.25  # seconds between two looks at a journal
_COLORS = {"exception": "red", "worker_gone": "red", "eval_end": "cyan"}
_WITHIN_EPOCHS = ("epoch_start", "steps_end", "eval_end", "epoch_end")
_UNSEEN = ("call", "system")
_SHOWN = ("checkpoint", "path", "status", "reason", "error", "worker", "how", "verdict")
"""The entries of an event without metrics that are shown, in this order."""


def tail(path: Path, last: int, follow: bool) -> Iterator[str]:
    """The last events of a run as lines; with `follow`, also each new one, until the run ends."""
    alive = _is_under_way(path)
    recent, offset = _news(path, 0)
    yield from deque(recent, maxlen=min(last, sys.maxsize))  # `deque` takes no greater number
    while follow and alive:
        time.sleep(_POLL)
        alive = _is_under_way(path)  # asked before reading: what is written until then is read below
        recent, offset = _news(path, offset)
        yield from recent
    if follow:
        record = read(path, whole=False)
        how = shown_status(record.status) or "over"
        yield terminal.colored(f"{how} at step {record.steps:,}", terminal.STATUS_COLORS.get(record.status))


def _is_under_way(path: Path) -> bool:
    """Whether a run trains. A copy of a run in a store is brought up to date."""
    url = address.url_of_copy(path)
    if url is None:
        return under_way(path)
    from loop.checkpoint.store import copies  # which loads NumPy

    alive = copies.is_under_way(url)
    copies.copy(url, checkpoints=False)
    return alive


def _news(path: Path, offset: int) -> tuple[list[str], int]:
    """The events of a journal from byte `offset` on, as lines for the terminal, and the offset after them."""
    texts = []
    for entry, end in entries(path, offset):
        offset = end  # also after lines that aren't shown
        text = event_line(entry)
        if text:
            texts.append(text)
    return texts, offset


def event_line(entry: Mapping[str, object]) -> str:
    """An entry of a journal as a line for the terminal; "": it isn't an event, or one that isn't shown."""
    event = entry.get("event")
    stamp = entry.get("time")
    if not isinstance(event, str) or event in _UNSEEN:
        return ""
    # A damaged journal may hold any number, and a date exists only for some.
    if not isinstance(stamp, int | float) or not 0 <= stamp < 1e11:
        return ""
    color = terminal.STATUS_COLORS.get(str(entry.get("status")), _COLORS.get(event))
    name = terminal.colored(event.ljust(11), color)
    line = f"{terminal.when(stamp)[11:]}  {_position(entry)}  {name}  {mask(_message(entry))}".rstrip()
    return "\n".join([line, *(f"  {mask(str(part))}" for part in as_list(entry.get("text")))])


def _position(entry: Mapping[str, object]) -> str:
    """The step of an event; also its epoch, if the event belongs to one."""
    step = entry.get("step")
    epoch = entry.get("epoch")
    at = f"step {step if isinstance(step, int) else '?':>6}"
    if entry["event"] in _WITHIN_EPOCHS and isinstance(epoch, int):
        return f"{at}  epoch {epoch + 1:<3}"
    return at + " " * 11  # as wide as the epoch of another line


def _message(entry: Mapping[str, object]) -> str:
    """The content of an event: its metrics, or the entries that matter for this kind of event."""
    metrics = entry.get("metrics")
    about = entry.get("about")
    if isinstance(metrics, dict):
        return "  ".join(f"{name} {_short(value)}" for name, value in metrics.items())
    if entry["event"] == "fit_start" and isinstance(about, dict):
        replicas = terminal.counted(about.get("replicas"), "replica")
        return f"{about.get('task')} on {about.get('backend')}, {replicas}"
    if entry["event"] == "restore":
        return str(entry.get("checkpoint") or "from the start")
    texts = []
    for name in _SHOWN:
        if entry.get(name):
            # Both leave other texts as they are. Masked first: a secret that was cut would not be known as one.
            texts.append(recorded(mask(shown_status(str(entry[name])))))
    return "  ".join(texts)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
