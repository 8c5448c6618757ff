"""An error that isn't tfloop's own in one line: its type, its message, and the line of the user's file it came from."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

from callbacks.files import ROOT

DEBUG = "TFLOOP_DEBUG"
"""With this variable in the environment, which `--debug` sets, the whole traceback is shown instead."""
_OURS = (ROOT / "loop", ROOT / "callbacks", ROOT / "cli.py")
_EXAMPLES = (ROOT / "loop" / "examples", ROOT / "examples")
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
_LONGEST = 400  # characters of a message that are shown


def in_a_line(error: BaseException) -> str:
    """The type and the message of an error in one line, and the user's line that it came from, if there is one."""
    where = place(error)
    if where:
        where += "; "
    how = "--debug" if sys.argv[1:2] == ["train"] else f"{DEBUG}=1"
    return f"{type(error).__name__}: {_message(error)} ({where}{how} shows the traceback)"


def _message(error: BaseException) -> str:
    """The message of an error, without what TensorFlow, AutoGraph and Keras put around it."""
    if isinstance(error, KeyError) and error.args:
        return f"no {error.args[0]!r:.{_LONGEST}}"
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if "in user code:" in text:
        text = _without_autograph(text)
    if "[[{{node" in text or text.startswith("Graph execution error"):
        text = _without_graph(text)
    text = re.sub(r"\{\{function_node [^}]*\}\} ?| ?\[Op:\w+\]( name:)?", "", text)
    text = text.partition("\nArguments received by")[0]
    lines = _lines(text)
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]  # the first line names the layer, the second one says what is wrong
    whole = " ".join(lines[:3])
    return whole if len(whole) <= _LONGEST else whole[: _LONGEST - 4] + " ..."


def _without_autograph(text: str) -> str:
    """The message within one of AutoGraph's, which shows a traceback first."""
    lines = _lines(text)
    # The message begins at the last line "SomeError: ...", after the lines of code.
    starts = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_.]*(Error|Exception|Warning): ", line)]
    return "\n".join(lines[starts[-1] :]).partition(": ")[2] if starts else lines[-1]


def _without_graph(text: str) -> str:
    """The cause within an error of a compiled function: the last line before the operation's name."""
    causes = []
    for line in _lines(text.partition("[[{{node")[0]):
        is_frame = line.startswith(("File ", "Detected at", "<stack traces"))
        if not is_frame and line not in ("Graph execution error:", "(most recent call last):"):
            causes.append(line)
    return causes[-1] if causes else text


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def place(error: BaseException) -> str:
    """The last line of the user's code in the traceback, or in the message, where AutoGraph and TensorFlow put it."""
    frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(file, int(line), name) for file, line, name in _PLACE.findall(str(error))]
    for file, line, name in reversed(frames):
        if _is_users(file):
            return f"{_short(file)}, line {line}, in {name}"
    return ""


def _is_users(file: str) -> bool:
    path = Path(file)
    if not path.is_absolute() or path.name.startswith("__autograph_generated"):
        return False
    if any(path.is_relative_to(directory) for directory in _EXAMPLES):
        return True
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    foreign = [*_OURS, *map(Path, libraries), Path(sys.prefix)]
    return not any(path.is_relative_to(directory) for directory in foreign)


def _short(file: str) -> str:
    here = Path.cwd()
    path = Path(file)
    return os.fspath(path.relative_to(here)) if path.is_relative_to(here) else file
