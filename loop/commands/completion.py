"""What a shell may complete: targets, backends, run directories. Imports no TensorFlow."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from loop.launch import plugins
from loop.options import BACKENDS
from loop.target.task_file import classes
from loop.target.task_loader import SHIPPED


def targets(incomplete: str) -> list[str]:
    """The shipped examples, and the classes in Python files, whose names begin with what was typed."""
    names = list(SHIPPED)
    start = incomplete.partition(":")[0]
    paths = [Path(start)] if start.endswith(".py") else _beginning(start, "*.py")
    for path in paths:
        names += [f"{_typed(path, start)}:{kind}" for kind in classes(path)]  # read, not imported: no code is run
    return _starting(names, incomplete)


def backends(incomplete: str) -> list[str]:
    """The backends, plug-ins too."""
    return _starting([*BACKENDS, *plugins.entry_points()], incomplete)


def run_dirs(incomplete: str) -> list[str]:
    """The run directories in `runs/`, and others, whose paths begin with what was typed."""
    manifests = [*Path("runs").glob("*/run.json"), *_beginning(incomplete, "*/run.json")]
    directories = [_typed(manifest.parent, incomplete) for manifest in manifests]
    return _starting(dict.fromkeys(directories), incomplete)  # each once, in order


def runs(incomplete: str) -> list[str]:
    """The names of the runs in `runs/`, where a name is enough; and what `run_dirs` finds."""
    names = sorted(path.parent.name for path in Path("runs").glob("*/run.json"))
    return [*_starting(["latest", *names], incomplete), *run_dirs(incomplete)]


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    """The names that begin with what was typed."""
    return [name for name in names if name.startswith(incomplete)]


def _typed(path: Path, start: str) -> str:
    """A path as it is completed: it begins with `./`, which a `Path` leaves out, if what was typed does."""
    return f"./{path}" if start.startswith("./") else str(path)


def _beginning(start: str, pattern: str) -> list[Path]:
    """The paths of this pattern that begin with what was typed."""
    directory, _, name = start.rpartition("/")
    root = "/" if start.startswith("/") else "."  # where what is typed so far has no directory
    return sorted(Path(directory or root).glob(glob.escape(name) + pattern))
