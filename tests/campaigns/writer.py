"""What campaigns write and find again: checkpoints of which every bit is known. Loads no TensorFlow."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from loop.checkpoint import checkpoint_files


def tensors(step, size=2000):
    """Of other values, and another length, at each step."""
    random = np.random.default_rng(step)
    return {
        "model/00000:kernel": random.normal(size=(size + step, 10)).astype("float32"),
        "model/00001:half": random.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "model/00002:empty": np.zeros((0, 4), "float64"),
        "optimizer/00000:iterations": np.array(step, "int64"),
    }


def write(directory, step, **more):
    """Writes the checkpoint of a step, with more in its manifest if that is given."""
    return checkpoint_files.write(directory, step, tensors(step), {"progress": {"step": step}, **more})


def find(directory):
    """The step of the newest good checkpoint, after comparing every bit that is loaded; None without checkpoints.

    Raises:
        CheckpointError: none is good.
        AssertionError: something has been loaded that was never written.
    """
    found = checkpoint_files.newest(checkpoint_files.complete(directory), lambda text: None)
    if found is None:
        return None
    path, manifest = found
    step = manifest["progress"]["step"]
    assert (path.name, manifest["step"]) == (f"step-{step:08d}", step)
    loaded, expected = checkpoint_files.read(path, manifest), tensors(step)
    assert list(loaded) == list(expected)
    for name, value in expected.items():
        bits = [(each.dtype, each.shape, each.tobytes()) for each in (loaded[name], value)]
        assert bits[0] == bits[1], f"{path}: {name} is not what was written"
    return step


if __name__ == "__main__":
    for number in sys.argv[2:]:
        write(Path(sys.argv[1]), int(number))
