"""ExampleLog: writes down each example that a step was made of, so that two runs can be compared."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from callbacks.base import Callback, Run


class Example(NamedTuple):
    """An example that was used: what tells it from all others of the epoch, and a hash of its content."""

    address: int
    content: str


class ExampleLog(Callback):
    """Writes a line for each (micro-)batch of each replica, at the time that it is taken; `used` reads them.

    Each process has a file of its own, which begins with the position from which it goes on, and writes a line by one
    call: what has been trained on is there even if the process is killed in the next moment. It comes behind
    `ShardData`. All workers of an attempt give it the same number.

    Args:
        directory: where to; one for each run.
    """

    runs_on: ClassVar[Literal["chief", "all"]] = "all"

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._file = -1

    def on_data(self, run: Run, data: Any) -> Any:
        self.directory.mkdir(parents=True, exist_ok=True)
        rank = run.backend.rank
        before = max((int(path.name[:6]) for path in self.directory.glob("*-*.jsonl")), default=-1)
        life = 1 + int(run.backend.exchange(before).max())
        path = self.directory / f"{life:06d}-{rank}.jsonl"
        self._close()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        data = copy.copy(data)
        train = data.train = copy.copy(data.train)
        replica_rows = train.replica_rows

        def watched(*arguments: Any) -> Any:
            import tensorflow as tf

            rows = replica_rows(*arguments)
            with tf.device("CPU:0"):
                tf.numpy_function(self._write, [*rows[1:], *tf.nest.flatten(rows.batch)], [])
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

    def _write(self, first: Any, epoch: Any, number: Any, index: Any, *parts: Any) -> None:
        if len(index):
            contents = [_hash([part[row] for part in parts]) for row in range(len(index))]
            self._line(int(epoch), int(number), int(first), index.tolist(), contents)

    def _line(self, *values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


def _hash(parts: list[Any]) -> str:
    """Of an example's content: 64 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bytes):
            texts = [part]
        else:
            texts = part.ravel().tolist() if part.dtype.kind == "O" else [part.tobytes()]
        for text in texts:
            digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def used(directory: Path) -> dict[int, list[Example]]:
    """The examples that a run was made of, in order, for each epoch.

    Steps of an attempt after the position from which the next one goes on are lost, and don't count.
    """
    batches: dict[tuple[int, int, int, str], list[Example]] = {}
    for _, paths in itertools.groupby(sorted(directory.glob("*.jsonl")), lambda path: path.name[:6]):
        lines = []
        for path in paths:
            for line in path.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # the process was killed within it
                    lines.append((path.name, *json.loads(line)))
        for _, epoch, number, *_ in (line for line in lines if len(line) == 3):
            for key in [key for key in batches if key[:2] >= (epoch, number)]:
                del batches[key]
        for name, epoch, number, first, *pairs in (line for line in lines if len(line) > 3):
            batches[epoch, number, first, name] = [Example(*pair) for pair in zip(*pairs, strict=True)]
    found: dict[int, list[Example]] = {}
    for key, examples in sorted(batches.items()):
        found.setdefault(key[0], []).extend(examples)
    return found


def differences(expected: Mapping[int, list[Example]], found: Mapping[int, list[Example]]) -> Iterator[str]:
    """In what two runs differ by the examples that they used; and whether one used an example twice in an epoch."""
    for epoch in sorted({*expected, *found}):
        one, other = expected.get(epoch, []), found.get(epoch, [])
        times, usual = (Counter(example.address for example in examples) for examples in (other, one))
        yield from (f"epoch {epoch + 1}: example {i} was used {n} times" for i, n in times.items() if n > 1)
        yield from (f"epoch {epoch + 1}: example {i} was not used" for i in usual if i not in times)
        yield from (f"epoch {epoch + 1}: example {i} was used, but not without kills" for i in times if i not in usual)
        contents = dict(one)
        yield from (
            f"epoch {epoch + 1}: example {i} had another content"
            for i, content in other
            if i in contents and contents[i] != content
        )
        if times == usual and (place := _first_difference(one, other)) is not None:
            yield f"epoch {epoch + 1}: another order from place {place} on"


def _first_difference(one: list[Example], other: list[Example]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (mine, yours) in pairs if mine.address != yours.address), None)
