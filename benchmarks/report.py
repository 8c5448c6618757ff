"""The results: kept as JSON, by workload; shown as a Markdown table and a plot of each, and held against the goals."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT
from benchmarks.workloads import WORKLOADS

PLACE = ROOT / "docs" / "performance"
Results = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Goal:
    """How many times as fast one contender is to be as another, on a workload or in one of `more`."""

    workload: str
    other: str
    at_least: float
    ours: str = "ours"


@dataclasses.dataclass(frozen=True)
class Limit:
    """How much a figure of one of `more` may be."""

    more: str
    figure: str
    at_most: float


GOALS = (
    Goal("mlp", "by hand, in graph", 0.99),
    Goal("mlp", "Keras fit", 5),
    Goal("mlp", "Keras fit, best steps_per_execution", 1.3),
    Goal("mlp", "Orbit, best steps", 1),
    Goal("mlp", "JAX, scan", 1.1, "ours, XLA"),
    Goal("mlp", "PyTorch", 2),
    Goal("mlp", "Lightning", 4),
    Goal("cnn", "by hand, in graph", 0.99),
    Goal("cnn", "Keras fit, best steps_per_execution", 1.5),
    Goal("charlm", "by hand, in graph", 0.99),
    Goal("embedding", "by hand, in graph, rows looked up", 0.99),
    Goal("mlp41m", "by hand, in graph", 0.99),
    Goal("resnet20", "by hand, in graph", 0.99),
    Goal("lstm", "by hand, in graph", 0.99),
    Goal("masked", "by hand, in graph", 0.99),
    Goal("float16", "by hand, in graph", 0.99),
    Goal("gan", "by hand, in graph", 0.99),
    Goal("horovod", "Horovod's example, two processes", 1.5, "ours, two Horovod processes"),
    Goal("callbacks", "ours, callbacks off", 0.98),
    Goal("callbacks", "ours, MLflow off", 0.98),
    Limit("first-step", "time to the first step, by that of the loop by hand", 1.15),
    Limit("long-run", "time of a step near step 1,000,000, by that near step 1,000", 1.02),
    Limit("long-run", "growth of resident memory meanwhile, MB", 1),
)
"""What the suite is for."""

OBSTACLES = {
    ("mlp", "Keras fit"): ("Ours takes as long as the best loop by hand."),
    ("mlp", "PyTorch"): (
        "Ours takes as long as the best loop by hand. Both are faster in one thread (`--threads 1`), as the table of "
        "the mlp shows."
    ),
    ("cnn", "by hand, in graph"): (
        "The forward and backward pass is a graph of its own, which each step calls. Within the graph of a loop, "
        "TensorFlow finds oneDNN's gradient of pooling by chance, and a step without it takes twice as long."
    ),
    ("cnn", "Keras fit, best steps_per_execution"): (
        "Most of Keras's step are operations that a step of ours has as well: with nothing between them, it "
        "could not be 1.5 times as fast."
    ),
    ("charlm", "by hand, in graph"): (
        "In one thread, ours takes as long. In two, it differs by less than the rounds do."
    ),
    ("embedding", "by hand, in graph, rows looked up"): (
        "`Unique` and `ScatterNd` add up the gradients of a row before it is changed. So it has the bits of a dense "
        "gradient, on any number of replicas. The loop by hand changes a row as often as it is used."
    ),
}
"""Why a goal may be missed, by workload and contender: what its table and the profile (`more operations`) show."""


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """The median of some values, the least, and the greatest."""
    values = list(values)
    return statistics.median(values), min(values), max(values)


def ratio(contenders: Mapping[str, Any], ours: str, other: str) -> tuple[float, float, float]:
    """How many times as fast the first one was as the other: the ratio of each round; see `spread`."""
    pairs = zip(contenders[ours]["rates"], contenders[other]["rates"], strict=True)
    return spread(mine / theirs for mine, theirs in pairs)


def machine() -> dict[str, Any]:
    """What it is measured on."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = next((line.split(": ")[1] for line in info.read_text().splitlines() if "model name" in line), cpu)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {name: version(name) for name in ("tensorflow", "keras", "numpy")}
    return {"cpu": cpu, "cores": cores, "system": platform.system(), "python": platform.python_version(), **versions}


def load(place: Path = PLACE) -> Results:
    """The results that there are; empty at first."""
    path = place / "results.json"
    return json.loads(path.read_text()) if path.exists() else {"workloads": {}, "more": {}}


def merged(results: Results, section: str, name: str, found: Mapping[str, Any]) -> Results:
    """The results with one workload, or one more measurement, in place of what was there of it."""
    entry = {"date": datetime.date.today().isoformat(), "machine": machine(), **found}
    return {**results, section: {**results.get(section, {}), name: entry}}


def write(results: Results, place: Path = PLACE) -> None:
    """Writes JSON, Markdown and plots."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (place / "README.md").write_text(markdown(results))
    for name, entry in results["workloads"].items():
        plot(name, entry, place / f"{name}.png")


def judged(results: Results) -> list[tuple[Goal | Limit, tuple[float, float, float] | None]]:
    """Each goal, and what was reached of it: the ratio or figure, or None where it hasn't been measured."""
    found: list[tuple[Goal | Limit, tuple[float, float, float] | None]] = []
    everything = {**results["workloads"], **results.get("more", {})}
    for goal in GOALS:
        if isinstance(goal, Limit):
            figure = everything.get(goal.more, {}).get("figures", {}).get(goal.figure)
            found.append((goal, None if figure is None else tuple(figure)))
            continue
        contenders = everything.get(goal.workload, {}).get("contenders", {})
        measured = {goal.ours, goal.other} <= contenders.keys()
        found.append((goal, ratio(contenders, goal.ours, goal.other) if measured else None))
    return found


def goals_table(results: Results) -> str:
    """The goals, and whether they are met: by the median of the rounds."""
    lines = ["| | what | median (least to greatest) | goal | |", "|---|---|---|---|---|"]
    for goal, reached in judged(results):
        if isinstance(goal, Limit):
            place, what, wanted = goal.more, goal.figure, f"at most {goal.at_most:g}"
            met = reached is not None and reached[0] <= goal.at_most
        else:
            place, what = goal.workload, f"{goal.ours}, against: {goal.other}"
            wanted, met = f"at least {goal.at_least:g}", reached is not None and reached[0] >= goal.at_least
        shown = "" if reached is None else f"{reached[0]:.3f} ({reached[1]:.2f} to {reached[2]:.2f})"
        verdict = "not measured" if reached is None else "met" if met else "**not met**"
        lines.append(f"| {place} | {what} | {shown} | {wanted} | {verdict} |")
    return "\n".join(lines)


def obstacles(results: Results) -> list[str]:
    """Paragraphs: what stands in the way of each goal that isn't met."""
    lines = []
    for goal, reached in judged(results):
        if isinstance(goal, Goal) and reached is not None and reached[0] < goal.at_least:
            why = OBSTACLES.get((goal.workload, goal.other), "It isn't known yet.")
            lines.append(f"- {goal.workload}, against {goal.other}: {why}")
    if not lines:
        return []
    return ["What stands in the way of a goal that isn't met; the profile is under [operations](#operations):",
            "\n".join(lines)]  # fmt: skip


def about(entry: Mapping[str, Any]) -> str:
    """When and on what something was measured."""
    has, starts = entry["machine"], entry.get("starts", 1)
    again = f"All rounds {starts} times, with new processes. " if starts > 1 else ""
    return (
        f"{again}{entry['date']}, {has['cpu']}, {has['cores']} cores, Python {has['python']}, TensorFlow "
        f"{has['tensorflow']}, Keras {has['keras']}"
    )


def speed_table(contenders: Mapping[str, Any]) -> str:
    """Steps per second of each contender, the fastest first, and how many times as fast ours is."""
    ours = next(iter(contenders))
    columns = ["", "steps/s", "least to greatest", f"{ours}, times as fast", "CPU ms a step", "peak memory", ""]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in sorted(contenders, key=lambda name: -spread(contenders[name]["rates"])[0]):
        rate, low, high = (f"{each:,.{0 if each >= 100 else 1 if each >= 10 else 2}f}"
                           for each in spread(contenders[name]["rates"]))  # fmt: skip
        times, memory = ratio(contenders, ours, name)[0], contenders[name]["peak_mb"]
        used = contenders[name].get("cpu_ms")
        cells = [name, rate, f"{low} to {high}", f"{times:.2f}", f"{spread(used)[0]:.3g}" if used else "",
                 f"{memory:,} MB", contenders[name]["note"]]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """All results, to be read."""
    parts = ["# Performance", (
        "The measurements of `uv run --group bench python -m benchmarks run`. Each contender is a live process. In "
        "each round, each contender trains for a while, one at a time. Rates are medians of the rounds, without start "
        "and compilation; a ratio is the median of the rounds' ratios. \"Ours\" is tfloop's `fit` with default options "
        "and the standard callbacks, unless stated otherwise. CPU time is the median of the rounds, for the contender "
        "and all processes that it has started, including the start of an epoch. Memory is that of the contender's "
        "own process."
    ), "## Goals", goals_table(results), *obstacles(results)]  # fmt: skip
    for name in [name for name in WORKLOADS if name in results["workloads"]]:
        entry = results["workloads"][name]
        parts += [f"## {name}", f"{WORKLOADS[name].about}. {about(entry)}.", speed_table(entry["contenders"])]
        parts.append(f"![Steps per second of each contender]({name}.png)")
    for name, entry in results.get("more", {}).items():
        parts += [f"## {name}", f"{entry['about']} {about(entry)}."]
        if "contenders" in entry:
            parts.append(speed_table(entry["contenders"]))
        if "rows" in entry:
            columns = list(entry["rows"][0])
            lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            lines += [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in entry["rows"]]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def plot(name: str, entry: Mapping[str, Any], path: Path) -> None:
    """Draws the rates of a workload as bars, the fastest on top; ours are dark."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plots: matplotlib is in the group `bench` (uv run --group bench ...)", file=sys.stderr)
        return
    contenders = entry["contenders"]
    names = sorted(contenders, key=lambda name: spread(contenders[name]["rates"])[0])
    rates = [spread(contenders[name]["rates"]) for name in names]
    figure = Figure(figsize=(8, 0.8 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    errors = [[rate - low for rate, low, _ in rates], [high - rate for rate, _, high in rates]]
    colours = ["#1f5fa8" if name.startswith("ours") else "#b8c4d2" for name in names]
    axes.barh(names, [rate for rate, _, _ in rates], color=colours, xerr=errors, ecolor="#555555", capsize=2)
    axes.set_xlabel("steps per second (median, least to greatest)")
    axes.set_title(f"{name}: {WORKLOADS[name].about}", fontsize=9, loc="right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=110)
