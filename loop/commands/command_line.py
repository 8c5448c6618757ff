"""Reads what was typed; and reports why a command has failed, in one line and with its exit code."""

from __future__ import annotations

import contextlib
import difflib
import errno
import itertools
import os
import re
import reprlib
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from callbacks import Callback, EvaluateBeside, Schedule
from callbacks.files import FULL, FileError, MovedError, hidden_name, replacing
from callbacks.nearest import nearest
from callbacks.run_record.redaction import tell
from loop.errors import BAD_INPUT, FAILED, TrainingError, UsageError
from loop.launch import explain, worker
from loop.launch.backend_choice import MOST_WORKERS
from loop.launch.environment import JOB

_OF_PARSER = {
    r"^Option '(.*)' does not take a value\.$": r"\1 takes no value: give it alone, or leave it out",
    r"^Missing argument '(.*)'\.$": r"\1 is missing: --help says what to give",
    r"^Got unexpected extra argument\(s\) \((.*)\)$": r"\1: the command takes no more arguments: leave it out",
    r"^Option '(.*)' requires an argument\.$": r"\1 is without its value: give one after it",
    r"(?<=: )should be a valid integer.*$": "give a whole number",
    r"(?<=: )should be a valid number.*$": "give a number",
    r"(?<=: )should be greater than or equal to (\S+)$": r"give a number >= \1",
    r"(?<=: )should be less than or equal to (\S+)$": r"give a number <= \1",
}
"""What the parser of the command line says, and what tfloop says instead."""
_PAUSE = 1.0
"""Seconds between two looks at the main thread, and seconds that other threads have to end before they are named."""


def check(words: Sequence[str]) -> None:
    """Refuses words that are wrong for any command, such as an empty value: that of a shell variable that isn't set.

    Raises:
        UsageError: there is one.
    """
    for before, word in itertools.pairwise(["", *words]):
        if "\0" in word:  # no path or variable of the environment can have one
            raise UsageError("an argument has a NUL character in it: leave it out")
        # `--option ""`, and `--option=`.
        is_empty_word = not word and re.fullmatch(r"--[a-z][a-z-]*", before)
        if is_empty_word or re.fullmatch(r"--[a-z-]+=", word):
            raise UsageError(f"{(word or before).rstrip('=')}: the value is empty: give one, or leave the option out")
        if before == "--set" or word.startswith("--set="):
            assignment = word.removeprefix("--set=")
            if "=" not in assignment:  # `set_fields` would say so after TensorFlow has loaded
                raise UsageError(f"--set {assignment}: give key=value")


def number_or_word(text: str | None) -> int | str | None:
    """A typed value that may be a number."""
    # 18 digits fit into 64 bits. A longer number stays a text, which the checks of the options refuse.
    if text is not None and re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    return text


def eval_every(text: str | None) -> int | str | dict[str, int | str | None] | None:
    """What was typed as `--eval-every`: a pace, or one for each evaluation set, `val=epoch,test=500`."""
    if text is None or "=" not in text:
        return number_or_word(text)
    paces: dict[str, int | str | None] = {}
    for assignment in text.split(","):
        name, _, pace = map(str.strip, assignment.partition("="))
        if not pace or name in paces:
            raise UsageError(f"--eval-every {text}: give each set once with its pace, such as val=epoch,test=500")
        paces[name] = number_or_word(pace)
    return paces


def schedule(text: str | None) -> int | str:
    """What was typed as `--checkpoint-every`; UsageError if it isn't a schedule."""
    if text is None or text == "auto":
        return "auto"
    every = number_or_word(text)
    assert every is not None
    try:
        Schedule(every)
    except ValueError as error:
        raise UsageError(f"--checkpoint-every {text}: {error}") from None
    return every


def check_threads(threads: int | None) -> None:
    """Refuses what was typed as `--threads`, if it isn't a number of threads."""
    if threads is not None and not 1 <= threads <= MOST_WORKERS:
        raise UsageError(f"--threads {threads}: give a whole number >= 1, at most {MOST_WORKERS}")


def evaluates_beside(device: str | None, eval_every: str | None) -> list[Callback]:
    """The callback for `--eval-beside`; none if it wasn't typed.

    Raises:
        UsageError: it isn't a device, or the training is to evaluate, too.
    """
    if device is None:
        return []
    if eval_every not in (None, "never"):
        raise UsageError(
            f"--eval-beside {device} with --eval-every {eval_every}: leave one of them out; beside the training, each "
            "checkpoint is evaluated (--checkpoint-every)"
        )
    try:
        return [EvaluateBeside(device)]
    except ValueError:
        raise UsageError(f"--eval-beside {device}: give cpu, or a GPU such as gpu:1") from None


def arguments(typed: Mapping[str, object], assignments: Sequence[str], files: Sequence[Path] = ()) -> list[str]:
    """Options of one command, as they are to be typed for `train`; those that weren't given (None) are left out."""
    # With "=": a value that begins with a dash must not be taken for an option.
    words = []
    for name, value in typed.items():
        if value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    words += [f"--set={text}" for text in assignments]
    words += [f"--config={path}" for path in files]
    return words


@contextlib.contextmanager
def written_out(path: Path) -> Iterator[IO[bytes]]:
    """Yields the file that `--out` names, which is written whole or not at all; an error names the option."""
    try:
        with replacing(path, aside=hidden_name(path)) as file:
            yield file
    except OSError as error:
        if error.errno in FULL:  # the name isn't wrong: `report_error` says what to do
            raise
        raise UsageError(f"--out {path}: {error.strerror}") from None


def callback_option(kind: type[Callback], argument: object = None) -> str:
    """The hidden option by which a command that starts `train` adds a callback of its own.

    The @ tells it from what a user types. The class must take its argument, if there is one, as a text. A training
    whose callback has the attribute `alone` has no checkpoints, no progress and no MLflow.
    """
    value = "" if argument is None else f"={argument}"
    return f"--callback=@{kind.__module__}:{kind.__qualname__}{value}"


def report_error(error: BaseException) -> int:
    """Says on stderr why a command failed, and returns its exit code."""
    # Errors that tfloop expects: their text says what to do.
    if isinstance(error, UsageError | TrainingError | FileError):
        _say_once(_with_place(error))
        return FAILED if isinstance(error, TrainingError | MovedError) else BAD_INPUT
    if hasattr(error, "format_message"):  # typer's own, whose classes have no public name
        tell(_wrong_usage(error))
        return BAD_INPUT
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        say(f"{reprlib.repr(error.filename)}: the name is too long")
        return BAD_INPUT

    # All others are failures, of the machine or of code.
    if isinstance(error, OSError) and error.errno in FULL:
        what = f"{error.filename or 'stdout, or a file,'} can't be written ({os.strerror(error.errno)})"
        _say_once(f"{what}: make room there, and start the same command again")
        flushed(is_reported=False)  # what stdout still holds must not fail once more, at the end
    elif explain.DEBUG in os.environ:
        tell(_traceback(error))
    else:
        _say_once(_in_a_line(error))
    return FAILED


def _with_place(error: BaseException) -> str:
    """The text of an error of tfloop's; and the line of the user's code whose failure has caused it."""
    cause = error.__cause__
    where = explain.place(cause) if cause is not None and isinstance(error, TrainingError) else ""
    return f"{error} ({where})" if where else str(error)


def _say_once(text: str) -> None:
    """Says what went wrong, unless it is the launcher that says it, once for all workers.

    On a full disk, a worker may be unable to report to it.
    """
    if JOB not in os.environ or not worker.has_reported():
        say(text)


def _in_a_line(error: BaseException) -> str:
    """An unexpected error. One of the system is shown with its file, unless the user's code has raised it."""
    if isinstance(error, OSError) and error.filename is not None and not explain.place(error):
        return f"{error.filename}: {os.strerror(error.errno or 0)}"
    return explain.in_a_line(error)


def _traceback(error: BaseException) -> str:
    """The traceback of an error, without the frames that lead to the command."""
    first = step = error.__traceback__
    while step is not None:
        if "typer" in Path(step.tb_frame.f_code.co_filename).parts:
            first = step.tb_next
        step = step.tb_next
    error = error.with_traceback(first or error.__traceback__)
    return "".join(traceback.format_exception(error)).rstrip("\n")


def say(text: str) -> None:
    """Says what went wrong, in a line on stderr."""
    tell(f"tfloop: error: {text}")


def flushed(is_reported: bool = True) -> bool:
    """Writes what stdout still holds. Returns whether that was possible; if not, `is_reported` says so on stderr."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python tries again when it ends
        if is_reported and error.errno != errno.EPIPE:  # the reader has ended, as `head` does
            say(f"stdout can't be written ({error.strerror}): the command has done its work, but its output is lost")
        return False
    return True


def tell_of_threads() -> None:
    """Names the threads of the task's code that still run when the command is over: Python waits for them."""
    if _other_threads():
        threading.Thread(target=_tell_of_threads, daemon=True).start()


def _other_threads() -> list[str]:
    """The names of the threads for which Python waits at its end."""
    main = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]


def _tell_of_threads() -> None:
    # Not `join`: Python's own end fails if another thread holds the lock of the main thread just then.
    while threading.main_thread().is_alive():
        time.sleep(_PAUSE)
    # Python ends idle threads of executors only now. Most processes have ended before this pause is over.
    time.sleep(_PAUSE)
    if names := ", ".join(map(repr, _other_threads())):
        tell(f"waiting for threads that still run: {names}. Have the task end them, or start them with daemon=True")


def _wrong_usage(error: Any) -> str:
    """What typer finds wrong with the words typed, in one line, with the value; or the help, where there were none."""
    text = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # of typer's private classes, only the name is known
        return str(text)
    if hasattr(error.__cause__, "errors"):  # why a value doesn't have its type
        first = error.__cause__.errors()[0]
        what = first["msg"].removeprefix("Input ").partition(",")[0]
        text = f"{error.param.opts[0]} {first['input']}: {what}"
    elif type(error).__name__ == "NoSuchOption":
        text = _no_such_option(error)
    elif unknown := re.fullmatch(r"No such command '(.*)'\.", text, re.DOTALL):
        text = f"there is no command {unknown[1]!r}{nearest(unknown[1], error.ctx.command.commands)}"
    for pattern, words in _OF_PARSER.items():
        text = re.sub(pattern, words, text, flags=re.DOTALL)
    return f"tfloop: error: {' '.join(text.split())}"


def _no_such_option(error: Any) -> str:
    """Names the option that was probably meant; or how a field of the task is set, which may have been meant."""
    options = itertools.chain.from_iterable(parameter.opts for parameter in error.ctx.command.params)
    long_options = [option for option in options if option.startswith("--")]
    text = f"there is no option {error.option_name}"
    near = difflib.get_close_matches(error.option_name, long_options, 1)
    if near:
        text += f"; did you mean {near[0]!r}?"
    elif "--set" in long_options and error.option_name.startswith("--"):
        field = error.option_name.removeprefix("--").replace("-", "_")
        text += f"; a field of the task is set by --set {field}=VALUE"
    return text


def show_own_warnings_as_lines() -> None:
    """Has Python print a warning of tfloop as one line: where it was raised tells users of a command nothing.

    Only how it is printed: filters and `-W error` work as ever.
    """
    # Here, and not where tfloop is imported: a program of the user's own keeps its way of printing warnings.
    package = Path(__file__).parents[1]
    folders = (package, package.parent / "callbacks")
    default = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if any(map(Path(filename).is_relative_to, folders)):
            return f"warning: {message}\n"
        return default(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
