"""Types that callbacks share: what a run hands to them, and names for values whose libraries have no types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np

# These are `Any` to a type checker: a recursive type of JSON would refuse `dict[str, float]`, since dicts are
# invariant; and TensorFlow, Keras and MLflow have no types that could be named without importing them.
Json: TypeAlias = Any
"""What `json` reads and writes: None, bool, int, float, str, and lists and dicts of these."""
JsonObject: TypeAlias = dict[str, Json]
"""A JSON object: a line of a journal, the content of `run.json`, the state of a callback."""
Task: TypeAlias = Any
"""The user's task, with the fields that its class has."""
Model: TypeAlias = Any
"""A Keras model of either family, or a `tf.Module`."""
Optimizer: TypeAlias = Any
"""A Keras optimizer of either family."""
Variable: TypeAlias = Any
"""A TensorFlow variable, or one of Keras."""
Tensors: TypeAlias = Any
"""A tensor or array, or a structure of them, such as a batch."""
Foreign: TypeAlias = Any
"""An object of a library that has no types: an MLflow client, a bar of tqdm, a layer of a model."""


class Progress(Protocol):
    """How far the run has come; see `loop.run.progress.Progress`."""

    step: int
    epoch: int
    step_in_epoch: int
    examples: int


class Member(Protocol):
    """A worker's side of an elastic job."""

    events: list[JsonObject]


class Backend(Protocol):
    """The part of a backend that callbacks use; see `loop.backends.base.Backend`."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def is_chief(self) -> bool: ...
    @property
    def member(self) -> Member | None: ...
    def scope(self) -> AbstractContextManager[object]: ...
    def broadcast_variables(self, variables: Sequence[Variable]) -> None: ...
    def local_values(self, variable: Variable) -> list[np.ndarray]: ...
    def exchange(self, *numbers: int) -> np.ndarray: ...
    def gather_json(self, value: Json) -> list[Json]: ...
    def broadcast_json(self, value: Json) -> Json: ...


class Source(Protocol):
    """A source of examples; see `loop.data.sources`."""

    replica_rows: Callable[..., Tensors]

    @property
    def steps_per_epoch(self) -> int | None: ...
    def head(self, count: int) -> Tensors: ...


class Data(Protocol):
    """The data sources of a phase; `eval` is None for a task without evaluation data.

    If there are several sets of evaluation data, `eval` is the first one, and `evaluated` has all of them by name.
    """

    train: Source
    eval: Source | None

    @property
    def evaluated(self) -> Mapping[str, Source]: ...

    def sharded(self, backend: Backend, policy: str) -> Data: ...


class Phase(Protocol):
    """The phase of a task that is under way."""

    @property
    def name(self) -> str: ...
