"""Finds data that is batched already before training, since `fit` would batch it once more."""

from __future__ import annotations

import dataclasses
import warnings

import tensorflow as tf

from loop.data.pipelines import parts_of
from loop.errors import UsageError
from loop.task import Batch


@dataclasses.dataclass(frozen=True)
class _Batching:
    """A part of a pipeline that makes batches."""

    size: int | None  # the size of a batch; None: it isn't known
    drops_remainder: bool  # whether a short last batch is left out


def check_unbatched(dataset: tf.data.Dataset, what: str, padded: bool) -> None:
    """Refuses a pipeline that yields batches.

    A pipeline does if `batch` is one of its last parts, and every tensor of an example has a first axis of the size of
    the batch. Windows of a series are examples, although they are made with `batch`, too. They differ from batches in
    one of these ways: they come out of `window`; they are cut from single numbers (a text, character by character),
    without a remainder; or they are split into inputs and labels of another size.

    `what` is the method that returned the pipeline; `padded` says whether its examples differ in length.
    """
    shapes = _shapes_of(dataset)
    batching = _last_batching(dataset)
    if batching is None or not _share_first_axis(shapes, batching.size):
        return
    # Groups of single numbers: examples to be padded, if the user says so, or windows cut without a remainder.
    of_numbers = all(shape.rank == 1 for shape in shapes)
    if of_numbers and (padded or (len(shapes) == 1 and batching.drops_remainder)):
        return
    size = "" if batching.size is None else f" of {batching.size}"
    raise UsageError(
        f"{what} yields batches{size} (shapes {_shown(shapes)}), not examples: take the batch(...) out, or add "
        ".unbatch(); fit makes the batches (batch_size=...). If such groups are your examples, return "
        "loop.StreamData(dataset, check_batched=False)"
    )


def warn_of_equal_sizes(dataset: tf.data.Dataset, examples: Batch, what: str) -> None:
    """Warns if the examples of a generator look like batches. The pipeline doesn't show how a generator makes them.

    `examples` are the first few, stacked; `what` is the method that returned the pipeline.
    """
    if not _made_by_generator(dataset):
        return
    shapes = _shapes_of(dataset)
    leaves = tf.nest.flatten(examples)
    # Such as inputs [?, 28, 28] and labels [?]: batches have several ranks, and one first axis in all examples.
    unknown = _first_axes(shapes) == {(None,)}
    several = len({shape.rank for shape in shapes}) > 1
    sizes = {leaf.shape[1] for leaf in leaves if leaf.shape.rank > 1}
    if unknown and several and len(sizes) == 1 and sizes != {1} and leaves[0].shape[0] > 1:
        [size] = sizes
        warnings.warn(
            f"{what} yields examples whose tensors all have a first axis of {size}, which the pipeline calls unknown "
            f"(shapes {_shown(shapes)}): if these are batches, add .unbatch(); if they are "
            "examples, say so with their size, as by tf.ensure_shape or output_signature, or with "
            "loop.StreamData(dataset, check_batched=False)",
            stacklevel=2,
        )


def _shapes_of(dataset: tf.data.Dataset) -> list[tf.TensorShape]:
    """The shapes of the tensors of an example."""
    return [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]


def _share_first_axis(shapes: list[tf.TensorShape], size: int | None) -> bool:
    """Whether all tensors have the same first axis, and it may be that of a batch of this size."""
    first_axes = _first_axes(shapes)
    if size is None:
        return len(first_axes) == 1 and first_axes != {()}
    # An axis of unknown size may have any: a batch whose remainder isn't dropped has such a one.
    return first_axes in ({(None,)}, {(size,)})


def _first_axes(shapes: list[tf.TensorShape]) -> set[tuple[int | None, ...]]:
    """The sizes of the first axes, (size,) each; () for a scalar, which has none."""
    return {tuple(shape.as_list()[:1]) for shape in shapes}


def _shown(shapes: list[tf.TensorShape]) -> str:
    """The shapes, for a message."""
    return ", ".join(str(shape.as_list()).replace("None", "?") for shape in shapes)


def _last_batching(dataset: tf.data.Dataset) -> _Batching | None:
    """The part of a pipeline that makes the batches that it yields; None: it yields no batches."""
    # By names of private classes, since a pipeline doesn't tell in another way what it is made of.
    name = type(dataset).__name__
    inputs = dataset._inputs()
    # These make a pipeline of each element, which may have the batching in it.
    if name in ("_FlatMapDataset", "_GroupByWindowDataset") or ("Interleave" in name and len(inputs) == 1):
        return None if _comes_from_windows(dataset) else _batching_in_functions(dataset)
    if "Unbatch" in name:  # what batches below it have made is taken apart again
        return None
    if "Batch" in name:
        drops = tf.get_static_value(getattr(dataset, "_drop_remainder", None))
        return _Batching(_static_size(getattr(dataset, "_batch_size", None)), bool(drops))
    if "DirectedInterleave" in name:
        inputs = inputs[1:]  # the first input chooses among the others
    # Any other part hands on what its inputs yield; of several inputs, all must be batched.
    of_inputs = list(map(_last_batching, inputs))
    return of_inputs[0] if of_inputs and all(of_inputs) else None


def _static_size(size: tf.Tensor | None) -> int | None:
    """The size of a batch; None: it isn't known."""
    value = tf.get_static_value(size)
    return None if value is None else int(value)


def _comes_from_windows(dataset: tf.data.Dataset) -> bool:
    """Whether a part of the pipeline makes windows."""
    return any(type(part).__name__ == "_WindowDataset" for part in parts_of(dataset))


def _batching_in_functions(dataset: tf.data.Dataset) -> _Batching | None:
    """The batching in the pipeline that a function makes of each element, such as `interleave` of each file."""
    for function in dataset._functions():
        for output in function.function.graph.outputs:
            # Back along the first inputs of the graph, through all that doesn't make batches.
            operation = output.op
            while operation.inputs and _passes_on(operation.type):
                operation = operation.inputs[0].op
            if "Batch" in operation.type and "Unbatch" not in operation.type:
                return _Batching(_static_size(operation.inputs[1]), False)
    return None


def _passes_on(kind: str) -> bool:
    """Whether operations of a type pass on the elements of their first input, without making batches of them."""
    return kind == "Identity" or ("Dataset" in kind and "Batch" not in kind)


def _made_by_generator(dataset: tf.data.Dataset) -> bool:
    """Whether the examples come from a Python generator."""
    for part in parts_of(dataset):
        for function in part._functions():
            for operation in function.function.graph.get_operations():
                if operation.type == "GeneratorDataset":
                    return True
    return False
