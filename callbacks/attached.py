"""Attached: marks a training that another process has started and watches, so that it ends with that process."""

from __future__ import annotations

import hashlib
import inspect
import json

from callbacks.base import Callback, Run, SettingsError
from callbacks.types import Json


class Attached(Callback):
    """A training with a callback of another command ends when that command is gone.

    Args:
        patched: the attributes of the task's classes that the other process has changed, as JSON: a digest of each
            attribute, by the position of its class in the order of inheritance and by its name.
    """

    def __init__(self, patched: str = "{}") -> None:
        self._patched: Json = json.loads(patched)
        if not isinstance(self._patched, dict):  # it was typed by a user
            raise ValueError("give a JSON object, by position of the class")

    def on_setup(self, run: Run) -> None:
        for position, kind in enumerate(type(run.task).__mro__):
            for name, digest in self._patched.get(str(position), {}).items():
                if digest_of(kind, name) != digest:
                    raise SettingsError(
                        f"fit(workers=...): {kind.__name__}.{name} was changed after the class was made, and workers "
                        f"have another one, as they run the class's own code: make {name} a field of {kind.__name__}, "
                        "or change the code of the class"
                    )


def digest_of(kind: type, name: str) -> str:
    """A digest of an attribute of a class: of the value of a number or text, of the name of a function."""
    value = vars(kind).get(name, inspect.Parameter.empty)
    if isinstance(value, str | int | float | None):
        text = repr(value)
    else:
        text = f"{type(value).__name__} {getattr(value, '__qualname__', '')}"
    # A digest, since the text may be a secret, and the result will stand on a command line.
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
