"""The files in the directory of a sweep. The delivery to MLflow reads them as those of a run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callbacks.files import appending, check, read_json, write_text
from callbacks.run_record import journal
from callbacks.run_record.redaction import redact
from loop.checkpoint.lock import NAME as LOCK
from loop.commands.sweep.plan import Plan
from loop.errors import UsageError

STORAGE = "study.db"
"""Optuna's storage, in the directory of the sweep."""


def begin(directory: Path, about: Mapping[str, Any]) -> None:
    """Writes which sweep is in the directory, or compares it with what was written before.

    As in the directory of a run, there are a `run.json` and a journal, which the delivery to MLflow reads.
    """
    # Before anything is read or written: a link would lead to a file outside of the directory.
    for name in ("run.json", journal.NAME, STORAGE):
        check(directory / name)
    _check_same(directory, read_json(directory / "run.json").get("sweep"), about["sweep"])
    write_about(directory, about, "running")
    path = directory / journal.NAME
    if not path.exists():
        write_text(path, journal_line(0, "fit_start"))
    elif journal.is_torn(path):  # a kill has cut the last line: the next one must not be added to it
        with appending(path) as file:
            file.write(b"\n")


def _check_same(directory: Path, before: object, now: Mapping[str, object]) -> None:
    """Refuses a directory that holds another sweep, or anything else."""
    if not isinstance(before, dict):
        # The lock is this process's own. A sweep that was killed at its start may have left the other file.
        others = [path.name for path in directory.iterdir() if path.name not in (LOCK, "run.json.tmp")]
        if others:
            raise UsageError(
                f"--sweep-dir {directory}: it holds {others[0]}, and no sweep: give a new directory, or an empty one"
            )
        return
    for name, value in now.items():
        if before.get(name) != value:
            raise UsageError(
                f"{directory} is of another sweep: {name} was {before.get(name)!r}, now {value!r}: give another "
                "--sweep-dir, or what it was"
            )


def about_sweep(plan: Plan, kind: type, trials: int) -> dict[str, object]:
    """The `run.json` of a sweep. It has the entries of a run's `run.json` that a sweep has, too."""
    kept = plan.as_json()
    return {
        "task": kind.__name__,
        "target": plan.target,
        "hyperparameters": kept["grid"] | kept["random"],
        "options": {name: getattr(plan, name) for name in ("metric", "direction", "sampler", "pruner", "seed")},
        "versions": {"python": sys.version.split()[0]},
        "trials": trials,
        "sweep": kept,
    }


def write_about(directory: Path, about: Mapping[str, object], status: str) -> None:
    """Writes the `run.json` of a sweep."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    state = {"status": status, "updated": now, "pid": os.getpid()}

    write_text(directory / "run.json", json.dumps(redact(about) | state, indent=1))


def journal_line(step: int, event: str, **more: object) -> str:
    """A line of the sweep's journal."""
    # A sweep's steps are the trials that have ended. It has no epochs, but readers of journals expect the entry.
    return json.dumps({"time": time.time(), "event": event, "step": step, "epoch": 0, **more}) + "\n"
