"""A checkpoint in memory: from it a worker of an elastic job continues when the job forms anew."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import tensorflow as tf

from callbacks.files import read_json, write_json
from callbacks.run_record.redaction import tell
from loop.checkpoint import checkpoint_files
from loop.checkpoint.array_files import Json
from loop.checkpoint.writer import arrays


@dataclasses.dataclass
class Kept:
    """The content of a checkpoint, which a worker of an elastic job keeps in memory."""

    directory: Path  # the run directory
    tensors: dict[str, tf.Tensor | np.ndarray]  # by name
    state: Json  # everything else, as JSON values

    @property
    def path(self) -> Path:
        """The name that messages and the journal give it, where a checkpoint on disk has its path."""
        return self.directory / f"memory-{self.state['progress']['step']:08d}"

    def save(self) -> None:
        """Writes it as a checkpoint, because the run can't continue in this process."""
        step = self.state["progress"]["step"]
        checkpoint_files.write(self.directory / "checkpoints", step, arrays(self.tensors), self.state)
        tell(f"note: saved at step {step}")
        about = read_json(self.directory / "run.json")
        write_json(self.directory / "run.json", {**about, "status": "failed"})
