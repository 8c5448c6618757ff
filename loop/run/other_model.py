"""Checkpoints of another model or optimizer than the task builds: what they have in common, or why they don't fit.

Before 0.2.0, a weight that layers of a plain tf.Module share was in a checkpoint as often as it is shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from loop.checkpoint.array_files import Json
from loop.errors import UsageError
from loop.model.variables import class_names

if TYPE_CHECKING:
    from loop.run.session import Session


def each_once(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors in their order, without repetitions: of several with one name and the same bits, the first."""
    once = {}
    known = set()
    for name, value in tensors.items():
        content = (name.partition(":")[2], value.dtype.name, value.shape, value.tobytes())
        if content not in known:
            known.add(content)
            once[name] = value
    return once


def other_number(kind: str, own: int, tensors: Mapping[str, np.ndarray]) -> str:
    """The message for a checkpoint that has more or fewer variables of a kind than the task builds.

    `kind` is "model" or "optimizer", say; `tensors` are those of this kind in the checkpoint, by name.
    """
    problem = f"the checkpoint has {len(tensors)} {kind} variables, but the task builds {own}: "
    if len(tensors) > own == len(each_once(tensors)):
        return (
            f"{problem}it is of a version of tfloop that took weights which layers of a tf.Module share for several "
            "ones, and trained them several times at each step. Go on with that version, or start a new run in "
            "another run directory"
        )
    return f"{problem}give the task that was trained, or another run directory"


def check_order(names: Iterable[str], stored: Iterable[str]) -> None:
    """Refuses a model with the same names of variables in another order: each is given the value at its place.

    Raises:
        UsageError: the order is another one; the message names the first variable.
    """
    pairs = [(own, other) for own, other in zip(names, stored, strict=False) if own.startswith("model/")]
    own_names = [own.partition(":")[2] for own, _ in pairs]
    other_names = [other.partition(":")[2] for _, other in pairs]
    # Other names say nothing: Keras numbers them by what else a process has built.
    if len(set(own_names)) < len(own_names) or set(own_names) != set(other_names):
        return
    for own_name, other_name in zip(own_names, other_names, strict=True):
        if own_name != other_name:
            raise UsageError(
                f"the task builds the variable {own_name} where the checkpoint has {other_name}, and values are given "
                "by order: make layers and variables in the order of the task that was trained"
            )


def optimizer_settings(state: Json, session: Session) -> dict[str, tuple[object, object]]:
    """Class and learning rate of each optimizer, in a checkpoint and as the task sets them now.

    They may be in the task's code alone, so that no field tells of a change. Without this, the restored rate would take
    the place of the new one, and an optimizer would take the slots of another one that has as many.
    """
    optimizer = session.built.optimizer
    names = [f" of {name!r}" for name in optimizer] if isinstance(optimizer, dict) else [""]
    pairs: dict[str, tuple[object, object]] = {}
    # An older version of tfloop has recorded fewer of them.
    for name, before, now in zip(names, state.get("optimizers", []), class_names(optimizer), strict=False):
        pairs[f"the optimizer{name}"] = (before, now)
    for name, old, new in zip(names, state.get("learning_rates", []), session.learning_rates, strict=False):
        pairs[f"the learning rate{name}"] = (_shown_rate(old), _shown_rate(new))
    return pairs


def _shown_rate(rate: float | str | None) -> float | str:
    """A learning rate with the digits that it was written with: it is recorded as that of a float32."""
    if rate is None:
        return "a schedule"
    number = float(str(np.float32(rate)))
    return number if math.isfinite(number) else str(number)
