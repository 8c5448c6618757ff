"""What a Python file says about its tasks, by reading it: nothing of it is run, and nothing is imported."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from callbacks.nearest import nearest
from loop.errors import UsageError

_MOST_BYTES = 5_000_000  # a longer file is left to the import
_DYNAMIC = ("exec", "globals", "setattr", "vars", "__getattr__")
"""Names by which a module may make a class that its text doesn't show."""


def classes(path: Path) -> list[str]:
    """The names of the classes in a Python file that may be tasks; it may be any file at all."""
    with contextlib.suppress(OSError, ValueError):
        if path.suffix == ".py" and path.is_file():
            return re.findall(r"^class ([^\W_]\w*)\(", path.read_text(errors="replace"), re.M)
    return []


def check(target: str) -> None:
    """Refuses a target whose file, or module, certainly has no such class.

    What the text of a file doesn't tell (imported with `*`, made by `exec` or `setattr`) is left to the import.

    Raises:
        UsageError: there is no such module or class, or the file is no Python.
    """
    place, _, name = target.rpartition(":")
    path = Path(place) if place.endswith(".py") else _module_file(place, target)
    if path is None:
        return
    tree = _parsed(path, place, target)
    if tree is None or _is_dynamic(tree):
        return
    try:
        bound = {each: node for node in tree.body for each in _bound_by(node)}
    except RecursionError:
        return
    if name not in bound:
        tasks = classes(path)
        raise UsageError(f"TARGET {target!r}: {place} has no class {name!r}{nearest(name, tasks) if tasks else ''}")
    node = bound[name]
    if isinstance(node, ast.ClassDef) and not (node.bases or node.keywords or node.decorator_list):
        raise UsageError(f"TARGET {target!r}: {name} is no subclass of loop.TrainTask")


def _module_file(name: str, target: str) -> Path | None:
    """The file of a module; None where only an import can tell."""
    parts = name.split(".")
    here = Path(*parts)
    for path in (here.with_suffix(".py"), here / "__init__.py"):
        if path.is_file():
            return path
    if Path(parts[0]).exists() or Path(f"{parts[0]}.py").exists() or parts[0] in sys.modules:
        return None
    try:
        missing = importlib.util.find_spec(parts[0]) is None  # of a whole package: nothing is imported
    except (ValueError, ImportError):
        return None
    if missing:
        raise UsageError(f"TARGET {target!r}: there is no module {parts[0]!r} here or on the path")
    return None


def _parsed(path: Path, place: str, target: str) -> ast.Module | None:
    """The file's text, parsed; None where it is too much for the parser."""
    try:
        content = path.read_bytes()
        if len(content) > _MOST_BYTES:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import gives them
            return ast.parse(content)
    except SyntaxError as error:
        if b"\0" in content:
            raise UsageError(f"TARGET {target!r}: {place} is no text: give a Python file") from None
        raise UsageError(f"TARGET {target!r}: {place}, line {error.lineno}: {error.msg}") from None
    except ValueError:
        raise UsageError(f"TARGET {target!r}: {place} is no text: give a Python file") from None
    except (OSError, RecursionError, MemoryError):
        return None


def _is_dynamic(tree: ast.Module) -> bool:
    """Whether the module may have classes that can't be seen: by `from x import *`, or by what makes names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.Name) and node.id in _DYNAMIC:
            return True
        if isinstance(node, ast.FunctionDef) and node.name in _DYNAMIC:
            return True
        if isinstance(node, ast.Global) or (isinstance(node, ast.Attribute) and node.attr in ("modules", *_DYNAMIC)):
            return True
    return False


def _bound_by(node: ast.AST) -> Iterator[str]:
    """The names that a statement of a module may bind, those of the statements within it too."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
        return  # what is bound within is not the module's
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _bound_by(child)
