"""Files for `--config`: the options of `tfloop train` as TOML or YAML. Imports no TensorFlow."""

from __future__ import annotations

import json
import reprlib
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from callbacks.nearest import near_file, nearest
from callbacks.run_record import redaction
from loop.errors import UsageError

MOST_BYTES = 1 << 20
"""So long a file of options is at most."""
EXCLUSIVE = (("epochs", "steps"), ("clip-norm", "clip-value"))
"""Options of which one alone can be given: one takes the place of the other that a file before it has."""


class Option(NamedTuple):
    """An option of a command line.

    Attributes:
        kind: bool, int, float or str.
        off: of a bool: what is typed for False; "": nothing.
    """

    kind: type
    off: str = ""


def arguments(paths: Sequence[Path], options: Mapping[str, Option], typed: Collection[str]) -> list[str]:
    """What is to be typed for what files say; a later file wins over an earlier one.

    Args:
        paths: the files.
        options: by their long names, without dashes: `batch-size`.
        typed: the names of those that are typed, and win over all files.

    Raises:
        UsageError: a file can't be read, or says something that can't be typed so.
    """
    found: dict[str, list[str]] = {}
    of_typed: dict[str, list[str]] = {name: [] for name in typed}
    for layer in [*(_layer(path, options) for path in paths), of_typed]:
        for pair in EXCLUSIVE:
            if any(name in layer for name in pair):
                for name in pair:
                    found.pop(name, None)
        found |= layer
    redaction.as_typed += [text.removeprefix("--set=") for texts in found.values() for text in texts]
    return [text for texts in found.values() for text in texts]


def _layer(path: Path, options: Mapping[str, Option]) -> dict[str, list[str]]:
    """What a file says, by the names of options; for a field `hidden` of the task, by the name `set hidden`."""
    found: dict[str, list[str]] = {}
    for key, value in _table(path).items():
        name = str(key).replace("_", "-")
        if name == "set":
            if not isinstance(value, dict):
                raise UsageError(f"--config {path}: set = {shown(value)}: give a table of the task's fields")
            found |= {f"set {field}": [f"--set={field}={_field(path, field, each)}"] for field, each in value.items()}
        elif name not in options:
            hint = "; the only table is [set]" if isinstance(value, dict) else nearest(name, [*options, "set"])
            raise UsageError(f"--config {path}: there is no option {shown(key)}{hint}")
        elif name in found:
            raise UsageError(f"--config {path}: {name} is there twice, with - and with _: leave one out")
        else:
            found[name] = _typed(path, name, value, options[name])
    return found


def _typed(path: Path, name: str, value: Any, option: Option) -> list[str]:
    kinds, what = {
        bool: ((bool,), "true or false"),
        int: ((int,), "a whole number"),
        float: ((int, float), "a number"),
    }.get(option.kind, ((str, int), "a text, in quotes"))
    if not _plain(value, kinds) or (isinstance(value, str) and not value.isprintable()):
        raise UsageError(f"--config {path}: {name} = {shown(value)}: give {what}")
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [option.off] if option.off else []
    return [f"--{name}={value}"]


def _field(path: Path, field: Any, value: Any) -> str:
    """The value of a task's field, as it is typed behind `--set FIELD=`."""
    if not (isinstance(field, str) and field.isidentifier()):
        raise UsageError(f"--config {path}: set has {shown(field)}, which can't be the name of a field")
    kinds = (bool, int, float, str)
    if isinstance(value, list) and all(_plain(each, kinds) for each in value):
        return f"[{', '.join(json.dumps(each) if isinstance(each, str) else str(each) for each in value)}]"
    if value is not None and not _plain(value, kinds):
        raise UsageError(
            f"--config {path}: set.{field} = {shown(value)}: give a number, a text, true or false, or a list of these"
        )
    return str(value)


def _plain(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of these kinds; a bool is no int, and whole numbers have 64 bits."""
    return type(value) in kinds and not (isinstance(value, int) and not -(2**63) <= value < 2**63)


def _table(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"--config {path}: it has more than {MOST_BYTES:,} bytes: that is no file of options")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}{near_file(path)}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path}: it is no text in UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            table = _yaml(text)
        else:
            table = tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"--config {path}: it nests deeper than options ever do") from None
    except ImportError:
        raise UsageError(f"--config {path}: YAML needs PyYAML, which isn't installed: give a TOML file") from None
    except Exception as error:  # whatever a reader has against a text
        place = getattr(error, "problem_mark", None)
        what = " ".join(str(getattr(error, "problem", None) or error).split())
        what = what.replace("end of document", f"the end, line {len(text.splitlines())}")
        at = f" (at line {place.line + 1}, column {place.column + 1})" if place else ""
        raise UsageError(f"--config {path}: it can't be read: {what}{at}") from None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"--config {path}: it holds {shown(table)}: give options, each with its value")
    return table or {}


def _yaml(text: str) -> Any:
    """What a YAML text says. Aliases, by which a short text can say endlessly much, and repeated keys are refused."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.MarkedYAMLError(None, None, f"an alias, *{event.anchor}: write it out", event.start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            for key, count in Counter(str(key.value) for key, _ in node.value).most_common(1):
                if count > 1:
                    raise yaml.MarkedYAMLError(None, None, f"{key} is there {count} times", node.start_mark)
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)  # noqa: S506 - it is a safe one


def shown(value: Any) -> str:
    """A value of a file for a message: cut short."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python doesn't write numbers of more than 4,300 digits
        return "a number of too many digits"
