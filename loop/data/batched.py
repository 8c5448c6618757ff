"""Data that is batched already, which `fit` would batch once more: noticed before training."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import tensorflow as tf

from loop.errors import UsageError


class _Batch(NamedTuple):
    """A part of a pipeline that makes batches.

    Attributes:
        size: of a batch; None where it can't be known.
        drops_remainder: whether a short last batch is left out.
    """

    size: int | None
    drops_remainder: bool


def check_unbatched(dataset: tf.data.Dataset, what: str, padded: bool) -> None:
    """Refuses a pipeline that yields batches.

    It does if `batch` is one of its last parts, and every tensor of an example has the batch as its first axis, still
    of its size. Windows of a series are made in the same way, but come out of `window`; or are cut from single numbers
    (a text, character by character), with no remainder; or are split into inputs and labels of another size.

    Args:
        dataset: the pipeline.
        what: what it is, for the error.
        padded: whether its examples are said to differ in length.
    """
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    batch = _last_batch(dataset)
    if batch is None or not _share_first_axis(shapes, batch.size):
        return
    of_numbers = all(shape.rank == 1 for shape in shapes)
    if of_numbers and (padded or (len(shapes) == 1 and batch.drops_remainder)):
        return
    size = "" if batch.size is None else f" of {batch.size}"
    raise UsageError(
        f"{what} yields batches{size} (shapes {_shown(shapes)}), not examples: take the batch(...) out, or add "
        ".unbatch(); fit makes the batches (batch_size=...). If such groups are your examples, return "
        "loop.StreamData(dataset, check_batched=False)"
    )


def warn_of_equal_sizes(dataset: tf.data.Dataset, examples: Any, what: str) -> None:
    """Warns of a generator's examples that look like batches: what makes them is no part of the pipeline.

    Args:
        dataset: the pipeline.
        examples: its first few examples, stacked.
        what: what it is, for the warning.
    """
    specs, leaves = tf.nest.flatten(dataset.element_spec), tf.nest.flatten(examples)
    if not _made_by_generator(dataset):
        return
    unknown = all(spec.shape.rank and spec.shape[0] is None for spec in specs)
    several = len({spec.shape.rank for spec in specs}) > 1
    sizes = {leaf.shape[1] for leaf in leaves if leaf.shape.rank > 1}
    if unknown and several and len(sizes) == 1 and sizes != {1} and leaves[0].shape[0] > 1:
        [size] = sizes
        warnings.warn(
            f"{what} yields examples whose tensors all have a first axis of {size}, which the pipeline calls unknown "
            f"(shapes {_shown([spec.shape for spec in specs])}): if these are batches, add .unbatch(); if they are "
            "examples, say so with their size, as by tf.ensure_shape or output_signature, or with "
            "loop.StreamData(dataset, check_batched=False)",
            stacklevel=2,
        )


def _share_first_axis(shapes: list[tf.TensorShape], size: int | None) -> bool:
    """Whether all tensors have a first axis that may be the batch."""
    if not all(shape.rank for shape in shapes):
        return False
    return len({shape[0] for shape in shapes}) == 1 and (shapes[0][0] is None or size in (None, shapes[0][0]))


def _shown(shapes: list[tf.TensorShape]) -> str:
    return ", ".join(str(shape.as_list()).replace("None", "?") for shape in shapes)


def _last_batch(dataset: Any) -> _Batch | None:
    """The part of a pipeline that makes the batches which it yields; None where it yields none."""
    kind = type(dataset).__name__
    inputs = dataset._inputs()
    if kind in ("_FlatMapDataset", "_GroupByWindowDataset") or ("Interleave" in kind and len(inputs) == 1):
        return None if _comes_from_windows(dataset) else _batch_of_functions(dataset)
    if "Unbatch" in kind:
        return None
    if "Batch" in kind:
        drops = tf.get_static_value(getattr(dataset, "_drop_remainder", None))
        return _Batch(_known(getattr(dataset, "_batch_size", None)), bool(drops))
    if "DirectedInterleave" in kind:
        inputs = inputs[1:]  # the first one chooses
    found = [_last_batch(each) for each in inputs]
    return found[0] if found and all(found) else None


def _known(size: Any) -> int | None:
    """The size of a batch; None: it isn't known."""
    value = tf.get_static_value(size)
    return None if value is None else int(value)


def _comes_from_windows(dataset: Any) -> bool:
    return any(type(each).__name__ == "_WindowDataset" or _comes_from_windows(each) for each in dataset._inputs())


def _batch_of_functions(dataset: Any) -> _Batch | None:
    """The same of what a function makes of each element, as `interleave` of each file."""
    for function in dataset._functions():
        for output in function.function.graph.outputs:
            operation = output.op
            while operation.type == "Identity" or ("Dataset" in operation.type and "Batch" not in operation.type):
                if not operation.inputs:
                    break
                operation = operation.inputs[0].op
            if "Batch" in operation.type and "Unbatch" not in operation.type:
                return _Batch(_known(operation.inputs[1]), False)
    return None


def _made_by_generator(dataset: Any) -> bool:
    operations = [
        operation.type for function in dataset._functions() for operation in function.function.graph.get_operations()
    ]
    return "GeneratorDataset" in operations or any(map(_made_by_generator, dataset._inputs()))
