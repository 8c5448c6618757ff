"""Pace: how many steps the next compiled call makes."""

from __future__ import annotations

CALL_SECONDS = 0.25
"""How long a compiled call should take if no callback wants the host earlier, in seconds."""

FEW_STEPS = 8
"""A call makes at least so many slow steps, if they take no longer than `LONGEST_SECONDS`: within a call, one step's
first operations run beside the last ones of the step before, which leave cores idle."""

LONGEST_SECONDS = 1.0

MOST_STEPS = 1 << 31
"""The greatest number of steps of a call. An evaluation has fewer, so that the number would grow for ever."""


class Pace:
    """Finds the number of steps that take about `CALL_SECONDS`, or a few slow ones; or keeps to a given number."""

    def __init__(self, steps_per_call: int | str) -> None:
        self._auto = steps_per_call == "auto"
        self.steps = 1 if isinstance(steps_per_call, str) else steps_per_call
        self.calls = 0

    def record(self, steps: int, seconds: float) -> None:
        """Takes in how long a call took. The first one isn't a measure: it is traced and compiled."""
        self.calls += 1
        if not self._auto or self.calls == 1 or not steps:
            return
        rate = steps / max(seconds, 1e-9)  # a coarse clock may show no time at all
        fitting = max(int(CALL_SECONDS * rate), min(FEW_STEPS, int(LONGEST_SECONDS * rate)))
        # Grows carefully: a single step may have been lucky, or the clock coarse.
        self.steps = max(1, min(fitting, 16 * steps, MOST_STEPS))
