"""Points: the metrics in a journal's lines, and names, values and times as MLflow takes them."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping

from callbacks.base import of_training
from callbacks.run_record.redaction import mask, redact
from callbacks.types import Json, JsonObject

_KEY_LENGTH = 250
_VALUE_LENGTH = 6000  # of the 1 MB of a request: parameters are sent by tens, and may be \u escapes


Point = tuple[str, float, int, int]
"""A metric's name, its value, the time in ms, and the step."""


def points(entry: JsonObject) -> list[Point]:
    """The metric points of a line of a journal: name, value, time in ms, step. A malformed line has none."""
    event = entry.get("event")
    metrics = entry.get("metrics")
    step = entry.get("step")
    if not isinstance(metrics, dict) or not isinstance(step, int):
        return []
    # Set apart by name: means within an epoch and those of epochs can have the same step.
    prefix = "step/" if event == "steps_end" else ""
    if event == "epoch_end":
        metrics = of_training(metrics)  # those of the evaluation had a line of their own
    elif event not in ("steps_end", "eval_end", "system"):
        return []
    time = milliseconds(entry)
    try:
        return [(prefix + name, float(value), time, step) for name, value in metrics.items()]
    except (TypeError, ValueError, OverflowError):
        return []


def key(name: str) -> str:
    """A name as MLflow takes it. A changed name ends in a hash of the original, so that no two names become one."""
    text = re.sub(r"[^/\w.\- :]", "_", name)
    if posixpath.normpath(text) != text or text.startswith((".", "/")):  # as a path, it would mean another name
        text = text.replace("/", "_").lstrip(".") or "_"
    if text == name and len(name) <= _KEY_LENGTH:
        return name
    # A name from JSON may have lone surrogates, which UTF-8 refuses.
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{text[: _KEY_LENGTH - 9]}-{digest}"


def utf8(text: str) -> str:
    """A text with escapes for lone surrogates, which stand for the bytes of a path that aren't UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def milliseconds(entry: JsonObject) -> int:
    """The time of a line of a journal; 0 if it has none."""
    try:
        return int(entry["time"] * 1000)
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0


class Names:
    """Names and values as MLflow takes them. Remembers which ones it had to change."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._cut: dict[str, None] = {}

    def key(self, name: str) -> str:
        """The name that a metric or parameter has in MLflow; see `key`."""
        if name not in self._keys:
            self._keys[name] = key(name)
        return self._keys[name]

    def texts(self, values: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
        """Names with their values as texts, without secrets."""
        for name, value in redact(values).items():
            text = utf8(mask(str(value)))  # again: `redact` leaves values of other types than text as they are
            if len(text) > _VALUE_LENGTH:
                self._cut[name] = None
            yield self.key(name), text[:_VALUE_LENGTH]

    def changed(self) -> list[str]:
        """The names that had to be changed, or whose values were cut. Another thread may add names meanwhile."""
        # Copied in one step before it is walked through: a dict must not grow meanwhile.
        keys = list(self._keys.items())
        return [name for name, key in keys if name != key] + list(self._cut)
