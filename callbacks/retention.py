"""Retention: which complete checkpoints of a run stay, as a pure function of what is known of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable

_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int  # its step
    value: float = math.nan  # its metric; nan: it has none
    time: float = 0.0  # when it was complete, in seconds since the epoch
    bytes: int = 0  # the size of its files


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which checkpoints stay: each that at least one of these rules names."""

    last: int = 3  # how many of the newest
    best: int = 1  # how many of the best
    every: int | None = None  # those whose step is a multiple of it
    hourly: bool = False  # the first of each hour
    max_bytes: int | None = None  # what all of them together may take; the newest and the best one stay in any case
    sign: int = 1  # 1: a smaller metric is better; -1: a greater one


def retained(checkpoints: Iterable[Saved], policy: Policy, pinned: Collection[int | None] = ()) -> set[int]:
    """The steps of the checkpoints that stay, out of all complete ones; those that are pinned stay in any case.

    Their order is that of their steps: clocks may differ from machine to machine. Time counts for `hourly` alone.
    """
    in_order = sorted(checkpoints, key=lambda saved: saved.step)
    best = ranked(in_order, policy.sign)[: policy.best]
    # `last` is at least 1: [-0:] would be all of them.
    kept = {saved.step: saved for saved in [*in_order[-policy.last :], *best]}
    hours = set()
    for saved in in_order:
        hour = saved.time // _HOUR
        is_first = policy.hourly and hour not in hours
        hours.add(hour)  # by its first checkpoint alone, whether a later one is better or not
        is_nth = policy.every is not None and saved.step % policy.every == 0
        if is_first or is_nth or saved.step in pinned:
            kept[saved.step] = saved
    if policy.max_bytes is not None:
        # The limit wins over all other rules but these.
        safe = {saved.step for saved in [*in_order[-1:], *best[:1]]} | set(pinned)
        _fit(kept, safe, policy.max_bytes)
    return set(kept)


def ranked(checkpoints: Iterable[Saved], sign: int) -> list[Saved]:
    """Those that have a finite metric, best first; of equal ones, the older first."""
    judged = [saved for saved in checkpoints if math.isfinite(saved.value)]
    return sorted(judged, key=lambda saved: (sign * saved.value, saved.step))


def _fit(kept: dict[int, Saved], safe: Collection[int | None], max_bytes: int) -> None:
    """Removes the oldest checkpoints that aren't safe, until the rest fits."""
    total = sum(saved.bytes for saved in kept.values())
    for step in sorted(kept):  # a list of its own: `kept` shrinks
        if total <= max_bytes:
            break
        if step not in safe:
            total -= kept.pop(step).bytes
