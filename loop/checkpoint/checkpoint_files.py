"""Checkpoint files: write, verify, find, read. Tensors and JSON only; when to save is decided elsewhere.

A checkpoint is a directory `step-<8 digits>` with `tensors.npz` and `manifest.json`. It is written under another name,
made durable, and renamed. So a directory of that name is complete, or was damaged later, which its manifest shows.

What is read may be damaged, or made by an attacker. Whatever it is, it is read as a good checkpoint, or refused with a
`CheckpointError`: no other error, no code that runs, no memory beyond the size of its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # gives NumPy bfloat16 and its like by name
import numpy as np

from callbacks.checkpoint import step_of
from callbacks.files import created, fsync_directory, naming, reading, write_json
from callbacks.files import read as read_file
from loop.errors import UsageError
from loop.monitor import fault_injection

FORMAT = 2
TENSORS = "tensors.npz"
MANIFEST = "manifest.json"
_LONGEST = 1 << 28  # bytes of a manifest: a longer file is none, and could take all memory
_NAME = re.compile(r"step-[0-9]{8,18}")  # a step of 63 bits has 18 digits


class CheckpointError(UsageError):
    """A checkpoint can't be used; the message says what is wrong with it."""


def write(directory: Path, step: int, tensors: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> Path:
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
    final = directory / f"step-{step:08d}"
    partial = directory / f"{final.name}.tmp"
    fault_injection.reached("write-begin", step=step)
    if not directory.is_dir():
        directory.mkdir(exist_ok=True)  # without its parents: a run directory that was moved must not appear again
        fsync_directory(directory.parent)
    mend(directory)
    for leftover in directory.glob("step-*.tmp"):  # of an attempt that was cut off
        _remove(leftover)
    try:
        partial.mkdir()
        manifest = _write_files(partial, step, tensors, state)
        if os.path.lexists(final) and _is_same(final, manifest):
            shutil.rmtree(partial)
            return final
        _move_into_place(partial, final, step)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            mend(directory)
        with naming(final):
            raise error
    fault_injection.reached("write-done", step=step)
    return final


def _write_files(
    directory: Path, step: int, tensors: Mapping[str, np.ndarray], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes tensors and manifest, durably; returns the manifest."""
    with created(directory / TENSORS) as file:
        arrays = {name: array.view(_stored(array.dtype)) for name, array in tensors.items()}
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    fault_injection.reached("write-tensors", step=step)
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {TENSORS: _describe(directory / TENSORS)},
        "tensors": [
            {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)} for name, array in tensors.items()
        ],
        **state,
    }
    # The digest is that of the manifest as it is read again: JSON turns keys that are numbers into texts.
    manifest = json.loads(json.dumps(manifest))
    write_json(directory / MANIFEST, {**manifest, "sha256": _digest(manifest)})  # makes the directory durable too
    fault_injection.reached("write-manifest", step=step)
    return manifest


def _is_same(path: Path, manifest: dict[str, Any]) -> bool:
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
    partial.rename(final)
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


def complete(directory: Path) -> list[Path]:
    """The checkpoints below `directory`, oldest first. They are found by name and not verified.

    Raises:
        CheckpointError: the directory can't be read.
    """
    try:
        if not directory.is_dir():
            return []
        paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory} can't be read ({error.strerror})") from None
    return sorted(paths, key=step_of)


def verify(path: Path) -> dict[str, Any]:
    """Checks each file of a checkpoint against its manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointError: something is missing, cut short or changed.
    """
    try:
        manifest: dict[str, Any] = json.loads(read_file(path / MANIFEST, _LONGEST, shared=True))
        digest = manifest.pop("sha256")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {manifest['format']!r:.99}, this version reads format {FORMAT}")
        if digest != _digest(manifest):
            raise CheckpointError(f"{path}: {MANIFEST} has changed since it was written")
        _check(manifest)
        if path.name != f"step-{manifest['step']:08d}":
            raise CheckpointError(f"{path}: its {MANIFEST} is of step {manifest['step']}")
    except CheckpointError:
        raise
    except Exception as error:  # foreign JSON can fail in any way, by its depth for example
        raise CheckpointError(f"{path}: its {MANIFEST} can't be read ({type(error).__name__}: {error})") from None
    for name, expected in manifest["files"].items():
        try:
            actual = _describe(path / name, expected["bytes"])
        except OSError as error:
            raise CheckpointError(f"{path}: {name} can't be read ({error.strerror or error})") from None
        if actual != expected:
            raise CheckpointError(f"{path}: {name} has changed since it was written")
    return manifest


def newest(
    paths: Sequence[Path], warn: Callable[[str], object], verify: Callable[[Path], dict[str, Any]] = verify
) -> tuple[Path, dict[str, Any]] | None:
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
            f"{paths[0].parent}: none of its {len(paths)} checkpoints is good; not starting from step 0"
        )
    return None


def read(path: Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a verified checkpoint, by name, in order.

    Raises:
        CheckpointError: they aren't what the manifest says: a file was forged, or has changed since it was verified.
    """
    try:
        with reading(path / TENSORS, shared=True) as file, zipfile.ZipFile(file) as stored:
            # Reading allocates as many bytes as the archive claims to hold.
            if sum(member.file_size for member in stored.infolist()) > os.fstat(file.fileno()).st_size:
                raise ValueError("it says that it is longer than it is")
            return {entry["name"]: _tensor(stored, entry) for entry in manifest["tensors"]}
    except Exception as error:  # a foreign archive can fail in any way, too
        raise CheckpointError(f"{path}: {TENSORS} can't be read ({type(error).__name__}: {error})") from None


def _tensor(stored: zipfile.ZipFile, entry: dict[str, Any]) -> np.ndarray:
    """One array of an npz file, checked before it is read: it takes no more memory than the file is long."""
    name = entry["name"]
    shape = tuple(entry["shape"])
    dtype = _dtype(entry["dtype"])
    member = stored.getinfo(f"{name}.npy")
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name!r:.99} is compressed")
    with stored.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        file_shape, _, file_dtype = header(file)
        if file_shape != shape or file_dtype != _stored(dtype):
            raise ValueError(f"{name!r:.99} is {file_dtype}{list(file_shape)}, not {dtype}{list(shape)}")
        if member.file_size - file.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r:.99} has {member.file_size:,} bytes, which is not its size")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False).view(dtype)


def _digest(manifest: dict[str, Any]) -> str:
    """The hash of a manifest's content, whatever its spaces and the order of its keys."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check(manifest: dict[str, Any]) -> None:
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
            raise ValueError(f"{name!r:.99} is no name of a file in it")
        if type(expected["bytes"]) is not int:
            raise TypeError(f"bytes of {name} is {expected['bytes']!r:.99}")
    for entry in manifest["tensors"]:
        _dtype(entry["dtype"])
        if type(entry["name"]) is not str or not all(type(size) is int and size >= 0 for size in entry["shape"]):
            raise TypeError(f"tensors has {entry!r:.99}")


def _dtype(name: str) -> np.dtype:
    """The numeric dtype of this name."""
    dtype = np.dtype(name)
    if dtype.name != name or not (dtype.kind in "biufc" or hasattr(ml_dtypes, name)):
        raise TypeError(f"{name!r:.99} is no type of numbers")
    return dtype


def _stored(dtype: np.dtype) -> np.dtype:
    """The dtype under which numbers are stored: NumPy's format has no bfloat16, so its bytes are stored as raw ones."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"V{dtype.itemsize}")


def _describe(path: Path, size: int | None = None) -> dict[str, Any]:
    """Size and hash of a file. If it hasn't the expected `size`, the hash is "", which saves reading it."""
    with reading(path, shared=True) as file:
        actual_size = os.fstat(file.fileno()).st_size
        digest = hashlib.file_digest(file, "sha256").hexdigest() if size in (None, actual_size) else ""
        return {"bytes": actual_size, "sha256": digest}


def _remove(path: Path) -> None:
    """Removes a file, or a directory with its content; does nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
