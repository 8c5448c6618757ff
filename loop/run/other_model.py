"""Checkpoints with another number of variables than the task builds: what they have in common, or why they don't fit.

Before 0.2.0, a weight that layers of a plain tf.Module share was in a checkpoint as often as it is shared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def each_once(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of some tensors that don't come again under the same name, and to the bit. The order stays."""
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
