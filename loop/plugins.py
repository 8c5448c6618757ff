"""Engines of other packages, by the entry-point group `tfloop.backends`. Listing them loads none of them."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from callbacks.redact import tell
from loop.errors import UsageError
from loop.options import BACKENDS

if TYPE_CHECKING:
    from loop.backends.base import Backend

GROUP = "tfloop.backends"


def found() -> dict[str, EntryPoint]:
    """The plug-ins that are installed, by the name for `--backend`."""
    return {each.name: each for each in sorted(entry_points(group=GROUP), key=lambda each: each.name)}


def origin(name: str) -> str:
    """Where a plug-in comes from: its package with its version, and its class."""
    plugin = found()[name]
    return (f"{plugin.dist.name} {plugin.dist.version}, " if plugin.dist else "") + plugin.value


def load(name: str) -> type[Backend]:
    """The engine class of a plug-in.

    Raises:
        UsageError: it can't be loaded, or is no engine of this name.
    """
    from loop.backends.base import Backend

    try:
        made = found()[name].load()
    except Exception as error:  # whatever it does
        raise _broken(name, f"{type(error).__name__}: {error}") from None
    if not (isinstance(made, type) and issubclass(made, Backend)):
        raise _broken(name, "it is no subclass of loop.backends.base.Backend")
    if name in BACKENDS or made.name != name:
        raise _broken(name, f"its class has the name {made.name!r}: both must be the same, and none of tfloop's own")
    return made


def ask(name: str, workers: int = 1) -> tuple[type[Backend], str | None]:
    """The engine class of a plug-in, and why it can't be used here for so many workers; None: it can.

    Raises:
        UsageError: it can't be loaded, or can't say.
    """
    made = load(name)
    try:
        return made, made.available(workers)
    except Exception as error:
        raise _broken(name, f"{type(error).__name__}: {error}") from None


def first_available(workers: int) -> str | None:
    """The plug-in that `auto` takes: of those that can be used, the one of the greatest priority.

    One that is broken is told, and passed over.
    """
    usable = []
    for name in found():
        try:
            engine, missing = ask(name, workers)
        except UsageError as error:
            tell(f"warning: {error}")
            continue
        if missing is None and engine.priority is not None:
            usable.append((-engine.priority, name))
    return min(usable)[1] if usable else None


def _broken(name: str, problem: str) -> UsageError:
    return UsageError(f"the plug-in {name!r} ({origin(name)}) is broken: {problem}; mend it, or uninstall it")
