"""Makes the pictures of the landing page: measures with tfloop's own commands, and draws SVG files in docs/images.

Run it as `uv run python docs/figures.py`; it takes some minutes. `--draw` only draws, from what was measured before
(`docs/images/figures.json` and `docs/performance/results.json`). The page gives the drawings their colors (extra.css).
"""

from __future__ import annotations

import argparse
import datetime
import html
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
MEASURED = IMAGES / "figures.json"
RATES = ROOT / "docs" / "performance" / "results.json"

WIDTH = 480
HEIGHT = 250
LEFT = 150  # where bars begin, behind their names
RIGHT = 450

CONTENDERS = {
    "ours": "tfloop, all callbacks",
    "by hand, in graph": "by hand, in graph",
    "Orbit, best steps": "Orbit",
    "Keras fit, best steps_per_execution": "Keras fit, tuned",
    "PyTorch": "PyTorch",
    "Keras fit": "Keras fit",
    "Lightning": "Lightning",
}
"""What the picture of speed shows, under which name."""

COLUMNS = 62
"""Characters in a line of the terminal."""

SMALLEST, LARGEST = -16, 0
"""The powers of ten at the ends of the axis of differences."""


def main() -> None:
    """Measures, unless `--draw` was typed, and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw what was measured before")
    if not parser.parse_args().draw:
        MEASURED.write_text(json.dumps(measure(), indent=1) + "\n")
    for name, picture in drawings().items():
        (IMAGES / name).write_text(picture)
        print(f"wrote docs/images/{name}", file=sys.stderr)


def measure() -> dict[str, Any]:
    """What the commands say: differences of numbers, a training with kills, and a training as it is typed."""
    with tempfile.TemporaryDirectory(prefix="tfloop-figures-") as directory:
        verified = json.loads(tfloop("verify", "charlm", "--json", cwd=directory).stdout.splitlines()[-1])
        kept = Path(directory, "kept")
        chaos = ("chaos", "digits", "--kills", "4", "--keep", str(kept), "--json")
        report = json.loads(tfloop(*chaos, cwd=directory).stdout.splitlines()[-1])
        trained = tfloop("train", "digits", "--workers", "2", "--track", "off", cwd=directory)
        return {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "cores": os.cpu_count(),
            "comparisons": verified["comparisons"],
            "chaos": report | {"lines": attempts(kept)},
            # Without the path of this machine.
            "train": [line for line in trained.stderr.splitlines() if "run directory" not in line],
        }


def tfloop(*arguments: str, cwd: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    command = [sys.executable, "-P", "-m", "cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=True)


def attempts(kept: Path) -> list[dict[str, int]]:
    """The attempts of the run that was killed: at which step each began, and the last one of which it wrote."""
    journals = sorted(kept.rglob("journal.jsonl"), key=lambda path: path.read_text().count('"restore"'))
    found: list[dict[str, int]] = []
    for line in journals[-1].read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "restore":
            if found:  # it came at least to the checkpoint from which the next one went on
                found[-1]["end"] = max(found[-1]["end"], event["step"])
            found.append({"start": event["step"], "end": event["step"]})
        elif found:
            found[-1]["end"] = max(found[-1]["end"], event["step"])
    return found


def drawings() -> dict[str, str]:
    """The pictures by the names of their files."""
    measured = json.loads(MEASURED.read_text())
    rates = json.loads(RATES.read_text())["workloads"]["mlp"]["contenders"]
    return {
        "promise-numbers.svg": numbers(measured["comparisons"]),
        "promise-kills.svg": kills(measured["chaos"]),
        "promise-speed.svg": speed(rates),
        "promise-command.svg": command(measured["train"]),
    }


def svg(label: str, parts: list[str]) -> str:
    """A picture of these parts, with a label for those who can't see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return "\n".join([head, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(words, quote=False)}</text>'


def bar(x: float, y: float, width: float, kind: str, height: float = 14) -> str:
    """A horizontal bar."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height}" rx="2"/>'


def numbers(comparisons: list[dict[str, Any]]) -> str:
    """How far the weights lie from those of one replica, on a scale of powers of ten."""

    def place(power: float) -> float:
        return LEFT + (RIGHT - LEFT) * (power - SMALLEST) / (LARGEST - SMALLEST)

    parts = [text(10, 20, "largest relative difference of any weight, from 1 replica", "small")]
    y = 38.0
    for comparison in comparisons:
        difference = comparison["differences"]["weights"]
        replicas = comparison["replicas"]
        where = f"{comparison['engine']}, {replicas}" if replicas > 1 else "1 again"
        name = f"{comparison['precision']}: {where}"
        parts.append(text(LEFT - 8, y + 11, name, "small", "end"))
        if difference:
            parts.append(bar(LEFT, y, place(math.log10(difference)) - LEFT, "ours"))
            parts.append(text(place(math.log10(difference)) + 6, y + 11, f"{difference:.0e}", "small"))
        else:
            parts.append(text(LEFT + 6, y + 11, "0: the same bits", "small"))
        y += 22
    for power in range(SMALLEST, LARGEST + 1, 4):
        parts.append(text(place(power), y + 18, f"1e{power}" if power else "1", "small", "middle"))
    return svg("Differences of weights between backends, on a logarithmic scale", parts)


def kills(report: dict[str, Any]) -> str:
    """The attempts of a run that was killed again and again, by step."""
    steps = report["steps"]

    def place(step: int) -> float:
        return 90 + (RIGHT - 90) * step / steps

    said = f"{report['target']}: {steps} steps, {sum(report['kills'].values())} times kill -9"
    if report["kills"]["in start-up"]:
        said += f" ({report['kills']['in start-up']} before a first step)"
    parts = [text(10, 20, said, "small")]
    y = 40.0
    gap = min(30.0, 150 / max(len(report["lines"]), 1))
    # A process that was killed in its start-up has made no step, and has no line.
    for number, attempt in enumerate(report["lines"]):
        is_last = number == len(report["lines"]) - 1
        parts.append(text(82, y + 11, "start" if number == 0 else "resumed", "small", "end"))
        parts.append(bar(place(attempt["start"]), y, place(attempt["end"]) - place(attempt["start"]), "ours"))
        if not is_last:
            parts.append(text(place(attempt["end"]) + 6, y + 12, "kill -9", "bad"))
        y += gap
    parts.append(text(90, y + 16, "step 0", "small"))
    parts.append(text(RIGHT, y + 16, f"step {steps}", "small", "end"))
    outcome = "the same bits as without a kill" if report["exact"] else "NOT the same bits"
    parts.append(text(RIGHT, y + 38, outcome, "strong", "end"))
    return svg("Attempts of a run that was killed and resumed", parts)


def speed(contenders: dict[str, Any]) -> str:
    """Steps per second of a small network."""
    rates = {label: statistics.median(contenders[name]["rates"]) for name, label in CONTENDERS.items()}
    largest = max(rates.values())
    parts = [text(10, 20, "steps a second, a small network of dense layers", "small")]
    y = 38.0
    for label, rate in sorted(rates.items(), key=lambda item: -item[1]):
        width = (RIGHT - LEFT - 40) * rate / largest
        parts.append(text(LEFT - 8, y + 11, label, "small", "end"))
        parts.append(bar(LEFT, y, width, "ours" if label.startswith("tfloop") else "other"))
        parts.append(text(LEFT + width + 6, y + 11, f"{rate:,.0f}", "small"))
        y += 26
    return svg("Steps per second of tfloop and others", parts)


def command(lines: list[str]) -> str:
    """A training as it is typed, and what it prints."""
    shown = ["$ tfloop train digits --workers 2", *lines]
    parts = []
    for number, line in enumerate(shown[:12]):
        short = line.split("  eval_accuracy")[0]
        short = short if len(short) <= COLUMNS else f"{short[: COLUMNS - 1]}…"
        parts.append(text(14, 26 + 18 * number, short, "typed" if number == 0 else "mono"))
    return svg("A training on two workers, as it is typed", parts)


if __name__ == "__main__":
    main()
