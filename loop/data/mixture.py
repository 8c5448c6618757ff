"""Mixtures: several indexed sources as one, each with an exact share of the examples."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from loop.data.batch import EVALUATION_EPOCH
from loop.data.example_parts import by_source
from loop.data.examples import MixedReader
from loop.data.indexed import IndexedData
from loop.data.order import shuffled
from loop.errors import UsageError

_PATTERN = 1000
"""The number of examples after which the pattern of sources repeats: shares are met to a thousandth."""


def mix(shares: Mapping[IndexedData, float]) -> IndexedData:
    """Several sources as one: `loop.mix({a: 0.7, b: 0.3})`.

    Order and shares are exact, on any number of workers and after a resume, as those of one source. An epoch is as long
    as it can be without using more examples of a source than it has. A source with more of them than its share goes on
    in the next epoch where it has stopped, in a shuffled order of its own: all its examples are used before one is used
    again. So an index of the mixture stands for another example in each epoch: split the sources, and not the mixture.

    Args:
        shares: how much of the examples comes from each source; they are divided by their sum. Sources may have a
            `map` of their own, but must give the same arrays.

    Raises:
        UsageError: fewer than two sources, something else than `IndexedData`, a share that isn't positive or too
            small; sources of which some are padded, or in another way.
    """
    if not isinstance(shares, Mapping):
        raise UsageError(
            f"loop.mix({type(shares).__name__}): give a dict of at least two sources, as in "
            "loop.mix({IndexedData(...): 0.7, ...})"
        )
    parts = list(shares)
    weights = _checked(parts, list(shares.values()))
    pattern = _pattern([part.size for part in parts], weights / weights.sum())
    mixture = _Mixture(parts, pattern)

    # A copy of the first source: padding is the same in all of them, and the rest is replaced by the mixture's own.
    return parts[0].replaced(
        reader=MixedReader([part.reader for part in parts]),
        maps_in_graph=False,  # `GraphReadAhead` reads a single source
        readers=max(part.readers for part in parts),
        skips=any(part.skips for part in parts),
        size=pattern.blocks * len(pattern.sources),
        _resolve=mixture.resolve,
        _lengths_of=mixture.lengths,
        mixes=True,
    )


def _checked(parts: Sequence[IndexedData], shares: Sequence[float]) -> np.ndarray:
    """The shares, not yet divided by their sum: float64 [sources]. Refuses what `mix` refuses."""
    if len(parts) < 2:
        raise UsageError("loop.mix: give at least two sources, as in loop.mix({IndexedData(...): 0.7, ...})")
    for part in parts:
        if not isinstance(part, IndexedData):
            raise UsageError(
                f"loop.mix: a source is of type {type(part).__name__}: give IndexedData, which takes arrays, too, as "
                "in loop.mix({IndexedData((images, labels)): 0.7, ...})"
            )
    if any(part.padding != parts[0].padding for part in parts):
        raise UsageError("loop.mix: the sources have different padding=...: give all the same")
    with contextlib.suppress(TypeError, ValueError):
        weights = np.array(shares, np.float64)
        if np.all((weights > 0) & np.isfinite(weights)):
            return weights
    raise UsageError(f"loop.mix: shares of {list(shares)}: give positive numbers")


class _Pattern(NamedTuple):
    """The order of sources, which repeats."""

    sources: np.ndarray  # which source each example of the pattern comes from: int64 [examples]
    ranks: np.ndarray  # how many examples of its source the pattern has before it: int64 [examples]
    counts: np.ndarray  # how many examples of each source a pattern has: int64 [sources]
    blocks: int  # how often it is repeated in an epoch


def _pattern(sizes: Sequence[int], shares: np.ndarray) -> _Pattern:
    """The pattern for sources of these sizes; each source's examples are spread evenly over it."""
    # Small sources make the pattern shorter, so that an epoch has at least one.
    length = int(min(_PATTERN, (np.asarray(sizes) / shares).min()))
    counts = np.floor(shares * length).astype(np.int64)
    # The examples that rounding down has left over go to the sources that lost most by it.
    lost_most = np.argsort(counts - shares * length, kind="stable")[: length - int(counts.sum())]
    counts[lost_most] += 1
    if (counts == 0).any():
        raise UsageError(
            f"loop.mix: a share of {shares.min():.2g} of {length} examples is less than one: give a greater one, or "
            "larger sources"
        )

    # Each source's examples lie at equal distances in the pattern; sorting merges the sources.
    ranks = np.concatenate(list(map(np.arange, counts)))
    positions = (ranks + 0.5) / np.repeat(counts, counts)
    order = np.argsort(positions, kind="stable")
    sources = np.repeat(np.arange(len(sizes)), counts)[order]
    ranks = ranks[order]
    blocks = int((np.asarray(sizes) // counts).min())
    return _Pattern(sources, ranks, counts, blocks)


class _Mixture:
    """Which example of which source each example of a mixture is."""

    def __init__(self, parts: Sequence[IndexedData], pattern: _Pattern) -> None:
        self._parts = parts
        self.pattern = pattern
        lengths = [len(part.reader) for part in parts]
        self._ends = np.cumsum(lengths)  # as in `MixedReader`, which reads by these numbers
        self._firsts = self._ends - lengths

    def resolve(self, indices: np.ndarray, epoch: int, seed: int) -> np.ndarray:
        """See `IndexedData.resolve`. Examples of a source are numbered after those of the source before it."""
        pattern = self.pattern
        blocks, positions = np.divmod(indices, len(pattern.sources))
        epochs_before = 0 if epoch == EVALUATION_EPOCH else epoch  # each evaluation has the same examples
        ids = np.empty_like(indices)
        for number, part in enumerate(self._parts):
            rows = np.flatnonzero(pattern.sources[positions] == number)
            # A source counts its own epochs: it goes on where it stopped in the epoch of the mixture before.
            count = int(pattern.counts[number])
            used = (epochs_before * pattern.blocks + blocks[rows]) * count + pattern.ranks[positions[rows]]
            own_epochs, own_positions = np.divmod(used, part.size)
            # An order for each of the source's epochs; a stream of its own, so that no two sources are shuffled alike.
            for own_epoch in np.unique(own_epochs).tolist():
                same = own_epochs == own_epoch
                with tf.device("CPU:0"):
                    own = np.asarray(shuffled(own_positions[same], seed, own_epoch, part.size, number + 1))
                ids[rows[same]] = self._firsts[number] + part.resolve(own, own_epoch, seed)
        return ids

    def lengths(self, ids: np.ndarray, name: str | int) -> np.ndarray:
        """See `IndexedData.lengths`."""
        lengths = np.empty_like(ids)
        for number, rows, own_ids in by_source(self._ends, ids):
            lengths[rows] = self._parts[number].lengths(own_ids, name)
        return lengths
