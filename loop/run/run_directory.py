"""The run directory: where it lies, whose it is, and from which checkpoint in it a run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from callbacks.files import fsync_directory, read_json
from callbacks.run_record.journal import jsonable
from callbacks.run_record.redaction import HIDDEN, redact, tell
from loop.backends.base import Backend
from loop.checkpoint import checkpoint_files, manifest
from loop.checkpoint.lock import A_LOOK, locked
from loop.checkpoint.writer import arrays
from loop.errors import UsageError
from loop.launch.environment import start_timeout
from loop.options import KEPT
from loop.run import integrity, trust
from loop.run.run import Run
from loop.run.session import index_of
from loop.run.state import restore as restore_state
from loop.run.state import stored_history, stream_of
from loop.target import task_loader
from loop.task import TrainTask, target_of


@contextlib.contextmanager
def prepared(task: TrainTask, run_dir: str | Path | None, resume: str | Path, backend: Backend) -> Iterator[Path]:
    """Makes the run directory, or checks the one that is there; within it, it is this run's alone.

    The chief does it, and all workers hear of it.

    Returns:
        The directory, absolute.

    Raises:
        UsageError: it can't be written, is in use, belongs to another task, or holds a run that `resume="never"` would
            overwrite.
    """
    answer: list[str] = []
    with contextlib.ExitStack() as stack:
        if backend.is_chief:
            try:
                wait = A_LOOK
                if backend.member and backend.member.generation:
                    run_dir, resume = backend.member.run_directory or run_dir, "auto" if resume == "never" else resume
                    wait = start_timeout()  # the last chief's host may be cut off, and the chief not know it yet
                kept = backend.member is not None and backend.member.kept is not None
                directory = _prepare(task, run_dir, resume, kept)
                stack.enter_context(locked(directory, wait))
                trust.note(directory, target_of(task))
                answer = ["", str(directory)]
            except UsageError as error:
                answer = [str(error), ""]
        problem, path = backend.broadcast_json(answer)
        if problem:
            raise UsageError(problem)
        if backend.member:
            backend.member.run_directory = Path(path)
        yield Path(path)


def _prepare(task: TrainTask, run_dir: str | Path | None, resume: str | Path, kept: bool) -> Path:
    """Makes the run directory, or checks the one that is there; `kept`: its state is in memory, not in checkpoints."""
    name = type(task).__name__
    if run_dir is None:
        slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:80] or "run"
        directory = Path("runs") / f"{slug}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
    else:
        directory = Path(run_dir)
    directory = directory.resolve()
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            fsync_directory(directory.parent)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"the run directory {directory} can't be written ({error.strerror}): give another one, or make it writable"
        ) from None
    integrity.check_files(directory)
    about = read_json(directory / "run.json")
    if not about and (directory / "run.json").exists():
        tell(f"warning: {directory / 'run.json'} can't be read: it is written anew")
    if about and about.get("task") != name:
        raise UsageError(
            f"the run directory {directory} belongs to the task {about.get('task')!r}, not {name!r}: give another one"
        )
    if resume == "never":
        integrity.put_aside(directory)
        if checkpoint_files.complete(directory / "checkpoints"):
            raise UsageError(
                f'the run directory {directory} holds checkpoints, and resume="never" would write over them: give '
                'another run directory, or resume="auto" to go on from them'
            )
    elif not kept:
        integrity.check_checkpoints(directory, about)
    return directory


def restore(run: Run, enter_phase: Callable[[], None]) -> Path | None:
    """Takes the run to where its checkpoint is, if it has one.

    The chief reads the files; the other workers take the position from it, and the variables by the broadcast that
    follows.

    Args:
        run: the run, at the start of its first phase.
        enter_phase: takes it to the next phase.

    Returns:
        The checkpoint, or None: the run starts.

    Raises:
        UsageError: the checkpoint is of other settings or another model. (On all workers, by `Run.synchronize`.)
    """
    found, tensors = None, None
    adopted: list[str] = []
    if run.backend.is_chief:
        with run.defer_errors():
            kept = run.backend.member and run.backend.member.kept
            found = (kept.path, kept.state) if kept else _find(run)
            if found is not None:
                with of_a_run(found[0]):
                    adopted = _compare(run, *found)
                tensors = arrays(kept.tensors) if kept else checkpoint_files.read(*found)
                with of_a_run(found[0]):
                    found[1]["history"] = jsonable(stored_history(*found))
    run.synchronize()
    path, state, adopted = run.backend.broadcast_json([str(found[0]), found[1], adopted] if found else [None, None, []])
    if path is None:
        return None
    with run.defer_errors(), of_a_run(path):
        for _ in range(index_of(state, run.task)):
            enter_phase()
        restore_state(run, tensors, state, adopted)
    run.synchronize()
    run.backend.broadcast_variables(run.variables)
    stream_state = stream_of(run, tensors)  # on all workers, because it holds collectives
    if not {"batch_size", "drop_remainder"} & set(adopted):  # else it has batches of the old size
        run.data.restore_stream(stream_state)
    if run.backend.is_chief and Path(path).parent == run.directory / "checkpoints":
        run.checkpointing.continue_from(Path(path))
    return Path(path)


@contextlib.contextmanager
def of_a_run(path: Path | str) -> Iterator[None]:
    """Within it, a manifest of unknown origin is read: what it lacks is an error of the input."""
    try:
        yield
    except UsageError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}: its manifest is none of a run ({type(error).__name__}: {error})") from error


def _find(run: Run) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, and its manifest."""
    checkpoint_files.mend(run.directory / "checkpoints")
    own, resume = run.checkpoints(), run.options["resume"]
    if own or resume in ("auto", "never"):  # once the run is under way, where it started from has no part in it
        return newest(own)
    return locate(Path(resume))


def newest(paths: list[Path]) -> tuple[Path, dict[str, Any]] | None:
    """The newest good one of these checkpoints, and its manifest; bad ones are named and passed over."""
    return checkpoint_files.newest(paths, lambda text: tell(f"warning: {text}"), manifest.verify)


def locate_weights(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint whose weights are the result of a run: the best where the run keeps it, else as `locate`."""
    found, about = locate(path)
    step = about["best"]["step"] if "best" in about else about["step"]
    if found == path or step == about["step"]:
        return found, about
    best = found.parent / f"step-{step:08d}"
    try:
        return best, manifest.verify(best)
    except checkpoint_files.CheckpointError as error:
        tell(f"warning: the best checkpoint is passed over: {error}")
        return found, about


def locate(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest good one of the run directory `path`; with its manifest.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    if (path / checkpoint_files.MANIFEST).exists():
        return path, manifest.verify(path)
    found = newest(checkpoint_files.complete(path / "checkpoints"))
    if found is None:
        raise UsageError(f"{path}: no checkpoint there: give a run directory or a directory step-<8 digits>")
    return found


def task_of(run_dir: Path, task_target: str | None, trusted: bool = False) -> tuple[Any, dict[str, Any]]:
    """The task of a run, with its hyperparameters, and the manifest of the checkpoint.

    Args:
        run_dir: a run directory, or a checkpoint.
        task_target: where the task is, as it was typed; None: where this user had it when he trained in that directory.
        trusted: whether the task that the directory itself names may be imported, without asking who wrote it.

    Raises:
        UsageError: there is no checkpoint; or it isn't known where the task is.
    """
    path, found = locate(run_dir)
    with of_a_run(path):
        named = found["run"].get("target")
        place_ = task_target or (named if trusted else trust.target_of(run_dir))
        recorded = found["run"]["hyperparameters"].items()
        fields = {name: value for name, value in recorded if HIDDEN not in json.dumps(value)}
        if missing := [name for name, _ in recorded if name not in fields]:
            tell(f"note: {', '.join(missing)}: a run does not record secrets, so the task's default is taken")
    if not place_:
        raise UsageError(f"{run_dir}: {_unknown(named)}")
    if not isinstance(place_, str):
        raise UsageError(f"{path}: its manifest names the task {place_!r:.99}: give it as --target file.py:Class")
    return task_loader.load(place_, fields=fields), found


def _unknown(named: Any) -> str:
    if not named:
        return "it doesn't say in which file its task is: give it as --target file.py:Class"
    return (
        f"you haven't trained there on this machine, and the code that it names ({str(named)!r:.200}) isn't run "
        "unasked: give the task as --target file.py:Class, or --trust if that directory is yours"
    )


def _compare(run: Run, path: Path, found: dict[str, Any]) -> list[str]:
    """Refuses to go on with another task or other settings, unless that is to be accepted; tells what changes the bits.

    Returns:
        The names of the options that have changed.
    """
    before, now = redact(found["run"]), redact(run.info)
    if before["task"] != now["task"]:
        raise UsageError(f"{path} is of the task {before['task']!r}, not {now['task']!r}: give another run directory")
    pairs = {name: (before["options"][name], now["options"][name]) for name in KEPT if name in before["options"]}
    pairs |= {"the stream's split over workers": (found["layout"], run.step.data.train.layout)}
    old, new = before["hyperparameters"], now["hyperparameters"]
    pairs |= {f"the field {name}": (old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])}
    pairs |= _phases(before.get("phases"), now.get("phases"), index_of(found, run.task))
    changed = differences(pairs)
    if changed and not run.options["accept_changes"]:
        raise UsageError(
            f"{path} can't go on with other settings: {'; '.join(changed)}. Give the old ones; or start a new run in "
            "another run directory; or accept the changes with accept_changes=True (--accept-changes)"
        )
    for text in changed:
        tell(f"note: goes on with another setting: {text}")
    places = {name: (before[name], now[name]) for name in ("backend", "replicas")}
    for name in ("versions", "machine"):
        places |= {key: (before[name].get(key), now[name][key]) for key in now[name]}
    if moved := differences(places):
        tell(
            f"note: goes on elsewhere than it was: {'; '.join(moved)}. The examples are the same; the weights will be "
            "so to rounding, not to the bit"
        )
    return [name for name, (was, is_) in pairs.items() if _differ(was, is_)]


def _phases(before: Any, now: Any, index: int) -> dict[str, tuple[Any, Any]]:
    """What must stay as it was: all of the phases that are over, and of the one under way all but its length."""
    if not before or not now:
        return {"phases": (before or None, now or None)}
    begun = []
    for phases in (before, now):
        current = [{"name": each["name"], "batch_size": each["batch_size"]} for each in phases[index : index + 1]]
        begun.append(phases[:index] + current)
    return {"the phases so far": (begun[0], begun[1])}


def differences(pairs: dict[str, tuple[Any, Any]]) -> list[str]:
    """Of what has another value now, a text each."""
    return [f"{name} was {was!r:.200}, now {is_!r:.200}" for name, (was, is_) in pairs.items() if _differ(was, is_)]


def _differ(was: Any, is_: Any) -> bool:
    """Whether two recorded values differ.

    Secrets aren't recorded, not even hashed, so they can't be compared: a password may change between two attempts.
    """
    return was != is_ and HIDDEN not in json.dumps([was, is_], default=str)
