"""Hints for a name that doesn't exist: the nearest one that does."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable
from pathlib import Path

_MOST = 50
"""So many names are listed: runs may have hundreds of metrics, in whose names the message itself would be lost."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that was probably meant, "; did you mean 'x'?"; or a list of the names, of many the first ones."""
    names = list(names)
    matches = difflib.get_close_matches(name, names, 1)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"; there are: {', '.join(names[:_MOST])}{more}"


def near_file(path: Path) -> str:
    """The file in the same directory that was probably meant by a path without a file; "" if none is near."""
    with contextlib.suppress(OSError, ValueError):  # a name may be too long for a file, or hold a null character
        if path.exists():
            return ""
        # Without the name itself, which is there if it is a link that leads nowhere.
        names = sorted({file.name for file in path.parent.iterdir()} - {path.name})
        matches = difflib.get_close_matches(path.name, names, 1)
        return f"; did you mean {str(path.parent / matches[0])!r}?" if matches else ""
    return ""
