"""Points: the metrics of a journal's lines, under names and at times that MLflow takes."""

from __future__ import annotations

import hashlib
import posixpath
import re
from typing import Any

_KEY_LENGTH = 250


def points(entry: dict[str, Any]) -> list[tuple[str, float, int, int]]:
    """The metric points of a line of a journal: name in MLflow, value, time in ms, step. Nonsense has none."""
    event, metrics, step = entry.get("event"), entry.get("metrics"), entry.get("step")
    if not isinstance(metrics, dict) or not isinstance(step, int):
        return []
    prefix = "step/" if event == "steps_end" else ""
    if event == "epoch_end":  # those of the evaluation had an event of their own
        metrics = {name: value for name, value in metrics.items() if not name.startswith("eval_")}
    elif event not in ("steps_end", "eval_end", "system"):
        return []
    try:
        return [(prefix + name, float(value), milliseconds(entry), step) for name, value in metrics.items()]
    except (TypeError, ValueError, OverflowError):
        return []


def key(name: str) -> str:
    """A name as MLflow takes it. One that had to be changed ends in a hash of the whole, so that no two become one."""
    text = re.sub(r"[^/\w.\- :]", "_", name)
    if posixpath.normpath(text) != text or text.startswith((".", "/")):  # it would be another one as a path
        text = text.replace("/", "_").lstrip(".") or "_"
    if text == name and len(name) <= _KEY_LENGTH:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{text[: _KEY_LENGTH - 9]}-{digest}"


def milliseconds(entry: dict[str, Any]) -> int:
    """The time of a line of a journal; 0 where it has none."""
    try:
        return int(entry["time"] * 1000)
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0
