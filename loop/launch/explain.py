"""An error that isn't tfloop's own in one line: its type, its message, and the line of the user's file it came from."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path

from callbacks.files import ROOT
from loop.errors import message_of

DEBUG = "TFLOOP_DEBUG"
"""With this variable in the environment, which `--debug` sets, the whole traceback is shown instead."""
_OURS = (ROOT / "loop", ROOT / "callbacks", ROOT / "cli.py")
_EXAMPLES = (ROOT / "loop" / "examples", ROOT / "examples")
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')


def in_a_line(error: BaseException) -> str:
    """The type and the message of an error in one line, and the user's line that it came from, if there is one."""
    where = place(error)
    if where:
        where += "; "
    how = "--debug" if sys.argv[1:2] == ["train"] else f"{DEBUG}=1"
    return f"{type(error).__name__}: {message_of(error)} ({where}{how} shows the traceback)"


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
