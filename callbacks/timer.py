"""Timer: ends the run when it has taken so long."""

from __future__ import annotations

import re
import time
from typing import Any

from callbacks.base import Callback, Metrics, Run

_SPAN = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"), re.ASCII)


class Timer(Callback):
    """Stops the run politely, with a checkpoint, when it has taken `max_duration`.

    The time of earlier attempts at the run counts, up to the checkpoint from which it goes on. It is looked at once a
    second, between compiled calls; an evaluation under way comes to its end first.

    Args:
        max_duration: such as `"2h30m"`, `"90s"`, `"1.5d"`: numbers of d, h, m and s, in this order.
    """

    every = "1s"

    def __init__(self, max_duration: str) -> None:
        found = _SPAN.fullmatch(max_duration) if isinstance(max_duration, str) else None
        parts = [float(part or 0) for part in found.groups()] if found else []
        self.seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
        if not self.seconds:
            raise ValueError(f'Timer(max_duration={max_duration!r}): give a time > 0 like "2h30m", "90s" or "1.5d"')
        self.max_duration = max_duration
        self._before, self._begun = 0.0, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, with its earlier attempts."""
        return self._before + time.monotonic() - self._begun

    def on_setup(self, run: Run) -> None:
        self._before, self._begun = 0.0, time.monotonic()

    def on_fit_start(self, run: Run) -> None:
        self._look(run)

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self._look(run)

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self._look(run)

    def _look(self, run: Run) -> None:
        if self.elapsed >= self.seconds:
            run.stop(f"the run has taken its max_duration of {self.max_duration}")

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.elapsed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = state["seconds"]
