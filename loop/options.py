"""The options of `fit`: one record each, from which the defaults, the checks and what a resumed run keeps are derived.

Imports no TensorFlow, so that errors are reported at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from callbacks.arguments import is_whole, plain_numbers
from callbacks.nearest import nearest
from loop.errors import UsageError

Options: TypeAlias = dict[str, Any]
"""The options of `fit` by name, each of the type that its argument has."""

Rule: TypeAlias = Callable[[object], bool]
"""Whether a value, which may have been typed or loaded from a file, is valid."""

BACKENDS = ("auto", "single", "mirrored", "central", "multiworker", "horovod", "parameter_server", "tpu")
"""The backends of tfloop itself; see `loop.launch.plugins` for others."""

COMMUNICATION = {"multiworker": ("ring", "nccl"), "mirrored": ("nccl", "hierarchical", "one-device")}
"""The values of `communication` other than `auto`, by backend; other backends have no choice."""

PLUGIN_GROUP = "tfloop.backends"
"""The entry-point group of backends of other packages."""

PRECISIONS = ("float32", "float64", "bfloat16", "mixed_float16")
"""The values of `precision`; see `loop.model.precision`."""

LARGEST = 2**53
"""All numbers are smaller: steps and examples are counted in 64 bits, and multiplied with each other."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of `fit`."""

    name: str  # the argument's name
    default: object  # its value if neither the caller nor the task gives one
    is_valid: Rule  # whether a value is valid
    fix: str  # what to give instead of an invalid value
    is_kept: bool = False  # whether a resumed run must keep it, since another value would make it a different run

    def check(self, value: object) -> None:
        """Refuses an invalid value.

        Raises:
            UsageError: names the option, the value, and what to give instead.
        """
        if isinstance(value, int) and value >= LARGEST:  # `repr` would print all its digits
            raise UsageError(f"{self.name}={reprlib.repr(value)}: give a smaller number")
        if not self.is_valid(value):
            raise UsageError(f"{self.name}={value!r}: {self.fix}")


class HasDefaults(Protocol):
    """What the options need of a task. This file stands below `TrainTask`, which has it."""

    defaults: ClassVar[Mapping[str, Any]]


def _is_int(least: int, *others: object, most: float = math.inf) -> Rule:
    return lambda value: value in others or is_whole(value, least, most)


_is_pace = _is_int(1, "epoch", "never")


def _is_eval_every(value: object) -> bool:
    paces = list(value.values()) if isinstance(value, dict) else [value]
    return bool(paces) and all(map(_is_pace, paces))


def _is_one_of(*values: object) -> Rule:
    # The type is compared too, since 1 equals True.
    return lambda value: isinstance(value, type(values[0])) and value in values


def _is_backend(value: object) -> bool:
    return isinstance(value, str) and (value in BACKENDS or value in plugin_entry_points())


def plugin_entry_points() -> dict[str, EntryPoint]:
    """The installed backends of other packages, by their names for `--backend`."""
    # None is loaded: a plug-in may import TensorFlow, and a broken one must not break the others.
    plugins = sorted(entry_points(group=PLUGIN_GROUP), key=lambda plugin: plugin.name)
    return {plugin.name: plugin for plugin in plugins}


def _is_positive(below: float = math.inf) -> Rule:
    def rule(value: object) -> bool:
        if value is None or isinstance(value, bool):
            return value is None
        return isinstance(value, int | float) and 0 < value < below

    return rule


def _is_path(value: object) -> bool:
    return isinstance(value, str | Path)


def _is_span(value: object) -> bool:
    if not isinstance(value, str):
        return value is None
    span = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", value, re.ASCII)  # else `\d` matches digits of all scripts
    return span is not None and int(span[1]) <= int(span[2])


_SIZE = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt]i?b)\s*", re.ASCII | re.IGNORECASE)
_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def size_in_bytes(value: object) -> float | None:
    """The bytes of a size such as `64MB`; None if the value isn't a size, or is 0."""
    size = _SIZE.fullmatch(str(value))
    if size is None:
        return None
    return float(size[1]) * _UNITS[size[2].lower()] or None  # None for 0


def _is_remat(value: object) -> bool:
    names = value.split(",") if isinstance(value, str) else value  # "full" or a size passes as the name of a layer
    if not isinstance(names, list | tuple):
        return value is None
    return bool(names) and all(map(_is_layer_name, names))


def _is_layer_name(name: object) -> bool:
    if not isinstance(name, str) or not name.strip():
        return False
    return _SIZE.fullmatch(name) is None or size_in_bytes(name) is not None  # no layer is named `0MB`


def check_communication(backend: str, communication: str) -> None:
    """Refuses a way of communication that the backend doesn't have.

    Raises:
        UsageError: which it has instead, or which backend has it.
    """
    if communication in ("auto", *COMMUNICATION.get(backend, ())):
        return
    fix = f"give auto, {', '.join(COMMUNICATION[backend])}" if backend in COMMUNICATION else "leave it out"
    others = [name for name, ways in COMMUNICATION.items() if communication in ways]
    if others:
        fix += f", or use backend={' or '.join(map(repr, others))}"
    raise UsageError(f"communication={communication!r} with backend={backend!r}: {fix}")


def read_partition(text: str) -> tuple[str, int]:
    """How the variables of parameter servers are cut: `fixed` with the number of shards, or `min` or `max` with a size.

    Raises:
        UsageError: it has another form, or the number can't be one of shards or bytes.
    """
    kind, _, value = text.partition(":")
    if re.fullmatch(r"\d{1,15}", value, re.ASCII):
        number = int(value)
    else:  # only a size may have a unit
        number = int(size_in_bytes(value) or 0) if kind != "fixed" else 0
    if kind not in ("fixed", "min", "max") or number < 1:
        raise UsageError(
            f"partition={text!r}: give fixed:N shards, or min:SIZE or max:SIZE of a shard, such as min:1MB"
        )
    return kind, number


_IS_FLAG = _is_one_of(True, False)

OPTIONS = (
    Option("epochs", 1, _is_int(1), "give a whole number >= 1"),
    Option("steps", None, _is_int(1, None), "give a whole number >= 1"),
    Option(
        "batch_size", 32, _is_int(1), "the global batch must hold at least 1 example: give a whole number >= 1",
        is_kept=True,
    ),
    Option(
        "backend", "auto", _is_backend,
        f"give one of {', '.join(BACKENDS)}, or the name of a plug-in (tfloop doctor lists them)",
    ),
    Option("resume", "auto", _is_path, 'give "auto", "never" or the path of a checkpoint'),
    Option("seed", 0, _is_int(0, most=2**31 - 1), "give a whole number from 0 to 2147483647", is_kept=True),
    Option("shuffle", True, _IS_FLAG, "give True or False", is_kept=True),
    Option(
        "precision", "float32", _is_one_of(*PRECISIONS), "give float32, float64, bfloat16 or mixed_float16",
        is_kept=True,
    ),
    Option("accumulate", 1, _is_int(1), "give a whole number >= 1 of micro-batches", is_kept=True),
    Option("compression", "none", _is_one_of("none", "fp16", "bf16"), "give none, fp16 or bf16", is_kept=True),
    Option("groups", 1, _is_int(1), "give a whole number >= 1 of collectives"),
    Option("reduction", "sum", _is_one_of("sum", "adasum"), "give sum or adasum", is_kept=True),
    Option("local_steps", 1, _is_int(1), "give a whole number >= 1 of steps between two averages", is_kept=True),
    Option("clip_norm", None, _is_positive(), "give a number > 0, or None for no clipping", is_kept=True),
    Option("clip_value", None, _is_positive(), "give a number > 0, or None for no clipping", is_kept=True),
    Option("on_nonfinite", "stop", _is_one_of("stop", "skip"), "give stop or skip", is_kept=True),
    Option("sync_batch_norm", True, _IS_FLAG, "give True or False", is_kept=True),
    Option("shard_optimizer", False, _IS_FLAG, "give True or False"),
    Option(
        "ema", None, _is_positive(below=1), "give the decay of the moving average, such as 0.999, or None for none",
        is_kept=True,
    ),
    Option(
        "remat", None, _is_remat,
        'give "full", a size such as "64MB", a list of layers\' names, or None to remember everything',
    ),
    Option("steps_per_call", "auto", _is_int(1, "auto"), 'give "auto" or a whole number >= 1'),
    Option("compile", "graph", _is_one_of("graph", "xla", "auto"), "give graph, xla or auto"),
    Option("prefetch", 2, _is_int(1, "auto"), 'give "auto" or a whole number >= 1 of batches'),
    Option(
        "eval_every", "epoch", _is_eval_every,
        'give "epoch", "never" or a number of steps >= 1; or one of these for each evaluation set, by name',
    ),
    Option("drop_remainder", False, _IS_FLAG, "give True or False", is_kept=True),
    Option("stall_timeout", 300.0, _is_positive(), "give a number of seconds > 0"),
    Option("profile", None, _is_span, "give the first and the last step to trace, such as 10:20; steps count from 1"),
    Option("accept_changes", False, _IS_FLAG, "give True or False"),
    Option(
        "overfit", None, _is_int(1, None), "give a whole number >= 1 of global batches, or None for all data",
        is_kept=True,
    ),
    Option("keep", "last", _is_one_of("last", "best"), "give last or best"),
)  # fmt: skip
"""The options of `fit` that a task may have defaults for."""

DEFAULTS: Options = {option.name: option.default for option in OPTIONS}
"""The default of each option."""

_EXCLUSIVE = (
    ("clip_norm", "clip_value"),
    # Replicas that make steps of their own need all of the optimizer's state.
    ("shard_optimizer", "local_steps"),
    ("shard_optimizer", "reduction"),
)
"""Pairs of options of which at most one may differ from its default."""

KEPT = tuple(option.name for option in OPTIONS if option.is_kept)
"""The options that a resumed run must keep."""


def with_defaults(task: HasDefaults | None, given: Mapping[str, object]) -> Options:
    """The options of a run: the given values (not None), else the task's own defaults, else ours; all are checked.

    Raises:
        UsageError: an option that doesn't exist, or an invalid value.
    """
    own = getattr(task, "defaults", {})
    if not isinstance(own, Mapping):
        raise UsageError(f"{type(task).__name__}.defaults is {own!r:.60}: give a dict, such as {{'epochs': 5}}")
    own = dict(own)
    for name in own:
        if name not in DEFAULTS:
            raise UsageError(
                f"{type(task).__name__}.defaults has {name!r}: fit has no such option{nearest(name, DEFAULTS)}"
            )
    passed = {name: value for name, value in given.items() if value is not None}

    phases = phases_of(task)
    # Before the values are merged: a task's own length isn't a mistake beside one that the caller gives.
    _refuse_two_lengths(task, phases, own, passed)
    # What the caller gives wins over what the task gives in its place.
    for name, other in (("epochs", "steps"), ("clip_norm", "clip_value"), ("clip_value", "clip_norm")):
        if name in passed:
            own.pop(other, None)
    options = {**DEFAULTS, **own, **passed}
    if options["overfit"] is not None:
        # A few batches are to be memorized: the task's own default for shuffle doesn't count.
        options["shuffle"] = passed.get("shuffle", False)
    for option in OPTIONS:
        options[option.name] = plain_numbers(options[option.name])
        option.check(options[option.name])
    _refuse_exclusive(options)
    return options | _lengths(phases)


def _refuse_exclusive(options: Options) -> None:
    for one, other in _EXCLUSIVE:
        if options[one] != DEFAULTS[one] and options[other] != DEFAULTS[other]:
            raise UsageError(f"{one}={options[one]!r} and {other}={options[other]!r}: give one of the two")


def _refuse_two_lengths(
    task: object, phases: list[Phase], own: Mapping[str, object], passed: Mapping[str, object]
) -> None:
    """Refuses a length in addition to that of the phases, and epochs in addition to steps."""
    given = {**own, **passed}
    for name in ("epochs", "steps"):
        if phases and name in given:
            names = ", ".join(phase.name for phase in phases)
            raise UsageError(
                f"{name}={given[name]}: {type(task).__name__} has phases "
                f"({names}), which say how long each is: leave {name} out"
            )
    if "epochs" in passed and "steps" in passed:
        raise UsageError(f"epochs={passed['epochs']} and steps={passed['steps']}: give one of the two")


def _lengths(phases: list[Phase]) -> Options:
    """The options for the length of a run of these phases: None if it isn't known; {} without phases."""
    lengths: Options = {}
    for unit in ("epochs", "steps") if phases else ():
        of_phases = [getattr(phase, unit) for phase in phases]
        lengths[unit] = None if None in of_phases else sum(of_phases)  # None: a phase counts in the other unit
    return lengths


@dataclasses.dataclass(frozen=True)
class Phase:
    """One part of a training: for example, first of the head, then of all layers. See `TrainTask.phases`.

    Attributes:
        name: its name in the task, the journal and messages.
        epochs: its length in epochs.
        steps: its length in steps instead.
        batch_size: its global batch; None: that of the run.
    """

    name: str
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size"):
            object.__setattr__(self, name, plain_numbers(getattr(self, name)))


def phases_of(task: object) -> list[Phase]:
    """The phases of a task, checked; [] if it has none.

    Raises:
        UsageError: an object that isn't a phase, two phases of one name, an invalid or missing length.
    """
    method = getattr(task, "phases", None)
    task_name = type(task).__name__
    phases = method() if callable(method) else []  # else the task has a field of that name
    if not isinstance(phases, list | tuple) or not all(isinstance(phase, Phase) for phase in phases):
        raise UsageError(
            f"{task_name}.phases() returned {phases!r:.99}: return a list of loop.Phase, such as "
            '[Phase("head", epochs=3)]'
        )
    names = [phase.name for phase in phases]
    for phase in phases:
        _check_phase(task_name, phase, names)

    # `fit` sets `task.phase`, so that a hyperparameter of that name would be lost.
    fields = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
    if phases and "phase" in [field.name for field in fields]:
        raise UsageError(
            f"{task_name} has phases(), and a field named phase, which is where the phase stands: rename it"
        )
    return list(phases)


def _check_phase(task_name: str, phase: Phase, names: list[str]) -> None:
    """Refuses an invalid phase."""
    what = f"{task_name}.phases(): Phase({phase.name!r})"
    if not isinstance(phase.name, str) or not phase.name:
        raise UsageError(f"{what}: give it a name")
    if names.count(phase.name) > 1:
        raise UsageError(f"{what} is there twice: give each a name of its own")
    if (phase.epochs is None) == (phase.steps is None):
        raise UsageError(f"{what}: give its length, as epochs=N or as steps=N")
    for name in ("epochs", "steps", "batch_size"):
        value = getattr(phase, name)
        if value is not None and not is_whole(value, 1):
            raise UsageError(f"{what}: {name}={value!r}: give a whole number >= 1")
