"""ExampleLog: records the examples of each step, so that the examples of two runs can be compared."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from callbacks.base import Callback, Run
from callbacks.types import Data, Json, Tensors

if TYPE_CHECKING:
    import numpy as np


class Example(NamedTuple):
    """An example that was used: its address, unique within the epoch, and a hash of its content."""

    address: int
    content: str


class ExampleLog(Callback):
    """Writes a line for each (micro-)batch of each replica when it is read; `used` reads the lines.

    Each process writes its own file, which starts with the position from which the attempt continues. All workers use
    the same number for an attempt. It must come after `ShardData` in the set.

    Args:
        directory: where to write; one for each run.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._file = -1

    def on_data(self, run: Run, data: Data) -> Data:
        self.directory.mkdir(parents=True, exist_ok=True)
        # The greatest number of all workers: each may see its own files alone.
        newest = max((int(path.name[:6]) for path in self.directory.glob("*-*.jsonl")), default=-1)
        attempt = 1 + int(run.backend.exchange(newest).max())
        path = self.directory / f"{attempt:06d}-{run.backend.rank}.jsonl"
        self._close()  # a later phase begins another file
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        data = copy.copy(data)  # other callbacks may hold the original
        train = data.train = copy.copy(data.train)
        replica_rows = train.replica_rows

        def watched(*arguments: Tensors) -> Tensors:
            import tensorflow as tf

            rows = replica_rows(*arguments)
            # In the graph, as the batch is read; a Python function runs on the host alone.
            with tf.device("CPU:0"):
                position = [rows.first, rows.epoch, rows.number, rows.index]
                tf.numpy_function(self._write, [*position, *tf.nest.flatten(rows.batch)], [])
            return rows

        train.replica_rows = watched
        return data

    def on_fit_start(self, run: Run) -> None:
        self._line(run.progress.epoch, run.progress.step_in_epoch * run.options["accumulate"])

    def on_fit_end(self, run: Run, status: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _write(self, first: int, epoch: int, number: int, index: np.ndarray, *parts: np.ndarray) -> None:
        if len(index):  # a replica may have no row of the last batch of an epoch
            contents = [_hash(parts, row) for row in range(len(index))]
            self._line(int(epoch), int(number), int(first), index.tolist(), contents)

    def _line(self, *values: Json) -> None:
        # Unbuffered, in one call: the line is complete even if the process is killed in the next moment.
        os.write(self._file, json.dumps(values).encode() + b"\n")


def _hash(parts: Sequence[np.ndarray], row: int) -> str:
    """The hash of the content of an example, a row of each part of the batch; 64 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        value = part[row]
        if isinstance(value, bytes):
            texts = [value]
        else:
            texts = value.ravel().tolist() if value.dtype.kind == "O" else [value.tobytes()]
        # With its length, so that no two examples are the same bytes cut up differently.
        for text in texts:
            digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


_BatchKey = tuple[int, int, int, str]
"""Of a replica's batch: epoch, number in the epoch, first row, and the file that has it."""


def used(directory: Path) -> dict[int, list[Example]]:
    """The examples that a run used, in order, for each epoch.

    Steps of an attempt after the position from which the next attempt continues are lost, and don't count.
    """
    batches: dict[_BatchKey, list[Example]] = {}
    # A file's name begins with the number of its attempt.
    for _, paths in itertools.groupby(sorted(directory.glob("*.jsonl")), lambda path: path.name[:6]):
        _add_attempt(batches, list(paths))
    epochs: dict[int, list[Example]] = {}
    for key, examples in sorted(batches.items()):
        epochs.setdefault(key[0], []).extend(examples)
    return epochs


def _add_attempt(batches: dict[_BatchKey, list[Example]], paths: Sequence[Path]) -> None:
    """Adds what the files of an attempt say; removes the batches after the position from which it continued."""
    added: dict[_BatchKey, list[Example]] = {}
    for path in paths:
        for line in _lines(path):
            if len(line) == 2:  # a position, from which the attempt continues; the others are batches
                _remove_from(batches, line)
            else:
                epoch, number, first, addresses, contents = line
                added[epoch, number, first, path.name] = list(map(Example, addresses, contents))
    # At the end: a position in one file removes batches of earlier attempts, not those in the other files of this one.
    batches |= added


def _remove_from(batches: dict[_BatchKey, list[Example]], position: list[int]) -> None:
    """Removes the batches from a position on: epoch, and number in the epoch."""
    for key in list(batches):
        if [*key[:2]] >= position:
            del batches[key]


def _lines(path: Path) -> Iterator[list[Json]]:
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):  # the process was killed while it wrote the line
            yield json.loads(line)


def differences(expected: Mapping[int, list[Example]], actual: Mapping[int, list[Example]]) -> Iterator[str]:
    """How two runs differ in the examples that they used, and whether one used an example twice in an epoch."""
    for epoch in sorted({*expected, *actual}):
        for text in _differences_of_epoch(expected.get(epoch, []), actual.get(epoch, [])):
            yield f"epoch {epoch + 1}: {text}"


def _differences_of_epoch(expected: list[Example], actual: list[Example]) -> Iterator[str]:
    contents = dict(expected)
    counts = Counter(_addresses(actual))
    for address, count in counts.items():
        if count > 1:
            yield f"example {address} was used {count} times"
    for address in sorted(contents.keys() - counts.keys()):
        yield f"example {address} was not used"
    for address in sorted(counts.keys() - contents.keys()):
        yield f"example {address} was used, but not without kills"

    for address, content in actual:
        if contents.get(address, content) != content:
            yield f"example {address} had another content"
    yield from _other_order(_addresses(expected), _addresses(actual))


def _other_order(expected: list[int], actual: list[int]) -> Iterator[str]:
    """From which index on the addresses come in another order; nothing if they aren't the same addresses."""
    if sorted(actual) != sorted(expected):
        return
    for index, (expected_address, address) in enumerate(zip(expected, actual, strict=True)):
        if address != expected_address:
            yield f"another order from place {index} on"
            return


def _addresses(examples: list[Example]) -> list[int]:
    return [example.address for example in examples]
