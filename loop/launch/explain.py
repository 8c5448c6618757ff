"""Errors that aren't tfloop's own, in one line: type, message, and the line of the user's file they came from."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from callbacks.files import ROOT
from loop.errors import named, text_of

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
    if isinstance(error, OSError) and error.errno == errno.EMFILE:  # a launcher has two pipes a worker
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        where += f"a process may have {limit} here: raise that with ulimit -n; "
    how = "--debug" if sys.argv[1:2] == ["train"] else f"{DEBUG}=1"
    return f"{named(error)} ({where}{how} shows the traceback)"


def place(error: BaseException) -> str:
    """The last line of the user's code in the traceback, or in the message, where AutoGraph and TensorFlow put it."""
    places = []
    for frame in traceback.extract_tb(error.__traceback__):
        places.append((frame.filename, str(frame.lineno), frame.name))
    # AutoGraph runs a copy of the user's code; it keeps the original lines here until it raises an error of its own.
    metadata = getattr(error, "ag_error_metadata", None)
    places += _PLACE.findall(metadata.get_message() if metadata else text_of(error))
    for file, line, name in reversed(places):  # the innermost call is last
        if _is_users(file):
            return f"{_short(file)}, line {int(line)}, in {name}"
    return ""


def _is_users(file: str) -> bool:
    path = Path(file)
    if not path.is_absolute() or path.name.startswith("__autograph_generated"):
        return False
    if _is_in(path, _EXAMPLES):  # before `_OURS`, which has the shipped examples within it
        return True
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not _is_in(path, [*_OURS, *libraries, Path(sys.prefix)])


def _is_in(path: Path, directories: Sequence[Path]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)


def _short(file: str) -> str:
    here = Path.cwd()
    path = Path(file)
    return os.fspath(path.relative_to(here)) if path.is_relative_to(here) else file
