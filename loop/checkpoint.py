"""Checkpoint files: write, verify, find, read. Tensors and JSON only; knows files and no policy.

A checkpoint is a directory `step-<8 digits>` with `tensors.npz` and `manifest.json`. It is written under another name,
made durable, and renamed: one of that name is complete, or has been damaged since, which its manifest shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

FORMAT = 1
TENSORS, MANIFEST = "tensors.npz", "manifest.json"


class CheckpointError(Exception):
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
    partial = final.with_name(final.name + ".tmp")
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob("step-*.tmp"):  # of a life that was cut off
        shutil.rmtree(left)
    try:
        partial.mkdir()
        with (partial / TENSORS).open("wb") as file:
            np.savez(file, allow_pickle=False, **tensors)
            file.flush()
            os.fsync(file.fileno())
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": {TENSORS: _describe(partial / TENSORS)},
            "tensors": [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in tensors.items()],
            **state,
        }
        write_json(partial / MANIFEST, {**manifest, "sha256": _digest(manifest)})
        if final.exists():
            # The same step made again: what is there is the same if it is good, and goes out of the way if it isn't.
            with contextlib.suppress(CheckpointError):
                verify(final)
                shutil.rmtree(partial)
                return final
            aside = final.with_name(f"{final.name}.old.tmp")
            final.rename(aside)
        partial.rename(final)
        fsync_directory(directory)
        shutil.rmtree(final.with_name(f"{final.name}.old.tmp"), ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def complete(directory: Path) -> list[Path]:
    """The checkpoints below `directory`, by step, oldest first. By name only; see `verify`."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def verify(path: Path) -> dict[str, Any]:
    """Checks each file of a checkpoint against its manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointError: something is missing, cut short or changed.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        digest, form = manifest.pop("sha256"), manifest["format"]
        files, step = dict(manifest["files"]), int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its {MANIFEST} can't be read ({type(error).__name__}: {error})") from None
    if form != FORMAT:
        raise CheckpointError(f"{path}: format {form!r}, this version reads format {FORMAT}")
    if digest != _digest(manifest):
        raise CheckpointError(f"{path}: {MANIFEST} has changed since it was written")
    if path.name != f"step-{step:08d}":
        raise CheckpointError(f"{path}: its {MANIFEST} is of step {step}")
    for name, expected in files.items():
        try:
            found = _describe(path / name)
        except OSError as error:
            raise CheckpointError(f"{path}: {name} can't be read ({error.strerror})") from None
        if found != expected:
            raise CheckpointError(f"{path}: {name} has changed since it was written")
    return manifest


def newest(paths: Sequence[Path], warn: Any) -> tuple[Path, dict[str, Any]] | None:
    """The newest of these checkpoints that verifies, with its manifest; None where there are none at all.

    Args:
        paths: as `complete` gives them.
        warn: called with a text about each one that is passed over.

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
    """The tensors of a verified checkpoint, by name, in order."""
    dtypes = {entry["name"]: entry["dtype"] for entry in manifest["tensors"]}
    with np.load(path / TENSORS, allow_pickle=False) as stored:
        # NumPy's format has no bfloat16, and gives it back as two bytes without a meaning.
        return {name: stored[name].view(tf.as_dtype(dtype).as_numpy_dtype) for name, dtype in dtypes.items()}


def write_json(path: Path, value: Any) -> None:
    """Writes JSON durably and in one piece: a reader sees the old file or the new one."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Makes renames within a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(manifest: dict[str, Any]) -> str:
    """Of what a manifest says, however it is spaced."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}
