"""Attributes of a task's classes that were changed after the classes were made: `Net.rate = 0.3`, `del Net.compute`.

Other processes run the code of the classes anew, and would have what stands there, unless that code changes it, too.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from callbacks.attached import digest_of
from loop.target.task_file import bound_by

_LIBRARIES = ("loop", "callbacks", "builtins", "abc", "typing")


def patched(kind: type, source: str | None) -> dict[str, dict[str, str]]:
    """The digests of attributes that aren't what the code of their class says, by the class's place in the order of
    inheritance, and by name: two classes of one name may stand there.

    `source` is the text of the module that has the class; None: the file of each class's module.
    """
    found: dict[str, dict[str, str]] = {}
    for place, base in enumerate(kind.__mro__):
        if base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        node = _definition(base, source)
        if node is not None:
            digests = {name: digest_of(base, name) for name in _changed(base, node)}
            if digests:
                found[str(place)] = digests
    return found


def _definition(kind: type, source: str | None) -> ast.ClassDef | None:
    """The statement that defines a class; None if its code can't be read."""
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        if source is None:
            path = getattr(sys.modules.get(kind.__module__), "__file__", None)
            if path is None or "site-packages" in path:
                return None
            source = Path(path).read_text()
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
        named = [node for node in nodes if node.name == kind.__name__]
        return next(reversed(named), None)
    return None


def _changed(kind: type, node: ast.ClassDef) -> Iterator[str]:
    """The names of attributes that differ from what a class's statement says, as far as that is plain to see."""
    said = _Said(node)
    # A field's default was taken when the class was made: what the attribute is now decides nothing.
    fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    unknown = said.others.union(fields)
    for name in dict.fromkeys([*said.literals, *said.methods, *vars(kind)]):
        if name not in unknown and not name.startswith("_") and not _is_as_said(kind, name, said):
            yield name


class _Said:
    """What the statement of a class says about its attributes.

    Attributes:
        literals: the values of those that are constants.
        methods: the names of its methods without decorators.
        others: all other names in it, whose values aren't known without running it.
    """

    def __init__(self, node: ast.ClassDef) -> None:
        self.literals: dict[str, object] = {}
        self.methods: set[str] = set()
        self.others: set[str] = set()
        for statement in node.body:
            match statement:
                case ast.FunctionDef(name=name, decorator_list=[]):
                    self.methods.add(name)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                    self.literals[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                    self.literals[name] = value
                case _:
                    self.others.update(bound_by(statement))
        # What a name is bound to twice is left alone, too: the order decides.
        self.others |= self.methods & self.literals.keys()


def _is_as_said(kind: type, name: str, said: _Said) -> bool:
    value = vars(kind).get(name)
    if name in said.literals:
        literal = said.literals[name]
        return name in vars(kind) and type(value) is type(literal) and value == literal
    if name in said.methods:
        return getattr(value, "__qualname__", "") == f"{kind.__qualname__}.{name}"
    # Set from outside. Of other objects, such as data, it can't be told whether another process has the same.
    return not isinstance(value, str | int | float | types.FunctionType)
