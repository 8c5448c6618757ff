"""Trust: which run directories this user has made here. What another directory names is never imported or contacted.

Anyone can write a run directory that names any file as its task, with all its hashes right. So each start of a run is
noted outside of it, in a directory that this user alone can write: `$XDG_STATE_HOME/tfloop/runs`, by default
`~/.local/state/tfloop/runs`. A command that needs the task takes it from there, not from the run directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from callbacks import files

MOST = 2000
"""So many run directories are remembered at most: those that are gone are forgotten first, then the oldest."""


def note(directory: Path, target: str | None, plan: Any = None) -> None:
    """Remembers that this user has started a run in a directory. Best effort: without it, `--target` must be given.

    Args:
        directory: the run directory, or that of a sweep.
        target: the task that was given, as an absolute TARGET; None: it can't be named.
        plan: of a sweep, what is done when it is gone on with.
    """
    with contextlib.suppress(OSError, RuntimeError):  # no home, or it can't be written
        place = _place()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_private(place):
            return
        if target is None:
            _entry(place, directory).unlink(missing_ok=True)
            return
        _write(place, directory, {"target": target, "plan": _digest(plan)})


def note_store(directory: Path, uri: str) -> None:
    """Remembers that this user has delivered a run to a tracking store. Best effort."""
    with contextlib.suppress(OSError, RuntimeError):
        place = _place()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_private(place):
            _write(place, directory, _noted(directory) | {"store": uri})


def may_contact(directory: Path, uri: str) -> bool:
    """Whether this user has trained in a directory, or delivered it to this store before."""
    found = _noted(directory)
    return "target" in found or found.get("store") == uri


def target_of(path: Path) -> str | None:
    """The task with which this user has started a run in a directory, or in that of a checkpoint; None: never."""
    whole = path.absolute()
    for directory in (whole, whole.parent.parent):  # a checkpoint is two levels below its run directory
        if found := _noted(directory).get("target"):
            return str(found)
    return None


def is_own_sweep(directory: Path, plan: Any) -> bool:
    """Whether this user has begun a sweep with this plan in a directory."""
    return _noted(directory).get("plan") == _digest(plan)


def _noted(directory: Path) -> dict[str, Any]:
    try:
        place, real = _place(), directory.resolve()
        entry = files.read_json(_entry(place, real)) if _is_private(place) else {}
        same = entry.get("path") == str(real) and entry.get("inode") == real.stat().st_ino
    except (OSError, RuntimeError):
        return {}
    return entry if same else {}


def _write(place: Path, directory: Path, what: dict[str, Any]) -> None:
    path, real = _entry(place, directory), directory.resolve()
    entry = {**what, "path": str(real), "inode": real.stat().st_ino, "time": time.time()}
    with files.replacing(path, aside=files.hidden_name(path)) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(json.dumps(entry).encode())
    _forget(place)


def _place() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or "")
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "tfloop" / "runs"


def _entry(place: Path, directory: Path) -> Path:
    return place / f"{hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]}.json"


def _is_private(place: Path) -> bool:
    """Whether no other user can write there."""
    about = place.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


def _digest(plan: Any) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _forget(place: Path) -> None:
    """Keeps the number of entries within bounds; by a tenth more than needed, so that it is rarely done."""
    entries = list(place.glob("*.json"))
    if len(entries) <= MOST:
        return
    for path in entries:
        if not Path(str(files.read_json(path).get("path"))).is_dir():
            path.unlink(missing_ok=True)
    left = sorted((path for path in entries if path.exists()), key=lambda path: path.stat().st_mtime)
    for path in left[: max(len(left) - MOST * 9 // 10, 0)]:
        path.unlink(missing_ok=True)
