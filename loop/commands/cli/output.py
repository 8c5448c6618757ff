"""What commands print: results, stages, and how a command has ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import typer

from callbacks.progress import stages
from callbacks.run_record.journal import jsonable
from callbacks.run_record.redaction import redact, tell
from loop.commands import command_line, terminal
from loop.errors import FAILED, PREEMPTED
from loop.launch import signals

if TYPE_CHECKING:
    from rich.console import RenderableType

Line: TypeAlias = "RenderableType | tuple[str, bool | None]"
"""What a command prints; of a text, also whether it is good or bad news."""


def finish(
    code: int, error: str, result: Any, as_json: bool, lines: Callable[[Any], Iterable[Line]], page: str = ""
) -> NoReturn:
    """Prints how a command has ended, and where a browser shows its run; ends with this exit code."""
    if error:
        command_line.say(error)
    if result is not None:
        show(result, lines(result), as_json)
        if page and code == 0 and sys.stderr.isatty():  # not in a log
            tell(f"see it in the browser: {page}")
    raise typer.Exit(code)


def show(result: object, lines: Iterable[Line], as_json: bool) -> None:
    """Prints a result as JSON, or its lines: what is good in green, what is bad in red."""
    if as_json:
        # It may hold secrets, and numbers that JSON doesn't have.
        print(json.dumps(jsonable(redact(result))))
    else:
        terminal.write(_in_color(line) for line in lines)


def end(is_good: bool) -> NoReturn:
    """Ends a command that has shown its result, with the exit code for good or bad news."""
    raise typer.Exit(0 if is_good else FAILED)


def _in_color(line: Line) -> RenderableType:
    if not isinstance(line, tuple):
        return line
    text, is_good = line
    if is_good is None:
        return text
    return terminal.colored(text, "green" if is_good else "red")


@contextlib.contextmanager
def shown_stages(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the next stage of a command, also while TensorFlow's output is hidden."""
    # A copy of stderr, because `quiet_start` turns the descriptor itself elsewhere.
    stderr = os.fdopen(os.dup(2), "w")
    try:
        with stages(total, stderr) as show_next:
            yield show_next
    finally:
        with contextlib.suppress(OSError):  # on a full disk, closing writes the rest once more, and fails
            stderr.close()


@contextlib.contextmanager
def stopped_clean(left: str) -> Iterator[None]:
    """Within it, a signal ends a command after the processes that it has started; prints what is left behind."""
    try:
        with signals.interrupting(always=[signal.SIGINT]):  # which background jobs of a shell ignore
            yield
    except KeyboardInterrupt:
        tell(f"stopped: {left}")
        raise typer.Exit(PREEMPTED) from None
