"""What the graph of a `tf.data` pipeline shows: whether its order is fixed, and how it is split by files."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from loop.errors import UsageError

_MOST_IN_GRAPH = 1 << 26
"""The greatest size of a data set's tensors, in bytes, with which its graph is read: that copies them."""

_NOT_STACKED = (
    "Cannot batch tensors with different shapes",
    "Cannot add tensor to the batch: number of elements does not match",
    "Shapes of all inputs must match",
)
"""What TensorFlow's errors say about examples of different shapes."""

_trained_on: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()
"""The shuffling parts of the pipelines that this process has opened for a training."""


def parts_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The parts that a pipeline is made of, from its end to its inputs."""
    parts = [dataset]
    for part in parts:  # the list grows meanwhile
        parts += part._inputs()
    return parts


def dense(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The pipeline, with the specs of dense tensors for rows of a `tf.RaggedTensor` that are dense themselves."""
    specs = tf.nest.flatten(dataset.element_spec)
    if not any(map(_is_dense_row, specs)):
        return dataset
    # Such a row is a dense tensor already: a map that changes nothing corrects the spec.
    return map_examples(dataset, lambda example: example)


def map_examples(dataset: tf.data.Dataset, change: Callable[[Any], Any]) -> tf.data.Dataset:
    """The pipeline with each example changed. `change` gets an example as a whole, also if it is a tuple."""
    is_tuple = type(dataset.element_spec) is tuple  # tf.data passes the parts of a plain tuple as arguments

    @tf.autograph.experimental.do_not_convert
    def changed(*arguments: Any) -> Any:
        example = arguments if is_tuple else arguments[0]
        return change(example)

    return dataset.map(changed)


def _is_dense_row(spec: tf.TypeSpec) -> bool:
    return isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 0


def stacking_problem(error: Exception) -> UsageError | None:
    """The error with the fix for examples of different shapes, which can't be stacked; None for any other error."""
    text = str(getattr(error, "message", ""))
    # To the end of the line: the rest names nodes of the graph.
    mismatch = re.search(f"({'|'.join(_NOT_STACKED)}).*", text)
    if mismatch:
        shapes = mismatch[0].split(" [Op:")[0].rstrip(". ")
        return UsageError(
            f"the data set's examples have different shapes ({shapes}): return loop.StreamData(dataset, "
            "padding=loop.Padding()), which pads each batch to its longest example and adds a mask; or make all "
            "examples of one shape. If these are batches, add .unbatch()"
        )
    if "say whose masks you want" in text:  # from the check in `PaddedBatches`
        return UsageError(
            "the arrays of an example have different lengths, so that one mask can't serve all: say whose masks you "
            "want, by name or place, as Padding(mask=0) or Padding(mask=[0, 1])"
        )
    return None


def check_spec(dataset: tf.data.Dataset) -> None:
    """Refuses a stream whose examples can't be stacked."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise UsageError(
                f"the data set yields {type(spec).__name__}: only dense tensors can be shared out by rows: make it "
                "one, as by tf.sparse.to_dense, or leave it out, in a map"
            )
        if spec.shape.rank is None:
            raise UsageError(
                "the data set yields tensors of unknown rank: tell it, with tf.ensure_shape(x, [None, ...])"
            )


def one_order(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline yields its examples in the same order each time, as far as its parts show."""
    parts = parts_of(dataset)
    tensors: list[tf.Tensor] = []
    for part in parts:
        if part.options().deterministic is False:
            return False
        tensors += getattr(part, "_tensors", [])
        for function in part._functions():
            tensors += function.function.captured_inputs

    # A data set of large tensors isn't copied into a graph: only its parts are asked.
    bytes_in_graph = sum(map(_bytes_of, tensors))
    if bytes_in_graph > _MOST_IN_GRAPH:
        return all(getattr(part, "_deterministic", "") != "false" for part in parts)

    # The options of parts aren't enough: interleaving and data sets within functions don't keep the option. The graph
    # has it.
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    try:
        graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph(external_state_policy=policy).numpy())
    except tf.errors.OpError:  # a part can't be written as a graph: nothing shows that the order isn't fixed
        return True
    nodes = list(graph.node)
    for function in graph.library.function:
        nodes += function.node_def
    return all(node.attr["deterministic"].s != b"false" for node in nodes)


def _bytes_of(tensor: tf.Tensor) -> int:
    return int(tensor.dtype.size * (tensor.shape.num_elements() or 0))  # 0: of an unknown shape


def one_order_an_epoch(dataset: tf.data.Dataset, restarts: bool = False) -> bool:
    """Whether each shuffling part of a pipeline starts once in an epoch, at its beginning.

    Args:
        dataset: the pipeline, or a part of it.
        restarts: whether this part may start later, more often or less often: within a repeat, as one of several
            inputs, or below a cache, which keeps the order of the first epoch.
    """
    inputs = dataset._inputs()
    name = type(dataset).__name__
    if restarts and re.search("Shuffle|Random", name):
        return False
    # From the end of the pipeline to its start: what stands above a shuffle says how often it begins.
    restarts = restarts or len(inputs) > 1 or re.search("Repeat|Cache|Snapshot", name) is not None
    return all(one_order_an_epoch(part, restarts) for part in inputs)


def warn_of_shuffle_that_goes_on(dataset: tf.data.Dataset, what: str) -> None:
    """Warns if a pipeline, which the method `what` has returned, shuffles by a part that was trained on before."""
    # Each iteration of such an object draws a new seed from the object's own generator, which no checkpoint has.
    # (`None` stands for the default, a new order each time.)
    shuffles = [part for part in parts_of(dataset) if getattr(part, "_reshuffle_each_iteration", False) is not False]
    if _trained_on.intersection(shuffles):
        warnings.warn(
            f"{what} returns a data set that this process, in an earlier training or phase, has shuffled before: its "
            "order goes on from there, so that another run, or a resumed one, has another order. Make the data set, "
            f"from its shuffle on, in {what}",
            stacklevel=2,
        )
    _trained_on.update(shuffles)


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
        next(iter(sharded.take(1)), None)  # too few files show only when the first example is read
    except (tf.errors.OpError, ValueError) as error:
        raise UsageError(
            f'ShardData("file"): the data set can\'t be split by files over {workers} workers ({error}): it must read '
            'at least as many files as there are workers; or use ShardData("example")'
        ) from None
    return sharded
