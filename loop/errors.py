"""The errors that tfloop raises by itself, and the exit code of each."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """Within it, `sys.exit` is an error: a run would look finished that isn't, and other workers would wait for it.

    Raises:
        TrainingError: something within has called it; where.
    """
    try:
        yield
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if "typer" in Path(place.filename).parts:  # which answers a shell so, and minds a pipe that is closed
            raise
        raise TrainingError(
            f"{Path(place.filename).name}, line {place.lineno}, in {place.name}: sys.exit({error.code!r}) can't end a "
            "run: raise an error; or, in a callback, call run.stop(reason)"
        ) from error
