"""Recomputing: the results within a segment aren't kept for the backward pass, but computed again there.

Memory then holds what goes from one segment of a model to the next, and what one segment computes (Chen et al. 2016,
Training Deep Nets with Sublinear Memory Cost). The second computation draws the same random numbers as the first, and
changes no state: statistics are updated once. Masks of dropout are kept: they are small, and take long to draw.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_optimization_barrier

from loop.model.layer_graph import inner_layers
from loop.model.variables import Layer, Variable, is_legacy
from loop.step.dropout import Masks
from loop.step.replica import current

Leaf: TypeAlias = Any
"""A tensor, or another value, in the arguments or results of a function."""
Structure: TypeAlias = Any
"""A leaf, or a tuple, list or dict of leaves."""
Cannot: TypeAlias = Callable[[str, Sequence[Layer]], Exception]
"""Makes the error for a segment that can't be computed twice with the same result.

Its arguments are the reason, as a verb phrase, and the layers that are to blame.
"""

_IMPURE = re.compile(
    "Assign|Resource(Scatter|Apply)|Rng|Stateful(Uniform|StandardNormal|TruncatedNormal)|Multinomial|TruncatedNormal|"
    "Random(Uniform|StandardNormal|Gamma|Poisson|Shuffle)"
)
"""The types of operations that change a variable, or that draw other numbers each time."""

_SOURCES = ("Const", "ReadVariableOp", "Placeholder")
"""The types of operations whose results a segment may use although they aren't its arguments."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """A forward pass that is being traced, and will be differentiated."""

    layers: Sequence[Layer]  # the layers of the model
    compiled: bool  # whether XLA compiles the forward pass


# Per thread, since the replicas of one process may be traced in threads of their own.
_here = threading.local()


def current_trace() -> Trace | None:
    """The forward pass that this thread traces; None elsewhere, and within a segment."""
    return getattr(_here, "trace", None)


@contextlib.contextmanager
def tracing(trace: Trace | None) -> Iterator[None]:
    """Makes `trace` the current one."""
    before = current_trace()
    _here.trace = trace
    try:
        yield
    finally:
        _here.trace = before


class Segment:
    """A part of a model that is computed again. It is made for one call of the part, while a forward pass is traced.

    Args:
        function: takes a list of tensors and other values, and returns tensors in any structure.
        leaves: the arguments of the function.
        layer: the layer in whose call the function runs, which tells layers within it whether the model trains, and
            in which precision; None: it runs in no layer.
        members: the layers that run within the segment; None: all layers of the model.
        cannot: makes the error for a segment that can't be computed twice with the same result.
    """

    def __init__(
        self,
        function: Callable[[list[Leaf]], Structure],
        leaves: list[Leaf],
        *,
        layer: Layer | None = None,
        members: Sequence[Layer] | None = None,
        cannot: Cannot,
    ) -> None:
        trace = current_trace()
        assert trace is not None
        self._trace = trace
        self._function = function
        self._leaves = leaves
        self._float_indices = [index for index, leaf in enumerate(leaves) if _is_float(leaf)]
        self._layer = layer
        self._members = trace.layers if members is None else members
        self._cannot = cannot
        self._state = _State(self._members)
        self._training: bool | None = None
        self._outputs: Structure = None
        self._masks = Masks()

    def run(self) -> Structure:
        """Computes the segment; returns the results of the function."""
        if not self._float_indices:  # no gradient flows to its arguments
            with tracing(None):
                return self._function(self._leaves)
        results = []
        arguments = [self._leaves[index] for index in self._float_indices]
        floats = iter(self._floats_of(*arguments))
        for leaf in tf.nest.flatten(self._outputs):
            if _is_float(leaf):
                results.append(_with_mask_of(leaf, next(floats)))
            else:
                results.append(leaf)
        return tf.nest.pack_sequence_as(self._outputs, results)

    def _floats_of(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """The floating-point results, whose gradients come from a second computation."""

        @tf.custom_gradient
        def forward(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Structure]]:
            return self._forward(tensors), functools.partial(self._backward, tensors)

        return forward(*tensors)

    def _forward(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The first computation: notes the results, and refuses what a second one couldn't repeat."""
        operations = len(_operations())
        losses_before = list(map(self._losses, self._members))
        with self._masks.noted():
            self._outputs = self._computed(tensors)

        # A loss that is added in the segment would be added once more by the second computation.
        adding = []
        for member, before in zip(self._members, losses_before, strict=True):
            # By identity, not by number: losses of the call before may have been dropped meanwhile.
            if not set(map(id, self._losses(member))).issubset(map(id, before)):
                adding.append(member)
        if adding:
            raise self._cannot("adds a loss", adding)

        # `tf.custom_gradient` passes gradients through the listed results and arguments only.
        for leaf in tf.nest.flatten(self._outputs):
            if isinstance(leaf, tf.__internal__.CompositeTensor):
                raise self._cannot("returns a sparse or ragged tensor", self._members)
        foreign = _foreign(self._floats(), tensors, set(_operations()[operations:]))
        if foreign is not None:
            raise self._cannot(f"uses a tensor that isn't its argument ({foreign.name})", self._members)
        return self._floats()

    def _backward(
        self, tensors: Sequence[tf.Tensor], *upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()
    ) -> Structure:
        """The second computation: the gradients of the floating-point arguments, and of variables, if there are any."""
        # Compute again: with the masks and the state of the first time, so that the results are the same.
        again = _after(upstream, tensors, self._trace.compiled)
        with tf.GradientTape() as tape:
            tape.watch(again)
            operations = len(_operations())
            with self._masks.given(), self._state.as_before() as changed:
                self._outputs = self._computed(again)
                floats = self._floats()

            # The first computation may change variables, such as statistics. This one must not.
            # While a collective is traced, other replicas of this process may add operations, on other devices.
            for operation in _operations()[operations:]:
                if operation.device in ("", again[0].device) and _IMPURE.match(operation.type):
                    changed.append(operation.type)
            if changed:
                reason = f"changes a variable, or draws without a seed ({changed[0]})"
                raise self._cannot(reason, self._members)

        gradients = tape.gradient(floats, (again, list(variables)), output_gradients=list(upstream))
        # `tf.custom_gradient` asks for two lists only if the function has used variables.
        return gradients if variables else gradients[0]

    def _computed(self, tensors: Sequence[tf.Tensor]) -> Structure:
        """What the function returns for these floating-point arguments."""
        leaves = list(self._leaves)
        for index, tensor in zip(self._float_indices, tensors, strict=True):
            leaves[index] = _with_mask_of(leaves[index], tensor)

        def body(training: bool | None) -> Structure:
            self._training = training  # for the second computation, which runs outside of the layer around
            # A segment within a segment is computed as a part of it, and not for a third time.
            with tracing(None):
                return self._function(leaves)

        return body(None) if self._layer is None else _in_call_of(self._layer, body, self._training)

    def _floats(self) -> list[tf.Tensor]:
        return [leaf for leaf in tf.nest.flatten(self._outputs) if _is_float(leaf)]

    def _losses(self, member: Layer) -> list[tf.Tensor]:
        """The losses that a member has added in this call of the model, or in the one before."""
        losses: list[tf.Tensor] = []
        for layer in [member, *inner_layers(member)]:
            losses += getattr(layer, "_losses", ())
        return losses


class _State:
    """The state that layers may change in a segment, as it was before the first computation.

    Args:
        layers: the layers that run within the segment.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        variables: list[Variable] = []
        for layer in layers:
            if isinstance(layer, keras.Layer):  # the variables of the layers within it are among its own
                variables += layer.non_trainable_variables
        generator = global_state.get_global_attribute("global_seed_generator")
        if generator is not None:
            variables.append(generator.state)
        unique = dict(zip(map(id, variables), variables, strict=True))
        self._values: list[tuple[Variable, tf.Tensor]] = []
        for variable in unique.values():
            # Read now: the first computation may change the variable.
            self._values.append((variable, tf.convert_to_tensor(variable.value)))
        replica = current()
        self._draws = replica.draws if replica is not None else 0

    @contextlib.contextmanager
    def as_before(self) -> Iterator[list[str]]:
        """A context in which layers find that state, and which drops what they change of it.

        Yields:
            A list that is filled at the end: what they have changed beside that state.
        """
        others: list[str] = []
        replica = current()
        draws = replica.draws if replica is not None else 0
        # The numbers of seeds are counted again from where they stood, so that random layers get the same seeds.
        if replica is not None:
            replica.draws = self._draws
        _here.keeps_statistics = True
        try:
            with keras.StatelessScope(self._values) as scope:
                yield others
            known = {id(variable) for variable, _ in self._values}
            if scope.state_mapping.keys() - known:
                others.append("a weight")
        finally:
            _here.keeps_statistics = False
            if replica is not None:
                replica.draws = draws


def hold_statistics(layers: Sequence[Layer]) -> None:
    """Has layers of tf_keras update their statistics in the first computation alone."""
    # Keras 3 has `StatelessScope` for that; tf_keras has nothing like it.
    for layer in layers:
        update = getattr(type(layer), "_assign_moving_average", None)
        if update is not None:
            layer._assign_moving_average = functools.partial(_update_unless_held, update, layer)


def _update_unless_held(update: Callable[..., Any], layer: Layer, *arguments: Any) -> Any:
    return None if getattr(_here, "keeps_statistics", False) else update(layer, *arguments)


def _operations() -> list[tf.Operation]:
    return tf.compat.v1.get_default_graph().get_operations()


def _foreign(results: Sequence[tf.Tensor], arguments: Sequence[tf.Tensor], own: set[tf.Operation]) -> tf.Tensor | None:
    """A tensor that isn't an argument, but on which results depend: no gradient would reach it. None: there is none.

    Args:
        results: the results of a segment.
        arguments: the arguments of the segment.
        own: the operations that were added with the segment.
    """
    replica = current()
    known = set(map(id, arguments))
    if replica is not None:  # sums over replicas have a gradient of their own, and the batch needs none
        known.update(map(id, replica.received), map(id, tf.nest.flatten(replica.batch)))

    # From the results back to what they are made of, as far as the segment's own operations go.
    pending = list(results)
    while pending:
        tensor = pending.pop()
        if id(tensor) in known or tensor.op.type in _SOURCES:
            continue
        known.add(id(tensor))
        if tensor.op in own:
            pending += tensor.op.inputs
        elif _is_float(tensor):
            return tensor
    return None


def _is_float(leaf: Leaf) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _with_mask_of(leaf: Leaf, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, with the mask that Keras has noted on `leaf`."""
    mask = getattr(leaf, "_keras_mask", None)
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def _after(upstream: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor], compiled: bool) -> list[tf.Tensor]:
    """The same tensors, but not before the upstream gradients are there.

    Without that, the second computation could run right after the first one, and its results would take memory until
    the backward pass comes to the segment.
    """
    if compiled:  # XLA doesn't keep control dependencies
        return list(xla_optimization_barrier([*tensors, *upstream])[: len(tensors)])
    with tf.control_dependencies(upstream):
        return list(map(tf.identity, tensors))


def _in_call_of(layer: Layer, body: Callable[[bool | None], Structure], training: bool | None) -> Structure:
    """Calls `body` as within a layer, so that Keras tells the layers in it whether the model trains.

    Args:
        layer: the layer, whose precision is used.
        body: the function; its argument is whether the model trains.
        training: whether the model trains; None: the layer around says it.
    """
    family = sys.modules["tf_keras"] if is_legacy(layer) else keras
    precision = layer.dtype_policy if family is keras else layer._dtype_policy
    frame = _frame_class(family)(dtype=precision)
    frame.body = body
    known = {} if training is None else {"training": training}
    return frame(tf.zeros([]), **known)


@functools.cache
def _frame_class(family: Any) -> type[Layer]:
    """A layer class of a Keras family, whose `call` runs a function."""

    class Frame(family.layers.Layer):
        """A layer without variables of its own."""

        @tf.autograph.experimental.do_not_convert
        def call(self, inputs: tf.Tensor, training: bool | None = None) -> Structure:
            return self.body(training)

    return Frame
