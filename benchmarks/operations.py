"""Where the time of a step goes, by kind of operation: ours beside the loop by hand.

`python -m benchmarks more operations`. Each process computes in one thread, so that the times add up, and trains under
TensorFlow's profiler in turns with the other.
"""

from __future__ import annotations

import collections
import os
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure

OURS = "ours, callbacks off"
WORKLOADS = {
    "cnn": "by hand, in graph, arrays",
    "charlm": "by hand, in graph, arrays",
    "embedding": "by hand, in graph, rows looked up",
}
"""Which workloads are looked at, and beside whom: those in which ours is slower. Not beside a `tf.data.Dataset`, which
reads in threads of its own."""
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
OPERATION = re.compile(r"[^:\s]+:(\w+)")
"""The name of an operation's event: its own name, and its type."""
LEAST = 0.01
"""The least difference that has a row of its own, of a step by hand."""


class Traced(NamedTuple):
    """A step under the profiler: its time, and the time and number of operations by type; times in microseconds."""

    step: float
    times: dict[str, float]
    counts: dict[str, float]


def measure_operations(rounds: int, seconds: float, starts: int) -> dict[str, Any]:
    """One of `more.MORE`."""
    os.environ |= ONE_THREAD
    rows = []
    for workload, other in WORKLOADS.items():
        ours: list[Traced] = []
        by_hand: list[Traced] = []
        for _ in range(starts):
            with measure.working([OURS, other], workload) as workers:
                for worker in workers.values():
                    worker.ask(seconds=measure.WARM_UP)
                for number in range(rounds):
                    turns = [(OURS, ours), (other, by_hand)]
                    for name, found in turns[number % 2 :] + turns[: number % 2]:
                        found.append(traced(workers[name], seconds))
        rows += compared(workload, median(ours), median(by_hand))
    return {"starts": starts, "rows": rows}


def traced(worker: measure.Worker, seconds: float) -> Traced:
    """Lets a contender train under the profiler."""
    with tempfile.TemporaryDirectory() as directory:
        answer = worker.ask(seconds=seconds, trace=directory)
        [path] = Path(directory).rglob("*.xplane.pb")
        times, counts = operations(path)
    made = answer["made"]
    for kind in times:
        times[kind] /= made
        counts[kind] /= made
    return Traced(1e6 * answer["seconds"] / answer["steps"], times, counts)


def operations(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The time of all operations of a trace, in microseconds, and their number, by type.

    TensorFlow notes only those that it takes for expensive; the others run between them.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(path.read_bytes())
    times: dict[str, float] = collections.Counter()
    counts: dict[str, float] = collections.Counter()
    for plane in space.planes:
        if plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            for event in line.events:
                operation = OPERATION.fullmatch(plane.event_metadata[event.metadata_id].name)
                if operation:
                    times[operation[1]] += event.duration_ps / 1e6
                    counts[operation[1]] += 1
    return times, counts


def median(found: list[Traced]) -> Traced:
    """The medians of several rounds."""
    kinds = {kind for each in found for kind in each.times}
    return Traced(
        statistics.median(each.step for each in found),
        {kind: statistics.median(each.times.get(kind, 0.0) for each in found) for kind in kinds},
        {kind: statistics.median(each.counts.get(kind, 0.0) for each in found) for kind in kinds},
    )


def compared(workload: str, ours: Traced, by_hand: Traced) -> list[dict[str, str]]:
    """The rows of a workload: the step, each type of operation that differs, and what is left, the greatest first."""
    differences = {}
    for kind in ours.times.keys() | by_hand.times.keys():
        differences[kind] = ours.times.get(kind, 0.0) - by_hand.times.get(kind, 0.0)
    shown = [kind for kind, by in differences.items() if abs(by) >= LEAST * by_hand.step]
    rows = [row(workload, "a step", ours.step, by_hand.step)]
    for kind in sorted(shown, key=differences.__getitem__, reverse=True):
        counts = f"{ours.counts.get(kind, 0):.3g} and {by_hand.counts.get(kind, 0):.3g} a step"
        rows.append(row("", f"{kind}, {counts}", ours.times.get(kind, 0.0), by_hand.times.get(kind, 0.0)))
    for each in shown:
        del differences[each]
    others = [sum(step.times.get(kind, 0.0) for kind in differences) for step in (ours, by_hand)]
    rows.append(row("", "the other operations", *others))
    between = [step.step - sum(step.times.values()) for step in (ours, by_hand)]
    rows.append(row("", "between operations", *between))
    return rows


def row(workload: str, what: str, ours: float, by_hand: float) -> dict[str, str]:
    """A row of the table; times in microseconds."""
    return {
        "": workload,
        "µs of one thread": what,
        "ours": f"{ours:,.0f}",
        "by hand": f"{by_hand:,.0f}",
        "more": f"{ours - by_hand:+,.0f}",
    }
