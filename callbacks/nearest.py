"""What is said of a name that doesn't exist: the nearest one that does."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at the name that was probably meant: "; did you mean 'x'?", or which there are."""
    names = list(names)
    found = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {found[0]!r}?" if found else f"; there are: {', '.join(names)}"
