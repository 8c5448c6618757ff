"""Files for `--config`: the options of `tfloop train` as TOML or YAML. Imports no TensorFlow."""

from __future__ import annotations

import itertools
import reprlib
import tomllib
import typing
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from callbacks.nearest import near_file, nearest
from callbacks.run_record import redaction
from loop.errors import UsageError
from loop.target.fields import typed as typed_field

MOST_BYTES = 1 << 20
"""The greatest size of a file of options."""
EXCLUSIVE = (("epochs", "steps"), ("clip-norm", "clip-value"))
"""Options of which only one can be given: it replaces the other of an earlier file."""


class Option(NamedTuple):
    """An option of a command line."""

    kind: type  # bool, int, float or str; of an option that may be repeated, `list[str]`
    off: str = ""  # of a bool: what is typed for False; "": nothing


def arguments(paths: Sequence[Path], options: Mapping[str, Option], typed: Collection[str]) -> list[str]:
    """The arguments of a command line that say what files say; a later file wins over an earlier one.

    The options are by their long names, without dashes: `batch-size`. Those that are typed win over all files.

    Raises:
        UsageError: a file can't be read, or says something that can't be typed so.
    """
    arguments_of: dict[str, list[str]] = {}
    # What is typed is the last layer. It has no arguments here, and takes those of files away.
    of_typed: dict[str, list[str]] = {name: [] for name in typed}
    layers = [_layer(path, options) for path in paths]
    for layer in [*layers, of_typed]:
        for pair in EXCLUSIVE:
            if not layer.keys().isdisjoint(pair):
                for name in pair:
                    arguments_of.pop(name, None)
        arguments_of |= layer
    from_files = list(itertools.chain.from_iterable(arguments_of.values()))
    # Secrets in a file are hidden in all output, as those on the command line are.
    redaction.as_typed += [text.removeprefix("--set=") for text in from_files]
    return from_files


def _layer(path: Path, options: Mapping[str, Option]) -> dict[str, list[str]]:
    """What a file says, by the names of options; for a field `hidden` of the task, by the name `set hidden`."""
    layer: dict[str, list[str]] = {}
    for key, value in _table(path).items():
        name = str(key).replace("_", "-")  # both may be written, as `fit` and the command line have them
        if name == "set":
            if not isinstance(value, dict):
                raise UsageError(f"--config {path}: set = {shown(value)}: give a table of the task's fields")
            # A layer of its own for each field: a later file replaces single fields, and not the table.
            for field, content in value.items():
                layer[f"set {field}"] = [f"--set={field}={_field(path, field, content)}"]
        elif name not in options:
            hint = "; the only table is [set]" if isinstance(value, dict) else nearest(name, [*options, "set"])
            raise UsageError(f"--config {path}: there is no option {shown(key)}{hint}")
        elif name in layer:
            raise UsageError(f"--config {path}: {name} is there twice, with - and with _: leave one out")
        else:
            layer[name] = _typed(path, name, value, options[name])
    return layer


_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}
"""By the type of an option: the types that a file may have for it, and what to give, in words."""

_OF_TEXT = ((str, int), "a text, in quotes")
"""The same for all other options; also a number, since `steps-per-call` and others are a number or a word."""


def _typed(path: Path, name: str, value: object, option: Option) -> list[str]:
    """The words of a command line that say what a file says of an option."""
    if typing.get_origin(option.kind) is list and isinstance(value, list):
        return list(itertools.chain.from_iterable(_typed(path, name, item, option) for item in value))
    kinds, what = _KINDS.get(option.kind, _OF_TEXT)
    if not _plain(value, kinds) or (isinstance(value, str) and not value.isprintable()):
        raise UsageError(f"--config {path}: {name} = {shown(value)}: give {what}")
    return words(name, value, option)


def words(name: str, value: object, option: Option) -> list[str]:
    """The words of a command line that give an option a value."""
    if value is True:
        return [f"--{name}"]
    if value is False:  # without a word for it, an option is off when it isn't typed
        return [option.off] if option.off else []
    return [f"--{name}={value}"]


def _field(path: Path, field: object, value: object) -> str:
    """The value of a task's field, as it is typed after `--set FIELD=`."""
    if not (isinstance(field, str) and field.isidentifier()):
        raise UsageError(f"--config {path}: set has {shown(field)}, which can't be the name of a field")
    parts = value if isinstance(value, list) else [value]
    if value is not None and not all(_plain(part, (bool, int, float, str)) for part in parts):
        raise UsageError(
            f"--config {path}: set.{field} = {shown(value)}: give a number, a text, true or false, or a list of these"
        )
    return typed_field(value)


def _plain(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of these kinds; a bool isn't an int, and whole numbers have 64 bits."""
    return type(value) in kinds and not (isinstance(value, int) and not -(2**63) <= value < 2**63)


def _table(path: Path) -> dict[str, object]:
    """What a file says."""
    text = _text(path)
    try:
        table = _yaml(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"--config {path}: it nests deeper than options ever do") from None
    except Exception as error:  # the readers of TOML and YAML have different ones
        raise UsageError(f"--config {path}: it can't be read: {_why(error, text)}") from None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"--config {path}: it holds {shown(table)}: give options, each with its value")
    return table or {}


def _text(path: Path) -> str:
    """The text of a file."""
    try:
        # Never more than that: the path may be one of an endless device, or of a data set.
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"--config {path}: it has more than {MOST_BYTES:,} bytes: that isn't a file of options")
        return content.decode("utf-8-sig")  # editors on Windows put a mark in front
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}{near_file(path)}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path}: it isn't text in UTF-8 ({error.reason} at byte {error.start})") from None


def _why(error: Exception, text: str) -> str:
    """Why a text can't be read, and where."""
    what = " ".join(str(getattr(error, "problem", None) or error).split())
    what = what.replace("end of document", f"the end, line {len(text.splitlines())}")
    mark = getattr(error, "problem_mark", None)
    return f"{what} (at line {mark.line + 1}, column {mark.column + 1})" if mark else what


def _yaml(text: str) -> object:
    """What a YAML text says. Refuses aliases, with which a short text grows without end, and repeated keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node, index: object) -> yaml.Node:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.MarkedYAMLError(None, None, f"an alias, *{event.anchor}: write it out", event.start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> object:
            # PyYAML would silently take the last one.
            for key, count in Counter(str(key.value) for key, _ in node.value).most_common(1):
                if count > 1:
                    raise yaml.MarkedYAMLError(None, None, f"{key} is there {count} times", node.start_mark)
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)  # noqa: S506 - it is a safe one


def shown(value: object) -> str:
    """A value of a file for a message: cut short."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python doesn't write numbers of more than 4,300 digits
        return "a number of too many digits"
