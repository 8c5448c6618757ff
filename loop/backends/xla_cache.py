"""XLA's programs on disk: the second start of a training with the same program compiles nothing.

TensorFlow writes each program to a directory, and reads it from there when it meets the same program again. It checks
neither the machine nor the bytes. So each machine and version has a directory of its own, and a program is used only
if it has the hash that was noted when a process ended that had compiled or used it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import platform
from pathlib import Path

import tensorflow as tf

from callbacks.files import cache_directory, write_text
from loop.launch import machine

_VARIABLE = "TF_XLA_FLAGS"
_FLAG = "--tf_xla_persistent_cache_directory"
_LARGEST = 1 << 28  # bytes of programs that are kept for one machine and version
_SETTINGS = ("XLA_FLAGS", _VARIABLE, "TF_ENABLE_ONEDNN_OPTS")
"""Variables that programs depend on."""


@functools.cache
def keep_programs() -> Path | None:
    """Has XLA keep its programs from now on. Must be called before anything uses TensorFlow: it reads this once.

    Returns:
        Their directory. None: the user has chosen one, there can be none, or this machine has a GPU, for which it has
        not been tried.
    """
    flags = os.environ.get(_VARIABLE, "")
    if _FLAG in flags or machine.count_gpus():
        return None
    try:
        directory = cache_directory() / "xla" / _machine()
        if len(str(directory).split()) != 1:  # TensorFlow cuts the flags at blanks
            return None
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_unknown(directory)
    except OSError:
        return None
    # Not in `os.environ`: processes that this one starts decide by themselves.
    os.putenv(_VARIABLE, f"{flags} {_FLAG}={directory} --tf_xla_persistent_cache_prefix=tfloop".strip())
    atexit.register(_note_hashes, directory)
    return directory


def _machine() -> str:
    """A name for this kind of machine, TensorFlow's version and its settings."""
    known = [tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION, platform.machine()]
    known += [os.environ.get(name, "") for name in _SETTINGS]
    with contextlib.suppress(OSError):  # there is none but on Linux
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        # A program uses the instructions that the processor has.
        known += sorted({line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))})
    return hashlib.blake2b("\0".join(known).encode(), digest_size=16).hexdigest()


def _remove_unknown(directory: Path) -> None:
    """Removes programs without a hash or with another one, and the oldest ones if all are too large."""
    kept = 0
    for program in sorted(directory.glob("*.pb"), key=lambda path: path.stat().st_mtime, reverse=True):
        kept += program.stat().st_size
        noted = _hash_file(program)
        if kept > _LARGEST or not noted.is_file() or noted.read_text() != _hash(program):
            program.unlink(missing_ok=True)
            noted.unlink(missing_ok=True)


def _note_hashes(directory: Path) -> None:
    """Notes the hash of each program that has none yet. TensorFlow has written each of them as a whole."""
    with contextlib.suppress(OSError):  # the directory is gone, or the disk is full: it is only a cache
        for program in directory.glob("*.pb"):
            if not _hash_file(program).exists():
                write_text(_hash_file(program), _hash(program))


def _hash_file(program: Path) -> Path:
    return program.with_suffix(".sha256")


def _hash(program: Path) -> str:
    with program.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
