"""Array files: the arrays of a checkpoint in npz files, whole or in one part for each worker; written and read."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes  # gives NumPy bfloat16 and its like by name
import numpy as np

from callbacks.files import reading

Json: TypeAlias = dict[str, Any]
"""A JSON object, such as the manifest of a checkpoint, or a part of one."""

TENSORS = "tensors.npz"
PART = re.compile(r"part-[0-9]{5}\.npz")


@dataclasses.dataclass(frozen=True)
class InParts:
    """Takes the place of an array of which each worker writes a part."""

    dtype: np.dtype  # of the array
    shape: tuple[int, ...]  # of the array
    elements: int  # the size of each part. All parts together are the flat array, with zeros after it.


def part_name(rank: int) -> str:
    """The name of the file that a worker writes."""
    return f"part-{rank:05d}.npz"


def write_arrays(path: Path, tensors: Mapping[str, np.ndarray | InParts]) -> Json:
    """Writes arrays into a file, durably; those of which each worker writes a part are left out.

    Returns:
        Size and hash, by the name of the file.
    """
    arrays = {}
    for name, array in tensors.items():
        if not isinstance(array, InParts):
            arrays[name] = array.view(_stored(array.dtype))
    with path.open("xb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        # Before the hash is taken: what the manifest says must be on the disk.
        file.flush()
        os.fsync(file.fileno())
    return {path.name: describe(path)}


def entry_of(name: str, array: np.ndarray | InParts) -> Json:
    """What a manifest says about an array."""
    entry: Json = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
    if isinstance(array, InParts):
        entry["elements_of_part"] = array.elements
    return entry


def read_arrays(path: Path, entries: Sequence[Json]) -> dict[str, np.ndarray]:
    """The arrays that are whole, by name.

    Args:
        path: of the file.
        entries: what the manifest says about each.

    Raises:
        Exception: of any type; the file is damaged, or not what the manifest says.
    """
    arrays = {}
    with _opened(path) as stored:
        for entry in entries:
            if "elements_of_part" not in entry:
                arrays[entry["name"]] = _array(stored, entry)
    return arrays


def read_part(path: Path, rank: int, parts: int, entries: Sequence[Json], arrays: dict[str, np.ndarray]) -> None:
    """Adds one part to the arrays that are in parts; see `read_arrays`.

    Args:
        path: of the file.
        rank: of the worker that has written it.
        parts: the number of parts.
        entries: what the manifest says about each array.
        arrays: those of which the parts before have been read, by name.
    """
    with _opened(path) as stored:
        for entry in entries:
            if "elements_of_part" not in entry:
                continue
            name = entry["name"]
            size = math.prod(entry["shape"])
            elements = entry["elements_of_part"]
            # Else the rest of the array would be what was in memory before.
            if elements * parts < size:
                raise ValueError(f"{name!r:.99} is not {parts} parts of {elements:,} elements")
            part = _array(stored, {**entry, "shape": [elements]})
            # Not before a part was read: a forged manifest could ask for any amount of memory.
            if rank == 0:
                arrays[name] = np.empty(entry["shape"], part.dtype)
            # After the end of the array, the last parts hold zeros.
            begin = rank * elements
            arrays[name].reshape(-1)[begin : begin + elements] = part[: max(size - begin, 0)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """An npz file, to read arrays from.

    Raises:
        ValueError: it claims to hold more than it does.
    """
    with reading(path, shared=True) as file, zipfile.ZipFile(file) as stored:
        # Reading allocates as many bytes as the archive claims to hold.
        if sum(member.file_size for member in stored.infolist()) > os.fstat(file.fileno()).st_size:
            raise ValueError("it says that it is longer than it is")
        yield stored


def _array(stored: zipfile.ZipFile, entry: Json) -> np.ndarray:
    """One array of an npz file, checked before it is read: it takes no more memory than the file is long."""
    name = entry["name"]
    shape = tuple(entry["shape"])
    dtype = dtype_of(entry["dtype"])
    member = stored.getinfo(f"{name}.npy")
    # A few compressed bytes can stand for more numbers than memory holds.
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name!r:.99} is compressed")
    # The header is compared with the manifest before `read_array` believes it.
    with stored.open(member) as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        file_shape, _, file_dtype = header(file)
        if file_shape != shape or file_dtype != _stored(dtype):
            raise ValueError(f"{name!r:.99} is {file_dtype}{list(file_shape)}, not {dtype}{list(shape)}")
        if member.file_size - file.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r:.99} has {member.file_size:,} bytes, which is not its size")
        file.seek(0)  # `read_array` reads the header again
        return np.lib.format.read_array(file, allow_pickle=False).view(dtype)


def dtype_of(name: str) -> np.dtype:
    """The numeric dtype of this name."""
    dtype = np.dtype(name)
    # One spelling for each, and numbers alone: no objects, texts, dates or structures.
    if dtype.name != name or not (dtype.kind in "biufc" or hasattr(ml_dtypes, name)):
        raise TypeError(f"{name!r:.99} isn't a type of numbers")
    return dtype


def _stored(dtype: np.dtype) -> np.dtype:
    """The dtype under which numbers are stored: NumPy's format has no bfloat16, so its bytes are stored as raw ones."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"V{dtype.itemsize}")


def describe(path: Path, size: int | None = None) -> Json:
    """Size and hash of a file. If it hasn't the expected `size`, the hash is "", which saves reading it."""
    with reading(path, shared=True) as file:
        actual_size = os.fstat(file.fileno()).st_size
        digest = hashlib.file_digest(file, "sha256").hexdigest() if size in (None, actual_size) else ""
        return {"bytes": actual_size, "sha256": digest}
