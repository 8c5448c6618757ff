"""The part of a prediction that needs no TensorFlow: checks of what was typed, and progress by the parts on disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from callbacks import files
from callbacks.progress import counted
from loop.commands import command_line
from loop.errors import UsageError
from loop.launch.backend_choice import MOST_WORKERS
from loop.launch.environment import JOB
from loop.launch.machine import usable_cpus

OUT_ENDINGS = (".parquet", ".npy", ".npz", ".jsonl")
"""The ends of the names of files that can be written."""
INPUT_ENDINGS = (".npy", ".npz", ".parquet")
"""The ends of the names of files of inputs."""
OWN_DATA = ("eval", "train", "test")
"""The data of a task that can be named."""
_MANIFEST = "manifest.json"


def parts_directory(out: Path) -> Path:
    """Where the parts of a prediction are until it is complete."""
    return out.with_name(out.name + ".parts")


def manifest_path(out: Path) -> Path:
    """The file that describes the prediction to which the parts belong."""
    return parts_directory(out) / _MANIFEST


def check_out(out: Path) -> None:
    """Refuses a file that can't be written, or that is there and isn't of an interrupted prediction."""
    if out.suffix not in OUT_ENDINGS:
        raise UsageError(f"--out {out}: there is no such format: give a name that ends in {', '.join(OUT_ENDINGS)}")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no directory {out.parent}: make it first")
    # With parts beside it, it is a file that was written before a kill, and is written again. A link may point nowhere.
    if (out.exists() or out.is_symlink()) and not files.read_json(manifest_path(out)):
        raise UsageError(f"--out {out} exists already: remove it, or give another name")
    # Looked for without importing it: it is needed only at the end.
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f"--out {out} needs pyarrow: pip install pyarrow, or give .npy, .npz or .jsonl")


def is_set(data: str) -> bool:
    """Whether data may be the name of one of several evaluation sets, and isn't a file."""
    return data not in OWN_DATA and re.fullmatch(r"[\w-]+", data) is not None and not Path(data).exists()


def is_own(data: object) -> bool:
    """Whether data is the name of data of the task."""
    return isinstance(data, str) and (data in OWN_DATA or is_set(data))


def check_data(data: str) -> None:
    """Refuses what is neither data of a task nor a file of inputs."""
    if is_own(data):
        return
    if Path(data).suffix not in INPUT_ENDINGS:
        raise UsageError(
            f"DATA {data!r}: give {', '.join(OWN_DATA)}, the name of an evaluation set, or a file that ends "
            f"in {', '.join(INPUT_ENDINGS)}"
        )
    if not Path(data).is_file():
        raise UsageError(f"DATA {data!r}: there is no such file")


def threads_for(out: Path, threads: int | None) -> int:
    """TensorFlow's threads for an operation: those that were typed, of an interrupted prediction, or one for each core.

    The last bits of a sum depend on them: they must not depend on the number of workers.
    """
    command_line.check_threads(threads)
    if threads is not None:
        return threads
    before = files.read_json(manifest_path(out)).get("threads")
    if isinstance(before, int) and 1 <= before <= MOST_WORKERS:  # the file may have been changed by hand
        return before
    return usable_cpus()


@contextlib.contextmanager
def shown_parts(out: Path) -> Iterator[None]:
    """Within it, a bar shows on a terminal how many parts of a prediction are complete, on all workers.

    What is on disk is counted: so it is the same with one process and with several, and goes on after a kill.
    """
    # A copy of stderr, because `quiet_start` turns the descriptor itself elsewhere.
    with os.fdopen(os.dup(2), "w") as stderr:
        if JOB in os.environ or not stderr.isatty():
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=_show, args=(out, stderr, ended), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _show(out: Path, stderr: Any, ended: threading.Event) -> None:
    """Draws the bar of `shown_parts`, until it has ended."""
    about: dict[str, Any] = {}
    while not about:  # the chief writes the manifest when its model is made
        if ended.wait(0.2):
            return
        about = files.read_json(manifest_path(out))
    shown = 0
    with counted(about.get("parts"), " parts", stderr) as move:
        while not ended.wait(0.2):
            complete = len(list(parts_directory(out).glob("*.part")))
            if complete > shown:  # at the end, the parts are removed
                move(complete - shown)
                shown = complete
