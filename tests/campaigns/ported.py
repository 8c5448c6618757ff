"""Verifies each program of docs/ported, and trains it on two workers: `python -m tests.campaigns.ported [NAME ...]`.

Takes about a minute a program on two cores.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT, TFLOOP

TARGETS = {
    "class-weights": "Fraud",
    "convnet": "ConvNet",
    "ctc": "Captcha",
    "distillation": "Distillation",
    "fine-tuning": "Nines",
    "horovod": "Digits",
    "loop": "Digits",
    "ratings": "Ratings",
    "stateful": "Wave",
    "tickets": "Tickets",
    "translation": "Translation",
    "vae": "VAE",
    "wgan-gp": "WGAN",
}
"""The class in the file `ours.py` of each program."""

BOUNDS = {
    "class-weights": 1e-5,
    "convnet": 1e-5,
    "ctc": 1e-5,
    "distillation": 1e-5,
    "fine-tuning": 1e-5,
    "horovod": 1e-5,
    "loop": 1e-5,
    "ratings": 1e-5,
    "stateful": 1e-5,
    "tickets": 1e-5,
    "translation": 1e-5,
    "vae": 1e-5,
    "wgan-gp": 1e-5,
}
"""The largest absolute difference between a weight of theirs and of ours."""

ALONE = {"stateful": "carries its state from batch to batch"}
"""Programs that one replica alone can train, and why."""


def target(name):
    """The TARGET of a program's task."""
    return f"{ROOT / 'docs' / 'ported' / name / 'ours.py'}:{TARGETS[name]}"


def run(*arguments, cwd):
    """Runs a command of tfloop."""
    return subprocess.run(
        [*TFLOOP, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=600
    )  # fmt: skip


def verified(name, directory):
    """`tfloop verify` of a program."""
    return run("verify", target(name), "--json", cwd=directory)


def trained(name, directory):
    """`tfloop train --workers 2` of a program."""
    return run("train", target(name), "--workers", "2", "--track", "off", "--json", cwd=directory)


def main(names):
    """Prints a line for each program and command; gives the exit code."""
    failed = 0
    for name in names or sorted(TARGETS):
        with tempfile.TemporaryDirectory(prefix="tfloop-ported-") as directory:
            for what, command in (("verify", verified), ("train --workers 2", trained)):
                done = command(name, Path(directory))
                refused = name in ALONE and done.returncode == 2
                good = refused or done.returncode == 0
                failed += not good
                said = done.stderr.strip().splitlines()[-1:] if refused or not good else []
                if what != "verify" and good and not refused:
                    said = [f"replicas {json.loads(done.stdout.splitlines()[-1])['replicas']}"]
                print(
                    f"{name:16} {what:18} {'refused' if refused else 'ok' if good else 'FAILED'} {' '.join(said)}",
                    flush=True,
                )
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
