"""The lines that tell of epochs: aligned, of whole words, the most important metrics first, and not too many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from callbacks.formats import number

FEW_EPOCHS = 20
"""A run of at most so many epochs has a line for each of them, however fast they are."""
_NARROWEST = 6  # characters of a value at least: most values have four digits and a point


class EpochLines:
    """Makes the line of an epoch from the state that `Progress` tells, and holds back those that come too fast.

    Args:
        seconds: the time between two lines at least, in a run of many epochs. The first and the last one always come.
    """

    def __init__(self, seconds: float = 3.0) -> None:
        self._seconds = seconds
        self._last = -math.inf
        self._held: dict[str, Any] | None = None
        self._widths: dict[str, int] = {}

    def take(self, state: dict[str, Any], now: float) -> dict[str, Any] | None:
        """Takes the state at the end of an epoch. Returns it if its line is due at `now`, in monotonic seconds."""
        few = state["epochs"] is not None and state["epochs"] <= FEW_EPOCHS
        last = state["epoch"] == state["epochs"] or state["step"] == state["total"]
        if few or last or now - self._last >= self._seconds:
            self._last, self._held = now, None
            return state
        self._held = state
        return None

    def held(self) -> dict[str, Any] | None:
        """The last epoch, if its line was held back."""
        state, self._held = self._held, None
        return state

    def text(self, state: dict[str, Any], columns: int | None = None) -> str:
        """The line of an epoch.

        Args:
            state: of the run at the end of the epoch.
            columns: the width of a terminal, into which the line has to fit; None: all metrics.
        """
        place = self._padded("epoch", epoch_of(state), epoch_of(state | {"epoch": state["epochs"] or 0}))
        step = self._padded("step", f"step {state['step']:,}", f"step {state['total'] or 0:,}")
        cells = [
            f"{name} {self._padded(f'metric {name}', number(value))}"
            for name, value in by_importance(state["metrics"]).items()
        ]
        whole = "  ".join([place, step, *cells]).rstrip()
        if columns is None or len(whole) <= columns:
            return whole
        return _fitted(place, cells, columns)

    def _padded(self, column: str, text: str, longest: str = "") -> str:
        """A text as wide as the widest of its column so far."""
        least = _NARROWEST if column.startswith("metric ") else 0
        width = self._widths[column] = max(self._widths.get(column, least), len(text), len(longest))
        return text.ljust(width)


def _fitted(place: str, cells: list[str], columns: int) -> str:
    """As many cells as fit into a line, and how many more there are."""
    text = place
    for taken, cell in enumerate(cells):
        left = len(cells) - taken - 1
        longer = f"{text}  {cell}"
        if len(f"{longer}  +{left} more" if left else longer.rstrip()) > columns:
            return f"{text}  +{len(cells) - taken} more"
        text = longer
    return text.rstrip()


def by_importance(metrics: Mapping[str, float]) -> dict[str, float]:
    """The losses first, then the other metrics, each of the evaluation before that of the training."""
    paired: dict[str, None] = {}
    for name in metrics:
        if name.endswith("loss"):
            paired.setdefault(name)
            paired.setdefault(f"eval_{name}")
    for name in metrics:
        if not name.startswith("eval_"):
            paired.setdefault(f"eval_{name}")
            paired.setdefault(name)
    return {name: metrics[name] for name in [*paired, *metrics] if name in metrics}


def epoch_of(state: Mapping[str, Any]) -> str:
    """Which epoch of how many."""
    return f"epoch {state['epoch']}" + (f"/{state['epochs']}" if state["epochs"] else "")


def numbers(metrics: Mapping[str, float]) -> str:
    """Metrics as people read them."""
    return "  ".join(f"{name} {number(value)}" for name, value in metrics.items())
