"""Arrays in memory that all workers of a machine share: each is there once, however many workers there are."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data.arrays import ArrayData

_LEAST = 1 << 20
"""Arrays of fewer bytes stay as they are."""
_ALIGNMENT = 64
"""Bytes. TensorFlow uses an array whose address is a multiple of this without a copy."""
_AT_ONCE = 1 << 24
"""How many bytes are compared at once."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""A number that a Linux kernel draws when it starts: workers that have the same run on one machine."""


def shared(data: ArrayData, backend: Backend) -> ArrayData:
    """The same examples, whose arrays are in memory that all workers of a machine share. All workers must call it.

    The first worker of each machine copies its arrays there. Each other one compares its own to them, and keeps those
    that differ. Where there is no such memory, or it can't be reached, as between containers, all stays as it is.
    """
    arrays = list(filter(_can_be_shared, tf.nest.flatten(data.arrays)))

    # Every worker takes part in each exchange, also one that shares nothing: the others would wait for it forever.
    machine = _BOOT.read_text().strip() if hasattr(os, "memfd_create") and _BOOT.exists() else ""
    if not arrays:
        machine = ""
    machines = backend.gather_json(machine)
    machine = str(machines[backend.rank])
    first = machines.index(machine)
    shares = machine != "" and machines.count(machine) > 1  # alone on its machine, it would only have a copy more
    is_copied_here = shares and first == backend.rank
    with _memory(arrays) if is_copied_here else contextlib.nullcontext() as own:
        facts = None if own is None else dataclasses.asdict(own)
        memories = backend.gather_json(facts)
        memory = memories[first]
        views = {} if memory is None else _views(_Memory(**memory), arrays)
        backend.exchange(0)  # the first one keeps it open until all have opened it
    if not views:
        return data
    return data.map_arrays(lambda array: views.get(id(array), array))


def as_tensor(array: np.ndarray) -> tf.Tensor | None:
    """A tensor that reads the memory of an array from `shared`, without a copy, and keeps that memory.

    None: the array isn't in shared memory, or is a part of one that TensorFlow must copy.
    """
    # Views of views lead to the buffer that `np.frombuffer` was given.
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapping = base.obj if isinstance(base, memoryview) else None
    if not isinstance(mapping, _Mapping) or not array.flags.c_contiguous or array.ctypes.data % _ALIGNMENT:
        return None
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


@dataclasses.dataclass
class _Memory:
    """How another process finds the file of the memory: by the process that has made it."""

    pid: int  # the process
    descriptor: int  # its number of the open file
    inode: int  # the inode of the file, by which another process knows that it has found this one
    layout: list[tuple[int, str, list[int]]]  # the offset in bytes, the type and the shape of each array


class _Mapping(mmap.mmap):
    """A mapping of such a file."""


@contextlib.contextmanager
def _memory(arrays: list[np.ndarray]) -> Iterator[_Memory | None]:
    """Copies arrays to memory that other processes can open meanwhile; None: there is no such memory, or no room."""
    descriptor = None
    memory = None
    with contextlib.suppress(OSError):  # no room: all workers keep their own arrays
        descriptor = os.memfd_create("tfloop-arrays", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        layout = []
        with open(descriptor, "wb", closefd=False) as file:
            for array in arrays:
                file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)  # up to a multiple
                layout.append((file.tell(), array.dtype.str, list(array.shape)))
                file.write(array.reshape(-1).view(np.uint8).data)
        # Sealed, so that no process can change what the others read.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = _Memory(os.getpid(), descriptor, os.fstat(descriptor).st_ino, layout)
    try:
        yield memory
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _views(memory: _Memory, arrays: list[np.ndarray]) -> dict[int, np.ndarray]:
    """What has the same content in shared memory, for each array that is there, by the array's identity."""
    try:
        with open(f"/proc/{memory.pid}/fd/{memory.descriptor}", "rb") as file:
            if os.fstat(file.fileno()).st_ino != memory.inode:  # in another container the same pid is another process
                return {}
            # A private mapping shares its pages until it is written to, which would then change this process alone.
            mapping = _Mapping(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError:  # there is no such process, or this user may not look at it
        return {}
    # Not strict: a worker may have more or fewer arrays than the first one.
    views = {}
    for (offset, dtype, shape), array in zip(memory.layout, arrays, strict=False):
        if (dtype, tuple(shape)) == (array.dtype.str, array.shape):
            view = np.frombuffer(mapping, array.dtype, array.size, offset).reshape(shape)
            if _same_bytes(view, array):
                views[id(array)] = view
    return views


def _same_bytes(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of one size have the same bytes. Numbers can't be compared: nan isn't equal to itself."""
    array_bytes = array.reshape(-1).view(np.uint8)
    other_bytes = other.reshape(-1).view(np.uint8)
    # Piece by piece: comparing makes an array of bools, as long as what is compared.
    for start in range(0, array_bytes.size, _AT_ONCE):
        piece = slice(start, start + _AT_ONCE)
        if not np.array_equal(array_bytes[piece], other_bytes[piece]):
            return False
    return True


def _can_be_shared(array: object) -> bool:
    """Whether it is a large array of numbers, one after the other in memory."""
    if not isinstance(array, np.ndarray) or array.nbytes < _LEAST:
        return False
    is_number = array.dtype.kind in "fiu" and array.dtype.char != "g"  # no tensor has long doubles: `constant` says so
    return is_number and array.dtype.isnative and array.flags.c_contiguous
