"""Finds run directories: by name, by the beginning of a name, by path, or as `latest`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from callbacks.run_record.record import ABOUT, Reader, begun, is_run, printable, read_about
from callbacks.run_record.values import as_dict
from loop.checkpoint.store import address
from loop.errors import UsageError
from loop.run import trust

ROOT = Path("runs")
LATEST = "latest"


def find(root: Path) -> list[Path]:
    """The run directories below `root`.

    Raises:
        UsageError: there is no such directory, though it isn't the default one.
    """
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and is_run(path))
    except FileNotFoundError:
        if root == ROOT:  # which the first run makes
            return []
        raise UsageError(f"--root {printable(str(root))}: there is no such directory") from None
    except OSError as error:
        raise UsageError(f"--root {printable(str(root))}: can't be read ({error.strerror})") from None


def locate(root: Path, text: str, checkpoints: bool = True) -> Path:
    """The run directory for a text: a name in `root`, the beginning of a name, a path, a URL, or `latest`.

    Args:
        root: where runs are looked for.
        text: what was typed.
        checkpoints: whether those of a run at a URL are wanted, too.

    Raises:
        UsageError: there is none, or more than one.
    """
    if address.is_url(text):
        return copied(text, checkpoints)
    if not text:
        raise UsageError("the name of a run is empty: give one, or latest")
    # A whole name wins over the beginning of another one.
    if text != LATEST and (path := _whole(root, text)):
        return path
    # A name has no slash: what is left is a path to something else.
    if "/" in text or text in (".", ".."):
        _check_readable(Path(text))
        raise UsageError(f"{printable(text)} isn't a run directory: there is no run.json, and no journal")

    paths = {path.name: path for path in find(root)}
    if not paths:
        raise UsageError(
            f"{printable(text)}: there are no runs in {printable(str(root))}: --root DIR says where they are"
        )
    return _latest(paths) if text == LATEST else _by_prefix(root, paths, text)


def _check_readable(path: Path) -> None:
    """Raises a `UsageError` if there is something at a path, and this user may not look into it."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)  # to list its names is one right,
            (path / ABOUT).exists()  # and to look at what they name another
    except OSError as error:
        raise UsageError(f"{printable(str(path))}: can't be read ({error.strerror}): make it readable") from None


def _whole(root: Path, text: str) -> Path | None:
    """The run of this whole name in `root`, or of this path; None if there is neither. Refuses two different runs."""
    candidates = [Path(text)]
    if text.split("/")[0] not in ("", ".", ".."):  # else it is a path that says where it begins
        candidates.append(root / text)
    paths = list(filter(is_run, candidates))
    if len(paths) == 2 and not paths[0].samefile(paths[1]):
        here, there = (printable(str(path)) for path in paths)
        raise UsageError(f"{here} is a run here, and one in {printable(str(root))}, too: give ./{here} or {there}")
    return paths[0] if paths else None


def _latest(paths: Mapping[str, Path]) -> Path:
    return max(paths.values(), key=begun)


def _by_prefix(root: Path, paths: Mapping[str, Path], prefix: str) -> Path:
    """The only run whose name has this prefix."""
    names = [name for name in paths if name.startswith(prefix)]
    if len(names) == 1:
        return paths[names[0]]
    if names:
        some = ", ".join(map(printable, names[:3]))
        if len(names) > 3:
            some += ", ..."
        raise UsageError(f"{printable(prefix)}: {len(names)} runs begin so: {some}")

    close = difflib.get_close_matches(prefix, paths, 1)
    hint = f"did you mean {printable(close[0])!r}?" if close else f"the latest is {_latest(paths).name!r}"
    raise UsageError(f"{printable(prefix)}: no run of that name in {printable(str(root))}; {hint}")


def copied(url: str, checkpoints: bool = True) -> Path:
    """A copy of the run at a URL, as the store has it now. If this user has trained it, its task is trusted here, too.

    Args:
        url: of the run.
        checkpoints: whether they are wanted, too.

    Raises:
        UsageError: there is no run.
        StoreError: the store doesn't answer.
    """
    from loop.checkpoint.store import copies

    url = address.read_url(url)
    path = copies.copy(url, checkpoints)
    # Trust is by the directory: a run that this user has trained into the store may be run from its copy, too.
    if target := trust.target_of(address.directory_of(url, address.SPOOLS)):
        trust.note(path, target)
    return path


def reader(path: Path) -> Reader:
    """Reads a run directory, or the copy of a run in a store; of a copy, checkpoints are what the store has."""
    return Reader(path, elsewhere=address.checkpoints_of_copy(path))


def root(text: str | Path) -> Path:
    """The folder of runs for a path or a URL; a default is a path already. The runs at a URL are copied.

    Raises:
        StoreError: the store doesn't answer.
    """
    if not address.is_url(text):
        return Path(text)
    from loop.checkpoint.store import copies

    return copies.copies_below(address.read_url(str(text), is_folder=True))


def named(text: str) -> Path:
    """The path for a text: as `locate` finds a run in `runs/`; or else a path, such as that of a checkpoint.

    Raises:
        UsageError: there are runs, and none of this name.
    """
    if address.is_url(text):
        return copied(text)
    if text != LATEST and (run := _whole(ROOT, text)):
        return run
    path = Path(text)
    # Without any runs, the text is taken for a path: the caller reports that there is no such file.
    if (path.exists() and text != LATEST) or "/" in text or not find(ROOT):
        return path
    return locate(ROOT, text)


def checkpointed(path: Path, option: str = "") -> Path:
    """The same path, if it is a checkpoint, or a run directory that has one.

    Raises:
        UsageError: it isn't.
    """
    from loop.checkpoint.checkpoint_files import MANIFEST, complete  # which loads NumPy

    if not os.path.lexists(path / MANIFEST) and not complete(path / "checkpoints"):
        refuse_sweep(path, option)
        raise UsageError(
            f"{option}{printable(str(path))}: no checkpoint there: give a run directory or a directory step-<8 digits>"
        )
    return path


def refuse_sweep(path: Path, option: str = "") -> None:
    """Refuses the directory of a sweep, which has no weights of its own, but its trials have.

    Raises:
        UsageError: it is one; the message names the best trial, if there is one yet.
    """
    about = read_about(path)
    if "sweep" in about:
        trial = path / str(as_dict(about.get("best")).get("trial", "trial-000"))
        raise UsageError(
            f"{option}{printable(str(path))} is a sweep: give a trial of it, such as {printable(str(trial))}"
        )
