"""The source of a task that is defined in the cells of a notebook, as the text of a module."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator, Sequence

from callbacks import notebook
from loop.errors import UsageError
from loop.target.task_file import bound_by

_HEADER = '''"""The cells of a notebook that the task needs. `fit(workers=...)` has written this file."""

import sys

sys.path += [path for path in {paths!r} if path not in sys.path]

'''


def source_of(kind: type) -> str:
    """The text of a module with a class of a notebook's cell, and with all that it needs of other cells.

    These are the statements that bind the names that it uses, in the order in which they were executed; so data that a
    cell has loaded is loaded again.

    Raises:
        UsageError: this isn't a notebook, the class isn't one of its cells, or it was defined anew since.
    """
    name = kind.__qualname__
    if not notebook.active() or not name.isidentifier():
        raise UsageError(
            f"fit(workers=...): the class {name} is in no file, so that no other process can make it: move it from the "
            "function or prompt into a file, or to the top level of a notebook's cell"
        )
    # The cells hold the newest definition alone: an older class can't be made again from them.
    shell = sys.modules["IPython"].get_ipython()
    if shell.user_ns.get(name) is not kind:
        raise UsageError(f"fit(workers=...): {name} was defined anew since this task was made: make the task again")
    needed = needed_statements(shell.history_manager.input_hist_parsed, name)
    paths = [path for path in sys.path if path]
    header = _HEADER.format(paths=paths)
    return header + "\n\n".join(needed) + "\n"


def needed_statements(cells: Sequence[str], name: str) -> list[str]:
    """The texts of the statements of cells that a name needs, in order; cells that can't be parsed are left out."""
    statements: list[_Statement] = []
    for cell in cells:
        statements += _statements(cell)

    needed: set[int] = set()
    # "*": what `from module import *` binds can't be known, so such imports are always needed.
    pending = ["*", name]
    seen = set()
    while pending:
        wanted = pending.pop()
        # A name of a builtin is taken for the builtin, also where a cell binds it; but the class may have such a name.
        is_builtin = hasattr(builtins, wanted) and wanted != name
        if wanted in seen or is_builtin:
            continue
        seen.add(wanted)
        for index in _that_make(statements, wanted):
            if index not in needed:
                needed.add(index)
                pending += statements[index].uses
    return [statements[index].text for index in sorted(needed)]


class _Statement:
    """A statement at the top level of a cell."""

    def __init__(self, node: ast.stmt, cell: str) -> None:
        decorators = getattr(node, "decorator_list", [])
        if decorators:
            # The position of a definition begins after its decorators.
            lines = cell.splitlines()[decorators[0].lineno - 1 : node.end_lineno]
            self.text = "\n".join(lines)
        else:
            self.text = ast.get_source_segment(cell, node) or ""
        self.defines = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        self.imports = isinstance(node, ast.Import | ast.ImportFrom)
        self.binds = set(bound_by(node))
        self.changes = set(_changed(node))
        # Not within a loop or an `if`, which may also train.
        self.sets = self.changes if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete) else set()
        self.uses = set(_used(symtable.symtable(self.text, "cell", "exec")))
        if isinstance(node, ast.For):
            # A loop sets its variable itself: other loops with one of this name, perhaps of trainings, stay out.
            read = {used.id for used in ast.walk(node.iter) if isinstance(used, ast.Name)}
            self.uses -= set(bound_by(node.target)) - read

    def assigns(self, name: str) -> bool:
        """Whether it binds a name to a value, rather than to a definition or a module."""
        return name in self.binds and not self.defines and not self.imports


def _statements(cell: str) -> Iterator[_Statement]:
    try:
        tree = ast.parse(cell)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        statement = _Statement(node, cell)
        # IPython turns `%magic` and `!command` into such calls, which a worker can't make.
        if "get_ipython" not in statement.uses:
            yield statement
        else:
            yield from _statements(_run_by_magic(node))


def _run_by_magic(node: ast.stmt) -> str:
    """The code that a magic runs in the notebook, as `%%time` above a cell and `%time` before a statement do."""
    match node:
        case ast.Expr(
            ast.Call(
                ast.Attribute(attr="run_cell_magic" | "run_line_magic"),
                [ast.Constant("time" | "capture"), *_, ast.Constant(str(code))],
            )
        ):
            return code
    return ""


def _that_make(statements: Sequence[_Statement], name: str) -> Iterator[int]:
    """The statements that bind a name, or change what it is bound to; of definitions, from the last one on."""
    # A call such as `keras.utils.set_random_seed(0)` changes no variable of the notebook.
    is_variable = any(statement.assigns(name) for statement in statements)
    definition: list[int] = []
    for index, statement in enumerate(statements):
        is_bound = name in statement.binds
        if is_bound and statement.defines:
            definition = [index]  # what was set on an earlier class or function is gone
        elif is_bound or (is_variable and name in statement.changes):
            yield index
        elif name in statement.sets:  # `Task.rate = 0.1`, of a class, a function or a module
            definition.append(index)
    yield from definition


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    """The names of the module that a statement uses, also in functions and classes within it."""
    for symbol in table.get_symbols():
        # Within a function, a name of the module is one that the function doesn't bind itself.
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _used(inner)


def _changed(node: ast.AST) -> Iterator[str]:
    """The variables that a statement changes without binding them: `x.append(1)`, `x[0] = 1`, `x.y = 1`, `del x[0]`."""
    target: ast.AST | None = None
    # The patterns bind `target` itself. For a call it is the method, such as `x.append`.
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return  # what stands within runs later, if at all
        case ast.Expr(value=ast.Call(func=ast.Attribute() as target)):
            pass
        case ast.Assign(targets=[target]) | ast.AugAssign(target=target) | ast.Delete(targets=[target]):
            pass
    if not isinstance(target, ast.Name):  # `x = 1` binds it
        # Down to the variable at the root: the `x` of `x.a[0].b`.
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id
    # Statements stand within loops, `if`, `with`, `try` and `match`.
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _changed(child)
