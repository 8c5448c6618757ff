"""Explain: an error that isn't ours, in one line: what it is, why, and where in the user's own file it came from."""

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
    how = "--debug" if sys.argv[1:2] == ["train"] else f"{DEBUG}=1"
    return f"{type(error).__name__}: {_message(error)} ({f'{where}; ' if where else ''}{how} shows the traceback)"


def _message(error: BaseException) -> str:
    """What an error says, without what TensorFlow, AutoGraph and Keras put around it."""
    if isinstance(error, KeyError) and error.args:
        return f"no {error.args[0]!r:.{_LONGEST}}"
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if "in user code:" in text:  # AutoGraph's, with a traceback in the message
        parts = [line.strip() for line in text.splitlines() if line.strip()]
        # The message begins at the last line "SomeError: ...", behind the lines of code.
        begins = [at for at, line in enumerate(parts) if re.match(r"[A-Za-z_.]*(Error|Exception|Warning): ", line)]
        text = "\n".join(parts[begins[-1] :]).partition(": ")[2] if begins else parts[-1]
    if "[[{{node" in text or text.startswith("Graph execution error"):
        # The cause stands before the operation's name, behind where it was made.
        before = [line.strip() for line in text.partition("[[{{node")[0].splitlines()]
        before = [line for line in before if line and not line.startswith(("File ", "Detected at", "<stack traces"))]
        before = [line for line in before if line not in ("Graph execution error:", "(most recent call last):")]
        text = before[-1] if before else text
    text = re.sub(r"\{\{function_node [^}]*\}\} ?| ?\[Op:\w+\]( name:)?", "", text)
    text = text.partition("\nArguments received by")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]  # the layer; the next line says what is wrong
    whole = " ".join(lines[:3])
    return whole if len(whole) <= _LONGEST else whole[: _LONGEST - 4] + " ..."


def place(error: BaseException) -> str:
    """The last line of the user's code in the traceback, or in the message, where AutoGraph and TensorFlow put it."""
    frames = [(each.filename, each.lineno, each.name) for each in traceback.extract_tb(error.__traceback__)]
    frames += [(file, int(line), name) for file, line, name in _PLACE.findall(str(error))]
    for file, line, name in reversed(frames):
        if _is_users(file):
            return f"{_short(file)}, line {line}, in {name}"
    return ""


def _is_users(file: str) -> bool:
    path = Path(file)
    if not path.is_absolute() or path.name.startswith("__autograph_generated"):
        return False
    if any(path.is_relative_to(each) for each in _EXAMPLES):
        return True
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    foreign = [*_OURS, *map(Path, libraries), Path(sys.prefix)]
    return not any(path.is_relative_to(each) for each in foreign)


def _short(file: str) -> str:
    here = Path.cwd()
    path = Path(file)
    return os.fspath(path.relative_to(here)) if path.is_relative_to(here) else file
