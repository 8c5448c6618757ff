"""What is to be known of a machine with GPUs: `python -m tests.campaigns.gpu [PAGE.md] [LINE...]`.

Runs commands of this repository, each in a process of its own, and writes one page; gpu-results.md if none is given.
LINEs are words that the titles of lines begin with; all lines if there are none. Without a GPU, the lines that need one
say so, and the others train a few steps, so that this campaign can be tried. It ends with 1 if a line has failed.
"""

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from callbacks.files import write_text
from loop.launch import machine
from tests.workers import ROOT

EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Products of float32 with all of their digits."""
SAME_BITS = EXACT | {"TF_DETERMINISTIC_OPS": "1"}
"""And the same operations in the same order each time."""
LIMIT = 3600
"""Seconds that a command may take."""
TFLOOP = [sys.executable, "-m", "cli"]
SHOWN = ("backend", "replicas", "steps", "examples_per_second", "weights_sha256")
"""What is shown of the result of a training, beside its metrics."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the page.

    Attributes:
        title: what is to be known.
        command: what is run for it.
        gpus: how many GPUs it needs.
        variables: environment variables.
        times: how often it is run; all runs must end with the same weights.
    """

    title: str
    command: list[str]
    gpus: int = 0
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    times: int = 1


def lines(gpus):
    """All lines, for a machine with so many GPUs."""
    some = max(2, gpus)
    several = 2 if gpus else 0  # a single GPU is none for several replicas
    train = [*TFLOOP, "train", "digits", "--seed", "1", "--track", "off", "--json"]
    train += ["--epochs", "20"] if gpus else ["--steps", "30"]
    tests = [sys.executable, "-m", "pytest", "-q"]
    benchmark = [sys.executable, "-m", "benchmarks", "run", *(["mlp", "cnn", "resnet20"] if gpus else ["mlp"])]
    benchmark += ["--only", "ours,by hand,Keras fit,PyTorch"] + ([] if gpus else ["--rounds", "1", "--seconds", "0.2"])
    kills = "6" if gpus else "2"
    workers = ["--workers", str(some)]
    yield Line("doctor", [*TFLOOP, "doctor"])
    yield Line("paths: made-up GPUs", [sys.executable, "-m", "tests.campaigns.gpu_lines"])
    for engine in ("single", "mirrored", "central"):
        yield Line(f"conformance: {engine}", [sys.executable, "tests/conformance.py", engine], variables=EXACT)
    jobs = ["tests/test_same_numbers.py", "-k", "real_workers" if gpus > 2 else "real_workers and not horovod-3"]
    yield Line("conformance and numbers: workers", [*tests, *jobs], 2, EXACT)
    yield Line("verify", [*TFLOOP, "verify", "digits"], variables=EXACT)
    yield Line("verify: XLA", [*TFLOOP, "verify", "digits", "--compile", "xla"], 1, EXACT)
    yield Line("bits: one device", [*train, "--backend", "single"], variables=SAME_BITS, times=2)
    yield Line("bits: mirrored", [*train, "--backend", "mirrored", *workers], several, SAME_BITS, times=2)
    for precision in ("bfloat16", "mixed_float16"):
        yield Line(f"precision: {precision}", [*train, "--backend", "single", "--precision", precision])
    for way in ("nccl", "hierarchical", "one-device"):
        how = ["--backend", "mirrored", "--workers", str(some - some % 2), "--communication", way]
        yield Line(f"communication: mirrored, {way}", [*train, *how], 2 if way == "nccl" else several, EXACT)
    for way in ("nccl", "ring"):
        how = ["--backend", "multiworker", *workers, "--communication", way]
        yield Line(f"communication: multiworker, {way}", [*train, *how], 2 if way == "nccl" else several, EXACT)
    yield Line("communication: Horovod", [*train, "--backend", "horovod", *workers], several, EXACT)
    yield Line("placement: one model on two GPUs", [*tests, "tests/step/test_placement.py"], 2, EXACT)
    for engine in (["--backend", "single"], ["--backend", "multiworker", *workers]):
        chaos = [*TFLOOP, "chaos", "digits", "--kills", kills, *engine]
        yield Line(f"chaos: {engine[1]}", chaos, 1 if engine[1] == "single" else 2, SAME_BITS)
    yield Line("benchmarks: Keras fit, by hand, PyTorch", benchmark)


def run(line, directory):
    """Runs the command of a line; whether all is well, and what is to be shown."""
    results = []
    for number in range(line.times):
        own = directory / str(number)
        own.mkdir()
        run_dir = ["--run-dir", str(own / "run")] if "train" in line.command else []
        own_state = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment = os.environ | line.variables | own_state
        try:
            done = subprocess.run(
                [*line.command, *run_dir], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return False, f"took longer than {LIMIT} s"
        if done.returncode:
            return False, f"exit code {done.returncode}\n{tail(done.stdout + done.stderr)}"
        results.append(done.stdout)
    if "--json" not in line.command:
        return True, tail(results[0])
    told = [json.loads(result.splitlines()[-1]) for result in results]
    same = len({each["weights_sha256"] for each in told}) == 1
    metrics = {name: f"{value:.6g}" for name, value in told[0]["metrics"].items()}
    shown = [f"{name} {value}" for name, value in ({name: told[0][name] for name in SHOWN} | metrics).items()]
    if line.times > 1:
        shown.append("the same weights each time" if same else "NOT the same weights each time")
    return same, "\n".join(shown)


def tail(text, count=40):
    """The last lines of a text."""
    return "\n".join(text.strip().splitlines()[-count:])


def main(page="gpu-results.md", *titles):
    gpus = machine.count_gpus()
    what = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "no GPU here: each line in its smallest form"
    parts = [f"# On GPUs: {platform.node()}, {time.strftime('%Y-%m-%d')}", what, "| | | seconds |\n|---|---|---|"]
    details = []
    failed = 0
    for line in lines(gpus):
        if titles and not line.title.startswith(titles):
            continue
        if line.gpus > gpus:
            outcome = "no GPU here" if not gpus else f"needs {line.gpus} GPUs"
            parts[-1] += f"\n| {line.title} | {outcome} | |"
            print(f"{line.title}: {outcome}", flush=True)
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tfloop-gpu-") as directory:
            good, shown = run(line, Path(directory))
        seconds = time.monotonic() - begin
        failed += not good
        outcome = "yes" if good else "**FAILED**"
        parts[-1] += f"\n| {line.title} | {outcome} | {seconds:.0f} |"
        variables = [f"{name}={value}" for name, value in line.variables.items()]
        command = shlex.join([*variables, "python", *line.command[1:]])
        details.append(f"## {line.title}\n\n`{command}`\n\n```\n{shown}\n```")
        print(f"{line.title}: {outcome} ({seconds:.0f} s)", flush=True)
        write_text(Path(page), "\n\n".join([*parts, *details]) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
