"""A process that writes the files of a run at a URL as training does, without TensorFlow."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from callbacks.run_record.redaction import tell
from loop.checkpoint import checkpoint_files, lock
from loop.checkpoint.store import copies, mirror
from loop.errors import TrainingError, UsageError


def main(url, steps):
    if "TFLOOP_TEST_HOST" in os.environ:  # as from another machine, whose processes can't be seen
        lock.is_dead = lambda owner: False
        copies.lock.is_dead = lock.is_dead
    if "TFLOOP_TEST_GATE" in os.environ:  # all processes begin at the same instant
        gate = Path(os.environ["TFLOOP_TEST_GATE"])
        gate.with_name(f"{gate.name}.{os.getpid()}").touch()
        while not gate.exists():
            time.sleep(0.001)
    with copies.mirrored(url) as directory:
        paths = checkpoint_files.complete(directory / "checkpoints")
        first = int(paths[-1].name[5:]) + 1 if paths else 1
        for step in range(first, first + steps):
            mirror.check(directory)
            with (directory / "journal.jsonl").open("a") as file:
                file.write(json.dumps({"time": 1.0, "event": "steps_end", "step": step}) + "\n")
            weights = np.random.default_rng(step).normal(size=(200, 50))
            checkpoint_files.write(directory / "checkpoints", step, {"weights": weights}, {})
            for old in checkpoint_files.complete(directory / "checkpoints")[:-3]:
                checkpoint_files._remove(old)
            time.sleep(0.1)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except UsageError as error:
        tell(str(error))
        sys.exit(2)
    except TrainingError as error:
        tell(str(error))
        sys.exit(1)
