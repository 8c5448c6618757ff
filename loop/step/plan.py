"""The plan of a compiled step: what is decided once, from the options, the task, the backend and the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from loop.backends.base import Backend
from loop.data import ArraySource, Data, Source, StreamSource
from loop.errors import UsageError
from loop.model.variables import as_tf, trainable_variables, updates_rows
from loop.step import approximations, communication, lookups
from loop.step.batch_norm import batch_norms
from loop.step.build import BuiltModel

BLOCK_STEPS = 50
"""With `compile="xla"`, the greatest number of steps in one program."""
BLOCK_BYTES = 1 << 26
"""The greatest size of all batches of such a program together."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The decisions that hold for every step.

    Attributes:
        dtype: in which losses, weights and sums are added up within a step.
        batch_size: the size of the global batch.
        accumulate: the number of micro-batches in a step.
        local_steps: the number of steps between two averages of the replicas' weights; 1: gradients are reduced.
        adasum: whether gradients are reduced by Adasum instead of a sum.
        compression: the type in which gradients are sent; see `communication`.
        groups: the number of collectives in which they are sent.
        summed_loss: whether the loss is a sum over the batch, which is never divided by the weight.
        divides_objective: whether the objective is divided by the weight before the backward pass, and not each
            gradient after it. A single replica that has the whole batch at once knows the weight before.
        loss_scaled: whether the loss is scaled for float16.
        stops_at_bad_step: whether a step that isn't finite ends the run; otherwise it is skipped.
        clip_norm: the greatest norm of all gradients together.
        clip_value: the greatest absolute value of an element of a gradient.
        row_gradients: the variables whose optimizer takes the rows of a sparse gradient, by index.
        lookups: the variables whose gradients are reduced by lookup, by index, and their kinds; see `lookups`.
        block_steps: the number of steps in one XLA program; 0: steps aren't compiled in blocks.
        may_isolate: whether forward and backward pass may become a graph of their own; see `ForwardPass`.
    """

    dtype: tf.DType
    batch_size: int
    accumulate: int
    local_steps: int
    adasum: bool
    compression: str
    groups: int
    summed_loss: bool
    divides_objective: bool
    loss_scaled: bool
    stops_at_bad_step: bool
    clip_norm: float | None
    clip_value: float | None
    row_gradients: frozenset[int]
    lookups: Mapping[int, str]
    block_steps: int
    may_isolate: bool

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.clip_norm is not None or self.clip_value is not None

    @property
    def divides_gradients(self) -> bool:
        """Whether reduced gradients are divided by the weight, the loss scale, or both."""
        if self.divides_objective or self.adasum:
            return False
        return self.loss_scaled or not self.summed_loss


def make_plan(
    built: BuiltModel, backend: Backend, data: Data, options: Mapping[str, Any], summed_loss: bool
) -> StepPlan:
    """Decides what a step does.

    Args:
        built: the task's model and optimizers.
        backend: the backend.
        data: the sources, sharded.
        options: the options of `fit`.
        summed_loss: whether the loss of the task is a sum over the batch.
    """
    loss_scaled = options["precision"] == "mixed_float16"
    has_whole_batch = backend.replicas == 1 and options["accumulate"] == 1
    has_gpu = bool(tf.config.list_logical_devices("GPU"))
    wide = any(variable.dtype == "float64" for variable in as_tf(trainable_variables(built.model)))
    plan = StepPlan(
        dtype=tf.float64 if wide else tf.float32,
        batch_size=options["batch_size"],
        accumulate=options["accumulate"],
        local_steps=options["local_steps"] if backend.replicas > 1 else 1,
        adasum=options["reduction"] == "adasum" and backend.replicas > 1,
        compression=options["compression"],
        groups=options["groups"],
        summed_loss=summed_loss,
        divides_objective=has_whole_batch and not loss_scaled,
        loss_scaled=loss_scaled,
        stops_at_bad_step=options["on_nonfinite"] == "stop",
        clip_norm=options["clip_norm"],
        clip_value=options["clip_value"],
        row_gradients=frozenset(),
        lookups=_lookups(built, data.train, options) | _gathered(built, options),
        block_steps=0,
        may_isolate=options["compile"] != "xla" and not has_gpu,
    )
    if plan.divides_objective and backend.name == "single" and isinstance(data.train, ArraySource):
        return _faster_plan(plan, built, data.train, options, has_gpu)
    return plan


def _faster_plan(
    plan: StepPlan, built: BuiltModel, source: ArraySource, options: Mapping[str, Any], has_gpu: bool
) -> StepPlan:
    """The plan with what is faster on one device, for arrays."""
    if options["compile"] == "xla":
        return dataclasses.replace(plan, block_steps=_block_steps(source, options["steps_per_call"]))
    # Not on a GPU, where sparse gradients have not been measured.
    if options["compile"] == "graph" and not plan.clips and not has_gpu:
        return dataclasses.replace(plan, row_gradients=_row_gradients(built))
    return plan


def check_plan(built: BuiltModel, backend: Backend, data: Data, options: dict[str, Any], summed_loss: bool) -> None:
    """Refuses options that can't be combined with the backend, the data or another option.

    Raises:
        UsageError: with the fix.
    """
    communication.check(backend, options["compression"])
    backend.check(trainable_variables(built.model), data, options)
    approximations.check(backend, options, data.train, summed_loss)
    own_statistics = backend.own_variables or options["sync_batch_norm"]
    if backend.replicas > 1 and not own_statistics and batch_norms(built.model):
        raise UsageError(
            f"sync_batch_norm=False with backend={backend.name!r}: variables are stored once, so no replica has "
            "statistics of its own; leave it out, or use backend='mirrored'"
        )


def _block_steps(source: ArraySource, steps_per_call: int | str) -> int:
    """The number of steps in one XLA program; 0 if batches differ in shape: a program takes one shape alone."""
    if not source.uniform:
        return 0
    most = steps_per_call if isinstance(steps_per_call, int) else BLOCK_STEPS
    return max(1, min(most, BLOCK_STEPS, BLOCK_BYTES // source.batch_bytes))


def _row_gradients(built: BuiltModel) -> frozenset[int]:
    """The variables whose optimizer takes a sparse gradient as it is, and computes the same bits from it.

    Only a plain step can use sparse gradients. Other replicas, micro-batches and clipping need dense ones, and so do
    optimizers that change all rows, as with momentum. Streams do, too: a step over them may have no gradient at all.
    """
    indices: set[int] = set()
    for optimizer, trained in built.optimizers.values():
        if updates_rows(optimizer):
            indices.update(trained)
    return frozenset(indices)


def _lookups(built: BuiltModel, source: Source, options: Mapping[str, Any]) -> dict[int, str]:
    """The variables whose gradients keep a row for each lookup, by index, and their kinds; see `lookups`."""
    if options["clip_value"] is not None or options["reduction"] == "adasum":
        return {}
    # Each replica must have room for the same number of lookups, in each step: examples must have one shape.
    if isinstance(source, ArraySource):
        uniform = source.uniform
    else:
        assert isinstance(source, StreamSource)
        uniform = all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(source.dataset.element_spec))
    return dict(built.lookups) if uniform else {}


def _gathered(built: BuiltModel, options: Mapping[str, Any]) -> dict[int, str]:
    """The tables whose rows are gathered from all replicas, where that is less than the sum of whole tables."""
    # With any of these, gradients are something else than rows that travel once, as they are.
    usual = {"accumulate": 1, "local_steps": 1, "compression": "none", "reduction": "sum", "compile": "graph"}
    if any(options[name] != value for name, value in usual.items()):
        return {}
    variables = as_tf(trainable_variables(built.model))
    gathered = {}
    for index, rows in built.tables.items():
        if lookups.are_less(variables[index].shape, rows * options["batch_size"]):
            gathered[index] = lookups.GATHERED
    return gathered
