"""10 kills of workers in 5 elastic runs, and workers that come back. `python -m tests.campaigns.elastic [SEED]`

Each run has 2 or 3 workers, of which two are killed, one after the other, at random moments, also while the others form
anew; and it ends no sooner than another worker has joined. Takes some 5 minutes on two cores.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from callbacks.example_log import ExampleLog, differences, used
from loop.checkpoint import checkpoint_files
from loop.commands.command_line import callback_option

TRAIN = [sys.executable, "-P", "-m", "cli", "train"]
OPTIONS = ["--epochs=12", "--batch-size=50", "--steps-per-call=3", "--seed=3", "--track=off", "--json"]

TASK = """
import os
import time
import keras, numpy as np, tensorflow as tf
from loop import ArrayData, TrainTask

def held(n):
    # Slow, until the file is there: so that a run doesn't end before all has happened in it that shall.
    if not os.path.exists(os.environ.get("ELASTIC_GO", "/")):
        time.sleep(0.15)
    return n

class Held(TrainTask):
    def build_model(self):
        layers = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
        return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.Adam(0.01)

    def train_data(self):
        return ArrayData(np.random.default_rng(0).normal(size=(5003, 8)).astype("float32"))

    def eval_data(self):
        return ArrayData(np.random.default_rng(1).normal(size=(201, 8)).astype("float32"))

    def compute(self, model, batch, training):
        if training:
            batch = tf.ensure_shape(tf.numpy_function(held, [batch], batch.dtype), batch.shape)
        return {"loss": (model(batch, training=training)[:, 0] - tf.reduce_sum(batch, 1)) ** 2}
"""


class Job:
    """An elastic run in a process of its own, and its workers, for somebody who wants to kill them."""

    def __init__(self, directory, workers, *options):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "task.py").write_text(TASK)
        self.directory, self.go = directory, directory / "go"
        places = ["--run-dir", str(directory / "run"), callback_option(ExampleLog, directory / "witness")]
        with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*TRAIN, "task.py:Held", *OPTIONS, *places, f"--workers={workers}", *options],
                cwd=directory, stdout=out, stderr=err, env={**os.environ, "ELASTIC_GO": str(self.go)},
            )  # fmt: skip

    def wait_for(self, condition, what, seconds=240):
        """Waits until something holds; fails if the run ends before, or time is over."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, f"no {what} before the end: {self.errors()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s: {self.errors()}"
            time.sleep(0.02)
        return found

    def errors(self):
        return (self.directory / "err").read_text(errors="replace")

    def events(self, event):
        """The journal's entries of an event."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.directory / "run" / "journal.jsonl").read_text().splitlines()
            return [entry for entry in map(json.loads, lines) if entry["event"] == event]
        return []

    def joined(self):
        """The names of all workers that have joined, as numbers."""
        return [int(each["worker"]) for each in self.events("worker_joined")]

    def members(self):
        """The process ids of those workers that are in a generation, by name."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                lines = (path / "environ").read_bytes().decode().split("\0")
                variables = dict(line.partition("=")[::2] for line in lines)
                if variables.get("TFLOOP_LAUNCHER") == str(self.process.pid):
                    name = variables["TFLOOP_WORKER"]
                    if Path(variables["TFLOOP_JOB"], f"rank-{name}.joined").exists():
                        found[name] = int(path.name)
        return found

    def kill(self, name):
        os.kill(self.members()[name], signal.SIGKILL)

    def result(self, seconds=240):
        """What it printed at its end."""
        self.go.touch()
        assert self.process.wait(timeout=seconds) == 0, self.errors()
        return json.loads((self.directory / "out").read_text().splitlines()[-1])

    def weights(self):
        return last_weights(self.directory / "run")

    def close(self):
        """Ends it, if it hasn't."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=240)


def last_weights(run_dir):
    """All variables of a run's last checkpoint."""
    return checkpoint_files.read(*checkpoint_files.newest(checkpoint_files.complete(run_dir / "checkpoints"), print))


def distance(one, other):
    """The largest difference of two checkpoints' tensors, relative to the largest number of each, or 1."""
    assert len(one) == len(other)
    return max(
        float(np.max(np.abs(a.astype(float) - b), initial=0.0) / max(1.0, np.max(np.abs(a), initial=0.0)))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def one(directory, workers, kills, draw):
    """One run, with its kills; tells of them."""
    job = Job(directory, workers, "--elastic=1:3")
    try:
        job.wait_for(lambda: job.events("steps_end"), "step")
        for _ in range(kills):
            job.wait_for(lambda: len(job.members()) > 1, "second worker")
            time.sleep(draw.uniform(0, 5))
            members = sorted(job.members())
            victim = draw.choice(members)
            print(f"{directory.name}: {', '.join(members)} are there; kill -9 of worker {victim}", flush=True)
            job.kill(victim)
        last = max(job.joined())
        job.wait_for(lambda: max(job.joined()) > last, "worker comes back")
        return job, job.result()
    finally:
        job.close()


def main(seed=0, runs=5, kills=2):
    draw, begun, failed = random.Random(seed), time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="tfloop-elastic-") as directory:
        whole = Job(Path(directory, "whole"), 2, "--backend=horovod")
        expected, examples, weights = whole.result(), used(whole.directory / "witness"), whole.weights()
        for number in range(1, runs + 1):
            workers = 2 + number % 2
            job, found = one(Path(directory, f"run-{number}"), workers, kills, draw)
            problems = list(differences(examples, used(job.directory / "witness")))[:5]
            far = distance(weights, job.weights())
            if far > 1e-4 or found["steps"] != expected["steps"]:
                problems.append(f"{found['steps']} of {expected['steps']} steps, weights too far")
            failed += bool(problems)
            gone, joined = (len(job.events(event)) for event in ("worker_gone", "worker_joined"))
            print(
                f"run-{number}: {workers} workers, {gone} gone, {joined} joined; weights differ by {far:.1e}; "
                + ("; ".join(problems) or "each example once an epoch"),
                flush=True,
            )
    print(
        f"{kills * runs} kills in {runs} runs, {time.monotonic() - begun:.0f} s: "
        + (f"{failed} NOT right" if failed else "all right")
    )
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]) if sys.argv[1:] else 0)))
