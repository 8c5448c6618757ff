"""The plan of a sweep: which values it tries, as typed; and the values that the fields of the task can have."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from callbacks.files import read_json
from callbacks.formats import plural
from callbacks.metric_direction import lower_is_better
from callbacks.nearest import nearest
from callbacks.run_record.redaction import HIDDEN, is_secret, mask, remember
from callbacks.types import JsonObject
from loop.commands import command_line, config
from loop.errors import UsageError
from loop.run import trust
from loop.target.fields import Value, set_fields, split, unquoted
from loop.target.task_loader import SHIPPED

SAMPLERS = ("tpe", "random")
PRUNERS = ("none", "median")
DIRECTIONS = ("minimize", "maximize")
MOST_TRIALS = 100_000
"""The greatest number of trials."""
_LARGEST = 2**53
"""The number up to which a float can hold every whole number."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The values from `low` to `high`. They are drawn uniformly; with `log`, uniformly in their logarithm."""

    low: int | float
    high: int | float
    log: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which values are tried, and how."""

    target: str  # the task
    grid: dict[str, str]  # by field, all values to try, as typed
    random: dict[str, str]  # by field, the values to draw from, as typed: `16..256`, `1e-4..1e-1:log`, or `adam,sgd`
    metric: str  # the metric that is optimized
    direction: str  # `minimize` or `maximize`
    sampler: str  # `tpe` or `random`
    pruner: str  # `median` or `none`
    seed: int  # the seed of the values that are drawn
    arguments: list[str]  # options of `tfloop train`
    place: str  # the working directory of the trials

    def __post_init__(self) -> None:
        self._check_choice("sampler", self.sampler, SAMPLERS)
        self._check_choice("pruner", self.pruner, PRUNERS)
        self._check_choice("direction", self.direction, DIRECTIONS)
        if not self.grid and not self.random:
            raise UsageError("give what is to be tried: --grid FIELD=VALUE,VALUE or --random FIELD=LOW..HIGH")

        fixed = {text.partition("=")[0] for text in self.fixed}
        self._check_given_once("--grid", "--random", set(self.grid) & set(self.random))
        self._check_given_once("--set", "--grid or --random", fixed & {*self.grid, *self.random})
        for name, values in (self.grid | self.random).items():
            # Before any value can appear in a message: those of a secret field are masked from now on.
            remember(choices_of(values), name)
            if is_secret(name) and ".." in self.random.get(name, ""):
                raise UsageError(f"--random {name}: a secret is not drawn from a range: give its values, {name}=A,B")

    @staticmethod
    def _check_choice(option: str, value: str, allowed: Sequence[str]) -> None:
        if value not in allowed:
            raise UsageError(f"--{option} {value}: there is no such {option}{nearest(value, allowed)}")

    @staticmethod
    def _check_given_once(one: str, other: str, in_both: set[str]) -> None:
        if in_both:
            raise UsageError(f"{min(in_both)} is in {one} and in {other}: leave one out")

    @property
    def fixed(self) -> list[str]:
        """The fields that don't vary, as typed after `--set`."""
        return [text.removeprefix("--set=") for text in self.arguments if text.startswith("--set=")]

    def combination(self, number: int) -> dict[str, str]:
        """The values of the grid's fields in the trial with this number. The first combination follows the last one."""
        params = {}
        # The last field varies fastest. Trials that were made are known by their numbers: this order must not change.
        for name, values in reversed(self.grid.items()):
            choices = choices_of(values)
            number, index = divmod(number, len(choices))
            params[name] = stand_ins(name, choices)[index]
        return params

    def typed(self, params: Mapping[str, str]) -> dict[str, str]:
        """The values of a trial's fields as typed: with the secrets that `stand_ins` has replaced."""
        typed = dict(params)
        for name, values in (self.grid | self.random).items():
            if name in params and is_secret(name):
                choices = choices_of(values)
                index = stand_ins(name, choices).index(params[name])
                typed[name] = choices[index]
        return typed

    def trials(self, asked: int | None) -> int:
        """How many trials there are to be: `asked`, or one for each combination of the grid."""
        combinations = math.prod(len(choices_of(values)) for values in self.grid.values())
        if asked is None and self.random:
            raise UsageError("--random draws for ever: give --trials N")
        trials = combinations if asked is None else asked
        # All trials are put into the queue at the start: each is a row of the storage.
        if not 1 <= trials <= MOST_TRIALS:
            raise UsageError(f"--trials {trials}: give a whole number from 1 to {MOST_TRIALS:,}")
        if trials > combinations and not self.random:
            most = plural(combinations, "combination")
            raise UsageError(f"--trials {trials}: the grid has only {most}: leave --trials out")
        return trials

    def as_json(self) -> JsonObject:
        """The plan as it is written to disk, without secrets."""
        return dataclasses.asdict(self) | {
            "grid": _without_secrets(self.grid),
            "random": _without_secrets(self.random),
            "arguments": list(map(mask, self.arguments)),
        }

    @property
    def directory(self) -> Path:
        """The default directory of the sweep. The same plan always has the same one."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.target.rpartition(":")[2])[:80]
        # The digest of the plan without secrets: a secret could be guessed from a digest.
        digest = hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]
        return Path("runs") / f"sweep-{name}-{digest}"


def choices_of(text: str) -> list[str]:
    """The values that a text lists, as each is typed after `--set FIELD=`. Quotes around one are not part of it."""
    choices = []
    for part in split(text):
        choice = part
        with contextlib.suppress(ValueError):  # a backslash that JSON doesn't know
            content = unquoted(part.strip())
            if content != part.strip():
                choice = content
        choices.append(choice)
    return choices


def _without_secrets(fields: Mapping[str, str]) -> dict[str, str]:
    texts = dict(fields)
    for name, values in fields.items():
        if is_secret(name):
            texts[name] = ",".join(stand_ins(name, choices_of(values)))
    return texts


def stand_ins(name: str, choices: Sequence[str]) -> list[str]:
    """The values of a field as they are stored and shown. A secret is replaced by its number among them."""
    if not is_secret(name):
        return list(choices)
    # By its number, the value of a trial can be found again in the command, and nowhere else.
    return [f"{HIDDEN}{number}" for number in range(1, len(choices) + 1)]


def direction(metric: str, asked: str | None) -> str:
    """The direction in which the metric gets better: as asked for, or by its name."""
    less = lower_is_better(metric)
    if asked is None and less is None:
        raise UsageError(f"--metric {metric}: the name doesn't say what is better: check it, or give --direction")
    return asked or ("minimize" if less else "maximize")


def is_directory(target: str) -> bool:
    """Whether the TARGET that was typed is a directory, whose sweep is to be continued."""
    if target in SHIPPED:  # as for `train`, whatever lies here under this name
        return False
    with contextlib.suppress(OSError, ValueError):  # such as a text that is too long for a name
        return Path(target).is_dir()
    return False


def reopened(directory: Path, trusted: bool = False) -> tuple[Plan, int]:
    """The plan of a sweep that was begun in this directory, and its number of trials.

    One that another user has begun is accepted only if it is trusted.

    Raises:
        UsageError: the directory has no sweep, or the sweep can't be continued by the directory alone.
    """
    about = read_json(directory / "run.json")
    kept = about.get("sweep")
    try:
        plan = Plan(**kept)  # type: ignore[arg-type]
        trials = int(about["trials"])
    except (TypeError, KeyError, ValueError):
        raise UsageError(
            f"{directory} isn't a directory of a sweep: give a TARGET, file.py:Class for example"
        ) from None
    # Secrets aren't written down, so that only the command itself has them.
    if HIDDEN in json.dumps(kept):
        raise UsageError(f"{directory} doesn't have the secrets of its command: give the whole command again")
    # The directory names code that would be run: another user may have written it.
    if not trusted and not trust.is_own_sweep(directory, kept):
        raise UsageError(
            f"{directory}: you haven't begun this sweep on this machine, and what it names isn't run unasked: give its "
            "command again with --sweep-dir, or --trust if that directory is yours"
        )
    if not Path(plan.place).is_dir():
        raise UsageError(f"{directory} was begun in {plan.place}, which isn't there any more: give the command again")
    return plan, trials


def arguments(
    typed: Mapping[str, object],
    assignments: Sequence[str],
    files: Sequence[Path],
    options: Mapping[str, config.Option],
    swept: Sequence[str],
) -> list[str]:
    """The arguments of `tfloop train` for all trials: what was typed, and what files say; without the fields that vary.

    `options` are those that a file can have, and `swept` the fields that vary.
    """
    # What was typed, and the fields that vary, win over the files.
    winning = [name.replace("_", "-") for name, value in typed.items() if value is not None]
    fields = [text.partition("=")[0] for text in assignments]
    winning += [f"set {field}" for field in (*fields, *swept)]
    from_files = config.arguments(files, options, winning)
    return [*from_files, *command_line.arguments(typed, assignments)]


def assigned(option: str, texts: Sequence[str]) -> dict[str, str]:
    """The values that were typed after `--grid` or `--random`, by field."""
    values_of: dict[str, str] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name.isidentifier() or not all(split(values)):
            form = "lr=1e-3,1e-2" if option == "--grid" else "hidden=16..256, lr=1e-4..1e-1:log or act=relu,tanh"
            raise UsageError(f"{option} {text}: give a field and its values, such as {form}")
        if name in values_of:
            raise UsageError(f"{option} {text}: {name} is there twice: leave one out")
        values_of[name] = values
    return values_of


def space(kind: type, plan: Plan) -> dict[str, list[str] | Range]:
    """The values that are tried, by field; checked against the fields of the task's class.

    Raises:
        UsageError: there is no such field, or it can't have such a value.
    """
    set_fields(kind, plan.fixed)  # only to check them: otherwise each trial would fail by itself
    values: dict[str, list[str] | Range] = {}
    for name, text in plan.grid.items():
        values[name] = _choices(kind, "--grid", name, text)
    for name, text in plan.random.items():
        # Three groups: the two ends, and whether the range is logarithmic.
        span = re.fullmatch(r"(.+?)\.\.(.+?)(:log)?", text)
        values[name] = _range(kind, name, text, span) if span else _choices(kind, "--random", name, text)
    return values


def _choices(kind: type, option: str, name: str, text: str) -> list[str]:
    """The listed values of a field; see `stand_ins`."""
    texts = choices_of(text)
    values = [_field_value(kind, option, name, choice) for choice in texts]
    for index, value in enumerate(values):
        # Compared as values: 1e-3 and 0.001 would be the same trial.
        if value in values[:index]:
            twice, given = ("a value", HIDDEN) if is_secret(name) else (texts[index], text)
            raise UsageError(f"{option} {name}={given}: {twice} is there twice: leave one out")
    return stand_ins(name, texts)


def _field_value(kind: type, option: str, name: str, text: str) -> Value:
    """The value of a field, as the task's class reads it."""
    return set_fields(kind, [f"{name}={text}"], option)[name]


def _range(kind: type, name: str, text: str, span: re.Match[str]) -> Range:
    """The range from which a field's values are drawn; `span` has its ends, and whether it is logarithmic."""
    option = f"--random {name}={text}"
    low = _field_value(kind, "--random", name, span[1])
    high = _field_value(kind, "--random", name, span[2])
    for end in (low, high):
        if not isinstance(end, int | float) or isinstance(end, bool):
            raise UsageError(f"{option}: the field isn't a number: give its values, such as {name}=a,b,c")
    # Not as `low >= high or ...`, which would accept nan: every comparison with it is false.
    if not (low < high and abs(low) <= _LARGEST and abs(high) <= _LARGEST):
        raise UsageError(f"{option}: give LOW..HIGH with LOW < HIGH, of {_LARGEST:.0e} at most")
    log = bool(span[3])
    if log and low <= 0:
        raise UsageError(f"{option}: a logarithm needs LOW > 0")
    # The type decides what is drawn: whole numbers only between two whole numbers.
    if isinstance(low, int) and isinstance(high, int):
        return Range(low, high, log)
    return Range(float(low), float(high), log)
