"""Parts of a prediction on disk: who computes which, what is complete after a kill, and all of them in order."""

from __future__ import annotations

import bisect
import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from callbacks import files
from callbacks.formats import plural
from loop.checkpoint.lock import locked
from loop.commands.prediction_output import manifest_path, parts_directory
from loop.errors import TrainingError, UsageError
from loop.step.prediction import Columns

Specs = dict[str, tuple[str, list[int]]]
"""The dtype of each array of a prediction, and the shape of a row."""
_ROWS_IN_PART = 4096
_PARTS = 64

# A part is a file: a line of JSON with the specs, then for each block its number of rows (8 bytes, little-endian) and
# the bytes of its arrays, in the order of the specs.


def blocks_in_part(blocks: int | None, block_rows: int) -> int:
    """How many blocks a part has: it depends on their number (None: unknown) and their rows, not on the workers."""
    most = max(1, _ROWS_IN_PART // block_rows)
    if blocks is None:  # a stream, whose length only its end shows
        return most
    # Enough parts to share out and to go on from; not more files than a directory holds well.
    return max(1, min(blocks // _PARTS, max(most, blocks // _ROWS_IN_PART)))


def owner(part: int, done: Sequence[int], workers: int) -> int:
    """Which worker computes a missing part: they take turns. `done` has the complete parts, in order."""
    # The number of missing parts before this one decides.
    return (part - bisect.bisect_left(done, part)) % workers


class Parts:
    """The parts of a prediction. A part is a file with the blocks of a range, complete or not there.

    Args:
        out: the file that is made of them.

    Attributes:
        directory: where they are until the file is complete: OUT.parts.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.directory = parts_directory(out)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it, no other process writes these parts. The chief alone calls it."""
        files.make_directory(self.directory)
        with locked(self.directory):
            yield

    def begin(self, about: dict[str, Any]) -> list[int]:
        """Starts the prediction, or goes on with it; returns the parts that are complete, increasing.

        The chief alone calls it, within `held`. `about` is what the numbers depend on.

        Raises:
            UsageError: there are parts of another prediction.
        """
        before = files.read_json(manifest_path(self.out))
        if not before:
            files.write_json(manifest_path(self.out), about)
            return self.complete()
        # Parts of other weights or data would be mixed silently: all that the numbers depend on must be the same.
        for name, value in about.items():
            if before.get(name) != value:
                raise UsageError(
                    f"{self.directory} has parts of another prediction ({name} was {before.get(name)!r:.99}, is "
                    f"{value!r:.99}): remove that directory, give another --out, or the same {name}"
                )
        return self.complete()

    def complete(self) -> list[int]:
        """The parts that are complete, increasing."""
        numbers = []
        for path in self.directory.glob("*.part"):
            if path.stem.isdecimal():
                numbers.append(int(path.stem))
        return sorted(numbers)

    def write(self, part: int, blocks: Iterable[Columns]) -> None:
        """Writes a part, block by block."""
        specs: Specs | None = None
        # Durable: a part that is found after a crash counts as complete, and isn't computed again.
        with files.replacing(self._path(part), durable=True) as file:
            for columns in blocks:
                own = _specs_of(columns)
                if specs is None:
                    specs = own
                    file.write(json.dumps(specs).encode() + b"\n")
                _check_same(specs, own)
                rows = len(next(iter(columns.values())))
                file.write(rows.to_bytes(8, "little"))
                for array in columns.values():
                    file.write(array.tobytes())

    def read(self, count: int) -> StoredRows:
        """The blocks of the first `count` parts, which must all be complete.

        Raises:
            TrainingError: a part is missing.
        """
        missing = sorted(set(range(count)).difference(self.complete()))
        if missing:
            raise TrainingError(
                f"{self.directory}: {plural(len(missing), 'part')} of {count} missing, the first is "
                f"{self._path(missing[0]).name}: all workers must write to one shared directory; start the same "
                "command again"
            )
        return StoredRows([self._path(part) for part in range(count)])

    def remove(self) -> None:
        """Removes the parts, once the file that was made of them is complete."""
        # The manifest goes last: without it, what is left would not be known as parts of this prediction.
        for path in self.directory.glob("*.part*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, part: int) -> Path:
        return self.directory / f"{part:08d}.part"


class StoredRows:
    """The rows of complete parts, in order. They are read block by block, as often as needed.

    Attributes:
        specs: of the arrays.
        rows: how many.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.rows = 0
        self.specs: Specs = {}
        for path in paths:
            with files.reading(path) as file:
                specs = _specs_in(file)
                self.specs = self.specs or specs
                _check_same(self.specs, specs)  # parts may come from other workers, and from an earlier start
                while n := int.from_bytes(file.read(8), "little"):  # nothing is left: 0
                    self.rows += n
                    file.seek(n * self.row_bytes, 1)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of all arrays."""
        return sum(_bytes(dtype, shape) for dtype, shape in self.specs.values())

    def blocks(self) -> Iterator[Columns]:
        """All blocks, in order."""
        for path in self._paths:
            with files.reading(path) as file:
                _specs_in(file)  # which has been checked: read, so that the first block comes next
                while n := int.from_bytes(file.read(8), "little"):
                    columns: Columns = {}
                    for name, (dtype, shape) in self.specs.items():
                        values = np.frombuffer(file.read(n * _bytes(dtype, shape)), dtype)
                        columns[name] = values.reshape(n, *shape)
                    yield columns


def _specs_of(columns: Columns) -> Specs:
    """The specs of a block."""
    return {name: (array.dtype.str, [*array.shape[1:]]) for name, array in columns.items()}


def _specs_in(file: IO[bytes]) -> Specs:
    """The first line of a part."""
    return {name: (dtype, shape) for name, (dtype, shape) in json.loads(file.readline()).items()}


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))


def _check_same(specs: Specs, others: Specs) -> None:
    """Refuses blocks whose arrays have rows of different shapes, which can't be one array together."""
    for name, (_, shape) in specs.items():
        other = others.get(name, ("", None))[1]
        if shape != other:
            raise UsageError(
                f"predict() returned rows of shape {shape} for {name!r} in one block, and {other} in another: return "
                "rows of one shape, such as a value per example, or pad them to one length"
            )
