"""The interface of backends, and its plainest case: one device in one process.

Only this package has collectives.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tensorflow as tf

from loop.backends import devices

if TYPE_CHECKING:
    from loop.launch.member import Member


_FORMER_NAMES = {"outlives": "is_recoverable", "regroup": "rejoin"}
"""Deprecated names of methods that a plug-in may override, each with the name of today."""


class Backend:
    """One backend. The methods below are the single-device case; a backend overrides those that differ for it.

    A *worker* is a process, a *replica* is a copy of the model that computes on a share of each global batch. A worker
    has one or more replicas. The replicas of worker w are numbered from `w * local_replicas`.

    Attributes:
        name: as in `--backend`.
        rank: this worker's index; rank 0 is the chief.
        workers: the number of processes.
        local_replicas: replicas in this process.
        device: where the only replica of this worker computes: a batch is copied there while the step before it is
            made; "" where it needn't be copied.
        cannot_send: what it can't send of `compression`, and why.
        asynchronous: whether the steps of a call are made in no order, with weights that others change meanwhile.
        own_variables: whether each replica has variables of its own.
        priority: of a plug-in: `auto` asks those with a greater one first; None: it is only taken by name.
        member: this worker's part in an elastic job, where workers come and go within a run; None: they stay.
    """

    name: ClassVar[str] = "single"
    cannot_send: ClassVar[dict[str, str]] = {}
    asynchronous: ClassVar[bool] = False
    member: Member | None = None
    rank: int = 0
    workers: int = 1
    local_replicas: int = 1
    device: str = ""
    own_variables: ClassVar[bool] = True
    priority: ClassVar[int | None] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets a plug-in of an older version override the former names of two methods."""
        super().__init_subclass__(**kwargs)
        for former, name in _FORMER_NAMES.items():
            if former in vars(cls) and name not in vars(cls):
                setattr(cls, name, vars(cls)[former])

    # Before there is one; see `loop.launch.plugins`

    @classmethod
    def available(cls, workers: int = 1) -> str | None:
        """What is missing for this backend here, for so many workers, and what to do about it; None: it can be used."""
        return None if workers == 1 else f"it has one worker, not {workers}: leave --workers out"

    @classmethod
    def create(cls, workers: int | None) -> Backend:
        """Starts it, for so many workers if a number was given."""
        return cls()

    @property
    def replicas(self) -> int:
        """Replicas in all."""
        return self.workers * self.local_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    # Of the compiled step

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which variables are created."""
        return contextlib.nullcontext()

    def can_read(self, variable: tf.Variable) -> bool:
        """Whether a variable can be read within `scope`: one that another strategy made can't."""
        return True

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function` once in each replica of this worker; what it returns may be handed to a later `run`."""
        return function(*args)

    def first(self, value: Any) -> Any:
        """What the first local replica returned from `run`."""
        return value

    def replica(self) -> Any:
        """Within `run`: the index of this replica among all of them."""
        return self.rank

    def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Within `run`: the sum over all replicas of each tensor, in one fused collective."""
        return list(tensors)

    def gradients(self, tape: tf.GradientTape, objective: tf.Tensor, variables: Sequence[Any]) -> list[Any]:
        """Within `run`: the gradient of each variable, None where the objective doesn't depend on it."""
        return tape.gradient(objective, variables)

    def no_adasum(self) -> str:
        """Why this backend can't do `adasum`, and what to do; "" if it can."""
        return "only Horovod can; use backend='horovod', or reduction='sum'"

    def adasum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Within `run`: the adaptive sum over all replicas of each tensor (Maleki et al. 2020)."""
        return list(tensors)

    def apply(self, optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> None:
        """Within `run`: one optimizer step with gradients that are already the same in all replicas."""
        if type(optimizer).__module__.startswith("tf_keras"):
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
        """Has a compiled function of the training step make `steps` steps from `step` on, in one part or in several.

        Returns:
            At which step each part began, and what the function returned for it.
        """
        # One trace serves all calls, because numbers are tensors; one transfer brings back all results.
        return [(step, function(handle, *(tf.constant(number, tf.int64) for number in (epoch, step, steps))).numpy())]

    def lost(self, error: BaseException) -> str:
        """What of the run's state the backend has lost, if an error comes of that; else ""."""
        return ""

    def sum_on_host(self, array: np.ndarray) -> np.ndarray:
        """The sum over all workers of an int64 array of the same shape on each. All workers must call it."""
        return array

    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Gives all workers the chief's values, bit for bit. All workers must call it."""
        if self.workers == 1:
            return
        for variable in variables:
            value = variable.numpy()
            words = np.frombuffer(value.tobytes().ljust(-(-value.nbytes // 4) * 4, b"\0"), np.int32).astype(np.int64)
            words = self.sum_on_host(words if self.is_chief else np.zeros_like(words))
            data = words.astype(np.int32).tobytes()[: value.nbytes]
            variable.assign(np.frombuffer(data, value.dtype).reshape(value.shape))

    def local_values(self, variable: tf.Variable) -> list[np.ndarray]:
        """The value of a variable in each replica of this worker."""
        return [variable.numpy()]

    def snapshot(self, variable: tf.Variable) -> tf.Tensor | np.ndarray:
        """The value of a variable in the first replica of this worker, which later steps don't change.

        In the CPU's memory it costs nothing: the tensor shares the variable's buffer, and an operation that changes the
        variable while another holds the buffer takes a new one.
        """
        return shared_value(variable)

    def is_recoverable(self, error: BaseException) -> bool:
        """Whether a run goes on after this error, with the workers that are there after `rejoin`."""
        return False

    def rejoin(self) -> None:
        """Takes this worker's place among those that are there; see `is_recoverable`."""

    def close(self) -> None:
        """Releases what the backend holds; the last call."""

    # Derived from the above: the same on every backend

    def refuse_shared_gpus(self, gpus: Sequence[Any]) -> None:
        """Refuses workers that have the same GPU; `gpus` are those of this one. All workers must call it."""
        devices.refuse_sharing(self.exchange(devices.gpu_identity(gpus))[:, 0].tolist())

    def exchange(self, *numbers: int) -> np.ndarray:
        """The numbers of every worker, int64 of shape [workers, len(numbers)]. All workers must call it."""
        table = np.zeros((self.workers, len(numbers)), np.int64)
        table[self.rank] = numbers
        return self.sum_on_host(table)

    def gather_bytes(self, array: np.ndarray) -> list[np.ndarray]:
        """The uint8 array of every worker, of any length, by rank. All workers must call it."""
        lengths = self.exchange(len(array))[:, 0]
        words = -(-int(lengths.max()) // 8)
        table = np.zeros((self.workers, words), np.int64)
        table[self.rank] = np.frombuffer(array.tobytes().ljust(8 * words, b"\0"), np.int64)
        # A sum in which all others have zeros, so that all 64 bits can be used.
        table = self.sum_on_host(table)
        return [row.view(np.uint8)[:length] for row, length in zip(table, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """The JSON value of every worker, by rank. All workers must call it."""
        return [
            json.loads(text.tobytes())
            for text in self.gather_bytes(np.frombuffer(json.dumps(value).encode(), np.uint8))
        ]

    def broadcast_json(self, value: Any) -> Any:
        """The chief's JSON value. All workers must call it."""
        return self.gather_json(value if self.is_chief else None)[0]

    def fingerprints(self, variables: Sequence[tf.Variable]) -> dict[int, list[str]]:
        """A hash of each variable in each replica, by replica. All workers must call it."""
        values = [self.local_values(variable) for variable in variables]
        own = [[fingerprint(value[local]) for value in values] for local in range(self.local_replicas)]
        return dict(enumerate(hashes for worker in self.gather_json(own) for hashes in worker))


def shared_value(variable: tf.Variable) -> tf.Tensor | np.ndarray:
    """See `Backend.snapshot`. Of a GPU, whose memory is dear, it is a copy in the CPU's."""
    value = variable.read_value()
    return value if "CPU" in value.device else value.numpy()


def of_one_dtype(reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls `reduce` once for the tensors of each dtype, usually the only one; results in the order of `tensors`."""
    reduced: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        reduced |= zip(places, reduce([tensors[place] for place in places]), strict=True)
    return [reduced[place] for place in range(len(tensors))]


def fingerprint(*arrays: np.ndarray) -> str:
    """SHA-256 over dtype, shape and little-endian bytes of arrays, in order.

    For each array: the name of its dtype and its shape as text (`float32[64,10]`), then its bytes in C order.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.name}[{','.join(map(str, array.shape))}]".encode())
        digest.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes())
    return digest.hexdigest()
