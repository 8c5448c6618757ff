"""The fields of a task as texts: `--set hidden=128`, values in files of options, the space of a sweep.

A text becomes a value of the field's type: bool, int, float, str, `Path`, an `Enum`, a `Literal`, None if the type
allows it, lists and tuples of these, and unions of all of them. Imports no TensorFlow.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import PurePath
from typing import Any, TypeAlias

from callbacks.nearest import nearest
from callbacks.run_record.journal import jsonable
from callbacks.run_record.redaction import HIDDEN, is_secret, remember
from loop.errors import UsageError
from loop.task import defaults

Hint: TypeAlias = Any
"""A type as an annotation has it: a class, a union, a `Literal`, or a list or tuple of types."""
Value: TypeAlias = Any
"""The value of a field."""

_origin: Callable[[Hint], Hint] = typing.get_origin
"""The type without its arguments, such as list for list[int]; None for a type that takes none."""
_BOOLS = {"true": True, "false": False, "1": True, "0": False}
_CLOSING = {"[": "]", "(": ")"}
_ENDS = _CLOSING | {'"': '"', "'": "'"}
"""What ends a part of a text that begins so, and may have commas in it."""
_SHOWN = {type(None): "None", bool: "bool (true or false)", ...: "..."}
"""Types as messages show them; the last one is the second argument of `tuple[int, ...]`."""


def set_fields(kind: type, assignments: Iterable[str], option: str = "--set") -> dict[str, Value]:
    """The values of a task's fields from `key=value` texts, typed by the fields.

    Args:
        kind: the task's class.
        assignments: texts `key=value`, as after `--set`.
        option: the option after which they were typed.

    Raises:
        UsageError: a text that isn't `key=value`, a field that doesn't exist, or a value of another type.
    """
    fields = _names(kind)
    values: dict[str, Value] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{option} {text}: give key=value")
        if name not in fields:
            hint = nearest(name, fields) if fields else "; it has no dataclass fields"
            if name in _names(kind, computed=True):
                raise UsageError(f"{option} {text}: {kind.__name__} computes {name} itself (init=False): leave it out")
            raise UsageError(f"{option} {text}: {kind.__name__} has no field {name!r}{hint}")
        remember(value, name)  # first, so that errors about a secret don't show it
        values[name] = _parse(kind, name, value, option)
    return values


def typed(value: Value) -> str:
    """The value of a field as it is typed; `set_fields` makes it again."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_typed_element, value))}]"
    return str(value)


def restored(kind: type, recorded: Mapping[str, Value], changed: Collection[str] | None = None) -> dict[str, Value]:
    """The values of a task's fields from the JSON values that a run has recorded; without those at their defaults.

    `changed` has the fields that weren't at their defaults; None: the run hasn't recorded that.

    Raises:
        UsageError: the run has a text in place of an object, such as a function.
    """
    hints = _hints(kind)
    known = defaults(kind)
    computed = _names(kind, computed=True)  # which an earlier version has recorded, too
    values = {}
    for name, value in recorded.items():
        if name in computed:
            continue
        if changed is not None:
            if name not in changed and name in known and plain(known[name]) == value:
                continue  # the default itself has the right type, which JSON may not have
            if isinstance(value, str) and not _takes_text(hints.get(name)):
                raise UsageError(
                    f"{kind.__name__}.{name} was {value}: a run records an object of this type as a text alone, and "
                    "can't make it again: in Python, make the task with it, and hand it in with the run directory"
                )
        values[name] = _restored(hints.get(name), value)
    return values


def plain(value: Value) -> Value:
    """A value as JSON; an object that JSON can't hold becomes text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    if isinstance(value, float):
        return jsonable(value)
    if isinstance(value, str | int | None):
        return value
    # Without an object's address, which is another one in each process.
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def split(text: str) -> list[str]:
    """The parts of a text between its commas. A part that starts with a bracket or a quote may have commas within."""
    parts = [""]
    ends = ""  # what ends the brackets and quotes that are open, the innermost last
    for character in text:
        if character == "," and not ends:
            parts.append("")
            continue
        # Within quotes only the closing quote counts: brackets and commas are text.
        in_quotes = ends.endswith(('"', "'"))
        if character == ends[-1:]:
            is_escaped = in_quotes and parts[-1].endswith("\\")
            if not is_escaped:
                ends = ends[:-1]
        # Only these may open anything: elsewhere, brackets and quotes are text, as in `it's`.
        elif character in _ENDS and not in_quotes and (ends or not parts[-1].strip()):
            ends += _ENDS[character]
        parts[-1] += character
    return parts


def _hints(kind: type) -> dict[str, Hint]:
    """The types of a task's fields; of a type that is imported for type checkers alone, its text."""
    with contextlib.suppress(NameError):
        return typing.get_type_hints(kind)
    hints: dict[str, Hint] = {}
    for base in reversed(kind.__mro__):
        for name, annotation in inspect.get_annotations(base).items():
            # A class with this field alone, so that no other one matters.
            alone = type(base.__name__, (), {"__annotations__": {name: annotation}, "__module__": base.__module__})
            try:
                hints |= typing.get_type_hints(alone, localns=dict(vars(base)))
            except NameError:
                hints[name] = annotation
    return hints


def _names(kind: type, computed: bool = False) -> list[str]:
    """The names of a task's fields that can be given; or of those that it computes, which have `init=False`."""
    if not dataclasses.is_dataclass(kind):
        return []
    return [field.name for field in dataclasses.fields(kind) if field.init != computed]


def _parse(kind: type, name: str, text: str, option: str) -> Value:
    """The value of a field from what was typed for it."""
    hint = _hints(kind)[name]
    try:
        return _value(hint, text)
    except ValueError:
        pass
    # As a run has recorded it, the default of a type that can't be typed comes back, too.
    known = defaults(kind)
    if not _can_be_typed(hint) and name in known and typed(plain(known[name])) == text:
        return known[name]
    # Outside of `except`: an error of `int` or `float` quotes the text, which may be a secret.
    shown = HIDDEN if is_secret(name) else text
    if not _can_be_typed(hint):
        raise UsageError(
            f"{option} {name}={shown}: the field is of type {_described(hint)}, which can't be typed on a command "
            "line: make a subclass with another default, or call fit in Python"
        )
    takes_list = any(map(_is_sequence, _alternatives(hint)))
    form = "; a list is typed as A,B or [A,B], an empty one as []" if takes_list else ""
    raise UsageError(f"{option} {name}={shown}: {shown!r} isn't of type {_described(hint)}{form}")


def _alternatives(hint: Hint) -> tuple[Hint, ...]:
    """The types of a union; of any other type, the type itself."""
    is_union = isinstance(hint, types.UnionType) or _origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _value(hint: Hint, text: str) -> Value:
    """A text as a value of this type. A ValueError if it isn't one."""
    has_brackets = text.strip()[:1] in _CLOSING
    # A text with brackets is a list rather than a str; one without is a list only if it is no other type.
    # The sort is stable: among equals, the order of the annotation decides, so `int | str` reads 1 as a number.
    kinds = sorted(_alternatives(hint), key=lambda kind: _is_sequence(kind) != has_brackets)
    if type(None) in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        try:
            return _one(kind, text)
        except (ValueError, KeyError):  # KeyError: of `_BOOLS`
            continue
    raise ValueError


def _one(kind: Hint, text: str) -> Value:
    """A text as a value of a type that isn't a union. A ValueError or a KeyError if it isn't one."""
    if _is_sequence(kind):
        return _sequence(kind, text)
    if _origin(kind) is typing.Literal:
        return _literal(typing.get_args(kind), text)
    if kind is bool:
        return _BOOLS[text.lower()]
    if kind in (int, float, str):
        return kind(text)
    if _is_class(kind, enum.Enum):
        return _member(kind, text)
    if _is_class(kind, PurePath) and text:  # an empty text would become the path "."
        return kind(text)
    raise ValueError


def _sequence(kind: Hint, text: str) -> list[Value] | tuple[Value, ...]:
    """A list typed as `64,32`, `[64,32]` or `(64,32)`; an element with commas or brackets is in double quotes."""
    text = text.strip()
    if not text:
        raise ValueError
    parts = split(text)
    # One part in brackets is the whole list; several parts, as in `[1,2],[3]`, are a list of lists without brackets.
    if len(parts) == 1 and text[0] in _CLOSING:
        if text[-1] != _CLOSING[text[0]]:
            raise ValueError
        content = text[1:-1].strip().removesuffix(",")  # Python writes a tuple of one as (64,)
        parts = split(content) if content else []

    values = []
    for element_type, part in zip(_types(kind, len(parts)), parts, strict=True):
        values.append(_element(element_type, unquoted(part.strip())))
    return values if _origin(kind) is list else tuple(values)


def _element(kind: Hint, text: str) -> Value:
    """An element of a list or tuple; an empty text is one only if texts are allowed."""
    if not text and str not in _alternatives(kind):
        raise ValueError
    return _value(kind, text)


def _types(kind: Hint, count: int) -> list[Hint]:
    """The type of each of `count` elements of a list or tuple. A ValueError if it can't have so many."""
    element_types = typing.get_args(kind)
    if _origin(kind) is not tuple or element_types[-1:] == (...,):
        return [element_types[0]] * count
    if len(element_types) != count:
        raise ValueError
    return list(element_types)


def unquoted(text: str) -> str:
    """A text without the quotes around it."""
    if len(text) < 2 or text[0] != text[-1]:
        return text
    if text[0] == '"':
        return str(json.loads(text))  # as JSON, so that the text may hold escaped quotes
    return text[1:-1] if text[0] == "'" else text


def _typed_element(value: Value) -> str:
    """An element of a list as it is typed: texts in quotes, since they may have commas, and None by that name."""
    is_text = isinstance(value, str | PurePath) and not isinstance(value, enum.Enum)
    return json.dumps(str(value)) if is_text else typed(value)


def _literal(allowed: Iterable[Value], text: str) -> Value:
    """The value of a `Literal` that a text means."""
    for value in allowed:
        # `true`, as for a field of type bool.
        if str(value) == (text.capitalize() if isinstance(value, bool) else text):
            return value
    raise ValueError


def _member(kind: type[enum.Enum], text: str) -> enum.Enum:
    """The member that a text means: by its name, its value, its name in other case, or as a run has recorded it."""
    readings: tuple[Callable[[enum.Enum], bool], ...] = (
        lambda member: member.name == text,
        lambda member: str(member.value) == text,
        lambda member: member.name.lower() == text.lower(),
        lambda member: str(member) == text,
    )
    for is_meant in readings:  # all members by the first reading, before any by the second
        for member in kind:
            if is_meant(member):
                return member
    raise ValueError


def _can_be_typed(kind: Hint) -> bool:
    """Whether values of a type can be typed on a command line."""
    if _is_sequence(kind):
        return all(_can_be_typed(element) for element in typing.get_args(kind) if element is not ...)
    kinds = _alternatives(kind)
    if len(kinds) > 1:
        return any(map(_can_be_typed, kinds))
    is_literal = _origin(kind) is typing.Literal
    return is_literal or kind in (bool, int, float, str) or _is_class(kind, enum.Enum, PurePath)


def _takes_text(hint: Hint) -> bool:
    """Whether a field of a type may have been recorded as a text: its value is one, or can be made of one."""
    if _can_be_typed(hint):
        return True
    for kind in _alternatives(hint):
        base = _origin(kind) or kind
        # What isn't a class, such as `Any` in quotes, may be anything.
        if not isinstance(base, type) or base is Any or issubclass(str, base):
            return True
    return False


def _described(hint: Hint) -> str:
    """A type as messages show it, with its values if it has a fixed set of them."""
    kinds = _alternatives(hint)
    if len(kinds) > 1:
        return " or ".join(map(_described, kinds))
    if hint in _SHOWN:
        return _SHOWN[hint]
    if _origin(hint) is typing.Literal:
        return f"Literal (one of {', '.join(map(str, typing.get_args(hint)))})"
    if _is_sequence(hint):
        elements = ", ".join(map(_described, typing.get_args(hint)))
        return f"{_origin(hint).__name__.lower()}[{elements}]"
    if _is_class(hint, enum.Enum):
        return f"{hint.__name__} (one of {', '.join(member.name for member in hint)})"
    return str(getattr(hint, "__name__", hint))


def _restored(hint: Hint, value: Value) -> Value:
    """A recorded value as the field's type: JSON has no paths, enum members, tuples, or floats that aren't finite."""
    kinds = _alternatives(hint)
    for index, kind in enumerate(kinds):
        # A value that fits no alternative stays as it is: the task's own checks are to refuse it.
        try:
            if isinstance(value, list) and _is_sequence(kind):
                return _restored_sequence(kind, value)
            # The order decides between `Path | str` and `str | Path`, as for what is typed.
            preferred = kinds if kind is float else kinds[:index]
            if _is_recorded_as_text(kind, value, type(value) in preferred):
                return _one(kind, str(value))
        except ValueError:  # perhaps it is one of the other types
            continue
    return value


def _restored_sequence(kind: Hint, values: list[Value]) -> list[Value] | tuple[Value, ...]:
    """A recorded list as the field's type of list or tuple."""
    elements = []
    for element_type, value in zip(_types(kind, len(values)), values, strict=True):
        elements.append(_restored(element_type, value))
    return elements if _origin(kind) is list else tuple(elements)


def _is_recorded_as_text(kind: Hint, value: Value, fits_before: bool) -> bool:
    """Whether a value stands for one of this type, which JSON lacks; `fits_before`: it fits a type before this one."""
    if _is_class(kind, enum.Enum):
        if fits_before:
            return value in map(str, kind)
        return isinstance(value, str | int | float)
    if fits_before or not isinstance(value, str):
        return False
    return kind is float or _is_class(kind, PurePath)


def _is_class(kind: Hint, *classes: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, classes)


def _is_sequence(kind: Hint) -> bool:
    """Whether a type is a list or tuple whose elements have types; those of `typing.List` have none."""
    return _origin(kind) in (list, tuple, collections.abc.Sequence) and bool(typing.get_args(kind))
