"""Intact: whether a run directory is what a run has left there, and has what its journal tells of."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from callbacks import files
from callbacks.mlflow.tracker import STATE
from callbacks.run_record import journal
from callbacks.run_record.record import ABOUT, is_run
from callbacks.run_record.redaction import tell
from loop.checkpoint import checkpoint_files
from loop.checkpoint.lock import NAME as LOCK
from loop.errors import UsageError

CHECKPOINTS = "checkpoints"
_IN_CHECKPOINTS = re.compile(r"step-[0-9]{8,}(\.old)?(\.tmp)?|lost\+found|\..*")
_TELLING = (b'"checkpoint"', b'"restore"')


def check_files(directory: Path) -> None:
    """Refuses a run directory in which something else stands in the place of a file that a run opens or writes into.

    Links are followed in two cases alone: to the run directory itself, and from `checkpoints` to a directory on another
    disk, say, that holds nothing but checkpoints, and isn't another run's.

    Raises:
        UsageError: it is so; or a file can't be written.
    """
    try:
        for name in (LOCK, journal.NAME, ABOUT, STATE, "mlflow.lock"):
            files.check(directory / name)
        for name in ("bad", "samples"):
            if os.path.lexists(directory / name):
                files.make_directory(directory / name)
        if os.path.lexists(directory / journal.NAME):
            os.close(files.opened(directory / journal.NAME, os.O_RDWR))
    except files.FileError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename} can't be written ({error.strerror}): give another run directory") from None
    with contextlib.suppress(OSError):  # a link that leads nowhere: see `check_checkpoints`
        _check_link(directory)


def _check_link(directory: Path) -> None:
    place = directory / CHECKPOINTS
    if not place.is_symlink() or not place.is_dir():
        return
    real = place.resolve()
    strange = [each.name for each in real.iterdir() if not _IN_CHECKPOINTS.fullmatch(each.name)]
    if strange:
        raise UsageError(
            f"{place} is a link to {real}, which holds {strange[0]!r}: let it lead to a directory for this run's "
            "checkpoints alone"
        )
    if real.parent != directory and is_run(real.parent):
        raise UsageError(f"{place} is a link into another run's directory, {real.parent}: give this run one of its own")


def check_checkpoints(directory: Path, about: dict[str, Any]) -> None:
    """Refuses a run directory whose checkpoints are lost: the run would start from step 0 without a word.

    Args:
        directory: the run directory.
        about: its `run.json`.

    Raises:
        UsageError: it had a checkpoint, by its journal or `run.json`, and has none now.
    """
    place = directory / CHECKPOINTS
    if checkpoint_files.complete(place):
        return
    lost = _told(directory) or about.get("checkpoint")
    progress = about.get("progress")
    if not lost and "checkpoint" not in about and not os.path.lexists(directory / journal.NAME):
        # Of a version that didn't note it, and without its journal.
        step = progress.get("step") if isinstance(progress, dict) else None
        lost = f"step {step}" if isinstance(step, int) and step > 0 else ""
    if lost:
        raise UsageError(
            f"the run in {directory} had the checkpoint {str(lost)[:80]!r}, and {_absence(place)}: bring it back to go "
            'on; to start from step 0, give another run directory, or resume="never" (--resume never)'
        )


def _told(directory: Path) -> str:
    """The checkpoint that was completed last since the run was started from step 0, as the journal tells; else ""."""
    path, found = directory / journal.NAME, ""
    if not path.exists():
        return found
    with files.reading(path) as file:
        for line in files.lines(file):
            if not any(word in line for word in _TELLING):
                continue
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") in ("checkpoint", "restore"):
                    name = entry.get("checkpoint")
                    # A restore from elsewhere (--resume PATH) names a checkpoint that was never here.
                    found = name or "" if entry["event"] == "checkpoint" else found if name else ""
    return found


def _absence(place: Path) -> str:
    if place.is_dir():
        return f"{place} holds none"
    if place.is_symlink():
        return f"{place} is a link to {place.readlink()}, which isn't there (a disk that isn't mounted?)"
    return f"{place} is no directory" if os.path.lexists(place) else f"{place} is gone"


def put_aside(directory: Path) -> None:
    """Gives `checkpoints` that can't be read, or lead nowhere, another name: the run is to start from step 0."""
    place = directory / CHECKPOINTS
    if not os.path.lexists(place):
        return
    try:
        next(place.iterdir(), None)
    except OSError as error:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = place.with_name(f"{place.name}.{stamp}")
        try:
            place.rename(aside)
        except OSError as worse:
            raise UsageError(f"{place} can't be used ({worse.strerror}): give another run directory") from None
        tell(f"note: {place} can't be read ({error.strerror}): it is now {aside.name}")
