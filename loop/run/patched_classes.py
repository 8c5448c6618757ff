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
    """The digests of attributes that differ from what the code of their class says, by class and attribute name.

    A class is given as its position in the order of inheritance, since two classes there may have one name.

    `source` is the text of the module that has the class; None: the file of each class's module.
    """
    digests_of_classes: dict[str, dict[str, str]] = {}
    for position, base in enumerate(kind.__mro__):
        if base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        node = _definition(base, source)
        if node is not None:
            digests = {name: digest_of(base, name) for name in _changed(base, node)}
            if digests:
                digests_of_classes[str(position)] = digests
    return digests_of_classes


def _definition(kind: type, source: str | None) -> ast.ClassDef | None:
    """The statement that defines a class; None if its code can't be read."""
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        if source is None:
            path = getattr(sys.modules.get(kind.__module__), "__file__", None)
            if path is None or "site-packages" in path:
                return None
            source = Path(path).read_text()
        definition = None
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                definition = node  # of several, the last one counts
        return definition
    return None


def _changed(kind: type, node: ast.ClassDef) -> Iterator[str]:
    """The names of attributes that differ from what a class's statement says, as far as its text alone shows it."""
    said = _Said(node)
    # A field's default was taken when the class was made: a later change of the attribute has no effect.
    fields = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    unknown = said.others.union(fields)
    for name in dict.fromkeys([*said.literals, *said.methods, *vars(kind)]):
        if name not in unknown and not name.startswith("_") and not _is_as_said(kind, name, said):
            yield name


class _Said:
    """What the statement of a class says about its attributes.

    Attributes:
        literals: the attributes that are set to constants, with their values.
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
        # A name that is bound twice is left alone, too: the order would decide.
        self.others |= self.methods & self.literals.keys()


def _is_as_said(kind: type, name: str, said: _Said) -> bool:
    value = vars(kind).get(name)
    if name in said.literals:
        literal = said.literals[name]
        return name in vars(kind) and type(value) is type(literal) and value == literal
    if name in said.methods:
        return getattr(value, "__qualname__", "") == f"{kind.__qualname__}.{name}"
    # Set from outside. For other objects, such as data, it can't be told whether another process has the same.
    return not isinstance(value, str | int | float | types.FunctionType)
