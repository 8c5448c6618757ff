"""Files that are derived from data files, such as the places of records: made once, and kept in a cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def cache_directory() -> Path:
    """Where what is derived from data files is kept: `TFLOOP_CACHE`, or `tfloop` in the user's cache directory."""
    own = os.environ.get("TFLOOP_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(shared).expanduser() / "tfloop"


def cached(kind: str, path: Path) -> Path:
    """The file in the cache that is derived from a data file as it is now: by its path, size and time."""
    status = path.stat()
    known = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    return cache_directory() / kind / hashlib.blake2b(known, digest_size=16).hexdigest()
