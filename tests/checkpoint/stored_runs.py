"""Runs in object storage for tests: what writes their files, in this process and in others, and what is in them."""

import json
import os
import subprocess
import sys
import time

import numpy as np

from loop.checkpoint import checkpoint_files, lock
from loop.checkpoint.store import copies
from loop.checkpoint.store.bucket import Bucket
from loop.checkpoint.store.lease import believed
from tests.conftest import ROOT


def tensors(step):
    return {"weights": np.random.default_rng(step).normal(size=(200, 50))}


def write(directory, *steps):
    """Writes a run's files as training does."""
    for step in steps:
        with (directory / "journal.jsonl").open("a") as file:
            file.write(json.dumps({"time": 1.0, "event": "steps_end", "step": step}) + "\n")
        checkpoint_files.write(directory / "checkpoints", step, tensors(step), {})
    (directory / "run.json").write_text(json.dumps({"task": "Task", "status": "running", "step": max(steps)}))


def steps_in(directory):
    paths = checkpoint_files.complete(directory / "checkpoints")
    for path in paths:
        found = checkpoint_files.read(path, checkpoint_files.verify(path))
        np.testing.assert_array_equal(found["weights"], tensors(int(path.name[5:]))["weights"])
    return [int(path.name[5:]) for path in paths]


def other_machine(monkeypatch, tmp_path, name="other"):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))
    monkeypatch.setattr(lock, "is_dead", lambda owner: False)


def is_tidy(url):
    """Whether the store has what is believed of a run, and nothing else."""
    return believed(Bucket(url)) is not None and not copies.leftovers(url)


class Process:
    """A run in a process of its own, which writes a checkpoint each 0.1 s."""

    def __init__(self, url, steps, machine, **environment):
        variables = {**os.environ, "XDG_STATE_HOME": str(machine), **environment}
        command = [sys.executable, "-m", "tests.checkpoint.store_worker", url, str(steps)]
        self.process = subprocess.Popen(command, env=variables, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def ended(self):
        _, errors = self.process.communicate(timeout=240)
        return self.process.returncode, errors


def wait_for_state(url, steps):
    bucket = Bucket(url)
    for _ in range(300):
        state = believed(bucket)
        if state is not None and sum(name.endswith("manifest.json") for name in state.files) >= steps:
            return state
        time.sleep(0.1)
    raise AssertionError("nothing was delivered")
