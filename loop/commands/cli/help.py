"""Help by theme: which themes there are, and how a help that has many entries is grouped by them.

The themes are typer's `rich_help_panel`. The help itself is plain text, since the import of rich takes a while; on a
terminal its headings are bold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from loop.commands import terminal

# Options:
FIRST = "Used most"
LENGTH = "What is trained, and how long"
DEVICES = "Where (devices and servers)"
HOSTS = "Where (several hosts)"
NUMBERS = "Numbers"
SPEED = "Speed and memory"
SAVING = "Saving and going on"
TRACKING = "Tracking"
TROUBLE = "Looking for a mistake"
TRIALS = "Trials"
REST = "Options"  # those without a theme
ARGUMENTS = "Arguments"

# Commands:
TRAIN = "Train"
LOOK = "Look at runs"
CHECK = "Check"
TUNE = "Tune"
USE = "Use the model"

_ORDER = (
    ARGUMENTS, TRIALS, FIRST, LENGTH, NUMBERS, SAVING, TRACKING, SPEED, DEVICES, HOSTS, TROUBLE, REST,
    TRAIN, LOOK, CHECK, TUNE, USE,
)  # fmt: skip
"""The order in a help."""

_GROUPED = 12
"""A command of more options than this has them grouped."""

Row = tuple[str, str, str]
"""The theme of an entry, its name, and its text."""


class Command(TyperCommand):
    """A command whose help has its options by theme."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:  # it isn't hidden
                shown.append((parameter, record))
        rows: list[Row] = []
        for parameter, record in shown:
            theme = getattr(parameter, "rich_help_panel", None) or REST
            if parameter.param_type_name == "argument":
                theme = ARGUMENTS
            elif len(shown) <= _GROUPED:  # a short help needs no headings
                theme = REST
            rows.append((theme, *record))
        _write(formatter, rows)


class Group(TyperGroup):
    """A group whose help has its commands by theme, and groups of commands before others."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows: list[Row] = []
        # `sorted` is stable: within groups, and within commands, the order is that in which they were added.
        for name in sorted(self.list_commands(ctx), key=lambda name: not isinstance(self.commands[name], TyperGroup)):
            command = self.commands[name]
            if not command.hidden:
                theme = str(getattr(command, "rich_help_panel", LOOK))
                rows.append((theme, name, command.get_short_help_str(1000)))
        _write(formatter, rows)


def _write(formatter: Any, rows: Sequence[Row]) -> None:
    """Writes rows by their themes; in all of them the texts are flush."""
    # Each theme is a list of its own to the formatter: padded by hand, all of them have one column of texts.
    widest = max(len(name) for _, name, _ in rows)
    entries = defaultdict(list)
    for theme, name, text in rows:
        entries[theme].append((name.ljust(min(widest, 30)), text))
    for theme in sorted(entries, key=_ORDER.index):
        with formatter.section(terminal.title(theme)):
            formatter.write_dl(entries[theme])


def add(app: typer.Typer, theme: str, commands: dict[str, Callable[..., None]], **classes: type[Command]) -> None:
    """Adds the commands of a theme to an application, in order."""
    for name, function in commands.items():
        app.command(name, cls=classes.get(name, Command), rich_help_panel=theme)(function)
