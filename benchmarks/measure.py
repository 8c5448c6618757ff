"""Measures contenders against each other: live processes, one of which works at a time, in rounds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.contenders import CONTENDERS
from benchmarks.environments import command, there

WARM_UP = 3.0  # seconds of training before anything counts: compiled, and the pace found
LAST = 90.0  # seconds that a process has to end


class ContenderError(Exception):
    """A contender has ended, or can't be started."""


class Worker:
    """A contender's process; see `benchmarks.worker`."""

    def __init__(self, name: str, workload: str, directory: Path) -> None:
        self.name = name
        contender = CONTENDERS[name]
        start, environment = command(contender.peer)
        options = contender.options | ({"processes": contender.processes} if contender.processes > 1 else {})
        self._log = directory / "log.txt"
        with self._log.open("wb") as log:
            # A session of its own: what a contender starts beside, such as ours its courier, ends with it. A directory
            # too, because run directories and stores are made where a process stands.
            self._process = subprocess.Popen(
                [*start, "-m", "benchmarks.worker", workload, contender.module, json.dumps(options)], cwd=directory,
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip

    def ask(self, **wanted: float | str) -> dict[str, Any]:
        """Lets it train: `seconds=...` or `steps=...`, with `trace=...`; returns its answer. See `answer`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(wanted), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What it says next; the first time, that everything is imported.

        Raises:
            ContenderError: it has ended; with the last lines of its log.
        """
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            last = self._log.read_text(errors="replace").splitlines()[-15:]
            raise ContenderError("\n".join([f"{self.name} has ended:", *last]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu(self) -> float:
        """The CPU time, in seconds, that it and the processes which it has started have used up to now."""
        seconds = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            for process in [own, *own.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    seconds += times.user + times.system
        return seconds

    def leave(self) -> None:
        """Tells it that there are no more commands."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self) -> None:
        """Waits for its end; it isn't given forever."""
        try:
            self._process.wait(LAST)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def say(text: str) -> None:
    """Tells how far it has come."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def working(names: Sequence[str], workload: str) -> Iterator[dict[str, Worker]]:
    """The processes of these contenders, with all imported; those whose environment isn't there are left out."""
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        try:
            for number, name in enumerate(names):
                if there(peer := CONTENDERS[name].peer):
                    (place := Path(directory) / str(number)).mkdir()
                    workers[name] = Worker(name, workload, place)
                else:
                    say(f"{name}: left out; `python -m benchmarks setup {peer}` makes its environment")
            for worker in workers.values():
                worker.answer()
            yield workers
        finally:
            for worker in workers.values():
                worker.leave()
            for worker in workers.values():
                worker.end()


def measure(workload: str, names: Sequence[str], rounds: int, seconds: float, starts: int = 1) -> dict[str, Any]:
    """Trains a workload by each contender, in rounds, each of which begins with another one.

    Args:
        workload: what to train.
        names: by which contenders.
        rounds: how many.
        seconds: of training, by each contender in a round.
        starts: how often all of it is done, with new processes: where a process finds its memory makes it a few per
            cent faster or slower for as long as it runs.

    Returns:
        By contender: `rates`, in steps per second, by round; `cpu_ms`, the CPU time of a step, which other work on
        the machine hardly changes, by round; `peak_mb`; and `note`.
    """
    processes = [_in_one_process(workload, names, rounds, seconds) for _ in range(starts)]
    found = processes[0]
    for name in list(found):
        if not all(name in process for process in processes):
            del found[name]
            continue
        for process in processes[1:]:
            found[name]["rates"] += process[name]["rates"]
            found[name]["cpu_ms"] += process[name]["cpu_ms"]
            found[name]["peak_mb"] = max(found[name]["peak_mb"], process[name]["peak_mb"])
        found[name]["note"] = ", or ".join(dict.fromkeys(process[name]["note"] for process in processes))
    return found


def _in_one_process(workload: str, names: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}

    def ask(worker: Worker, seconds: float) -> dict[str, Any]:
        try:
            return worker.ask(seconds=seconds)
        except ContenderError as error:  # the others go on without it
            say(str(error))
            found.pop(worker.name, None)
            return {}

    with working(names, workload) as workers:
        for name, worker in workers.items():
            if answer := ask(worker, WARM_UP):
                found[name] = {"rates": [], "cpu_ms": [], "note": answer["note"]}
                say(f"{workload}: {name} is ready {answer['note']}")
        ready = list(found)
        for number in range(rounds if ready else 0):
            for name in ready[number % len(ready) :] + ready[: number % len(ready)]:
                if name not in found:
                    continue
                before = workers[name].cpu()
                if answer := ask(workers[name], seconds):
                    found[name]["rates"].append(answer["steps"] / answer["seconds"])
                    found[name]["cpu_ms"].append(1000 * (workers[name].cpu() - before) / answer["made"])
                    found[name]["peak_mb"] = answer["peak_mb"]
            row = ", ".join(f"{name} {each['rates'][-1]:,.1f}" for name, each in found.items())
            say(f"{workload}: round {number + 1} of {rounds}, steps/s: {row}")
    return found


def check(workload: str, names: Sequence[str], steps: int) -> dict[str, tuple[float, float]]:
    """The mean losses of the first so many steps, and of the next, of each contender."""
    with working(names, workload) as workers:
        losses = {}
        for name, worker in workers.items():
            losses[name] = worker.ask(steps=steps)["loss"], worker.ask(steps=steps)["loss"]
            say(f"{workload}: {name}: loss {losses[name][0]:.3f}, then {losses[name][1]:.3f}")
    return losses
