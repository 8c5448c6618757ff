"""`tfloop bench`: the speed of a task in tfloop, in Keras's `fit`, and in a plain loop made of the same `compute`.

Each measurement has a process of its own, and the contenders take turns: what slows the machine down for a while slows
down all of them. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.files import read_json
from callbacks.formats import plural
from callbacks.throughput_probe import ThroughputProbe
from callbacks.types import JsonObject
from loop.commands import command_line, terminal, trial
from loop.launch import signals

if TYPE_CHECKING:
    from rich.console import RenderableType

IN_ONE_CALL = 50
"""How many steps the faster way of a contender makes in one call."""
# Names in the report, and of the ways that `bench_contender` knows.
OURS, BY_HAND, KERAS = "tfloop", "by hand", "Keras fit"
_MODULE = "loop.commands.bench_contender"
# Without checkpoints and evaluations, as the contenders.
_ALWAYS = ["--track=off", "--keep=last", "--eval-every=never", f"--steps={trial.ENDLESS}"]


@dataclasses.dataclass
class Contender:
    """A way to train the task."""

    name: str  # `OURS`, `BY_HAND` or `KERAS`
    steps: int | None = None  # in one call; None: tfloop chooses
    speeds: list[float] = dataclasses.field(default_factory=list)  # examples per second, of each round
    problem: str = ""  # why it can't be measured, or ""
    left_out: str = ""  # the task's own options that it goes without, or ""

    def __str__(self) -> str:
        if self.steps is None:
            return self.name
        return f"{self.name}, {plural(self.steps, 'step')} a call"

    @property
    def speed(self) -> float:
        """The median of its rounds; 0 if there is none."""
        return statistics.median(self.speeds or [0.0])


@dataclasses.dataclass
class Report:
    """What was measured."""

    target: str  # the target of the task
    batch_size: int  # the size of the global batch
    rounds: int  # how often each contender was measured
    contenders: list[Contender]  # tfloop first

    def best(self, name: str) -> Contender | None:
        """The fastest way of a contender that was measured in every round; None: there is none."""
        ways = [contender for contender in self.contenders if contender.name == name and not contender.problem]
        return max(ways, key=attrgetter("speed"), default=None)


def bench(
    target: str,
    assignments: Sequence[str],
    batch_size: int | None,
    seconds: float,
    rounds: int,
    progress: Callable[[str], None],
) -> Report:
    """Measures all contenders in turns: each so many rounds, for so many seconds after a warm-up of half that time.

    Without a batch size, it is the task's own. `progress` is called with what is being measured.

    Raises:
        UsageError: the task can't be trained at all.
        TrainingError: it fails.
    """
    contenders = [Contender(OURS)]
    for name in (BY_HAND, KERAS):
        contenders += [Contender(name, 1), Contender(name, IN_ONE_CALL)]
    asked: JsonObject = {
        "target": target, "assignments": list(assignments), "batch_size": batch_size, "seconds": seconds,
    }  # fmt: skip
    for number in range(rounds):
        for contender in contenders:
            if contender.problem:  # it would fail again
                continue
            progress(f"{contender}, round {number + 1}")
            with signals.temporary_directory("tfloop-bench-") as directory:
                if contender.name == OURS:
                    # The others, which are measured later, have the batch size that this one has found.
                    asked["batch_size"] = _measure_ours(contender, asked, Path(directory))
                else:
                    _measure_other(contender, asked, Path(directory))
    return Report(target, asked["batch_size"], rounds, contenders)


def _measure_ours(contender: Contender, asked: JsonObject, directory: Path) -> int:
    """Measures tfloop; returns the batch size."""
    probe = command_line.callback_option(ThroughputProbe, asked["seconds"])
    # On one device, as the contenders.
    given = command_line.arguments({"batch_size": asked["batch_size"], "backend": "single"}, asked["assignments"])
    code = trial.run([asked["target"], *given, *_ALWAYS, probe, f"--run-dir={directory / 'run'}"], directory)
    speed = read_json(directory / "run" / "trial-0.json").get("examples_per_second")
    if code or not speed:
        raise trial.failure(code, trial.problem(code, directory))
    contender.speeds.append(speed)
    return int(read_json(directory / "run" / "run.json")["options"]["batch_size"])


def _measure_other(contender: Contender, asked: JsonObject, directory: Path) -> None:
    """Measures another contender; or notes why it can't be measured."""
    way = {"contender": contender.name, "steps": contender.steps, "out": str(directory / "out.json")}
    code = trial.run_module(_MODULE, [json.dumps(asked | way)], directory)
    answer = read_json(directory / "out.json")
    # Its own reason, if it had time to write one; else what the process has said.
    contender.problem = answer.get("problem", "")
    if code and not contender.problem:
        contender.problem = trial.problem(code, directory)
    if not contender.problem:
        contender.speeds.append(answer["examples_per_second"])
        contender.left_out = answer["left_out"]


def lines(report: Report) -> Iterator[RenderableType | tuple[str, bool | None]]:
    """The report, for people."""
    hand = report.best(BY_HAND)
    rows = []
    for contender in report.contenders:
        if contender.problem:
            rows.append([str(contender), "", "", f"not measured: {contender.problem}"])
            continue
        span = f"{min(contender.speeds):,.0f} to {max(contender.speeds):,.0f}"
        against = f"{contender.speed / hand.speed:.2f} of the loop by hand" if hand else ""
        if contender.left_out:
            against += f"{', ' * bool(against)}without {contender.left_out}"
        rows.append([str(contender), f"{contender.speed:,.0f}", span, against])
    yield f"{report.target}, batch {report.batch_size}, {os.cpu_count()} cores, {report.rounds} rounds"
    yield terminal.table(rows, ["", "examples/s", "range", ""], right=[1, 2])
    ours = report.contenders[0]
    # With the faster way of each: the slower one would be no fair contender.
    for name in (BY_HAND, KERAS):
        best = report.best(name)
        if best is not None:
            yield f"tfloop makes {ours.speed / best.speed:.2f} times the examples of {best}", None


def as_json(report: Report) -> dict[str, object]:
    """The report as JSON values."""
    return dataclasses.asdict(report)
