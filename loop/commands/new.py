"""`tfloop new`: writes a task file to start from."""

from __future__ import annotations

import contextlib
import keyword
import re
import sys
import unicodedata
from importlib.machinery import PathFinder
from pathlib import Path

from loop.errors import UsageError
from loop.target.task_loader import OURS, shipped_path

TEMPLATE = "Template"
"""The class in `examples/template.py`, which is the file that is written."""


def new(name: str) -> str:
    """Writes `<name>.py` in the current directory, with a task that trains at once.

    Args:
        name: of the file; the class is named after it: `mytask` and `my_task` give `MyTask`.

    Returns:
        The target that names the class.

    Raises:
        UsageError: no file of this name can be a task's, or it is there already.
    """
    if (better := fitting(name)) != name:
        hides = better == f"{name}_task" and not keyword.iskeyword(name)
        what = f"{name}.py would hide a module of this name" if hides else "no module can have this name"
        raise UsageError(f"NAME {name!r}: {what}; how about {better!r}?")
    text = shipped_path(TEMPLATE.lower()).read_text()
    path = Path(f"{name}.py")
    kind = class_name(name, set(re.findall(r"\w+", text)))  # no word of the file may be the name of the class
    text = text.replace(f"{TEMPLATE.lower()}.py", path.name)  # the commands at its top name the file that they train
    try:
        with path.open("x", encoding="utf-8") as file:  # never over another one
            file.write(re.sub(rf"\b{TEMPLATE}\b", kind, text))
    except FileExistsError:
        raise UsageError(f"{path} is there already: give another name") from None
    except OSError as error:
        with contextlib.suppress(OSError):  # half a file would be in the way of the next try
            path.unlink()
        raise UsageError(f"{path} can't be written: {error.strerror}") from None
    return f"{path}:{kind}"


def fitting(name: str) -> str:
    """A name that a task's file may have: this one, or else one like it."""
    like = unicodedata.normalize("NFKC", name)
    if not like.isidentifier() or like.startswith("_"):
        like = re.sub(r"\W+", "_", Path(like).name.removesuffix(".py")).strip("_")
    if not like.isidentifier():
        like = f"task_{like}".rstrip("_")
    like = like[:100]  # the name of a file can't be of any length
    hidden = like in sys.stdlib_module_names or like in OURS or keyword.iskeyword(like)
    # An installed module counts, too; but the file itself is found where it is there already.
    if not hidden and (spec := PathFinder.find_spec(like)) and spec.origin:
        hidden = Path(spec.origin) != Path(f"{like}.py").resolve()
    return f"{like}_task" if hidden else like


def class_name(name: str, taken: set[str]) -> str:
    """The name of the class in a task's file; one that means something else in the file gets `Task` appended."""
    words = re.sub(r"(?<=[^_])task$", "_task", name).split("_")  # `mytask` has two words, as `my_task`
    made = "".join(word[:1].upper() + word[1:] for word in words)
    return f"{made}Task" if made in taken or keyword.iskeyword(made) else made
