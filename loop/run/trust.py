"""Trust: which run directories this user has made on this machine.

Anyone can write a run directory that names any file as its task, with all its hashes right. So each start of a run is
recorded outside of it, in a directory that this user alone can write: `$XDG_STATE_HOME/tfloop/runs`, by default
`~/.local/state/tfloop/runs`. A command that needs the task takes it from there, not from the run directory. The code or
the tracking store that any other directory names is never imported or contacted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from pathlib import Path

from callbacks import files
from loop.checkpoint.store import address
from loop.errors import UsageError

MOST = 2000
"""The greatest number of entries. Those of directories that are gone are removed first, then the oldest."""


def note(directory: Path, target: str | None, plan: object = None) -> None:
    """Records that this user has started a run in a directory. Best effort: without a record, commands need `--target`.

    `target` is that of the task, with an absolute path; None: the task can't be named. Of a sweep, `plan` is what is
    done when it is resumed.
    """
    if target is None:
        _record(directory, {})  # removes the entry of an earlier task, which names other code
    else:
        _record(directory, {"target": target, "plan": _digest(plan)})


def note_store(directory: Path, uri: str) -> None:
    """Records that this user has delivered a run to a tracking store. Best effort."""
    _record(directory, _recorded(directory) | {"store": uri})


def may_contact(directory: Path, uri: str) -> bool:
    """Whether this user has trained in a directory, or delivered it to this store before."""
    entry = _recorded(directory)
    return "target" in entry or entry.get("store") == uri


def target_of(path: Path) -> str | None:
    """The target with which this user has started a run in a directory, or in that of a checkpoint; None: never."""
    absolute = path.absolute()
    for directory in (absolute, absolute.parent.parent):  # a checkpoint is two levels below its run directory
        if target := _recorded(directory).get("target"):
            return str(target)
    return None


def known_target(run_dir: Path, recorded: object, task_target: str | None, trusted: bool = False) -> str:
    """The target whose code may be imported for a run directory, or a checkpoint.

    It is the one that was typed; or the one `recorded` there, if that is `trusted`; or see `target_of`.

    Raises:
        UsageError: it isn't known.
    """
    target = task_target or (recorded if trusted else target_of(run_dir))
    shown = address.url_of_copy(run_dir) or run_dir  # the user knows the URL, and not the copy
    if not target:
        raise UsageError(f"{shown}: {_unknown(recorded)}")
    if not isinstance(target, str):
        raise UsageError(f"{shown}: it names the task {target!r:.99}: give it as --target file.py:Class")
    file = target.partition(":")[0]
    if not task_target and file.endswith(".py") and not Path(file).is_file():
        raise UsageError(
            f"{shown}: the file of its task, {file!r:.200}, isn't there any more: give the task where it is now, as "
            "--target file.py:Class"
        )
    return target


def _unknown(recorded_target: object) -> str:
    """The message for a directory whose task isn't known, or not trusted."""
    if not recorded_target:
        return "it doesn't say in which file its task is: give it as --target file.py:Class"
    return (
        f"you haven't trained there on this machine, and the code that it names ({str(recorded_target)!r:.200}) isn't "
        "run unasked: give the task as --target file.py:Class, or --trust if that run is yours"
    )


def is_own_sweep(directory: Path, plan: object) -> bool:
    """Whether this user has begun a sweep with this plan in a directory."""
    return _recorded(directory).get("plan") == _digest(plan)


def _recorded(directory: Path) -> dict[str, object]:
    """The entry of a directory; empty if there is none."""
    with contextlib.suppress(OSError, RuntimeError):
        records = _records()
        real = directory.resolve()
        if _is_private(records):
            entry = files.read_json(_entry(records, real))
            # Also the inode: another directory may have been put at the same path.
            if (entry.get("path"), entry.get("inode")) == (str(real), real.stat().st_ino):
                return entry
    return {}


def _record(directory: Path, what: dict[str, object]) -> None:
    """Writes the entry of a directory, or removes it if `what` is empty. Best effort."""
    with contextlib.suppress(OSError, RuntimeError):  # there is no home directory, or it can't be written
        records = _records()
        records.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_private(records):
            return
        path = _entry(records, directory)
        if not what:
            path.unlink(missing_ok=True)
            return
        real = directory.resolve()
        entry = {**what, "path": str(real), "inode": real.stat().st_ino, "time": time.time()}
        with files.replacing(path, aside=files.hidden_name(path)) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(entry).encode())
        _remove_old(records)


def _records() -> Path:
    """The directory that holds an entry for each run directory."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "")
    if not state.is_absolute():
        state = files.expanded("~/.local/state")
    return state / "tfloop" / "runs"


def _entry(records: Path, directory: Path) -> Path:
    return records / f"{hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]}.json"


def _is_private(records: Path) -> bool:
    """Whether no other user can write there."""
    status = records.lstat()  # not `stat`: a link may be made to lead elsewhere later
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _digest(plan: object) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _remove_old(records: Path) -> None:
    """Keeps at most `MOST` entries. It removes a tenth more than needed, so that it is rarely done."""
    entries = list(records.glob("*.json"))
    if len(entries) <= MOST:
        return
    for path in entries:
        if not Path(str(files.read_json(path).get("path"))).is_dir():
            path.unlink(missing_ok=True)

    # Some are removed by now; another process may remove others at the same time.
    left = sorted(filter(Path.exists, entries), key=lambda path: path.stat().st_mtime)
    for path in left[: max(len(left) - MOST * 9 // 10, 0)]:
        path.unlink(missing_ok=True)
