"""Indexed data: examples that are read by index while the model trains, in the order that `ArrayData` would have."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from callbacks.arguments import is_number, is_whole
from loop.data.example_parts import Example, flatten, name_of
from loop.data.examples import ArraySpec, ExampleReader, MixedReader, array_of, example_seeds, names_of
from loop.data.graph_map import is_graph, on_tensors
from loop.data.joined import known_lengths
from loop.data.padding import FillValues, Padding, as_padding
from loop.data.random_access import Source, reader_of
from loop.errors import TrainingError, UsageError, named
from loop.launch.machine import usable_cpus

Resolve: TypeAlias = Callable[[np.ndarray, int, int], np.ndarray]
"""Returns the numbers of examples in the source, int64 [n], from indices, int64 [n], the epoch and the run's seed."""
Lengths: TypeAlias = Sequence[int] | np.ndarray | Callable[[int], int]
"""The length of each example: an array [examples], or a function of the index."""

_SEARCHED = 64
"""The number of examples, from the first one on, among which one of another length is searched."""


class IndexedData:
    """Examples that are read by index, batch by batch: none is held in memory.

    Order, shares of the replicas, micro-batches and resume are those of `ArrayData`: global batch s of epoch e holds
    the examples perm(seed, e)[s*B : (s+1)*B]; each worker reads its own rows alone, and reads them ahead while the
    step before computes.

    Args:
        source: anything with `len(source)` and `source[index]`, or `source.__getitems__(indices)` for many at once; a
            NumPy array or memory map; the path of an `.npy` or `.parquet` file; a Keras `PyDataset`; `loop.records`;
            `loop.sequences`; or a dict or tuple of these, whose parts together are an example. An example is an array,
            or dicts and tuples of arrays; what is a list is made an array.
        map: makes an example of what the source gives: `map(example)`, or `map(example, seed)`, where `seed` is int64
            [2]: another one for each example and epoch, the same on any number of workers and after a resume. See
            `loop.example_seed`. A `tf.function` runs on all cores, as fast as in tf.data.
        padding: how examples of different lengths become one batch: a `loop.Padding`, or the value that fills the
            gaps. `lengths` says how long each is.
        lengths: the length of each example, after `map`: an array [examples], or a function of the index. It is that of
            the arrays of an example whose first axis has it. If these differ in length, a dict, by their names.
            Without `map`, a source of `loop.sequences` knows them.
        readers: how many processes read and map, beside the one that trains; "auto": one for each CPU core that this
            worker may use. 0: threads do, one for each core, which is best where reading and mapping is done by NumPy
            or by libraries that let other threads run.
        on_bad_example: what becomes of an example that can't be read or mapped, or has another shape or dtype than the
            first: "stop" the run, or "skip" it: its batch has one example less, on any number of workers.

    Raises:
        UsageError: a source that can't be read by index, sources of unequal length, `padding` without `lengths`.
    """

    def __init__(
        self,
        source: Source,
        map: Callable[..., Example] | None = None,
        *,
        padding: Padding | FillValues = None,
        lengths: Lengths | Mapping[str | int, Lengths] | None = None,
        readers: int | str = 0,
        on_bad_example: str = "stop",
    ) -> None:
        if map is not None and not callable(map):
            raise UsageError(
                f"IndexedData(map={type(map).__name__}(...)): give a function of an example; several sources go into "
                "one tuple: IndexedData((inputs, labels))"
            )
        if on_bad_example not in ("stop", "skip"):
            raise UsageError(f"IndexedData(on_bad_example={on_bad_example!r}): give 'stop' or 'skip'")
        self.padding = as_padding(padding)
        reader = reader_of(source)
        if map is None and lengths is None:
            lengths = dict(known_lengths(reader)) or None
        _check_lengths(self.padding, has_lengths=lengths is not None)
        self.maps_in_graph = is_graph(map)
        called_map = on_tensors(map) if is_graph(map) else map
        self.reader: ExampleReader | MixedReader = ExampleReader(reader, called_map)
        self.readers = _checked_readers(readers)
        if self.maps_in_graph and self.readers:
            raise UsageError(
                f"IndexedData(readers={readers!r}): a map that is a tf.function runs on all cores by itself: leave "
                "readers out"
            )
        self.skips = on_bad_example == "skip"
        self.size = len(self.reader)
        self.wide = False
        self.mixes = False  # whether an index stands for another example in each epoch
        self._splits = 0  # how many splits have made this part of the data
        self._lengths = lengths

        # Parts and mixtures replace these two: the index of an example is another one than its number in the source.
        self._resolve: Resolve = _same
        self._lengths_of: Callable[[np.ndarray, str | int], np.ndarray] | None = None

    @property
    def calls_user(self) -> bool:
        """Whether reading calls code of the user, which may run graphs of TensorFlow."""
        lengths = self._lengths.values() if isinstance(self._lengths, Mapping) else [self._lengths]
        return not self.reader.by_column or any(map(callable, lengths))

    def resolve(self, indices: np.ndarray, epoch: int, seed: int) -> np.ndarray:
        """The numbers in the source of the examples of these indices: int64 [n]."""
        return self._resolve(indices, epoch, seed)

    def take(self, count: int) -> IndexedData:
        """The first `count` examples; of a mixture, the first ones of each epoch, which are others each time.

        So split examples for an evaluation off the sources before you mix them.
        """
        return self._narrowed(lambda indices: indices, min(_whole(count, "take"), self.size))

    def skip(self, count: int) -> IndexedData:
        """All but the first `count` examples."""
        self._check_indices("skip")
        start = min(_whole(count, "skip"), self.size)
        return self._narrowed(lambda indices: indices + start, self.size - start)

    def head(self, count: int) -> IndexedData:
        """The first examples: the same ones in each epoch; of a mixture, other ones in each epoch."""
        taken = self.take(count)

        def resolve(indices: np.ndarray, epoch: int, seed: int) -> np.ndarray:
            return taken.resolve(indices, 0, seed)

        return taken.replaced(_resolve=resolve, mixes=False)

    def filter(self, keep: Callable[[int], bool] | Sequence[bool] | np.ndarray) -> IndexedData:
        """The examples for which `keep` is true: a function of the index, or an array of bools [examples]."""
        self._check_indices("filter")
        if callable(keep):
            kept = np.zeros(self.size, bool)
            for index in range(self.size):
                kept[index] = bool(_asked(keep, index, "filter"))
        else:
            kept = np.asarray(keep)
        if (kept.dtype, kept.shape) != (np.dtype(bool), (self.size,)):
            raise UsageError(
                f"IndexedData.filter: {kept.dtype}{list(kept.shape)} instead of bool[{self.size}]: give a function of "
                "the index, or one bool for each example"
            )
        chosen = np.flatnonzero(kept).astype(np.int64)
        return self._narrowed(lambda indices: chosen[indices], len(chosen))

    def split(self, share: float, key: Callable[[int], object] | None = None) -> tuple[IndexedData, IndexedData]:
        """Splits the examples by a hash into two parts, such as for training and for evaluation.

        An example stays in its part when further examples are added after it.

        Args:
            share: about which share of the examples the second part has, between 0 and 1.
            key: returns the key of the example at an index of this data, such as the name of a file or a person.
                Examples of one key are in one part. None: the index is the key.

        Returns:
            The first part, with the rest of the examples, and the second one.
        """
        if not (is_number(share, 0, 1) and 0 < share < 1):
            raise UsageError(f"IndexedData.split({share!r}): give a number between 0 and 1")
        if key is not None and not callable(key):
            raise UsageError(f"IndexedData.split(key={key!r:.99}): give a function that returns the key of an index")
        self._check_indices("split")
        if key is None:
            scattered = _scattered(np.arange(self.size, dtype=np.uint64))
        else:
            # By another hash than earlier splits, which have left only keys with great hashes, or only small ones.
            keys = (_asked(key, index, "split(key=...)") for index in range(self.size))
            hashes = (_hash(key_of_example, self._splits) for key_of_example in keys)
            scattered = np.fromiter(hashes, np.uint64, self.size)
        # By the hash of each example alone: it stays in its part when others are added.
        held_out = scattered < np.uint64(share * 2.0**64)
        split = self.replaced(_splits=self._splits + 1)
        return split.filter(~held_out), split.filter(held_out)

    def in_float64(self) -> IndexedData:
        """The same examples, with floating-point numbers of 64 bits."""
        return self.replaced(wide=True)

    def first_arrays(self, count: int) -> Iterator[np.ndarray]:
        """The arrays of the first examples, as in epoch 0 with the seed 0."""
        indices = np.arange(min(count, self.size), dtype=np.int64)
        seeds = example_seeds(indices, 0, 0)
        examples = self.reader.read(self.resolve(indices, 0, 0), seeds)
        for index, example in enumerate(examples):
            if isinstance(example, Exception):
                continue  # training tells of it, or leaves it out
            for path, part in flatten(example):
                yield array_of(part, name_of(path), index)

    def lengths(self, ids: np.ndarray, name: str | int) -> np.ndarray:
        """The lengths of an array in examples of the source, by their numbers there: int64 [n]."""
        if self._lengths_of is not None:  # of a mixture, each of whose sources has its own
            return self._lengths_of(ids, name)

        given = self._lengths
        if isinstance(given, Mapping):
            if name not in given:
                raise UsageError(
                    f"IndexedData(lengths=...): no lengths of array {name!r}, only of {sorted(map(str, given))}: say "
                    "how long each array is that differs in length"
                )
            given = given[name]
        if callable(given):
            return _not_negative(_measured(given, ids), ids)
        counts = np.asarray(given)
        if counts.shape != (len(self.reader),) or counts.dtype.kind not in "iu":
            raise UsageError(
                f"IndexedData(lengths=...): {counts.dtype}{list(counts.shape)} instead of an integer for each of "
                f"{len(self.reader)} examples"
            )
        return _not_negative(counts.take(ids).astype(np.int64), ids)

    def padded_names(self, specs: Sequence[ArraySpec], first: int) -> list[str | int]:
        """The names of the arrays that are padded: those with lengths by name, or whose first axis has the length.

        `specs` are those of the arrays of the first example, `first` is its number in the source.

        Raises:
            UsageError: `lengths` says of no array how long it is.
        """
        if self.padding is None:
            return []
        names = names_of(specs)
        # Lengths by name say which arrays are padded; a single list of lengths has to be compared to the shapes.
        if isinstance(self._lengths, Mapping):
            for name in self._lengths:
                if name not in names:
                    raise UsageError(f"IndexedData(lengths=...): there is no array {name!r}, only {names}")
            return [name for name in names if name in self._lengths]
        return self._of_the_length(names, {spec.name: spec.shape for spec in specs}, first)

    def _of_the_length(
        self, names: list[str | int], shapes: dict[str | int, tuple[int, ...]], first: int
    ) -> list[str | int]:
        """The arrays whose first axis has the length that `lengths` says, by the shapes of the first example."""
        # Which example of a mixture comes first depends on the seed: the one with these shapes is named by the caller.
        others = self.resolve(np.arange(min(self.size, _SEARCHED), dtype=np.int64), 0, 0)
        ids = np.append(np.array([first], np.int64), others)
        lengths = self.lengths(ids, names[0])
        padded = [name for name in names if shapes[name][:1] == (lengths[0],)]
        if not padded:
            raise UsageError(
                f"IndexedData(lengths=...): {lengths[0]} for example {ids[0]}, whose arrays have the shapes {shapes}: "
                "give the length along the first axis that examples have after map"
            )
        # An array of a fixed size may have this length by chance. In an example of another length it shows.
        others = np.flatnonzero(lengths != lengths[0])[:1]
        for other in self.reader.read(ids[others], np.zeros([len(others), 2], np.int64)):
            if isinstance(other, Exception):
                continue
            first_axes = {name_of(path): np.shape(part)[:1] for path, part in flatten(other)}
            padded = [name for name in padded if first_axes.get(name) != shapes[name][:1]]
        return padded

    def _check_indices(self, what: str) -> None:
        """Refuses to choose examples of a mixture by index; `what` is the method that was called."""
        # What is held out of the training in one epoch would be trained on in the next one.
        if self.mixes:
            raise UsageError(
                f"IndexedData.{what} of a mixture: an index stands for another example in each epoch: choose examples "
                f"of the sources with {what}, and mix these"
            )

    def _narrowed(self, select: Callable[[np.ndarray], np.ndarray], size: int) -> IndexedData:
        """The same data with fewer examples; `select` makes indices of this data from those of the result."""

        # Each part asks the one that it was made of, so that parts of parts and of mixtures resolve by themselves.
        def resolve(indices: np.ndarray, epoch: int, seed: int) -> np.ndarray:
            return self.resolve(select(indices), epoch, seed)

        return self.replaced(_resolve=resolve, size=size)

    def replaced(self, **attributes: Any) -> IndexedData:
        """The same data with other values of these attributes."""
        changed = copy.copy(self)  # not made anew: the checks of `__init__` don't hold for what `mix` puts together
        changed.__dict__.update(attributes)
        return changed


def _same(indices: np.ndarray, epoch: int, seed: int) -> np.ndarray:
    return indices


def _check_lengths(padding: Padding | None, has_lengths: bool) -> None:
    """Refuses padding without lengths, lengths without padding, and buckets by a function of an example."""
    if padding is None:
        if has_lengths:
            raise UsageError(
                "IndexedData: examples that differ in length (lengths=..., loop.sequences) without padding: give "
                "padding=loop.Padding()"
            )
        return
    if not has_lengths:
        raise UsageError(
            "IndexedData: padding and lengths belong together: give lengths=..., the length of each example, so "
            "that each worker knows how long a global batch is padded without reading all of it"
        )
    if callable(padding.bucket_by):
        raise UsageError(
            "IndexedData(padding=loop.Padding(bucket_by=FUNCTION)): no example is read to find its bucket: give "
            "bucket_by=True, which sorts by lengths=..."
        )


def _asked(function: Callable[[int], Any], index: int, what: str) -> Any:
    """What a function of the user's, the argument `what`, returns for the index of an example.

    Raises:
        TrainingError: it has failed; the message names the index, of perhaps millions.
    """
    try:
        return function(index)
    except Exception as error:
        raise TrainingError(f"IndexedData: the function of {what} fails for example {index}: {named(error)}") from error


def _measured(length: Callable[[int], int], ids: np.ndarray) -> np.ndarray:
    """The lengths of examples, by a function of the index: int64 [n]."""
    lengths = np.empty(len(ids), np.int64)
    for row, index in enumerate(ids.tolist()):
        given = _asked(length, index, "lengths=...")
        try:
            lengths[row] = operator.index(given)  # `int` would cut 2.5, and take texts
        except (TypeError, OverflowError):
            raise _no_length(given, index) from None
    return lengths


def _not_negative(lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The lengths of these examples, if none is negative."""
    if (lengths < 0).any():
        row = int(np.argmax(lengths < 0))
        raise _no_length(lengths[row].item(), int(ids[row]))
    return lengths


def _no_length(given: object, index: int) -> UsageError:
    return UsageError(
        f"IndexedData(lengths=...): {given!r:.80} for example {index}: give its length, an integer from 0 on"
    )


def _checked_readers(readers: int | str) -> int:
    """The number of reading processes, from the argument `readers`."""
    if readers == "auto":
        return usable_cpus()
    if not is_whole(readers, 0):
        raise UsageError(f"IndexedData(readers={readers!r}): give a number of processes, 0 for threads, or 'auto'")
    return int(readers)


def _whole(count: int, what: str) -> int:
    """A number of examples, checked; `what` is the method that got it."""
    if not is_whole(count, 0):
        raise UsageError(f"IndexedData.{what}({count!r}): give a number of examples")
    return int(count)


def _hash(key: object, split: int) -> int:
    """A hash of a key that is the same in each process, unlike Python's own: 64 bits; another one for each split."""
    # As the constants of `_scattered`, size and byte order decide in which part of `split` an example is.
    text = key if isinstance(key, bytes) else str(key).encode()
    salt = split.to_bytes(hashlib.blake2b.SALT_SIZE, "little")  # of 0, that of a hash without a salt
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "little")


def _scattered(numbers: np.ndarray) -> np.ndarray:
    """Numbers scattered evenly over all of uint64: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    # The published constants. Others would put examples of earlier runs into another part of `split`.
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
