"""The run directory: its place, the task that it belongs to, and the checkpoint from which a run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from callbacks.files import fsync_directory, launch_path, read_json
from callbacks.run_record.journal import jsonable
from callbacks.run_record.redaction import HIDDEN, redact, tell
from loop.backends.base import Backend
from loop.checkpoint import checkpoint_files, manifest
from loop.checkpoint.array_files import Json
from loop.checkpoint.lock import A_LOOK, locked
from loop.checkpoint.store import address, copies
from loop.checkpoint.store.bucket import StoreError
from loop.checkpoint.writer import arrays
from loop.errors import TrainingError, UsageError
from loop.launch.environment import start_timeout
from loop.options import KEPT
from loop.run import integrity, trust
from loop.run.other_model import optimizer_settings
from loop.run.phases import recorded_batch_size
from loop.run.run import Run
from loop.run.session import index_of
from loop.run.state import Arrays, scatter, stored_history, stream_of
from loop.run.state import restore as restore_state
from loop.target import task_loader
from loop.task import TrainTask, target_of, without_computed

Located: TypeAlias = tuple[Path, Json]
"""A checkpoint, and its manifest."""

Pairs: TypeAlias = dict[str, tuple[object, object]]
"""By the name of a setting: what it was in the checkpoint, and what it is now."""


@contextlib.contextmanager
def prepared(task: TrainTask, run_dir: str | Path | None, resume: str | Path, backend: Backend) -> Iterator[Path]:
    """Makes the run directory, or checks an existing one, and locks it for this run while within the context.

    The chief does so; the other workers get the result from it.

    Yields:
        The directory, absolute.

    Raises:
        UsageError: it can't be written, is in use, is another task's, or has a run that `resume="never"` would lose.
        TrainingError: the store of a URL doesn't answer.
    """
    answer: list[str] = []  # the problem, and the directory: one of them is ""; whether the problem is bad input
    with contextlib.ExitStack() as stack:
        if backend.is_chief:
            try:
                answer = ["", str(_taken(stack, task, run_dir, resume, backend)), ""]
            except (UsageError, StoreError) as error:  # raised on all workers below
                answer = [str(error), "", "bad input" if isinstance(error, UsageError) else ""]
        problem, path, is_bad_input = backend.broadcast_json(answer)
        if problem:
            raise UsageError(problem) if is_bad_input else TrainingError(problem)
        if backend.member:
            backend.member.run_directory = Path(path)
        yield Path(path)


def _taken(
    stack: contextlib.ExitStack, task: TrainTask, run_dir: str | Path | None, resume: str | Path, backend: Backend
) -> Path:
    """On the chief: the run directory, made or checked, and locked until the stack is closed."""
    task_loader.check_import()
    wait = A_LOOK
    if backend.member and backend.member.generation:
        # A later attempt goes on with the directory of the first one, whatever was asked for.
        run_dir = backend.member.run_directory or run_dir
        resume = "auto" if resume == "never" else resume
        wait = start_timeout()  # a chief whose host was cut off may not know that yet, and hold the lock
    # The lease of a store first: the directory on this machine belongs to the process that has it.
    url = address.url_named(run_dir)
    if url is not None:
        run_dir = stack.enter_context(copies.mirrored(url))
    in_memory = backend.member is not None and backend.member.kept is not None
    directory = _prepare(task, run_dir, resume, in_memory)
    stack.enter_context(locked(directory, wait))
    # Only with the lock: a run that is refused must leave no record.
    trust.note(directory, target_of(task))
    return directory


def _prepare(task: TrainTask, run_dir: str | Path | None, resume: str | Path, in_memory: bool) -> Path:
    """Makes the run directory, or checks an existing one; None: a new one below `runs/`.

    A run that goes on from a snapshot `in_memory` may have no checkpoint.
    """
    name = type(task).__name__
    directory = _resolved(launch_path(run_dir or new_name(name)))
    _make_writable(directory)
    integrity.check_files(directory)  # before any file of the run is opened
    about = read_json(directory / "run.json")
    if not about and (directory / "run.json").exists():
        tell(f"warning: {directory / 'run.json'} can't be read: it is written anew")
    if about and about.get("task") != name:
        problem = "has a run.json that names no task"
        if "task" in about:
            problem = f"belongs to the task {about['task']!r}, not {name!r}"
        raise UsageError(f"the run directory {directory} {problem}: give another one")
    if resume == "never":
        integrity.put_aside(directory)
        if checkpoint_files.has_any(directory / "checkpoints"):
            raise UsageError(
                f'the run directory {directory} holds checkpoints, and resume="never" would write over them: give '
                'another run directory, or resume="auto" to go on from them'
            )
    elif not in_memory:  # else no checkpoint is needed, and none may have been written
        integrity.check_checkpoints(directory, about)
    return directory


def new_name(task_name: str) -> Path:
    """A new run directory below `runs/`; it isn't made."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", task_name).strip("-.")[:80] or "run"
    return Path("runs") / f"{slug}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"


def _resolved(directory: Path) -> Path:
    """The directory without links."""
    try:
        return directory.resolve()
    except (OSError, RuntimeError):
        raise UsageError(f"the run directory {directory}: links there lead in a circle: give another one") from None


def _make_writable(directory: Path) -> None:
    """Makes a directory, unless it is there, and tries to write into it."""
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            fsync_directory(directory.parent)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise UsageError(
            f"the run directory {directory}: it, or what stands above it, is a file: give another one"
        ) from None
    except OSError as error:
        raise UsageError(
            f"the run directory {directory} can't be written ({error.strerror}): give another one, or make it writable"
        ) from None


def restore(run: Run, enter_phase: Callable[[], None]) -> Path | None:
    """Takes the run, in its first phase, to the position of its checkpoint, if it has one.

    The chief reads the files. The other workers get the position from it, and the variables by a broadcast.

    Returns:
        The checkpoint; None: the run starts from step 0.

    Raises:
        UsageError: the checkpoint is of other settings or another model. (On all workers, by `Run.synchronize`.)
    """
    checkpoint = None
    tensors = None
    if run.backend.is_chief:
        with run.defer_errors():
            checkpoint, tensors = _read(run)
    run.synchronize()

    checkpoint = run.backend.broadcast_json(checkpoint)
    if checkpoint is None:
        return None
    path, state, adopted = checkpoint
    with run.defer_errors(), of_a_run(path):
        # Phase by phase, as in training: what a phase freezes decides which variables the optimizer has.
        for _ in range(index_of(state, run.task)):
            enter_phase()
        if run.session.index:
            adopted += _accepted(run, path, _optimizers(run, state))
        restore_state(run, tensors, state, adopted)
        same_size = recorded_batch_size(state) == run.session.phase_options["batch_size"]
    run.synchronize()

    # From here on collectives alone: all workers have come this far without an error.
    run.backend.broadcast_variables(run.variables)
    scatter(run, tensors)
    stream_state = stream_of(run, tensors)  # on all workers, because it holds collectives
    if same_size and "drop_remainder" not in adopted:  # else the iterator's state has batches of the old size
        run.data.restore_stream(stream_state)
    if run.backend.is_chief and Path(path).parent == run.directory / "checkpoints":
        run.checkpointing.continue_from(Path(path))
    return Path(path)


def _read(run: Run) -> tuple[tuple[str, Json, list[str]] | None, Arrays | None]:
    """On the chief: the checkpoint to go on from, or the snapshot that an elastic job has in memory.

    Returns:
        Its path, its manifest with the history, and the options that have changed since; and its tensors.
    """
    kept = run.backend.member and run.backend.member.kept
    located = (kept.path, kept.state) if kept else _find(run)
    if located is None:
        return None, None
    path, state = located
    with of_a_run(path):
        adopted = _compare(run, path, state)
    tensors = arrays(kept.tensors) if kept else checkpoint_files.read(path, state)
    with of_a_run(path):
        state["history"] = jsonable(stored_history(path, state))
    return (str(path), state, adopted), tensors


@contextlib.contextmanager
def of_a_run(path: Path | str) -> Iterator[None]:
    """Within it, the manifest at `path` is read, which may be of any origin: wrong contents become a `UsageError`."""
    try:
        yield
    except UsageError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}: its manifest isn't that of a run ({type(error).__name__}: {error})") from error


def _find(run: Run) -> Located | None:
    """The checkpoint to go on from, and its manifest."""
    checkpoint_files.mend(run.directory / "checkpoints")  # first, so that a checkpoint put aside is among them
    own = run.checkpoints()
    resume = run.options["resume"]
    # Once the run has checkpoints of its own, it goes on from them, not from where it started again.
    if own or resume in ("auto", "never"):
        return newest(own)
    if address.is_url(resume):
        return locate(copies.copy(address.read_url(str(resume))))
    return locate(launch_path(resume))


def newest(paths: list[Path]) -> Located | None:
    """The newest of these checkpoints that is good, and its manifest; what is damaged or lost is reported."""
    located = checkpoint_files.newest(paths, lambda text: tell(f"warning: {text}"), manifest.verify)
    if located is not None:
        integrity.report_lost(located[0])
    return located


def locate_weights(path: Path) -> Located:
    """The checkpoint whose weights are the result of a run: the best if the run keeps it, else as `locate`."""
    last, last_state = locate(path)
    step = last_state.get("best", last_state)["step"]
    # A checkpoint that was named itself is taken as it is.
    if last == path or step == last_state["step"]:
        return last, last_state
    best = last.parent / f"step-{step:08d}"
    try:
        return best, manifest.verify(best)
    except checkpoint_files.CheckpointError as error:
        tell(f"warning: the best checkpoint is passed over: {error}")
        return last, last_state


def locate(path: Path) -> Located:
    """The checkpoint at `path`, or the newest good one of the run directory `path`; with its manifest.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    if (path / checkpoint_files.MANIFEST).exists():
        return path, manifest.verify(path)
    located = newest(checkpoint_files.complete(path / "checkpoints"))
    if located is None:
        raise UsageError(f"{path}: no checkpoint there: give a run directory or a directory step-<8 digits>")
    return located


def task_of(
    run_dir: Path, task_target: str | None, trusted: bool = False, assignments: Sequence[str] = ()
) -> tuple[TrainTask, Json, Path]:
    """The task of a run, with its hyperparameters, and the checkpoint with its result: the manifest, and where it is.

    Args:
        run_dir: a run directory, or a checkpoint.
        task_target: the target of the task; None: the one with which this user has trained in that directory.
        trusted: whether the target that the directory itself names may be imported.
        assignments: texts `name=value`: fields with another value than in the run.

    Raises:
        UsageError: there is no checkpoint; or the target isn't known.
    """
    path, state = locate_weights(run_dir)
    with of_a_run(path):
        recorded_target = state["run"].get("target")
        target = trust.known_target(run_dir, recorded_target, task_target, trusted)
        fields = {}
        hidden = []
        for name, value in state["run"]["hyperparameters"].items():
            if HIDDEN in json.dumps(value):
                hidden.append(name)
            else:
                fields[name] = value
        if hidden:
            tell(f"note: {', '.join(hidden)}: a run does not record secrets, so the task's default is taken")
    return task_loader.load(target, assignments, fields, state["run"].get("changed")), state, path


def _compare(run: Run, path: Path, state: Json) -> list[str]:
    """Refuses to go on with another task or with other settings that aren't accepted; reports what changes the bits.

    Returns:
        The names of the options that have changed.
    """
    before = redact(state["run"])
    now = redact(run.info)
    if before["task"] != now["task"]:
        raise UsageError(f"{path} is of the task {before['task']!r}, not {now['task']!r}: give another run directory")
    # What decides the result: options, fields, phases and optimizers.
    pairs: Pairs = {}
    for name in KEPT:
        if name in before["options"]:  # an older version of tfloop may not have had it
            pairs[name] = (before["options"][name], now["options"][name])
    pairs["the stream's split over workers"] = (state["layout"], run.step.data.train.layout)
    old_fields = without_computed(run.task, before["hyperparameters"])
    new_fields = now["hyperparameters"]
    for name in dict.fromkeys([*old_fields, *new_fields]):  # a field of either, once
        pairs[f"the field {name}"] = (old_fields.get(name), new_fields.get(name))
    pairs |= _phases(before.get("phases"), now.get("phases"), index_of(state, run.task))
    if not index_of(state, run.task):  # else the optimizers of its phase aren't made yet
        pairs |= _optimizers(run, state)
    adopted = _accepted(run, path, pairs)
    _report_place(before, now)
    return adopted


def _optimizers(run: Run, state: Json) -> Pairs:
    """What decides the result of the optimizers of the phase."""
    # A later attempt of an elastic job has the same code; its learning rate may be multiplied by the number of workers.
    later_attempt = run.backend.member and run.backend.member.generation
    return {} if later_attempt else optimizer_settings(state, run.session)


def _accepted(run: Run, path: Path | str, pairs: Pairs) -> list[str]:
    """The names of what has changed, if the user accepts that; the chief reports it."""
    changed = differences(pairs)
    if changed and not run.options["accept_changes"]:
        raise UsageError(
            f"{path} can't go on with other settings: {'; '.join(changed)}. Give the old ones; or start a new run in "
            "another run directory; or accept the changes with accept_changes=True (--accept-changes)"
        )
    if run.backend.is_chief:
        for text in changed:
            tell(f"note: goes on with another setting: {text}")
    return list(_changed(pairs))


def _report_place(before: Json, now: Json) -> None:
    """Reports what is different of the machine, the versions and the backend: the bits may be different then."""
    pairs: Pairs = {name: (before[name], now[name]) for name in ("backend", "replicas")}
    for group in ("versions", "machine"):
        for name, value in now[group].items():
            pairs[name] = (before[group].get(name), value)
    if moved := differences(pairs):
        tell(
            f"note: goes on elsewhere than it was: {'; '.join(moved)}. The examples are the same; the weights will be "
            "so to rounding, not to the bit"
        )


def _phases(before: list[Json] | None, now: list[Json] | None, index: int) -> Pairs:
    """What must stay as it was: the phases that are over, and the one under way except for its length."""
    if not before or not now:
        return {"phases": (before or None, now or None)}
    return {"the phases so far": (_begun(before, index), _begun(now, index))}


def _begun(phases: list[Json], index: int) -> list[Json]:
    """The phases up to this index; without the length of the last one, which may be made longer."""
    begun = phases[:index]
    for phase in phases[index : index + 1]:
        begun.append({"name": phase["name"], "batch_size": phase["batch_size"]})
    return begun


def differences(pairs: Pairs) -> list[str]:
    """A text for each pair whose values differ."""
    return [f"{name} was {was!r:.200}, now {is_!r:.200}" for name, (was, is_) in _changed(pairs).items()]


def _changed(pairs: Pairs) -> Pairs:
    """The pairs whose values differ."""
    changed = {}
    for name, (was, is_) in pairs.items():
        # Secrets aren't recorded, not even hashed, and can't be compared: a password may change between two attempts.
        if was != is_ and HIDDEN not in json.dumps([was, is_], default=str):
            changed[name] = (was, is_)
    return changed
