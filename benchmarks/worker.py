"""One contender's process: it trains on demand, and says how long that took, in lines of JSON.

Started by `measure.Worker` as `python -m benchmarks.worker WORKLOAD MODULE OPTIONS`. A command is `{"seconds": s}`
(train for about so long) or `{"steps": n}` (make so many steps); the answer has `steps`, `seconds` and the mean `loss`
over them. With `"trace": DIRECTORY`, TensorFlow's profiler writes there what runs meanwhile. What is built and compiled
is kept, so that what is timed is training alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from benchmarks.workloads import WORKLOADS

Run = Callable[[int], tuple[int, float]]
"""Makes about so many training steps; how many it made, and their mean loss, for which it has waited for them."""
TRIAL = 1.0  # seconds for which each of several ways is tried


class Port:
    """The worker's end of the line."""

    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self._commands, self._answers = commands, answers
        self._traced = False
        self.note = ""

    def next(self) -> dict[str, Any] | None:
        """Waits for the next command; None is the end."""
        line = self._commands.readline()
        command = json.loads(line) if line else None
        if command and "trace" in command:
            import tensorflow as tf

            tf.profiler.experimental.start(command["trace"])
            self._traced = True
        return command

    def answer(self, steps: int, seconds: float, loss: float, made: int | None = None) -> None:
        """Answers a command: steps and their time, and `made`, all steps since the one before, if there were more.

        `note`, if the contender has set one, goes with it.
        """
        if self._traced:
            import tensorflow as tf

            tf.profiler.experimental.stop()
            self._traced = False
        # In kilobytes, but on macOS in bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
        said = {"steps": steps, "made": made or steps, "seconds": seconds, "loss": loss, "peak_mb": round(peak),
                "note": self.note}  # fmt: skip
        print(json.dumps(said), file=self._answers, flush=True)


def drive(port: Port, ways: dict[str, tuple[Run, int]], start_up: bool = False) -> None:
    """Serves the commands with the fastest of several ways to train.

    Args:
        port: where commands come from.
        ways: by name, a function that trains, and the number that its steps must be a multiple of.
        start_up: whether each call has costs of its own, such as the start of an epoch. A short run is then taken off
            a long one, so that what is left are the steps.
    """
    run: Run | None = None
    rate = 0.0
    while (command := port.next()) is not None:
        if run is None:
            if len(ways) > 1 and "seconds" in command:
                rates = {name: pace(*way) for name, way in ways.items()}
                port.note = max(rates, key=rates.__getitem__)
                rate = rates[port.note]
            run, unit = ways[port.note] if port.note else next(iter(ways.values()))
        if "steps" in command:
            port.answer(*timed(run, command["steps"]))
            continue
        rate = rate or pace(run, unit)
        wanted = max(1, round(command["seconds"] * rate / unit)) * unit
        seconds, made = 0.0, 0
        while seconds <= 0:  # on a machine with other things to do, a short run may even take longer
            short = timed(run, max(1, wanted // (8 * unit)) * unit)[:2] if start_up else (0, 0.0)
            steps, seconds, loss = timed(run, wanted + short[0])
            made += steps + short[0]
            steps, seconds = steps - short[0], seconds - short[1]
        port.answer(steps, seconds, loss, made)
        rate = steps / seconds


def timed(run: Run, steps: int) -> tuple[int, float, float]:
    """The number of steps made, the seconds that they took, and their mean loss."""
    begun = time.perf_counter()
    made, loss = run(steps)
    return made, time.perf_counter() - begun, loss


def pace(run: Run, unit: int) -> float:
    """Steps per second, about: after a first run, which compiles, one that takes a while."""
    run(unit)
    wanted = unit
    while True:
        steps, seconds, _ = timed(run, wanted)
        if seconds >= TRIAL / 2:
            return steps / seconds
        wanted = max(2 * wanted, round(min(TRIAL / seconds, 16) * wanted / unit) * unit)


def main(workload: str, module: str, given: str) -> int:
    """Runs one contender; with `processes` in its options, that many of them."""
    options = json.loads(given)
    processes = options.pop("processes", 1)
    if processes > 1 and "HOROVOD_RANK" not in os.environ:
        return spread(processes)
    # Whatever a library prints goes to the log; stdout is the line to the one that measures.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if threads := options.pop("threads", None):  # `tfloop train --threads 1` sets the same
        os.environ |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": str(threads)}
    chosen = WORKLOADS[workload]
    chosen = dataclasses.replace(chosen, metrics=options.pop("metrics", chosen.metrics))
    contender = importlib.import_module(f"benchmarks.contenders.{module}")
    print("{}", file=answers, flush=True)
    contender.serve(chosen, Port(sys.stdin, answers), **options)
    return 0


def spread(processes: int) -> int:
    """Runs this same worker in several processes; the first one has the line to the one that measures."""
    from loop.launch.environment import LOCAL_SIZE
    from loop.launch.horovodrun import rendezvous

    command = [sys.executable, *sys.orig_argv[1:]]
    with rendezvous(processes) as places:
        workers = []
        for rank, place in enumerate(places):
            line = None if rank == 0 else subprocess.DEVNULL
            environment = {**os.environ, **place, LOCAL_SIZE: str(processes)}  # as `tfloop train` sets it
            workers.append(subprocess.Popen(command, env=environment, stdin=line, stdout=line))
        return max(worker.wait() != 0 for worker in workers)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
