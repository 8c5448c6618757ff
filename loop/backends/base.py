"""The interface of backends, and its plainest case: one device in one process.

Only this package has collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from loop.backends.placement import placed
from loop.backends.step_collectives import StepCollectives
from loop.model.variables import Variable, is_legacy, nested_optimizers

if TYPE_CHECKING:
    from loop.launch.member import Member

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
"""The gradient of a variable; None: the objective doesn't depend on the variable."""
PerReplica: TypeAlias = Any
"""What `Backend.run` returns: the structure that the function returned, with a value for each of its replicas."""
_FORMER_NAMES = {"outlives": "is_recoverable", "regroup": "rejoin"}
"""Deprecated names of methods that a plug-in may override, each with the name of today."""


class Source(Protocol):
    """What a backend knows of the data; see `loop.data.Source`."""

    @property
    def steps_per_epoch(self) -> int | None:
        """How many batches an epoch has; None: that is known only at its end."""


class Sources(Protocol):
    """The data of a run; see `loop.data.Data`."""

    @property
    def train(self) -> Source:
        """The training data."""

    @property
    def evaluated(self) -> Mapping[str, Source]:
        """The sets of evaluation data by name; a single one has the name ""."""


class Backend(StepCollectives):
    """One backend. Its methods are the single-device case; a backend overrides those that differ for it.

    What replicas exchange within a step is in `StepCollectives`, and what workers exchange between steps in
    `HostCollectives`.

    Attributes:
        name: as in `--backend`.
        device: the device of this worker's only replica, to which the next batch is copied while a step is computed;
            "": batches needn't be copied.
        cannot_send: the values of `compression` that it can't send, each with the reason.
        asynchronous: whether the steps of a call are made in no order, while other steps change the weights.
        own_variables: whether each replica has variables of its own.
        priority: of a plug-in: `auto` asks those with a greater one first; None: it is only taken by name.
        member: this worker's part in an elastic job, in which workers join and are lost; None: the job isn't elastic.
        chosen: the options other than their defaults that it was made with and that may change bits, by name.
    """

    name: ClassVar[str] = "single"
    cannot_send: ClassVar[dict[str, str]] = {}
    asynchronous: ClassVar[bool] = False
    member: Member | None = None
    chosen: Mapping[str, object] = MappingProxyType({})
    device: str = ""
    own_variables: ClassVar[bool] = True
    priority: ClassVar[int | None] = 0

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Lets a plug-in of an older version override the former names of two methods."""
        super().__init_subclass__(**kwargs)
        # Only what this class itself defines: each of its bases has been here before it.
        for former, name in _FORMER_NAMES.items():
            if former in vars(cls) and name not in vars(cls):
                setattr(cls, name, vars(cls)[former])

    # Before the backend is made; see `loop.launch.plugins`

    @classmethod
    def available(cls, workers: int = 1) -> str | None:
        """What is missing here for this backend with this number of workers, and what to do about it; None: nothing."""
        return None if workers == 1 else f"it has one worker, not {workers}: leave --workers out"

    @classmethod
    def create(cls, workers: int | None) -> Backend:
        """Starts it for this number of workers; None: no number was given."""
        return cls()

    # In the compiled step

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """The context in which variables are created."""
        return contextlib.nullcontext()

    def as_replica(self) -> contextlib.AbstractContextManager[None]:
        """Within the `scope` of a strategy: the context of this process's first replica, without the others."""
        return tf.distribute.ReplicaContext(tf.distribute.get_strategy(), self.rank * self.local_replicas)

    def can_read(self, variable: tf.Variable) -> bool:
        """Whether a variable can be read within `scope`. A variable of another strategy can't."""
        return True

    def trains(self, variable: tf.Variable, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether an optimizer can train a variable here, which may have been made within another backend's `scope`."""
        # The copies of another backend's replicas: TensorFlow changes them only if the optimizer knows of them.
        if isinstance(variable, tf.distribute.DistributedValues):
            return variable._distribute_strategy is getattr(optimizer, "_distribution_strategy", None)
        return True

    def made_optimizer(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether an optimizer was made within `scope`."""
        return True

    def run(self, function: Callable[..., PerReplica], *args: object) -> PerReplica:
        """Calls `function` once in each replica of this worker. The result may be an argument of a later `run`."""
        with placed():
            return function(*args)

    def first(self, value: PerReplica) -> PerReplica:
        """The part of a result of `run` that this worker's first replica returned."""
        return value

    def gradients(
        self, tape: tf.GradientTape, objective: tf.Tensor, variables: Sequence[Variable]
    ) -> Sequence[Gradient]:
        """Within `run`: the gradient of each variable."""
        return tape.gradient(objective, variables)

    def apply(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[Variable]
    ) -> None:
        """Within `run`: one step of an optimizer of any family, with gradients that are the same in all replicas."""
        if is_legacy(optimizer):
            # The gradients are sums over all replicas already.
            optimizer.apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=True)
            return
        # Keras 3 sums gradients over the replicas in `apply`, and no argument turns that off. These are summed already.
        # On one device, too, the sum does harm: TensorFlow refuses it if an optimizer has changed some gradients, and
        # not the others. An optimizer may wrap another one: each of them would sum.
        for one in nested_optimizers(optimizer):
            one._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
        optimizer.apply(gradients, variables)

    # Between the steps, on the host

    def check(self, variables: Sequence[Variable], data: Sources, options: Mapping[str, object]) -> None:
        """Refuses a task or an option that the backend can't work with.

        Args:
            variables: the trainable variables of the model.
            data: the sources, `loop.data.Data`.
            options: those of `fit`.

        Raises:
            UsageError: which, why, and what to do instead.
        """

    def call(
        self, function: Callable[..., tf.Tensor], iterator: object, epoch: int, step: int, steps: int
    ) -> list[tuple[int, np.ndarray]]:
        """Has a compiled function make `steps` steps from `step` on, in one part or in several.

        Args:
            function: the compiled function of the training step.
            iterator: what the `start` of the source returned.
            epoch: the epoch, from 0.
            step: the first step, within the epoch.
            steps: how many steps to make at most.

        Returns:
            The first step of each part, and what the function returned for the part.
        """
        return [(step, function(iterator, *int64_tensors(epoch, step, steps)).numpy())]

    def lost(self, error: BaseException) -> str:
        """The part of the run's state that the backend has lost, if the loss has caused this error; else ""."""
        return ""

    def snapshot(self, variable: tf.Variable) -> tf.Tensor | np.ndarray:
        """The value of a variable in the first replica of this worker, which later steps don't change.

        In the CPU's memory nothing is copied at once: the tensor shares the variable's buffer, and an operation that
        changes the variable while the tensor holds the buffer writes into a new one.
        """
        return shared_value(variable)

    def is_recoverable(self, error: BaseException) -> bool:
        """Whether a run can go on after this error, with the workers that `rejoin` finds."""
        return False

    def rejoin(self) -> None:
        """Joins the workers that are left, and new ones; see `is_recoverable`."""

    def close(self) -> None:
        """Releases what the backend holds; the last call."""


def int64_tensors(*numbers: int) -> list[tf.Tensor]:
    """Arguments for a compiled function. With Python numbers, TensorFlow would trace it again for each new number."""
    return [tf.constant(number, tf.int64) for number in numbers]


def shared_value(variable: tf.Variable) -> tf.Tensor | np.ndarray:
    """See `Backend.snapshot`. A value on a GPU is copied to the CPU's memory, since the GPU's is scarce."""
    value = variable.read_value()
    return value if "CPU" in value.device else value.numpy()
