"""Stopwatch: where the time of a run goes, by part, and which part holds the run back."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from callbacks.formats import part_name

PARTS = ("data", "compute", "all_reduce", "evaluation", "callbacks", "saving", "waiting", "other")
"""The parts of a worker's time. `waiting` is for other workers, between calls; `other` is the rest."""

COMPILING = "compiling"
"""The part of a function's first call, which traces and compiles it. It is reported, but not part of the summary."""

Totals: TypeAlias = dict[str, defaultdict[str, float]]
"""Sums by name: the steps and examples `done`, `seconds` by part, and those of `callbacks` by class."""

_HOST_PARTS = ("callbacks", "saving", "other")

_ADVICE = {
    "data": "make the pipeline faster: map(..., num_parallel_calls=tf.data.AUTOTUNE), cache(), or arrays (ArrayData)",
    "compute": "nothing around the model holds it up: try --compile auto, another --precision, or more workers",
    "all_reduce": "reduce less often: a greater --batch-size (with --accumulate if memory is short), or fewer workers",
    "evaluation": "evaluate less often: --eval-every",
    "callbacks": "let them ask for the host less often (`every`), or do less in them",
    "saving": "save less often: --checkpoint-every",
    "other": "make calls longer: --steps-per-call auto, and no callback that wants the host after each step or two",
}


class Stopwatch:
    """Measures seconds by part. A part within another takes its time from the outer one, so the sum is the whole time.

    Attributes:
        total: the sum of all splits but the first: what `summary` needs of each rank.
        seconds: the sum of all splits, by part.
    """

    def __init__(self) -> None:
        self.total = _nothing()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._parts = ["other"]  # the innermost part comes last: the time since `_since` is its
        self._since = time.perf_counter()
        self._now = _nothing()  # since the last split
        self._has_split = False

    @contextlib.contextmanager
    def at(self, part: str, callback: str = "") -> Iterator[None]:
        """Within it, the time belongs to `part`, and to this callback."""
        self._turn()
        start = self._since
        self._parts.append(part)
        try:
            yield
        finally:
            self._turn()
            self._parts.pop()
            if callback:
                self._now["callbacks"][callback] += self._since - start

    def give(self, seconds: Mapping[str, float]) -> None:
        """Moves time from `other` to the parts to which, by another clock, it belongs."""
        # The sum of all parts stays the whole time.
        for part, duration in seconds.items():
            self._now["seconds"][part] += duration
            self._now["seconds"]["other"] -= duration

    def count(self, steps: int, examples: int) -> None:
        """Counts what a call has done."""
        _add(self._now["done"], {"steps": steps, "examples": examples})

    def split(self) -> dict[str, object] | None:
        """What was done since the last split, and the time of its parts; None before the first step.

        The first split has `first` set: it holds the start of the run, and is left out of `total`.
        """
        self._turn()
        now = self._now
        self._now = _nothing()
        is_first = not self._has_split
        if is_first and not now["done"]["steps"]:
            return None
        self._has_split = True

        _add(self.seconds, now["seconds"])
        if not is_first:
            for name, numbers in now.items():
                _add(self.total[name], numbers)
        return {**now["done"], "first": is_first, "seconds": now["seconds"], "callbacks": now["callbacks"]}

    def _turn(self) -> None:
        """Adds the time since the last turn to the part under way."""
        now = time.perf_counter()
        self._now["seconds"][self._parts[-1]] += now - self._since
        self._since = now


def _nothing() -> Totals:
    return {"done": defaultdict(int), "seconds": defaultdict(int), "callbacks": defaultdict(int)}


def _add(sums: dict[str, float], numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        sums[name] += number


class _Limit(NamedTuple):
    """Something that may hold the run back, and for how long it did: the greatest one is the verdict."""

    seconds: float
    verdict: str
    part: str
    rank: int


def summary(ranks: Sequence[Totals]) -> dict[str, Any]:
    """What holds a run back, from the `Stopwatch.total` of each rank.

    Ranks that come first wait for the others: in the all-reduce, or between calls. So the work of a step is that of the
    slowest rank, the all-reduce is that of the rank that waits least in it, and the host's part that of the busiest.

    Returns:
        `verdict`, in a word; `slowest`, the rank with most data and compute; the `seconds` of each rank; and `text`,
        all of it in lines.
    """
    steps = int(ranks[0]["done"].get("steps", 0))
    seconds = list(map(_by_part, ranks))
    # All ranks wait for the slowest one, so its work is what a step takes.
    slowest = max(range(len(ranks)), key=lambda rank: _work(seconds[rank]))
    if not steps:
        text = "profile: no step after the first call, which is traced and compiled: make more, to see what takes time"
        return {"verdict": "unknown", "slowest": slowest, "seconds": seconds, "text": [text]}

    limit = max(_limits(seconds, slowest))  # tuples: their seconds are compared first
    on_rank = seconds[limit.rank]
    whole = sum(on_rank.values())
    milliseconds = 1e3 * limit.seconds / steps
    why = f"{part_name(limit.part)}: {limit.seconds / whole:.0%} of the time, {milliseconds:.3g} ms a step"

    part = limit.part
    if limit.verdict == "host-bound":
        # The host's limit is the sum of several parts. The advice is for the greatest of them.
        part = max(_HOST_PARTS, key=on_rank.__getitem__)
        why += f", most of it {part}, {on_rank[part] / whole:.0%}"
        if part == "callbacks":
            times = ranks[limit.rank]["callbacks"]
            why += f" (above all {max(times, key=times.__getitem__)})"

    where = f" on rank {limit.rank}" if len(ranks) > 1 else ""
    lines = [*_table(seconds, steps), f"{limit.verdict}{where}: {why}", f"-> {_ADVICE[part]}"]
    return {"verdict": limit.verdict, "slowest": slowest, "seconds": seconds, "text": lines}


def _by_part(total: Totals) -> dict[str, float]:
    # Not `total["seconds"][part]`: other ranks' totals came as JSON, and are plain dicts; and compiling is left out.
    return {part: total["seconds"].get(part, 0.0) for part in PARTS}


def _work(seconds: Mapping[str, float]) -> float:
    return seconds["data"] + seconds["compute"]


def _host_work(seconds: Mapping[str, float]) -> float:
    return sum(seconds[part] for part in _HOST_PARTS)


def _limits(seconds: Sequence[Mapping[str, float]], slowest: int) -> Iterator[_Limit]:
    ranks = range(len(seconds))
    for verdict, part in (("input-bound", "data"), ("compute-bound", "compute"), ("evaluation-bound", "evaluation")):
        yield _Limit(seconds[slowest][part], verdict, part, slowest)
    # A rank that comes late waits least: what it spends in the all-reduce is the reduction itself.
    least = min(ranks, key=lambda rank: seconds[rank]["all_reduce"])
    yield _Limit(seconds[least]["all_reduce"], "communication-bound", "all_reduce", least)
    busiest = max(ranks, key=lambda rank: _host_work(seconds[rank]))
    host = _host_work(seconds[busiest])
    yield _Limit(host, "host-bound", "callbacks, saving and Python between calls", busiest)


def _table(seconds: Sequence[Mapping[str, float]], steps: int) -> Iterator[str]:
    """The shares of each rank's time, in lines."""
    longest = max(sum(parts.values()) for parts in seconds)
    yield f"profile: {steps:,} steps in {longest:.3g} s; the first call and compiling are left out"
    yield "  ".join([" " * 7, *map(part_name, PARTS), "data + compute"])
    for rank, parts in enumerate(seconds):
        whole = sum(parts.values())
        shares = [f"{parts[name] / whole:.0%}".rjust(len(name)) for name in PARTS]
        yield "  ".join([f"rank {rank}".ljust(7), *shares, f"{1e3 * _work(parts) / steps:.3g} ms a step"])
    if len(seconds) > 1:
        work = list(map(_work, seconds))
        ahead = 1e3 * (max(work) - min(work)) / steps
        slowest = work.index(max(work))
        yield f"slowest: rank {slowest}, with {ahead:.3g} ms a step more than rank {work.index(min(work))}"
