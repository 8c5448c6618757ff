"""Finds and makes the task that a command line names: `file.py:Class`, `package.module:Class`, a shipped example."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeGuard

from callbacks.files import ROOT
from callbacks.nearest import near_file, nearest
from callbacks.run_record.redaction import printable, remember, tell
from loop.errors import UsageError
from loop.target import task_file
from loop.target.fields import restored, set_fields
from loop.task import TrainTask, field_values

OURS = ("loop", "callbacks", "cli")
SHIPPED = {
    "digits": "Digits", "charlm": "CharLM", "gan": "DigitsGAN", "contrastive": "SimCLR", "tfrecords": "DigitFiles",
    "tabular": "Tumours", "transfer": "Transfer", "keras2": "Legacy", "module": "Diabetes", "custom_callback": "Names",
    "bring_your_keras_model": "MyModel", "images": "Pictures", "text": "Functions", "records": "DigitRecords",
    "bigger": "Transformer", "mnist": "Mnist",
}  # fmt: skip
"""The shipped examples, and the task class in each."""
STARTER = "TFLOOP_FIT"
"""Environment variable of a process that `fit` starts to import its task: the id of the process that called `fit`."""
_importing: list[str] = []
"""The target whose module is just being imported."""


def check(target: str) -> None:
    """Refuses a target that can't exist, without importing anything; any target where there is no current directory.

    Raises:
        UsageError: see `load`.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # else libraries, and the workers of a job, would fail of it one by one
        raise UsageError("the current directory was deleted: change to one that is there (cd)") from None
    if target in SHIPPED:
        return
    origin, colon, name = target.partition(":")
    is_file = origin.endswith(".py")
    is_module = all(origin.split("."))  # no name of a module is empty, as in `.task`
    path = Path(origin)
    if is_file:
        _check_file(path, target)
    if not colon or not name.isidentifier() or not (is_file or is_module):
        candidates = [f"{origin}:{kind}" for kind in task_file.classes(path)]
        raise UsageError(
            f"TARGET {target!r}: give file.py:Class, package.module:Class, or a shipped example"
            f"{nearest(target, candidates or SHIPPED)}"
        )
    directory = path.resolve().parent if is_file else here
    check_shadows(directory)
    task_file.check(target)


def _check_file(path: Path, target: str) -> None:
    """Refuses a file that isn't there, or in which TensorFlow can't trace a function."""
    if not path.is_file():
        raise UsageError(f"TARGET {target!r}: there is no file {printable(str(path))}{near_file(path)}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"TARGET {target!r}: {printable(str(path))} can't be read: make it readable")
    try:
        str(path.resolve()).encode()
    except UnicodeEncodeError:
        shown = printable(str(path.resolve()))
        raise UsageError(f"TARGET {shown}: TensorFlow runs no file whose path isn't UTF-8: rename it") from None


def check_shadows(directory: Path) -> None:
    """Refuses a directory in which a user's file has the name of one of our packages: one would hide the other.

    Raises:
        UsageError: there is such a file.
    """
    for name in OURS:
        for path in (directory / f"{name}.py", directory / name / "__init__.py"):
            if path.exists() and path.resolve() not in (ROOT / f"{name}.py", ROOT / name / "__init__.py"):
                raise UsageError(
                    f"{path} has the name of tfloop's own {name!r}, and one would hide the other: rename it"
                )


def load(
    target: str,
    assignments: Sequence[str] = (),
    fields: Mapping[str, object] | None = None,
    changed: Collection[str] | None = None,
) -> TrainTask:
    """Makes the task that `target` names.

    Args:
        target: what the command line names.
        assignments: texts `name=value`, as after `--set`; they win over `fields`.
        fields: the recorded fields of a run; None: the task's defaults.
        changed: those of them that weren't at their defaults, as far as the run has recorded it.

    Raises:
        UsageError: no such file, module or class; a class that is no `TrainTask`; a field that can't have this value.
    """
    kind = find(target)
    values = {**restored(kind, fields or {}, changed), **set_fields(kind, assignments)}
    try:
        task = kind(**values)
    except TypeError as error:
        if fields is None:
            how = "its defaults"
            fix = "give its fields by --set, and the arguments of an __init__ of its own defaults"
        else:
            how = "the fields of the run"
            fix = "give the task that the run is of"
        raise UsageError(f"TARGET {target!r}: {kind.__name__} can't be made from {how} ({error}): {fix}") from None
    remember(field_values(task))
    return task


def find(target: str) -> type[TrainTask]:
    """The class that `target` names.

    Raises:
        UsageError: no such file, module or class; a class that is no `TrainTask`.
    """
    check(target)  # first: a typing error is reported before TensorFlow is imported, which takes seconds
    shipped = None
    if target in SHIPPED:
        shipped = target
        target = f"{shipped_path(target)}:{SHIPPED[target]}"
    origin, _, name = target.rpartition(":")
    _importing.append(origin)
    try:
        if origin.endswith(".py"):
            module = _import_file(Path(origin).resolve(), target, shipped)
        else:
            module = _import_module(origin, target)
    finally:
        _importing.pop()
    kind = getattr(module, name, None)
    if _is_task_class(kind):
        return kind
    if kind is not None:
        raise UsageError(f"TARGET {target!r}: {name} isn't a subclass of loop.TrainTask")
    raise task_file.missing_class(target, _tasks_in(module))


def check_import() -> None:
    """Warns of a training that begins because a command imports the module of its task.

    Raises:
        UsageError: a `fit` has started this process, in which its task is imported. Another training here would start
            the next process, without end.
    """
    fix = 'call fit below `if __name__ == "__main__":`'
    if _importing and started_by_fit():
        raise UsageError(f"{_importing[-1]} calls fit when it is imported, and a call of fit has imported it: {fix}")
    if _importing:
        tell(f"warning: {_importing[-1]} trains as soon as a command imports it, before what the command does: {fix}")


def started_by_fit() -> bool:
    """Whether a `fit` has started this process."""
    return os.environ.get(STARTER) == str(os.getppid())


class _FromSource(importlib.machinery.SourceFileLoader):
    """Runs what the file says now: Python's cache misses a change of the same second that keeps the file's size."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_file(path: Path, target: str, shipped: str | None) -> ModuleType:
    """Runs a Python file as a module; `shipped` is its name if it is a shipped example."""
    sys.path.insert(0, str(path.parent))  # as for `python file.py`: modules beside the task can be imported
    try:
        return _run(path.stem, path, target)
    except ImportError as error:
        if shipped is not None and isinstance(error, ModuleNotFoundError):
            # On PyPI, names have dashes where Python has underscores, as tf-keras.
            package = (error.name or "").replace("_", "-")
            raise UsageError(
                f"the example {shipped!r} needs {package}: install it, with pip install {package}"
            ) from None
        root = _root_of_package(path, error)
        if root is None:
            raise
    # A run records the file, also of a task that was typed as `package.module:Class`.
    check_shadows(root)
    sys.path.insert(0, str(root))
    sys.modules.pop(path.stem, None)
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    importlib.import_module(name.rpartition(".")[0])
    return _run(name, path, target)


def _run(name: str, path: Path, target: str) -> ModuleType:
    """Runs a Python file as the module of this name."""
    origin = target.rpartition(":")[0]
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        # A mistake in a module that the file imports keeps its own traceback.
        if error.filename != str(path):
            raise
        # One that `task_file` has not found: the parser alone accepts a `return` outside of functions, for example.
        raise UsageError(f"TARGET {target!r}: {origin}, line {error.lineno}: {error.msg}") from None
    return module


def _root_of_package(path: Path, error: ImportError) -> Path | None:
    """The directory that holds the package of a file which can't be imported outside of it; None: it isn't that."""
    if isinstance(error, ModuleNotFoundError):
        top = (error.name or "").partition(".")[0]
        # A folder may have the name of a package that isn't installed, without being meant.
        imports = re.search(rf"^\s*(from|import) {re.escape(top)}\.", path.read_text(errors="replace"), re.MULTILINE)
        for directory in path.parents:
            if directory.name == top and (imports or (directory / "__init__.py").exists()):
                return directory.parent
        return None
    root = path.parent
    if "no known parent package" in str(error):  # the file has a relative import
        while (root / "__init__.py").exists():
            root = root.parent
    return None if root == path.parent else root


def _import_module(name: str, target: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # as for `python -m`; a command's own path lacks it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only if the module itself is missing: a missing import within it is the error of its author.
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"TARGET {target!r}: there is no module {error.name!r} here or on the path") from None
        raise


def _tasks_in(module: ModuleType) -> list[str]:
    """The names of the tasks that a module defines itself, not of those that it imports."""
    names = []
    for name, value in vars(module).items():
        if _is_task_class(value) and value.__module__ == module.__name__:
            names.append(name)
    return names


def _is_task_class(value: object) -> TypeGuard[type[TrainTask]]:
    return inspect.isclass(value) and issubclass(value, TrainTask)


def absolute(target: str) -> str:
    """The same target with an absolute path, so that it is valid in any working directory."""
    origin, colon, name = target.rpartition(":")
    return f"{Path(origin).resolve()}{colon}{name}" if origin.endswith(".py") else target


def shipped_path(name: str) -> Path:
    """The file of a shipped example: within the installed package, or `examples/` in a checkout."""
    inside = ROOT / "loop" / "examples" / f"{name}.py"
    return inside if inside.exists() else ROOT / "examples" / f"{name}.py"
