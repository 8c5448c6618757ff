"""The errors that tfloop raises by itself, and the exit code of each."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from callbacks.error_text import LONGEST, in_a_line

FAILED, BAD_INPUT, PREEMPTED = 1, 2, 75
"""Exit codes beside 0: training failed, bad usage or input, stopped by a signal after saving."""

OUT_OF_MEMORY = "out of memory in step"
"""How the message of an `OutOfMemoryError` begins."""


class _ShownError(Exception):
    """An error whose message says what to do: a notebook shows it without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UsageError(_ShownError, ValueError):
    """An argument, an option or an input is wrong. The message names it, its value and the fix. Exit code 2."""


class TrainingError(_ShownError, RuntimeError):
    """Training, or a command, can't continue, because of the data, the numbers, or the environment. Exit code 1."""


class OutOfMemoryError(TrainingError):
    """A step has found too little memory; the message says what takes it. Exit code 1."""


class RegroupError(Exception):
    """The workers of an elastic job form anew, because some have joined or leave. It isn't a failure."""


class PeerError(TrainingError):
    """Another worker failed; the message names its rank and its error. Exit code 1."""


class PeerUsageError(UsageError):
    """Another worker has found a `UsageError`; the message names its rank and its error. Exit code 2."""


class ReplicaWarning(UserWarning):
    """A task whose numbers depend on the number of replicas; the message says by what."""


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
    """Makes `sys.exit` an error: the run would look finished, and other workers would wait for this one.

    Raises:
        TrainingError: code within has called it; the message says where.
    """
    try:
        yield
    except SystemExit as error:
        caller = traceback.extract_tb(error.__traceback__)[-1]  # the innermost frame: the code that called `sys.exit`
        if "typer" in Path(caller.filename).parts:  # it exits after completing a shell's words, or for a closed pipe
            raise
        raise TrainingError(
            f"{Path(caller.filename).name}, line {caller.lineno}, in {caller.name}: sys.exit({error.code!r}) can't end "
            "a run: raise an error; or, in a callback, call run.stop(reason)"
        ) from error


def named(error: BaseException) -> str:
    """The type and the message of an error in one line; the type alone, if it has no message."""
    kind = type(error).__name__
    message = message_of(error)
    return kind if message == kind else f"{kind}: {message}"


def message_of(error: BaseException) -> str:
    """The message of an error in one line, without what TensorFlow, AutoGraph and Keras put around it.

    An error without a message, such as most of type `MemoryError`, has the name of its type instead.
    """
    if isinstance(error, KeyError) and error.args:  # its text is the key alone
        return f"no {error.args[0]!r:.{LONGEST}}"
    return in_a_line(text_of(error)) or type(error).__name__


def text_of(error: BaseException) -> str:
    """The text of an error; of one whose own `__str__` raises, why it has none."""
    try:
        return str(error)
    except Exception as broken:
        return f"its __str__ raises {type(broken).__name__}"
