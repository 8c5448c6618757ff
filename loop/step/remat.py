"""Which parts of a model are computed again in the backward pass: the option `remat`, and `loop.remat`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import tensorflow as tf

from callbacks.nearest import nearest
from loop.errors import UsageError
from loop.model.layer_graph import Structure, inner_layers
from loop.model.segments import CutGraph, Part, segments
from loop.model.variables import Layer, is_legacy, keras_models, layers
from loop.options import size_in_bytes
from loop.step.computing import RetraceError
from loop.step.recompute import Leaf, Segment, Trace, current_trace, hold_statistics, tracing
from loop.step.replica import current
from loop.step.tracing import as_written
from loop.task import Model


class Remat:
    """Has the layers of a Keras model computed again in the backward pass of a training step.

    A segment that can't be computed twice with the same result is remembered: its results are kept, with a warning.

    Args:
        model: the model.
        choice: the option `remat`.
        rows: the greatest number of rows that a replica computes at once.

    Raises:
        UsageError: the model has no such layers.
    """

    def __init__(self, model: Model, choice: str | Sequence[str] | None, rows: int) -> None:
        self._model = model
        self._choice = choice
        self._rows = rows
        self._least_bytes = size_in_bytes(choice)
        self._layers = layers(model)
        self._remembered: set[int] = set()
        self._is_settled = True
        if choice is not None and not isinstance(model, keras_models()):
            raise UsageError(
                f"remat={choice!r}: {type(model).__name__} isn't a Keras model, whose layers could be found: leave it "
                "out, and call the parts that are to be computed again as loop.remat(part)(x)"
            )
        # Also without the option: `loop.remat` may be called on layers of this model.
        hold_statistics(self._layers)
        self._replace_calls()

    @contextlib.contextmanager
    def tracing(self, compiled: bool) -> Iterator[None]:
        """A context in which a forward pass is traced that will be differentiated.

        Args:
            compiled: whether XLA compiles it.

        Raises:
            RetraceError: layers have turned out to be too small to be computed again.
        """
        with tracing(Trace(self._layers, compiled)):
            yield
        # After the whole pass, so that one more trace suffices for all layers that are too small.
        if not self._is_settled:
            self._is_settled = True
            raise self._retrace()

    def _replace_calls(self) -> None:
        """Replaces the method `call` of what is computed again; takes back earlier replacements first."""
        for layer in self._layers:
            # A sequential model of Keras 3 has its graph in a functional one.
            for owner in (layer, getattr(layer, "_functional", None) or layer):
                if hasattr(vars(owner).get("call"), "replaces"):
                    del owner.call  # the method of the class is visible again
        for segment in self._segments():
            if isinstance(segment, CutGraph):
                _replace_call(segment.graph.owner, functools.partial(self._call_of_graph, segment))
            else:
                _replace_call(segment, functools.partial(self._call_of_layer, segment))

    def _segments(self) -> list[CutGraph | Layer]:
        """What is computed again: graphs that are cut, and layers."""
        if self._choice is None:
            return []
        if self._choice == "full":
            return list(segments(self._model, self._remembered))
        # Not the model itself: as a single segment it would be computed twice, and save no memory.
        inner = [layer for layer in self._layers if layer is not self._model]
        chosen: list[Layer] = []
        if self._least_bytes is not None:
            # Layers without layers in them. Which of them are too small shows when they are traced: see `_note_size`.
            chosen = [layer for layer in inner if not inner_layers(layer)]
        else:
            patterns = self._choice.split(",") if isinstance(self._choice, str) else self._choice
            for pattern in patterns:
                chosen += _of_name(pattern.strip(), inner)
        return [layer for layer in chosen if id(layer) not in self._remembered]

    def _call_of_layer(self, layer: Layer, original: Callable[..., Any], *args: Any, **named: Any) -> Structure:
        """The results of a layer that is one segment."""
        if is_legacy(layer):
            original = as_written(original)  # tf_keras converts the methods of layers by AutoGraph

        # A segment takes a flat list: it replaces the tensors among the arguments in the second computation.
        def function(leaves: list[Leaf]) -> Structure:
            args_again, named_again = tf.nest.pack_sequence_as((args, named), leaves)
            return original(*args_again, **named_again)

        leaves = tf.nest.flatten((args, named))
        outputs = Segment(function, leaves, layer=layer, members=[layer], cannot=self._cannot).run()
        self._note_size(layer, outputs)
        return outputs

    def _call_of_graph(
        self,
        cut_graph: CutGraph,
        original: Callable[..., Any],
        inputs: Structure,
        training: bool | None = None,
        mask: Structure = None,
    ) -> Structure:
        """The results of a model whose graph is cut."""
        graph = cut_graph.graph
        # By the ids of the graph's symbolic tensors: the tensors of this call.
        tensors = dict(zip(graph.inputs, graph.flat_inputs(inputs, mask), strict=True))
        for part in cut_graph.parts:
            function = functools.partial(_run_part, part, training)
            values = [tensors[tensor] for tensor in part.inputs]
            if part.remembered:
                results = function(values)
            else:
                members = [call.layer for call in part.calls]
                segment = Segment(function, values, layer=graph.owner, members=members, cannot=self._cannot)
                results = segment.run()
            tensors |= zip(part.outputs, results, strict=True)
        outputs = [tensors[tensor] for tensor in graph.outputs]
        return graph.packed(outputs)

    def _cannot(self, reason: str, to_blame: Sequence[Layer]) -> Exception:
        """The error for a segment that can't be computed twice: the layers to blame are remembered from now on."""
        names = ", ".join(layer.name for layer in to_blame)
        warnings.warn(f"remat: {names} {reason}: remembered", stacklevel=2)
        self._remembered.update(map(id, to_blame))
        return self._retrace()

    def _note_size(self, layer: Layer, outputs: Structure) -> None:
        """Notes a layer whose results turn out to be smaller than the option asks for."""
        # For one row, since the number of rows isn't known while tracing.
        row_bytes = 0
        for output in filter(tf.is_tensor, tf.nest.flatten(outputs)):
            row_bytes += (output.shape[1:].num_elements() or 1) * output.dtype.size
        if self._least_bytes is not None and row_bytes * self._rows < self._least_bytes:
            self._remembered.add(id(layer))
            self._is_settled = False

    def _retrace(self) -> Exception:
        """The error that has the step traced again, now that more layers are remembered."""
        self._replace_calls()
        return _noted(RetraceError())


def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results are computed again in the backward pass, instead of being kept; to save memory.

    For the layers of a Keras model, use `fit(..., remat=...)`. This is for other models, and for parts of `compute`:

        class Net(tf.Module):
            def __call__(self, x):
                for block in self.blocks:
                    x = loop.remat(block)(x)
                return self.head(x)

    The function is computed twice in a training step, with the same result: it may not change a variable, nor draw
    from `tf.random` without a seed. Layers of Keras may draw, and update statistics.

    Args:
        function: takes and returns tensors, or lists, tuples and dicts of them.

    Returns:
        A function with the same arguments and the same results.

    Raises:
        UsageError: it isn't a function; it can't be computed twice with the same result; or it uses tensors that aren't
            its arguments.
    """
    if not callable(function):
        raise UsageError(f"loop.remat({function!r:.99}): give a function, a layer or a module that can be called")

    def cannot(reason: str, to_blame: Sequence[Layer]) -> Exception:
        name = getattr(function, "__name__", type(function).__name__)
        return _noted(UsageError(f"loop.remat({name}): it {reason}: call it without loop.remat"))

    @tf.autograph.experimental.do_not_convert
    def call(*args: Any, **named: Any) -> Any:
        def compute(leaves: list[Leaf]) -> Structure:
            args_again, named_again = tf.nest.pack_sequence_as((args, named), leaves)
            return as_written(function)(*args_again, **named_again)

        # In an evaluation, in a prediction, and within another segment nothing is differentiated here.
        if current_trace() is None:
            return function(*args, **named)
        return Segment(compute, tf.nest.flatten((args, named)), cannot=cannot).run()

    return call


def _replace_call(layer: Layer, call: Callable[..., Any]) -> None:
    """Replaces the method `call` of a layer while a forward pass is traced.

    Args:
        layer: the layer.
        call: is called with the original method, and its arguments.
    """
    original = layer.call

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(original)
    def replaced(*args: Any, **named: Any) -> Any:
        return original(*args, **named) if current_trace() is None else call(original, *args, **named)

    replaced.replaces = original
    layer.call = replaced


def _of_name(pattern: str, inner: Sequence[Layer]) -> list[Layer]:
    """The layers whose names match a pattern. Refuses a pattern that none matches."""
    matching = [layer for layer in inner if fnmatchcase(layer.name, pattern)]
    if not matching:
        names = [layer.name for layer in inner]
        raise UsageError(
            f"remat={pattern!r}: the model has no layer of that name{nearest(pattern, names)}: give full, a size such "
            "as 64MB, or names of layers, in which * stands for any letters"
        )
    return matching


def _run_part(part: Part, training: bool | None, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """The outputs of a part of a graph."""
    tensors = dict(zip(part.inputs, values, strict=True))
    for call in part.calls:
        tensors |= zip(call.outputs, tf.nest.flatten(call.run(tensors, training)), strict=True)
    return [tensors[tensor] for tensor in part.outputs]


def _noted(problem: Exception) -> Exception:
    """An error, noted on the replica: TensorFlow and AutoGraph may raise another one in place of it."""
    replica = current()
    if replica is not None:
        replica.problem = problem
    return problem
