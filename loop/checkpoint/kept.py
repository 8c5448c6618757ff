"""A checkpoint in memory: what a worker of an elastic job keeps, for the next attempt to go on from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from callbacks.files import read_json, write_json
from callbacks.run_record.redaction import tell
from loop.checkpoint import checkpoint_files
from loop.checkpoint.writer import arrays


@dataclasses.dataclass
class Kept:
    """What a worker of an elastic job keeps of a run in memory: all that a checkpoint holds.

    Attributes:
        directory: the run directory.
        tensors: by name.
        state: all else, as JSON values.
    """

    directory: Path
    tensors: dict[str, tf.Tensor | np.ndarray]
    state: dict[str, Any]

    @property
    def path(self) -> Path:
        """By what it is named, where a checkpoint has a path."""
        return self.directory / f"memory-{self.state['progress']['step']:08d}"

    def save(self) -> None:
        """Makes a checkpoint of it: the run can't go on."""
        step = self.state["progress"]["step"]
        checkpoint_files.write(self.directory / "checkpoints", step, arrays(self.tensors), self.state)
        tell(f"note: saved at step {step}")
        about = read_json(self.directory / "run.json")
        write_json(self.directory / "run.json", {**about, "status": "failed"})
