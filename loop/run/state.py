"""What a checkpoint holds of a run: variables, position, history, callbacks' states; how it is taken and restored."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from callbacks import Callback
from callbacks.run_record import history, journal
from callbacks.run_record.journal import jsonable
from callbacks.run_record.redaction import redact, tell
from loop.checkpoint.array_files import InParts, Json
from loop.errors import UsageError, message_of
from loop.model.variables import (
    all_variables,
    as_tf,
    carried_variables,
    class_names,
    optimizer_variables,
    optimizers_of,
    trainable_variables,
    variable_names,
)
from loop.monitor import fault_injection
from loop.run.other_model import check_order, each_once, other_number
from loop.run.phases import recorded_batch_size
from loop.run.progress import Progress
from loop.step.build import BuiltModel
from loop.step.sharding import SlicedVariable
from loop.task import Model

if TYPE_CHECKING:
    from loop.run.run import Run

Arrays: TypeAlias = dict[str, np.ndarray]
"""The arrays of a checkpoint by name, in order."""

Variable: TypeAlias = tf.Variable | SlicedVariable
"""A variable of a run. If it belongs to a sharded optimizer, each replica holds only a slice."""

STREAM = "stream/"
"""The prefix of iterators' states in a checkpoint."""
AVERAGES = "average/"
"""The prefix of moving averages in a checkpoint, in place of the `model/` of their weights."""


@dataclasses.dataclass(frozen=True)
class WorkerParts:
    """What a checkpoint has of each worker.

    Attributes:
        workers: the state of its generators and callbacks, as JSON values, by rank.
        streams: the state of its iterator, by name.
    """

    workers: list[Json]
    streams: Arrays


def gathered(run: Run, keep: bool) -> Arrays:
    """The whole values of the variables of which each replica has a slice, by name. All workers must call it.

    Without `keep`, this worker doesn't need them, and gets none.
    """
    values = {}
    for name, variable in sliced_variables(run).items():
        value = variable.gathered(run.backend)  # a collective: also on workers that don't keep it
        if keep:
            values[name] = value
    return values


def in_parts(run: Run) -> tuple[dict[str, InParts], dict[str, tf.Tensor | np.ndarray]]:
    """For the variables of which each replica has a slice: their stand-ins, and this worker's slices; by name."""
    places = {}
    part = {}
    for name, variable in sliced_variables(run).items():
        part[name] = variable.own(run.backend)
        elements = part[name].shape[0]
        places[name] = InParts(np.dtype(variable.dtype.as_numpy_dtype), tuple(variable.shape), elements)
    return places, part


def snapshot(
    run: Run, whole: Mapping[str, np.ndarray | InParts]
) -> tuple[dict[str, tf.Tensor | np.ndarray | InParts], Json]:
    """The state of a run: its tensors by name, and JSON values. `streams` and the history aren't in it.

    `whole` is what `gathered` has returned, or the first that `in_parts` has.
    """
    tensors: dict[str, tf.Tensor | np.ndarray | InParts] = {}
    for name, variable in named_variables(run).items():
        tensors[name] = whole[name] if name in whole else run.backend.snapshot(variable)
    rest = {
        "progress": dataclasses.asdict(run.progress),
        "epoch_totals": jsonable(np.atleast_1d(run.epoch.totals).tolist()),
        "replaces_totals": run.epoch.replaced,
        "epoch_metrics": run.step.metric_names(),
        **run.epoch.stored_evaluations(),
        "epoch_ends": run.epoch.ended,
        "optimizers": class_names(run.optimizer),
        "learning_rates": jsonable(run.session.learning_rates),
        "layout": run.step.data.train.layout,
        "run": redact(run.info),
    }
    if run.plan.named:
        rest["phase"] = dataclasses.asdict(run.plan.place)
    return tensors, rest


def history_of(run: Run) -> Json:
    """The history in a checkpoint: the length of the journal, which has it; without a journal, all of it."""
    if run.history_in_journal:
        with contextlib.suppress(OSError):  # the journal has been removed
            return {"journal": (run.directory / journal.NAME).stat().st_size}
    return {"history": jsonable(run.history)}


def stored_history(path: Path, state: Json) -> list[history.Row]:
    """The history of a run up to its checkpoint at `path`; a note is printed if a part of it is lost."""
    if "history" in state:  # of a run without a journal, or of an older version
        return list(map(history.as_numbers, state["history"]))
    source = path.absolute().parent.parent / journal.NAME
    done = Progress(**state["progress"])  # lines after the checkpoint may come from steps that are made again
    rows = history.until(journal.read_history(source, state["journal"]), done.step)
    if lost := history.missing(rows, done.epoch):
        tell(
            f"note: the history lacks {lost} of the {done.epoch} epochs before the checkpoint {path}: it stands in "
            f"{source}, which doesn't have them. Training goes on exactly"
        )
    return rows


def streams(run: Run) -> Arrays:
    """The state of each worker's iterator, or of the chief's if all workers read the same; empty for arrays."""
    source = run.step.data.train
    if source.layout is None:
        state = source.state(run.data.iterator) if run.backend.is_chief else None
        return {} if state is None else {f"{STREAM}00000": state}
    state = source.state(run.data.iterator)
    if state is None:
        state = np.zeros(0, np.uint8)
    states = run.backend.gather_bytes(state)
    # Without the state of one worker, the others' are of no use: a resumed run reads up to its position instead.
    if not all(map(len, states)):
        return {}
    return {f"{STREAM}{rank:05d}": state for rank, state in enumerate(states)}


def stream_of(run: Run, tensors: Arrays | None) -> np.ndarray | None:
    """The state of this worker's iterator in a checkpoint, or None. All workers must call it.

    The tensors of the checkpoint are given on the chief; None on the other workers.
    """
    states, _ = split(tensors or {}, STREAM)
    stored = int(run.backend.exchange(len(states))[0, 0])
    if stored not in (1, run.backend.workers):
        return None
    # One collective for each state, because they differ in length.
    mine = list(states.values()) or stored * [np.zeros(0, np.uint8)]
    all_states = [run.backend.gather_bytes(state)[0] for state in mine]
    return all_states[run.backend.rank if stored > 1 else 0]


def split(tensors: Arrays, prefix: str) -> tuple[Arrays, Arrays]:
    """The tensors whose names begin with a prefix, and the others."""
    chosen = {}
    others = {}
    for name, value in tensors.items():
        if name.startswith(prefix):
            chosen[name] = value
        else:
            others[name] = value
    return chosen, others


def gather(run: Run, fault_point: str | None = None) -> WorkerParts | None:
    """What a checkpoint has of each worker; None on all, if one of them has failed. All workers must call it.

    At `fault_point`, a test may have this worker fail.
    """
    parts = None
    with run.defer_errors():  # the other workers wait for this one in the collectives below
        if fault_point is not None:
            fault_injection.reached(fault_point, run.backend.rank, run.progress.step)
        callbacks = {key: json_state(key, callback) for key, callback in run.callbacks.items()}
        parts = {**run.data.random_states(), "callbacks": callbacks}
    workers = run.backend.gather_json(parts)
    states = streams(run)
    return WorkerParts(workers, states) if all(workers) else None


def restore(run: Run, tensors: Arrays | None, state: Json, adopted: Sequence[str] = ()) -> None:
    """Takes a run back to a snapshot.

    The chief has its tensors; None on the other workers, which get them by a broadcast. `adopted` are the options that
    have changed, and take effect on what was restored.
    """
    if tensors is not None:
        _, values = split(tensors, STREAM)
        assign(named_variables(run), values)
    workers = state["workers"]
    # If the number of workers has changed, all take the chief's state.
    mine = workers[run.backend.rank if len(workers) == run.backend.workers else 0]
    run.data.restore_random(mine)
    run.progress.restore(state["progress"])
    run.epoch.restore(state)
    # If `compute` was changed, the totals are of other values: the epoch's means are those of the steps that follow.
    if "epoch_metrics" in state and state["epoch_metrics"] != run.step.metric_names():
        run.epoch.clear_totals()
    run.epoch.drop_evaluations(run.evaluated_sets)
    if run.plan.named and "phase" in state:
        run.plan.restore(state["phase"])
    if adopted:
        adopt(run, state)
    # Last: a callback may look at the restored run.
    for key, callback in run.callbacks.items():
        if key in mine["callbacks"]:
            try:
                callback.load_state_dict(decoded(mine["callbacks"][key]))
            except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
                raise ValueError(f"the state of the callback {key}: {message_of(error)}") from error


def scatter(run: Run, tensors: Arrays | None) -> None:
    """Gives each replica its slices of what was restored. All workers must call it.

    The tensors of the snapshot are given on the chief; None on the other workers.
    """
    _, values = split(tensors or {}, STREAM)
    # By position, as in `assign`; not strict, since the other workers have no values.
    stored = dict(zip(named_variables(run), values.values(), strict=False))
    for name, variable in sliced_variables(run).items():
        variable.scatter(run.backend, stored.get(name))  # a collective


def adopt(run: Run, state: Json) -> None:
    """Applies options that have changed, which the user has accepted, to what was restored."""
    run.epoch.replace_totals()  # the epoch's means are those of the steps with the new options
    # The sizes of the phase, which may have one of its own. Rounded down to a step of the new size: some examples may
    # come twice, but none is left out.
    old, new = recorded_batch_size(state), run.session.phase_options["batch_size"]
    run.progress.step_in_epoch = run.progress.step_in_epoch * old // new
    steps_per_epoch = run.step.data.train.steps_per_epoch
    # After an epoch's last step, which may have had a short batch, rounding down would repeat examples. Between two
    # epochs, the position is already that of the new one, with no step.
    if run.epoch.ended and run.progress.step_in_epoch and steps_per_epoch is not None:
        run.progress.step_in_epoch = steps_per_epoch
    optimizers = optimizers_of(run.optimizer)
    learning_rates = run.session.learning_rates
    # Only a rate that the task has changed since. Otherwise the restored one stays, which a callback may have changed.
    for optimizer, before, now in zip(optimizers, state["learning_rates"], learning_rates, strict=False):
        if now is not None and (before is None or now != float(before)):
            optimizer.learning_rate = now


def json_state(key: str, callback: Callback) -> Json:
    """The state of a callback.

    Raises:
        TypeError: it isn't JSON; the message names the callback.
    """
    state: Json = encoded(callback.state_dict())
    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{key}.state_dict() must return JSON values: {error}") from None
    return state


def encoded(value: Any) -> Any:
    """JSON values, in which a float that isn't finite, and so no JSON, becomes `{"float": "nan"}`."""
    if isinstance(value, dict):
        return {name: encoded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(encoded, value))
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    return value


def decoded(value: Any) -> Any:
    """The value of which `encoded` has made this one."""
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {name: decoded(item) for name, item in value.items()}
    return list(map(decoded, value)) if isinstance(value, list) else value


def named_variables_of(built: BuiltModel) -> dict[str, Variable]:
    """All variables of a model and its optimizers by the names that they have in a checkpoint."""
    named = numbered("model", all_variables(built.model)) | numbered("optimizer", optimizer_variables(built.optimizer))
    if built.shards is not None:
        for name, variable in named.items():
            named[name] = built.shards.whole(variable)  # unchanged, if it isn't sliced
    return named


def named_variables(run: Run) -> dict[str, Variable]:
    """All variables of a run by the names that they have in a checkpoint."""
    named = named_variables_of(run.built)
    if run.step.averages.variables:
        # Each average has the number and name of its weight: see `averaged`.
        names = {id(variable): name for name, variable in named.items()}
        weights = as_tf(trainable_variables(run.model))
        for index, (weight, average) in enumerate(zip(weights, run.step.averages.variables, strict=True)):
            shards = run.built.shards
            whole = average if shards is None else SlicedVariable(average, shards.slicings[index])
            named[names[id(weight)].replace("model/", AVERAGES, 1)] = whole
    named |= numbered("carried", carried_variables(run.model))
    if run.step.scale:
        named |= numbered("scale", run.step.scale.variables)
    return named


def sliced_variables(run: Run) -> dict[str, SlicedVariable]:
    """The variables of which each replica has a slice, by the names that they have in a checkpoint."""
    return {name: variable for name, variable in named_variables(run).items() if isinstance(variable, SlicedVariable)}


def whole_variables(run: Run) -> dict[str, tf.Variable]:
    """The other variables, which are the same in all replicas, by the names that they have in a checkpoint."""
    sliced = sliced_variables(run)
    return {name: variable for name, variable in named_variables(run).items() if name not in sliced}


def averaged(tensors: Arrays) -> Arrays:
    """The model's variables in a checkpoint, with the moving averages in place of the weights if it has any."""
    model, others = split(tensors, "model/")
    for name, value in others.items():
        if name.startswith(AVERAGES):
            model[name.replace(AVERAGES, "model/", 1)] = value
    return model


def assign_model(model: Model, tensors: Arrays) -> None:
    """Gives a model the variables that `averaged` has returned; see `assign`."""
    assign(numbered("model", all_variables(model)), tensors)


def numbered(kind: str, variables: Sequence[keras.Variable | tf.Variable]) -> dict[str, Variable]:
    """TensorFlow variables by `kind/00000:name`. The number identifies a variable: Keras repeats names."""
    named = zip(variable_names(variables), as_tf(variables), strict=True)
    return {f"{kind}/{index:05d}:{name}": variable for index, (name, variable) in enumerate(named)}


def assign(variables: Mapping[str, Variable], tensors: Arrays) -> None:
    """Gives variables their stored values. All are checked first, so that nothing is half loaded.

    Raises:
        UsageError: there are more or fewer variables than stored tensors, or one has another shape or dtype.
    """
    own = Counter(map(_kind, variables))
    if set(own) == {"model"} and len(tensors) > len(variables):
        once = each_once(tensors)
        if len(once) == len(variables):
            tensors = once  # an older version saved shared weights several times; only training can't use these
    stored = Counter(map(_kind, tensors))
    for kind in own | stored:
        if own[kind] != stored[kind]:
            raise UsageError(other_number(kind, own[kind], split(tensors, f"{kind}/")[0]))
    check_order(variables, tensors)
    # By position: the names that Keras gives depend on what else a process has built.
    for (name, variable), (other, value) in zip(variables.items(), tensors.items(), strict=True):
        # A variable may leave a size open, as shape=[None] does: it takes the value of any size.
        fits = tf.TensorShape(variable.shape).is_compatible_with(value.shape)
        if not fits or variable.dtype.as_numpy_dtype != value.dtype:
            precision = ", or the run has another precision (precision=..., --precision)" if fits else ""
            raise UsageError(
                f"variable {name} is {variable.dtype.name}{list(variable.shape)}, but {other} in the checkpoint is "
                f"{value.dtype.name}{list(value.shape)}: the task builds another model than the one that was saved"
                f"{precision}"
            )
    for variable, value in zip(variables.values(), tensors.values(), strict=True):
        if not isinstance(variable, SlicedVariable):  # of which each replica gets its slice afterwards: `scatter`
            variable.assign(value)


def _kind(name: str) -> str:
    """The kind of a variable, by its name in a checkpoint."""
    return name.partition("/")[0]
