"""The run directory: where it lies, whose it is, and from which checkpoint in it a run goes on."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from callbacks.redact import redact
from loop import checkpoint
from loop.backends.base import Backend
from loop.errors import UsageError
from loop.run import KEPT, Run
from loop.state import restore as restore_state
from loop.task import TrainTask


def prepare(task: TrainTask, run_dir: str | Path | None, resume: str | Path, backend: Backend) -> Path:
    """Makes the run directory, or checks the one that is there. The chief does it, and all workers hear of it.

    Returns:
        The directory, absolute.

    Raises:
        UsageError: it can't be written, belongs to another task, or holds a run that `resume="never"` would overwrite.
    """
    answer: list[str] = []
    if backend.is_chief:
        try:
            answer = ["", str(_prepare(task, run_dir, resume))]
        except UsageError as error:
            answer = [str(error), ""]
    problem, path = backend.broadcast_json(answer)
    if problem:
        raise UsageError(problem)
    return Path(path)


def _prepare(task: TrainTask, run_dir: str | Path | None, resume: str | Path) -> Path:
    name = type(task).__name__
    if run_dir is None:
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
        directory = Path("runs") / f"{slug}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
    else:
        directory = Path(run_dir)
    directory = directory.resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"the run directory {directory} can't be written ({error.strerror}): give another one, or make it writable"
        ) from None
    about = read_json(directory / "run.json")
    if about is not None and about.get("task") != name:
        raise UsageError(
            f"the run directory {directory} belongs to the task {about.get('task')!r}, not {name!r}: give another one"
        )
    if resume == "never" and checkpoint.complete(directory / "checkpoints"):
        raise UsageError(
            f'the run directory {directory} holds checkpoints, and resume="never" would write over them: give another '
            'run directory, or resume="auto" to go on from them'
        )
    return directory


def restore(run: Run) -> Path | None:
    """Takes the run to where its checkpoint is, if it has one.

    The chief reads the files; the other workers take the position from it, and the variables by the broadcast that
    follows.

    Returns:
        The checkpoint, or None: the run starts.

    Raises:
        UsageError: the checkpoint is of other settings or another model. (On all workers, by `Run.agree`.)
    """
    found, tensors = None, None
    if run.backend.is_chief:
        with run.guard():
            found = _find(run)
            if found is not None:
                _compare(run, *found)
                tensors = checkpoint.read(*found)
    run.agree()
    path, state = run.backend.broadcast_json([str(found[0]), found[1]] if found else [None, None])
    if path is None:
        return None
    with run.guard():
        restore_state(run, tensors, state)
    run.agree()
    run.backend.broadcast_variables(run.variables)
    return Path(path)


def _find(run: Run) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, and its manifest."""
    own, resume = run.checkpoints(), run.options["resume"]
    if own or resume in ("auto", "never"):  # once the run is under way, where it started from has no part in it
        return newest(own)
    return locate(Path(resume))


def newest(paths: list[Path]) -> tuple[Path, dict[str, Any]] | None:
    """The newest good one of these checkpoints, and its manifest; bad ones are named and passed over."""
    try:
        return checkpoint.newest(paths, lambda text: print(f"warning: {text}", file=sys.stderr))
    except checkpoint.CheckpointError as error:
        raise UsageError(str(error)) from None


def locate(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest good one of the run directory `path`; with its manifest.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    if (path / checkpoint.MANIFEST).exists():
        try:
            return path, checkpoint.verify(path)
        except checkpoint.CheckpointError as error:
            raise UsageError(str(error)) from None
    found = newest(checkpoint.complete(path / "checkpoints"))
    if found is None:
        raise UsageError(f"{path}: no checkpoint there: give a run directory or a directory step-<8 digits>")
    return found


def _compare(run: Run, path: Path, manifest: dict[str, Any]) -> None:
    """Refuses to go on with another task or other settings: it would be a different run."""
    before, now = manifest["run"], redact(run.info)
    pairs = {"the task": (before["task"], now["task"])}
    pairs |= {name: (before["options"][name], now["options"][name]) for name in KEPT if name in before["options"]}
    pairs |= {"the stream's split over workers": (manifest["layout"], run.step.data.train.layout)}
    old, new = before["hyperparameters"], now["hyperparameters"]
    pairs |= {f"the field {name}": (old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])}
    changed = [f"{name} was {was!r}, now {is_!r}" for name, (was, is_) in pairs.items() if was != is_]
    if changed:
        raise UsageError(
            f"{path} can't go on with other settings: {'; '.join(changed)}. Give the old ones, or start a new run in "
            "another run directory"
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None where there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
