"""Where the time of a step goes, by kind of operation: ours beside others.

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
COMPARED = (
    ("cnn", "by hand, in graph, arrays"),
    ("cnn", "Keras fit, best steps_per_execution"),
    ("charlm", "by hand, in graph, arrays"),
    ("embedding", "by hand, in graph, rows looked up"),
)
"""Which workloads are looked at, and beside whom: where a goal is missed, or nearly. The loops by hand read arrays: a
`tf.data.Dataset` reads in threads of its own, whose time isn't that of a step. Keras's `fit` has no other way."""
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
OPERATION = re.compile(r"[^:\s]+:(\w+)")
"""The name of an operation's event: its own name, and its type."""
LEAST = 0.01
"""The least difference that has a row of its own, of a step by hand."""


class Traced(NamedTuple):
    """The times of a step, in microseconds.

    Attributes:
        alone: without the profiler.
        step: under the profiler.
        times: of its operations, by type.
        counts: how many operations of a type there are.
    """

    alone: float
    step: float
    times: dict[str, float]
    counts: dict[str, float]


def measure_operations(rounds: int, seconds: float, starts: int) -> dict[str, Any]:
    """One of `more.MORE`."""
    os.environ |= ONE_THREAD
    rows = []
    for workload, other in COMPARED:
        ours: list[Traced] = []
        others: list[Traced] = []
        for _ in range(starts):
            with measure.working([OURS, other], workload) as workers:
                for worker in workers.values():
                    worker.ask(seconds=measure.WARM_UP)
                for number in range(rounds):
                    turns = [(OURS, ours), (other, others)]
                    for name, found in turns[number % 2 :] + turns[: number % 2]:
                        found.append(traced(workers[name], seconds))
        rows += compared(f"{workload}: {other}", median(ours), median(others))
    return {"starts": starts, "rows": rows}


def traced(worker: measure.Worker, seconds: float) -> Traced:
    """Lets a contender train, without the profiler and under it."""
    alone = worker.ask(seconds=seconds)
    with tempfile.TemporaryDirectory() as directory:
        answer = worker.ask(seconds=seconds, trace=directory)
        [path] = Path(directory).rglob("*.xplane.pb")
        times, counts = operations(path)
    made = answer["made"]
    for kind in times:
        times[kind] /= made
        counts[kind] /= made
    steps = [1e6 * each["seconds"] / each["steps"] for each in (alone, answer)]
    return Traced(*steps, times, counts)


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
        statistics.median(each.alone for each in found),
        statistics.median(each.step for each in found),
        {kind: statistics.median(each.times.get(kind, 0.0) for each in found) for kind in kinds},
        {kind: statistics.median(each.counts.get(kind, 0.0) for each in found) for kind in kinds},
    )


def compared(what: str, ours: Traced, other: Traced) -> list[dict[str, str]]:
    """The rows of a comparison: the step, each type of operation that differs, the greatest first, and what is left."""
    differences = {}
    for kind in ours.times.keys() | other.times.keys():
        differences[kind] = ours.times.get(kind, 0.0) - other.times.get(kind, 0.0)
    shown = [kind for kind, by in differences.items() if abs(by) >= LEAST * other.step]
    rows = [
        row(what, "a step, without the profiler", ours.alone, other.alone),
        row("", "a step", ours.step, other.step),
    ]
    for kind in sorted(shown, key=differences.__getitem__, reverse=True):
        counts = f"{ours.counts.get(kind, 0):.3g} and {other.counts.get(kind, 0):.3g} a step"
        rows.append(row("", f"{kind}, {counts}", ours.times.get(kind, 0.0), other.times.get(kind, 0.0)))
    for each in shown:
        del differences[each]
    left = [sum(step.times.get(kind, 0.0) for kind in differences) for step in (ours, other)]
    rows.append(row("", "the other operations", *left))
    between = [step.step - sum(step.times.values()) for step in (ours, other)]
    rows.append(row("", "between operations", *between))
    return rows


def row(beside: str, what: str, ours: float, other: float) -> dict[str, str]:
    """A row of the table; times in microseconds."""
    return {
        "beside": beside,
        "µs of one thread": what,
        "ours": f"{ours:,.0f}",
        "the other": f"{other:,.0f}",
        "more": f"{ours - other:+,.0f}",
    }
