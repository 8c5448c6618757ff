"""Checkpoint files: write, verify, find, read. Tensors and JSON only; when to save is decided elsewhere.

A checkpoint is a directory `step-<8 digits>` with `tensors.npz` and `manifest.json`. It is written under another name,
made durable, and renamed. So a directory of that name is complete, or was damaged later, which its manifest shows.

Of a sharded optimizer, each worker writes the slices that it owns, in `part-<rank>.npz`: see `begin` and `finish`.

What is read may be damaged, or made by an attacker. Whatever it is, it is read as a good checkpoint, or refused with a
`CheckpointError`: no other error, no code that runs, no memory beyond the size of its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from callbacks.checkpoint import step_of
from callbacks.files import fsync_directory, naming, write_json
from callbacks.files import read as read_file
from loop.checkpoint.array_files import (
    PART,
    TENSORS,
    InParts,
    Json,
    describe,
    dtype_of,
    entry_of,
    read_arrays,
    read_part,
    write_arrays,
)
from loop.errors import UsageError
from loop.monitor import fault_injection

FORMAT = 2
FORMAT_WITH_PARTS = 3  # a number of its own, so that versions which don't know parts refuse it
MANIFEST = "manifest.json"
_LONGEST = 1 << 28  # bytes of a manifest: a longer file is none, and could take all memory
_NAME = re.compile(r"step-[0-9]{8,18}")  # a step of 63 bits has 18 digits


class CheckpointError(UsageError):
    """A checkpoint can't be used; the message says what is wrong with it."""


def write(directory: Path, step: int, tensors: Mapping[str, np.ndarray], state: Json) -> Path:
    """Writes the checkpoint of `step` below `directory`, durably. Its name never stands for an incomplete one.

    Args:
        directory: the directory of all checkpoints; made if it isn't there.
        step: the number of steps made.
        tensors: arrays by name, in order.
        state: everything else, as JSON values.

    Returns:
        The checkpoint's directory.

    Raises:
        OSError: the disk is full, or can't be written. Earlier checkpoints are untouched.
    """
    partial = begin(directory, step)
    with removed_on_error(partial):
        files = write_arrays(partial / TENSORS, tensors)
        fault_injection.reached("write-tensors", step=step)
        return finish(partial, step, files, tensors, state)


def begin(directory: Path, step: int) -> Path:
    """Makes the directory in which the files of a checkpoint are written, and removes what earlier attempts left.

    Raises:
        OSError: the disk is full, or can't be written.
    """
    partial = directory / f"step-{step:08d}.tmp"
    fault_injection.reached("write-begin", step=step)
    if not directory.is_dir():
        directory.mkdir(exist_ok=True)  # without its parents: a run directory that was moved must not appear again
        fsync_directory(directory.parent)
    mend(directory)  # before leftovers are removed: one of them may be the only copy of a good checkpoint
    for leftover in directory.glob("step-*.tmp"):  # of an attempt that was cut off, or of a checkpoint that was removed
        # A write-protected leftover does no harm, unless it has the name of the new checkpoint: then `mkdir` fails.
        with contextlib.suppress(OSError):
            _remove(leftover)
    with removed_on_error(partial):
        partial.mkdir()
    return partial


@contextlib.contextmanager
def removed_on_error(partial: Path) -> Iterator[None]:
    """Within it, the files of a checkpoint are written: an error removes them."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # after an error between the two renames, the old checkpoint comes back
            mend(partial.parent)
        with naming(partial.with_suffix("")):
            raise error


def finish(
    partial: Path,
    step: int,
    files: Json,
    tensors: Mapping[str, np.ndarray | InParts],
    state: Json,
) -> Path:
    """Writes the manifest of a checkpoint whose files are written, and gives it its name.

    Args:
        partial: where its files are.
        step: the number of steps made.
        files: what `write_arrays` has returned.
        tensors: what it has written, in order.
        state: everything else, as JSON values.

    Returns:
        The checkpoint's directory.
    """
    final = partial.with_suffix("")
    manifest = {
        "format": FORMAT_WITH_PARTS if any(map(PART.fullmatch, files)) else FORMAT,
        "step": step,
        "files": files,
        "tensors": [entry_of(name, array) for name, array in tensors.items()],
        **state,
    }
    # The digest is that of the manifest as it is read again: JSON turns keys that are numbers into texts.
    manifest = json.loads(json.dumps(manifest))
    write_json(partial / MANIFEST, {**manifest, "sha256": _digest(manifest)})  # makes the directory durable too
    fault_injection.reached("write-manifest", step=step)
    # The same state again, for example of a resumed run: what is durable already isn't put at risk.
    if os.path.lexists(final) and _is_same(final, manifest):
        shutil.rmtree(partial)
        return final
    _move_into_place(partial, final, step)
    fault_injection.reached("write-done", step=step)
    return final


def _is_same(path: Path, manifest: Json) -> bool:
    """Whether there is a good checkpoint with this manifest."""
    try:
        return verify(path) == manifest
    except CheckpointError:
        return False


def _move_into_place(partial: Path, final: Path, step: int) -> None:
    """Gives a complete checkpoint its name; replaces one of that name, which is damaged or of an earlier attempt."""
    aside = final.with_name(f"{final.name}.old.tmp")
    if os.path.lexists(final):
        final.rename(aside)  # not removed yet: after a kill between the two renames, `mend` brings it back
        fault_injection.reached("write-aside", step=step)
    partial.rename(final)  # atomic: from here on the checkpoint is complete
    fault_injection.reached("write-rename", step=step)
    fsync_directory(final.parent)
    with contextlib.suppress(OSError):  # the next write removes what can't be removed now
        _remove(aside)


def mend(directory: Path) -> None:
    """Brings back a checkpoint that was being replaced when the process was killed."""
    for aside in directory.glob("step-*.old.tmp"):
        final = aside.with_name(aside.name.removesuffix(".old.tmp"))
        if not os.path.lexists(final):
            aside.rename(final)


def has_any(directory: Path) -> bool:
    """Whether there is a checkpoint below `directory`, or one that `mend` brings back.

    Raises:
        CheckpointError: the directory can't be read.
    """
    return bool(complete(directory)) or any(directory.glob("step-*.old.tmp"))


def complete(directory: Path) -> list[Path]:
    """The checkpoints below `directory`, oldest first. They are found by name and not verified.

    Raises:
        CheckpointError: the directory can't be read.
    """
    try:
        if not directory.is_dir():
            return []
        checkpoints = [path for path in directory.iterdir() if _is_checkpoint(path)]
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory} can't be read ({error.strerror})") from None
    return sorted(checkpoints, key=step_of)


def _is_checkpoint(path: Path) -> bool:
    return is_name(path.name) and path.is_dir()


def is_name(name: str) -> bool:
    """Whether it is the name of a checkpoint's directory."""
    return _NAME.fullmatch(name) is not None


def verify(path: Path) -> Json:
    """Checks each file of a checkpoint against its manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointError: something is missing, cut short or changed.
    """
    try:
        manifest: Json = json.loads(read_file(path / MANIFEST, _LONGEST, shared=True))
        digest = manifest.pop("sha256")
        if manifest["format"] not in (FORMAT, FORMAT_WITH_PARTS):
            raise CheckpointError(
                f"{path}: format {manifest['format']!r:.99}, this version reads {FORMAT} and {FORMAT_WITH_PARTS}"
            )
        if digest != _digest(manifest):
            raise CheckpointError(f"{path}: {MANIFEST} has changed since it was written")
        # Also with the right digest, which anyone can compute.
        _check(manifest)
        if path.name != f"step-{manifest['step']:08d}":
            raise CheckpointError(f"{path}: its {MANIFEST} is of step {manifest['step']}")
    except CheckpointError:
        raise
    except Exception as error:  # foreign JSON can fail in any way, by its depth for example
        raise CheckpointError(f"{path}: its {MANIFEST} can't be read ({type(error).__name__}: {error})") from None
    # Last: `_check` has made sure that no name leads out of the checkpoint.
    for name, expected in manifest["files"].items():
        try:
            actual = describe(path / name, expected["bytes"])
        except OSError as error:
            raise CheckpointError(f"{path}: {name} can't be read ({error.strerror or error})") from None
        if actual != expected:
            raise CheckpointError(f"{path}: {name} has changed since it was written")
    return manifest


def newest(
    paths: Sequence[Path], warn: Callable[[str], object], verify: Callable[[Path], Json] = verify
) -> tuple[Path, Json] | None:
    """The newest good checkpoint, with its manifest; None if there are no checkpoints.

    Args:
        paths: the checkpoints, oldest first; see `complete`.
        warn: called with a text about each one that is passed over.
        verify: checks a checkpoint and returns its manifest.

    Raises:
        CheckpointError: there are checkpoints, but none is good. The run must not silently start again from step 0.
    """
    for path in reversed(paths):
        try:
            return path, verify(path)
        except CheckpointError as error:
            warn(f"checkpoint passed over: {error}")
    if paths:
        raise CheckpointError(
            f"{paths[0].parent}: none of its {len(paths)} checkpoints is good: bring a good one back, or give another "
            "run directory"
        )
    return None


def read(path: Path, manifest: Json) -> dict[str, np.ndarray]:
    """The tensors of a verified checkpoint, by name, in order.

    Raises:
        CheckpointError: they aren't what the manifest says: a file was forged, or has changed since it was verified.
    """
    entries = manifest["tensors"]
    parts = sorted(filter(PART.fullmatch, manifest["files"]))  # by rank, which names have with leading zeros
    name = TENSORS  # the file that an error below is about
    try:
        arrays = read_arrays(path / name, entries)
        for rank, name in enumerate(parts):
            read_part(path / name, rank, len(parts), entries, arrays)
        # In the order of the manifest: variables are matched by it.
        return {entry["name"]: arrays[entry["name"]] for entry in entries}
    except Exception as error:  # a foreign archive can fail in any way
        raise CheckpointError(f"{path}: {name} can't be read ({type(error).__name__}: {error})") from None


def _digest(manifest: Json) -> str:
    """The hash of a manifest's content, whatever its spaces and the order of its keys."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check(manifest: Json) -> None:
    """Refuses a manifest whose entries are not what `write` makes.

    Raises:
        Exception: of any type; `verify` turns it into a `CheckpointError`.
    """
    if type(manifest["step"]) is not int:
        raise TypeError(f"step is {manifest['step']!r:.99}")
    if TENSORS not in manifest["files"]:
        raise KeyError(TENSORS)
    for name, expected in manifest["files"].items():
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):  # a path would lead out of the checkpoint
            raise ValueError(f"{name!r:.99} isn't a name of a file in it")
        if type(expected["bytes"]) is not int:
            raise TypeError(f"bytes of {name} is {expected['bytes']!r:.99}")
    for entry in manifest["tensors"]:
        dtype_of(entry["dtype"])
        sizes = [*entry["shape"], entry.get("elements_of_part", 0)]
        if type(entry["name"]) is not str or not all(map(_is_size, sizes)):
            raise TypeError(f"tensors has {entry!r:.99}")


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0  # not `isinstance`: true and false are ints of Python's


def _remove(path: Path) -> None:
    """Removes a file, or a directory with its content; does nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
