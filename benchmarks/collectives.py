"""Measures collectives between 2 processes of this machine: `python -m benchmarks.collectives [ROUNDS]`.

Each way to send, with each way to share the cores, has new processes in each round. Writes
`docs/performance/collectives.md`. A number is the median of the rounds, each of which is the median of five calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.communication import EXAMPLES, step_ways

OUT = Path(__file__).parent.parent / "docs" / "performance" / "collectives.md"
SIZES = {"1 kB": 1 << 10, "64 kB": 1 << 16, "1 MB": 1 << 20, "8 MB": 1 << 23, "100 MB": 100 << 20}
"""What is reduced, in bytes."""
STEPS = {"784-64-10": 64, "784-256-256-10": 64, "784-8x512-10": 64, "784-2x512-10": EXAMPLES // 5}
"""Models whose steps are made, with their global batch: gradients of 0.2, 1.1, 9.0 and 2.7 MB."""
HEAVY = "784-2x512-10"
"""The model of which a step is almost all arithmetic."""
CALLS = 5
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "horovod, Gloo, cycle 0.1 ms": ("horovod", {"HOROVOD_CYCLE_TIME": "0.1"}),
    "horovod, Gloo, cycle 0.5 ms": ("horovod", {"HOROVOD_CYCLE_TIME": "0.5"}),
    "horovod, Gloo, cycle 5 ms": ("horovod", {"HOROVOD_CYCLE_TIME": "5"}),
    "multiworker, ring": ("multiworker", {}),
    "mirrored, one process": ("mirrored", {}),
}
"""The backend and the environment variables of each way to send."""
CORES = ("all cores", "its share", "its share, pinned")
"""How many threads an operation of each process may have, and on which cores."""
ALONE = "one process, one thread"
APART = "two such processes at once, which exchange nothing"
"""What a machine can do at best, where its cores share memory, caches, or a processor with other guests."""


# In a worker


def work(backend_name: str, cores: str, rank: int, out: str) -> None:
    """Measures one way; the chief leaves the result."""
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    if cores == CORES[2]:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank * share : (rank + 1) * share])
    from loop import backends
    from loop.backends import devices

    threads = {CORES[0]: os.cpu_count(), ALONE: 1, APART: 1}.get(cores, share)
    replicas = 2 if backend_name == "mirrored" else None
    devices.prepare(backend_name, replicas, threads=threads)
    backend = backends.create(backend_name, replicas)
    result = {}
    for name, way, calls in ways(backend):
        way()
        times = []
        for _ in range(CALLS):
            backend.exchange(0)
            begun = time.perf_counter()
            way()
            times.append((time.perf_counter() - begun) / calls * 1e3)
        result[name] = statistics.median(times)
    if backend.is_chief:
        Path(out).write_text(json.dumps(result))
    backend.exchange(0)
    backend.close()


def ways(backend: Any) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """What is measured: its name, a function that does it, and how often the function does it."""
    if backend.replicas > 1:
        for name, size in SIZES.items():
            repeats = max(1, min(100, (20 << 20) // size))
            yield name, reducing(backend, size // 4, repeats), repeats
    for model, batch in STEPS.items():
        repeats = 5 if model == HEAVY else 40  # within an epoch
        batch = batch // 2 if backend.replicas == 1 else batch
        [way] = step_ways(backend, model, {"": {"batch_size": batch}}, {}, repeats).values()
        yield model, way, repeats


def reducing(backend: Any, size: int, repeats: int) -> Callable[[], Any]:
    """A function that reduces a tensor again and again, each time when the last one is there."""
    import tensorflow as tf

    def once(value: Any) -> Any:
        [total] = backend.all_reduce([value])
        return total * 0.5

    def all_of_them(value: Any) -> Any:
        for _ in range(repeats):  # not a loop of the graph, in which `MirroredStrategy` can't reduce
            value = backend.run(once, value)
        return backend.first(value)

    function = tf.function(all_of_them, autograph=False)
    value = tf.ones([size])
    return lambda: function(value).numpy()


# In the launcher


def measure_way(backend: str, variables: dict[str, str], cores: str) -> dict[str, float]:
    """Starts the processes of one way, and waits for them."""
    from loop.launch.horovodrun import rendezvous

    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        out = Path(directory) / "out.json"
        places = [{}, {}] if cores == APART else [{}]
        if backend == "horovod":
            places = stack.enter_context(rendezvous(2))
        elif backend == "multiworker":
            places = jobs.tf_places(2)
        command = [sys.executable, "-m", "benchmarks.collectives", "--worker", backend, cores]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
        jobs.finish([
            subprocess.Popen([*command, str(rank), str(out)], env={**environment, **place})
            for rank, place in enumerate(places)
        ])  # fmt: skip
        found: dict[str, float] = json.loads(out.read_text())
        return found


def table(times: dict[str, dict[str, list[float]]], rounds: int) -> str:
    """The result as Markdown."""
    about = jobs.machine()
    alone = statistics.median(times.pop(ALONE)[HEAVY])
    apart = statistics.median(times.pop(APART)[HEAVY])
    columns = [*SIZES, *STEPS]
    lines = [
        "# Collectives on one machine",
        "",
        f"Milliseconds, medians of {rounds} round{'s' * (rounds > 1)} with new processes; 2 processes (`mirrored`: "
        f"one, with 2 logical devices) on {about['cores']} cores ({about['cpu']}), {about['date']}. "
        "`python -m benchmarks.collectives` makes this page.",
        "",
        "The first columns are sums of a tensor of this size, the others training steps of a dense net. For the last "
        f"net, a step of one replica alone ({ALONE}) takes {alone:.1f} ms; scaling is this time divided by that of the "
        f"step of two replicas. With {APART}, the step takes {apart:.1f} ms: a scaling of {alone / apart:.2f} is "
        "possible on this machine, and the last column is relative to it.",
        "",
        "| way | cores of a process | " + " | ".join(columns) + " | scaling | of the possible |",
        "|---|---|" + "---|" * (len(columns) + 2),
    ]
    for name, found in times.items():
        medians = [statistics.median(found[column]) for column in columns]
        numbers = [*medians, alone / medians[-1], apart / medians[-1]]
        lines.append(f"| {name} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
    return "\n".join(lines) + "\n"


def main(rounds: int) -> None:
    """Measures all ways in turns, and writes the page."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        plan = [
            (f"{name} | {cores}", *way, cores)
            for name, way in WAYS.items()
            for cores in CORES
            if cores == CORES[0] or way[0] != "mirrored"  # whose one process has all
        ]
        for name, backend, variables, cores in [*plan, *((limit, "single", {}, limit) for limit in (ALONE, APART))]:
            for what, milliseconds in measure_way(backend, variables, cores).items():
                times[name][what].append(milliseconds)
            print(name, {what: round(each[-1], 2) for what, each in times[name].items()}, file=sys.stderr, flush=True)
    OUT.write_text(table(times, rounds))
    print(OUT.read_text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
