"""Backends of other packages, by the entry-point group `tfloop.backends`. Listing them loads none of them."""

from __future__ import annotations

from typing import Any, Protocol

from callbacks.run_record.redaction import tell
from loop.errors import UsageError, named
from loop.options import BACKENDS
from loop.options import plugin_entry_points as entry_points

INTERFACE = "loop.backends.base.Backend"
"""The class of which a plug-in's backend must be a subclass."""


class BackendClass(Protocol):
    """The part of a backend's class that is used here. The class itself is in a higher folder: `loop.backends.base`."""

    name: str
    priority: int | None

    def available(self, workers: int) -> str | None:
        """What is missing here for this backend with so many workers; None: nothing."""

    def create(self, workers: int | None) -> Any:
        """Starts the backend."""


def origin(name: str) -> str:
    """Where a plug-in comes from: its package with its version, and its class."""
    plugin = entry_points()[name]
    package = f"{plugin.dist.name} {plugin.dist.version}, " if plugin.dist else ""
    return package + plugin.value


def load(name: str) -> BackendClass:
    """The backend class of a plug-in.

    Raises:
        UsageError: it can't be loaded, or isn't a backend of this name.
    """
    try:
        made: BackendClass = entry_points()[name].load()
    except Exception as error:  # an import may raise anything
        raise _broken(name, named(error)) from None
    # Compared by name, because importing the class here would load TensorFlow.
    bases = made.__mro__ if isinstance(made, type) else ()
    if INTERFACE not in [f"{base.__module__}.{base.__qualname__}" for base in bases]:
        raise _broken(name, f"it isn't a subclass of {INTERFACE}")
    if name in BACKENDS or made.name != name:
        raise _broken(name, f"its class has the name {made.name!r}: both must be the same, and none of tfloop's own")
    return made


def ask(name: str, workers: int = 1) -> tuple[BackendClass, str | None]:
    """The backend class of a plug-in, and why it can't be used here for so many workers; None: it can.

    Raises:
        UsageError: the plug-in can't be loaded, or `available` raises an error.
    """
    made = load(name)
    try:
        return made, made.available(workers)
    except Exception as error:
        raise _broken(name, named(error)) from None


def first_available(workers: int) -> str | None:
    """The plug-in that `auto` takes: of those that can be used, the one with the greatest priority.

    A broken plug-in is reported, and passed over.
    """
    usable = []
    for name in entry_points():
        try:
            backend, missing = ask(name, workers)
        except UsageError as error:
            tell(f"warning: {error}")
            continue
        if missing is None and backend.priority is not None:
            usable.append((-backend.priority, name))  # of equal priority, the first by name
    return min(usable)[1] if usable else None


def _broken(name: str, problem: str) -> UsageError:
    return UsageError(f"the plug-in {name!r} ({origin(name)}) is broken: {problem}; mend it, or uninstall it")
