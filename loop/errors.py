"""The errors that tfloop raises by itself, and the exit code of each."""

FAILED, BAD_INPUT, PREEMPTED = 1, 2, 75
"""Exit codes beside 0: training failed, bad usage or input, stopped by a signal after saving."""


class UsageError(ValueError):
    """Something handed in is wrong: the message names the thing, the value and the fix. Exit code 2."""


class TrainingError(RuntimeError):
    """Training, or a tool, could not go on, for a reason in the data, the numbers, or outside. Exit code 1."""


class RegroupError(Exception):
    """In an elastic job, workers have come or are to go, and all have agreed to form anew: no failure."""


class PeerError(TrainingError):
    """Another worker failed; the message names its rank and its error. Exit code 1."""
