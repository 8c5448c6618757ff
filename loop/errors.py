"""The errors that tfloop raises by itself, and the exit code of each."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

FAILED, BAD_INPUT, PREEMPTED = 1, 2, 75
"""Exit codes beside 0: training failed, bad usage or input, stopped by a signal after saving."""


class UsageError(ValueError):
    """An argument, an option or an input is wrong. The message names it, its value and the fix. Exit code 2."""


class TrainingError(RuntimeError):
    """Training, or a command, can't continue, because of the data, the numbers, or the environment. Exit code 1."""


class RegroupError(Exception):
    """The workers of an elastic job form anew, because some have joined or leave. It isn't a failure."""


class PeerError(TrainingError):
    """Another worker failed; the message names its rank and its error. Exit code 1."""


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """Makes `sys.exit` an error: the run would look finished, and other workers would wait for this one.

    Raises:
        TrainingError: code within has called it; the message says where.
    """
    try:
        yield
    except SystemExit as error:
        caller = traceback.extract_tb(error.__traceback__)[-1]
        if "typer" in Path(caller.filename).parts:  # it exits after completing a shell's words, or for a closed pipe
            raise
        raise TrainingError(
            f"{Path(caller.filename).name}, line {caller.lineno}, in {caller.name}: sys.exit({error.code!r}) can't end "
            "a run: raise an error; or, in a callback, call run.stop(reason)"
        ) from error
