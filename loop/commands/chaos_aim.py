"""The moments at which `tfloop chaos` kills: in a checkpoint write, in start-up, in training."""

from __future__ import annotations

import math
import random
import time
from typing import NamedTuple

import numpy as np

from callbacks.example_log import Example
from callbacks.types import JsonObject
from loop.checkpoint import checkpoint_files
from loop.commands.killed_run import STARTING, TRAINING, WRITING, Attempt


class Reference(NamedTuple):
    """The undisturbed run."""

    result: JsonObject  # the result that it printed
    variables: list[np.ndarray]  # those of its last checkpoint, in order
    examples: dict[int, list[Example]]  # the examples that it used, by epoch
    starting: float  # the seconds until its first step
    trained: int  # how much it trained; see `Attempt.trained`


class Aim:
    """Chooses the moments of the kills.

    A third is to hit a checkpoint write, a few the start-up, and all others any step. If the run ends before the
    moment comes, another run is killed earlier instead.

    Args:
        kills: how many kills.
        seed: of their moments.
        reference: the undisturbed run.
        every: the number of steps between two checkpoints, or about that.

    Attributes:
        left: what each of the remaining kills is to hit, the next one first.
    """

    def __init__(self, kills: int, seed: int, reference: Reference, every: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311 - no secret
        self._reference = reference
        self._every = every
        writing = math.ceil(kills / 3)
        starts = math.ceil(kills / 6) if kills > 2 else 0
        self.left = [WRITING] * writing + [STARTING] * starts + [TRAINING] * (kills - writing - starts)
        self._draw.shuffle(self.left)
        self._misses = 0

    def strike(self, attempt: Attempt, patience: float) -> bool:
        """Waits for the moment, and kills; whether the run had not ended before."""
        kind = self.left[0]
        checkpoints = checkpoint_files.complete(attempt.run.checkpoints)
        # The attempt goes on from the newest checkpoint, step-<number>.
        done = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0

        # On average, the steps that are left divided by the kills that are left; but more steps than a kill loses.
        all_steps = self._reference.result["steps"]
        steps = self._draw.uniform(0.2, 1.8) * max(self._every, (all_steps - done) / (len(self.left) + 1))
        steps /= 2**self._misses
        if kind == STARTING:
            moment = attempt.begun + self._draw.uniform(0, self._reference.starting)
            came = attempt.wait_for(lambda: time.monotonic() >= moment or attempt.trained() > 0, patience)
        elif kind == TRAINING:
            # The log of examples is the only sign of a step from outside, so steps are counted in its bytes.
            enough = max(1, self._reference.trained * steps / all_steps)
            came = attempt.wait_for(lambda: attempt.trained() >= enough, patience, 0.002)
        else:
            came = _wait_for_write(attempt, max(1, round(steps / self._every)), patience)
        if came:
            attempt.kill(self._draw, chief=kind == WRITING)  # the chief alone writes checkpoints
        return came

    def done(self, hit: str) -> None:
        """Goes on to the next kill; or repeats this one, if it has hit nothing."""
        if hit:
            goal = self.left.pop(0)
            # If a kill was to hit a write and missed it, a later kill that was to hit training is to hit a write.
            if goal == WRITING and hit != WRITING and TRAINING in self.left:
                self.left[self.left.index(TRAINING)] = WRITING
            self._misses = 0
        elif self.left:
            self._misses += 1
            if self._misses > 2:
                self.left[0] = STARTING  # the start can't be missed


def _wait_for_write(attempt: Attempt, writes: int, patience: float) -> bool:
    """Waits until an attempt is writing its checkpoint number `writes`, from 1; returns whether it came to that."""
    seen = attempt.run.unfinished_checkpoints()
    enough = len(seen) + writes

    def reached() -> bool:
        seen.update(attempt.run.unfinished_checkpoints())
        return len(seen) >= enough

    if not attempt.wait_for(lambda: attempt.trained() > 0, patience):
        return False
    # Looked at this often, because a small checkpoint is written within milliseconds.
    return attempt.wait_for(reached, patience, 0.0002)
