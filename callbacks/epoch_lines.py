"""The lines of epochs: aligned, without cut words, the most important metrics first, and not too many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NotRequired, TypedDict

from callbacks.formats import number
from callbacks.types import JsonObject

FEW_EPOCHS = 20
"""A run of at most this many epochs has a line for each of them, however fast they are."""
_NARROWEST = 6  # characters of a value at least: most values have four digits and a point


class State(TypedDict):
    """What a line or a bar shows of a run, as JSON values: a worker relays it to its launcher.

    `status` and `why` belong to the end of the run alone; `epochs` and `total` are None where they aren't known.
    """

    kind: str
    metrics: dict[str, float]
    step: int
    total: int | None
    epoch: int
    epochs: int | None
    speed: float
    run: JsonObject
    directory: str
    status: NotRequired[str]
    why: NotRequired[str]


class EpochLines:
    """Makes the line of an epoch from a state of `Progress`, and holds lines back that come too fast.

    Args:
        seconds: the shortest time between two lines, in a run of many epochs. The first and the last line always come.
    """

    def __init__(self, seconds: float = 3.0) -> None:
        self._seconds = seconds
        self._last = -math.inf
        self._held: State | None = None
        self._widths: dict[str, int] = {}

    def take(self, state: State, now: float) -> State | None:
        """Takes the state at the end of an epoch. Returns it if its line is due at `now`, in monotonic seconds."""
        has_few_epochs = state["epochs"] is not None and state["epochs"] <= FEW_EPOCHS
        is_last = state["epoch"] == state["epochs"] or state["step"] == state["total"]
        if has_few_epochs or is_last or now - self._last >= self._seconds:
            self._last = now
            self._held = None
            return state
        self._held = state  # in place of an older one: if the run ends now, only the last epoch has a line
        return None

    def held(self) -> State | None:
        """The state of the last epoch, if its line was held back; then it is held no more."""
        state = self._held
        self._held = None
        return state

    def text(self, state: State, columns: int | None = None) -> str:
        """The line of an epoch; if it has to fit into so many columns of a terminal, without the last metrics."""
        # As wide as they will be in the last line, so that the columns stay where they are.
        epoch = self._padded("epoch", epoch_of(state), epoch_of(state | {"epoch": state["epochs"] or 0}))
        step = self._padded("step", f"step {state['step']:,}", f"step {state['total'] or 0:,}")
        cells = []
        for name, value in by_importance(state["metrics"]).items():
            # The prefix sets a metric named `step` apart from the column of steps.
            cells.append(f"{name} {self._padded(f'metric {name}', number(value))}")
        line = "  ".join([epoch, step, *cells]).rstrip()
        if columns is None or len(line) <= columns:
            return line
        return _fitted(epoch, cells, columns)

    def _padded(self, column: str, text: str, longest: str = "") -> str:
        """A text, padded to the greatest width of its column so far."""
        least = _NARROWEST if column.startswith("metric ") else 0
        self._widths[column] = max(self._widths.get(column, least), len(text), len(longest))
        return text.ljust(self._widths[column])


def _fitted(epoch: str, cells: list[str], columns: int) -> str:
    """The epoch, as many cells as fit into the line, and how many more there are."""
    line = epoch
    for index, cell in enumerate(cells):
        remaining = len(cells) - index - 1
        longer_line = f"{line}  {cell}"
        # The cell needs room for the remark after it, too, unless it is the last one.
        whole = f"{longer_line}  +{remaining} more" if remaining else longer_line.rstrip()
        if len(whole) > columns:
            return f"{line}  +{len(cells) - index} more"
        line = longer_line
    return line.rstrip()


def by_importance(metrics: Mapping[str, float]) -> dict[str, float]:
    """The losses first, then the other metrics, each one of the evaluation before the same one of the training."""
    order: dict[str, None] = {}  # a set in order; it may name metrics that there aren't
    for name in metrics:
        if name.endswith("loss"):
            order.setdefault(name)
            order.setdefault(f"eval_{name}")
    for name in metrics:
        if not name.startswith("eval_"):
            order.setdefault(f"eval_{name}")
            order.setdefault(name)
    order |= dict.fromkeys(metrics)  # those of the evaluation alone
    return {name: metrics[name] for name in order if name in metrics}


def epoch_of(state: State) -> str:
    """The number of the epoch, and of all epochs: "epoch 2/5"."""
    return f"epoch {state['epoch']}" + (f"/{state['epochs']}" if state["epochs"] else "")


def numbers(metrics: Mapping[str, float]) -> str:
    """Metrics as people read them."""
    return "  ".join(f"{name} {number(value)}" for name, value in metrics.items())
