"""Where the time of a run goes: a stopwatch for its parts, and what their shares say holds the run back."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PARTS = ("data", "compute", "all_reduce", "evaluation", "callbacks", "saving", "waiting", "other")
"""What a worker's time is split into: `waiting` for other workers is that between calls; `other`, what is left."""

COMPILING = "compiling"
"""The part of a function's first call, which is traced and compiled: it is reported, and left out of the summary."""

_ADVICE = {
    "data": "make the pipeline faster: map(..., num_parallel_calls=tf.data.AUTOTUNE), cache(), or arrays (ArrayData)",
    "compute": "nothing around the model holds it up: try --compile xla, another --precision, or more workers",
    "all_reduce": "reduce less often: a greater --batch-size (with --accumulate if memory is short), or fewer workers",
    "evaluation": "evaluate less often: --eval-every",
    "callbacks": "let them ask for the host less often (`every`), or do less in them",
    "saving": "save less often: --checkpoint-every",
    "other": "make calls longer: --steps-per-call auto, and no callback that wants the host after each step or two",
}


class Stopwatch:
    """Seconds by part. What a part within another takes counts for itself alone, so that the sum is all the time.

    Attributes:
        total: the sum of all splits but the first: what `summary` wants of each rank.
        seconds: the sum of all splits, by part.
    """

    def __init__(self) -> None:
        self._within, self._since = ["other"], time.perf_counter()
        self._begun = False
        self.total = _nothing()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._now = _nothing()

    @contextlib.contextmanager
    def at(self, part: str, callback: str = "") -> Iterator[None]:
        """Within it, the time is that of `part`, and of this callback."""
        self._turn()
        begun = self._since
        self._within.append(part)
        try:
            yield
        finally:
            self._turn()
            self._within.pop()
            if callback:
                self._now["callbacks"][callback] += self._since - begun

    def give(self, seconds: Mapping[str, float]) -> None:
        """What has passed as `other` was, by another clock, in these parts."""
        for part, some in seconds.items():
            self._now["seconds"][part] += some
            self._now["seconds"]["other"] -= some

    def count(self, steps: int, examples: int) -> None:
        """Takes in what a call has done."""
        _add(self._now["done"], {"steps": steps, "examples": examples})

    def split(self) -> dict[str, Any] | None:
        """What was done since the last split, in which seconds, and whether it is the first; None before that."""
        self._turn()
        now, self._now = self._now, _nothing()
        first = not self._begun
        if first and not now["done"]["steps"]:
            return None
        self._begun = True
        _add(self.seconds, now["seconds"])
        if not first:
            for name, numbers in now.items():
                _add(self.total[name], numbers)
        return {**now["done"], "first": first, "seconds": now["seconds"], "callbacks": now["callbacks"]}

    def _turn(self) -> None:
        now = time.perf_counter()
        self._now["seconds"][self._within[-1]] += now - self._since
        self._since = now


def _nothing() -> dict[str, defaultdict[str, float]]:
    return {name: defaultdict(int) for name in ("done", "seconds", "callbacks")}


def _add(sums: dict[str, float], numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        sums[name] += number


def summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What holds a run back, from the `Stopwatch.total` of each rank.

    Who comes first waits for the others: in the all-reduce, or between calls. So the work of a step is that of the
    slowest rank, the all-reduce what the rank that waits least has of it, and the host's part that of the busiest.

    Returns:
        `verdict`, in a word; `slowest`, the rank with most data and compute; the `seconds` of each rank; and `text`,
        all of it in lines.
    """
    steps = ranks[0]["done"].get("steps", 0)
    times = [{part: each["seconds"].get(part, 0.0) for part in PARTS} for each in ranks]
    work = [each["data"] + each["compute"] for each in times]
    host = [each["callbacks"] + each["saving"] + each["other"] for each in times]
    whole = [sum(each.values()) for each in times]
    slowest, busiest = work.index(max(work)), host.index(max(host))
    if not steps:
        text = "profile: no step behind the first call, which is traced and compiled: make more, to see what takes time"
        return {"verdict": "unknown", "slowest": slowest, "seconds": times, "text": [text]}
    least = min(range(len(times)), key=lambda rank: times[rank]["all_reduce"])
    seconds, verdict, part, rank = max(
        (times[slowest]["data"], "input-bound", "data", slowest),
        (times[slowest]["compute"], "compute-bound", "compute", slowest),
        (times[least]["all_reduce"], "communication-bound", "all_reduce", least),
        (times[slowest]["evaluation"], "evaluation-bound", "evaluation", slowest),
        (host[busiest], "host-bound", "callbacks, saving and Python between calls", busiest),
    )
    why = f"{_name(part)}: {seconds / whole[rank]:.0%} of the time, {1e3 * seconds / steps:.3g} ms a step"
    if verdict == "host-bound":
        part = max(("callbacks", "saving", "other"), key=times[busiest].__getitem__)
        why += f", most of it {part}, {times[busiest][part] / whole[busiest]:.0%}"
        if part == "callbacks":
            why += f" (above all {max(ranks[busiest]['callbacks'].items(), key=lambda item: item[1])[0]})"
    lines = [
        f"profile: {steps:,} steps in {max(whole):.3g} s; the first call and compiling are left out",
        "  ".join([f"{'':>7}", *map(_name, PARTS), "data + compute"]),
    ]
    for index, each in enumerate(times):
        shares = [f"{each[name] / whole[index]:.0%}".rjust(len(name)) for name in PARTS]
        lines.append("  ".join([f"rank {index}".ljust(7), *shares, f"{1e3 * work[index] / steps:.3g} ms a step"]))
    if len(times) > 1:
        ahead = 1e3 * (max(work) - min(work)) / steps
        lines.append(f"slowest: rank {slowest}, with {ahead:.3g} ms a step more than rank {work.index(min(work))}")
    where = f" on rank {rank}" if len(times) > 1 else ""
    lines += [f"{verdict}{where}: {why}", f"-> {_ADVICE[part]}"]
    return {"verdict": verdict, "slowest": slowest, "seconds": times, "text": lines}


def _name(part: str) -> str:
    return part.replace("_", "-")
