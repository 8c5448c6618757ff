"""The fields of a task as they are typed: `--set hidden=128`, values in files of options, the space of a sweep.

A text becomes a value of the field's type: bool, int, float, str, `Path`, an `Enum`, a `Literal`, None where the type
allows it, lists and tuples of these, and unions of all of them. Imports no TensorFlow.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from callbacks.nearest import nearest
from callbacks.run_record.redaction import HIDDEN, is_secret, remember
from loop.errors import UsageError

_BOOLS = {"true": True, "false": False, "1": True, "0": False}
_CLOSING = {"[": "]", "(": ")"}


def set_fields(kind: type, assignments: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """The values of a task's fields from `key=value` texts, typed by the fields.

    Args:
        kind: the task's class.
        assignments: texts `key=value`, as after `--set`.
        option: behind which they were typed.

    Raises:
        UsageError: a text that is no assignment, a field that doesn't exist, or a value of another type.
    """
    fields = _names(kind)
    values: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{option} {text}: give key=value")
        if name not in fields:
            hint = nearest(name, fields) if fields else "; it has no dataclass fields"
            raise UsageError(f"{option} {text}: {kind.__name__} has no field {name!r}{hint}")
        remember(value, name)
        values[name] = _parse(typing.get_type_hints(kind)[name], name, value, option)
    return values


def restored(kind: type, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a task's fields from the JSON values that a run has recorded of them."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # a type that is only there for type checkers
        return dict(recorded)
    return {name: _restored(hints.get(name), value) for name, value in recorded.items()}


def split(text: str) -> list[str]:
    """The parts of a text between its commas; those within brackets or quotes that a part begins with don't count."""
    parts, part = [], ""
    open_, quote = "", ""
    for character in text:
        if quote:
            quote = "" if character == quote and not part.endswith("\\") else quote
        elif character == "," and not open_:
            parts.append(part)
            part = ""
            continue
        elif character in "\"'" and (open_ or not part.strip()):
            quote = character
        elif character in _CLOSING and (open_ or not part.strip()):
            open_ += _CLOSING[character]
        elif open_.endswith(character) and open_:
            open_ = open_[:-1]
        part += character
    return [*parts, part]


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _parse(hint: Any, name: str, text: str, option: str) -> Any:
    try:
        return _value(hint, text)
    except ValueError:
        pass
    shown = HIDDEN if is_secret(name) else text
    if not any(map(_can_be_typed, _alternatives(hint))):
        raise UsageError(
            f"{option} {name}={shown}: the field is of type {_said(hint)}, which can't be typed on a command line"
        )
    several = any(_is_sequence(each) for each in _alternatives(hint))
    form = "; a list is typed as A,B or [A,B], an empty one as []" if several else ""
    raise UsageError(f"{option} {name}={shown}: {shown!r} is no {_said(hint)}{form}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union; of all else, the type itself."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def _value(hint: Any, text: str) -> Any:
    """A text as a value of this type. ValueError if it is none."""
    kinds = _alternatives(hint)
    bracketed = text.strip()[:1] in _CLOSING
    # What has brackets is a list before it is a text; what has none is a list only if it is nothing else.
    kinds = tuple(sorted(kinds, key=lambda each: (_is_sequence(each)) != bracketed))
    if type(None) in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        try:
            return _one(kind, text)
        except (ValueError, KeyError):
            continue
    raise ValueError


def _one(kind: Any, text: str) -> Any:
    origin = typing.get_origin(kind)
    if _is_sequence(kind):
        return _sequence(kind, text)
    if origin is typing.Literal:
        return _literal(typing.get_args(kind), text)
    if kind is bool:
        return _BOOLS[text.lower()]
    if kind in (int, float, str):
        return kind(text)
    if _is_class(kind, enum.Enum):
        return _member(kind, text)
    if _is_class(kind, PurePath) and text:
        return kind(text)
    raise ValueError


def _sequence(kind: Any, text: str) -> list[Any] | tuple[Any, ...]:
    """`64,32`, `[64,32]` or `(64,32)`; texts with commas or brackets in them stand in double quotes."""
    text = text.strip()
    if not text:
        raise ValueError
    if text[:1] in _CLOSING and len(split(text)) == 1:
        if text[-1:] != _CLOSING[text[0]]:
            raise ValueError
        text = text[1:-1].strip().removesuffix(",")
        parts = split(text) if text else []
    else:
        parts = split(text)
    texts = [_unquoted(part.strip()) for part in parts]
    values = [_element(of, each) for of, each in zip(_types(kind, len(texts)), texts, strict=True)]
    return values if typing.get_origin(kind) is list else tuple(values)


def _element(kind: Any, text: str) -> Any:
    if not text and str not in _alternatives(kind):
        raise ValueError
    return _value(kind, text)


def _types(kind: Any, count: int) -> list[Any]:
    """The types that so many elements of a list or tuple have. ValueError if it can't have so many."""
    of = typing.get_args(kind)
    if typing.get_origin(kind) is not tuple or of[-1:] == (...,):
        return [of[0]] * count
    if len(of) != count:
        raise ValueError
    return list(of)


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return str(json.loads(text))
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text


def _literal(allowed: Iterable[Any], text: str) -> Any:
    for each in allowed:
        if str(each) == text or (isinstance(each, bool) and str(each).lower() == text.lower()):
            return each
    raise ValueError


def _member(kind: type[enum.Enum], text: str) -> enum.Enum:
    """A member by its name, or by its value."""
    members = list(kind)
    for matches in (
        lambda each: each.name == text,
        lambda each: str(each.value) == text,
        lambda each: each.name.lower() == text.lower(),
        lambda each: str(each) == text,  # as a run has recorded it
    ):
        for each in members:
            if matches(each):
                return each
    raise ValueError


def _can_be_typed(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if _is_sequence(kind):
        return all(_can_be_typed(each) for each in typing.get_args(kind) if each is not ...)
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        return any(map(_can_be_typed, typing.get_args(kind)))
    return origin is typing.Literal or kind in (bool, int, float, str) or _is_class(kind, enum.Enum, PurePath)


def _said(hint: Any) -> str:
    """A type as messages show it: with all that may be typed, where that is a list."""
    kinds = _alternatives(hint)
    if len(kinds) > 1:
        return " or ".join(map(_said, kinds))
    if hint is type(None):
        return "None"
    if typing.get_origin(hint) is typing.Literal:
        return f"Literal (one of {', '.join(map(str, typing.get_args(hint)))})"
    if _is_sequence(hint):
        of = ", ".join("..." if each is ... else _said(each) for each in typing.get_args(hint))
        return f"{typing.get_origin(hint).__name__.lower()}[{of}]"
    if _is_class(hint, enum.Enum):
        return f"{hint.__name__} (one of {', '.join(each.name for each in hint)})"
    return str(getattr(hint, "__name__", hint))


def _restored(hint: Any, value: Any) -> Any:
    """What JSON has no type for, as the field's type: paths, members, tuples, floats that are not finite."""
    kinds = _alternatives(hint)
    for kind in kinds:
        if isinstance(value, list) and _is_sequence(kind):
            try:
                made = [_restored(of, each) for of, each in zip(_types(kind, len(value)), value, strict=True)]
                return made if typing.get_origin(kind) is list else tuple(made)
            except ValueError:
                continue
        text = isinstance(value, str) and str not in kinds and (kind is float or _is_class(kind, PurePath))
        if text or (isinstance(value, str | int | float) and _is_class(kind, enum.Enum)):
            try:
                return _one(kind, str(value))
            except ValueError:
                continue
    return value


def _is_class(kind: Any, *classes: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, classes)


def _is_sequence(kind: Any) -> bool:
    """Whether a type is one of lists or tuples whose elements have types."""
    return typing.get_origin(kind) in (list, tuple, collections.abc.Sequence)
