"""Checkpoint files: write, verify, find, read. Tensors and JSON only; knows files and no policy.

A checkpoint is a directory `step-<8 digits>` with `tensors.npz` and `manifest.json`. It is written under another name,
made durable, and renamed: one of that name is complete, or has been damaged since, which its manifest shows.

What is read may be damaged, or made by a stranger: whatever it is, it is a good checkpoint or a `CheckpointError`.
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
from collections.abc import Callable, Sequence
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
TENSORS, MANIFEST = "tensors.npz", "manifest.json"
_LONGEST = 1 << 28  # bytes of a manifest that are read: what is longer is none, and could take all memory


_NAME = re.compile(r"step-[0-9]{8,18}")  # as many digits as a step of 63 bits has


class CheckpointError(UsageError):
    """A checkpoint can't be used; the message says what is wrong with it."""


def write(directory: Path, step: int, tensors: dict[str, np.ndarray], state: dict[str, Any]) -> Path:
    """Writes the checkpoint of `step` below `directory`, durably; nothing half written is ever found under its name.

    Args:
        directory: the directory of all checkpoints; made if it isn't there.
        step: the number of steps done.
        tensors: arrays by name, in order.
        state: all else, as JSON values.

    Returns:
        The checkpoint's directory.

    Raises:
        OSError: the disk is full, or can't be written. What was there before is untouched.
    """
    final = directory / f"step-{step:08d}"
    partial, aside = (final.with_name(f"{final.name}{end}.tmp") for end in ("", ".old"))
    fault_injection.reached("write-begin", step=step)
    if not directory.is_dir():
        directory.mkdir(exist_ok=True)  # not its parents: a run directory that was moved isn't made anew
        fsync_directory(directory.parent)
    mend(directory)
    for left in directory.glob("step-*.tmp"):  # of an attempt that was cut off
        _remove(left)
    try:
        partial.mkdir()
        with created(partial / TENSORS) as file:
            np.savez(
                file, allow_pickle=False, **{name: array.view(_stored(array.dtype)) for name, array in tensors.items()}
            )
            file.flush()
            os.fsync(file.fileno())
        fault_injection.reached("write-tensors", step=step)
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": {TENSORS: _describe(partial / TENSORS)},
            "tensors": [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in tensors.items()],
            **state,
        }
        manifest = json.loads(json.dumps(manifest))  # as it will be read: keys that are numbers become texts
        write_json(partial / MANIFEST, {**manifest, "sha256": _digest(manifest)})  # makes the directory durable too
        fault_injection.reached("write-manifest", step=step)
        if os.path.lexists(final):
            # The same step again: the same content, or more of it, or what is there is damaged.
            with contextlib.suppress(CheckpointError):
                if verify(final) == manifest:
                    shutil.rmtree(partial)
                    return final
            final.rename(aside)  # until the new one is there, `mend` takes it back
            fault_injection.reached("write-aside", step=step)
        partial.rename(final)
        fault_injection.reached("write-rename", step=step)
        fsync_directory(directory)
        with contextlib.suppress(OSError):  # what can't be removed now, the next write removes
            _remove(aside)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            mend(directory)
        with naming(final):
            raise error
    fault_injection.reached("write-done", step=step)
    return final


def mend(directory: Path) -> None:
    """Takes back what an attempt that was cut off had put aside for a new checkpoint of the same step."""
    for aside in directory.glob("step-*.old.tmp"):
        final = aside.with_name(aside.name.removesuffix(".old.tmp"))
        if not os.path.lexists(final):
            aside.rename(final)


def complete(directory: Path) -> list[Path]:
    """The checkpoints below `directory`, by step, oldest first. By name only; see `verify`.

    Raises:
        CheckpointError: the directory can't be read.
    """
    try:
        if not directory.is_dir():
            return []
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except OSError as error:
        raise CheckpointError(f"{error.filename or directory} can't be read ({error.strerror})") from None
    return sorted(found, key=step_of)


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
    except Exception as error:  # a stranger's JSON can go wrong in any way, such as by its depth
        raise CheckpointError(f"{path}: its {MANIFEST} can't be read ({type(error).__name__}: {error})") from None
    for name, expected in manifest["files"].items():
        try:
            found = _describe(path / name, expected["bytes"])
        except OSError as error:
            raise CheckpointError(f"{path}: {name} can't be read ({error.strerror or error})") from None
        if found != expected:
            raise CheckpointError(f"{path}: {name} has changed since it was written")
    return manifest


def newest(
    paths: Sequence[Path], warn: Any, verify: Callable[[Path], dict[str, Any]] = verify
) -> tuple[Path, dict[str, Any]] | None:
    """The newest of these checkpoints that verifies, with its manifest; None where there are none at all.

    Args:
        paths: as `complete` gives them.
        warn: called with a text about each one that is passed over.
        verify: what checks one, and returns its manifest.

    Raises:
        CheckpointError: there are checkpoints, but none is good.
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
        CheckpointError: they aren't what the manifest says. So it has been made, or has changed since it was verified.
    """
    try:
        with reading(path / TENSORS, shared=True) as file, zipfile.ZipFile(file) as stored:
            if sum(member.file_size for member in stored.infolist()) > os.fstat(file.fileno()).st_size:
                raise ValueError("it says that it is longer than it is")
            return {entry["name"]: _tensor(stored, entry) for entry in manifest["tensors"]}
    except Exception as error:  # as above
        raise CheckpointError(f"{path}: {TENSORS} can't be read ({type(error).__name__}: {error})") from None


def _tensor(stored: zipfile.ZipFile, entry: dict[str, Any]) -> np.ndarray:
    """One array of an npz file, if it is what the manifest says: no more memory is taken than the file is long."""
    name, shape, dtype = entry["name"], tuple(entry["shape"]), _dtype(entry["dtype"])
    member = stored.getinfo(f"{name}.npy")
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name!r:.99} is compressed")
    with stored.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        found, _, plain = header(file)
        if found != shape or plain != _stored(dtype):
            raise ValueError(f"{name!r:.99} is {plain}{list(found)}, not {dtype}{list(shape)}")
        if member.file_size - file.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r:.99} has {member.file_size:,} bytes, which is not its size")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False).view(dtype)


def _digest(manifest: dict[str, Any]) -> str:
    """Of what a manifest says, however it is spaced."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check(manifest: dict[str, Any]) -> None:
    """Refuses a manifest whose entries are not what `write` makes.

    Raises:
        Exception: of any kind.
    """
    if type(manifest["step"]) is not int:
        raise TypeError(f"step is {manifest['step']!r:.99}")
    if TENSORS not in manifest["files"]:
        raise KeyError(TENSORS)
    for name, expected in manifest["files"].items():
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(f"{name!r:.99} is no name of a file in it")
        if type(expected["bytes"]) is not int:
            raise TypeError(f"bytes of {name} is {expected['bytes']!r:.99}")
    for entry in manifest["tensors"]:
        _dtype(entry["dtype"])
        if type(entry["name"]) is not str or not all(type(size) is int and size >= 0 for size in entry["shape"]):
            raise TypeError(f"tensors has {entry!r:.99}")


def _dtype(name: str) -> np.dtype:
    """The type of numbers with this name."""
    dtype = np.dtype(name)
    if dtype.name != name or not (dtype.kind in "biufc" or hasattr(ml_dtypes, name)):
        raise TypeError(f"{name!r:.99} is no type of numbers")
    return dtype


def _stored(dtype: np.dtype) -> np.dtype:
    """As what such numbers are stored: NumPy's format has no bfloat16, and keeps two bytes without a meaning."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"V{dtype.itemsize}")


def _describe(path: Path, size: int | None = None) -> dict[str, Any]:
    """Size and hash of a file; no hash, if its size is another one than that."""
    with reading(path, shared=True) as file:
        found = os.fstat(file.fileno()).st_size
        digest = hashlib.file_digest(file, "sha256").hexdigest() if size in (None, found) else ""
        return {"bytes": found, "sha256": digest}


def _remove(path: Path) -> None:
    """Removes a file, or a directory with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
