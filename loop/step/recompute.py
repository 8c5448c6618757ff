"""Recomputing: a segment's results aren't remembered for the way back, but computed again there.

Memory then holds what goes from one segment of a model to the next, and what one segment computes (Chen et al. 2016,
Training Deep Nets with Sublinear Memory Cost). The second time draws the same random numbers as the first, and changes
no state: statistics move once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_optimization_barrier

from loop.model.layer_graph import inner_layers
from loop.model.variables import is_legacy
from loop.step.replica import current

_IMPURE = re.compile(
    "Assign|Resource(Scatter|Apply)|Rng|Stateful(Uniform|StandardNormal|TruncatedNormal)|Multinomial|TruncatedNormal|"
    "Random(Uniform|StandardNormal|Gamma|Poisson|Shuffle)"
)
"""The types of operations that change a variable, or that draw other numbers each time."""

_SOURCES = ("Const", "ReadVariableOp", "Placeholder")
"""The types of operations whose results a segment may use without getting them as arguments."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """A forward pass that is being traced, and will be differentiated.

    Attributes:
        layers: of the model.
        compiled: whether XLA compiles it.
    """

    layers: Sequence[Any]
    compiled: bool


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
    """A part of a model that is computed again; made for one call of it, while a forward pass is traced.

    Args:
        function: takes a list of tensors and other values, and returns tensors in any structure.
        leaves: its arguments.
        layer: in whose call it runs, which says whether the model trains, and in which precision; None: in none.
        members: the layers that run within it; None: all of the model.
        cannot: makes the error for a segment that can't be computed twice with the same result, from the reason and
            the layers that are to blame.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Any],
        leaves: list[Any],
        *,
        layer: Any = None,
        members: Sequence[Any] | None = None,
        cannot: Callable[[str, Sequence[Any]], Exception],
    ) -> None:
        trace = current_trace()
        assert trace is not None
        self._trace = trace
        self._function = function
        self._leaves = leaves
        self._places = [place for place, leaf in enumerate(leaves) if _is_float(leaf)]
        self._layer = layer
        self._members = trace.layers if members is None else members
        self._cannot = cannot
        self._state = _State(self._members)
        self._training: Any = None
        self._outputs: Any = None

    def run(self) -> Any:
        """The results of the function."""
        if not self._places:  # nothing that a way back could reach
            with tracing(None):
                return self._function(self._leaves)
        results = []
        floats = iter(self._floats_of(*(self._leaves[place] for place in self._places)))
        for leaf in tf.nest.flatten(self._outputs):
            results.append(_with_mask_of(leaf, next(floats)) if _is_float(leaf) else leaf)
        return tf.nest.pack_sequence_as(self._outputs, results)

    def _floats_of(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """The floating-point results, whose gradients are those of a second time."""

        @tf.custom_gradient
        def forward(*tensors: tf.Tensor) -> Any:
            return self._forward(tensors), functools.partial(self._backward, tensors)

        floats: list[tf.Tensor] = forward(*tensors)
        return floats

    def _forward(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The first time: notes the results, and refuses what a second time couldn't repeat."""
        operations = len(_operations())
        losses = [self._losses(member) for member in self._members]
        self._outputs = self._computed(tensors)
        adding = []
        for member, before in zip(self._members, losses, strict=True):
            known = {id(loss) for loss in before}  # those of the call before may have been dropped meanwhile
            if any(id(loss) not in known for loss in self._losses(member)):
                adding.append(member)
        if adding:
            raise self._cannot("adds a loss", adding)
        if any(isinstance(leaf, tf.__internal__.CompositeTensor) for leaf in tf.nest.flatten(self._outputs)):
            raise self._cannot("returns a sparse or ragged tensor", self._members)
        foreign = _foreign(self._floats(), tensors, set(_operations()[operations:]))
        if foreign is not None:
            raise self._cannot(f"uses a tensor that isn't its argument ({foreign.name})", self._members)
        return self._floats()

    def _backward(
        self, tensors: Sequence[tf.Tensor], *upstream: tf.Tensor, variables: Sequence[tf.Variable] = ()
    ) -> Any:
        """The second time: the gradients of arguments and variables."""
        again = _after(upstream, tensors, self._trace.compiled)
        with tf.GradientTape() as tape:
            tape.watch(again)
            operations = len(_operations())
            with self._state.as_before() as changed:
                self._outputs = self._computed(again)
                floats = self._floats()
            # While a collective is traced, other replicas of this process may add operations, on other devices.
            own = [one for one in _operations()[operations:] if one.device in ("", again[0].device)]
            changed += [operation.type for operation in own if _IMPURE.match(operation.type)]
            if changed:
                reason = f"changes a variable, or draws without a seed ({changed[0]})"
                raise self._cannot(reason, self._members)
        gradients = tape.gradient(floats, (again, list(variables)), output_gradients=list(upstream))
        return gradients if variables else gradients[0]

    def _computed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """What the function returns for these floating-point arguments."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = _with_mask_of(leaves[place], tensor)

        def body(training: Any) -> Any:
            self._training = training
            with tracing(None):
                return self._function(leaves)

        return body(None) if self._layer is None else _in_call_of(self._layer, body, self._training)

    def _floats(self) -> list[tf.Tensor]:
        return [leaf for leaf in tf.nest.flatten(self._outputs) if _is_float(leaf)]

    def _losses(self, member: Any) -> list[Any]:
        """The losses that a member has added in this call of the model, or in the one before."""
        return [loss for layer in [member, *inner_layers(member)] for loss in getattr(layer, "_losses", ())]


class _State:
    """The state that layers may change in a segment, as it was before the first time.

    Args:
        layers: that run within it.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        variables: list[Any] = []
        for layer in layers:
            if isinstance(layer, keras.Layer):  # with those of the layers within it
                variables += layer.non_trainable_variables
        generator = global_state.get_global_attribute("global_seed_generator")
        if generator is not None:
            variables.append(generator.state)
        unique = {id(variable): variable for variable in variables}
        self._values = [(variable, tf.convert_to_tensor(variable.value)) for variable in unique.values()]
        replica = current()
        self._draws = replica.draws if replica is not None else 0

    @contextlib.contextmanager
    def as_before(self) -> Iterator[list[str]]:
        """Within it, layers find the state of then, and what they change is dropped.

        Yields:
            Filled at the end: what they have changed that isn't their state.
        """
        others: list[str] = []
        replica = current()
        draws = replica.draws if replica is not None else 0
        if replica is not None:
            replica.draws = self._draws
        _here.keeps_statistics = True
        try:
            with keras.StatelessScope(self._values) as scope:
                yield others
            if scope.state_mapping.keys() - {id(variable) for variable, _ in self._values}:
                others.append("a weight")
        finally:
            _here.keeps_statistics = False
            if replica is not None:
                replica.draws = draws


def hold_statistics(layers: Sequence[Any]) -> None:
    """Has layers of tf_keras gather statistics the first time alone: it knows no scope for state, as Keras 3 does."""
    for layer in layers:
        move = getattr(type(layer), "_assign_moving_average", None)
        if move is not None:
            layer._assign_moving_average = functools.partial(_moved, move, layer)


def _moved(move: Callable[..., Any], layer: Any, *arguments: Any) -> Any:
    return None if getattr(_here, "keeps_statistics", False) else move(layer, *arguments)


def _operations() -> list[tf.Operation]:
    return tf.compat.v1.get_default_graph().get_operations()


def _foreign(results: Sequence[tf.Tensor], arguments: Sequence[tf.Tensor], own: set[tf.Operation]) -> tf.Tensor | None:
    """A tensor from elsewhere on which results depend, and which the way back wouldn't reach; None: there is none.

    Args:
        results: of a segment.
        arguments: of the segment.
        own: the operations that were added with it.
    """
    replica = current()
    known = {id(tensor) for tensor in arguments}
    if replica is not None:  # what comes from other replicas, and the batch, which isn't trained
        known |= {id(tensor) for tensor in [*replica.received, *tf.nest.flatten(replica.batch)]}
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


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _with_mask_of(leaf: Any, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, with the mask that Keras has noted on another one."""
    mask = getattr(leaf, "_keras_mask", None)
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def _after(upstream: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor], compiled: bool) -> list[tf.Tensor]:
    """Tensors that are there only when the way back has come to the segment: else it would be computed at once."""
    if compiled:  # XLA knows no control dependencies
        return list(xla_optimization_barrier([*tensors, *upstream])[: len(tensors)])
    with tf.control_dependencies(upstream):
        return [tf.identity(tensor) for tensor in tensors]


def _in_call_of(layer: Any, body: Callable[[Any], Any], training: Any) -> Any:
    """What `body` returns, called as within a layer: Keras tells inner layers by that whether they train.

    Args:
        layer: the layer, whose precision counts.
        body: its argument is whether the model trains.
        training: whether it trains; None: as the layer around says.
    """
    family = sys.modules["tf_keras"] if is_legacy(layer) else keras
    frame = _frame_class(family)(dtype=layer.dtype_policy if family is keras else layer._dtype_policy)
    frame.body = body
    known = {} if training is None else {"training": training}
    return frame(tf.zeros([]), **known)


@functools.cache
def _frame_class(family: Any) -> Any:
    class Frame(family.layers.Layer):
        """A layer without content."""

        @tf.autograph.experimental.do_not_convert
        def call(self, inputs: tf.Tensor, training: Any = None) -> Any:
            return self.body(training)

    return Frame
