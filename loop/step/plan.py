"""The plan of a compiled step: what is decided once, from the options, the task, the backend and the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from loop.backends.base import Backend
from loop.data import ArraySource, Data, Source
from loop.errors import UsageError
from loop.model.variables import as_tf, sums_dtype, trainable_variables, updates_rows, variable_names
from loop.options import DEFAULTS, Options
from loop.step import approximations, communication, hints, lookups
from loop.step.batch_norm import batch_norms
from loop.step.build import BuiltModel

BLOCK_STEPS = 50
"""With `compile="xla"`, the greatest number of steps in one program."""
BLOCK_BYTES = 1 << 26
"""The greatest size of all batches of such a program together, in bytes."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The decisions that hold for every step."""

    dtype: tf.DType  # the type in which losses, weights and sums are added up within a step
    precision: str  # that of the run, a key of `loop.model.precision.PRECISIONS`
    batch_size: int  # the size of the global batch
    accumulate: int  # the number of micro-batches in a step
    local_steps: int  # the number of steps between two averages of the replicas' weights; 1: gradients are reduced
    adasum: bool  # whether gradients are reduced by Adasum instead of a sum
    compression: str  # the type in which gradients are sent; see `communication`
    groups: int  # the number of collectives in which they are sent
    summed_loss: bool  # whether the loss is a sum over the batch, which is never divided by the weight
    # Whether the objective is divided by the weight before the backward pass, and not each gradient after it. A
    # single replica that has the whole batch at once knows the weight before.
    divides_objective: bool
    loss_scaled: bool  # whether the loss is scaled for float16
    stops_at_bad_step: bool  # whether a step that isn't finite ends the run; otherwise it is skipped
    clip_norm: float | None  # the greatest norm of all gradients together
    clip_value: float | None  # the greatest absolute value of an element of a gradient
    # The indices of the variables whose optimizer gets a sparse gradient of the replica as it is.
    row_gradients: frozenset[int]
    # The kind of reduction, by the variable's index, of gradients that keep a row for each lookup; see
    # `loop.step.lookups`.
    lookups: Mapping[int, str]
    block_steps: int  # the number of steps in one XLA program; 0: steps aren't compiled in blocks
    may_isolate: bool  # whether the forward and backward pass may become a graph of its own; see `ForwardPass`

    @property
    def divides_gradients(self) -> bool:
        """Whether reduced gradients are divided by the weight, the loss scale, or both."""
        if self.divides_objective or self.adasum:
            return False
        return self.loss_scaled or not self.summed_loss


def make_plan(built: BuiltModel, backend: Backend, data: Data, options: Options, summed_loss: bool) -> StepPlan:
    """Decides what a step does.

    Args:
        built: the task's model and optimizers.
        backend: the backend.
        data: the sources, sharded.
        options: the options of `fit`.
        summed_loss: whether the loss of the task is a sum over the batch.
    """
    loss_scaled = options["precision"] == "mixed_float16"
    # Only such a replica knows the weight of the whole batch before the backward pass.
    has_whole_batch = backend.replicas == 1 and options["accumulate"] == 1
    plan = StepPlan(
        dtype=sums_dtype(built.model),
        precision=options["precision"],
        batch_size=options["batch_size"],
        accumulate=options["accumulate"],
        local_steps=options["local_steps"] if backend.replicas > 1 else 1,
        adasum=options["reduction"] == "adasum" and backend.replicas > 1,
        compression=options["compression"],
        groups=options["groups"],
        summed_loss=summed_loss,
        # `LossScale` follows the gradients of a sum over the batch, with one replica as with several.
        divides_objective=has_whole_batch and not loss_scaled,
        loss_scaled=loss_scaled,
        stops_at_bad_step=options["on_nonfinite"] == "stop",
        clip_norm=options["clip_norm"],
        clip_value=options["clip_value"],
        row_gradients=frozenset(),
        lookups=_lookups(built, data.train, options) | _gathered(built, options),
        block_steps=0,
        may_isolate=options["compile"] != "xla" and not _has_gpu(),  # oneDNN replaces operations of the CPU alone
    )
    # Both ways need the whole batch in one replica, without micro-batches; and arrays, since a step over a stream may
    # have no rows, and then no gradient.
    if plan.divides_objective and backend.name == "single" and isinstance(data.train, ArraySource):
        return _faster_plan(plan, built, data.train, options)
    return plan


def _faster_plan(plan: StepPlan, built: BuiltModel, source: ArraySource, options: Options) -> StepPlan:
    """Adds to the plan what makes steps over arrays faster on one device."""
    if options["compile"] == "xla":
        return dataclasses.replace(plan, block_steps=_block_steps(source, options["steps_per_call"]))
    return dataclasses.replace(plan, row_gradients=_row_gradients(built, options))


def check_plan(built: BuiltModel, backend: Backend, data: Data, options: Options, summed_loss: bool) -> None:
    """Refuses options that can't be combined with the backend, the data or another option.

    Raises:
        UsageError: with the fix.
    """
    communication.check(backend, options["compression"])
    backend.check(trainable_variables(built.model), data, options)
    approximations.check(backend, options, data.train, summed_loss)
    _check_replacing(built, backend, options)
    if options["precision"] != "mixed_float16":
        hints.warn_of_unscaled(built.model)
    own_statistics = backend.own_variables or options["sync_batch_norm"]
    if backend.replicas > 1 and not own_statistics and batch_norms(built.model):
        raise UsageError(
            f"sync_batch_norm=False with backend={backend.name!r}: variables are stored once, so no replica has "
            "statistics of its own; leave it out, or use backend='mirrored'"
        )


def _check_replacing(built: BuiltModel, backend: Backend, options: Options) -> None:
    """Refuses what would change gradients that aren't gradients, but the new values of their variables (float8)."""
    variables = trainable_variables(built.model)
    replaced = [variable for variable in variables if getattr(variable, "overwrite_with_gradient", False)]
    if not replaced:
        return
    changes = [f"{backend.replicas} replicas"] if backend.replicas > 1 else []
    for name in ("accumulate", "clip_norm", "clip_value"):
        if options[name] != DEFAULTS[name]:
            changes.append(f"{name}={options[name]}")
    if options["precision"] == "mixed_float16":
        changes.append("precision='mixed_float16'")
    if changes:
        raise UsageError(
            f"{' and '.join(changes)}: the gradient of {variable_names(replaced)[0]} is its new value (float8), which "
            "must not be added up, divided or clipped: train on one replica, without accumulate, clip_norm, clip_value "
            "and mixed_float16; clipnorm and global_clipnorm of a Keras optimizer leave such variables alone"
        )


def _block_steps(source: ArraySource, steps_per_call: int | str) -> int:
    """The number of steps in one XLA program; 0 if batches differ in shape, since a program is for one shape only."""
    if not source.uniform:
        return 0
    limit = steps_per_call if isinstance(steps_per_call, int) else BLOCK_STEPS
    # At least 1: a single batch may be larger than `BLOCK_BYTES`.
    return max(1, min(limit, BLOCK_STEPS, BLOCK_BYTES // source.batch_bytes))


def _row_gradients(built: BuiltModel, options: Options) -> frozenset[int]:
    """The variables whose optimizer computes the same bits from a gradient of rows, each once, as from a dense one.

    An optimizer that changes all rows, such as one with momentum, needs a dense gradient. So does clipping.
    """
    # Not on a GPU, where sparse gradients have not been measured.
    if options["clip_norm"] is not None or options["clip_value"] is not None or _has_gpu():
        return frozenset()
    indices: set[int] = set()
    for optimizer, trained in built.optimizers.values():
        if updates_rows(optimizer):
            indices.update(trained)
    return frozenset(indices)


def _lookups(built: BuiltModel, source: Source, options: Options) -> dict[int, str]:
    """The variables for which the task asks that gradients keep a row for each lookup; see `StepPlan.lookups`."""
    # Clipping by value and Adasum are defined on the sum of a row's entries, so they need dense gradients.
    if options["clip_value"] is not None or options["reduction"] == "adasum":
        return {}
    # Each replica sends the same number of lookups in each step, so all examples must have one shape.
    return dict(built.lookups) if source.uniform else {}


def _gathered(built: BuiltModel, options: Options) -> dict[int, str]:
    """The tables whose rows are gathered from all replicas, because that sends less than a sum of whole tables."""
    # With another value of one of these options, rows are not sent once a step, as they are.
    required = {"accumulate": 1, "local_steps": 1, "compression": "none", "reduction": "sum", "compile": "graph"}
    for name, value in required.items():
        if options[name] != value:
            return {}
    variables = as_tf(trainable_variables(built.model))
    # An optimizer that holds a part of each variable alone gets its part of a dense gradient.
    sparse = _row_gradients(built, options) if built.shards is None else ()
    gathered = {}
    for index, rows_per_example in built.tables.items():
        if lookups.are_less(variables[index].shape, rows_per_example * options["batch_size"]):
            gathered[index] = lookups.GATHERED_ROWS if index in sparse else lookups.GATHERED
    return gathered


def _has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))
