"""Address: URLs of runs in object storage, and where on this machine their files are."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from callbacks.files import expanded, launch_path, read_json
from callbacks.run_record.redaction import mask
from loop.checkpoint import lock
from loop.errors import UsageError

SCHEMES = ("s3", "gs", "az", "http", "https", "file")
_LEAST = {"http": 2, "https": 2}  # names in the path; the first one is the bucket
_FORMS = {
    "http": "http://host/bucket/path",
    "https": "https://host/bucket/path",
    "file": "file:///absolute/path",
}
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and what stands for bytes that aren't UTF-8."""
SPOOLS = "spools"
COPIES = "copies"
ABOUT = "store.json"
"""Beside a spool's run directory: its URL, the nonce of its last lease, and whether all was delivered."""
_TAKEN = (lock.NAME, ABOUT)  # by files beside the directory of a run on this machine


def is_url(text: str | os.PathLike[str]) -> bool:
    """Whether a run is named by a URL of object storage or of a shared disk."""
    return str(text).partition("://")[0] in SCHEMES and "://" in str(text)


def check_run_dir(run_dir: object) -> None:
    """Refuses what can't be a run directory.

    Raises:
        UsageError: it is neither text nor a path.
    """
    if run_dir is not None and (not isinstance(run_dir, str | Path) or "\0" in str(run_dir)):
        raise UsageError(f"run_dir={run_dir!r:.200}: give a path, a URL, or None for a new directory below runs/")


def url_named(run_dir: str | Path | None) -> str | None:
    """The URL of a run in a store, named by the URL or by its directory on this machine; None: it isn't in a store.

    Raises:
        UsageError: see `check_run_dir` and `read_url`.
    """
    check_run_dir(run_dir)
    if run_dir is None:
        return None
    return read_url(str(run_dir)) if is_url(run_dir) else url_of(launch_path(run_dir))


def read_url(text: str, is_folder: bool = False) -> str:
    """A URL without slashes at its end, checked; always in the same spelling.

    Args:
        text: what was typed.
        is_folder: whether it is a folder of runs, which may be a whole bucket.

    Raises:
        UsageError: it isn't a URL of a store, has no bucket or path, or secrets stand in it.
    """
    if not is_url(text):
        kinds = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise UsageError(f"{mask(text)}: this isn't a URL of a store: give one that begins with {kinds}")
    # Before it is split: `urlsplit` drops some of these characters, which leaves the URL of something else.
    if _UNUSABLE.search(unquote(text, errors="surrogateescape")):
        raise UsageError(f"{mask(text)!r}: give a URL without control characters, in UTF-8")
    parts = urlsplit(text)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without the parts that may hold secrets
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            f"{shown}: give a URL without user, query and fragment; credentials come from the environment, or from "
            "the machine's role"
        )
    # One spelling for one run: its directory here is a hash of it.
    path = re.sub(r"/+", "/", unquote(parts.path)).strip("/")
    _check_path(parts, path, shown, is_folder)
    return f"{parts.scheme}://{parts.netloc}/{quoted(path)}".removesuffix("/")


def _check_path(parts: SplitResult, path: str, shown: str, is_folder: bool) -> None:
    """Refuses a path that can't be that of a run, or of a folder of runs."""
    names = path.split("/") if path else []
    if {".", ".."} & set(names):  # they would lead out of what the rest names
        raise UsageError(f"{shown}: give a URL without . and .. in its path")
    least = _LEAST.get(parts.scheme, 1) - is_folder
    if bool(parts.netloc) == (parts.scheme == "file") or len(names) < least:
        raise UsageError(f"{shown}: give {_FORMS.get(parts.scheme, f'{parts.scheme}://bucket/path of its own')}")
    if not is_folder and names[-1] in _TAKEN:
        raise UsageError(f"{shown}: give a run another name than {' and '.join(_TAKEN)}, which files beside it have")


def quoted(path: str) -> str:
    """A path as it stands in a URL: only what has a meaning there is escaped, so that people can read the rest."""
    return re.sub(r"[%?# ]", lambda character: f"%{ord(character[0]):02X}", path)


def run_dir(text: str) -> str | Path:
    """What was typed as a run directory: a checked URL, or a path."""
    return read_url(text) if "://" in text else Path(text)


def place(url: str, kind: str, home: Path | None = None) -> Path:
    """The directory on this machine that belongs to a URL: `SPOOLS` has what is written, `COPIES` what is read.

    Args:
        url: of a run, or of a folder of runs.
        kind: `SPOOLS` or `COPIES`.
        home: where programs keep their state; None: as XDG_STATE_HOME says.
    """
    base = os.environ.get("XDG_STATE_HOME")
    state = home or (Path(base) if base and Path(base).is_absolute() else expanded("~/.local/state"))
    # Copies of runs lie side by side as the runs do, so that their folder can be listed.
    whose = url if kind == SPOOLS else url.rpartition("/")[0]
    key = hashlib.sha256(whose.encode()).hexdigest()[:16]
    # Without links, as a run has its directory: the two are compared, and a home directory may be a link.
    return (state / "tfloop" / "store" / kind).resolve() / key


def make(directory: Path) -> None:
    """Makes a directory of `place`, for this user alone.

    Raises:
        UsageError: it can't be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:  # such as in a container, whose user has a home directory of another
        raise UsageError(
            f"{directory} can't be made ({error.strerror}): set XDG_STATE_HOME to a directory that can be written"
        ) from None


def directory_of(url: str, kind: str, home: Path | None = None) -> Path:
    """The run directory of a URL on this machine; see `place`."""
    return place(url, kind, home) / unquote(url.rpartition("/")[2])


def url_of(directory: Path) -> str | None:
    """The URL to which a run directory belongs, if it is the spool of one; a later attempt knows it by that."""
    real = Path(os.path.realpath(launch_path(directory)))  # not `resolve`, which refuses links that lead in a circle
    url = read_json(real.parent / ABOUT).get("url")
    # Only if it is the place of that URL on this machine: a foreign directory could name any store to be contacted.
    return url if isinstance(url, str) and directory_of(url, SPOOLS) == real else None


def is_delivered(directory: Path) -> bool:
    """Whether all of the run in this spool has been delivered; True for a run that has no URL."""
    return url_of(directory) is None or bool(read_json(directory.parent / ABOUT).get("delivered"))


def index_of(directory: Path) -> Path:
    """The file that says of which run in a store a directory is a copy, and what the store has of it."""
    # A hash: copies of other runs lie beside it, and one may have the name of this one with an ending.
    return directory.with_name(f".{hashlib.sha256(os.fsencode(directory.name)).hexdigest()}.json")


def checkpoints_of_copy(directory: Path) -> dict[str, int] | None:
    """The bytes of each checkpoint that a run in a store has, by name; None: the directory isn't a copy of one."""
    return None if url_of_copy(directory) is None else read_json(index_of(directory)).get("checkpoints", {})


def url_of_copy(directory: Path) -> str | None:
    """The URL of a run of which a directory is a copy."""
    url = read_json(index_of(directory)).get("url")
    if not isinstance(url, str) or not is_url(url):
        return None
    return url if directory_of(url, COPIES) == directory.resolve() else None
