"""The peers' environments: each in `.bench/<peer>/` of its own, with pinned versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".bench"
PEERS = {
    # One `pip install` each, in turn, with those before held to their versions.
    "torch": [["torch==2.13.0"], ["lightning==2.6.6"]],
    "jax": [["jax==0.10.2"]],
    # Orbit alone, without what the models beside it need; TensorFlow is that of this project.
    "orbit": [["--no-deps", "tf-models-official==2.20.0"]],
}
OVER_OURS = ("orbit",)
"""Peers that run on this project's own Python, with their environment's packages beside ours."""


def python(peer: str) -> Path:
    """The interpreter of a peer's environment."""
    return HOME / peer / "bin" / "python"


def there(peer: str) -> bool:
    """Whether a peer's environment is complete; ours ("") always is."""
    return not peer or (HOME / peer / "complete").exists()


def set_up(peer: str) -> None:
    """Makes a peer's environment."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", HOME / peer], check=True)
    held: list[str] = []
    for packages in PEERS[peer]:
        subprocess.run([python(peer), "-m", "pip", "install", "--quiet", *held, *packages], check=True)
        held += packages
    (HOME / peer / "complete").touch()


def command(peer: str) -> tuple[list[str], dict[str, str]]:
    """How Python is started for a peer: the command, and the environment variables."""
    path = [str(ROOT)]
    if peer in OVER_OURS:
        path += [str(each) for each in (HOME / peer / "lib").glob("python*/site-packages")]
    interpreter = sys.executable if not peer or peer in OVER_OURS else str(python(peer))
    return [interpreter], {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TF_CPP_MIN_LOG_LEVEL": "3"}
