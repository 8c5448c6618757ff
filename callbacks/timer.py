"""Timer: ends the run after a time."""

from __future__ import annotations

import re
import time

from callbacks.arguments import stored_number
from callbacks.base import Callback, Metrics, Run
from callbacks.types import JsonObject

# Each number may be left out. So the empty text matches, too; it has no seconds, and is refused.
_SPAN = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms"), re.ASCII)


class Timer(Callback):
    """Stops the run, with a checkpoint, when it has taken `max_duration`.

    The time of earlier attempts counts, up to the checkpoint from which the run continues. The time is checked once a
    second, between compiled calls; an evaluation is not interrupted.

    Args:
        max_duration: numbers of d, h, m and s, in this order, such as `"2h30m"`, `"90s"`, `"1.5d"`.
    """

    every = "1s"

    def __init__(self, max_duration: str) -> None:
        match = _SPAN.fullmatch(max_duration) if isinstance(max_duration, str) else None
        self.seconds = 0.0
        if match is not None:
            for number, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True):
                self.seconds += float(number or 0) * unit
        if not self.seconds:
            raise ValueError(f'Timer(max_duration={max_duration!r}): give a time > 0 like "2h30m", "90s" or "1.5d"')
        self.max_duration = max_duration
        self._before = 0.0  # of earlier attempts
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, earlier attempts included."""
        return self._before + time.monotonic() - self._start

    def on_setup(self, run: Run) -> None:
        self._before = 0.0
        self._start = time.monotonic()

    def on_fit_start(self, run: Run) -> None:
        if self.elapsed >= self.seconds:
            run.stop(f"the run has taken its max_duration of {self.max_duration}")

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self.on_fit_start(run)

    on_eval_end = on_steps_end

    def state_dict(self) -> JsonObject:
        return {"seconds": self.elapsed}

    def load_state_dict(self, state: JsonObject) -> None:
        # Only that of earlier attempts: `on_setup` has started the clock of this one.
        self._before = stored_number(state, "seconds")
