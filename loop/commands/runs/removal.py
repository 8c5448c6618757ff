"""`tfloop runs rm`: removes run directories."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from callbacks.files import FileError, expanded
from callbacks.run_record.record import ABOUT, LOCK, is_run, printable, read_about, under_way
from loop.checkpoint.lock import locked
from loop.checkpoint.store import address
from loop.commands.runs.directories import locate
from loop.errors import UsageError


def to_remove(root: Path, name: str) -> Path | str:
    """The directory of a run, or the URL of one in a store, which may be damaged: it needn't be copied for that."""
    if address.is_url(name):
        return address.read_url(name)
    path = locate(root, name, checkpoints=False)
    # Of a copy, the run in the store is meant.
    return address.url_of_copy(path) or path


def check_removable(path: Path | str, root: Path) -> None:
    """Checks that a directory, or what is at a URL, may be removed.

    Raises:
        UsageError: there is something else than one run in it, or the run is under way; of one in a store, `remove`
            finds that out.
        StoreError: the store doesn't answer.
    """
    if isinstance(path, str):
        from loop.checkpoint.store import copies  # which loads NumPy

        copies.bucket_of(path)
        return
    shown = printable(str(path))
    about = read_about(path)
    if path.is_symlink():  # its name would go, and the run would stay
        raise UsageError(f"{shown} is a link: give the directory {printable(os.path.realpath(path))} itself")
    if not {"task", "status", "hyperparameters"} <= set(about):
        raise UsageError(f"{shown} has no run.json of a run: it may be anything, remove it yourself")
    whole = path.resolve()
    kept = [Path.cwd(), root.resolve()]
    with contextlib.suppress(FileError):  # a user may have no home directory
        kept.append(expanded("~"))
    if any(directory.is_relative_to(whole) for directory in kept):
        raise UsageError(f"{shown} holds where you are, or all runs: remove what is of the run in it yourself")
    for inner in path.iterdir():
        if inner.is_dir() and not inner.is_symlink() and is_run(inner):
            raise UsageError(f"{shown} holds other runs: remove them first")
    if (path / LOCK).is_symlink() or under_way(path):
        raise UsageError(f"{shown}: the run is under way: end it first")


def size(path: Path) -> int:
    """The bytes of all files below a directory; links aren't followed."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            total += (Path(folder) / name).lstat().st_size
    return total


def remove(path: Path | str) -> list[str]:
    """Removes a run in a store, or a run directory, its `run.json` last: what is left of it can be removed later.

    Returns:
        What could not be removed, and why.
    """
    if isinstance(path, str):
        from loop.checkpoint.store import copies

        copies.remove(path)
        return []
    left: list[str] = []

    def note(action: Any, name: str, error: Any) -> None:
        if not isinstance(error[1], FileNotFoundError):
            left.append(f"{printable(str(name))} ({getattr(error[1], 'strerror', None) or error[1]})")

    try:
        with locked(path):  # no training can begin in it meanwhile
            # Its run.json goes last, and stays if anything else does: without it, the rest couldn't be removed later.
            for entry in sorted(path.iterdir(), key=lambda entry: entry.name == ABOUT):
                if left and entry.name == ABOUT:
                    return left
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, onerror=note)
                else:
                    entry.unlink(missing_ok=True)
        path.rmdir()
    except OSError as error:
        note(None, error.filename or str(path), (None, error))
    return left
