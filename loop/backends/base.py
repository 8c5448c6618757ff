"""The interface of backends, and its plainest case: one device in one process.

Only this package has collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf

from loop.backends.placement import placed
from loop.backends.step_collectives import StepCollectives
from loop.model.variables import is_legacy

if TYPE_CHECKING:
    from loop.launch.member import Member


_FORMER_NAMES = {"outlives": "is_recoverable", "regroup": "rejoin"}
"""Deprecated names of methods that a plug-in may override, each with the name of today."""


class Backend(StepCollectives):
    """One backend. Its methods are the single-device case; a backend overrides those that differ for it.

    What replicas exchange within a step is in `StepCollectives`, and what workers exchange between steps in
    `HostCollectives`.

    Attributes:
        name: as in `--backend`.
        device: where the only replica of this worker computes: a batch is copied there while the step before it is
            made; "" where it needn't be copied.
        cannot_send: the values of `compression` that it can't send, each with the reason.
        asynchronous: whether the steps of a call are made in no order, with weights that others change meanwhile.
        own_variables: whether each replica has variables of its own.
        priority: of a plug-in: `auto` asks those with a greater one first; None: it is only taken by name.
        member: this worker's part in an elastic job, where workers come and go within a run; None: they stay.
    """

    name: ClassVar[str] = "single"
    cannot_send: ClassVar[dict[str, str]] = {}
    asynchronous: ClassVar[bool] = False
    member: Member | None = None
    device: str = ""
    own_variables: ClassVar[bool] = True
    priority: ClassVar[int | None] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets a plug-in of an older version override the former names of two methods."""
        super().__init_subclass__(**kwargs)
        for former, name in _FORMER_NAMES.items():
            if former in vars(cls) and name not in vars(cls):
                setattr(cls, name, vars(cls)[former])

    # Before the backend is made; see `loop.launch.plugins`

    @classmethod
    def available(cls, workers: int = 1) -> str | None:
        """What is missing here for this backend with so many workers, and what to do about it; None: nothing."""
        return None if workers == 1 else f"it has one worker, not {workers}: leave --workers out"

    @classmethod
    def create(cls, workers: int | None) -> Backend:
        """Starts it, for so many workers; None: no number was given."""
        return cls()

    # In the compiled step

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which variables are created."""
        return contextlib.nullcontext()

    def can_read(self, variable: tf.Variable) -> bool:
        """Whether a variable can be read within `scope`: one that another strategy made can't."""
        return True

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function` once in each replica of this worker; what it returns may be handed to a later `run`."""
        with placed():
            return function(*args)

    def first(self, value: Any) -> Any:
        """The part of a result of `run` that this worker's first replica returned."""
        return value

    def gradients(self, tape: tf.GradientTape, objective: tf.Tensor, variables: Sequence[Any]) -> list[Any]:
        """Within `run`: the gradient of each variable, None where the objective doesn't depend on it."""
        return tape.gradient(objective, variables)

    def apply(self, optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> None:
        """Within `run`: one optimizer step with gradients that are already the same in all replicas."""
        if is_legacy(optimizer):
            optimizer.apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=True)
        else:
            optimizer.apply(gradients, variables)

    # Between the steps, on the host

    def check(self, variables: Sequence[Any], data: Any, options: dict[str, Any]) -> None:
        """Refuses a task or an option that the backend can't work with.

        Args:
            variables: the model's.
            data: the sources, `loop.data.Data`.
            options: those of `fit`.

        Raises:
            UsageError: which, why, and what to do instead.
        """

    def call(self, function: Any, handle: Any, epoch: int, step: int, steps: int) -> list[tuple[int, np.ndarray]]:
        """Has a compiled function make `steps` steps from `step` on, in one part or in several.

        Args:
            function: the compiled function of the training step.
            handle: the iterator of the data.
            epoch: the epoch, from 0.
            step: the first step, within the epoch.
            steps: how many steps to make at most.

        Returns:
            At which step each part began, and what the function returned for it.
        """
        # As tensors: with Python numbers, each call would be traced anew.
        numbers = [tf.constant(number, tf.int64) for number in (epoch, step, steps)]
        return [(step, function(handle, *numbers).numpy())]

    def lost(self, error: BaseException) -> str:
        """What of the run's state the backend has lost, if that has caused this error; else ""."""
        return ""

    def snapshot(self, variable: tf.Variable) -> tf.Tensor | np.ndarray:
        """The value of a variable in the first replica of this worker, which later steps don't change.

        In the CPU's memory nothing is copied at once: the tensor shares the variable's buffer, and an operation that
        changes the variable while the tensor holds the buffer writes into a new one.
        """
        return shared_value(variable)

    def is_recoverable(self, error: BaseException) -> bool:
        """Whether a run goes on after this error, with the workers that are there after `rejoin`."""
        return False

    def rejoin(self) -> None:
        """Joins the workers that are left, or have come; see `is_recoverable`."""

    def close(self) -> None:
        """Releases what the backend holds; the last call."""


def shared_value(variable: tf.Variable) -> tf.Tensor | np.ndarray:
    """See `Backend.snapshot`. A value on a GPU is copied to the CPU's memory, since the GPU's is scarce."""
    value = variable.read_value()
    return value if "CPU" in value.device else value.numpy()
