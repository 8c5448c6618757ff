"""The training data as one worker reads it: its iterator, and the position from which it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from callbacks.run_record.redaction import tell
from loop.checkpoint.array_files import Json
from loop.data import DataIterator
from loop.data.host_random import random_state, set_random_state
from loop.errors import UsageError

if TYPE_CHECKING:
    from loop.run.run import Run


class DataPosition:
    """Opens the training data at the position of the run.

    Attributes:
        iterator: the compiled step reads from it.
        random_state: the state of Python's and NumPy's generators in the checkpoint, or None.
        epoch_random: their state when the epoch of a stream began, or None.
        stream_state: the state of the iterator in the checkpoint, or None.
    """

    def __init__(self) -> None:
        self.iterator: DataIterator = ()  # until `open`
        self.random_state: Json | None = None
        self.epoch_random: Json | None = None
        self.stream_state: np.ndarray | None = None

    def start_phase(self) -> None:
        """Drops the state of the checkpoint: another phase reads its data from the start."""
        self.random_state = None
        self.epoch_random = None
        self.stream_state = None

    def restore_random(self, state: Json) -> None:
        """Notes the states of the generators in a checkpoint of `random_states`, which `open` sets."""
        self.random_state = state["random"]
        self.epoch_random = state.get("epoch_random")

    def random_states(self) -> dict[str, Json]:
        """What a checkpoint has of the generators of Python and NumPy."""
        states = {"random": random_state()}
        if self.epoch_random is not None:
            states["epoch_random"] = self.epoch_random
        return states

    def start_call(self, run: Run) -> None:
        """Notes the generators' state if a call is the first one of an epoch."""
        # A stream may draw for each example, and reads ahead. So the state of the generators within an epoch isn't that
        # of the examples that were used so far, and only the epoch's beginning can be gone back to.
        if not run.progress.step_in_epoch and run.step.data.train.steps_per_epoch is None:
            self.epoch_random = random_state()

    def restore_stream(self, stream_state: np.ndarray | None) -> None:
        """Notes the iterator's state, from which `open` goes on."""
        self.stream_state = stream_state

    def open(self, run: Run) -> None:
        """Opens the training data at the position of the run.

        Raises:
            UsageError: the data pipeline isn't the one whose position was saved.
        """
        progress = run.progress
        source = run.step.data.train
        # Each phase has a stream of its own, whose epochs count from 0.
        position = (progress.epoch - run.plan.place.epoch, progress.step_in_epoch)
        if source.steps_per_epoch is None:
            if not any(position):  # only at the start of a run: later, the data can't be replaced
                _note(
                    run,
                    "train_data() is a stream, which shuffles within its buffer and is read in order: "
                    "loop.IndexedData, or loop.records for TFRecord files, shuffles all examples and goes on from any "
                    "step at once",
                )
            elif self.stream_state is None:
                _note(run, "the checkpoint has no state of the data pipeline: reading up to where the run was")
        elif progress.step_in_epoch > source.steps_per_epoch:
            raise UsageError(
                f"the checkpoint stands at step {progress.step_in_epoch:,} of an epoch, and train_data() has "
                f"{source.steps_per_epoch:,} in one: give the data that the run had, or start a new run"
            )
        has_drawn = self._start(run, position)
        # A pipeline that draws within the epoch has drawn the same numbers again, and must go on from there. Otherwise
        # the generators get their state of the checkpoint, since callbacks may draw from them.
        if self.random_state is not None and not has_drawn:
            set_random_state(self.random_state)
        reason = "" if run.stops.signalled else source.unsaved(self.iterator)
        if reason:
            reason = reason.rstrip(".")
            _note(
                run,
                f"the data pipeline's position can't be saved ({reason}): a resumed run will read up to where it was",
            )

    def _start(self, run: Run, position: tuple[int, int]) -> bool:
        """Makes the iterator of the data from a position on: by its state in the checkpoint, if there is one.

        A signal ends it at once, and the run at the next boundary.

        Returns:
            Whether the position was reached, and reading up to the step within the epoch has drawn from the generators.
        """
        source = run.step.data.train

        def stopped() -> bool:
            return run.stops.signalled

        try:
            if self.stream_state is not None:
                self.iterator = source.start(*position, self.stream_state, stopped=stopped)
                return False
        except tf.errors.OpError as error:
            if not run.options["accept_changes"]:
                raise UsageError(
                    f"train_data() isn't the pipeline whose position the checkpoint has ({error.message}): give the "
                    "old one, or read up to the position in the new one with accept_changes=True (--accept-changes)"
                ) from None
        # The examples up to the position are read and dropped, also those of another pipeline.
        draws = self.epoch_random if position[1] else None
        self.iterator = source.start(*position, draws=draws, stopped=stopped)
        return draws is not None and random_state() != draws and not stopped()

    def next_epoch(self, run: Run) -> None:
        """Takes the iterator to the next epoch."""
        with run.stopwatch.at("data"):
            self.iterator = run.step.data.train.next_epoch(self.iterator)


def _note(run: Run, text: str) -> None:
    if run.backend.is_chief:
        tell(f"note: {text}")
