"""Sharded optimizer state (ZeRO stage 1): each replica owns a slice of every trainable variable's slots and averages.

An optimizer is built on *parts*: variables of the size of a slice. Between two steps a part is empty. Within a step it
holds the replica's slice of the weight, the optimizer changes it, and the slices of all replicas are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.errors import UsageError
from loop.model.variables import Variable, as_tf, variable_names
from loop.options import Options
from loop.step.gradients import Gradient
from loop.step.variable_values import read_values
from loop.task import Optimizer

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion")
"""The optimizers of both Keras families that compute each element of a variable from that element's numbers alone."""


class Slicing:
    """How a variable is cut into one slice for each replica, as if it were flat; the last slice is filled with zeros.

    Args:
        variable: the variable, whole.
        replicas: the number of replicas.

    Attributes:
        shape: the shape of the variable.
        dtype: the type of the variable.
        size: the number of elements of the variable.
        length: the number of elements of each slice.
    """

    def __init__(self, variable: tf.Variable, replicas: int) -> None:
        self.shape = variable.shape
        self.dtype = tf.as_dtype(variable.dtype)
        self.size = variable.shape.num_elements()
        self.length = -(-self.size // replicas)  # rounded up, so that all slices have one length: collectives need it
        self._is_even = self.length * replicas == self.size
        begins = np.minimum(np.arange(replicas) * self.length, self.size)
        counts = np.minimum(self.length, self.size - begins)
        # For each replica: where its slice begins, how many elements it has, and the zeros before and after them.
        self._places = np.stack([begins, counts, np.zeros_like(begins), self.length - counts], axis=1)

    def cut(self, tensor: Gradient, replica: tf.Tensor) -> Gradient:
        """While tracing: the slice of a replica, shape [length]. For a sparse gradient, the elements in the slice."""
        if isinstance(tensor, tf.IndexedSlices):
            return self._cut_rows(tensor, tf.cast(replica, tf.int64) * self.length)
        # As few operations as possible: a model has hundreds of variables, and each operation takes host memory.
        if self._is_even:
            return tf.gather(tf.reshape(tensor, [len(self._places), self.length]), replica)
        begin, count, zeros = tf.split(tf.gather(self._places, replica), [1, 1, 2])
        own = tf.slice(tf.reshape(tensor, [-1]), begin, count)
        return tf.ensure_shape(tf.pad(own, zeros[None]), [self.length])

    def _cut_rows(self, gradient: tf.IndexedSlices, begin: tf.Tensor) -> tf.IndexedSlices:
        """The elements of a sparse gradient that are in the slice which begins at `begin`, each with its position."""
        # A row that was looked up twice stays twice, since an optimizer may square each entry: see `lookups`.
        width = self.size // self.shape[0]
        positions = gradient.indices[:, None] * width + tf.range(width, dtype=tf.int64)
        positions = tf.reshape(positions, [-1]) - begin
        is_own = (positions >= 0) & (positions < self.length)
        values = tf.boolean_mask(tf.reshape(gradient.values, [-1]), is_own)
        return tf.IndexedSlices(values, tf.boolean_mask(positions, is_own), tf.constant([self.length], tf.int64))

    def joined(self, slices: tf.Tensor) -> tf.Tensor:
        """While tracing: the value of the variable, from the slices of all replicas: shape [replicas, length]."""
        flat = tf.reshape(slices, [-1])
        elements = flat if self._is_even else flat[: self.size]  # without the zeros that fill the last slice
        return tf.reshape(elements, self.shape)

    def joined_on_host(self, slices: np.ndarray) -> np.ndarray:
        """The value of the variable, from the slices of all replicas: shape [replicas, length]."""
        return slices.reshape(-1)[: self.size].reshape(self.shape.as_list())

    def cut_on_host(self, array: np.ndarray, replica: int) -> np.ndarray:
        """The slice of a replica, shape [length], from the value of the variable."""
        own = array.reshape(-1)[replica * self.length : (replica + 1) * self.length]
        return np.pad(own, (0, self.length - len(own)))


class SlicedVariable:
    """A variable of which each replica holds a slice, seen as a whole: in the shape that it has in a checkpoint.

    Args:
        variable: the slices of this worker's replicas.
        slicing: how the whole is cut.
    """

    def __init__(self, variable: tf.Variable, slicing: Slicing) -> None:
        self.variable = variable
        self.shape = slicing.shape
        self.dtype = tf.as_dtype(variable.dtype)
        self._slicing = slicing

    def gathered(self, backend: Backend) -> np.ndarray:
        """The whole value. All workers must call it."""
        return self._slicing.joined_on_host(backend.gather_values(self.variable))

    def own(self, backend: Backend) -> tf.Tensor | np.ndarray:
        """The slices of this worker's replicas, one after the other, as a copy that later steps don't change."""
        if backend.local_replicas == 1:
            return backend.snapshot(self.variable)
        return np.concatenate(backend.local_values(self.variable))

    def scatter(self, backend: Backend, value: np.ndarray | None) -> None:
        """Gives each replica its slice of the chief's value. All workers must call it.

        Args:
            backend: the backend.
            value: the whole value on the chief; None on the other workers.
        """
        value = backend.broadcast_value(value, self.shape, self.dtype)
        first = backend.rank * backend.local_replicas
        own_slices = []
        for replica in range(first, first + backend.local_replicas):
            own_slices.append(self._slicing.cut_on_host(value, replica))
        backend.set_local_values(self.variable, own_slices)


class Shards:
    """The parts of a model's trainable variables, on which optimizers are built.

    Args:
        variables: the trainable variables.
        backend: the backend.
    """

    def __init__(self, variables: Sequence[Variable], backend: Backend) -> None:
        self._backend = backend
        self._variables = list(variables)
        self._weights = as_tf(variables)
        self._owners: dict[int, int] = {}  # by the id of a sliced slot, the index of its variable
        self.slicings: list[Slicing] = []
        self.parts: list[tf.Variable] = []
        for variable, weight in zip(variables, self._weights, strict=True):
            slicing = Slicing(weight, backend.replicas)
            self.slicings.append(slicing)
            part = self.new_part(slicing, weight.name.split(":")[0])
            # Keras names slots after it, and checkpoints know slots by their names.
            part.path = getattr(variable, "path", None) or part.name
            self.parts.append(part)

    def new_part(self, slicing: Slicing, name: str) -> tf.Variable:
        """A variable for a slice, of zeros."""
        with self._backend.scope():
            return tf.Variable(tf.zeros([slicing.length], slicing.dtype), trainable=False, name=name)

    def build(self, optimizer: Optimizer, indices: Sequence[int]) -> None:
        """Builds an optimizer on the parts of the variables at `indices`, and notes which slots are slices."""
        # Optimizers of both families make a slot by this method. Other variables, such as counters, stay whole.
        original = optimizer.add_variable_from_reference
        own_parts = [self.parts[index] for index in indices]
        by_part = dict(zip(map(id, own_parts), indices, strict=True))

        def add_and_note(*args: Any, **kwargs: Any) -> Variable:
            slot = original(*args, **kwargs)
            # tf_keras calls the first parameter `model_variable`, Keras 3 calls it `reference_variable`.
            reference = args[0] if args else kwargs.get("model_variable", kwargs.get("reference_variable"))
            self._owners[id(as_tf([slot])[0])] = by_part[id(reference)]
            return slot

        optimizer.add_variable_from_reference = add_and_note
        try:
            optimizer.build(own_parts)
        finally:
            del optimizer.add_variable_from_reference  # the method of the class is visible again

    def empty(self) -> None:
        """Frees the memory of the parts, once all optimizers are built."""

        def in_replica() -> None:
            for part in self.parts:
                _empty(part)

        tf.function(lambda: self._backend.run(in_replica), autograph=False)()

    def whole(self, variable: tf.Variable) -> tf.Variable | SlicedVariable:
        """A slot as it is in a checkpoint: whole, if it is sliced."""
        index = self._owners.get(id(variable))
        return variable if index is None else SlicedVariable(variable, self.slicings[index])

    def is_sliced(self, variable: tf.Variable) -> bool:
        """Whether each replica has a slice of its own of this slot."""
        return id(variable) in self._owners

    # Within `run`, while a step is traced

    def apply(self, optimizer: Optimizer, gradients: Mapping[int, Gradient]) -> None:
        """Makes an optimizer's step: each replica for its slices.

        Args:
            optimizer: the optimizer.
            gradients: the reduced gradients of whole variables, by the variable's index.
        """
        backend = self._backend
        replica = backend.replica()

        # Cut this replica's slices out of the gradients and weights.
        own_gradients = []
        for index, gradient in gradients.items():
            slicing = self.slicings[index]
            own_gradients.append(slicing.cut(gradient, replica))
            _set(self.parts[index], slicing.cut(self._weights[index], replica))
        parts = [self.parts[index] for index in gradients]
        backend.apply(optimizer, own_gradients, parts)

        # Take out the new slices, and empty the parts, which hold no memory between two steps.
        slices = read_values(parts)
        for part in parts:
            _empty(part)
        self.assign(list(gradients), slices)

        # Only now: a constraint, such as on the norm of a column, needs the whole weight.
        for index in gradients:
            variable = self._variables[index]
            if variable.constraint is not None:
                backend.assign([self._weights[index]], [variable.constraint(variable)])

    def assign(self, indices: Sequence[int], slices: Sequence[tf.Tensor]) -> None:
        """Gives the weights at `indices` new values, of which each replica has a slice. A collective."""
        gathered = self._backend.all_gather(slices)
        values = []
        for index, all_slices in zip(indices, gathered, strict=True):
            values.append(self.slicings[index].joined(all_slices))
        weights = [self._weights[index] for index in indices]
        self._backend.assign(weights, values)

    def own(self, index: int) -> tf.Tensor:
        """The slice of a weight that this replica owns."""
        return self.slicings[index].cut(self._weights[index], self._backend.replica())


def _set(part: tf.Variable, value: tf.Tensor) -> None:
    """Gives a part a value, within `run`."""
    # Not `part.assign`, which would compare the shape with that of the old value: an empty part has no elements.
    tf.raw_ops.AssignVariableOp(resource=part.handle, value=value)


def _empty(part: tf.Variable) -> None:
    """Frees the memory of a part, within `run`. The part keeps its static shape, which optimizers read."""
    # The placeholder hides the shape of the value from the graph, which would refuse a shape other than the variable's.
    _set(part, tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([0], part.dtype), shape=tf.TensorShape(None)))


def is_on(options: Options, backend: Backend) -> bool:
    """Whether the optimizer's state is sharded. A single replica owns all of it anyway."""
    return bool(options["shard_optimizer"]) and backend.replicas > 1


def check(
    backend: Backend, optimizers: Mapping[str, tuple[Optimizer, list[int]]], variables: Sequence[Variable]
) -> None:
    """Refuses a backend or an optimizer whose state can't be sharded.

    Args:
        backend: the backend.
        optimizers: by name, each optimizer, and the indices of its variables.
        variables: the trainable variables.

    Raises:
        UsageError: the backend or the optimizer, the reason, and what to do instead.
    """
    if reason := backend.no_sharding():
        raise UsageError(f"shard_optimizer=True with backend={backend.name!r}: {reason}")
    for optimizer, _ in optimizers.values():
        if problem := _not_elementwise(optimizer):
            raise UsageError(f"shard_optimizer=True with {type(optimizer).__name__}: {problem}")
    for name, variable in zip(variable_names(variables), variables, strict=True):
        if getattr(variable, "overwrite_with_gradient", False):
            raise UsageError(
                f"shard_optimizer=True: the gradient of {name} replaces it (float8), instead of being applied: leave "
                "shard_optimizer out"
            )


def _not_elementwise(optimizer: Optimizer) -> str:
    """Why an optimizer can't update slices of variables, and what to do instead; "" if it can."""
    for name, instead in (("clipnorm", ""), ("global_clipnorm", "clip_norm=... (--clip-norm)")):
        if getattr(optimizer, name, None):
            instead = instead or "clip_norm=... (--clip-norm), which clips the norm of the whole gradient,"
            return f"its {name} needs whole gradients: leave it out, and use {instead} of fit"
    if getattr(optimizer, "gradient_accumulation_steps", None):
        return "leave its gradient_accumulation_steps out, and use a larger batch_size with accumulate"
    if getattr(optimizer, "use_ema", False):
        return "leave its use_ema out, and use ema (--ema)"
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        return (
            "exclude_from_weight_decay(var_list=...) names variables, of which it gets slices: use "
            "exclude_from_weight_decay(var_names=...)"
        )

    # What the class says of itself counts more than its name: a subclass may compute in another way.
    declared = getattr(optimizer, "elementwise", None)
    module = type(optimizer).__module__
    is_known = module.startswith(("keras.src.optimizers.", "tf_keras.src.optimizers."))
    if declared or (declared is None and is_known and type(optimizer).__name__ in ELEMENTWISE):
        return ""
    if is_known:
        return f"it looks at whole variables, not at each element: use {', '.join(ELEMENTWISE)}, or leave it out"
    return (
        "it isn't known whether it computes each element of a variable from that element alone: if so, give the class "
        "the attribute `elementwise = True`; else leave shard_optimizer out"
    )
