"""What a checkpoint holds of a run: its variables, its position, its history and its callbacks' states; to and fro."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from callbacks.run_record import history, journal
from callbacks.run_record.journal import jsonable
from callbacks.run_record.redaction import redact, tell
from loop.backends.base import Backend
from loop.data import Rows
from loop.data.host_random import random_state
from loop.errors import UsageError
from loop.model.variables import (
    all_variables,
    as_tf,
    carried_variables,
    optimizer_variables,
    trainable_variables,
    variable_names,
)
from loop.monitor import fault_injection
from loop.run.progress import Progress
from loop.step.build import BuiltModel

if TYPE_CHECKING:
    from loop.run.run import Run

STREAM = "stream/"
"""The names of iterators' states in a checkpoint begin with this."""
BATCH = "batch/"
"""The names of what a step that wasn't finite was made from begin with this."""
AVERAGES = "average/"
"""The names of moving averages in a checkpoint begin with this, where those of the weights begin with `model/`."""


@dataclasses.dataclass(frozen=True)
class WorkerParts:
    """What a checkpoint has of each worker.

    Attributes:
        workers: the state of its generators and callbacks, as JSON values, by rank.
        streams: the state of its iterator, by name.
    """

    workers: list[dict[str, Any]]
    streams: dict[str, np.ndarray]


def snapshot(run: Run) -> tuple[dict[str, tf.Tensor | np.ndarray], dict[str, Any]]:
    """The run as it stands: its tensors by name, and all else as JSON values; but for `streams` and the history."""
    tensors = {name: run.backend.snapshot(variable) for name, variable in named_variables(run).items()}
    return tensors, {
        "progress": dataclasses.asdict(run.progress),
        "epoch_totals": [jsonable(float(total)) for total in np.atleast_1d(run.epoch.totals)],
        "eval_metrics": jsonable(run.epoch.eval_metrics),
        "evaluated_at": run.epoch.evaluated_at,
        "evaluating": run.epoch.evaluating,
        "epoch_ends": run.epoch.ended,
        "learning_rates": jsonable(run.session.learning_rates),
        "layout": run.step.data.train.layout,
        "run": redact(run.info),
        **({"phase": dataclasses.asdict(run.plan.place)} if run.plan.named else {}),
    }


def history_of(run: Run) -> dict[str, Any]:
    """What a checkpoint says of the history: how much of the journal is its; or, without a journal, all of it."""
    try:
        if run.history_in_journal:
            return {"journal": (run.directory / journal.NAME).stat().st_size}
    except OSError:  # it has been removed
        pass
    return {"history": jsonable(run.history)}


def stored_history(path: Path, state: dict[str, Any]) -> list[history.Row]:
    """The history of a run up to its checkpoint at `path`, and a note where some of it isn't there any more."""
    if "history" in state:  # without a journal; or of an older version
        return [history.as_numbers(row) for row in state["history"]]
    source, done = path.absolute().parent.parent / journal.NAME, Progress(**state["progress"])
    rows = history.until(journal.read_history(source, state["journal"]), done.step)
    if lost := history.missing(rows, done.epoch):
        tell(
            f"note: the history lacks {lost} of the {done.epoch} epochs before the checkpoint {path}: it stands in "
            f"{source}, which doesn't have them. Training goes on exactly",
        )
    return rows


def streams(run: Run) -> dict[str, np.ndarray]:
    """The state of each worker's iterator, or of the chief's where all read the same; nothing for addressed data."""
    source = run.step.data.train
    if source.layout is None:
        state = source.state(run.data.iterator) if run.backend.is_chief else None
        return {} if state is None else {f"{STREAM}00000": state}
    state = source.state(run.data.iterator)
    found = run.backend.gather_bytes(state if state is not None else np.zeros(0, np.uint8))
    # Where one worker's is missing, all count.
    return {f"{STREAM}{rank:05d}": each for rank, each in enumerate(found)} if all(map(len, found)) else {}


def stream_of(run: Run, tensors: dict[str, np.ndarray] | None) -> np.ndarray | None:
    """What this worker's iterator goes on from; only the chief has the tensors. All workers must call it."""
    states = [value for name, value in (tensors or {}).items() if name.startswith(STREAM)]
    there = int(run.backend.exchange(len(states))[0, 0])
    if there not in (1, run.backend.workers):
        return None
    nothing = np.zeros(0, np.uint8)
    all_states = [run.backend.gather_bytes(states[index] if states else nothing)[0] for index in range(there)]
    return all_states[run.backend.rank if there > 1 else 0]


def own(run: Run) -> dict[str, Any]:
    """What is this worker's own: the state of its generators, and of its callbacks."""
    return {
        "random": random_state(),
        "callbacks": {key: json_state(key, callback) for key, callback in run.callbacks.items()},
    }


def packed(rows: Rows, backend: Backend | None) -> dict[str, np.ndarray]:
    """A batch as tensors of a checkpoint, of each worker of `backend` if there is one: serialised, uint8 [n]."""
    leaves = [*tf.nest.flatten(rows.batch), rows.index]
    own = [np.frombuffer(tf.io.serialize_tensor(leaf).numpy(), np.uint8) for leaf in leaves]
    found = [backend.gather_bytes(leaf) if backend else [leaf] for leaf in own]
    return {f"{BATCH}{i:05d}/{rank:05d}": each for i, leaf in enumerate(found) for rank, each in enumerate(leaf)}


def unpacked(tensors: dict[str, np.ndarray], example: Any) -> tuple[Any, tf.Tensor]:
    """The batch that `packed` has made, and the indices of its examples; `example` is a batch of such examples."""
    dtypes = [leaf.dtype for leaf in tf.nest.flatten(example)] + [tf.int64]
    leaves = [
        tf.concat(
            [tf.io.parse_tensor(each.tobytes(), dtype) for name, each in tensors.items() if name.startswith(own)], 0
        )
        for own, dtype in ((f"{BATCH}{i:05d}/", dtype) for i, dtype in enumerate(dtypes))
    ]
    return tf.nest.pack_sequence_as(example, leaves[:-1]), leaves[-1]


def gather(run: Run, fault_point: str | None = None) -> WorkerParts | None:
    """What a checkpoint has of each worker; None on all, where one of them has failed. All workers must call it.

    Args:
        run: the run.
        fault_point: where a test lets this worker fail.
    """
    parts = None
    with run.defer_errors():  # the other workers wait for this one in the collectives below
        if fault_point is not None:
            fault_injection.reached(fault_point, run.backend.rank, run.progress.step)
        parts = own(run)
    workers = run.backend.gather_json(parts)
    states = streams(run)
    return WorkerParts(workers, states) if all(workers) else None


def restore(
    run: Run, tensors: dict[str, np.ndarray] | None, state: dict[str, Any], adopted: Sequence[str] = ()
) -> None:
    """Takes a run back to a snapshot.

    Args:
        run: the run.
        tensors: those of the snapshot; only the chief has them, the others get them by the broadcast.
        state: the manifest of the snapshot.
        adopted: the settings that have changed, and take effect on what was restored.
    """
    if tensors is not None:
        assign(named_variables(run), {name: each for name, each in tensors.items() if not name.startswith(STREAM)})
    workers = state["workers"]
    # Where the number of workers has changed, the state of the chief serves all.
    mine = workers[run.backend.rank if len(workers) == run.backend.workers else 0]
    run.data.restore_random(mine["random"])
    run.progress.restore(state["progress"])
    run.epoch.restore(state)
    if run.plan.named and "phase" in state:
        run.plan.restore(state["phase"])
    if adopted:
        adopt(run, state, adopted)
    for key, callback in run.callbacks.items():
        if key in mine["callbacks"]:
            callback.load_state_dict(decoded(mine["callbacks"][key]))


def adopt(run: Run, state: dict[str, Any], adopted: Sequence[str]) -> None:
    """Gives changed settings, which the user has accepted, their effect on what was restored."""
    run.epoch.clear_totals()  # the epoch's means are those of the steps with the new settings
    if "batch_size" in adopted:
        # At the same example, or up to a batch before it: none is left out.
        old = state["run"]["options"]["batch_size"]
        run.progress.step_in_epoch = run.progress.step_in_epoch * old // run.options["batch_size"]
    optimizers = run.optimizer.values() if isinstance(run.optimizer, dict) else [run.optimizer]
    learning_rates = run.session.learning_rates
    for optimizer, before, now in zip(optimizers, state["learning_rates"], learning_rates, strict=False):
        if now is not None and (before is None or now != float(before)):
            optimizer.learning_rate = now


def json_state(key: str, callback: Any) -> dict[str, Any]:
    """The state of a callback.

    Raises:
        TypeError: it is no JSON; the message names the callback.
    """
    state: dict[str, Any] = encoded(callback.state_dict())
    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{key}.state_dict() must return JSON values: {error}") from None
    return state


def encoded(value: Any) -> Any:
    """JSON values in which floats that aren't finite, which JSON has not, stand as `{"float": "nan"}`."""
    if isinstance(value, dict):
        return {name: encoded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(each) for each in value]
    return {"float": str(float(value))} if isinstance(value, float) and not math.isfinite(value) else value


def decoded(value: Any) -> Any:
    """What `encoded` was given."""
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {name: decoded(each) for name, each in value.items()}
    return [decoded(each) for each in value] if isinstance(value, list) else value


def named_variables_of(built: BuiltModel) -> dict[str, Any]:
    """All variables of a model and its optimizers by the names that they have in a checkpoint."""
    return numbered("model", all_variables(built.model)) | numbered("optimizer", optimizer_variables(built.optimizer))


def named_variables(run: Run) -> dict[str, Any]:
    """All variables of a run by the names that they have in a checkpoint."""
    found = named_variables_of(run.built)
    if run.step.averages.variables:
        # Under the places and names of the weights that they are averages of: see `averaged`.
        places = {id(variable): name for name, variable in found.items()}
        weights = as_tf(trainable_variables(run.model))
        for weight, average in zip(weights, run.step.averages.variables, strict=True):
            found[places[id(weight)].replace("model/", AVERAGES, 1)] = average
    found |= numbered("carried", carried_variables(run.model))
    return found | numbered("scale", run.step.scale.variables if run.step.scale else [])


def averaged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's variables of a checkpoint, with the moving averages of its weights where it has any."""
    model = {name: value for name, value in tensors.items() if name.startswith("model/")}
    averages = {name.replace(AVERAGES, "model/", 1): v for name, v in tensors.items() if name.startswith(AVERAGES)}
    return model | averages


def numbered(kind: str, variables: Any) -> dict[str, Any]:
    """TensorFlow variables by `kind/00000:name`; names repeat between processes of Keras, positions don't."""
    names = variable_names(variables)
    return {f"{kind}/{i:05d}:{name}": v for i, (name, v) in enumerate(zip(names, as_tf(variables), strict=True))}


def assign(variables: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Gives variables their stored values, after checking all of them: nothing is half loaded.

    Raises:
        UsageError: there are more or fewer variables than stored tensors, or one has another shape or dtype.
    """
    for kind in dict.fromkeys(name.partition("/")[0] for name in [*variables, *tensors]):
        own = [name for name in variables if name.startswith(f"{kind}/")]
        stored = [name for name in tensors if name.startswith(f"{kind}/")]
        if len(own) != len(stored):
            raise UsageError(f"the checkpoint has {len(stored)} {kind} variables, but the task builds {len(own)}")
    # By position: the names that Keras gives depend on what else a process has built.
    for (name, variable), (other, value) in zip(variables.items(), tensors.items(), strict=True):
        if tuple(variable.shape) != value.shape or variable.dtype.as_numpy_dtype != value.dtype:
            raise UsageError(
                f"variable {name} is {variable.dtype.name}{list(variable.shape)}, but {other} in the checkpoint is "
                f"{value.dtype.name}{list(value.shape)}: the task builds another model than the one that was saved"
            )
    for variable, value in zip(variables.values(), tensors.values(), strict=True):
        variable.assign(value)


def plain(value: Any) -> Any:
    """A value as JSON has it; what JSON doesn't know becomes text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return jsonable(value)
    # An object's address is another one in each process.
    return value if isinstance(value, str | int | bool | type(None)) else re.sub(r" at 0x[0-9a-f]+", "", str(value))
