"""Checks that a run directory holds a run's own files, and the checkpoints that its journal records."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from callbacks import evaluate_beside, files
from callbacks.arguments import is_whole
from callbacks.checkpoint import step_of
from callbacks.mlflow.tracker import STATE
from callbacks.run_record import journal, provenance
from callbacks.run_record.record import ABOUT, is_run
from callbacks.run_record.redaction import tell
from loop.checkpoint import checkpoint_files
from loop.checkpoint.array_files import Json
from loop.checkpoint.lock import NAME as LOCK
from loop.errors import UsageError

CHECKPOINTS = "checkpoints"
_IN_CHECKPOINTS = re.compile(r"step-[0-9]{8,}(\.old)?(\.tmp)?|lost\+found|\..*")


def check_files(directory: Path) -> None:
    """Refuses a run directory that has a link, a pipe or the like under the name of a file that a run opens.

    Links are followed in two cases alone: to the run directory itself; and from `checkpoints` to a directory, such as
    one on another disk, that holds nothing but checkpoints and isn't another run's.

    Raises:
        UsageError: which name it is; or a file can't be written.
    """
    try:
        for name in (LOCK, journal.NAME, ABOUT, STATE, "mlflow.lock"):
            files.check(directory / name)
        for name in ("bad", "samples", provenance.FOLDER, evaluate_beside.FOLDER):
            if os.path.lexists(directory / name):
                files.make_directory(directory / name)
        # Opened for a moment, so that a journal that can't be written is known before the training.
        if os.path.lexists(directory / journal.NAME):
            os.close(files.opened(directory / journal.NAME, os.O_RDWR))
    except files.FileError as error:  # an OSError whose message is complete
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename} can't be written ({error.strerror}): give another run directory") from None
    with contextlib.suppress(OSError):  # a link that leads nowhere: see `check_checkpoints`
        _check_link(directory)
    checkpoints = directory / CHECKPOINTS
    # Known before the training, too. `complete` and `put_aside` report a directory that can't even be read.
    if os.access(checkpoints, os.R_OK) and not os.access(checkpoints, os.W_OK):
        raise UsageError(f"{checkpoints} can't be written: make it writable, or give another run directory")


def _check_link(directory: Path) -> None:
    link = directory / CHECKPOINTS
    if not link.is_symlink() or not link.is_dir():
        return
    real = link.resolve()
    for path in real.iterdir():
        if not _IN_CHECKPOINTS.fullmatch(path.name):
            raise UsageError(
                f"{link} is a link to {real}, which holds {path.name!r}: let it lead to a directory for this run's "
                "checkpoints alone"
            )
    if real.parent != directory and is_run(real.parent):
        raise UsageError(f"{link} is a link into another run's directory, {real.parent}: give this run one of its own")


def check_checkpoints(directory: Path, about: Json) -> None:
    """Refuses a run directory whose checkpoints are lost: the run would start from step 0 without a warning.

    Raises:
        UsageError: it had a checkpoint, by its journal or `run.json` (`about`), and has none now.
    """
    checkpoints = directory / CHECKPOINTS
    if checkpoint_files.has_any(checkpoints):
        return
    lost = _recorded_checkpoint(directory) or about.get("checkpoint")
    progress = about.get("progress")
    if not lost and "checkpoint" not in about and not os.path.lexists(directory / journal.NAME):
        # The run.json of an older version, without a journal: it records the step alone.
        step = progress.get("step") if isinstance(progress, dict) else None
        lost = f"step {step}" if is_whole(step, 1) else ""
    if lost:
        raise UsageError(
            f"the run in {directory} had the checkpoint {str(lost)[:80]!r}, and {_absence(checkpoints)}: bring it back "
            'to go on; to start from step 0, give another run directory, or resume="never" (--resume never)'
        )


def report_lost(taken: Path) -> None:
    """Warns if the journal records a later checkpoint than `taken`, the newest good one, and that one is gone."""
    name = ""
    with contextlib.suppress(OSError):  # the journal may be a directory, or unreadable
        name = _recorded_checkpoint(taken.parent.parent)
    if not checkpoint_files.is_name(name):
        return
    later = taken.with_name(name)
    if step_of(later) > step_of(taken) and not os.path.lexists(later):
        tell(f"warning: {later} isn't there any more: bring it back, or what came after {taken.name} is lost")


def _recorded_checkpoint(directory: Path) -> str:
    """The last checkpoint in the journal since the run was started from step 0; "" if there is none."""
    last = ""
    for entry, _ in journal.read(directory / journal.NAME, events=("checkpoint", "restore")):
        # A restore that names a checkpoint goes on from it, which may be one that was never here (--resume PATH). A
        # restore that names none has started the run from step 0.
        event = entry.get("event")
        if event == "checkpoint" or (event == "restore" and not entry.get("checkpoint")):
            last = str(entry.get("checkpoint") or "")
    return last


def _absence(checkpoints: Path) -> str:
    if checkpoints.is_dir():
        return f"{checkpoints} holds none"
    if checkpoints.is_symlink():
        return f"{checkpoints} is a link to {checkpoints.readlink()}, which isn't there (a disk that isn't mounted?)"
    return f"{checkpoints} isn't a directory" if os.path.lexists(checkpoints) else f"{checkpoints} is gone"


def put_aside(directory: Path) -> None:
    """Renames `checkpoints` if it can't be read or is a link to nothing: the run is to start from step 0."""
    checkpoints = directory / CHECKPOINTS
    if not os.path.lexists(checkpoints):
        return
    try:
        next(checkpoints.iterdir(), None)  # opens it: only that shows whether it can be read
    except OSError as error:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        aside = checkpoints.with_name(f"{checkpoints.name}.{stamp}")
        try:
            checkpoints.rename(aside)
        except OSError as worse:
            raise UsageError(f"{checkpoints} can't be used ({worse.strerror}): give another run directory") from None
        tell(f"note: {checkpoints} can't be read ({error.strerror}): it is now {aside.name}")
