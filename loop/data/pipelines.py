"""What the graph of a `tf.data` pipeline tells of it: whether its order is fixed, and how it is split by files."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from loop.errors import UsageError

_MOST_IN_GRAPH = 1 << 26  # bytes of a data set's tensors that are copied to look at its graph

_NOT_STACKED = (
    "Cannot batch tensors with different shapes",
    "Cannot add tensor to the batch: number of elements does not match",
    "Shapes of all inputs must match",
)
"""What TensorFlow says of examples of different shapes."""


def dense(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A pipeline whose examples come from a `tf.RaggedTensor`, and are dense themselves, as one of dense tensors."""
    specs = tf.nest.flatten(dataset.element_spec)
    if not any(isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 0 for spec in specs):
        return dataset
    several = isinstance(dataset.element_spec, tuple)

    @tf.autograph.experimental.do_not_convert
    def as_it_is(*example: Any) -> Any:
        return example if several else example[0]

    return dataset.map(as_it_is)


def stacking_problem(error: Exception) -> UsageError | None:
    """What to do where examples of different shapes can't be stacked; None if the error is another one."""
    text = str(getattr(error, "message", ""))
    said = next((each for each in _NOT_STACKED if each in text), None)
    if said is not None:
        shapes = text[text.index(said) :].split("\n")[0].split(" [Op:")[0].rstrip(". ")
        return UsageError(
            f"the data set's examples have different shapes ({shapes}): return loop.StreamData(dataset, "
            "padding=loop.Padding()), which pads each batch to its longest example and adds a mask; or make all "
            "examples of one shape. If these are batches, add .unbatch()"
        )
    if "say whose masks you want" in text:
        return UsageError(
            "the arrays of an example have different lengths, so that one mask can't serve all: say whose masks you "
            "want, by name or place, as Padding(mask=0) or Padding(mask=[0, 1])"
        )
    return None


def check_spec(dataset: tf.data.Dataset) -> None:
    """Refuses a stream whose examples can't be stacked."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise UsageError(f"the data set yields {type(spec).__name__}: only dense tensors can be shared out by rows")
        if spec.shape.rank is None:
            raise UsageError(
                "the data set yields tensors of unknown rank: tell it, with tf.ensure_shape(x, [None, ...])"
            )


def one_order(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline yields its examples in the same order each time, as far as its parts tell."""
    parts: list[Any] = [dataset]
    tensors: list[Any] = []
    for part in parts:  # which grows
        if part.options().deterministic is False:
            return False
        parts += part._inputs()
        tensors += getattr(part, "_tensors", [])
        tensors += [each for function in part._functions() for each in function.function.captured_inputs]
    if sum(each.dtype.size * (each.shape.num_elements() or 0) for each in tensors) > _MOST_IN_GRAPH:
        return all(getattr(part, "_deterministic", "") != "false" for part in parts)
    # Interleaving doesn't keep the option, nor do data sets within functions: the graph has it.
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    try:
        graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph(external_state_policy=policy).numpy())
    except tf.errors.OpError:
        return True
    nodes = itertools.chain(graph.node, *(function.node_def for function in graph.library.function))
    return all(node.attr["deterministic"].s != b"false" for node in nodes)


def one_order_an_epoch(dataset: tf.data.Dataset, within: bool = False) -> bool:
    """Whether each shuffling part of a pipeline starts once in an epoch, at its beginning.

    Args:
        dataset: the pipeline.
        within: whether it is a part that may start later, or more often: of a repeat, or of one of several inputs.
    """
    inputs, kind = dataset._inputs(), type(dataset).__name__
    if within and ("Shuffle" in kind or "Random" in kind):
        return False
    within = within or len(inputs) > 1 or "Repeat" in kind
    return all(one_order_an_epoch(each, within) for each in inputs)


def shard_files(dataset: tf.data.Dataset, workers: int, rank: int) -> tf.data.Dataset:
    """The part of a data set that comes from every `workers`-th file, from file `rank` on.

    Raises:
        UsageError: the data set doesn't start from files, or from fewer files than workers.
    """
    file_policy = 1  # tf.data.experimental.AutoShardPolicy.FILE
    try:
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset), num_workers=workers, index=rank,
            auto_shard_policy=file_policy, num_replicas=workers, **dataset._flat_structure,
        )  # fmt: skip
        sharded = tf.data.experimental.from_variant(variant, dataset.element_spec)
        next(iter(sharded.take(1)), None)
    except (tf.errors.OpError, ValueError) as error:
        raise UsageError(
            f'ShardData("file"): the data set can\'t be split by files over {workers} workers ({error}): it must read '
            'at least as many files as there are workers; or use ShardData("example")'
        ) from None
    return sharded
