"""What a shell may complete: targets, backends, run directories. Imports no TensorFlow."""

from __future__ import annotations

import glob
from pathlib import Path

from loop.launch import plugins
from loop.options import BACKENDS
from loop.target.task_file import classes
from loop.target.task_loader import SHIPPED


def targets(incomplete: str) -> list[str]:
    """The shipped examples, and the classes in Python files whose path begins so."""
    names = list(SHIPPED)
    start = incomplete.partition(":")[0]
    for path in [Path(start)] if start.endswith(".py") else _beginning(start, "*.py"):
        names += [f"{path}:{kind}" for kind in classes(path)]
    return [name for name in names if name.startswith(incomplete)]


def backends(incomplete: str) -> list[str]:
    """The backends, plug-ins too."""
    return [name for name in (*BACKENDS, *plugins.entry_points()) if name.startswith(incomplete)]


def run_dirs(incomplete: str) -> list[str]:
    """The run directories in `runs/`, and those whose path begins so."""
    manifests = [*Path("runs").glob("*/run.json"), *_beginning(incomplete, "*/run.json")]
    directories = dict.fromkeys(str(manifest.parent) for manifest in manifests)
    return [directory for directory in directories if directory.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """The names of the runs in `runs/`, where a name is enough; and what `run_dirs` finds."""
    names = ["latest", *sorted(path.parent.name for path in Path("runs").glob("*/run.json"))]
    return [*(name for name in names if name.startswith(incomplete)), *run_dirs(incomplete)]


def _beginning(start: str, pattern: str) -> list[Path]:
    """The paths of this pattern that begin so."""
    directory, _, name = start.rpartition("/")
    return sorted(Path(directory or ("/" if start.startswith("/") else ".")).glob(glob.escape(name) + pattern))
