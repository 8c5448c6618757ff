"""Progress: the position of a run in its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass
class Progress:
    """What has been done: the whole position of a run in its data.

    Attributes:
        step: optimizer steps made.
        epoch: epochs completed, which is the index of the one under way.
        step_in_epoch: steps made in it.
        examples: examples used, all epochs together.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    examples: int = 0

    def restore(self, stored: Mapping[str, int]) -> None:
        """Takes the position of a checkpoint, into this object: other parts of the run hold it, too."""
        vars(self).update(vars(Progress(**stored)))

    def add(self, steps: int, examples: int) -> None:
        """Counts the steps of a call, and their examples."""
        self.step += steps
        self.step_in_epoch += steps
        self.examples += examples

    def next_epoch(self) -> None:
        """Goes to the start of the next epoch."""
        self.epoch += 1
        self.step_in_epoch = 0
