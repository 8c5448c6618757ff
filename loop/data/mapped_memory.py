"""Gives pages of memory maps back, which count as memory of the process from when they are read."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

LARGE = 1 << 27
"""Bytes. A smaller map keeps its pages. A process keeps about this many of all larger maps together."""

AT_ONCE = 64
"""After reading this many places of large maps, the process checks its memory: Linux may map 2 MB around each place."""

_AROUND = 1 << 16
"""Bytes around each place that count as mapped, on a system that doesn't say how much is."""


class MappedMemory:
    """The pages of large maps in this process."""

    def __init__(self) -> None:
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._before = 0
        self._read = 0

    def add(self, mapped: mmap.mmap) -> None:
        """Watches a map."""
        with self._lock:
            # What was there before, such as libraries, isn't counted.
            if not self._maps:
                self._before = self._bytes()
            self._maps.add(mapped)

    def release(self, places: int, size: int) -> None:
        """Gives all pages back if there are many, after some places of a map were read, of `size` bytes together."""
        with self._lock:
            self._read += size + _AROUND * places
            if self._bytes() - self._before >= LARGE:
                # All pages of all maps: they are read again from the file, or from the system's cache of it.
                for mapped in self._maps:
                    mapped.madvise(mmap.MADV_DONTNEED)
                self._read = 0
                self._before = self._bytes()

    def _bytes(self) -> int:
        """The memory that pages of files take in this process."""
        with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE  # the third field: resident pages of files
        return self._read  # not Linux


MAPPED_MEMORY = MappedMemory()
