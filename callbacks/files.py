"""Files: an error of writing that names the file; and the addresses of sqlite files, whatever their names are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

SQLITE = "sqlite:///"
"""How the address of a store in a sqlite file begins."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within it, an error of a file that is open, such as a full disk, names the file: the system's own doesn't."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sqlite_uri(path: Path) -> str:
    """The address of a sqlite file, with what has a meaning in an address escaped."""
    return SQLITE + re.sub(r"[?#%]", lambda found: f"%{ord(found[0]):02X}", str(path.absolute()))


def sqlite_path(uri: str) -> Path | None:
    """The sqlite file that an address means; None if it means something else."""
    return _parts(uri)[0] if uri.startswith(SQLITE) else None


def absolute_sqlite(uri: str) -> str:
    """The same address, whatever the working directory and the characters of the path; its options stay."""
    path, query = _parts(uri)
    return sqlite_uri(path) + query if uri.startswith(SQLITE) else uri


def _parts(uri: str) -> tuple[Path, str]:
    """Path and query of an address. A ? that no options follow is one of the path."""
    text = uri.removeprefix(SQLITE)
    query = re.search(r"\?\w+=[^/?]*$", text)
    return Path(unquote(text[: query.start()] if query else text)), query[0] if query else ""
