"""What a Python file says about its tasks, found by parsing it. No code of it runs, and nothing is imported."""

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
"""Names with which a module may define a class that its text doesn't show."""

_NO_TASK = re.compile(
    r"(keras|tf|tf_keras|tensorflow|enum|abc|typing|callbacks)\."
    r"|(\w*Enum|NamedTuple|TypedDict|Protocol|ABC|\w*Exception|\w*Error|\w*Callback|object|str|int|dict|list|tuple)$"
)
"""Bases that are certainly no task."""


def classes(path: Path) -> list[str]:
    """The names of the classes in a Python file that may be tasks; [] for any other file."""
    # By a pattern rather than `ast`: it also lists the classes of a file with a mistake in it, for a hint or a shell.
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        if path.suffix == ".py" and path.is_file():
            others = set()
            for name, bases in re.findall(r"^class (\w+)\(([^)]*)", path.read_text(errors="replace"), re.M):
                first = bases.partition(",")[0].strip()
                if "Task" not in bases and (first in others or _NO_TASK.match(first)):
                    others.add(name)
                elif not name.startswith("_"):
                    names.append(name)
    return names


def check(target: str) -> None:
    """Refuses a target whose file, or module, certainly has no such class.

    Classes that its text doesn't show (imported with `*`, made by `exec` or `setattr`) are left to the import.

    Raises:
        UsageError: there is no such module or class, or the file isn't Python.
    """
    origin, _, name = target.rpartition(":")
    path = Path(origin) if origin.endswith(".py") else _module_file(origin, target)
    if path is None or (tree := _parsed(path, origin, target)) is None or (bindings := _bindings(tree)) is None:
        return
    if name not in bindings:
        raise missing_class(target, classes(path))

    # With a base, a metaclass or a decorator, only the import shows what the class is.
    node = bindings[name]
    if isinstance(node, ast.ClassDef) and not (node.bases or node.keywords or node.decorator_list):
        raise UsageError(f"TARGET {target!r}: {name} isn't a subclass of loop.TrainTask")


def missing_class(target: str, tasks: list[str]) -> UsageError:
    """The error for a target whose file or module has no such class, with a hint at the tasks that it has."""
    origin, _, name = target.rpartition(":")
    hint = nearest(name, tasks) if tasks else ""
    return UsageError(f"TARGET {target!r}: {origin} has no class {name!r}{hint}")


def _module_file(name: str, target: str) -> Path | None:
    """The file of a module; None if only an import can find it."""
    parts = name.split(".")
    directory = Path(*parts)
    for path in (directory.with_suffix(".py"), directory / "__init__.py"):
        if path.is_file():
            return path

    # The package is here, but not the file: a package may make its submodules in other ways.
    package = parts[0]
    if Path(package).exists() or Path(f"{package}.py").exists() or package in sys.modules:
        return None
    try:
        missing = importlib.util.find_spec(package) is None  # the name of a submodule would import its package
    except (ValueError, ImportError):
        return None
    if missing:
        raise UsageError(f"TARGET {target!r}: there is no module {package!r} here or on the path")
    return None


def _parsed(path: Path, origin: str, target: str) -> ast.Module | None:
    """The file, parsed; None if it is too large or too deep for that."""
    try:
        content = path.read_bytes()
        if b"\0" in content:
            raise UsageError(f"TARGET {target!r}: {origin} isn't text: give a Python file")
        if len(content) > _MOST_BYTES:
            return None
        with warnings.catch_warnings(action="ignore"):  # the import shows them
            return ast.parse(content)
    except SyntaxError as error:
        raise UsageError(f"TARGET {target!r}: {origin}, line {error.lineno}: {error.msg}") from None
    except (OSError, RecursionError, MemoryError):
        return None


def _defines_names(node: ast.AST) -> bool:
    """Whether a node may define names that it doesn't show, as `from x import *` does."""
    match node:
        case ast.ImportFrom():
            return any(alias.name == "*" for alias in node.names)
        case ast.Name():
            return node.id in _DYNAMIC
        case ast.FunctionDef():
            return node.name in _DYNAMIC
        case ast.Attribute():
            return node.attr in ("modules", *_DYNAMIC)  # a module can replace itself in `sys.modules`
    return isinstance(node, ast.Global)


def _bindings(tree: ast.Module) -> dict[str, ast.stmt] | None:
    """The names that a module may define, each with the outermost statement that does; None if there may be more."""
    if any(map(_defines_names, ast.walk(tree))):
        return None
    nodes: dict[str, ast.stmt] = {}
    try:
        for node in tree.body:
            nodes |= dict.fromkeys(bound_by(node), node)
    except RecursionError:
        return None
    return nodes


def bound_by(node: ast.AST) -> Iterator[str]:
    """The names that a statement of a module may define, also in statements within it."""
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name
            return  # names defined within are not the module's
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0]
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
    # Assignments stand anywhere in a statement: in `if`, `try` and `with`, and as `:=`. A lambda's are its own.
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from bound_by(child)
