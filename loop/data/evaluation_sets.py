"""Several sets of evaluation data: their names, and which of them are asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from callbacks.nearest import nearest
from loop.errors import UsageError
from loop.options import Options
from loop.task import TrainTask


def named(made: Any) -> dict[str, Any]:
    """The evaluation sets by name, of what `eval_data` returned. A single set has the name ""; None isn't a set.

    Raises:
        UsageError: a name that can't be part of a metric's.
    """
    # Anything but a dict is one set. It is checked later, when it is opened.
    if made is None:
        return {}
    if not isinstance(made, Mapping):
        return {"": made}
    for name in made:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise UsageError(
                f"eval_data() has a set of the name {name!r}: give names of letters, digits, _, - and ., such as "
                '{"val": ..., "test": ...}'
            )
    return {name: held_out for name, held_out in made.items() if held_out is not None}


def described(name: str) -> str:
    """An evaluation set, for messages."""
    return f"eval_data()[{name!r}]" if name else "eval_data()"


def prefix(name: str) -> str:
    """What the names of a set's metrics begin with."""
    return f"eval_{name}_" if name else "eval_"


def pace(options: Options, name: str) -> int | str:
    """When a set is evaluated: `epoch`, `never`, or a number of steps."""
    every: int | str | dict[str, int | str] = options["eval_every"]
    return every.get(name, "epoch") if isinstance(every, dict) else every


def check_paces(task: TrainTask, options: Options, names: list[str]) -> None:
    """Refuses an `eval_every` for sets that the task doesn't have.

    Raises:
        UsageError: names such a set, and those that the task has.
    """
    every = options["eval_every"]
    if not isinstance(every, dict) or task.phase is not None:  # each phase may have sets of its own
        return
    if names in ([], [""]):
        raise UsageError(
            f"eval_every={every!r}: {type(task).__name__}.eval_data() returns no dict of several sets: give "
            '"epoch", "never" or a number of steps'
        )
    for name in every:
        if name not in names:
            raise UsageError(f"eval_every={every!r}: eval_data() has no set {name!r}{nearest(name, names)}")
